"""Per-sample estimators of ``KL(b || pi)``, in nats.

The samples come from the behaviour policy b, and ``r = pi / b``.
Source of all three: Schulman 2020, "Approximating KL divergence",
http://joschu.net/blog/kl-approx.html.
"""

import torch
from torch import Tensor

from composite_losses.functional.ratios import clamp_log_ratio


def k1(log_ratio: Tensor) -> Tensor:
    """The estimate ``-log r`` of ``KL(b || pi)``, in nats: unbiased, may be negative.

    ``r = pi / b``; the samples come from the behaviour policy b.

    Args:
        log_ratio: any shape, nats.

    Gradient goes to ``log_ratio``.

    Source: Schulman 2020, "Approximating KL divergence", joschu.net/blog/kl-approx.html.
    """
    return -log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """The estimate ``(log r)^2 / 2`` of ``KL(b || pi)``, in nats: biased, never negative.

    ``r = pi / b``; the samples come from the behaviour policy b. Of low variance.

    Args:
        log_ratio: any shape, nats.

    Gradient goes to ``log_ratio``.

    Source: Schulman 2020, "Approximating KL divergence", joschu.net/blog/kl-approx.html.
    """
    return 0.5 * log_ratio.square()


def k3(log_ratio: Tensor) -> Tensor:
    """The estimate ``r - 1 - log r`` of ``KL(b || pi)``, in nats: unbiased, never negative.

    ``r = pi / b``; the samples come from the behaviour policy b.

    Args:
        log_ratio: any shape, nats; bounded as in :func:`ratio`.

    Gradient goes to ``log_ratio``, and is exactly 0 beyond the bound.

    Source: Schulman 2020, "Approximating KL divergence", joschu.net/blog/kl-approx.html.
    """
    bounded = clamp_log_ratio(log_ratio)
    # expm1: near r = 1 the difference exp(x) - 1 would round to a multiple of the machine epsilon.
    return torch.expm1(bounded) - bounded
