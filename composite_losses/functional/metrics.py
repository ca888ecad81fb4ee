"""Diagnostics of a policy update: 0-dim, detached, over the valid entries; 0 if there is none."""

import math

import torch
from torch import Tensor

from composite_losses.functional.masking import fill, masked_mean, valid_count
from composite_losses.functional.ratios import clip_log_ratio
from composite_losses.functional.shapes import require_same_shape


def effective_sample_size(log_ratio: Tensor, mask: Tensor | None = None) -> Tensor:
    """The share of samples that still carry weight, in (0, 1].

    ``(sum w)^2 / sum w^2 / n`` with ``w = exp(log_ratio)``.

    Args:
        log_ratio: ``[*S]``, nats.
        mask: bool ``[*S]``; ``None``: all entries count. n is their number.

    No gradient.

    Raises:
        ShapeError: if ``mask`` has not the shape of ``log_ratio``.

    Source: Kong 1992, "A note on importance sampling using standardized weights"; Kish 1965.
    """
    _check(log_ratio, mask)
    if log_ratio.numel() == 0:
        return log_ratio.new_zeros(())
    with torch.no_grad():
        # Of weights p that sum to 1 it is 1 / sum p^2.
        weight = fill(log_ratio, mask, -torch.inf)
        if weight.shape[:1] != (weight.numel(),):
            weight = weight.flatten()
        weight = weight.softmax(0)
        norm: Tensor = torch.linalg.vector_norm(weight)
        if mask is None:
            return (norm * math.sqrt(weight.numel())).pow(-2)
        share = norm.pow(-2) / valid_count(log_ratio, mask)
        # No weight at all is exp(-inf) / 0.
        return torch.where(mask.any(), share, 0.0)


def clip_fraction(
    log_ratio: Tensor, eps_low: Tensor | float, eps_high: Tensor | float, mask: Tensor | None = None
) -> Tensor:
    """The fraction of valid ratios outside ``[1 - eps_low, 1 + eps_high]``, compared as logarithms.

    Args:
        log_ratio: ``[*S]`` or ``[*S, H]``, nats.
        eps_low: in [0, 1], float, 0-dim or, with heads, ``[H]``.
        eps_high: ≥ 0, of the same kinds.
        mask: bool, the shape of ``log_ratio``; ``None``: all entries count.

    No gradient.

    Raises:
        ShapeError: if a shape is not one of those above.

    Source: definition; the bounds: Schulman et al. 2017, eq. (7), arXiv 1707.06347.
    """
    detached = log_ratio.detach()
    changed = clip_log_ratio(detached, eps_low, eps_high) != detached
    return masked_mean(changed.to(detached.dtype), mask)


def explained_variance(value: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
    """The share of the target's variance that the value explains, at most 1.

    ``1 - var(target - value) / (var(target) + eps)``, biased variances over all valid entries;
    ``eps`` is the machine epsilon of the target's dtype.

    Args:
        value: any shape, in units of return.
        target: the same shape and units.
        mask: bool, the same shape; ``None``: all entries count.

    No gradient.

    Raises:
        ShapeError: if the shapes differ.

    Source: definition (the coefficient of determination of a residual of mean 0).
    """
    require_same_shape(value=value, target=target)
    if target.numel() == 0:
        return target.new_zeros(())
    with torch.no_grad():
        eps = torch.finfo(target.dtype).eps
        explained = 1 - _variance(target - value, mask) / (_variance(target, mask) + eps)
        return explained if mask is None else torch.where(mask.any(), explained, 0.0)


def masked_max(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """The largest valid entry ``max_i x_i``, 0-dim; 0 if there is none.

    Args:
        x: any shape, floating point.
        mask: bool, the same shape; ``None``: all entries count.

    No gradient.

    Raises:
        ShapeError: if ``mask`` has not the shape of ``x``.

    Source: definition.
    """
    _check(x, mask)
    if x.numel() == 0:
        return x.new_zeros(())
    with torch.no_grad():
        largest = fill(x, mask, -torch.inf).amax()
        return largest if mask is None else torch.where(mask.any(), largest, 0.0)


def _check(x: Tensor, mask: Tensor | None) -> None:
    if mask is not None:
        require_same_shape(x=x, mask=mask)


def _variance(x: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return x.var(correction=0)
    # Selected again inside the mean: a masked NaN less the mean is still NaN.
    return masked_mean((x - masked_mean(x, mask)).square(), mask)
