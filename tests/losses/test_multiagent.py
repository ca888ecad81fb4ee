"""MAPPOLoss and IPPOLoss: TorchRL's numbers on one head and one group, and what differs.

TorchRL's own losses are the judge of parity; the value normaliser is worked out by hand.
"""

import inspect
from typing import Any

import pytest
import torch
import torchrl.objectives.multiagent as theirs
from torch import nn
from torchrl.modules import PopArtValueNorm, RunningValueNorm
from torchrl.objectives.utils import ValueEstimators
from torchrl.objectives.value import MultiAgentGAE

import composite_losses as cl
from tests.cases import builders_fl as fl
from tests.cases import builders_groups as bg
from tests.cases.builders_groups import Spec, make_data
from tests.tolerances import assert_close

NAMES = ["MAPPOLoss", "IPPOLoss"]
KEYS = {
    "action": ("g", "action"),
    "sample_log_prob": ("g", "action_log_prob"),
    "advantage": ("g", "advantage"),
    "value_target": ("g", "value_target"),
    "value": ("g", "state_value"),
}
pytestmark = [
    pytest.mark.filterwarnings("ignore:No target network updater:UserWarning"),
    # theirs, where no dim is excluded
    pytest.mark.filterwarnings("ignore:You requested advantage normalization:UserWarning"),
]


def spec(kind: str = "normal", agents: int = 3) -> Spec:
    return Spec(agents, 5, (("action", kind),))


def networks(name: str, kind: str, agents: int) -> tuple[Any, Any]:
    """Actor and critic; MAPPO's critic sees all agents."""
    actor, critic = bg.networks("g", spec(kind, agents))
    if name == "MAPPOLoss":
        torch.manual_seed(6)
        critic = bg.make_critic("g", spec(kind, agents), bg.Central("central", 5, agents))
    return actor, critic


def gradients(out: Any, nets: tuple[Any, Any]) -> list[Any]:
    params = [p for net in nets for p in net.parameters()]
    return list(torch.autograd.grad(bg.total(out), params))


