"""Cases on the keys of groups: whose reward and whose end, and values estimated for all of them.

Judged against the generalised advantage estimate worked out step by step in a loop, per agent.
"""

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

import composite_losses as cl
from composite_losses.errors import MissingKeyError, ShapeError
from tests.cases import builders_groups as bg
from tests.cases import oracles_fl as oracle
from tests.cases.builders_groups import SIGNALS, SIX, TWO, Spec, group_loss, make_data
from tests.tolerances import assert_close

SHARED = [(), ("reward",), ("done", "terminated"), ("terminated",), SIGNALS]
ids = "+".join


def one_group(spec: Spec, **options: Any) -> dict[str, Spec]:
    return {"g": Spec(spec.agents, spec.obs, spec.heads, spec.make, tuple(options.items()))}


def in_words(td: TensorDict, name: str, agents: int) -> TensorDict:
    """A group's data under "agents", each agent with its own reward and ends, written out."""
    after = td["next", name].clone(False)
    after.batch_size = (*td.batch_size, agents)
    for key in SIGNALS:
        if key not in after:
            after[key] = td["next", key].unsqueeze(-2).expand(*td.batch_size, agents, 1)
    return TensorDict({"agents": td[name], "next": {"agents": after}}, td.batch_size)


def advantages(td: TensorDict, name: str, spec: Spec, critic: nn.Module) -> tuple[Tensor, Tensor]:
    everyone = torch.ones(*td.batch_size, spec.agents, dtype=torch.bool)
    return oracle.gae_by_hand(in_words(td, name, spec.agents), everyone, critic, group=True)


# --- whose reward, whose end ---------------------------------------------------------------------


@pytest.mark.parametrize("flat", [False, True], ids=["agents in batch", "root's batch"])
@pytest.mark.parametrize("shared", SHARED, ids=ids)
def test_root_entries_stand_in(shared: tuple[str, ...], flat: bool) -> None:
    """Cases 50, 92, 94: what a group has not, the root has, for each of its agents; a group's
    TensorDict may tell its agents apart by its batch size or not."""
    td = make_data(SIX, shared=shared, estimated=False, flat=flat)
    loss = group_loss(SIX)
    out, written = loss(td), loss.value_estimator(td.clone())
    for name, spec in SIX.items():
        advantage, target = advantages(td, name, spec, bg.networks(name, spec)[1].module)
        assert_close(written[name, "advantage"], advantage)
        assert_close(written[name, "value_target"], target)
        stored = td.clone()
        stored[name, "advantage"], stored[name, "value_target"] = advantage, target
        again = group_loss({name: spec})(stored)
        for key, value in again.items():
            if key.startswith(name):
                assert_close(out[key].detach(), value.detach())


def test_groups_may_differ_in_what_they_share() -> None:
    """One group has its own reward and the root's ends, another the root's reward and own ends."""
    td = make_data(TWO, shared=SIGNALS, estimated=False)
    own = make_data(TWO, shared=(), estimated=False)["next"]
    td["next", "hunter", "reward"] = own["hunter", "reward"]
    for key in ("done", "terminated"):
        td["next", "prey", key] = own["prey", key]
    written = group_loss(TWO).value_estimator(td.clone())
    for name, spec in TWO.items():
        expected = advantages(td, name, spec, bg.networks(name, spec)[1].module)
        assert_close(written[name, "advantage"], expected[0])


def test_own_entries_come_first() -> None:
    """A root entry beside the group's own changes nothing."""
    td = make_data(TWO, shared=(), estimated=False)
    expected = group_loss(TWO)(td)
    for key in SIGNALS:
        td["next", key] = torch.ones(4, 5, 1, dtype=td["next", "hunter", key].dtype)
    torch.testing.assert_close(group_loss(TWO)(td), expected)


def test_a_named_entry_has_no_stand_in() -> None:
    """A reward key that was set and is not there is an error, not the root's reward."""
    td, loss = make_data(TWO, shared=SIGNALS, estimated=False), group_loss(TWO)
    expected = loss(td)
    loss.set_keys("prey", reward=("prey", "rewrd"))
    with pytest.raises(KeyError, match=r"rewrd.*set_keys"):
        loss(td)
    assert ("next", "reward") in loss.in_keys  # the hunters'
    loss.set_keys("prey", reward=("prey", "reward"))
    torch.testing.assert_close(loss(td), expected)


def test_neither_the_groups_nor_the_roots() -> None:
    """No reward anywhere: an error that names the key."""
    td = make_data(TWO, estimated=False)
    for name in SIGNALS[:2]:
        key = ("next", "prey", name) if name == "reward" else ("next", name)
        less = td.exclude(key)
        with pytest.raises(MissingKeyError, match=rf"{name} .*'prey', '{name}'.*set_keys\({name}"):
            group_loss({"prey": bg.PREY})(less)


# --- sizes that are equal ------------------------------------------------------------------------


