"""One table that drives what every loss and every part promises; a public one without a row fails.

Exact output keys, 0-dim outputs, gradient to every head, the meta device, no wait for the device,
untouched input and random state: for one head and for several, over batch, time and agents.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tensordict import NestedKey, TensorDict
from tensordict.nn import (
    CompositeDistribution,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import Tensor, nn
from torch import distributions as d
from torch.utils._python_dispatch import TorchDispatchMode
from torchrl.modules import IndependentNormal
from torchrl.objectives import LossModule

import composite_losses as cl
from composite_losses.losses.surrogates import Surrogate

B, T, A, OBS = 4, 3, 2, 3


class Parameters(nn.Module):
    """Observations to the distribution parameters of all heads, one weight matrix per head."""

    def __init__(self, heads: tuple[str, ...]) -> None:
        super().__init__()
        self.move = nn.Linear(OBS, 4) if "move" in heads else None
        self.gear = nn.Linear(OBS, 3) if "gear" in heads else None
        self.grip = nn.Linear(OBS, 2) if "grip" in heads else None

    def forward(self, obs: Tensor) -> tuple[Tensor, ...]:
        out: list[Tensor] = []
        if self.move is not None:
            loc, scale = self.move(obs).chunk(2, -1)
            out += [loc, scale.exp()]
        if self.gear is not None:
            out.append(self.gear(obs))
        if self.grip is not None:
            out += list((self.grip(obs).exp() + 1).unbind(-1))
        return tuple(out)


@dataclass(frozen=True)
class Layout:
    """Where heads and data lie: the root's batch size, the sample shape, the group (if any)."""

    root: tuple[int, ...]
    sample: tuple[int, ...]
    group: tuple[str, ...] = ()

    def key(self, name: str) -> NestedKey:
        return (*self.group, name) if self.group else name


LAYOUTS = {
    "B": Layout((B,), (B,)),
    "BT": Layout((B, T), (B, T)),
    "BA": Layout((B,), (B, A), ("agents",)),
}


def single_actor(layout: Layout) -> ProbabilisticTensorDictSequential:
    parameters = [layout.key("loc"), layout.key("scale")]
    return ProbabilisticTensorDictSequential(
        TensorDictModule(Parameters(("move",)), [layout.key("obs")], parameters),
        ProbabilisticTensorDictModule(
            in_keys={"loc": parameters[0], "scale": parameters[1]},
            out_keys=[layout.key("action")],
            distribution_class=IndependentNormal,
            return_log_prob=True,
        ),
    )


def composite_actor(layout: Layout) -> ProbabilisticTensorDictSequential:
    """A stacked pair of normals, a choice of three and a share in (0, 1)."""
    parameters = layout.key("params")
    prefix = (parameters,) if isinstance(parameters, str) else parameters
    names = [("move", "loc"), ("move", "scale"), ("gear", "logits")]
    names += [("grip", "concentration1"), ("grip", "concentration0")]
    heads = {"move": IndependentNormal, "gear": d.Categorical, "grip": d.Beta}
    return ProbabilisticTensorDictSequential(
        TensorDictModule(
            Parameters(tuple(heads)), [layout.key("obs")], [(*prefix, *name) for name in names]
        ),
        ProbabilisticTensorDictModule(
            in_keys=[parameters],
            out_keys=[layout.key(name) for name in heads],
            distribution_class=CompositeDistribution,
            distribution_kwargs={
                "distribution_map": heads,
                "name_map": {name: layout.key(name) for name in heads},
            },
            return_log_prob=True,
        ),
    )


ACTORS = {"single": single_actor, "composite": composite_actor}
Make = Callable[[nn.Module, nn.Module, bool], LossModule]


@dataclass(frozen=True)
class Row:
    """How a loss is made of an actor, a critic and ``functional``, and the names it covers."""

    make: Make
    covers: tuple[str, ...]
    critic: bool = True


def composed(surrogate: Callable[[], Surrogate], *covers: str) -> Row:
    """A loss of parts; every optional part is on."""

    def make(actor: nn.Module, critic: nn.Module, functional: bool) -> LossModule:
        return cl.PolicyLoss(
            actor,
            critic,
            surrogate=surrogate(),
            value=cl.ValueTerm("l2", coeff=0.5, clip=0.3),
            entropy=cl.EntropyTerm(0.02),
            advantage=cl.AdvantageNorm(per_agent=True),
            functional=functional,
        )

    return Row(make, ("PolicyLoss", "ValueTerm", "EntropyTerm", "AdvantageNorm", *covers))


