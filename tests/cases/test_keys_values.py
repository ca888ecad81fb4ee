"""Stored entries that carry a graph, or that are not finite."""

import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

import composite_losses as cl
from composite_losses.errors import GraphError, NonFiniteError
from tests.cases.builders_ab import (
    CORE,
    DISCRETE,
    HYBRID,
    RATIO_LOSSES,
    Scene,
    assert_same,
    bare,
    geometric,
    gradients,
    scene,
    snapshot,
    total,
)
from tests.tolerances import assert_close


def drop(td: TensorDict, *keys: Any) -> TensorDict:
    """A copy of the data without some entries."""
    return td.clone().exclude(*keys)


@pytest.mark.parametrize("form", ["flat", "agents2"])
@pytest.mark.parametrize("name", RATIO_LOSSES)
def test_stored_entry_with_a_graph(name: str, form: str) -> None:
    """Case 38: a log-prob that requires grad → RuntimeError with its key and "no_grad"."""
    s = scene(HYBRID, form)
    loss = s.loss(name)
    for i in range(2):
        td = s.td.clone()
        td.set(s.log_prob_key(i), td.get(s.log_prob_key(i)).clone().requires_grad_())
        before = snapshot(td)
        with pytest.raises(RuntimeError, match="no_grad") as caught:
            loss(td)
        assert isinstance(caught.value, GraphError)
        assert str(s.log_prob_key(i)) in str(caught.value)
        assert snapshot(td) == before
        with pytest.raises(RuntimeError, match="no_grad"):
            loss.log_probs(td)
        with pytest.raises(RuntimeError, match="no_grad"):
            cl.resolve_log_probs(s.actor, td)


@pytest.mark.parametrize("form", ["flat", "agents2"])
@pytest.mark.parametrize("name", RATIO_LOSSES)
def test_stored_parameters_with_a_graph(name: str, form: str) -> None:
    """Case 38: stored parameters collected with grad, used as the fall-back → the same error."""
    s = scene(HYBRID, form)
    td = drop(s.td, s.log_prob_key(1))
    leaf = bare((*s.group, "params", "dist1", "loc"))
    td.set(leaf, td.get(leaf).clone().requires_grad_())
    with pytest.raises(RuntimeError, match="no_grad") as caught:
        s.loss(name)(td)
    assert "loc" in str(caught.value)
    # without a graph nothing flows into the stored parameters
    plain = td.detach()
    total(s.loss(name)(plain)).backward()
    assert plain.get(leaf).grad is None


def test_joint_log_prob_with_a_graph() -> None:
    """Case 38: the same for one joint log-prob."""
    s = scene(HYBRID, "agents3")
    td = drop(s.td, s.log_prob_key(0), s.log_prob_key(1))
    td["agents", "sample_log_prob"] = s.stored().sum(-1).requires_grad_()
    with pytest.raises(GraphError, match="sample_log_prob"):
        s.loss("ppo")(td)


def masked(s: Scene, how: str, mask: Tensor) -> dict[str, Any]:
    """Stores a mask and returns how a loss is told about it."""
    if how == "auto":
        s.td.set("shifted_valid", mask)
        return {}
    s.td.set(s.key("valid"), mask.unsqueeze(-1))
    return {"loss_mask_key": s.key("valid")} if how == "loss" else {"agent_mask": s.key("valid")}


def tell(loss: Any, told: dict[str, Any]) -> Any:
    for name, key in told.items():
        if name == "loss_mask_key":
            loss.loss_mask_key = key
        else:
            loss.set_keys(**{name: key})
    return loss


@pytest.mark.parametrize("form", CORE)
@pytest.mark.parametrize("how", ["loss", "agent", "auto"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_log_prob(form: str, how: str, value: float) -> None:
    """Case 46: −inf, inf or NaN in two rows → error with head and count; masked → the rest."""
    s = scene(HYBRID, form)
    s.move()
    mask = torch.ones(s.sample, dtype=torch.bool)
    mask.view(-1)[:2] = False
    for name in ("clip_joint", "clip_per_head", "ppo", "klpen"):
        s.td = s.td.clone()
        told = masked(s, how, mask)
        clean = tell(s.loss(name).eval(), told)(s.td)
        broken = s.td.clone()
        lp = broken.get(s.log_prob_key(0))
        lp[~mask] = value
        before = snapshot(broken)
        unmasked = s.loss(name, validate=True)
        unmasked.loss_mask_key = None
        with pytest.raises(NonFiniteError) as caught:
            unmasked(broken)
        assert isinstance(caught.value, ValueError)
        assert "'gear'" in str(caught.value)
        assert "2 row" in str(caught.value)
        for validate in (True, False):
            loss = tell(s.loss(name, validate=validate).eval(), told)
            out = loss(broken)
            assert all(v.isfinite() for v in out.values())
            assert_same(out, clean, exact=True)
            for g, w in zip(
                gradients(total(out), s.net), gradients(total(clean), s.net), strict=True
            ):
                assert torch.equal(g, w)
        assert snapshot(broken) == before
        if name == "clip_joint":
            want = geometric("joint", s.log_ratio(), s.advantage)[mask].mean()
            assert_close(clean["loss_objective"], -want)
        report = cl.diagnose(s.loss(name), drop(broken, "shifted_valid"))
        assert report.non_finite == {"gear": 2, "move": 0}


@pytest.mark.parametrize("name", ["ppo", "clip_per_head", "a2c", "reinforce"])
def test_dropped_rows(name: str) -> None:
    """Case 39: rows whose log-prob is missing (NaN), masked: the loss of the data without them."""
    s = scene(HYBRID, "flat")
    s.move()
    keep = torch.tensor([True, False, True, True, False, True])
    s.td["valid"] = keep
    s.td["gear_log_prob"][~keep] = math.nan
    loss = s.loss(name)
    loss.loss_mask_key = "valid"
    assert_same(loss(s.td), s.loss(name)(s.td[keep]))


@pytest.mark.parametrize("form", CORE)
def test_zero_is_a_genuine_log_prob(form: str) -> None:
    """Case 39: a stored 0.0 is the log of probability 1, not a gap: ratio = π(a)."""
    s = scene(DISCRETE, form)
    for i in range(2):
        s.td.set(s.log_prob_key(i), torch.zeros(s.sample))
    out = s.loss("ppo", critic=False, validate=True)(s.td)
    pi = s.log_probs().sum(-1).exp()
    assert_close(out["loss_objective"], -(pi * s.advantage).mean())
    assert s.loss("ppo").log_prob_source(s.td) == {"a": "stored", "b": "stored"}


@pytest.mark.parametrize("form", ["flat", "agents2"])
def test_non_finite_parameters_and_joint(form: str) -> None:
    """Case 46: under validate, NaN among stored parameters and −inf in a joint log-prob."""
    s = scene(HYBRID, form)
    td = drop(s.td, s.log_prob_key(0))
    td.get(bare((*s.group, "params", "dist0", "logits"))).view(-1, 3)[0] = math.nan
    with pytest.raises(NonFiniteError, match="gear"):
        s.loss("clip_joint", validate=True)(td)
    td = drop(s.td, s.log_prob_key(0), s.log_prob_key(1))
    joint = s.stored().sum(-1)
    joint.view(-1)[0] = -math.inf
    td.set(s.key("sample_log_prob"), joint)
    with pytest.raises(NonFiniteError, match="1 row"):
        s.loss("ppo", validate=True)(td)
