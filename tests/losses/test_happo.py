"""HAPPOLoss: groups updated one after the other; numbers by hand.

Kuba et al., "Trust Region Policy Optimisation in Multi-Agent Reinforcement Learning", ICLR 2022
(arXiv 2109.11251), section 4: the agents are updated in a random order, and the advantage of each
is multiplied by M, the product of the new-to-old ratios of those before it.
"""

import copy
import math
import pickle
from collections import Counter
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

import composite_losses as cl
from composite_losses.errors import ConfigError, MissingKeyError, ShapeError
from tests.cases import builders_groups as bg
from tests.cases.builders_groups import TWO, Spec, group_loss, make_data
from tests.tolerances import assert_close

COIN = Spec(1, 1, (("action", "categorical"),), "ClipPPOLoss")


class Table(nn.Module):
    """The same logits for every row: the policy is the table of their probabilities."""

    def __init__(self, *probabilities: float) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(probabilities).log())

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (self.logits.expand(*x.shape[:-1], 3),)


def coins(agents: int = 1, **options: Any) -> tuple[Any, TensorDict]:
    """Groups "a" and "b" with policies (½, ¼, ¼); two rows in which all took action 0."""
    losses, td = {}, TensorDict({}, [2])
    for name in ("a", "b"):
        actor = bg.make_actor(name, COIN)
        actor[0].module = Table(0.5, 0.25, 0.25)
        losses[name] = cl.ClipPPOLoss(actor, entropy_bonus=False)
        td[name] = TensorDict(
            {
                "observation": torch.zeros(2, agents, 1),
                "action": torch.zeros(2, agents, dtype=torch.long),
                "action_log_prob": torch.full((2, agents), 0.5).log(),
                "advantage": torch.tensor([1.0, 3.0]).view(2, 1, 1).expand(2, agents, 1).clone(),
            },
            [2, agents],
        )
    return cl.HAPPOLoss(losses, order="fixed", **options), td


def learn(loss: Any, name: str, *probabilities: float) -> None:
    """What an update would do to a group's policy."""
    table = loss.losses[name].actor_network_params["module", "0", "module", "logits"]
    table.data.copy_(torch.tensor(probabilities).log())


# --- numbers by hand -----------------------------------------------------------------------------


def test_two_agents_by_hand() -> None:
    """a goes from ½ to 0.6 for the action taken: ratio 1.2, so b's advantages 1 and 3 count 1.2
    and 3.6; b's own ratio is still 1: −(1.2 + 3.6) / 2 = −2.4. Then b goes to 0.4: ratio 0.8; in a
    new sequence in the other order a's factor would be 0.8."""
    loss, td = coins()
    loss.reset_factor(td)
    assert_close(loss(td)["b/loss_objective"].detach(), -2.0)
    learn(loss, "a", 0.6, 0.2, 0.2)
    assert loss.update_factor(td, "a") is td
    assert_close(td["b", "happo_factor"].flatten(), [1.2, 1.2])
    assert_close(td["a", "happo_factor"].flatten(), [1.0, 1.0])
    out = loss(td)
    assert_close(out["b/loss_objective"].detach(), -2.4)
    # a's own loss keeps factor 1; its ratio is 1.2, the clip's bound: −1.2 · 2
    assert_close(out["a/loss_objective"].detach(), -2.4)
    learn(loss, "b", 0.4, 0.3, 0.3)
    loss.update_factor(td, "b")
    assert_close(td["a", "happo_factor"].flatten(), [0.8, 0.8])
    assert_close(td["b", "happo_factor"].flatten(), [1.2, 1.2])
    # b: M = 1.2 on ratio 0.8: advantage > 0, so the unclipped 0.8 · 1.2 · (1 + 3) / 2
    assert_close(loss(td)["b/loss_objective"].detach(), -1.92)


def test_rows_have_their_own_factor() -> None:
    """Action 1 in the second row: a's ratios 0.6/0.5 = 1.2 and 0.2/0.25 = 0.8;
    b: −(1.2 · 1 + 0.8 · 3) / 2 = −1.8."""
    loss, td = coins()
    td["a", "action"][1] = 1
    td["a", "action_log_prob"][1] = math.log(0.25)
    learn(loss, "a", 0.6, 0.2, 0.2)
    loss.update_factor(td, "a")
    assert_close(td["b", "happo_factor"].flatten(), [1.2, 0.8])
    assert_close(loss(td)["b/loss_objective"].detach(), -1.8)


