"""Which weights a loss trains, and where they and its coefficients are after a move or a copy."""

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictParams
from torch import Tensor, nn
from torchrl.modules import IndependentNormal, ProbabilisticActor

import composite_losses as cl
from tests.cases.builders_fl import (
    CLASSES,
    DOORS,
    KL,
    LOSSES,
    PAIR,
    build,
    make_data,
    networks,
    outcome,
    same,
    total_loss,
)
from tests.tolerances import assert_close

# Only the updaters' own tests attach one.
pytestmark = pytest.mark.filterwarnings("ignore:No target network updater:UserWarning")
MODES = pytest.mark.parametrize("functional", [True, False], ids=["functional", "modules"])
HEADS = pytest.mark.parametrize("heads", [PAIR, "normal"], ids=["composite", "single"])
LAYOUTS = {"B": ((6,), False), "BT": ((3, 4), False), "BA": ((4, 2), True)}
DELAYED = {
    "PPOLoss": {"delay_actor": True},
    "ClipPPOLoss": {"delay_actor": True},
    "KLPENPPOLoss": {"delay_actor": True},
    "PolicyLoss": {"delay_actor": True},
    "ReinforceLoss": {"delay_value": True},
}
# options whose values must survive a copy
RICH: dict[str, dict[str, Any]] = {
    "PPOLoss": {"delay_actor": True, "max_importance_ratio": 1.02},
    "ClipPPOLoss": {
        "delay_actor": True,
        "clip_value": 0.2,
        "entropy_coeff": {"move": 0, "gear": 2},
    },
    "ClipPPOLoss-per_head": {"head_weights": {"gear": 0.3}},
    "KLPENPPOLoss": {"beta": 3.0, "delay_actor": True},
    "A2CLoss": {"entropy_coeff": 0.3, "critic_coeff": 0.2},
    "ReinforceLoss": {"delay_value": True, "gamma": 0.5},
}


def data_for(name: str, heads: Any = PAIR, layout: str = "B") -> TensorDict:
    shape, group = LAYOUTS[layout]
    return make_data(heads, shape, group=group, source="all" if name in KL else "stored")


def as_double(td: TensorDict) -> TensorDict:
    return td.apply(lambda x: x.double() if x.is_floating_point() else x)


def modules_of(loss: Any) -> list[nn.Module]:
    """The original networks: of a loss without critic, the actor alone."""
    return [net for net in (loss.actor_network, loss.critic_network) if net is not None]


def made_of(name: str, heads: Any, **options: Any) -> tuple[Any, list[nn.Module]]:
    """A loss and the networks it was given."""
    actor, critic = networks(heads)
    loss = LOSSES.get(name, CLASSES.get(name))(actor, critic, **options)
    return loss, [actor] if name == "ReinforceLoss-alone" else [actor, critic]


# --- 121: no copy --------------------------------------------------------------------------------


@MODES
@HEADS
@pytest.mark.parametrize("name", LOSSES)
def test_the_weights_are_the_networks_own(name: str, heads: Any, functional: bool) -> None:
    """Case 121: every parameter of actor and critic once, the very same memory, and no other."""
    loss, nets = made_of(name, heads, functional=functional)
    own = [p for net in nets for p in net.parameters()]
    held = list(loss.parameters())
    assert sorted(p.data_ptr() for p in held) == sorted(p.data_ptr() for p in own)
    assert len({id(p) for p in held}) == len(held)
    assert sum(p.numel() for p in held) == sum(p.numel() for p in own) > 0
    if functional:
        for tree, net in zip(
            (loss.actor_network_params, loss.critic_network_params), nets, strict=False
        ):
            assert {p.data_ptr() for p in tree.values(True, True)} == {
                p.data_ptr() for p in net.parameters()
            }


@MODES
@HEADS
@pytest.mark.parametrize("name", LOSSES)
def test_a_step_moves_the_original_networks(name: str, heads: Any, functional: bool) -> None:
    """Case 121: after a step on ``loss.parameters()`` the actor itself acts otherwise."""
    loss, nets = made_of(name, heads, functional=functional)
    data = data_for(name, heads)
    where = {"loc": "loc"} if heads == "normal" else {"logits": ("params", "gear", "logits")}
    key = next(iter(where.values()))

    def acts() -> list[Tensor]:
        with torch.no_grad():
            out = [nets[0][0](data.clone())[key].clone()]
            return out + [net(data.clone())["state_value"].clone() for net in nets[1:]]

    before = acts()
    optimiser = torch.optim.SGD(loss.parameters(), lr=0.1)
    total_loss(loss(data)).backward()
    gradients = [p.grad.clone() for net in nets for p in net.parameters()]
    assert all(g.isfinite().all() for g in gradients)
    weights = [p.detach().clone() for net in nets for p in net.parameters()]
    optimiser.step()
    for left, right in zip(before, acts(), strict=True):
        assert not torch.equal(left, right)
    moved = [p for net in nets for p in net.parameters()]
    for weight, gradient, now in zip(weights, gradients, moved, strict=True):
        assert_close(now.detach(), weight - 0.1 * gradient)


