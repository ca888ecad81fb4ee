"""The behaviour log-prob: which entry is taken, what is rebuilt, and how a failure is explained."""

import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch import distributions as D

from composite_losses import resolve_log_probs
from composite_losses.errors import (
    CompositeLossError,
    ConfigError,
    GraphError,
    MissingKeyError,
    ShapeError,
)
from composite_losses.heads import ActorProgram, compile_plan, find
from composite_losses.heads.chain import stored_action
from tests.cases.builders_ab import snapshot
from tests.heads.actors import ACTORS, Net, collected
from tests.tolerances import assert_close

MODULAR = [name for name in ACTORS if name != "opaque"]
COMPOSITES = ["flat", "mapped", "declared", "keyed", "nested", "partial", "lazy"]


def world(name: str = "flat", *batch: int) -> tuple[Any, TensorDict, dict[Any, Tensor]]:
    """An actor, a rollout of it, and its log-probs by hand; afterwards the weights have moved."""
    kind = ACTORS[name]
    actor = kind.make(Net())
    td = collected(actor, *(batch or (5,)))
    logits, loc, scale = (
        next(v for k, v in td.items(True, True) if (k if isinstance(k, str) else k[-1]) == leaf)
        for leaf in ("logits", "loc", "scale")
    )
    expected = {
        kind.gear: D.Categorical(logits=logits).log_prob(td[kind.gear]),
        kind.move: D.Normal(loc, scale).log_prob(td[kind.move]),
    }
    with torch.no_grad():
        for p in actor.parameters():
            p.add_(1.0)
    return actor, td, expected


def log_prob_keys(td: TensorDict) -> list[Any]:
    """The log-prob entries that the actor wrote, in the data's order."""
    return [key for key in td.keys(True, True) if "log_prob" in str(key) or "lp" in str(key)]


def without_log_probs(td: TensorDict) -> TensorDict:
    return td.exclude(*log_prob_keys(td))


class Broken(nn.Module):
    """What must not run."""

    def forward(self, *x: Tensor) -> Tensor:
        raise RuntimeError("a network ran")


# --- sources --------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [(), (5,), (3, 2)])
@pytest.mark.parametrize("drop", ["nothing", "log_probs"])
@pytest.mark.parametrize("name", MODULAR)
def test_stored_and_rebuilt_agree(name: str, drop: str, batch: tuple[int, ...]) -> None:
    """Case 33: log-probs as stored, else from the stored parameters; in the distribution's shape.

    The current network is not asked, nothing is drawn, and the data are not touched.
    """
    actor, td, expected = world(name, *batch) if batch else world(name)
    td = td if batch else td[0]
    expected = expected if batch else {key: value[0] for key, value in expected.items()}
    td = td if drop == "nothing" else without_log_probs(td)
    before, state = snapshot(td), torch.get_rng_state()
    found, sources = resolve_log_probs(actor, td)
    assert snapshot(td) == before
    assert torch.equal(torch.get_rng_state(), state)
    source = "stored" if drop == "nothing" else "params"
    assert sources == dict.fromkeys((k if isinstance(k, str) else k[-1] for k in expected), source)
    assert set(found.keys(True, True)) == set(expected)
    assert found.batch_size == td.batch_size
    for key, value in expected.items():
        assert_close(found[key], value)  # the normal's event dim is kept
        assert not found[key].requires_grad


def test_each_head_goes_its_own_way() -> None:
    """Case 32: the gear is stored, the move rebuilt; a joint log-prob beside them is not read."""
    actor, td, expected = world()
    td = td.exclude("move_log_prob").set("sample_log_prob", torch.zeros(5))
    found, sources = resolve_log_probs(actor, td)
    assert sources == {"gear": "stored", "move": "params"}
    assert_close(found["move"], expected["move"])
    assert "sample_log_prob" not in found


@pytest.mark.parametrize("place", ["mine", ("action", "sample_log_prob"), "sample_log_prob"])
def test_a_joint_log_prob(place: Any) -> None:
    """Case 7: under the set key, beside the actions, or at the root; as stored, under one name."""
    actor, td, _ = world("mapped")
    joint = torch.randn(5)
    td = without_log_probs(td).set(place, joint)
    keys = {"log_prob_keys": place} if place == "mine" else {}
    found, sources = resolve_log_probs(actor, td, **keys)
    assert sources == {"g": "joint", "m": "joint"}
    assert list(found.keys()) == ["sample_log_prob"]
    assert_close(found["sample_log_prob"], joint)
    # forced: it is no log-prob of a head, rebuilt or not
    assert set(resolve_log_probs(actor, td, source="params", **keys)[1].values()) == {"params"}


def test_joint_candidates_in_order() -> None:
    """Case 7: the set key first, then beside the actions, then at the root."""
    actor, td, _ = world("mapped")
    td = without_log_probs(td)
    places = ["mine", ("action", "sample_log_prob"), "sample_log_prob"]
    for i, place in enumerate(places):
        td.set(place, torch.full((5,), float(i)))
    for i, place in enumerate(places):
        found, _ = resolve_log_probs(actor, td, log_prob_keys="mine")
        assert_close(found["sample_log_prob"], torch.full((5,), float(i)))
        td = td.exclude(place)


