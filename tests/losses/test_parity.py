"""Equal to TorchRL's losses where TorchRL is right: losses and the gradient of every parameter.

In float64, on policies with several heads under the joint ratio, and on single heads. What TorchRL
0.14 cannot do is left out, and said so where it is.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torchrl.objectives
from tensordict import NestedKey, TensorDict
from tensordict.nn import (
    CompositeDistribution,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import Tensor, nn
from torch import distributions as d
from torchrl.modules import IndependentNormal, OneHotCategorical, TanhNormal
from torchrl.objectives import LossModule, SoftUpdate, ValueEstimators

import composite_losses as cl
from tests.tolerances import assert_close

F64 = torch.float64
B, T, A, OBS, HIDDEN = 5, 4, 3, 3, 6


class Family(NamedTuple):
    """A distribution class, its parameters' names, and how they are made of ``size`` numbers."""

    cls: type
    parameters: tuple[str, ...]
    size: int
    transform: Callable[[Tensor], Sequence[Tensor]]


def loc_scale(x: Tensor) -> Sequence[Tensor]:
    loc, scale = x.chunk(2, -1)
    return loc, scale.exp()


def concentrations(x: Tensor) -> Sequence[Tensor]:
    return (x.exp() + 0.5).chunk(2, -1)


NORMAL = ("loc", "scale")
FAMILIES = {
    "normal": Family(d.Normal, NORMAL, 4, loc_scale),  # log-prob [*S, 2]
    "independent": Family(IndependentNormal, NORMAL, 4, loc_scale),
    "tanh": Family(TanhNormal, NORMAL, 4, loc_scale),
    "categorical": Family(d.Categorical, ("logits",), 3, lambda x: (x,)),
    "one_hot": Family(OneHotCategorical, ("logits",), 3, lambda x: (x,)),
    "bernoulli": Family(d.Bernoulli, ("logits",), 2, lambda x: (x,)),
    "beta": Family(d.Beta, ("concentration1", "concentration0"), 4, concentrations),
    "gamma": Family(d.Gamma, ("concentration", "rate"), 4, concentrations),
    "dirichlet": Family(d.Dirichlet, ("concentration",), 3, lambda x: (x.exp() + 0.5,)),
}
# Heads by name; the name of a single head is its action's.
MIXES: dict[str, dict[str, str]] = {
    "robot": {"arm": "normal", "tool": "categorical", "say": "one_hot"},
    "bounded": {"arm": "tanh", "share": "beta", "tool": "categorical"},
    "many": {
        "arm": "independent",
        "share": "dirichlet",
        "wait": "gamma",
        "on": "bernoulli",
        "grip": "beta",
    },
    "choices": {"tool": "categorical", "say": "one_hot"},
    "one": {"arm": "independent"},
    "choice": {"tool": "categorical"},
    "code": {"say": "one_hot"},
    "squashed": {"arm": "tanh"},
}
SAMPLED_ENTROPY = {"bounded", "squashed"}  # TorchRL draws samples for a TanhNormal's


class Layout(NamedTuple):
    """The root's batch size, the sample shape, and the group's key (empty: none)."""

    root: tuple[int, ...]
    sample: tuple[int, ...]
    group: tuple[str, ...] = ()

    def key(self, *name: str) -> NestedKey:
        path = (*self.group, *name)
        return path if len(path) > 1 else path[0]


LAYOUTS = {
    "B": Layout((B,), (B,)),
    "BT": Layout((B, T), (B, T)),
    "BA": Layout((B,), (B, A), ("agents",)),
    "BTA": Layout((B, T), (B, T, A), ("agents",)),
    # Agents as a batch dim of the root: what A2C and REINFORCE of TorchRL need for several heads.
    "flat BA": Layout((B, A), (B, A)),
}
KEYS = ("advantage", "value_target", "reward", "done", "terminated")


class Heads(nn.Module):
    """Features to the parameters of every head."""

    def __init__(self, families: Sequence[Family]) -> None:
        super().__init__()
        self.families = families
        self.layers = nn.ModuleList([nn.Linear(HIDDEN, f.size, dtype=F64) for f in families])

    def forward(self, hidden: Tensor) -> tuple[Tensor, ...]:
        pairs = zip(self.families, self.layers, strict=True)
        return tuple(p for family, layer in pairs for p in family.transform(layer(hidden)))


