"""One reduction for all terms, and gradients that are derivatives."""

import itertools
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

import composite_losses as cl
from tests.cases.builders_fl import (
    CLASSES,
    DOORS,
    KL,
    LOSSES,
    PAIR,
    SIX,
    TRIO,
    build,
    make_data,
    make_mask,
    mask_with,
    outcome,
    same,
    total_loss,
)
from tests.tolerances import assert_close

LAYOUTS = {
    "B": ((7,), False),
    "BT": ((3, 4), False),
    "BA": ((4, 3), True),
    "BTA": ((2, 3, 2), True),
}
TERMS = {"loss_objective", "loss_critic", "loss_entropy", "loss_actor", "loss_value"}


def data_for(name: str, heads: Any, layout: str = "B") -> TensorDict:
    shape, group = LAYOUTS[layout]
    return make_data(heads, shape, group=group, source="all" if name in KL else "stored")


def reduced(name: str, heads: Any, layout: str, reduction: str | None, masked: bool) -> Any:
    """The losses of one batch under a reduction, with the gradient of their sum, and the mask."""
    shape, group = LAYOUTS[layout]
    data = data_for(name, heads, layout)
    options = {} if reduction is None else {"reduction": reduction}
    loss = build(name, heads, group=group, **options).eval()
    mask = make_mask(shape) if masked else torch.ones(shape, dtype=torch.bool)
    if masked:
        mask_with(loss, data, mask, "group" if group else "root")
    out, gradients = outcome(loss, data)
    return out, gradients, mask