def test_head_candidates_in_order() -> None:
    """Case 31: the set key, the declared one, ``<action>_log_prob``."""
    actor, td, _ = world("declared")
    td = without_log_probs(td)
    places = ["mine", "lp_move", "move_log_prob"]
    for i, place in enumerate(places):
        td.set(place, torch.full((5, 2), float(i)))
    td["lp", "gear"] = torch.zeros(5)
    for i, place in enumerate(places):
        found, _ = resolve_log_probs(actor, td, log_prob_keys=[("lp", "gear"), "mine"])
        assert_close(found["move"], torch.full((5, 2), float(i)))
        td = td.exclude(place)


@pytest.mark.parametrize("name", COMPOSITES)
def test_forced_sources(name: str) -> None:
    """Case 32: "stored" reads no parameters, "params" no log-probs, however wrong they are."""
    actor, td, expected = world(name)
    misleading = td.clone()
    for key in log_prob_keys(td):
        misleading[key] = torch.zeros_like(td[key])
    found, sources = resolve_log_probs(actor, misleading, source="params")
    assert set(sources.values()) == {"params"}
    misleading = td.clone()
    misleading["params"] = td["params"].apply(lambda x: x * 0 + 1)
    kept, stored = resolve_log_probs(actor, misleading, source="stored")
    assert set(stored.values()) == {"stored"}
    for key, value in expected.items():
        assert_close(found[key], value)
        assert_close(kept[key], value)


def test_no_network_runs() -> None:
    """Case 35: the chain works with networks that cannot."""
    actor, td, expected = world()
    actor[0].module = Broken()
    assert_close(resolve_log_probs(actor, without_log_probs(td))[0]["gear"], expected["gear"])
    with pytest.raises(MissingKeyError):
        resolve_log_probs(actor, without_log_probs(td).exclude("params"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rebuilt_in_float32(dtype: torch.dtype) -> None:
    """Case 76: stored parameters of half precision give log-probs of single precision."""
    actor, td, _ = world()
    td = without_log_probs(td)
    td["params"] = td["params"].to(dtype)
    found, _ = resolve_log_probs(actor, td)
    loc, scale = td["params", "move", "loc"].float(), td["params", "move", "scale"].float()
    assert found["move"].dtype == torch.float32
    assert_close(found["move"], D.Normal(loc, scale).log_prob(td["move"]))


def test_a_stray_singleton_of_the_action_is_squeezed() -> None:
    """Case 1: an action [B, 1] for a distribution [B]; any other shape raises with both shapes."""
    actor, td, expected = world()
    td = without_log_probs(td)
    wide = td.clone().set("gear", td["gear"].unsqueeze(-1))
    assert_close(resolve_log_probs(actor, wide)[0]["gear"], expected["gear"])
    wider = td.clone().set("gear", td["gear"].unsqueeze(-1).expand(5, 5))
    with pytest.raises(ShapeError) as caught:
        resolve_log_probs(actor, wider)
    for piece in ("'gear'", "[5]", "[5, 5]"):
        assert piece in str(caught.value), piece


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "tried", "not_tried"),
    [
        ("auto", ["stored: ", "joint: ", "params: ", "'move_log_prob'", "'params'"], []),
        ("stored", ["stored: ", "'move_log_prob'"], ["params: "]),
        ("params", ["params: ", "'params'"], ["stored: ", "joint: ", "'move_log_prob'"]),
    ],
)
def test_the_message_lists_what_was_tried(
    source: str, tried: list[str], not_tried: list[str]
) -> None:
    """Case 32: head, source, every key of each step, the keys that are there, and the fix."""
    actor, td, _ = world()
    less = td.exclude("move_log_prob")  # for "stored" the parameters are there, and no help
    if source != "stored":
        less = less.exclude("params" if source == "params" else ("params", "move"))
    before = snapshot(less)
    with pytest.raises(MissingKeyError) as caught:
        resolve_log_probs(actor, less, source=source)
    assert snapshot(less) == before
    assert isinstance(caught.value, KeyError)
    assert isinstance(caught.value, CompositeLossError)
    text = str(caught.value)
    head = "'gear'" if source == "params" else "'move'"
    pieces = [head, repr(source), *tried, "'observation'", "return_log_prob=True", "set_keys"]
    for piece in pieces:
        assert piece in text, piece
    for piece in not_tried:
        assert piece not in text.partition("Keys present")[0], piece
    assert not text.startswith(("'", '"'))  # a KeyError shows the repr of its text
    assert "\\n" not in text


