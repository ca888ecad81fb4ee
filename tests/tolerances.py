"""One table of tolerances, by dtype, and the comparison that uses it."""

from collections.abc import Sequence

import torch
from torch import Tensor

TOLERANCES: dict[torch.dtype, dict[str, float]] = {
    torch.float64: {"rtol": 1e-11, "atol": 1e-11},
    torch.float32: {"rtol": 1e-5, "atol": 1e-6},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-2},
}


def assert_close(actual: Tensor, expected: Tensor | float | Sequence[object]) -> None:
    """Equal within the tolerance of the actual dtype; shapes must be equal, NaN equals nothing."""
    if not isinstance(expected, Tensor):
        expected = torch.tensor(expected, dtype=torch.float64)
    expected = expected.to(actual.dtype)
    tolerance = TOLERANCES.get(actual.dtype, {"rtol": 0.0, "atol": 0.0})
    torch.testing.assert_close(actual, expected, **tolerance)
