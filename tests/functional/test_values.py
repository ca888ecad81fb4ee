import pytest
import torch

from composite_losses.errors import ConfigError, ShapeError
from composite_losses.functional import clipped_value_error, value_error
from tests.tolerances import assert_close

F64 = torch.float64


def f64(*numbers):
    return torch.tensor(numbers, dtype=F64, requires_grad=True)


class TestValueError:
    @pytest.mark.parametrize(
        ("kind", "error", "slope"),
        [
            # value - target = 3, -0.5
            ("l1", [3.0, 0.5], [1.0, -1.0]),
            ("l2", [9.0, 0.25], [6.0, -1.0]),
            ("smooth_l1", [2.5, 0.125], [1.0, -0.5]),  # 3 - 1/2, 0.25 / 2
        ],
    )
    def test_kinds(self, kind, error, slope):
        value, target = f64(4.0, 0.0), f64(1.0, 0.5).detach()
        actual = value_error(value, target, kind)
        assert_close(actual, error)
        actual.sum().backward()
        assert_close(value.grad, slope)

    def test_smooth_l1_is_the_default(self):
        assert_close(value_error(f64(4.0), f64(1.0)), [2.5])

    def test_rejects_an_unknown_kind(self):
        with pytest.raises(ConfigError, match=r"'l1', 'l2' or 'smooth_l1', found 'mse'"):
            value_error(f64(1.0), f64(1.0), "mse")

    def test_rejects_different_shapes(self):
        with pytest.raises(ShapeError, match=r"value \[3\], target \[3, 1\]"):
            value_error(torch.zeros(3), torch.zeros(3, 1))


class TestClippedValueError:
    # old 1, clip 0.5, l2.
    # Target 3, value 2: kept at 1.5, error max(1, 2.25), which the clamp holds.
    # Target 0, value 2: kept at 1.5, error max(4, 2.25), which moves.
    # Target 3, value 1.2: not clamped, 1.8^2.
    VALUE, TARGET = (2.0, 2.0, 1.2), (3.0, 0.0, 3.0)

    @pytest.mark.parametrize("clip", [0.5, torch.tensor(0.5), torch.tensor(0.5, dtype=F64)])
    def test_is_the_larger_error(self, clip):
        value = f64(*self.VALUE)
        target = torch.tensor(self.TARGET, dtype=F64)
        error, was_clipped = clipped_value_error(
            value, torch.ones(3, dtype=F64), target, clip, "l2"
        )
        assert_close(error, [2.25, 4.0, 3.24])
        assert torch.equal(was_clipped, torch.tensor([True, True, False]))
        error.sum().backward()
        assert_close(value.grad, [0.0, 4.0, -3.6])  # 0, 2 * 2, -2 * 1.8

    def test_clamps_from_below_too(self):
        value = f64(0.0)
        error, was_clipped = clipped_value_error(value, f64(1.0), f64(-1.0), 0.5, "l1")
        assert_close(error, [1.5])  # kept at 0.5
        assert was_clipped.item()

    def test_rejects_an_unknown_kind(self):
        with pytest.raises(ConfigError, match="huber"):
            clipped_value_error(f64(1.0), f64(1.0), f64(1.0), 0.2, "huber")

    def test_rejects_different_shapes(self):
        with pytest.raises(ShapeError, match=r"old_value \[3, 1\]"):
            clipped_value_error(torch.zeros(3), torch.zeros(3, 1), torch.zeros(3), 0.2)