@MODES
def test_a_shared_trunk_is_held_once(functional: bool) -> None:
    """Case 121: parameters that actor and critic share are one parameter of the loss."""
    actor, _ = networks(PAIR)
    trunk = actor[0].module.net[0]
    value = nn.Sequential(trunk, nn.Tanh(), nn.Linear(6, 1))
    critic = TensorDictModule(value, ["observation"], ["state_value"])
    loss = cl.ClipPPOLoss(actor, critic, functional=functional)
    held = list(loss.parameters())
    unique = {p.data_ptr(): p for net in (actor, critic) for p in net.parameters()}
    assert sorted(p.data_ptr() for p in held) == sorted(unique)


# --- 122: networks without parameters ------------------------------------------------------------


class Halves(nn.Module):
    """The first half of the observation as the mean, a constant scale."""

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        loc = observation[..., :2].tanh()
        return loc, torch.full_like(loc, 0.7)


class Total(nn.Module):
    """The sum of the observation."""

    def forward(self, observation: Tensor) -> Tensor:
        return observation.sum(-1, keepdim=True)


def bare() -> tuple[nn.Module, nn.Module]:
    net = TensorDictModule(Halves(), ["observation"], ["loc", "scale"])
    actor = ProbabilisticActor(
        net,
        in_keys=["loc", "scale"],
        distribution_class=IndependentNormal,
        return_log_prob=True,
    )
    return actor, TensorDictModule(Total(), ["observation"], ["state_value"])


@MODES
@pytest.mark.parametrize("name", LOSSES)
def test_parameterless_networks(name: str, functional: bool) -> None:
    """Case 122: actor and critic without a weight: the state goes round, the numbers stay."""
    first, second = (LOSSES[name](*bare(), functional=functional).eval() for _ in range(2))
    assert not list(first.parameters())
    data = data_for(name, "normal")
    before = first(data)
    # log N(a; tanh(x), 0.7), two dims, against the stored one: the reference for the ratio losses
    score = torch.distributions.Normal(data["observation"][..., :2].tanh(), 0.7)
    log_prob = score.log_prob(data["action"]).sum(-1)
    if name in ("A2CLoss", "score"):
        expected = -(log_prob * data["advantage"].squeeze(-1)).mean()
        assert_close(before["loss_objective"], expected)
    if name == "PPOLoss":
        ratio = (log_prob - data["action_log_prob"]).exp()
        assert_close(before["loss_objective"], -(ratio * data["advantage"].squeeze(-1)).mean())
    for buffer in second.buffers():
        buffer.add_(0.25)
    result = second.load_state_dict(first.state_dict(), strict=True)
    assert not result.missing_keys and not result.unexpected_keys
    after = second(data)
    for key, value in before.items():
        assert torch.equal(after[key], value), key


# --- 124: moves ----------------------------------------------------------------------------------