def named(loss: str, **options: Any) -> Row:
    """A loss under TorchRL's name."""
    return Row(
        lambda actor, critic, functional: getattr(cl, loss)(
            actor, critic, functional=functional, **options
        ),
        (loss,),
    )


ROWS: dict[str, Row] = {
    "clip": composed(lambda: cl.Clip(0.2), "Clip"),
    "clip:per_head": composed(lambda: cl.Clip((0.2, 0.3), ratio="per_head", dual_clip=2.0), "Clip"),
    "clip:leafwise": composed(lambda: cl.Clip((0.2, 0.3), ratio="leafwise", dual_clip=2.0), "Clip"),
    "clip:mixed": composed(lambda: cl.Clip(0.2, ratio="mixed", mix=0.3), "Clip"),
    "ratio": composed(cl.Ratio, "Ratio"),
    "score": composed(cl.Score, "Score"),
    "kl": composed(lambda: cl.KLPenalty(1.5), "KLPenalty"),
    "no_critic": Row(
        lambda actor, critic, functional: cl.PolicyLoss(
            actor, surrogate=cl.Clip(), functional=functional, max_importance_ratio=1.5
        ),
        ("PolicyLoss",),
        critic=False,
    ),
    "PPO": named("PPOLoss"),
    "ClipPPO": named("ClipPPOLoss", clip_value=True, normalize_advantage=True),
    "KLPENPPO": named("KLPENPPOLoss"),
    "MAPPO": named("MAPPOLoss", clip_value=0.3),
    "IPPO": named("IPPOLoss", ratio="per_head"),
    "A2C": named("A2CLoss"),
    "Reinforce": named("ReinforceLoss", entropy_coeff=0.01),
    "Reinforce:returns": Row(
        lambda actor, critic, functional: cl.ReinforceLoss(
            actor, baseline="mean", functional=functional
        ),
        ("ReinforceLoss",),
        critic=False,
    ),
}
WITHOUT_ADVANTAGE = {"Reinforce:returns"}


@dataclass
class Case:
    """One loss with the networks it was made of and a batch for it."""

    loss: LossModule
    actor: nn.Module
    critic: nn.Module | None
    data: TensorDict
    layout: Layout


def make_data(layout: Layout, actor: nn.Module, critic: nn.Module) -> TensorDict:
    """A batch that the networks collected, with everything that any loss reads, masks apart."""
    sample = layout.sample
    data = TensorDict({}, layout.root)
    if layout.group:
        data[layout.group] = TensorDict({}, sample)
    data[layout.key("obs")] = torch.randn(*sample, OBS)
    with torch.no_grad():
        actor(data)
        value = critic(data)[layout.key("state_value")]
    data[layout.key("advantage")] = torch.randn(*sample, 1)
    # Within reach: the errors of clipped or distant values may add up to a gradient of 0.
    data[layout.key("value_target")] = value + 0.3 * torch.randn(*sample, 1)
    data["next", "reward"] = torch.randn(*layout.root, 1)
    data["next", "done"] = torch.zeros(*layout.root, 1, dtype=torch.bool)
    return data


def make_case(row: str, heads: str, layout_name: str, functional: bool) -> Case:
    layout = LAYOUTS[layout_name]
    actor = ACTORS[heads](layout)
    critic = TensorDictModule(
        nn.Linear(OBS, 1), [layout.key("obs")], out_keys=[layout.key("state_value")]
    )
    data = make_data(layout, actor, critic)
    if row in WITHOUT_ADVANTAGE:
        del data[layout.key("advantage")]
    with torch.no_grad():  # the policy has moved since, on a part of the samples beyond the clip
        for parameter in actor.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    loss = ROWS[row].make(actor, critic, functional)
    loss.set_keys(**{n: layout.key(k) for n, k in KEYS.items()})
    return Case(loss, actor, critic if ROWS[row].critic else None, data, layout)


