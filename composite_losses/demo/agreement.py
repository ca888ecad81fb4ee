"""The check that our joint ratio and TorchRL's loss are the same objective."""

import torch

from composite_losses.demo.training import LOSSES, History

ITERATIONS = 5
TOLERANCE = 1e-3


class DisagreementError(RuntimeError):
    """Two runs that must agree do not."""


def relative_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """``max |found - expected| / max |expected|``.

    The largest value of the series is the scale: the objective itself passes through 0, where a
    ratio of two single values says nothing.
    """
    scale = expected.abs().max()
    return ((found - expected).abs().max() / scale.clamp_min(1e-12)).item()


def differences(found: History, expected: History) -> dict[str, float]:
    """Relative difference of the return and of every loss over the first iterations.

    Returns are compared per iteration, losses per update.
    """
    result = {
        "return": relative_difference(
            torch.tensor(found.returns[:ITERATIONS]), torch.tensor(expected.returns[:ITERATIONS])
        )
    }
    pair = [
        torch.tensor(history.losses[:ITERATIONS]).flatten(0, 1) for history in (found, expected)
    ]
    for column, name in enumerate(LOSSES):
        result[name] = relative_difference(*(series[:, column] for series in pair))
    return result


def check_agreement(found: History, expected: History) -> dict[str, float]:
    """The differences, where each is within the tolerance.

    Raises:
        DisagreementError: one is not, or is not a number.
    """
    result = differences(found, expected)
    wrong = {name: value for name, value in result.items() if not value <= TOLERANCE}
    if wrong:
        listing = ", ".join(f"{name} by {value:.2e}" for name, value in wrong.items())
        raise DisagreementError(
            f"Ours (joint ratio) and TorchRL's loss must agree to {TOLERANCE:.0e} (relative) over "
            f"the first {ITERATIONS} iterations on the same seed. They differ: {listing}."
        )
    return result