class Problem(NamedTuple):
    """Networks that share a trunk, and a batch that an earlier policy collected."""

    actor: ProbabilisticTensorDictSequential
    critic: TensorDictSequential
    data: TensorDict
    layout: Layout
    actions: list[NestedKey]

    def parameters(self) -> dict[str, nn.Parameter]:
        """Every parameter by name, the shared ones twice."""
        named = [("actor", self.actor), ("critic", self.critic)]
        return {f"{n}.{k}": p for n, net in named for k, p in net.named_parameters()}

    def learn(self) -> None:
        """Moves every weight a little."""
        with torch.no_grad():
            for parameter in {id(p): p for p in self.parameters().values()}.values():
                parameter.add_(0.1 * torch.randn_like(parameter))


def make_problem(mix: str, layout: Layout) -> Problem:
    heads = {name: FAMILIES[family] for name, family in MIXES[mix].items()}
    trunk = nn.Sequential(nn.Linear(OBS, HIDDEN, dtype=F64), nn.Tanh())
    features = TensorDictModule(trunk, [layout.key("obs")], [layout.key("hidden")])
    if len(heads) > 1:
        keys = [layout.key("params", n, p) for n, f in heads.items() for p in f.parameters]
        distribution = ProbabilisticTensorDictModule(
            in_keys=[layout.key("params")],
            out_keys=[layout.key(name) for name in heads],
            distribution_class=CompositeDistribution,
            distribution_kwargs={
                "distribution_map": {name: family.cls for name, family in heads.items()},
                "name_map": {name: layout.key(name) for name in heads},
            },
            return_log_prob=True,
        )
    else:
        ((name, family),) = heads.items()
        keys = [layout.key(p) for p in family.parameters]
        distribution = ProbabilisticTensorDictModule(
            in_keys=dict(zip(family.parameters, keys, strict=True)),
            out_keys=[layout.key(name)],
            distribution_class=family.cls,
            return_log_prob=True,
        )
    actor = ProbabilisticTensorDictSequential(
        features,
        TensorDictModule(Heads(list(heads.values())), [layout.key("hidden")], keys),
        distribution,
    )
    critic = TensorDictSequential(
        features,
        TensorDictModule(
            nn.Linear(HIDDEN, 1, dtype=F64), [layout.key("hidden")], [layout.key("state_value")]
        ),
    )
    data = TensorDict({}, layout.root)
    following = TensorDict({}, layout.root)
    for td in (data, following):
        if layout.group:
            td[layout.group] = TensorDict({}, layout.sample)
        td[layout.key("obs")] = torch.randn(*layout.sample, OBS, dtype=F64)
    following[layout.key("reward")] = torch.randn(*layout.sample, 1, dtype=F64)
    for name in ("done", "terminated"):
        following[layout.key(name)] = torch.rand(*layout.sample, 1) < 0.2
    with torch.no_grad():
        critic(actor(data))
        critic(following)
    data["next"] = following
    data = data.exclude(layout.key("hidden"), ("next", *layout.group, "hidden"))
    for name in ("advantage", "value_target"):
        data[layout.key(name)] = torch.randn(*layout.sample, 1, dtype=F64)
    return Problem(actor, critic, data, layout, [layout.key(name) for name in heads])


class A2C(torchrl.objectives.A2CLoss):
    """TorchRL's, whose own ``in_keys`` fail where there are several heads."""

    in_keys = property(lambda self: list(self.actor_network.in_keys))


THEIRS = {
    "PPOLoss": torchrl.objectives.PPOLoss,
    "ClipPPOLoss": torchrl.objectives.ClipPPOLoss,
    "A2CLoss": A2C,
    "ReinforceLoss": torchrl.objectives.ReinforceLoss,
    "KLPENPPOLoss": torchrl.objectives.KLPENPPOLoss,
}


def pair(name: str, problem: Problem, **options: Any) -> tuple[LossModule, LossModule]:
    """(ours, theirs), on the same networks and with the same keys and options."""
    losses = []
    for cls in (getattr(cl, name), THEIRS[name]):
        loss = cls(problem.actor, problem.critic, **options)
        keys = {key: problem.layout.key(key) for key in KEYS}
        if len(problem.actions) == 1:  # which TorchRL's REINFORCE does not take from the actor
            keys["action"] = problem.actions[0]
        loss.set_keys(value=problem.layout.key("state_value"), **keys)
        if options.get("delay_actor"):
            SoftUpdate(loss, eps=0.5)
        losses.append(loss)
    return losses[0], losses[1]


def outcome(loss: LossModule, problem: Problem) -> tuple[TensorDict, dict[str, Tensor | None]]:
    """The outputs and the gradient of the sum of the losses, by parameter."""
    parameters = problem.parameters()
    for parameter in parameters.values():
        parameter.grad = None
    out = loss(problem.data.clone())
    sum(value.sum() for key, value in out.items() if key.startswith("loss")).backward()
    return out, {n: None if p.grad is None else p.grad.clone() for n, p in parameters.items()}


