"""Cases on masks, padding, dead agents and empty groups, where several groups share one loss.

What is right is the loss of the rows that count, cut out group by group; each group by itself.
"""

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.modules import RunningValueNorm

import composite_losses as cl
from tests.cases import builders_fl as fl
from tests.cases import builders_groups as bg
from tests.cases import oracles_fl as oracle
from tests.cases.builders_groups import SIX, TWO, Spec, alive_masks, by_hand, group_loss, make_data
from tests.tolerances import assert_close

ROOT = (4, 5)
KINDS = ["nan", "inf", "huge", "mixed"]
Outcome = tuple[dict[str, Tensor], dict[str, Tensor | None]]


def outcome(loss: Any, td: TensorDict) -> Outcome:
    """Outputs, detached, and gradients; in training mode, where normalisers learn."""
    out = loss(td)
    return {key: value.detach() for key, value in out.items()}, bg.gradients(loss, out)


def with_masks(loss: Any, td: TensorDict, masks: dict[str, Tensor]) -> TensorDict:
    """The data with every group's mask inside, and the loss told so."""
    td = td.clone()
    for i, (name, mask) in enumerate(masks.items()):
        td[name, "alive"] = mask if i % 2 else mask.unsqueeze(-1)  # [*S] and [*S, 1]
        loss.set_keys(name, agent_mask=(name, "alive"))
    return td


def spoil(td: TensorDict, masks: dict[str, Tensor], kind: str) -> TensorDict:
    """Every entry of rows that do not count is garbage, what comes after included."""
    td = td.clone()
    for name, mask in masks.items():
        for holder in (td[name], td["next", name]):
            for i, key in enumerate(list(holder.keys(True, True))):
                rows = holder[key][~mask]
                if kind == "moved":
                    bad = rows + 1e6 if rows.dtype.is_floating_point else rows
                else:
                    bad = fl.garbage(rows.shape, rows.dtype, kind, i)
                holder[key][~mask] = bad
    return td


def cut_out(td: TensorDict, name: str, mask: Tensor) -> TensorDict:
    """A group's rows that count, flat: ``[rows]``."""
    rows = td[name][mask]
    return TensorDict({name: rows, "next": {name: td["next", name][mask]}}, rows.batch_size)


def check(found: Outcome, name: str, expected: Outcome) -> None:
    """A group's entries and gradients are those of its loss on its own."""
    for key, value in expected[0].items():
        got = found[0][f"{name}/{key}"]
        torch.testing.assert_close(
            got, value, rtol=1e-5, atol=1e-5, msg=lambda m, k=key: f"{name}/{k}: {m}"
        )
        assert got.isfinite(), key
    for key, grad in expected[1].items():
        got_grad = found[1][f"group_{name}.{key}"]
        assert got_grad is not None
        assert grad is not None
        torch.testing.assert_close(got_grad, grad, rtol=1e-5, atol=1e-5)


# --- 80, 81, 84, 85, 91: rows that do not count --------------------------------------------------


@pytest.mark.parametrize("kind", ["moved", *KINDS])
def test_dead_agents(kind: str) -> None:
    """Cases 80, 81, 85: dead agents' observations, actions, advantages, log-probs and values may
    hold anything, NaN or moved by 1e6; every loss, gradient and metric of every group, advantage
    statistics (84, 91) and normalisers included, is that of the living, cut out."""
    masks = alive_masks(SIX, ROOT)
    td, loss = make_data(SIX), group_loss(SIX)
    found = outcome(loss, with_masks(loss, spoil(td, masks, kind), masks))
    for name, spec in SIX.items():
        data, options = td.clone(), {}
        if spec.make in ("MAPPOLoss", "IPPOLoss"):
            # rows that are cut out know no agents: what is standardised per agent is so by hand
            advantage = td[name, "advantage"]
            used = fl.normalised_by_hand(advantage, masks[name], (len(ROOT),))
            data[name, "advantage"], options = used, {"normalize_advantage": False}
        separate = by_hand({name: spec}, **options)[name]
        check(found, name, outcome(separate, cut_out(data, name, masks[name])))


