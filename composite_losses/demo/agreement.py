"""The check that our joint ratio and TorchRL's loss are the same objective."""

from dataclasses import replace

import torch
from torch import Tensor

from composite_losses.demo.methods import JOINT, METHODS, TORCHRL
from composite_losses.demo.settings import Settings
from composite_losses.demo.training import LOSSES, History, train

ITERATIONS = 5
TOLERANCE = 1e-3


class DisagreementError(RuntimeError):
    """Two runs that must agree do not."""


def check_agreement(
    seed: int, settings: Settings, *, found: str = JOINT, expected: str = TORCHRL
) -> dict[str, float]:
    """The relative differences between two methods' first iterations, if they are small.

    The runs are made in float64. In float32 the weights differ by rounding, sooner or later one
    of the many actions drawn differs with them, and from there on the data does.

    Args:
        seed: of both runs.
        settings: of both runs, dtype and number of iterations aside.
        found: name of the method under test.
        expected: name of the method it must agree with.

    Raises:
        DisagreementError: a difference exceeds the tolerance, or is not a number.
    """
    short = replace(settings, dtype=torch.float64, iterations=min(ITERATIONS, settings.iterations))
    runs = [train(f"check {name}", METHODS[name], seed, short) for name in (found, expected)]
    result = differences(*runs)
    wrong = {name: value for name, value in result.items() if not value <= TOLERANCE}
    if wrong:
        listing = ", ".join(f"{name} by {value:.1e}" for name, value in wrong.items())
        raise DisagreementError(
            f"'{found}' and '{expected}' must agree to {TOLERANCE:.0e} (relative) over the first "
            f"{short.iterations} iterations with seed {seed}. They differ: {listing}."
        )
    return result


def differences(found: History, expected: History) -> dict[str, float]:
    """Relative differences of the return per iteration and of every loss per update."""
    series = [
        {"return": as_tensor(run.returns), **dict(zip(LOSSES, loss_series(run), strict=True))}
        for run in (found, expected)
    ]
    return {name: relative_difference(series[0][name], series[1][name]) for name in series[0]}


def relative_difference(found: Tensor, expected: Tensor) -> float:
    """``max |found - expected| / max |expected|``, of two series.

    The scale is the largest value of the series: objectives pass through 0.
    """
    return ((found - expected).abs().max() / expected.abs().max()).item()


def loss_series(run: History) -> tuple[Tensor, ...]:
    """Each of the losses over all updates of a run."""
    return as_tensor(run.losses).flatten(0, 1).unbind(-1)


def as_tensor(values: list[float] | list[list[list[float]]]) -> Tensor:
    """Numbers as they were recorded, in float64."""
    return torch.tensor(values, dtype=torch.float64)
