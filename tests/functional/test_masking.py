import pytest
import torch

from composite_losses.errors import ConfigError, ShapeError
from composite_losses.functional import (
    combine_masks,
    fill,
    masked_mean,
    masked_moments,
    reduce,
    valid_count,
)
from tests.reference import functional as oracle
from tests.tolerances import assert_close

F64 = torch.float64
NAN, INF = float("nan"), float("inf")
MASK = torch.tensor([True, False, True])


class TestFill:
    def test_replaces_what_does_not_count(self):
        x = torch.tensor([1.0, NAN, 3.0], dtype=F64)
        assert_close(fill(x, MASK, -2.0), [1.0, -2.0, 3.0])

    def test_mask_gets_trailing_dims(self):
        x = torch.tensor([[1.0, 2.0], [INF, NAN], [5.0, 6.0]], dtype=F64)
        assert_close(fill(x, MASK), [[1.0, 2.0], [0.0, 0.0], [5.0, 6.0]])

    def test_no_mask_returns_the_same_tensor(self):
        x = torch.ones(3)
        assert fill(x, None) is x

    @pytest.mark.parametrize(
        ("x", "value", "expected"),
        [
            (torch.tensor([1, 2, 3]), 0.0, torch.tensor([1, 0, 3])),
            (
                torch.tensor([1, 2, 3], dtype=torch.int32),
                7,
                torch.tensor([1, 7, 3], dtype=torch.int32),
            ),
            (torch.tensor([False, False, False]), True, torch.tensor([False, True, False])),
            (
                torch.ones(3, dtype=torch.bfloat16),
                0.0,
                torch.tensor([1, 0, 1], dtype=torch.bfloat16),
            ),
        ],
    )
    def test_keeps_the_dtype(self, x, value, expected):
        actual = fill(x, MASK, value)
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)

    def test_gradient_is_zero_where_masked(self):
        x = torch.tensor([1.0, NAN, 3.0], dtype=F64, requires_grad=True)
        fill(x, MASK).square().sum().backward()
        assert_close(x.grad, [2.0, 0.0, 6.0])  # d x^2 = 2 x

    @pytest.mark.parametrize("shape", [(2,), (1,), (2, 3), ()])
    def test_rejects_a_mask_that_is_no_prefix(self, shape):
        with pytest.raises(ShapeError, match=r"\[3\]"):
            fill(torch.ones(shape), MASK)


class TestCombineMasks:
    def test_is_the_and_of_those_given(self):
        other = torch.tensor([True, True, False])
        assert torch.equal(
            combine_masks(None, MASK, None, other), torch.tensor([True, False, False])
        )

    def test_of_one_is_that_one(self):
        assert combine_masks(None, MASK) is MASK

    @pytest.mark.parametrize("masks", [(), (None,), (None, None)])
    def test_of_none_is_none(self, masks):
        assert combine_masks(*masks) is None

    def test_rejects_different_shapes(self):
        with pytest.raises(ShapeError, match=r"\[3\].*\[3, 1\]"):
            combine_masks(MASK, MASK[:, None])


class TestValidCount:
    @pytest.mark.parametrize(
        ("shape", "mask", "expected"),
        [
            ((3, 2), None, 6.0),
            ((3,), MASK, 2.0),
            ((3, 2), MASK, 4.0),  # each row of the mask counts for two entries
            ((3,), torch.zeros(3, dtype=torch.bool), 1.0),
            ((0,), None, 1.0),
            ((0,), torch.zeros(0, dtype=torch.bool), 1.0),
        ],
    )
    def test_counts(self, shape, mask, expected):
        count = valid_count(torch.zeros(shape, dtype=F64), mask)
        assert count.shape == ()
        assert_close(count, expected)

    def test_half_precision_counts_before_rounding(self):
        # One by one, bfloat16 stops at 256: 256 + 1 rounds to 256.
        x = torch.zeros(4096, dtype=torch.bfloat16)
        assert valid_count(x, torch.ones(4096, dtype=torch.bool)).item() == 4096

    def test_rejects_a_mask_that_is_no_prefix(self):
        with pytest.raises(ShapeError):
            valid_count(torch.zeros(2), MASK)


