import math

import pytest
import torch

from composite_losses.errors import ShapeError
from composite_losses.functional import (
    clip_fraction,
    effective_sample_size,
    explained_variance,
    masked_max,
)
from tests.reference import functional as oracle
from tests.tolerances import assert_close

F64 = torch.float64
POISONS = [0.0, float("nan"), float("inf"), -float("inf")]


def ratios(*numbers):
    return torch.tensor(numbers, dtype=F64).log()


class TestEffectiveSampleSize:
    @pytest.mark.parametrize(
        ("weights", "expected"),
        [
            ((1, 1, 1, 3), 0.75),  # 6^2 / (1 + 1 + 1 + 9) / 4
            ((2, 2, 2), 1.0),
            ((5,), 1.0),
            ((1, 0), 0.5),
        ],
    )
    def test_closed_form(self, weights, expected):
        assert_close(effective_sample_size(ratios(*weights)), expected)

    def test_is_one_scalar_for_any_layout(self):
        x = torch.randn(3, 4, dtype=F64)
        expected = oracle.effective_sample_size(x.exp().flatten().tolist())
        assert_close(effective_sample_size(x), expected)
        assert_close(effective_sample_size(x.T), expected)

    @pytest.mark.parametrize("offset", [-1000.0, 1000.0])
    def test_does_not_overflow(self, offset):
        assert_close(effective_sample_size(ratios(1, 1, 1, 3) + offset), 0.75)

    @pytest.mark.parametrize("poison", POISONS)
    def test_masked_entries_leave_no_trace(self, poison):
        x = torch.cat([ratios(1, 1, 1, 3), torch.tensor([poison], dtype=F64)])
        assert_close(effective_sample_size(x, torch.arange(5) < 4), 0.75)


class TestClipFraction:
    @pytest.mark.parametrize(
        ("low", "high", "expected"),
        [(0.2, 0.2, 0.5), (0.2, 0.05, 0.75), (0.4, 0.2, 0.25), (0.4, 0.4, 0.0)],
    )
    def test_closed_form(self, low, high, expected):
        assert_close(clip_fraction(ratios(0.7, 0.9, 1.1, 1.3), low, high), expected)

    def test_bounds_per_head(self):
        x = torch.stack([ratios(0.7, 0.9), ratios(0.7, 0.9)], -1)
        eps = torch.tensor([0.05, 0.2], dtype=F64)  # both of the first head, one of the second
        assert_close(clip_fraction(x, eps, eps), 0.75)

    @pytest.mark.parametrize("poison", POISONS)
    def test_masked_entries_leave_no_trace(self, poison):
        x = torch.cat([torch.tensor([poison], dtype=F64), ratios(0.7, 0.9, 1.1)])
        assert_close(clip_fraction(x, 0.2, 0.2, torch.arange(4) > 0), 1 / 3)


class TestExplainedVariance:
    def test_closed_form(self):
        target = torch.tensor([0.0, 2.0, 4.0], dtype=F64)  # variance 8 / 3
        value = torch.tensor([1.0, 2.0, 3.0], dtype=F64)  # residual -1, 0, 1: variance 2 / 3
        assert_close(explained_variance(value, target), 0.75)
        assert_close(explained_variance(target, target), 1.0)
        assert_close(explained_variance(value + 5, target), 0.75)  # a constant error costs nothing
        assert_close(explained_variance(-target, target), -3.0)  # residual 2 target: 1 - 4

    @pytest.mark.parametrize("poison", POISONS)
    def test_masked_entries_leave_no_trace(self, poison):
        mask = torch.rand(6, 2) > 0.4
        value, target = torch.randn(6, 2, dtype=F64), torch.randn(6, 2, dtype=F64)
        expected = oracle.explained_variance(value[mask].tolist(), target[mask].tolist())
        poisoned = [torch.where(mask, x, poison) for x in (value, target)]
        assert_close(explained_variance(*poisoned, mask), expected)

    def test_constant_target(self):
        value = explained_variance(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 3.0]))
        assert value.isfinite() and value < 0

    def test_rejects_different_shapes(self):
        with pytest.raises(ShapeError, match=r"value \[3\], target \[3, 1\]"):
            explained_variance(torch.zeros(3), torch.zeros(3, 1))


class TestMaskedMax:
    def test_closed_form(self):
        assert_close(masked_max(torch.tensor([[-3.0, -1.0], [-2.0, -5.0]], dtype=F64)), -1.0)

    @pytest.mark.parametrize("poison", POISONS)
    def test_masked_entries_leave_no_trace(self, poison):
        x = torch.tensor([-3.0, poison, -2.0], dtype=F64)
        assert_close(masked_max(x, torch.tensor([True, False, True])), -2.0)

    def test_valid_nan_is_not_hidden(self):
        assert math.isnan(masked_max(torch.tensor([1.0, float("nan")])).item())


CALLS = {
    "effective_sample_size": effective_sample_size,
    "clip_fraction": lambda x, mask: clip_fraction(x, 0.2, 0.2, mask),
    "explained_variance": lambda x, mask: explained_variance(x, 2 * x, mask),
    "masked_max": masked_max,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("poison", [1.0, float("nan")])
def test_nothing_valid_is_zero(call, poison):
    value = call(torch.full((3,), poison, dtype=F64), torch.zeros(3, dtype=torch.bool))
    assert_close(value, 0.0)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("mask", [None, torch.zeros(0, dtype=torch.bool)])
def test_empty_is_zero(call, mask):
    assert_close(call(torch.zeros(0, dtype=F64), mask), 0.0)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_is_detached(call):
    value = call(torch.randn(3, requires_grad=True), torch.ones(3, dtype=torch.bool))
    assert value.shape == () and not value.requires_grad


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_rejects_a_mask_of_another_shape(call):
    with pytest.raises(ShapeError):
        call(torch.zeros(3, 2), torch.ones(3, dtype=torch.bool))
