import pytest
import torch

from composite_losses.errors import ShapeError
from composite_losses.functional import entropy_sum
from tests.tolerances import assert_close

F64 = torch.float64
ENTROPY = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=F64)


@pytest.mark.parametrize(
    ("coeff", "expected"),
    [
        (1.0, [3.0, 7.0]),
        (0.5, [1.5, 3.5]),
        (torch.tensor(0.5, dtype=F64), [1.5, 3.5]),
        (torch.tensor([10.0, 1.0], dtype=F64), [12.0, 34.0]),  # 10 + 2, 30 + 4
    ],
)
def test_weighted_sum_over_heads(coeff, expected):
    assert_close(entropy_sum(ENTROPY, coeff), expected)


def test_coefficient_is_one_by_default():
    assert_close(entropy_sum(ENTROPY), [3.0, 7.0])


@pytest.mark.parametrize("poison", [0.0, float("nan"), float("inf")])
def test_inactive_heads_contribute_nothing(poison):
    active = torch.tensor([[True, False], [False, False]])
    entropy = torch.where(active, ENTROPY, poison).requires_grad_()
    total = entropy_sum(entropy, torch.tensor([10.0, 1.0], dtype=F64), active)
    assert_close(total, [10.0, 0.0])
    total.sum().backward()
    assert_close(entropy.grad, [[10.0, 0.0], [0.0, 0.0]])


@pytest.mark.parametrize(
    ("coeff", "active"),
    [(torch.ones(3), None), (torch.ones(2, 2), None), (1.0, torch.ones(2, dtype=torch.bool))],
)
def test_rejects_other_shapes(coeff, active):
    with pytest.raises(ShapeError):
        entropy_sum(ENTROPY, coeff, active)