@pytest.mark.parametrize("make", ["MAPPOLoss", "ClipPPOLoss"])
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("shared", [(), ("done", "terminated"), SIGNALS], ids=ids)
@pytest.mark.parametrize(
    ("root", "agents"),
    [((3, 3), 3), ((1, 1), 1), ((2, 3), 3), ((3, 2), 3), ((2, 2, 2), 2), ((5,), 5), ((4, 3), 1)],
    ids=str,
)
def test_equal_sizes(root: Any, agents: int, shared: Any, flat: bool, make: str) -> None:
    """Case 52: A = T = B = 1 … 3 decide nothing; the same numbers as agent by agent."""
    spec = Spec(agents, 3, (("action", "categorical"),), make)
    td = make_data({"g": spec}, root, shared=shared, estimated=False, flat=flat)
    critic = bg.networks("g", spec)[1].module
    flat_td = td.unsqueeze(0) if len(root) == 1 else td.reshape(-1, root[-1])
    advantage, target = advantages(flat_td, "g", spec, critic)
    loss = group_loss({"g": spec})
    written = loss.value_estimator(td.clone())
    assert_close(written["g", "advantage"].flatten(), advantage.flatten())
    assert_close(written["g", "value_target"].flatten(), target.flatten())
    out = loss(td)
    torch.testing.assert_close(out, loss(written))


def test_wrong_shapes_are_said() -> None:
    """Case 50: of [B, 1], [B, A], [A, B, 1], [B, A, 1] only the last is an advantage of agents,
    B = A or not; the message holds both keys."""
    for batch in (4, 3):
        spec = {"g": Spec(3, 5, (("action", "normal"),))}
        td, loss = make_data(spec, (batch,)), group_loss(spec)
        loss(td)
        loss.set_keys("g", advantage="adv")
        good = td["g", "advantage"]
        for wrong in [good[:, 0], good.squeeze(-1), *([good.transpose(0, 1)] * (batch != 3))]:
            bad = td.clone()
            bad.batch_size = [batch] if len(wrong) == batch else []
            bad["adv"] = wrong
            with pytest.raises(ShapeError, match=r"'adv'.*action_log_prob"):
                loss(bad)


# --- group critics of other kinds ----------------------------------------------------------------


def test_one_critic_for_two_groups() -> None:
    """A critic that reads both groups and writes both values serves both losses."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(3 * 5 + 2 * 9, 5)

        def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
            out = self.net(torch.cat([a.flatten(-2), b.flatten(-2)], -1)).unsqueeze(-1)
            return out[..., :3, :], out[..., 3:, :]

    critic = TensorDictModule(
        Both(), [(n, "observation") for n in TWO], [(n, "state_value") for n in TWO]
    )
    losses = {n: cl.MAPPOLoss(bg.networks(n, s)[0], critic) for n, s in TWO.items()}
    loss, td = cl.GroupLoss(losses), make_data(TWO, estimated=False)
    written = loss.value_estimator(td.clone())
    for i, (name, spec) in enumerate(TWO.items()):

        def value(x: Tensor, i: int = i, name: str = name) -> Tensor:
            of = td if torch.equal(x, td[name, "observation"]) else td["next"]
            return critic.module(of["hunter", "observation"], of["prey", "observation"])[i]

        assert_close(written[name, "advantage"], advantages(td, name, spec, value)[0])
    params = list(loss.parameters())
    assert len({id(p) for p in params}) == len(params)
    grads = torch.autograd.grad(bg.total(loss(written)), list(critic.parameters()))
    assert all(g.abs().sum() > 0 for g in grads)


@pytest.mark.parametrize("make", ["MAPPOLoss", "ClipPPOLoss"])
def test_team_critic(make: str) -> None:
    """One value [*B, 1] for a group, per-agent advantages: by ``team_value=True`` only."""
    spec = Spec(3, 5, (("action", "normal"),), make)
    td = make_data({"g": spec}, shared=SIGNALS, estimated=False)

    def build(**options: Any) -> Any:
        actor, _ = bg.networks("g", spec)
        torch.manual_seed(4)
        net = nn.Sequential(nn.Flatten(-2), nn.Linear(15, 1))
        critic = TensorDictModule(net, [("g", "observation")], ["value_of_team"])
        loss = getattr(cl, make)(actor, critic, **options)
        loss.set_keys(value="value_of_team")
        return cl.GroupLoss({"g": loss}), net

    loss, net = build(team_value=True)
    out = loss(td)
    solo = TensorDict(
        {
            "agents": TensorDict({"observation": td["g", "observation"].flatten(-2)}, [4, 5]),
            "next": {"agents": td["next"].exclude("g").clone()},
        },
        [4, 5],
    )
    solo["agents"] = solo["agents"].unsqueeze(-1)
    solo["next", "agents"] = solo["next", "agents"].unsqueeze(-1)
    after = td["next", "g", "observation"].flatten(-2).unsqueeze(-2)
    solo["next", "agents", "observation"] = after
    everyone = torch.ones(4, 5, 1, dtype=torch.bool)
    advantage, target = oracle.gae_by_hand(solo, everyone, net[1], group=True)
    stored = td.clone()
    stored["g", "advantage"] = advantage.expand(4, 5, 3, 1).clone()
    stored["target"] = target.squeeze(-2)
    again, _ = build(team_value=True)
    again.set_keys("g", value_target="target")
    flat = stored.clone()  # the same, where the group's TensorDict has the root's batch size
    flat["g"].batch_size = flat["next", "g"].batch_size = [4, 5]
    for data in (stored, flat):
        for key, value in again(data).items():
            assert_close(out[key].detach(), value.detach())
    written = loss.value_estimator(td.clone())
    assert_close(written["g", "advantage"], stored["g", "advantage"])
    error = nn.functional.smooth_l1_loss(net(td["g", "observation"]), stored["target"])
    assert_close(out["loss_critic"].detach(), error.detach())
    with pytest.raises(ShapeError, match="value"):
        build()[0](stored.set(("g", "value_target"), target.expand(4, 5, 3, 1).clone()))
