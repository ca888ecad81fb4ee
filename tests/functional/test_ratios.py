import math

import pytest
import torch

from composite_losses.errors import ShapeError
from composite_losses.functional import (
    clamp_log_ratio,
    clip_log_ratio,
    joint,
    log_clip_bounds,
    log_ratio,
    ratio,
)
from tests.tolerances import assert_close

F64 = torch.float64
NAN, INF = float("nan"), float("inf")
BOUNDS = [(torch.bfloat16, 80.0), (torch.float32, 80.0), (F64, 700.0)]


@pytest.mark.parametrize(("dtype", "bound"), BOUNDS)
class TestOverflow:
    def test_clamped_from_above_only(self, dtype, bound):
        x = torch.tensor([-INF, -1000.0, 0.5, bound, bound + 8, 1000.0, INF], dtype=dtype)
        expected = torch.tensor([-INF, -1000.0, 0.5, bound, bound, bound, bound], dtype=dtype)
        assert torch.equal(clamp_log_ratio(x), expected)

    def test_no_gradient_beyond(self, dtype, bound):
        x = torch.tensor([-1000.0, bound - 8, bound + 8, INF], dtype=dtype, requires_grad=True)
        clamp_log_ratio(x).sum().backward()
        assert torch.equal(x.grad, torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=dtype))

    def test_ratio_is_finite(self, dtype, bound):
        x = torch.tensor([-1000.0, 0.0, 1000.0], dtype=dtype, requires_grad=True)
        r = ratio(x)
        r.sum().backward()
        assert r.isfinite().all()
        assert torch.equal(x.grad, torch.tensor([0.0, 1.0, 0.0], dtype=dtype))


def test_ratio_is_the_exponential():
    assert_close(ratio(torch.tensor([math.log(1.5), -math.log(2)], dtype=F64)), [1.5, 0.5])


class TestLogRatio:
    def test_is_the_difference(self):
        new, old = torch.tensor([-1.0, -2.0], dtype=F64), torch.tensor([-1.5, -1.0], dtype=F64)
        assert_close(log_ratio(new, old), [0.5, -1.0])

    @pytest.mark.parametrize("poison", [NAN, INF, -INF])
    @pytest.mark.parametrize("mask_heads", [False, True])
    def test_masked_entries_are_one_without_gradient(self, poison, mask_heads):
        new = torch.tensor([[-1.0, -2.0], [poison, poison]], dtype=F64, requires_grad=True)
        old = torch.tensor([[-1.5, -1.0], [poison, 0.0]], dtype=F64, requires_grad=True)
        mask = torch.tensor([True, False])
        difference = log_ratio(new, old, mask[:, None].expand(2, 2) if mask_heads else mask)
        assert_close(difference, [[0.5, -1.0], [0.0, 0.0]])
        difference.exp().sum().backward()
        assert_close(new.grad, [[math.exp(0.5), math.exp(-1)], [0.0, 0.0]])
        assert_close(old.grad, -new.grad)

    @pytest.mark.parametrize("shape", [(3, 1), (1,), ()])
    def test_rejects_different_shapes(self, shape):
        with pytest.raises(ShapeError, match=r"log_prob \[3\], behaviour_log_prob"):
            log_ratio(torch.zeros(3), torch.zeros(shape))

    def test_rejects_a_mask_of_another_shape(self):
        with pytest.raises(ShapeError):
            log_ratio(torch.zeros(3), torch.zeros(3), torch.ones(2, dtype=torch.bool))


def test_joint_sums_the_heads():
    x = torch.tensor([[0.3, -0.3, 0.0], [1.0, 2.0, 3.0]], dtype=F64, requires_grad=True)
    assert_close(joint(x), [0.0, 6.0])
    (joint(x) * torch.tensor([1.0, 2.0])).sum().backward()
    assert_close(x.grad, [[1.0] * 3, [2.0] * 3])


class TestClip:
    def test_bounds(self):
        low, high = log_clip_bounds(torch.tensor(0.2, dtype=F64), torch.tensor(0.3, dtype=F64))
        assert_close(low, math.log(0.8))
        assert_close(high, math.log(1.3))

    def test_bounds_from_floats(self):
        low, high = log_clip_bounds(0.2, 0.3)
        assert_close(low, math.log(0.8))
        assert_close(high, math.log(1.3))

    def test_eps_one_is_no_lower_bound(self):
        assert log_clip_bounds(1.0, 1)[0].item() == -INF
        assert_close(clip_log_ratio(torch.tensor([-50.0], dtype=F64), 1.0, 0.2), [-50.0])

    def test_values_and_gradient(self):
        x = torch.tensor([0.7, 0.9, 1.1, 1.3], dtype=F64).log().requires_grad_()
        clipped = clip_log_ratio(x, 0.2, 0.2)
        assert_close(clipped.exp(), [0.8, 0.9, 1.1, 1.2])
        clipped.sum().backward()
        assert_close(x.grad, [0.0, 1.0, 1.0, 0.0])

    def test_per_head_bounds(self):
        x = torch.tensor([[0.5, 0.5], [2.0, 2.0]], dtype=F64).log()
        low, high = torch.tensor([0.1, 0.2]), torch.tensor([0.3, 0.4])
        expected = torch.tensor([[0.9, 0.8], [1.3, 1.4]], dtype=F64)
        assert torch.allclose(clip_log_ratio(x, low, high).exp(), expected, atol=1e-6)
        assert clip_log_ratio(x, low, high).dtype == F64

    def test_wider_bounds_do_not_widen_the_dtype(self):
        eps = torch.tensor([0.1, 0.2], dtype=F64)
        assert clip_log_ratio(torch.zeros(3, 2), eps, eps).dtype == torch.float32

    @pytest.mark.parametrize("name", ["eps_low", "eps_high"])
    @pytest.mark.parametrize("shape", [(3,), (2, 2), (1, 2)])
    def test_rejects_bounds_that_are_not_per_head(self, shape, name):
        options = {"eps_low": 0.2, "eps_high": 0.2, name: torch.full(shape, 0.2)}
        with pytest.raises(ShapeError, match=name):
            clip_log_ratio(torch.zeros(3, 2), **options)


def test_a_bound_of_another_number_of_heads_is_named():
    """The option, its shape and the number of heads stand in the message."""
    with pytest.raises(
        ShapeError, match=r"^eps_low must be 0-dim or \[heads\], found \[2\]; heads: 3$"
    ):
        clip_log_ratio(torch.zeros(4, 3), torch.ones(2) / 5, 0.2)
    with pytest.raises(ShapeError, match=r"^eps_high .* found \[2\]; heads: none$"):
        clip_log_ratio(torch.zeros(()), 0.2, torch.ones(2) / 5)