def test_agents_of_a_group_multiply() -> None:
    """Two agents with ratio 1.2 each: the other group's factor is 1.44, for both its agents."""
    loss, td = coins(agents=2)
    learn(loss, "a", 0.6, 0.2, 0.2)
    loss.update_factor(td, "a")
    assert_close(td["b", "happo_factor"], torch.full((2, 2, 1), 1.44))
    assert "happo_factor" not in td["a"]  # absent is 1


def test_agents_one_by_one() -> None:
    """``agent=1`` was updated alone: its 1.2 goes to agent 0 and to the other group, not to
    itself; then agent 0 with 1.2: agent 1 gets it, the others have 1.44."""
    loss, td = coins(agents=2)
    learn(loss, "a", 0.6, 0.2, 0.2)
    loss.update_factor(loss.reset_factor(td), "a", agent=1)
    assert_close(td["a", "happo_factor"][..., 0], [[1.2, 1.0], [1.2, 1.0]])
    assert_close(td["b", "happo_factor"], torch.full((2, 2, 1), 1.2))
    loss.update_factor(td, "a", agent=0)
    assert_close(td["a", "happo_factor"][..., 0], [[1.2, 1.2], [1.2, 1.2]])
    assert_close(td["b", "happo_factor"], torch.full((2, 2, 1), 1.44))
    for agent in (2, -1):
        with pytest.raises(ShapeError, match=f"group 'a': agent {agent}"):
            loss.update_factor(td, "a", agent=agent)


def test_advantages_are_standardised_before_the_factor() -> None:
    """(1, 3) standardised is (−1, 1)/√2; times 2 that is (−2, 2)/√2: scaling is not undone."""
    _, td = coins()
    actor = bg.make_actor("b", COIN)
    actor[0].module = Table(0.5, 0.25, 0.25)
    member = cl.ClipPPOLoss(actor, entropy_bonus=False, normalize_advantage=True)
    member.set_keys(advantage=("b", "advantage"), factor=("b", "happo_factor"))
    td["b", "happo_factor"] = torch.tensor([2.0, 5.0]).view(2, 1, 1)
    assert_close(member(td)["loss_objective"].detach(), -(-2 + 5) / math.sqrt(2) / 2)


# --- what it is ----------------------------------------------------------------------------------


@pytest.mark.parametrize("reset", [True, False])
def test_factor_one_is_the_group_loss(reset: bool) -> None:
    """With M = 1, absent or written, HAPPO is MAPPO group by group: values and gradients."""
    td = make_data(TWO)
    plain, happo = group_loss(TWO), group_loss(TWO, cl.HAPPOLoss)
    expected = plain(td)
    if reset:
        happo.reset_factor(td)
        assert td["hunter", "happo_factor"].shape == (4, 5, 3, 1)
    found = happo(td)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    pairs = zip(
        bg.gradients(happo, found).values(), bg.gradients(plain, expected).values(), strict=True
    )
    assert all(torch.equal(x, y) for x, y in pairs)


def test_fresh_policies_change_no_factor() -> None:
    """Ratios are 1 before an update (stored log-probs of the current policy)."""
    td, loss = make_data(TWO), group_loss(TWO, cl.HAPPOLoss)
    for name, spec in TWO.items():
        with torch.no_grad():
            bg.networks(name, spec)[0](td)
    for name in TWO:
        loss.update_factor(td, name)
    for name in TWO:
        assert_close(td[name, "happo_factor"], torch.ones_like(td[name, "advantage"]))


def test_factor_carries_no_gradient() -> None:
    """M is a weight: no gradient of b's loss reaches a, even through a factor with a graph."""
    loss, td = coins()
    learn(loss, "a", 0.6, 0.2, 0.2)
    loss.update_factor(td, "a")
    assert not td["b", "happo_factor"].requires_grad
    scale = torch.ones(2, 1, 1, requires_grad=True)
    td["b", "happo_factor"] = td["b", "happo_factor"] * scale
    loss(td)["b/loss_objective"].backward()
    assert scale.grad is None