# --- 128: reductions -----------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads", [PAIR, "normal"], ids=["composite", "single"])
@pytest.mark.parametrize("name", [*DOORS, "PolicyLoss", "score"])
def test_reductions_agree(name: str, heads: Any, layout: str, masked: bool) -> None:
    """Case 128: "none" gives ``[*S]``, 0 where masked; "sum" its sum, "mean" that over the count.

    For every term, agents included; metrics are the same whatever the reduction.
    """
    rows, gradient_of_rows, mask = reduced(name, heads, layout, "none", masked)
    total, gradient_of_total, _ = reduced(name, heads, layout, "sum", masked)
    mean, gradient_of_mean, _ = reduced(name, heads, layout, "mean", masked)
    default, gradient_of_default, _ = reduced(name, heads, layout, None, masked)
    count = int(mask.sum())
    assert 1 < count <= mask.numel()
    losses = [key for key in rows if key.startswith("loss")]
    assert losses and set(losses) <= TERMS
    for key in losses:
        assert rows[key].shape == LAYOUTS[layout][0], key
        assert (rows[key][~mask] == 0).all(), key
        assert (rows[key][mask] != 0).all(), key
        assert total[key].shape == mean[key].shape == ()
        assert_close(total[key], rows[key].sum())
        assert_close(mean[key], rows[key][mask].mean())
    for key in rows.keys() - set(losses):
        assert torch.equal(rows[key], mean[key]), key
        assert torch.equal(total[key], mean[key]), key
    same((default, gradient_of_default), (mean, gradient_of_mean))
    for key, gradient in gradient_of_mean.items():
        torch.testing.assert_close(gradient_of_rows[key], gradient * count, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(gradient_of_total[key], gradient * count, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CLASSES)
def test_nothing_valid(name: str) -> None:
    """Case 128: with an all-False mask every reduction is 0, with a graph and zero gradients."""
    for reduction in ("none", "sum", "mean"):
        loss = build(name, PAIR, reduction=reduction)
        data = data_for(name, PAIR)
        mask_with(loss, data, torch.zeros(7, dtype=torch.bool), "root")
        out, gradients = outcome(loss, data)
        assert all((v == 0).all() for k, v in out.items() if k.startswith("loss"))
        assert all(g is not None and (g == 0).all() for g in gradients.values())


@pytest.mark.parametrize("name", CLASSES)
def test_reduction_is_an_attribute(name: str) -> None:
    """Case 128: setting it later counts from the next call on; another word is refused."""
    loss, data = build(name, PAIR).eval(), data_for(name, PAIR)
    mean = loss(data)
    loss.reduction = "sum"
    for key, value in loss(data).items():
        assert_close(value.detach(), mean[key].detach() * (7 if key.startswith("loss") else 1))
    with pytest.raises(ValueError, match="'none', 'mean' or 'sum'"):
        build(name, PAIR, reduction="median")


def test_inactive_heads_and_terms() -> None:
    """Case 128: a row without an active head leaves the policy terms' count, not the value's."""
    data = data_for("PPOLoss", PAIR)
    data["moves"], data["shifts"] = torch.arange(7) < 3, torch.arange(7) < 5
    outputs = {}
    for reduction in ("none", "mean", "sum"):
        loss = build("PPOLoss", PAIR, reduction=reduction)
        loss.set_keys(head_active={"move": "moves", "gear": "shifts"})
        outputs[reduction] = loss(data)
    for key, count in (("loss_objective", 5), ("loss_entropy", 5), ("loss_critic", 7)):
        rows = outputs["none"][key]
        assert rows.shape == (7,)
        assert (rows != 0).sum() == count
        assert_close(outputs["mean"][key].detach(), rows.detach().sum() / count)
        assert_close(outputs["sum"][key].detach(), rows.detach().sum())


# --- 129: float64 --------------------------------------------------------------------------------


def in_double(name: str, heads: Any, layout: str = "B", **options: Any) -> tuple[Any, TensorDict]:
    group = LAYOUTS[layout][1]
    loss = build(name, heads, group=group, **options).eval().double()
    data = data_for(name, heads, layout)
    return loss, data.apply(lambda x: x.double() if x.is_floating_point() else x)


def check(loss: Any, data: TensorDict) -> None:
    """Every loss term by itself has the gradient that finite differences give."""
    weights = tuple(loss.parameters())
    terms = [key for key in loss.out_keys if key.startswith("loss")]

    def losses(*_: Tensor) -> tuple[Tensor, ...]:
        out = loss(data)
        return tuple(out[key] for key in terms)

    assert all(term.dtype == torch.float64 and term.requires_grad for term in losses())
    assert torch.autograd.gradcheck(losses, weights, fast_mode=True, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("functional", [True, False], ids=["functional", "modules"])
@pytest.mark.parametrize("heads", [PAIR, "normal", "categorical"], ids=["composite", "loc", "cat"])
@pytest.mark.parametrize("name", LOSSES)
def test_gradient_is_the_derivative(name: str, heads: Any, functional: bool) -> None:
    """Case 129: gradcheck in float64, per term, for the weights of actor and critic."""
    check(*in_double(name, heads, functional=functional))


@pytest.mark.parametrize("heads", [SIX, TRIO], ids=["six", "trio"])
@pytest.mark.parametrize("name", [*DOORS, "dual", "score"])
def test_gradient_of_many_families(name: str, heads: Any) -> None:
    """Case 129: every family's log-prob, entropy and (where there is a penalty) KL."""
    check(*in_double(name, heads))


@pytest.mark.parametrize("layout", ["BT", "BA", "BTA"])
@pytest.mark.parametrize("name", [*DOORS, "PolicyLoss"])
def test_gradient_with_masks(name: str, layout: str) -> None:
    """Case 129: over time and agents, with rows that do not count."""
    shape, group = LAYOUTS[layout]
    loss, data = in_double(name, PAIR, layout)
    mask_with(loss, data, make_mask(shape), "group" if group else "root")
    check(loss, data)


OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("ClipPPOLoss", {"clip_value": 0.2, "normalize_advantage": True}),
    ("ClipPPOLoss", {"loss_critic_type": "l1"}),
    ("ClipPPOLoss", {"loss_critic_type": "l2", "separate_losses": True}),
    ("ClipPPOLoss", {"delay_actor": True}),  # a capped ratio keeps its gradient: no derivative
    ("ClipPPOLoss-per_head", {"head_weights": {"gear": 0.3}, "dual_clip": 1.5}),
    ("ClipPPOLoss-mixed", {"mix": 0.2, "entropy_coeff": {"move": 0.3, "gear": -0.2}}),
    ("KLPENPPOLoss", {"beta": 3.0}),
    ("PolicyLoss", {"advantage": cl.AdvantageNorm()}),
]


@pytest.mark.filterwarnings("ignore:No target network updater:UserWarning")
@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_gradient_with_options(name: str, options: dict[str, Any]) -> None:
    """Case 129: every option that changes a formula."""
    check(*in_double(name, PAIR, **options))


@pytest.mark.parametrize(("name", "layout"), list(itertools.product(DOORS, ["B", "BA"])))
def test_float_and_double_agree(name: str, layout: str) -> None:
    """Case 129: float32 is float64 rounded, outputs and gradients, metrics included."""
    group = LAYOUTS[layout][1]
    loss, data = in_double(name, PAIR, layout)
    exact = loss(data)
    total_loss(exact).backward()
    single = build(name, PAIR, group=group).eval()
    found = single(data_for(name, PAIR, layout))
    total_loss(found).backward()
    for key, value in found.items():
        assert value.dtype == torch.float32 and exact[key].dtype == torch.float64
        torch.testing.assert_close(value.double(), exact[key], rtol=1e-4, atol=1e-6)
    for left, right in zip(single.parameters(), loss.parameters(), strict=True):
        torch.testing.assert_close(left.grad.double(), right.grad, rtol=1e-3, atol=1e-5)


SCALE = 2.0**20


@pytest.mark.parametrize("name", list(DOORS))
def test_a_loss_scaler_scales_gradients(name: str) -> None:
    """A factor of two to some power is exact, also where classes are forbidden or only fill up.

    Their log-probs are large negative numbers: the product with a gradient may not overflow.
    """
    heads = {"say": "masked", "gear": "categorical", "move": "normal"}
    plain = build(name, heads, entropy_coeff=0.5).eval()
    scaled = build(name, heads, entropy_coeff=0.5).eval()
    scaled.load_state_dict(plain.state_dict())
    data = data_for(name, heads)
    total_loss(plain(data)).backward()
    (SCALE * total_loss(scaled(data))).backward()
    for one, two in zip(plain.parameters(), scaled.parameters(), strict=True):
        assert one.grad is not None and one.grad.isfinite().all()
        assert torch.equal(one.grad * SCALE, two.grad)