class TestReduce:
    X = torch.tensor([1.0, NAN, 5.0], dtype=F64)

    @pytest.mark.parametrize(
        ("reduction", "expected"), [("none", [1.0, 0.0, 5.0]), ("sum", 6.0), ("mean", 3.0)]
    )
    def test_selects_before_it_sums(self, reduction, expected):
        assert_close(reduce(self.X, MASK, reduction), expected)

    @pytest.mark.parametrize(
        ("reduction", "expected"), [("none", [1.0, 3.0, 5.0]), ("sum", 9.0), ("mean", 3.0)]
    )
    def test_without_mask(self, reduction, expected):
        assert_close(reduce(torch.tensor([1.0, 3.0, 5.0], dtype=F64), None, reduction), expected)

    @pytest.mark.parametrize("count", [4.0, torch.tensor(4.0, dtype=F64)])
    @pytest.mark.parametrize("mask", [MASK, None])
    def test_mean_over_a_given_count(self, mask, count):
        x = torch.tensor([1.0, 0.0, 5.0], dtype=F64)
        assert_close(reduce(x, mask, "mean", count=count), 1.5)  # 6 / 4

    def test_gradient_is_one_over_the_count(self):
        x = self.X.clone().requires_grad_()
        reduce(x, MASK).backward()
        assert_close(x.grad, [0.5, 0.0, 0.5])

    @pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
    def test_nothing_valid_is_zero_with_a_graph(self, reduction):
        x = torch.full((3,), NAN, requires_grad=True)
        result = reduce(x, torch.zeros(3, dtype=torch.bool), reduction).sum()
        result.backward()
        assert result.item() == 0
        assert torch.equal(x.grad, torch.zeros(3))

    def test_empty_mean_is_zero(self):
        assert reduce(torch.zeros(0)).item() == 0

    def test_rejects_an_unknown_reduction(self):
        with pytest.raises(ConfigError, match="'average'"):
            reduce(self.X, None, "average")

    def test_rejects_a_mask_of_another_shape(self):
        with pytest.raises(ShapeError, match=r"x \[3, 2\], mask \[3\]"):
            reduce(torch.ones(3, 2), MASK)

    def test_masked_mean_is_the_mean(self):
        assert_close(masked_mean(self.X, MASK), 3.0)  # (1 + 5) / 2


class TestMaskedMoments:
    def test_all(self):
        x = torch.tensor([[1.0, 2.0], [3.0, 6.0]], dtype=F64)
        mean, std = masked_moments(x)
        assert_close(mean, [[3.0]])
        assert_close(std, [[(14 / 3) ** 0.5]])  # (4 + 1 + 0 + 9) / (4 - 1)

    def test_separate_along_a_dim(self):
        x = torch.tensor([[1.0, 10.0], [3.0, 30.0], [8.0, 80.0]], dtype=F64)
        for dims in ((1,), (-1,)):
            mean, std = masked_moments(x, keep_dims=dims)
            assert_close(mean, [[4.0, 40.0]])
            assert_close(std, [[13**0.5, 1300**0.5]])  # (9 + 1 + 16) / 2 = 13

    @pytest.mark.parametrize("poison", [0.0, NAN, INF, -INF])
    def test_masked_entries_leave_no_trace(self, poison):
        mask = torch.rand(5, 3) > 0.4
        x = torch.randn(5, 3, dtype=F64)
        mean, std = masked_moments(torch.where(mask, x, poison), mask)
        expected_mean, expected_std = oracle.moments(x[mask].tolist())
        assert_close(mean, [[expected_mean]])
        assert_close(std, [[expected_std]])

    @pytest.mark.parametrize("poison", [NAN, INF])
    def test_gradient(self, poison):
        # mean = (1 + 5) / 2, std = |5 - 1| / sqrt(2): d std = (-1, 1) / sqrt(2)
        x = torch.tensor([1.0, poison, 5.0], dtype=F64, requires_grad=True)
        mean, std = masked_moments(x, MASK)
        assert_close(torch.autograd.grad(mean.sum(), x, retain_graph=True)[0], [0.5, 0.0, 0.5])
        assert_close(torch.autograd.grad(std.sum(), x)[0], [-(0.5**0.5), 0.0, 0.5**0.5])

    @pytest.mark.parametrize("valid", [0, 1])
    def test_of_one_or_no_entry(self, valid):
        mask = torch.arange(3) < valid
        x = torch.tensor([7.0, NAN, NAN], dtype=F64, requires_grad=True)
        mean, std = masked_moments(x, mask)
        assert_close(mean, [7.0 * valid])
        assert_close(std, [0.0])
        (mean + std).sum().backward()
        assert_close(x.grad, [1.0 * valid, 0.0, 0.0])

    def test_all_dims_kept(self):
        x = torch.tensor([[1.0, NAN]], dtype=F64)
        mean, std = masked_moments(x, torch.tensor([[True, False]]), keep_dims=(0, 1))
        assert_close(mean, [[1.0, 0.0]])
        assert_close(std, [[0.0, 0.0]])

    def test_constant_far_from_zero_has_no_spread(self):
        # In float32 the sum of a thousand times 1e6 + 1/16 is rounded to a multiple of 64.
        mean, std = masked_moments(torch.full((1000,), 1e6 + 0.0625))
        assert mean.item() == 1e6 + 0.0625
        assert std.item() == 0

    def test_offset_does_not_cancel(self):
        # Values 1e4 +- 0.5: E[x^2] - E[x]^2 has no correct digit in float32; std = 0.5 sqrt(4 / 3).
        _, std = masked_moments(torch.tensor([9999.5, 10000.5, 9999.5, 10000.5]))
        assert_close(std, torch.tensor([0.5 * (4 / 3) ** 0.5]))

    def test_valid_nan_is_not_hidden(self):
        mean, std = masked_moments(torch.tensor([1.0, NAN]))
        assert mean.isnan() and std.isnan()

    def test_scalar(self):
        mean, std = masked_moments(torch.tensor(3.0, dtype=F64))
        assert_close(mean, 3.0)
        assert_close(std, 0.0)

    @pytest.mark.parametrize(
        ("dims", "words"), [((2,), "lie in"), ((-3,), "lie in"), ((1, -1), "twice")]
    )
    def test_rejects_wrong_dims(self, dims, words):
        with pytest.raises(ConfigError, match=words):
            masked_moments(torch.ones(2, 2), keep_dims=dims)