KEYS = {"advantage": "advantage", "value": "state_value", "value_target": "value_target"}
GRID = [
    pytest.param(row, heads, layout, functional, id=f"{row}-{heads}-{layout}-{kind}")
    for row in ROWS
    for heads in ACTORS
    for layout in LAYOUTS
    for functional, kind in ((True, "functional"), (False, "modules"))
]
each_case = pytest.mark.parametrize(("row", "heads", "layout", "functional"), GRID)


def total(out: TensorDict) -> Tensor:
    """What a trainer sums."""
    return sum(value for key, value in out.items() if key.startswith("loss"))


def flat(data: TensorDict) -> dict[NestedKey, Tensor]:
    return dict(data.items(include_nested=True, leaves_only=True))


# --- the table is complete ------------------------------------------------------------------------


def losses_and_parts(module: Any) -> set[str]:
    """The public classes that are a loss or a part of one, by where they are defined."""
    return {
        name
        for name in module.__all__
        if inspect.isclass(member := getattr(module, name))
        and issubclass(member, nn.Module)
        and member.__module__.startswith("composite_losses.losses.")
    }


def covered(rows: dict[str, Row]) -> set[str]:
    return {name for row in rows.values() for name in row.covers}


# sums of other losses, whose keys are their groups': they have a file of their own
SUMS = {"GroupLoss", "HAPPOLoss"}


def test_every_public_loss_and_part_has_a_row():
    assert losses_and_parts(cl) - SUMS == covered(ROWS)


def test_every_surrogate_has_a_row():
    surrogates = {
        name
        for name, member in vars(cl.losses.surrogates).items()
        if inspect.isclass(member) and issubclass(member, Surrogate) and member is not Surrogate
    }
    assert surrogates == {"Clip", "KLPenalty", "Ratio", "Score"}
    assert surrogates <= covered(ROWS)


def test_a_missing_row_is_found():
    rest = {name: row for name, row in ROWS.items() if "A2CLoss" not in row.covers}
    assert losses_and_parts(cl) - SUMS - covered(rest) == {"A2CLoss"}


# --- what comes out -------------------------------------------------------------------------------


@each_case
def test_outputs(row, heads, layout, functional):
    """Exactly ``out_keys``, 0-dim and finite; losses carry a graph, metrics none."""
    case = make_case(row, heads, layout, functional)
    out = case.loss(case.data)
    assert list(out.keys()) == list(case.loss.out_keys)
    assert out.batch_size == torch.Size([])
    for key, value in out.items():
        assert isinstance(value, Tensor)
        assert value.shape == (), key
        assert value.isfinite(), key
        assert value.requires_grad == key.startswith("loss"), key


def batches(case: Case) -> dict[str, TensorDict]:
    """The batch as it is, with rows that do not count, and with none that does."""
    some, none = case.data.clone(), case.data.clone()
    mask = torch.ones(*case.layout.root, 1, dtype=torch.bool)
    mask[-1] = False
    some["collector", "mask"], none["collector", "mask"] = mask, torch.zeros_like(mask)
    return {"all": case.data, "some": some, "none": none}


@each_case
def test_keys_are_the_same_at_every_call(row, heads, layout, functional):
    case = make_case(row, heads, layout, functional)
    keys = list(case.loss.out_keys)
    for data in batches(case).values():
        for training in (True, False):
            out = case.loss.train(training)(data)
            assert list(out.keys()) == keys
            assert all(value.shape == () for value in out.values())
            assert all(value.isfinite().all() for value in out.values())
    with torch.no_grad():
        assert list(case.loss(case.data).keys()) == keys


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("row", ROWS)
def test_unreduced_losses_are_per_sample(row, layout):
    """``reduction="none"``: losses ``[*S]`` that average to the loss, 0-dim metrics."""
    case = make_case(row, "composite", layout, True)
    expected = case.loss.eval()(case.data)
    case.loss.reduction = "none"
    out = case.loss(case.data)
    assert out.batch_size == torch.Size([])
    assert list(out.keys()) == list(expected.keys())
    for key, value in out.items():
        assert value.shape == (case.layout.sample if key.startswith("loss") else ()), key
        torch.testing.assert_close(value.mean(), expected[key])


# --- where the gradient goes ----------------------------------------------------------------------


@each_case
def test_backward_reaches_every_head(row, heads, layout, functional):
    """Every weight of the original networks, none of which is a copy, receives gradient."""
    case = make_case(row, heads, layout, functional)
    total(case.loss(case.data)).backward()
    networks = [case.actor] + ([case.critic] if case.critic is not None else [])
    for network in networks:
        for name, parameter in network.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
            assert parameter.grad.any(), name


