"""``diagnose``: an action mask that was changed, moved weights, and samples at their bounds."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import nn
from torch.distributions import Categorical

import composite_losses as cl
from tests.cases.builders_ce import at, clip_loss, collect, fresh, log_prob_keys
from tests.losses.test_diagnosis import AGENTS, ROWS, moved, said, unnamed

KINDS = pytest.mark.parametrize("kind", ["masked", "masked_one_hot"])
NOT_ACTED = "not the one that the policy acted with"


def dropped(td: Any, name: str, agents: Any = None) -> Any:
    """The data with a mask of which all entries are True."""
    td = td.clone()
    td[at(agents, name)] = torch.ones_like(td[at(agents, name)])
    return td


# --- the action mask ---


@AGENTS
@KINDS
@pytest.mark.parametrize("source", ["stored", "params"])
def test_dropped_mask(source: str, kind: str, agents: int | None) -> None:
    """The stored parameters hold another mask: head and key are named, moved weights are not."""
    kinds = {"move": "independent", "gear": kind, "wheel": kind}
    actor, td = fresh(kinds, (ROWS,), agents=agents)
    loss = clip_loss(actor, agents=agents, log_prob_source=source)
    changed = dropped(td, "gear_mask", agents)
    rows = (td[at(agents, "gear_mask")] != changed[at(agents, "gear_mask")]).any(-1).sum().item()
    report = cl.diagnose(loss, changed)
    key = repr(at(agents, "params", "gear", "mask"))
    assert said(report, "head 'gear'", NOT_ACTED, key, f"in {rows} row")
    assert len(report.reasons) == 1
    assert not said(report, "moved")


@AGENTS
def test_dropped_mask_of_rows_that_do_not_count(agents: int | None) -> None:
    """What such rows hold is no reason."""
    actor, td = fresh({"gear": "masked", "move": "independent"}, (ROWS,), agents=agents)
    valid = torch.rand(td[at(agents, "advantage")].shape[:-1]) < 0.5
    changed = dropped(td, "gear_mask", agents)
    mask = torch.where(valid.unsqueeze(-1), td[at(agents, "gear_mask")], True)
    changed[at(agents, "gear_mask")] = mask
    changed[at(agents, "valid")] = valid
    changed[at(agents, "move_log_prob")] -= 0.5  # something else is wrong
    loss = clip_loss(actor, agents=agents)
    loss.set_keys(agent_mask=at(agents, "valid"))
    report = cl.diagnose(loss, changed)
    assert report.reasons
    assert not said(report, NOT_ACTED)


@AGENTS
def test_dropped_mask_and_moved_weights(agents: int | None) -> None:
    """Both are named: the masks differ, and so do the logits."""
    actor, td = fresh({"gear": "masked", "move": "independent"}, (ROWS,), agents=agents)
    report = cl.diagnose(clip_loss(moved(actor), agents=agents), dropped(td, "gear_mask", agents))
    assert said(report, "head 'gear'", NOT_ACTED, "weights have moved")


@AGENTS
def test_moved_weights_with_the_right_mask(agents: int | None) -> None:
    """No mask is blamed that is the stored one."""
    actor, td = fresh({"gear": "masked", "move": "independent"}, (ROWS,), agents=agents)
    report = cl.diagnose(clip_loss(moved(actor), agents=agents), td)
    assert not said(report, NOT_ACTED)
    assert said(report, "weights have moved", "or")


@AGENTS
@KINDS
def test_dropped_mask_without_stored_parameters(kind: str, agents: int | None) -> None:
    """Only the log-probs differ: moved weights and a changed input are both possible."""
    actor, td = fresh({"gear": kind, "move": "independent"}, (ROWS,), agents=agents)
    td = dropped(td, "gear_mask", agents).exclude(at(agents, "params"))
    report = cl.diagnose(clip_loss(actor, agents=agents), td)
    assert said(report, "head 'gear'", "weights have moved", "or", "action mask")
    assert len(report.reasons) == 1
    assert unnamed(report, "move")


def test_without_a_mask_none_is_suggested() -> None:
    actor, td = fresh("normal", (ROWS,))
    report = cl.diagnose(clip_loss(moved(actor)), td.exclude("loc", "scale"))
    assert said(report, "weights have moved", "entry that the actor reads")
    assert not said(report, "mask")


@AGENTS
@KINDS
@pytest.mark.parametrize("stored", [True, False])
def test_dropped_mask_that_the_distribution_reads(
    stored: bool, kind: str, agents: int | None
) -> None:
    """The data hold one mask only, so none is compared: it is one of the possible causes."""
    actor, td = fresh(kind, (ROWS,), agents=agents)
    td = dropped(td, "action_mask", agents)
    td = td if stored else td.exclude(at(agents, "logits"))
    report = cl.diagnose(clip_loss(actor, agents=agents), td)
    words = (repr(at(agents, "action_mask")), "equal") if stored else ("moved", "or")
    assert said(report, "head 'action'", "action mask", *words)
    assert len(report.reasons) == 1
    assert said(report, "moved") is not stored


@pytest.mark.parametrize("low", [-torch.inf, torch.finfo(torch.float32).min, -1e9, -1e6])
def test_mask_inside_the_logits(low: float) -> None:
    """A network that masks its own logits: the stored ones are forbidden where these are not."""

    class Masking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(3, 4)

        def forward(self, x: Any, mask: Any) -> Any:
            return self.net(x).masked_fill(~mask, low)

    net = TensorDictModule(Masking(), ["observation", "mask"], ["logits"])
    head = ProbabilisticTensorDictModule(
        ["logits"], ["action"], distribution_class=Categorical, return_log_prob=True,
        default_interaction_type="random")  # fmt: skip
    actor = ProbabilisticTensorDictSequential(net, head)
    mask = torch.rand(ROWS, 4) < 0.5
    mask[:, 0] = True
    td = collect(actor, TensorDict(observation=torch.randn(ROWS, 3), mask=mask, batch_size=[ROWS]))
    assert cl.diagnose(clip_loss(actor), td).reasons == []
    report = cl.diagnose(clip_loss(actor), dropped(td, "mask"))
    rows = (~mask).any(-1).sum().item()
    assert said(report, "head 'action'", NOT_ACTED, "'logits'", f"in {rows} row")
    assert len(report.reasons) == 1
    assert not said(cl.diagnose(clip_loss(moved(actor)), td), NOT_ACTED)


@AGENTS
@KINDS
def test_dropped_mask_with_a_joint_log_prob(kind: str, agents: int | None) -> None:
    """Every head shares the gap: only that of the mask is named."""
    kinds = {"move": "independent", "gear": kind}
    actor, td = fresh(kinds, (ROWS,), agents=agents)
    keys = log_prob_keys(kinds, agents)
    joint = td[keys[0]] + td[keys[1]]
    td = dropped(td.exclude(*keys), "gear_mask", agents)
    td[at(agents, "sample_log_prob")] = joint
    report = cl.diagnose(clip_loss(actor, agents=agents), td)
    assert report.sources == {"move": "joint", "gear": "joint"}
    assert said(report, "head 'gear'", NOT_ACTED)
    assert len(report.reasons) == 1


# --- samples at their bounds ---


def saturated(agents: int | None = None) -> Any:
    """(policy, data) of which many samples are rounded to a bound, and not clipped."""
    kinds = {"move": "tanh", "gear": "categorical"}
    actor, data = fresh(kinds, (4 * ROWS,), agents=agents)
    with torch.no_grad():
        actor[0].module.last.weight.mul_(15)
    prefix = () if agents is None else ("agents",)
    return actor, collect(actor, data.select(at(agents, "observation")), prefix=prefix)


@AGENTS
def test_saturated_samples(agents: int | None) -> None:
    """Rows at a bound whose ratio is 1 were not clipped, whatever is wrong with another head."""
    actor, td = saturated(agents)
    move, loss = td[at(agents, "move")], clip_loss(actor, agents=agents)
    bounds = [(move == edge).flatten() for edge in (move.amin(), move.amax())]
    assert all(int(at_bound.sum()) > 1 for at_bound in bounds)
    assert cl.diagnose(loss, td).reasons == []
    key = log_prob_keys({"move": "", "gear": ""}, agents)[1]
    td[key] -= 0.5
    report = cl.diagnose(loss, td)
    assert said(report, "head 'gear'")
    assert not said(report, "clipped")


def test_only_rows_at_a_bound_with_another_ratio_are_clipped() -> None:
    """A row is clipped by its own ratio, not by that of a row between the bounds."""
    actor, td = saturated()
    loss, move = clip_loss(actor), td["move"]
    inside = ((move > move.amin() + 0.01) & (move < move.amax() - 0.01)).all(-1)
    assert inside.any()
    middle = td.clone()
    middle["move_log_prob"][inside] -= 0.5
    assert not said(cl.diagnose(loss, middle), "clipped")
    edge = (move == move.amax()).any(-1).nonzero()[:2, 0]
    bound = td.clone()
    bound["move_log_prob"][edge] -= 0.5
    at_bound = ((move == move.amax(0)) | (move == move.amin(0)))[edge].sum().item()
    assert said(cl.diagnose(loss, bound), "head 'move'", "clipped", f"{at_bound} value")
