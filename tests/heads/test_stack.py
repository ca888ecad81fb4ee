"""Heads stacked in one entry: ``StackHeads`` writes it, ``heads={...}`` reads its columns."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import CompositeDistribution, TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torch.distributions import Categorical, Normal
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import ProbabilisticActor

import composite_losses as cl
from composite_losses import StackHeads
from composite_losses.errors import ConfigError, MissingKeyError, ShapeError
from tests.tolerances import assert_close

SIZES = {"x": 3, "y": 3, "say": 5}
OBS = 4
LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[str, ...]]] = {
    "B": ((6,), (6,), ()),
    "BT": ((3, 4), (3, 4), ()),
    "BA": ((5,), (5, 2), ("agents",)),
    "A=H": ((3,), (3, 3), ("agents",)),  # as many agents as heads, and as rows
    "one": ((1,), (1, 1), ("agents",)),
}
LOSSES = {
    "PPOLoss": {},
    "ClipPPOLoss": {},
    "ClipPPOLoss-per_head": {"ratio": "per_head", "clip_epsilon": {"say": 0.05}},
    "ClipPPOLoss-leafwise": {"ratio": "leafwise"},
    "ClipPPOLoss-mixed": {"ratio": "mixed"},
    "KLPENPPOLoss": {},
    "A2CLoss": {},
    "ReinforceLoss": {"entropy_coeff": {"x": 0.1, "y": 0.2, "say": 0.3}},
    "PolicyLoss": {"surrogate": cl.Clip(0.1, ratio="per_head")},
}


class Split(nn.Linear):
    """One logit per choice of every head."""

    def forward(self, observation: Tensor) -> tuple[Tensor, ...]:
        return super().forward(observation).split(list(SIZES.values()), -1)


def key(group: tuple[str, ...], *parts: str) -> Any:
    whole = (*group, *parts)
    return whole if len(whole) > 1 else whole[0]


def networks(group: tuple[str, ...]) -> tuple[ProbabilisticActor, TensorDictModule]:
    """Three categorical heads under their names, and a critic; the same weights every time."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        logits = [key(group, "params", name, "logits") for name in SIZES]
        actor = ProbabilisticActor(
            TensorDictModule(Split(OBS, 11), [key(group, "observation")], logits),
            in_keys=[key(group, "params")],
            out_keys=[key(group, name) for name in SIZES],
            distribution_class=CompositeDistribution,
            distribution_kwargs={
                "distribution_map": dict.fromkeys(SIZES, Categorical),
                "name_map": {name: key(group, name) for name in SIZES},
            },
            return_log_prob=True,
        )
        critic = TensorDictModule(
            nn.Linear(OBS, 1), [key(group, "observation")], [key(group, "state_value")]
        )
    return actor, critic


def collected(layout: str) -> TensorDict:
    """What the stacked policy wrote: the heads, their log-probs and parameters, and the stack."""
    root, sample, group = LAYOUTS[layout]
    torch.manual_seed(1)
    data = TensorDict({}, root)
    if group:
        data[group] = TensorDict({}, sample)
    data[key(group, "observation")] = torch.randn(*sample, OBS)
    actor, _ = networks(group)
    stack = StackHeads([key(group, name) for name in SIZES], key(group, "action"))
    with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
        TensorDictSequential(actor, stack)(data)
    for name in ("advantage", "value_target", "state_value"):
        data[key(group, name)] = torch.randn(*sample, 1)
    return data


def loss_of(name: str, layout: str, **options: Any) -> Any:
    group = LAYOUTS[layout][2]
    loss = getattr(cl, name.split("-")[0])(*networks(group), **LOSSES[name], **options).eval()
    with torch.no_grad():  # the policy has moved
        for i, parameter in enumerate(loss.parameters()):
            parameter.add_(0.3 * torch.sin(torch.arange(parameter.numel()) + i).view_as(parameter))
    names = {"advantage": "advantage", "value_target": "value_target", "value": "state_value"}
    loss.set_keys(**{k: key(group, v) for k, v in names.items()})
    return loss


