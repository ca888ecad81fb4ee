"""An actor as a program: its heads, a run without sampling, stored parameters."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    CompositeDistribution,
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
    set_composite_lp_aggregate,
    set_interaction_type,
)
from torch import Tensor, nn
from torch import distributions as D
from torchrl.modules import IndependentNormal, MaskedCategorical, ProbabilisticActor

from composite_losses.errors import ConfigError, MissingKeyError
from composite_losses.heads import ActorProgram, Scratch, Slot, StackHeads
from tests.heads.actors import ACTORS, RANDOM, Net, collected, composite, data, head
from tests.tolerances import assert_close

STATIC = [name for name, kind in ACTORS.items() if kind.settled]
MODULAR = [name for name in ACTORS if name != "opaque"]


def made(name: str) -> tuple[Net, Any, ActorProgram]:
    net = Net()
    actor = ACTORS[name].make(net)
    return net, actor, ActorProgram(actor)


def by_hand(actor: Any, net: Net, td: TensorDict, kind: Any) -> dict[Any, Tensor]:
    """Action key -> log-prob of the stored action, from torch.distributions, event dims kept."""
    logits, loc, scale = net(td["observation"])
    later = [m for m in actor.modules() if type(m).__name__ == "Later"]
    if later:
        loc, scale = later[0](td["observation"], td[kind.gear])
    return {
        kind.gear: D.Categorical(logits=logits).log_prob(td[kind.gear]),
        kind.move: D.Normal(loc, scale).log_prob(td[kind.move]),
    }


def run(program: ActorProgram, td: TensorDict) -> dict[Any, Any]:
    """Action key -> terms; the data stay as they are."""
    before = set(td.keys(include_nested=True))
    found = program.run(Scratch(td))
    assert set(td.keys(include_nested=True)) == before
    return found


def with_actions(kind: Any, *batch: int) -> TensorDict:
    """Observations and arbitrary stored actions, no parameters."""
    td = data(*batch)
    td[kind.gear], td[kind.move] = torch.randint(3, batch), torch.randn(*batch, 2)
    return td


# --- heads ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STATIC)
def test_heads_are_known_without_a_run(name: str) -> None:
    """Case 11: what the actor writes, in its order; its parameters; nothing was run."""
    kind = ACTORS[name]
    net, _, program = made(name)
    assert [slot.action for slot in program.slots] == [kind.gear, kind.move]
    assert program.settled
    assert program.parameter_keys == list(kind.parameters)
    assert net.calls == 0


@pytest.mark.parametrize("name", MODULAR)
def test_declared_log_probs_are_what_the_actor_writes(name: str) -> None:
    """Cases 10, 31: for each head the key that a rollout holds, declared ones first."""
    kind = ACTORS[name]
    net, actor, program = made(name)
    td = collected(actor, 5)
    written = set(td.keys(include_nested=True, leaves_only=True))
    program.discover(td)
    expected = by_hand(actor, net, td, kind)
    for slot, first in zip(program.slots, kind.log_probs, strict=True):
        assert slot.log_probs[0] == first
        (key,) = [key for key in slot.log_probs if key in written]
        assert_close(td[key], expected[slot.action].detach())


# TensorDict itself refuses log_prob_keys under the switch.
SWITCHED = [(n, b) for n in STATIC for b in (True, False, None) if (n, b) != ("declared", True)]


@pytest.mark.parametrize("call", [True, False, None])
@pytest.mark.parametrize(("name", "build"), SWITCHED)
def test_the_aggregate_switch(name: str, build: bool | None, call: bool | None) -> None:
    """Case 8: the heads, their log-prob and parameter keys are the same whatever it says."""
    kind, net = ACTORS[name], Net()
    with set_composite_lp_aggregate(build):
        actor = kind.make(net)
    with set_composite_lp_aggregate(call):
        program = ActorProgram(actor)
        assert [slot.action for slot in program.slots] == [kind.gear, kind.move]
        for slot, first in zip(program.slots, kind.log_probs, strict=True):
            assert first in slot.log_probs
        assert program.parameter_keys == list(kind.parameters)
        td = with_actions(kind, 4)
        expected = by_hand(actor, net, td, kind)
        for key, terms in run(program, td).items():
            assert_close(terms.log_prob(td[key]), expected[key])


def test_a_single_distribution() -> None:
    """Case 31: one head; parameters in the order of the module's in_keys, wherever they lie."""
    actor = ProbabilisticActor(
        TensorDictModule(lambda x: (x, x.exp()), ["observation"], [("p", "loc"), "scale"]),
        in_keys={"loc": ("p", "loc"), "scale": "scale"},
        out_keys=[("a", "action")],
        distribution_class=IndependentNormal,
        **RANDOM,
    )
    program = ActorProgram(actor)
    assert program.slots == [Slot(("a", "action"), program.slots[0].log_probs)]
    assert ("a", "action_log_prob") in program.slots[0].log_probs
    assert program.parameter_keys == [("p", "loc"), "scale"]
    assert program.joint == []
    td = data(3).set(("a", "action"), torch.randn(3, 4))
    x = td["observation"]
    (terms,) = run(program, td).values()
    expected = D.Normal(x, x.exp()).log_prob(td["a", "action"]).sum(-1)
    assert_close(terms.log_prob(td["a", "action"]), expected)


