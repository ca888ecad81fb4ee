"""Importance ratios of the current over the behaviour policy, logarithms for as long as possible.

``r = pi(a|s) / b(a|s)``; H, the last axis, runs over action heads. Masks act before ``exp``.
"""

import torch
from torch import Tensor

from composite_losses.functional.masking import fill
from composite_losses.functional.shapes import require_per_head, require_same_shape


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    """The log-ratio, at most a bound that keeps ``exp`` finite, in nats.

    ``min(log_ratio, bound)``, so that ``exp`` may still be multiplied by an advantage. The bound
    is 700 in float64 and 80 in float32 and below (``exp(80) = 5.5e34``).

    Args:
        log_ratio: any shape, nats.

    Gradient goes to ``log_ratio``, and is exactly 0 beyond the bound.

    Source: definition.
    """
    return torch.clamp(log_ratio, max=700.0 if log_ratio.dtype == torch.float64 else 80.0)


def log_ratio(log_prob: Tensor, behaviour_log_prob: Tensor, mask: Tensor | None = None) -> Tensor:
    """The log-ratio ``log r = log_prob - behaviour_log_prob``, nats; 0 (ratio 1) where masked.

    Args:
        log_prob: ``[*S, ...]``, nats, of the current policy.
        behaviour_log_prob: the same shape, of the policy that collected the data.
        mask: bool ``[*S]`` or ``[*S, ...]``; masked entries may hold anything.

    Gradient goes to both inputs; the caller detaches the behaviour log-prob. 0 where masked.

    Raises:
        ShapeError: if the two shapes differ, or do not start with the mask's.

    Source: definition.
    """
    require_same_shape(log_prob=log_prob, behaviour_log_prob=behaviour_log_prob)
    # Both before the subtraction: inf - inf would put NaN into the gradient even if the difference
    # were replaced.
    return fill(log_prob, mask) - fill(behaviour_log_prob, mask)


def joint(log_ratio_heads: Tensor) -> Tensor:
    """``log prod_h r_h``, the log-ratio of the joint action, ``[*S]``.

    Args:
        log_ratio_heads: ``[*S, H]``, nats. An inactive head holds 0, the factor 1.

    Gradient goes to every head.

    Source: definition.
    """
    return log_ratio_heads.sum(-1)


def ratio(log_ratio: Tensor) -> Tensor:
    """``r = exp(log r)``, dimensionless, finite: see :func:`clamp_log_ratio`.

    Args:
        log_ratio: any shape, nats.

    Gradient goes to ``log_ratio``, and is exactly 0 beyond the bound.

    Source: Schulman et al. 2017, eq. (6), arXiv 1707.06347.
    """
    return clamp_log_ratio(log_ratio).exp()


def log_clip_bounds(eps_low: Tensor | float, eps_high: Tensor | float) -> tuple[Tensor, Tensor]:
    """``(log(1 - eps_low), log(1 + eps_high))``, the clip interval of a ratio as log-ratios, nats.

    Args:
        eps_low: in [0, 1], any shape; 1 means no lower bound.
        eps_high: ≥ 0, any shape.

    A float gives a 0-dim tensor of the default dtype on the CPU.

    Source: Schulman et al. 2017, eq. (7), arXiv 1707.06347.
    """
    low = torch.as_tensor(eps_low)
    high = torch.as_tensor(eps_high)
    return torch.log1p(-low), torch.log1p(high)


def clip_log_ratio(log_ratio: Tensor, eps_low: Tensor | float, eps_high: Tensor | float) -> Tensor:
    """The log-ratio clamped to :func:`log_clip_bounds`, so that its ``exp`` is ``C(r)``.

    ``C(r) = clamp(r, 1 - eps_low, 1 + eps_high)``

    Args:
        log_ratio: ``[*S]`` or ``[*S, H]``, nats.
        eps_low: in [0, 1], float, 0-dim or, with heads, ``[H]``.
        eps_high: ≥ 0, of the same kinds.

    Gradient goes to ``log_ratio`` inside the interval, bounds included; it is exactly 0 outside.

    Raises:
        ShapeError: if a bound is neither 0-dim nor of the size of the last dim.

    Source: Schulman et al. 2017, eq. (7), arXiv 1707.06347.
    """
    # Filled on the device: converting a float on the host and copying it over would synchronise.
    low = eps_low if isinstance(eps_low, Tensor) else log_ratio.new_full((), eps_low)
    high = eps_high if isinstance(eps_high, Tensor) else log_ratio.new_full((), eps_high)
    require_per_head("eps_low", low, log_ratio)
    require_per_head("eps_high", high, log_ratio)
    low, high = log_clip_bounds(low, high)
    return torch.clamp(log_ratio, low.to(log_ratio.dtype), high.to(log_ratio.dtype))