METRICS = ("entropy", "kl_approx", "clip_fraction", "max_ratio", "mean_ratio")


def assert_parity(ours: LossModule, theirs: LossModule, problem: Problem) -> None:
    out, gradients = outcome(ours, problem)
    expected, expected_gradients = outcome(theirs, problem)
    shared = set(expected.keys()) & set(out.keys())
    losses = {key for key in set(expected.keys()) if key.startswith("loss")}
    assert losses == {key for key in set(out.keys()) if key.startswith("loss")}
    for key in losses:
        assert_close(out[key], expected[key])
    for key in (*METRICS, "value_clip_fraction"):
        if key in shared:
            assert_close(out[key], expected[key])
    # TorchRL's ESS and explained variance are separate per trailing dim of the batch.
    if len(problem.layout.sample) == 1:
        for key in {"ESS", "explained_variance"} & set(expected.keys()):
            assert_close(out[key], expected[key].reshape(()))
    assert any(g is not None and g.any() for g in expected_gradients.values())
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        if gradient is None:
            assert gradients[name] is None or not gradients[name].any(), name
        else:
            assert gradients[name] is not None, name
            assert_close(gradients[name], gradient)


CLIP = {"clip_epsilon": 0.1}
PAIR = {"clip_epsilon": (0.05, 0.15)}
PPO = [
    pytest.param("PPOLoss", {}, id="PPO"),
    pytest.param("ClipPPOLoss", CLIP, id="ClipPPO"),
    pytest.param("ClipPPOLoss", PAIR, id="ClipPPO-pair"),
]
VALUE_OPTIONS: dict[str, dict[str, Any]] = {
    "l1": {"loss_critic_type": "l1"},
    "l2": {"loss_critic_type": "l2"},
    "smooth_l1": {"loss_critic_type": "smooth_l1"},
    "clip_value": {"clip_value": 0.05},
    "clip_value l2": {"clip_value": 0.05, "loss_critic_type": "l2"},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "separate": {"separate_losses": True},
    "modules": {"functional": False},
}
COEFFICIENTS: dict[str, dict[str, Any]] = {
    "critic_coeff": {"critic_coeff": 0.3},
    "entropy_coeff": {"entropy_coeff": 0.2},
    "no bonus": {"entropy_bonus": False},
}
PPO_OPTIONS: dict[str, dict[str, Any]] = {
    **VALUE_OPTIONS,
    **COEFFICIENTS,
    "no critic": {"critic_coeff": 0.0},
    "delay": {"delay_actor": True},
    "cap": {"max_importance_ratio": 1.05},
    "cap and delay": {"max_importance_ratio": 1.05, "delay_actor": True},
    "together": {
        "delay_actor": True,
        "max_importance_ratio": 1.2,
        "clip_value": 0.1,
        "reduction": "sum",
        "separate_losses": True,
        "critic_coeff": 0.5,
        "entropy_coeff": 0.05,
    },
}
PPO_LAYOUTS = ["B", "BT", "BA", "BTA"]
SEVERAL = ["robot", "bounded", "many", "choices"]


def bonus(mix: str) -> dict[str, bool]:
    return {"entropy_bonus": False} if mix in SAMPLED_ENTROPY else {}


def moved(mix: str, layout: str, name: str, **options: Any) -> tuple[LossModule, LossModule, Any]:
    """Losses whose proximal policy lies between the behaviour policy and the current one."""
    problem = make_problem(mix, LAYOUTS[layout])
    problem.learn()
    ours, theirs = pair(name, problem, **options)
    problem.learn()
    return ours, theirs, problem


@pytest.mark.parametrize("layout", PPO_LAYOUTS)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(("name", "options"), PPO)
def test_ppo(name, options, mix, layout):
    assert_parity(*moved(mix, layout, name, **options, **bonus(mix)))


@pytest.mark.parametrize("layout", PPO_LAYOUTS)
@pytest.mark.parametrize("option", PPO_OPTIONS)
@pytest.mark.parametrize(("name", "options"), PPO)
def test_options_of_ppo(name, options, option, layout):
    assert_parity(*moved("robot", layout, name, **options, **PPO_OPTIONS[option]))


@pytest.mark.parametrize("layout", PPO_LAYOUTS)
@pytest.mark.parametrize("loss_critic_type", ["l1", "l2", "smooth_l1"])
def test_value_clip_as_wide_as_the_ratio(loss_critic_type, layout):
    options = {"clip_value": True, "loss_critic_type": loss_critic_type, **CLIP}
    assert_parity(*moved("robot", layout, "ClipPPOLoss", **options))


