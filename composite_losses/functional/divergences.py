"""Per-sample estimators of ``KL(b || pi)``, in nats.

The samples come from the behaviour policy b, and ``r = pi / b``.
Source of all three: Schulman 2020, "Approximating KL divergence",
http://joschu.net/blog/kl-approx.html.
"""

import torch
from torch import Tensor

from composite_losses.functional.ratios import clamp_log_ratio


def k1(log_ratio: Tensor) -> Tensor:
    """The estimate ``-log r``: unbiased, may be negative.

    Args:
        log_ratio: any shape, nats.

    Gradient goes to ``log_ratio``.
    """
    return -log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """The estimate ``(log r)^2 / 2``: biased, low variance, never negative.

    Args:
        log_ratio: any shape, nats.

    Gradient goes to ``log_ratio``.
    """
    return 0.5 * log_ratio.square()


def k3(log_ratio: Tensor) -> Tensor:
    """The estimate ``r - 1 - log r``: unbiased, never negative.

    Args:
        log_ratio: any shape, nats; bounded as in :func:`~composite_losses.functional.ratio`.

    Gradient goes to ``log_ratio``, and is exactly 0 beyond the bound.
    """
    bounded = clamp_log_ratio(log_ratio)
    # expm1: near r = 1 the difference exp(x) - 1 would round to a multiple of the machine epsilon.
    return torch.expm1(bounded) - bounded