def test_a_composite_of_one_head() -> None:
    """Case 2: nothing is special about one head."""
    net = nn.Linear(4, 3)
    actor = ProbabilisticActor(
        TensorDictModule(net, ["observation"], [("params", "gear", "logits")]),
        in_keys=["params"],
        out_keys=["gear"],
        distribution_class=composite(Net())[-1].distribution_class,
        distribution_kwargs={"distribution_map": {"gear": D.Categorical}},
        **RANDOM,
    )
    program = ActorProgram(actor)
    assert [slot.action for slot in program.slots] == ["gear"]
    td = data(3).set("gear", torch.tensor([0, 1, 2]))
    expected = D.Categorical(logits=net(td["observation"])).log_prob(td["gear"])
    assert_close(run(program, td)["gear"].log_prob(td["gear"]), expected)


@pytest.mark.parametrize(
    "actor", [nn.Linear(2, 2), TensorDictModule(nn.Linear(2, 2), ["a"], ["b"])]
)
def test_a_module_without_a_distribution(actor: nn.Module) -> None:
    """An error that says what an actor is, and what was found."""
    with pytest.raises(ConfigError) as caught:
        ActorProgram(actor)
    for piece in ("ProbabilisticActor", "get_dist", type(actor).__name__):
        assert piece in str(caught.value), piece


# --- a run ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [(), (6,), (3, 2)])
@pytest.mark.parametrize("name", ACTORS)
def test_a_run_scores_the_stored_actions(name: str, batch: tuple[int, ...]) -> None:
    """Cases 36, 37: one network pass, nothing drawn, no action touched; torch's log-probs."""
    kind = ACTORS[name]
    net, actor, program = made(name)
    td = with_actions(kind, *batch)
    expected = by_hand(actor, net, td, kind)
    scratch, state, before = Scratch(td), torch.get_rng_state(), net.calls
    found = program.run(scratch)
    assert net.calls == before + 1
    assert torch.equal(torch.get_rng_state(), state)
    assert set(found) == {kind.gear, kind.move}
    for key, terms in found.items():
        assert_close(terms.log_prob(td[key]), expected[key])
        assert scratch.get(key) is td[key]
    written = set(scratch.keys(include_nested=True, leaves_only=True))
    assert not any("log_prob" in str(key) for key in written)
    assert program.settled
    assert [slot.action for slot in program.slots] == [kind.gear, kind.move]


@pytest.mark.parametrize("interaction", list(InteractionType))
def test_the_interaction_type_does_not_matter(interaction: InteractionType) -> None:
    """Case 16: deterministic exploration neither samples nor warns."""
    net, actor, program = made("flat")
    td = with_actions(ACTORS["flat"], 5)
    scratch, state = Scratch(td), torch.get_rng_state()
    with set_interaction_type(interaction):
        found = program.run(scratch)
    assert torch.equal(torch.get_rng_state(), state)
    for key, expected in by_hand(actor, net, td, ACTORS["flat"]).items():
        assert_close(found[key].log_prob(td[key]), expected)
        assert scratch.get(key) is td[key]