@pytest.mark.parametrize(
    ("layout", "exclude"),
    [
        ("B", ()),
        ("BT", ()),
        ("BT", (1,)),
        ("BA", (1,)),
        ("BA", (-2,)),
        ("BTA", (2,)),
        ("BTA", (1, -2)),
    ],
)
@pytest.mark.parametrize(("name", "options"), PPO)
def test_normalised_advantage(name, options, layout, exclude):
    options = {**options, "normalize_advantage": True, "normalize_advantage_exclude_dims": exclude}
    assert_parity(*moved("robot", layout, name, **options))


@pytest.mark.parametrize("layout", PPO_LAYOUTS)
def test_entropy_coefficient_by_head(layout):
    """TorchRL's mapping names ``<action>_entropy`` by its whole path."""
    problem = make_problem("choices", LAYOUTS[layout])
    problem.learn()
    group = problem.layout.key
    mapping = {group("tool_entropy"): 0.125, group("say_entropy"): 0.5}
    assert_parity(*pair("ClipPPOLoss", problem, entropy_coeff=mapping), problem)


# --- the score function ---------------------------------------------------------------------------

SCORE_LAYOUTS = ["B", "BT", "flat BA"]


@pytest.mark.parametrize("layout", SCORE_LAYOUTS)
@pytest.mark.parametrize("mix", MIXES)
def test_reinforce(mix, layout):
    assert_parity(*moved(mix, layout, "ReinforceLoss"))


@pytest.mark.parametrize("layout", SCORE_LAYOUTS)
@pytest.mark.parametrize("option", VALUE_OPTIONS)
def test_options_of_reinforce(option, layout):
    assert_parity(*moved("robot", layout, "ReinforceLoss", **VALUE_OPTIONS[option]))


@pytest.mark.parametrize("mix", ["one", "choice", "code", "squashed"])
def test_reinforce_of_a_group(mix):
    assert_parity(*moved(mix, "BA", "ReinforceLoss"))


@pytest.mark.parametrize("layout", SCORE_LAYOUTS)
@pytest.mark.parametrize("mix", SEVERAL)
def test_a2c_of_several_heads(mix, layout):
    """Without the bonus: TorchRL has no entropy of a composite distribution here."""
    assert_parity(*moved(mix, layout, "A2CLoss", entropy_bonus=False))


@pytest.mark.parametrize("layout", SCORE_LAYOUTS)
@pytest.mark.parametrize("option", VALUE_OPTIONS)
def test_options_of_a2c(option, layout):
    options = {**VALUE_OPTIONS[option], "entropy_bonus": False}
    assert_parity(*moved("robot", layout, "A2CLoss", **options))


@pytest.mark.parametrize("layout", [*SCORE_LAYOUTS, "BA"])
@pytest.mark.parametrize("mix", ["one", "choice", "code", "squashed"])
@pytest.mark.parametrize("option", [*COEFFICIENTS, "clip_value"])
def test_a2c_of_one_head(option, mix, layout):
    options = {**COEFFICIENTS, **VALUE_OPTIONS}[option]
    assert_parity(*moved(mix, layout, "A2CLoss", **(options | bonus(mix))))


def test_a2c_without_a_critic_term():
    """``critic_coeff=None`` leaves the value loss out, unlike in PPO."""
    assert_parity(*moved("one", "B", "A2CLoss", critic_coeff=None))


# --- an advantage computed inside -----------------------------------------------------------------

LOSSES = [*PPO, pytest.param("A2CLoss", {}, id="A2C"), pytest.param("ReinforceLoss", {}, id="RF")]


def without_advantage(problem: Problem, *, values: bool) -> None:
    """Removes what a value estimator writes; the values of the earlier critic, too, or not."""
    names = ["advantage", "value_target"] + ([] if values else ["state_value"])
    for name in names:
        del problem.data[problem.layout.key(name)]
    if not values:
        del problem.data["next"][problem.layout.key("state_value")]