def test_a_sequence_of_updates() -> None:
    """The loop of the class's docstring: every group is updated once, the factors multiply up to
    the product of all ratios but the group's own."""
    loss, td = group_loss(TWO, cl.HAPPOLoss), make_data(TWO)
    loss.reset_factor(td)
    ratios = {}
    for group in loss.update_order():
        member = loss.losses[group]
        optimiser = torch.optim.SGD(member.parameters(), lr=0.1)
        for _ in range(2):
            optimiser.zero_grad()
            bg.total(member(td)).backward()
            optimiser.step()
        actor, now = copy.deepcopy(bg.networks(group, TWO[group])[0]), td.exclude("next")
        for p, q in zip(actor.parameters(), member.actor_network_params.parameters(), strict=True):
            p.data.copy_(q)
        log_prob = actor.get_dist(now).log_prob(now[group, "action"] if group == "prey" else now)
        ratio = torch.zeros(4, 5)
        for head, _ in TWO[group].heads:
            key = bg.log_prob_key(group, head)
            new = log_prob if group == "prey" else log_prob[key]
            ratio += (new - td[key]).detach().sum(-1)
        ratios[group] = ratio.exp()
        loss.update_factor(td, group)
    for name, other in (("hunter", "prey"), ("prey", "hunter")):
        factor = td[name, "happo_factor"][..., 0]
        torch.testing.assert_close(factor, ratios[other].unsqueeze(-1).expand_as(factor))


def test_orders() -> None:
    """ "fixed" keeps the order; "random" draws with torch's random state, every order in turn."""
    losses = {name: bg.member(name, spec) for name, spec in bg.SIX.items() if spec.make[0] != "R"}
    losses.pop("tree")
    names = list(losses)
    assert cl.HAPPOLoss(losses, order="fixed").update_order() == names
    loss = cl.HAPPOLoss({name: losses[name] for name in names[:3]})
    assert loss.order == "random"
    seen = Counter(tuple(loss.update_order()) for _ in range(600))
    assert len(seen) == 6
    assert min(seen.values()) > 60
    state = torch.random.get_rng_state()
    first = [loss.update_order() for _ in range(5)]
    torch.random.set_rng_state(state)
    assert [loss.update_order() for _ in range(5)] == first


@pytest.mark.parametrize(
    ("make", "options", "text"),
    [
        ("ClipPPOLoss", {"order": "sorted"}, "'random', 'fixed'"),
        ("A2CLoss", {}, "group 'a': HAPPO needs a loss with a ratio"),
        ("ReinforceLoss", {}, "group 'a': HAPPO needs a loss with a ratio"),
    ],
)
def test_what_is_refused(make: str, options: Any, text: str) -> None:
    """An unknown order, and losses that have no ratio."""
    spec = Spec(1, 1, COIN.heads, make)
    with pytest.raises(ConfigError, match=text):
        cl.HAPPOLoss({"a": bg.member("a", spec)}, **options)


# --- where the factor stands ---------------------------------------------------------------------


def test_key_of_the_factor() -> None:
    """A key of the root holds [*B, 1]; it is one of the keys that are read."""
    loss, td = coins(agents=2)
    loss.set_keys("b", factor="m")
    assert {"m", ("a", "happo_factor")} <= set(loss.in_keys)
    learn(loss, "a", 0.6, 0.2, 0.2)
    loss.update_factor(td, "a")
    assert_close(td["m"], [[1.44], [1.44]])
    small = td.select(*loss.in_keys, strict=False)
    torch.testing.assert_close(loss(small), loss(td), rtol=0, atol=0)
    assert_close(loss(td)["b/loss_objective"].detach(), -2.0 * 1.44)
    plain = cl.GroupLoss({"b": bg.member("b", COIN)})
    assert ("b", "happo_factor") not in plain.in_keys


@pytest.mark.parametrize(("batch", "agents"), [((3,), 3), ((3, 3), 3), ((2, 2), 1), ((1,), 1)])
@pytest.mark.parametrize("flat", [True, False])
def test_equal_sizes(batch: Any, agents: int, flat: bool) -> None:
    """A = B = T: a factor per row is not taken for one per agent."""
    specs = {"g": Spec(agents, 4, (("action", "normal"),)), "h": Spec(agents, 4, COIN.heads)}
    td, loss = make_data(specs, batch, flat=flat), group_loss(specs, cl.HAPPOLoss)
    plain = group_loss(specs)
    loss.update_factor(td, "g")
    actor, now = bg.networks("g", specs["g"])[0], td.exclude("h")
    log_ratio = actor.get_dist(now).log_prob(td["g", "action"]) - td["g", "action_log_prob"]
    factor = log_ratio.detach().sum(-1).exp()
    by_hand = td.clone()
    by_hand["h", "advantage"] = td["h", "advantage"] * factor[..., None, None]
    for each in (loss, plain):  # M does not undo, nor is undone by, the statistics
        each.losses["h"].advantage = None
    assert_close(loss(td)["h/loss_objective"].detach(), plain(by_hand)["h/loss_objective"].detach())