def test_a_later_head_follows_the_stored_action() -> None:
    """Case 36: another stored gear gives another distribution of the move, and no other change."""
    net, actor, program = made("several")
    td = with_actions(ACTORS["several"], 5)
    before = run(program, td)["move"].log_prob(td["move"])
    td["gear"] = (td["gear"] + 1) % 3
    after = run(program, td)["move"].log_prob(td["move"])
    assert (before != after).all()
    assert_close(after, by_hand(actor, net, td, ACTORS["several"])["move"])


class Refuses(nn.Module):
    """A module that must not run."""

    def forward(self, *x: Tensor) -> Tensor:
        raise RuntimeError("ran")


def test_what_follows_the_last_distribution_is_not_run() -> None:
    """Case 37: exploration and stacking are no part of scoring stored actions."""
    net = Net()
    actor = TensorDictSequential(
        composite(net),
        StackHeads(["gear", "move"], "action"),  # of unlike shapes: it would raise
        TensorDictModule(Refuses(), ["gear"], ["noise"]),
    )
    found = run(ActorProgram(actor), with_actions(ACTORS["flat"], 5))
    assert set(found) == {"gear", "move"}


def test_what_writes_an_action_is_not_run() -> None:
    """Case 36: a module that rewrites the first action would undo the stored one."""
    actor = ProbabilisticTensorDictSequential(
        TensorDictModule(nn.Linear(4, 3), ["observation"], ["logits"]),
        head(["logits"], "gear", D.Categorical),
        TensorDictModule(Refuses(), ["gear"], ["gear"]),
        TensorDictModule(lambda x: (x, x.exp()), ["observation"], ["loc", "scale"]),
        head(["loc", "scale"], "move", D.Normal),
    )
    td = with_actions(ACTORS["flat"], 5)
    td["move"] = torch.randn(5, 4)
    assert set(run(ActorProgram(actor), td)) == {"gear", "move"}


def test_a_module_that_gives_a_new_tensordict() -> None:
    """What a module returns counts, whether or not it is the TensorDict that it was given."""

    class Copies(TensorDictModule):
        def forward(self, td: TensorDict) -> TensorDict:
            return super().forward(td.copy())

    actor = ProbabilisticTensorDictSequential(
        Copies(nn.Linear(4, 3), ["observation"], ["logits"]),
        head(["logits"], "gear", D.Categorical),
    )
    assert set(run(ActorProgram(actor), with_actions(ACTORS["flat"], 5))) == {"gear"}


def test_parameters_that_no_module_writes() -> None:
    """A missing entry is named, with the head that needs it."""
    actor = ProbabilisticTensorDictSequential(
        TensorDictModule(nn.Linear(4, 2), ["observation"], ["loc"]),
        head(["loc", "scale"], "move", D.Normal),
    )
    program = ActorProgram(actor)
    td = data(3).set("move", torch.randn(3, 2))
    with pytest.raises(MissingKeyError) as caught:
        run(program, td)
    for piece in ("'move'", "'loc'", "'scale'"):
        assert piece in str(caught.value)
    found = run(program, td.set("scale", torch.ones(3, 2)))  # it may lie in the data
    assert set(found) == {"move"}


@pytest.mark.parametrize("name", ACTORS)
def test_gradients_reach_the_network(name: str) -> None:
    """The current log-prob carries the graph of the network, of every head."""
    kind = ACTORS[name]
    net, _, program = made(name)
    td = with_actions(kind, 5)
    found = run(program, td)
    total = sum(terms.log_prob(td[key]).sum() for key, terms in found.items())
    total.backward()
    grad = net.layer.weight.grad
    assert grad[:3].abs().sum() > 0
    assert (grad[3:].abs().sum() > 0) == (name != "several")  # there a network of its own


# --- stored parameters ----------------------------------------------------------------------------


@contextlib.contextmanager
def silent(net: Net) -> Iterator[None]:
    """No network runs inside."""
    before = net.calls
    yield
    assert net.calls == before


@pytest.mark.parametrize("name", MODULAR)
def test_rebuilt_from_stored_parameters(name: str) -> None:
    """Case 33: the behaviour policy's distribution, whatever the network has become."""
    kind = ACTORS[name]
    net, actor, program = made(name)
    td = collected(actor, 5)
    expected = by_hand(actor, net, td, kind)
    with torch.no_grad():
        for p in actor.parameters():
            p.add_(1.0)
    program.discover(td)
    with silent(net):
        for key in (kind.gear, kind.move):
            assert_close(program.rebuild(td, key).log_prob(td[key]), expected[key].detach())