@pytest.mark.parametrize("kind", KINDS)
def test_padding_in_time(kind: str) -> None:
    """Cases 81, 84: a root mask over time counts for every agent of every group; together with
    dead agents both must hold."""
    lengths = torch.tensor([5, 2, 1, 4])
    steps = torch.arange(5) < lengths.unsqueeze(-1)
    masks = alive_masks(TWO, ROOT)
    both = {name: mask & steps.unsqueeze(-1) for name, mask in masks.items()}
    td, loss, other = make_data(TWO), group_loss(TWO), group_loss(TWO)
    expected = outcome(other, with_masks(other, td, both))
    data = with_masks(loss, spoil(td, both, kind), masks)
    data["collector", "mask"] = steps
    found = outcome(loss, data)
    for key, value in expected[0].items():
        assert_close(found[0][key], value)
    for key, grad in expected[1].items():
        assert_close(found[1][key], grad)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", ["MAPPOLoss", "ClipPPOLoss"])
@pytest.mark.parametrize("shared", [(), ("done", "terminated"), bg.SIGNALS], ids="+".join)
def test_estimated_inside(shared: tuple[str, ...], make: str, kind: str) -> None:
    """Cases 85, 87: advantages computed by the loss stop where an agent dies; what dead agents
    hold, their rewards included, reaches nobody."""
    specs = {
        "left": Spec(3, 5, (("action", "normal"),), make),
        "right": Spec(2, 4, (("action", "categorical"),), make),
    }
    td = make_data(specs, shared=shared, estimated=False)
    lives = {
        "left": [[5, 2, 1], [3, 5, 5], [1, 1, 1], [5, 4, 2]],
        "right": [[2, 5], [5, 5], [1, 3], [4, 2]],
    }
    steps = torch.arange(5).view(1, 5, 1)
    masks = {name: steps < torch.tensor(life).unsqueeze(1) for name, life in lives.items()}
    loss = group_loss(specs)
    data = with_masks(loss, spoil(td, masks, kind), masks)
    found, written = outcome(loss, data), loss.value_estimator(data.clone())
    for name, spec in specs.items():
        mask = masks[name]
        after = td["next", name].clone()
        last = mask & ~torch.cat([mask[:, 1:], torch.zeros_like(mask[:, :1])], 1)
        for key in bg.SIGNALS:
            if key in shared:
                after[key] = td["next", key].unsqueeze(-2).expand(4, 5, spec.agents, 1).clone()
        after["done"] = after["done"] | last.unsqueeze(-1)
        named = TensorDict({"agents": td[name], "next": {"agents": after}}, ROOT)
        critic = bg.networks(name, spec)[1].module
        advantage, target = oracle.gae_by_hand(named, mask, critic, group=True)
        assert_close(written[name, "advantage"][mask], advantage[mask])
        assert_close(written[name, "value_target"][mask], target[mask])
        stored = td.clone()
        stored[name, "advantage"], stored[name, "value_target"] = advantage, target
        other = group_loss({name: spec})
        expected = outcome(other, with_masks(other, stored, {name: mask}))
        plain = {k.split("/", 1)[1]: v for k, v in expected[0].items() if "/" in k}
        grads = {k.removeprefix(f"group_{name}."): v for k, v in expected[1].items()}
        check(found, name, (plain, grads))


def test_statistics_of_each_group() -> None:
    """Case 91: groups and agents whose rewards differ by 100 are standardised each by itself."""
    specs = dict.fromkeys(("small", "big"), Spec(2, 4, (("action", "normal"),)))
    td = make_data(specs)
    td["big"] = td["small"].clone()
    td["big", "advantage"] *= 100
    td["big", "advantage"][..., 1, :] *= 100
    losses = {}
    for name, spec in specs.items():
        torch.manual_seed(2)
        losses[name] = cl.MAPPOLoss(bg.make_actor(name, spec), bg.make_critic(name, spec))
    out = cl.GroupLoss(losses)(td)
    assert_close(out["big/loss_objective"].detach(), out["small/loss_objective"].detach())


