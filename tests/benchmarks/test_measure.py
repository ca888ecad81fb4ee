"""What the benchmarks count and how they take turns; no timing is asserted."""

import pytest
import torch

from benchmarks.measure import Times, interleaved, operations, peak_memory

CPU = torch.device("cpu")
MIB = 2**20


def test_operations_of_forward_and_backward():
    """Below autograd: mul and sum forward; the seed of ones, expand and mul back, detach of x.grad.

    Of these expand and detach make views.
    """
    x = torch.ones(3, requires_grad=True)

    def function() -> None:
        x.grad = None
        (x * 2).sum().backward()

    counted = operations(function)
    names = {name.split(".")[1]: n for name, n in counted.names.items()}
    assert names == {"mul": 2, "sum": 1, "ones_like": 1, "expand": 1, "detach": 1}
    assert (counted.total, counted.views) == (6, 2)


@pytest.mark.parametrize(("keep", "peak"), [(False, 2), (True, 3)])
def test_peak_memory(keep, peak):
    """Three tensors of 1 MiB, one after the other: the first is freed before the third, or not."""

    def function() -> torch.Tensor:
        kept = [torch.empty(MIB, dtype=torch.uint8), torch.empty(MIB, dtype=torch.uint8)]
        if not keep:
            del kept[0]
        return torch.empty(MIB, dtype=torch.uint8)

    found = peak_memory(function, CPU)
    assert peak * MIB <= found < (peak + 0.1) * MIB


def test_functions_take_turns():
    """After the calibration (four calls each) one block each per round, all in the same order."""
    calls = []
    times = interleaved(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, CPU, seconds=0.0, rounds=3
    )
    blocks = [calls[0]]
    for name in calls[8:]:
        if name != blocks[-1]:
            blocks.append(name)
    assert "".join(blocks) == "ababab"
    assert {name: len(each.rounds) for name, each in times.items()} == {"a": 3, "b": 3}


def test_quantiles_and_ratio():
    """Interpolated quantiles; the ratio is the median of the rounds' ratios 2, 1/2 and 4."""
    times = Times((2.0, 1.0, 4.0))
    assert times.quantile(0.5) == 2.0
    assert times.quantile(0.25) == 1.5
    assert times.quantile(1.0) == 4.0
    assert times.ratio(Times((1.0, 2.0, 1.0))) == 2.0