# --- parity --------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [None, PopArtValueNorm, RunningValueNorm])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip_value": 0.2},
        {"clip_value": True, "clip_epsilon": 0.1},
        {"critic_coeff": 0.5, "entropy_coeff": 0.1, "loss_critic_type": "l2"},
        {"normalize_advantage": False, "separate_losses": True},
        {"normalize_advantage_exclude_dims": ()},
    ],
    ids=lambda o: "-".join(o) or "defaults",
)
@pytest.mark.parametrize(("kind", "agents"), [("normal", 3), ("categorical", 1), ("normal", 2)])
@pytest.mark.parametrize("name", NAMES)
def test_parity(name: str, kind: str, agents: int, options: Any, norm: Any) -> None:
    """Case 92: three calls in training mode; losses, metrics, gradients and the normaliser's
    state equal TorchRL's to 1e-5, whether advantages are given or computed by the loss."""
    nets = networks(name, kind, agents)
    td = make_data({"g": spec(kind, agents)}, shared=bg.SIGNALS)
    td["g"] = td["g"].exclude("params")
    ours, judge = (
        getattr(module, name)(*nets, value_norm=norm(shape=1) if norm else None, **options)
        for module in (cl, theirs)
    )
    together = cl.GroupLoss({"g": ours})
    judge.set_keys(**KEYS)
    for _ in range(3):
        found, expected = together(td), judge(td)
        for key, value in expected.items():
            if key in ("ESS", "explained_variance"):  # theirs has one per agent; see the README
                continue
            assert_close(found[f"g/{key}"].detach(), value.detach())
        assert_close(bg.total(found).detach(), bg.total(expected).detach())
        for x, y in zip(gradients(found, nets), gradients(expected, nets), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
        td["g", "value_target"] += 1.0
    if norm is not None:
        for x, y in zip(ours.value_norm.buffers(), judge.value_norm.buffers(), strict=True):
            assert_close(x, y)


@pytest.mark.parametrize("agents", [1, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_parity_of_the_estimator(name: str, agents: int) -> None:
    """Cases 52, 92: a team's reward and ends for per-agent values; no key of them is set."""
    nets = networks(name, "normal", agents)
    td = make_data({"g": spec(agents=agents)}, shared=bg.SIGNALS, estimated=False)
    td["g"] = td["g"].exclude("params")
    loss = cl.GroupLoss({"g": getattr(cl, name)(*nets)})
    judge = getattr(theirs, name)(*nets)
    judge.set_keys(**KEYS)
    for options in ({}, {"gamma": 0.8, "lmbda": 0.7}):
        if options:
            loss.make_value_estimator(**options)
            judge.make_value_estimator(ValueEstimators.MAGAE, **options)
        found, expected = loss(td.clone()), judge(td.clone())
        for key in ("loss_objective", "loss_critic", "loss_entropy"):
            assert_close(found[key].detach(), expected[key].detach())
        for x, y in zip(gradients(found, nets), gradients(expected, nets), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
    assert isinstance(loss.losses["g"].value_estimator, MultiAgentGAE)


# --- the door ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_defaults_and_keywords_are_torchrls(name: str) -> None:
    """Every keyword that TorchRL's signature shows exists here, with the same default."""
    ours, judge = (inspect.signature(getattr(m, name)).parameters for m in (cl, theirs))
    for key, parameter in judge.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            continue
        found = ours[key].default
        if key == "entropy_coeff":  # None stands for the default of the part, 0.01
            found = getattr(cl, name)(*networks(name, "normal", 2)).entropy_coeff.item()
            assert found == pytest.approx(parameter.default)
        else:
            assert found == parameter.default, key
    loss = getattr(cl, name)(*networks(name, "normal", 2))
    assert loss.default_value_estimator == ValueEstimators.MAGAE
    assert loss.normalize_advantage
    assert loss.normalize_advantage_exclude_dims == (-2,)
    assert loss.value_norm is None


@pytest.mark.parametrize("name", NAMES)
def test_older_spellings_and_typos(name: str) -> None:
    """``critic_coef`` and ``entropy_coef`` are accepted; an unknown keyword is not swallowed."""
    nets = networks(name, "normal", 2)
    loss = getattr(cl, name)(*nets, critic_coef=0.7, entropy_coef=0.2)
    assert_close(loss.critic_coeff, 0.7)
    assert_close(loss.entropy_coeff, 0.2)
    with pytest.raises(TypeError, match=r"'value_nrom'.*value_norm"):
        getattr(cl, name)(*nets, value_nrom=None)


@pytest.mark.parametrize("name", NAMES)
def test_value_norm_is_an_attribute(name: str) -> None:
    """It can be set later, lives in the state_dict, and needs a value term."""
    nets = networks(name, "normal", 2)
    loss = getattr(cl, name)(*nets)
    loss.value_norm = norm = RunningValueNorm(shape=1)
    assert loss.value_norm is loss.value.norm is norm
    assert [m for m in loss.modules() if m is norm] == [norm]
    assert any(key.endswith("norm.count") for key in loss.state_dict())
    loss.set_keys(**bg.own_keys("g"))
    loss(make_data({"g": spec(agents=2)}))
    assert norm.count == 4 * 5 * 2
    loss.value_norm = None
    assert loss.value.norm is None
    alone = getattr(cl, name)(nets[0])
    assert alone.value_norm is None
    with pytest.raises(AttributeError, match="no value term"):
        alone.value_norm = PopArtValueNorm(shape=1)


# --- statistics ----------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("agents", [1, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_advantages_are_standardised_per_agent(name: str, agents: int, masked: bool) -> None:
    """Case 91: mean and unbiased deviation of each agent's own rows, of the living only."""
    td = make_data({"g": spec(agents=agents)})
    td["g", "advantage"] *= torch.tensor([1.0, 100.0, 0.01])[:agents].unsqueeze(-1)
    alive = fl.make_mask((4, 5, agents)) if masked else torch.ones(4, 5, agents, dtype=torch.bool)
    td["g", "alive"] = alive
    losses = []
    for normalise in (True, False):
        nets = networks(name, "normal", agents)
        loss = getattr(cl, name)(*nets, normalize_advantage=normalise)
        loss.set_keys(**bg.own_keys("g"), agent_mask=("g", "alive"))
        losses.append(loss)
    by_hand = td.clone()
    by_hand["g", "advantage"] = fl.normalised_by_hand(td["g", "advantage"], alive, (2,))
    found, expected = losses[0](td), losses[1](by_hand)
    for key, value in expected.items():
        assert_close(found[key].detach(), value.detach())


@pytest.mark.parametrize("norm", [PopArtValueNorm, RunningValueNorm])
def test_normaliser_learns_in_training_mode_only(norm: Any) -> None:
    """TorchRL's moves at every call; an evaluation here changes nothing, so it repeats itself."""
    td = make_data({"g": spec()})
    loss = cl.MAPPOLoss(*networks("MAPPOLoss", "normal", 3), value_norm=norm(shape=1))
    loss.set_keys(**bg.own_keys("g"))
    loss(td)
    state = {key: value.clone() for key, value in loss.value_norm.state_dict().items()}
    loss.eval()
    first = loss(td)
    torch.testing.assert_close(loss(td), first, rtol=0, atol=0)
    for key, value in loss.value_norm.state_dict().items():
        assert torch.equal(value, state[key])
    loss.train()(td)
    assert not all(torch.equal(v, state[k]) for k, v in loss.value_norm.state_dict().items())


def test_value_error_is_between_normalised_values() -> None:
    """Targets 1, 3, 5, 7: mean 4, variance 5. Value 0 is −4/√5, and so on; masked rows hold NaN.
    l2: ((1−0)² + (3−0)² + (5−0)² + (7−0)²) / 5 / 4 = 84 / 20 = 4.2. In raw units it were 21."""
    td = make_data({"g": spec(agents=1)}, (6,))
    target = torch.tensor([1.0, 3.0, 5.0, 7.0, float("nan"), float("inf")])
    td["g", "value_target"] = target.view(6, 1, 1)
    td["g", "alive"] = target.isfinite().view(6, 1)
    actor, critic = bg.networks("g", spec(agents=1))
    for p in critic.parameters():
        nn.init.zeros_(p)
    for norm, expected in ((RunningValueNorm(shape=1), 4.2), (None, 21.0)):
        loss = cl.IPPOLoss(actor, critic, value_norm=norm, loss_critic_type="l2")
        loss.set_keys(**bg.own_keys("g"), agent_mask=("g", "alive"))
        out = loss(td)
        assert_close(out["loss_critic"].detach(), expected)
    assert torch.isfinite(out["explained_variance"])


def test_advantages_are_in_raw_units() -> None:
    """Case 98: rewards and values times 100 give advantages times 100, whatever the normaliser
    has seen, and the same standardised advantages."""
    objectives = []
    for scale in (1.0, 100.0):
        td = make_data({"g": spec()}, shared=bg.SIGNALS, estimated=False)
        td["next", "reward"] *= scale
        actor, critic = bg.networks("g", spec())
        with torch.no_grad():
            last = critic.module.net[-1]
            last.weight *= scale
            last.bias *= scale
        norm = RunningValueNorm(shape=1)
        norm.update(torch.tensor([[3.0], [900.0]]))  # far from what these values are
        loss = cl.GroupLoss({"g": cl.MAPPOLoss(actor, critic, value_norm=norm)})
        objectives.append(loss(td)["loss_objective"].detach())
        td = loss.value_estimator(td)
        with torch.no_grad():
            value = critic(td.clone())["g", "state_value"]
        assert_close(td["g", "value_target"] - td["g", "advantage"], value)
        if scale == 1.0:
            plain = td["g", "advantage"]
        else:
            torch.testing.assert_close(td["g", "advantage"], plain * scale, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(objectives[0], objectives[1], rtol=1e-4, atol=1e-5)