def test_the_message_without_parameters_to_rebuild_from() -> None:
    """Case 32: an actor that only has get_dist declares no parameters, and the message says so."""
    actor = ACTORS["opaque"].make(Net())
    td = TensorDict({"observation": torch.randn(5, 4), "gear": torch.zeros(5)}, [5])
    with pytest.raises(MissingKeyError, match="declares no distribution parameters"):
        resolve_log_probs(actor, td)


def test_where_a_joint_one_would_not_do() -> None:
    """Case 7: a ratio per head needs log-probs per head; the message says so."""
    actor, td, _ = world()
    program = ActorProgram(actor)
    plan = compile_plan(program.slots, program.joint)
    td = without_log_probs(td).exclude("params").set("sample_log_prob", torch.zeros(5))
    assert find(program, plan, td, joint_ok=True).sources == {"gear": "joint", "move": "joint"}
    with pytest.raises(MissingKeyError, match="log-probs per head are needed"):
        find(program, plan, td, joint_ok=False)


@pytest.mark.parametrize("source", ["auto", "stored"])
def test_a_stored_log_prob_with_a_graph(source: str) -> None:
    """Case 38: its key and the way out."""
    actor, td, _ = world()
    td["move_log_prob"].requires_grad_()
    with pytest.raises(GraphError, match=r"move_log_prob.*no_grad") as caught:
        resolve_log_probs(actor, td, source=source)
    assert isinstance(caught.value, RuntimeError)
    # where it is not read, it does no harm
    assert resolve_log_probs(actor, td, source="params")[1] == {"gear": "params", "move": "params"}


@pytest.mark.parametrize("entry", [("params", "move", "scale"), "gear", "sample_log_prob"])
def test_other_entries_with_a_graph(entry: Any) -> None:
    """Case 38: parameters that are rebuilt from, an action that is scored, a joint log-prob."""
    actor, td, _ = world()
    td = without_log_probs(td)
    if entry == "gear":
        td["gear"] = td["gear"].float()
    if entry == "sample_log_prob":
        td[entry] = torch.zeros(5)
    td[entry].requires_grad_()
    with pytest.raises(GraphError) as caught:
        resolve_log_probs(actor, td)
    assert (entry if isinstance(entry, str) else entry[-1]) in str(caught.value)
    assert "no_grad" in str(caught.value)


@pytest.mark.parametrize("source", ["", "Auto", "joint", "current", None])
def test_sources_are_three_words(source: Any) -> None:
    """Case 32: anything else is an error that lists them."""
    actor, td, _ = world()
    with pytest.raises(ConfigError) as caught:
        resolve_log_probs(actor, td, source=source)
    for piece in ("'auto'", "'stored'", "'params'", repr(source)):
        assert piece in str(caught.value), piece


def test_as_many_keys_as_heads() -> None:
    """Case 10: one key is joint, two are per head, three are an error."""
    actor, td, _ = world()
    with pytest.raises(ConfigError, match=r"2, one per head.*found 3"):
        resolve_log_probs(actor, td, log_prob_keys=["a", "b", "c"])


def test_a_missing_action() -> None:
    """Case 11: needed only where a log-prob is rebuilt; the message names key, fix and contents."""
    actor, td, expected = world("mapped")
    less = td.exclude(("action", "m"))
    assert_close(resolve_log_probs(actor, less)[0]["action", "m"], expected["action", "m"])
    with pytest.raises(MissingKeyError) as caught:
        resolve_log_probs(actor, less, source="params")
    for piece in ("'m'", "('action', 'm')", "('action', 'g')", "name_map", "set_keys(action="):
        assert piece in str(caught.value), piece


# --- stacked actions ------------------------------------------------------------------------------


def test_columns_of_a_stacked_action() -> None:
    """Case 17: a head reads its column; one that is not there is an error with the shape."""
    actor, td, _ = world()
    program = ActorProgram(actor)
    td["both"] = torch.stack([td["gear"], 2 - td["gear"]], -1)
    for column, want in ((0, td["gear"]), (1, 2 - td["gear"]), (-1, 2 - td["gear"])):
        head = compile_plan(program.slots, columns={"gear": ("both", column)}).heads[0]
        assert torch.equal(stored_action(td, head), want)
    for column in (2, -3):
        head = compile_plan(program.slots, columns={"gear": ("both", column)}).heads[0]
        with pytest.raises(ConfigError) as caught:
            stored_action(td, head)
        for piece in ("'gear'", "'both'", "[5, 2]", str(column)):
            assert piece in str(caught.value), piece


# --- values ---------------------------------------------------------------------------------------


def test_a_rebuilt_value() -> None:
    """Case 33: logits (log .7, log .2, log .1): the gears 0, 1, 2 have log-probs log of these."""
    actor, td, _ = world("flat", 3)
    td = without_log_probs(td)
    probabilities = [0.7, 0.2, 0.1]
    td["gear"] = torch.arange(3)
    td["params", "gear", "logits"] = torch.tensor(probabilities).log().expand(3, 3)
    found, _ = resolve_log_probs(actor, td)
    assert_close(found["gear"], [math.log(p) for p in probabilities])