def tensors_of(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Every tensor that an object's attributes reach, through containers and modules."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, TensorDictParams):
        yield from value._param_td.values(True, True)
    elif isinstance(value, TensorDictBase):
        yield from value.values(True, True)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_of(item, seen)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from tensors_of(item, seen)
    elif isinstance(value, nn.Module) or type(value).__module__.startswith("composite_losses"):
        yield from tensors_of(getattr(value, "__dict__", {}), seen)


def held_by(loss: Any) -> list[Tensor]:
    """Every tensor of the loss, apart from the networks a functional loss only borrows."""
    seen = {id(net) for net in modules_of(loss)} if loss.functional else set()
    seen |= {id(m) for net in modules_of(loss) for m in net.modules()} if loss.functional else set()
    return list(tensors_of(loss, seen))


@MODES
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", LOSSES)
def test_meta_and_back(name: str, layout: str, functional: bool) -> None:
    """Case 124: on ``meta`` nothing stays behind and a step works; back on the CPU, as before."""
    group = LAYOUTS[layout][1]
    data = data_for(name, PAIR, layout)
    loss = build(name, PAIR, group=group, functional=functional)
    options = RICH.get(name, {}) if functional else {}
    if options and layout == "B":
        loss = build(name, PAIR, **options)
    loss.eval()
    state = {key: value.clone() for key, value in loss.state_dict().items()}
    discount = {k: v.clone() for k, v in loss.named_buffers() if k not in state}
    expected = outcome(loss, data)
    loss.zero_grad(set_to_none=True)

    loss.to("meta")
    assert {t.device.type for t in held_by(loss)} == {"meta"}
    out = loss(data.to("meta"))
    assert {value.device.type for value in out.values()} == {"meta"}
    total_loss(out).backward()
    assert all(p.grad.device.type == "meta" for p in loss.parameters())

    loss.to_empty(device="cpu").load_state_dict(state, strict=True)
    for key, value in discount.items():  # not part of the state
        loss.get_buffer(key).copy_(value)
    assert {t.device.type for t in held_by(loss)} == {"cpu"}
    same(outcome(loss, data), expected)


@MODES
@HEADS
@pytest.mark.parametrize("name", LOSSES)
def test_double_and_back(name: str, heads: Any, functional: bool) -> None:
    """Case 124: ``.double()`` moves weights, coefficients and estimator; ``.float()`` undoes it."""
    options = RICH.get(name, {}) if functional and heads == PAIR else {}
    loss = build(name, heads, functional=functional, **options).eval()
    if loss.critic_network is not None:
        loss.make_value_estimator(gamma=0.9, lmbda=0.8)
    data = data_for(name, heads)
    data["next", "state_value"] = torch.zeros(6, 1)  # TorchRL's estimators want both, or none
    drop = [] if loss.critic_network is None else ["advantage"]
    expected = outcome(loss, data.exclude(*drop))
    loss.zero_grad(set_to_none=True)
    pointers = [id(p) for p in loss.parameters()]

    loss.double()
    kinds = {t.dtype for t in held_by(loss) if t.is_floating_point()}
    assert kinds == {torch.float64}
    out = loss(as_double(data.exclude(*drop)))
    assert {value.dtype for value in out.values()} == {torch.float64}
    for key, value in out.items():
        torch.testing.assert_close(value.float(), expected[0][key], rtol=1e-4, atol=1e-5)

    loss.float()
    assert {t.dtype for t in held_by(loss) if t.is_floating_point()} == {torch.float32}
    assert [id(p) for p in loss.parameters()] == pointers  # an optimiser keeps its parameters
    same(outcome(loss, data.exclude(*drop)), expected)


def test_coefficients_follow_the_parameters_at_construction() -> None:
    """Case 124: networks that are on a device already: the coefficients are there too."""
    actor, critic = networks(PAIR)
    loss = cl.ClipPPOLoss(actor.to("meta"), critic.to("meta"), clip_value=0.2)
    assert {b.device.type for b in loss.buffers()} == {"meta"}
    assert loss.clip_epsilon.device.type == loss.entropy_coeff.device.type == "meta"


# --- copies --------------------------------------------------------------------------------------

COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda loss: pickle.loads(pickle.dumps(loss)),
    "deepcopy twice": lambda loss: copy.deepcopy(copy.deepcopy(loss)),
}


@MODES
@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", DOORS)
def test_copies_are_independent(name: str, how: str, functional: bool) -> None:
    """A copy gives the same numbers from weights of its own; training it leaves the original."""
    loss = build(name, PAIR, **(RICH.get(name, {}) if functional else {"functional": False}))
    loss.set_keys(advantage="gae")
    loss.eval()
    data = data_for(name).rename_key_("advantage", "gae")
    twin = COPIES[how](loss)
    expected = outcome(loss, data)
    same(outcome(twin, data), expected)
    assert twin.out_keys == loss.out_keys and twin.in_keys == loss.in_keys
    assert not {p.data_ptr() for p in twin.parameters()} & {p.data_ptr() for p in loss.parameters()}
    with torch.no_grad():
        for tensor in (*twin.parameters(), *twin.buffers()):
            tensor.add_(0.05)
    assert any(
        not torch.equal(value, expected[0][key]) for key, value in outcome(twin, data)[0].items()
    )
    same(outcome(loss, data), expected)


@MODES
@pytest.mark.parametrize("name", LOSSES)
def test_state_goes_round(name: str, functional: bool) -> None:
    """A strict ``load_state_dict`` restores weights, targets and every coefficient."""
    options = RICH.get(name, {}) if functional else {"functional": False}
    loss, other = (build(name, PAIR, **options).eval() for _ in range(2))
    with torch.no_grad():
        for tensor in (*loss.parameters(), *loss.buffers()):
            tensor.mul_(1.25)
    if hasattr(loss, "_discount"):  # an option of the constructor, not a state
        loss._discount.copy_(other._discount)
    state = loss.state_dict()
    result = other.load_state_dict(state, strict=True)
    assert not result.missing_keys and not result.unexpected_keys
    data = data_for(name)
    same(outcome(other, data), outcome(loss, data))
    for key, value in other.state_dict().items():
        assert torch.equal(value, state[key]), key
    with pytest.raises(RuntimeError, match="Unexpected key"):
        other.load_state_dict({**state, "nothing": torch.zeros(())}, strict=True)