@pytest.mark.parametrize(
    ("options", "values"),
    [({}, False), ({}, True), ({"functional": False}, False), ({"separate_losses": True}, False)],
)
@pytest.mark.parametrize("layout", ["B", "BT", "BTA"])
@pytest.mark.parametrize("mix", ["one", "robot"])
@pytest.mark.parametrize(("name", "own"), LOSSES)
def test_generalised_advantage(name, own, mix, layout, options, values):
    """GAE with detached critic parameters; the value target is its own, too."""
    if name in ("A2CLoss", "ReinforceLoss") and mix == "robot":
        layout = layout.replace("BTA", "BT")
        own = {**own, **({"entropy_bonus": False} if name == "A2CLoss" else {})}
    ours, theirs, problem = moved(mix, layout, name, **own, **options)
    for loss in (ours, theirs):
        loss.make_value_estimator(ValueEstimators.GAE, gamma=0.9, lmbda=0.8)
    without_advantage(problem, values=values)
    assert_parity(ours, theirs, problem)


@pytest.mark.parametrize("layout", ["BT", "BTA"])
def test_value_clip_beside_an_estimator(layout):
    """The old value is the stored one: TorchRL's estimator overwrites it before TorchRL clips."""
    options = {"clip_value": 0.05, **CLIP}
    ours, theirs, problem = moved("one", layout, "ClipPPOLoss", **options)
    for loss in (ours, theirs):
        loss.make_value_estimator(ValueEstimators.GAE, gamma=0.9, lmbda=0.8)
    without_advantage(problem, values=True)
    out = ours(problem.data)
    stored = problem.data[problem.layout.key("state_value")].clone()
    theirs.value_estimator(problem.data)
    problem.data[problem.layout.key("state_value")] = stored
    expected = theirs(problem.data)
    assert 0 < expected["value_clip_fraction"] < 1
    for key in ("loss_objective", "loss_critic", "value_clip_fraction"):
        assert_close(out[key], expected[key])


@pytest.mark.parametrize(
    ("estimator", "options"),
    [
        (ValueEstimators.TD0, {"gamma": 0.9}),
        (ValueEstimators.TD1, {"gamma": 0.9}),
        (ValueEstimators.TDLambda, {"gamma": 0.9, "lmbda": 0.7}),
        (ValueEstimators.GAE, {"gamma": 0.9, "lmbda": 0.7, "average_gae": True}),
    ],
)
@pytest.mark.parametrize(("name", "own"), LOSSES)
def test_other_estimators(name, own, estimator, options):
    ours, theirs, problem = moved("one", "BT", name, **own)
    for loss in (ours, theirs):
        loss.make_value_estimator(estimator, **options)
    without_advantage(problem, values=False)
    assert_parity(ours, theirs, problem)


@pytest.mark.parametrize(("name", "own"), LOSSES)
def test_the_default_estimator(name, own):
    ours, theirs, problem = moved("one", "BT", name, **own)
    without_advantage(problem, values=False)
    assert_parity(ours, theirs, problem)


# --- the KL penalty -------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", PPO_LAYOUTS)
@pytest.mark.parametrize("mix", ["one", "choice", "code"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"beta": 3.0, "dtarg": 0.5},
        {"beta": 0.5, "dtarg": 1e-4, "increment": 3.0},
        {"delay_actor": True},
        {"reduction": "sum", "clip_value": 0.05},
    ],
)
def test_kl_penalty(options, mix, layout):
    """Values, not gradients (TorchRL changes beta before backward). Beta adapts alike."""
    ours, theirs, problem = moved(mix, layout, "KLPENPPOLoss", **options)
    for _ in range(3):
        out, expected = ours(problem.data.clone()), theirs(problem.data.clone())
        for key in (k for k in set(expected.keys()) if k.startswith("loss")):
            assert_close(out[key], expected[key])
        assert_close(out["kl"], expected["kl"].mean())
        assert_close(out["kl_approx"], expected["kl_approx"])
        assert_close(ours.beta, theirs.beta)


@pytest.mark.parametrize("layout", PPO_LAYOUTS)
@pytest.mark.parametrize("mix", ["robot", "many"])
def test_kl_penalty_of_several_heads(mix, layout):
    """TorchRL's unpenalised objective less beta times torch's divergences, summed over heads."""
    problem = make_problem(mix, LAYOUTS[layout])
    old = problem.actor.build_dist_from_params(problem.data)
    problem.learn()
    new = problem.actor.get_dist(problem.data.clone())
    n = len(problem.layout.sample)
    kl = torch.zeros(problem.layout.sample, dtype=F64)
    for head in new.dists:
        each = d.kl_divergence(old.dists[head], new.dists[head])
        kl = kl + (each.flatten(n).sum(-1) if each.ndim > n else each)
    out = pair("KLPENPPOLoss", problem, beta=2.0)[0](problem.data)
    expected = pair("PPOLoss", problem)[1](problem.data)
    assert_close(out["kl"], kl.mean())
    assert_close(out["loss_objective"], expected["loss_objective"] + 2.0 * kl.mean())
