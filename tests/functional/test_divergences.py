import math

import pytest
import torch

from composite_losses.functional import k1, k2, k3
from tests.tolerances import assert_close

F64 = torch.float64
X = [math.log(2), -math.log(2), 0.0]


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [
        (k1, [-math.log(2), math.log(2), 0.0], [-1.0, -1.0, -1.0]),
        (k2, [0.5 * math.log(2) ** 2, 0.5 * math.log(2) ** 2, 0.0], X),
        # r - 1 - log r at r = 2, 1/2, 1; slope r - 1
        (k3, [1 - math.log(2), -0.5 + math.log(2), 0.0], [1.0, -0.5, 0.0]),
    ],
)
def test_value_and_slope(estimator, value, slope):
    x = torch.tensor(X, dtype=F64, requires_grad=True)
    estimate = estimator(x)
    assert_close(estimate, value)
    estimate.sum().backward()
    assert_close(x.grad, slope)


def test_k3_is_accurate_near_one():
    # x^2 / 2 = 5e-7 at x = 1e-3; exp(x) - 1 - x in float32 is a multiple of 1.2e-7.
    x = torch.tensor([1e-3, -1e-3])
    exact = torch.expm1(x.double()) - x.double()
    assert ((k3(x) - exact).abs() < 1e-3 * exact).all()


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_k3_is_finite_far_from_one(dtype):
    x = torch.tensor([-1000.0, 1000.0], dtype=dtype, requires_grad=True)
    estimate = k3(x)
    estimate.sum().backward()
    assert estimate.isfinite().all()
    assert torch.equal(x.grad, torch.tensor([-1.0, 0.0], dtype=dtype))


@pytest.mark.parametrize(("estimator", "unbiased"), [(k1, True), (k3, True), (k2, False)])
def test_mean_is_the_divergence(estimator, unbiased):
    # b = (0.7, 0.3), pi = (0.4, 0.6): KL(b || pi) = 0.7 log(7/4) + 0.3 log(1/2)
    behaviour = torch.tensor([0.7, 0.3], dtype=F64)
    x = (torch.tensor([0.4, 0.6], dtype=F64) / behaviour).log()
    expected = 0.7 * math.log(7 / 4) + 0.3 * math.log(1 / 2)
    error = abs(((behaviour * estimator(x)).sum() - expected).item())
    assert error < 1e-12 if unbiased else 1e-3 < error < 0.1 * expected