# --- what a device may be asked -------------------------------------------------------------------

aten = torch.ops.aten
READS = {
    aten._local_scalar_dense,
    aten.item,
    aten.is_nonzero,
    aten.equal,
    aten.nonzero,
    aten.masked_select,
    aten._unique2,
    aten.unique_dim,
    aten.unique_consecutive,
}
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}


class NoSynchronisation(TorchDispatchMode):
    """Raises where a device would have to tell the host a value, or a shape made of values."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        packet = func.overloadpacket
        if packet in READS:
            raise AssertionError(f"{func} waits for the device")
        if packet in INDEXING and any(
            isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)
            for index in args[1]
        ):
            raise AssertionError(f"{func} with a mask waits for the device")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        lambda x: float(x[0]),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.masked_select(x > 0),
        lambda x: x.clone().__setitem__(x > 0, 1.0),
        lambda x: torch.where(x > 0),
        lambda x: torch.equal(x, x),
        lambda x: x.unique(),
    ],
)
def test_every_read_is_noticed(read):
    with NoSynchronisation(), pytest.raises(AssertionError, match="waits for the device"):
        read(torch.ones(3))


@each_case
def test_never_waits_for_the_device(row, heads, layout, functional):
    case = make_case(row, heads, layout, functional)
    for data in (case.data, batches(case)["some"]):
        with NoSynchronisation():
            total(case.loss(data)).backward()


@pytest.mark.parametrize("row", ["clip", "ClipPPO", "KLPENPPO", "A2C"])
def test_a_scheduled_coefficient_does_not_wait_either(row):
    """Coefficients are buffers that may be written at every step."""
    case = make_case(row, "composite", "B", True)
    case.loss(case.data)
    with NoSynchronisation():
        for part in (case.loss.surrogate, case.loss.value, case.loss.entropy):
            for buffer in part.buffers():
                buffer.mul_(0.9)
        total(case.loss(case.data)).backward()


@each_case
def test_runs_on_the_meta_device(row, heads, layout, functional):
    """Forward and backward where there are shapes, but no values."""
    case = make_case(row, heads, layout, functional)
    case.loss.to("meta")
    out = case.loss(batches(case)["some"].to("meta"))
    assert list(out.keys()) == list(case.loss.out_keys)
    for key, value in out.items():
        assert (value.device.type, value.shape, value.dtype) == ("meta", (), torch.float32), key
    total(out).backward()
    for name, parameter in case.loss.named_parameters():
        assert parameter.device.type == "meta", name
        assert parameter.grad is not None, name


# --- what a call leaves behind --------------------------------------------------------------------


@each_case
def test_leaves_no_trace(row, heads, layout, functional):
    """The input is bitwise unchanged and so is the random state; a second call gives the same."""
    case = make_case(row, heads, layout, functional)
    # in training mode the coefficient of a KL penalty adapts
    case.loss.train(not isinstance(case.loss.surrogate, cl.KLPenalty))
    for data in batches(case).values():
        entries = flat(data)
        before = {key: (value.clone(), value._version) for key, value in entries.items()}
        own = {key: value.clone() for key, value in case.loss.state_dict().items()}
        state = torch.get_rng_state()
        first = case.loss(data)
        total(first).backward()
        second = case.loss(data)
        assert torch.equal(torch.get_rng_state(), state)
        after = flat(data)
        assert after.keys() == before.keys()
        for key, (value, version) in before.items():
            assert after[key] is entries[key], key
            assert after[key]._version == version, key
            assert torch.equal(after[key], value), key
        for key, value in case.loss.state_dict().items():
            assert torch.equal(value, own[key]), key
        for key, value in first.items():
            assert torch.equal(value, second[key]), key


@each_case
def test_in_keys_are_all_that_is_read(row, heads, layout, functional):
    case = make_case(row, heads, layout, functional)
    case.loss.eval()
    data = batches(case)["some"]
    data["unrelated"] = torch.randn(*case.layout.root)
    expected = case.loss(data)
    selected = data.select(*case.loss.in_keys, strict=False)
    assert "unrelated" not in set(selected.keys())
    out = case.loss(selected)
    for key, value in expected.items():
        assert torch.equal(out[key], value), key