@pytest.mark.parametrize("kind", KINDS)
def test_value_normaliser_learns_from_the_living(kind: str) -> None:
    """Cases 85, 98: mean and count of the targets of living agents, group by group."""
    masks = alive_masks(TWO, ROOT)
    td = make_data(TWO)
    losses = {n: bg.member(n, TWO[n], value_norm=RunningValueNorm(shape=1)) for n in TWO}
    loss = cl.GroupLoss(losses)
    loss(with_masks(loss, spoil(td, masks, kind), masks))
    for name, mask in masks.items():
        norm = losses[name].value_norm
        assert norm.count == mask.sum()
        assert_close(norm.mean, td[name, "value_target"][mask].mean(0))
    loss.eval()(with_masks(loss, td, masks))
    assert losses["prey"].value_norm.count == masks["prey"].sum()


@pytest.mark.parametrize("kind", KINDS)
def test_happo_factor_of_dead_agents(kind: str) -> None:
    """A dead agent's ratio is 1 in the factor that the other groups get."""
    masks = alive_masks(TWO, ROOT)
    td = make_data(TWO)
    loss = group_loss(TWO, cl.HAPPOLoss)
    data = loss.update_factor(with_masks(loss, spoil(td, masks, kind), masks), "hunter")
    log_ratio = torch.zeros(*ROOT, 3)
    for head, _ in TWO["hunter"].heads:
        now = td.exclude("prey")
        dist = bg.networks("hunter", TWO["hunter"])[0].get_dist(now)
        each = dist.log_prob(now)[bg.log_prob_key("hunter", head)]
        log_ratio += (each - td[bg.log_prob_key("hunter", head)]).detach()
    expected = (log_ratio * masks["hunter"]).sum(-1).exp()
    for agent in range(2):
        assert_close(data["prey", "happo_factor"][..., agent, 0], expected)


# --- 83: nothing counts --------------------------------------------------------------------------


def empty(out: dict[str, Tensor], name: str) -> None:
    """A group's losses and metrics are 0; ``beta`` is a coefficient, not a metric of the rows."""
    for key, value in out.items():
        if key.startswith(f"{name}/") and key != f"{name}/beta":
            assert value == 0, key


@pytest.mark.parametrize("which", [["prey"], ["stone", "hunter"], list(SIX)])
def test_nobody_alive(which: list[str]) -> None:
    """Case 83: losses 0 with a graph and zero gradients, metrics 0; other groups do not notice."""
    td, loss = make_data(SIX), group_loss(SIX)
    masks = {name: torch.zeros(*ROOT, SIX[name].agents, dtype=torch.bool) for name in which}
    found = outcome(loss, with_masks(loss, spoil(td, masks, "mixed"), masks))
    for name in SIX:
        if name in which:
            empty(found[0], name)
            for key, grad in found[1].items():
                if key.startswith(f"group_{name}."):
                    assert grad is not None, key
                    assert not grad.any(), key
        else:
            check(found, name, outcome(by_hand({name: SIX[name]})[name], td))


@pytest.mark.parametrize("estimated", [True, False], ids=["stored", "computed"])
@pytest.mark.parametrize("name", SIX)
def test_no_agents(name: str, estimated: bool) -> None:
    """A group of no agents (A = 0) is like a group of none alive; the other group is untouched."""
    specs = {name: SIX[name], "other": bg.HUNTER}
    td, loss = make_data(specs, estimated=estimated), group_loss(specs)
    for holder in (td, td["next"]):
        holder[name] = holder[name][:, :, :0]
    found = outcome(loss, td)
    empty(found[0], name)
    for key, grad in found[1].items():
        if key.startswith(f"group_{name}."):
            assert grad is not None, key
            assert not grad.any(), key
    alone = group_loss({"other": bg.HUNTER})
    for key, value in outcome(alone, td)[0].items():
        if "/" in key:
            assert_close(found[0][key], value)
    for key in ("advantage", "value_target"):
        assert loss.value_estimator(td.clone())[name, key].shape == (*ROOT, 0, 1)


@pytest.mark.parametrize("agents", [1, 2, 3])
def test_one_living_agent_row(agents: int) -> None:
    """Case 89: one row per statistic standardises to 0, whatever the number of agents."""
    spec = {"g": Spec(agents, 4, (("action", "normal"),))}
    td, loss = make_data(spec, (1,)), group_loss(spec)
    found = outcome(loss, td)
    assert found[0]["g/loss_objective"] == 0
    assert all(v.isfinite() for k, v in found[0].items() if k != "g/explained_variance")