def columns(group: tuple[str, ...]) -> dict[str, tuple[Any, int]]:
    return {name: (key(group, "action"), i) for i, name in enumerate(SIZES)}


def result(loss: Any, data: TensorDictBase) -> tuple[dict[str, Tensor], list[Tensor]]:
    loss.zero_grad(set_to_none=True)
    out = loss(data)
    sum(v.sum() for k, v in out.items() if k.startswith("loss")).backward()
    return dict(out.items()), [p.grad.clone() for p in loss.parameters()]


def same(left: Any, right: Any) -> None:
    assert list(left[0]) == list(right[0])
    for name, value in left[0].items():
        assert torch.equal(value, right[0][name]), name
    assert all(torch.equal(a, b) for a, b in zip(left[1], right[1], strict=True))


# --- StackHeads ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.long, torch.float32, torch.bool])
@pytest.mark.parametrize("shape", [(), (4,), (4, 2), (2, 3, 2)])
def test_stack(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """``[*S]`` each becomes ``[*S, H]``, in the order given; the heads stay as they are."""
    heads = {name: torch.randint(0, 2, shape).to(dtype) for name in ("a", "b", "c")}
    data = TensorDict(heads, shape)
    stack = StackHeads(["c", "a", "b"], "action")
    assert stack.in_keys == ["c", "a", "b"] and stack.out_keys == ["action"]
    assert stack(data) is data
    assert data["action"].shape == (*shape, 3) and data["action"].dtype == dtype
    for column, name in enumerate("cab"):
        assert torch.equal(data["action"][..., column], heads[name])
        assert data[name] is heads[name] or torch.equal(data[name], heads[name])
    assert set(data.keys()) == {"a", "b", "c", "action"}


def test_nested_keys() -> None:
    """Heads and stack may lie in a group; keys may be nested tuples."""
    inner = TensorDict({"x": torch.zeros(4, 2), ("sub", "y"): torch.ones(4, 2)}, [4, 2])
    data = TensorDict({"agents": inner}, [4])
    stack = StackHeads([("agents", "x"), ("agents", ("sub", "y"))], ("agents", "action"))
    assert stack.in_keys == [("agents", "x"), ("agents", "sub", "y")]
    assert torch.equal(stack(data)["agents", "action"], torch.tensor([0.0, 1.0]).expand(4, 2, 2))


def test_in_a_sequence() -> None:
    """It is a TensorDict module: in a sequence it takes the heads from the actor before it."""
    actor, _ = networks(())
    sequence = TensorDictSequential(actor, StackHeads(list(SIZES), "action"))
    assert "action" in sequence.out_keys and not {"action", *SIZES} & set(sequence.in_keys)
    assert not list(StackHeads(["x"], "action").parameters())


def test_a_head_is_missing() -> None:
    """A KeyError names the head and the keys that are there."""
    data = TensorDict({"x": torch.zeros(4)}, [4])
    with pytest.raises(MissingKeyError, match="'y'") as error:
        StackHeads(["x", "y"], "action")(data)
    assert isinstance(error.value, KeyError) and "'x'" in str(error.value)
    assert set(data.keys()) == {"x"}


@pytest.mark.parametrize("other", [(4, 1), (4, 2)])
def test_heads_of_two_shapes(other: tuple[int, ...]) -> None:
    """Nothing is broadcast: a ShapeError names heads and shapes."""
    data = TensorDict({"x": torch.zeros(4), "y": torch.zeros(other)}, [4])
    with pytest.raises(ShapeError) as error:
        StackHeads(["x", "y"], "action")(data)
    for piece in ("'x'", "[4]", "'y'", str(list(other))):
        assert piece in str(error.value)
    assert set(data.keys()) == {"x", "y"}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", LOSSES)
def test_losses_leave_the_stack_alone(name: str, layout: str) -> None:
    """Beside the single heads, the stacked entry changes nothing, whatever it holds."""
    group, data = LAYOUTS[layout][2], collected(layout)
    expected = result(loss_of(name, layout), data.exclude(key(group, "action")))
    same(result(loss_of(name, layout), data), expected)
    data[key(group, "action")] = torch.full((*LAYOUTS[layout][1], 3), -1)
    same(result(loss_of(name, layout), data), expected)


# --- heads={...} ---------------------------------------------------------------------------------


@pytest.mark.parametrize("functional", [True, False], ids=["functional", "modules"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", LOSSES)
def test_columns_equal_single_heads(name: str, layout: str, functional: bool) -> None:
    """Where only the stack was kept, losses, metrics, gradients are those of the single heads."""
    group, data = LAYOUTS[layout][2], collected(layout)
    single = loss_of(name, layout)
    stacked = loss_of(name, layout, heads=columns(group), functional=functional)
    only = data.exclude(*(key(group, head) for head in SIZES))
    before = only.clone()
    same(result(stacked, only), result(single, data))
    assert key(group, "action") in stacked.in_keys
    assert not {key(group, head) for head in SIZES} & set(stacked.in_keys)
    chosen = only.select(*stacked.in_keys, strict=False)
    same(result(stacked, chosen), result(single, data))
    assert set(only.keys(True, True)) == set(before.keys(True, True))
    for entry, value in before.items(True, True):
        assert torch.equal(only[entry], value), entry


@pytest.mark.parametrize("layout", LAYOUTS)
def test_log_probs_by_hand(layout: str) -> None:
    """Column h is scored under head h's logits; log-probs stand under the heads' own keys."""
    _, _, group = LAYOUTS[layout]
    data = collected(layout)
    only = data.exclude(*(key(group, head) for head in SIZES))
    loss = loss_of("ClipPPOLoss", layout, heads=columns(group))
    linear = loss.actor_network[0].module
    with loss.actor_network_params.to_module(loss.actor_network), torch.no_grad():
        logits = linear(data[key(group, "observation")])
    found = loss.log_probs(only)
    for i, head in enumerate(SIZES):
        column = only[key(group, "action")][..., i]
        expected = logits[i].log_softmax(-1).gather(-1, column.unsqueeze(-1)).squeeze(-1)
        assert_close(found["current"][key(group, head)].detach(), expected)
        stored = data[key(group, f"{head}_log_prob")]
        assert_close(found["behaviour"][key(group, head)], stored)
    assert loss.log_prob_source(only) == dict.fromkeys(SIZES, "stored")


@pytest.mark.parametrize("layout", ["B", "BA", "A=H"])
@pytest.mark.parametrize("name", ["ClipPPOLoss", "ClipPPOLoss-per_head", "KLPENPPOLoss"])
def test_columns_with_rebuilt_log_probs(name: str, layout: str) -> None:
    """No stored log-prob: the stored logits, scored on the columns, give the same loss."""
    group, data = LAYOUTS[layout][2], collected(layout)
    drop = [key(group, f"{head}_log_prob") for head in SIZES]
    only = data.exclude(*(key(group, head) for head in SIZES), *drop)
    loss = loss_of(name, layout, heads=columns(group))
    assert loss.log_prob_source(only) == dict.fromkeys(SIZES, "params")
    found, expected = result(loss, only), result(loss_of(name, layout), data)
    for entry, value in expected[0].items():
        assert_close(found[0][entry].detach(), value.detach())
    for left, right in zip(found[1], expected[1], strict=True):
        assert_close(left, right)


def test_a_log_prob_beside_the_stack_is_no_heads() -> None:
    """``action_log_prob`` beside a stacked ``action`` is not the log-prob of any single column."""
    data = collected("B")
    expected = result(loss_of("ClipPPOLoss-per_head", "B"), data)
    only = data.exclude(*SIZES, *(f"{head}_log_prob" for head in SIZES))
    only["action_log_prob"] = torch.full((6,), -9.0)
    loss = loss_of("ClipPPOLoss-per_head", "B", heads=columns(()))
    assert loss.log_prob_source(only) == dict.fromkeys(SIZES, "params")
    assert_close(loss(only)["loss_objective"].detach(), expected[0]["loss_objective"].detach())


def test_any_order_of_columns() -> None:
    """The environment's order decides which column a head reads, not the actor's."""
    data = collected("B")
    expected = result(loss_of("ClipPPOLoss-per_head", "B"), data)
    order = ["say", "x", "y"]
    data["turned"] = torch.stack([data[name] for name in order], -1)
    heads = {name: ("turned", order.index(name)) for name in SIZES}
    only = data.exclude(*SIZES, "action")
    same(result(loss_of("ClipPPOLoss-per_head", "B", heads=heads), only), expected)
    negative = {name: ("turned", order.index(name) - 3) for name in SIZES}
    same(result(loss_of("ClipPPOLoss-per_head", "B", heads=negative), only), expected)


def test_some_heads_stacked() -> None:
    """A head that the mapping does not name is read from its own entry."""
    data = collected("BA")
    expected = result(loss_of("ClipPPOLoss", "BA"), data)
    agents = data["agents"]
    agents["pair"] = torch.stack([agents["x"], agents["y"]], -1)
    heads = {"x": (("agents", "pair"), 0), "y": (("agents", "pair"), 1)}
    only = data.exclude(("agents", "x"), ("agents", "y"), ("agents", "action"))
    same(result(loss_of("ClipPPOLoss", "BA", heads=heads), only), expected)


class Normals(nn.Linear):
    """Means and scales of two one-dimensional heads."""

    def forward(self, observation: Tensor) -> tuple[Tensor, ...]:
        a, b, c, d = super().forward(observation).unbind(-1)
        return a, b.exp(), c, d.exp()


def test_columns_of_continuous_heads() -> None:
    """A stacked entry of floats: each column a scalar Normal; the objective by hand (A2C)."""
    params = [("params", h, p) for h in ("left", "right") for p in ("loc", "scale")]
    actor = ProbabilisticActor(
        TensorDictModule(Normals(OBS, 4), ["observation"], params),
        in_keys=["params"],
        out_keys=["left", "right"],
        distribution_class=CompositeDistribution,
        distribution_kwargs={"distribution_map": {"left": Normal, "right": Normal}},
    )
    data = TensorDict({"observation": torch.randn(5, OBS), "torque": torch.randn(5, 2)}, [5])
    data["advantage"] = torch.randn(5, 1)
    loss = cl.A2CLoss(actor, heads={"left": ("torque", 0), "right": ("torque", 1)})
    with torch.no_grad():
        a, b, c, d = actor[0].module(data["observation"])
    score = Normal(a, b).log_prob(data["torque"][:, 0])
    score = score + Normal(c, d).log_prob(data["torque"][:, 1])
    expected = -(score * data["advantage"].squeeze(-1)).mean()
    assert_close(loss(data)["loss_objective"].detach(), expected)


@pytest.mark.parametrize(
    ("heads", "piece"),
    [
        ({"z": ("action", 0)}, "'z'"),
        ({"x": "action"}, "'x'"),
        ({"x": ("action", "0")}, "'x'"),
        ({"x": ("action", 0, 1)}, "'x'"),
    ],
)
def test_mappings_that_say_nothing(heads: Any, piece: str) -> None:
    """An unknown head or anything but (key, column): a ConfigError at construction."""
    with pytest.raises(ConfigError, match=piece):
        cl.ClipPPOLoss(*networks(()), heads=heads)


def test_column_beyond_the_entry() -> None:
    """The stacked entry has too few columns: an error that names head and key, no index error."""
    data = collected("B")
    data["action"] = data["action"][..., :2]
    loss = loss_of("ClipPPOLoss", "B", heads=columns(()))
    with pytest.raises(ValueError, match=r"'say'.*'action'"):
        loss(data.exclude(*SIZES))


def test_stacked_entry_is_missing() -> None:
    """Without the entry: a KeyError that names it."""
    data = collected("B").exclude("action", *SIZES)
    with pytest.raises(MissingKeyError, match="action"):
        loss_of("ClipPPOLoss", "B", heads=columns(()))(data)