@pytest.mark.parametrize("name", STATIC)
def test_a_head_is_rebuilt_without_the_others(name: str) -> None:
    """Case 32: per head: the gear's parameters are gone, the move's still serve."""
    kind = ACTORS[name]
    _, actor, program = made(name)
    td = collected(actor, 5)
    leaves = [k for k in td.keys(include_nested=True, leaves_only=True) if "logits" in str(k)]
    assert len(leaves) == 1
    less = td.exclude(*leaves)
    assert program.rebuild(less, kind.gear) is None
    assert program.rebuild(less, kind.move) is not None
    assert program.rebuild(td, "nobody") is None


def test_an_opaque_actor_has_no_stored_parameters() -> None:
    """Case 32: nothing to rebuild from, and no network runs to find out."""
    net, _, program = made("opaque")
    td = with_actions(ACTORS["opaque"], 5)
    with silent(net):
        assert program.rebuild(td, "gear") is None
        program.discover(td)
    assert not program.settled


@pytest.mark.parametrize("name", ["lazy", "hidden"])
def test_a_lazy_actor_is_discovered_from_stored_parameters(name: str) -> None:
    """Case 11: a function makes the composite; its heads show in the data, without a network."""
    net, actor, program = made(name)
    td = collected(actor, 5)
    with silent(net):
        program.discover(td.exclude("params"))
        assert not program.settled
        program.discover(td)
    assert program.settled
    assert {slot.action for slot in program.slots} == {ACTORS[name].gear, ACTORS[name].move}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_log_probs_are_formed_in_float32_at_least(dtype: torch.dtype) -> None:
    """Case 76: half-precision parameters are promoted before the log-prob, double stays double."""
    _, actor, program = made("flat")
    td = collected(actor, 5)
    td["params"] = td["params"].to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    stored = td["params", "gear", "logits"].to(wide)
    actual = program.rebuild(td, "gear").log_prob(td["gear"])
    assert actual.dtype == wide
    assert_close(actual, D.Categorical(logits=stored).log_prob(td["gear"]))


def test_an_empty_node_beside_the_parameters_is_no_parameter() -> None:
    """What is left of another head's parameters in the data is not handed to a distribution."""
    module = TensorDictModule(nn.Linear(3, 4), ["observation"], [("params", "gear", "logits")])
    actor = ProbabilisticActor(
        module,
        in_keys=["params"],
        distribution_class=CompositeDistribution,
        distribution_kwargs={"distribution_map": {"gear": D.Categorical}},
    )
    td = TensorDict({"observation": torch.randn(5, 3), "gear": torch.randint(4, (5,))}, [5])
    expected = ActorProgram(actor).run(Scratch(td))["gear"].log_prob(td["gear"])
    td["params", "gear", "left"] = TensorDict({}, [5])
    assert_close(ActorProgram(actor).run(Scratch(td))["gear"].log_prob(td["gear"]), expected)


class Gate(nn.Module):
    """Logits of an observation, of allowed classes only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
        return self.layer(x).masked_fill(~allowed, -1e9)


class Own(TensorDictModule):
    """A module that is called with a TensorDict."""

    def forward(self, td):
        return super().forward(td)


@pytest.mark.parametrize("kind", ["plain", "own", "hooked", "distribution"])
def test_a_missing_second_input_is_named(kind):
    """An action mask that the data lack is named, with what is there and the fix."""
    masked, cls = (["observation", "allowed"], Own if kind == "own" else TensorDictModule)
    if kind == "distribution":
        first = TensorDictModule(nn.Linear(3, 4), ["observation"], ["logits"])
        keys, dist = {"logits": "logits", "mask": "allowed"}, MaskedCategorical
    else:
        first, keys, dist = cls(Gate(), masked, ["logits"]), ["logits"], D.Categorical
    if kind == "hooked":
        first.register_forward_hook(lambda *_: None)
    step = ProbabilisticTensorDictModule(keys, ["action"], distribution_class=dist)
    program = ActorProgram(ProbabilisticTensorDictSequential(first, step))
    data = TensorDict({"observation": torch.zeros(2, 3)}, [2])
    with pytest.raises(MissingKeyError, match=r"'allowed'.*Fix: store it with the batch"):
        program.run(Scratch(data))
