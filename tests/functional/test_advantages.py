import pytest
import torch

from composite_losses.errors import ConfigError, ShapeError
from composite_losses.functional import standardise
from tests.reference import functional as oracle
from tests.tolerances import assert_close

F64 = torch.float64
NAN, INF = float("nan"), float("inf")


def test_mean_zero_unit_std():
    advantage = torch.tensor([[1.0], [2.0], [6.0]], dtype=F64)
    std = 7**0.5  # mean 3: (4 + 1 + 9) / 2
    assert_close(standardise(advantage), [[-2 / std], [-1 / std], [3 / std]])


def test_agents_apart():
    # Each agent: half +c, half -c, n = 4: std = c sqrt(4 / 3), so A / std = +-sqrt(3 / 4).
    sign = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=F64)
    advantage = torch.stack([sign, 100 * sign], 1).unsqueeze(-1)
    expected = ((3 / 4) ** 0.5 * sign)[:, None, None].expand(4, 2, 1)
    for dims in ((1,), (-2,)):
        assert_close(standardise(advantage, keep_dims=dims), expected)
    with pytest.raises(AssertionError):
        assert_close(standardise(advantage), expected)


@pytest.mark.parametrize("poison", [0.0, NAN, INF, -INF])
@pytest.mark.parametrize("trailing", [False, True])
def test_masked_rows_leave_no_trace(poison, trailing):
    mask = torch.tensor([True, False, True, True, False])
    advantage = torch.randn(5, 1, dtype=F64)
    poisoned = torch.where(mask[:, None], advantage, poison)
    mean, std = oracle.moments(advantage[mask].flatten().tolist())
    expected = torch.where(mask[:, None], (advantage - mean) / std, 0.0)
    assert_close(standardise(poisoned, mask[:, None] if trailing else mask), expected)


@pytest.mark.parametrize("poison", [0.0, NAN, INF])
def test_gradient_survives_masked_rows(poison):
    mask = torch.tensor([True, False, True, True])
    poisoned = torch.tensor([1.0, poison, 2.0, 6.0], dtype=F64, requires_grad=True)
    clean = torch.tensor([1.0, 2.0, 6.0], dtype=F64, requires_grad=True)
    weights = torch.tensor([1.0, 2.0, -1.0], dtype=F64)
    (standardise(clean) * weights).sum().backward()
    (standardise(poisoned, mask)[mask] * weights).sum().backward()
    assert_close(poisoned.grad[mask], clean.grad)
    assert poisoned.grad[1].item() == 0


def test_root_mask_of_singletons_covers_the_agents():
    advantage = torch.randn(4, 3, 1, dtype=F64)
    mask = torch.tensor([True, True, False, True])
    actual = standardise(advantage, mask.view(4, 1, 1))
    assert_close(actual, standardise(advantage, mask[:, None].expand(4, 3)))
    assert_close(actual[mask], standardise(advantage[mask]))


@pytest.mark.parametrize("valid", [0, 1])
def test_one_or_no_valid_entry_is_zero(valid):
    advantage = torch.tensor([[5.0], [NAN], [NAN]], dtype=F64)
    assert torch.equal(
        standardise(advantage, torch.arange(3) < valid), torch.zeros(3, 1, dtype=F64)
    )


def test_constant_is_zero():
    assert torch.equal(standardise(torch.full((7, 1), 1e6 + 0.0625)), torch.zeros(7, 1))


def test_eps_is_the_smallest_divisor():
    advantage = torch.tensor([1.0, -1.0], dtype=F64)  # std = sqrt 2
    assert_close(standardise(advantage, eps=4.0), [0.25, -0.25])
    assert_close(standardise(advantage, eps=1.0), [0.5**0.5, -(0.5**0.5)])
    assert_close(standardise(1e-8 * advantage), [0.01, -0.01])  # 1e-6 by default


@pytest.mark.parametrize("shape", [(3,), (4, 3), (4, 1, 1)])
def test_rejects_a_mask_that_does_not_fit(shape):
    with pytest.raises(ShapeError, match="cannot be broadcast"):
        standardise(torch.zeros(4, 1), torch.ones(shape, dtype=torch.bool))


@pytest.mark.parametrize("dims", [(1, -1), (0, 0), (2,)])
def test_rejects_wrong_dims(dims):
    with pytest.raises(ConfigError):
        standardise(torch.zeros(4, 1), keep_dims=dims)