def test_wrong_shape_of_the_factor() -> None:
    """Neither [*B, 1] nor [*B, A, 1]."""
    loss, td = coins(agents=3)
    td["b", "happo_factor"] = torch.ones(2, 3)
    with pytest.raises(ShapeError, match=r"factor \('b', 'happo_factor'\)"):
        loss(td)


def test_unknown_group() -> None:
    loss, td = coins()
    with pytest.raises(MissingKeyError, match="'c': not known"):
        loss.update_factor(td, "c")


def test_copies() -> None:
    """Order and keys survive copies; the state is the members'."""
    loss, td = coins()
    learn(loss, "a", 0.6, 0.2, 0.2)
    loss.update_factor(td, "a")
    for twin in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert twin.update_order() == ["a", "b"]
        torch.testing.assert_close(twin(td), loss(td))


def test_dead_agents_count_as_one() -> None:
    """Of a's two agents the second is dead: its ratio 1.2 does not multiply."""
    loss, td = coins(agents=2)
    td["a", "alive"] = torch.tensor([[True, False], [True, True]])
    loss.set_keys("a", agent_mask=("a", "alive"))
    td["a", "action_log_prob"][0, 1] = float("nan")
    learn(loss, "a", 0.6, 0.2, 0.2)
    loss.update_factor(td, "a")
    assert_close(td["b", "happo_factor"][..., 0, 0], [1.2, 1.44])


# --- groups that are not there -------------------------------------------------------------------


def test_absent_group_under_skip() -> None:
    """b is not in the data: it has no ratio, no factor is written for it, and it is not in the
    order; a's factor is what it was. The draw is that of all groups, b left out."""
    loss, td = coins(missing="skip")
    less = td.exclude("b")
    assert loss.reset_factor(less) is less and "b" not in less
    learn(loss, "a", 0.6, 0.2, 0.2)
    learn(loss, "b", 0.4, 0.3, 0.3)
    before = less.clone()
    assert loss.update_factor(less, "b") is less
    assert loss.update_factor(less, "a") is less
    assert set(less.keys(True, True)) == set(before.keys(True, True))
    assert (less == before).all()
    loss.update_factor(less, "b", agent=7)
    assert loss.update_order(less) == ["a"] and loss.update_order(td) == ["a", "b"]
    assert loss.update_order() == ["a", "b"]
    loss.order = "random"
    orders = []
    for data in ((), (less,), (td,)):
        torch.manual_seed(5)
        orders.append([loss.update_order(*data) for _ in range(9)])
    assert orders[0] == orders[2]
    assert orders[1] == [["a"]] * 9


def test_absent_group_under_error() -> None:
    """The error names the group, as a call's does; no factor is written."""
    loss, td = coins()
    less = td.exclude("b")
    before = less.clone()
    for call in (
        loss,
        loss.reset_factor,
        loss.update_order,
        lambda data: loss.update_factor(data, "b"),
        lambda data: loss.update_factor(data, "a"),
    ):
        with pytest.raises(MissingKeyError, match="group 'b': the data hold no entry of it"):
            call(less)
    assert set(less.keys(True, True)) == set(before.keys(True, True))


@pytest.mark.parametrize("absent", ["hunter", "prey"])
def test_a_sequence_of_updates_without_a_group(absent: str) -> None:
    """The loop of the class's docstring on data without a group: the other one is updated as in
    the whole data, the absent one keeps its weights."""
    loss = group_loss(TWO, cl.HAPPOLoss, missing="skip")
    td = make_data(TWO).exclude(absent, ("next", absent))
    before = copy.deepcopy(loss.state_dict())
    loss.reset_factor(td)
    for group in loss.update_order(td):
        member = loss.losses[group]
        optimiser = torch.optim.SGD(member.parameters(), lr=0.1)
        bg.total(member(td)).backward()
        optimiser.step()
        loss.update_factor(td, group)
    for name, p in loss.named_parameters():
        assert torch.equal(p, before[name]) == name.startswith(f"group_{absent}"), name
    assert absent not in td
