"""Selection and reduction with masks: the one place where entries that do not count are dropped.

Masks are bool, True where an entry counts. Selection always happens by ``where`` before any
arithmetic, because a masked entry may hold NaN or infinity and ``0 * nan`` is NaN, in the value and
in the gradient.
"""

import math

import torch
from torch import Tensor

from composite_losses.errors import ConfigError
from composite_losses.functional.shapes import require_prefix, require_same_shape


def fill(x: Tensor, mask: Tensor | None, value: float = 0.0) -> Tensor:
    """``x`` where the mask is True, ``value`` elsewhere.

    Args:
        x: ``[*S, ...]``, of any dtype, which is kept.
        mask: bool ``[*S]``, given trailing singleton dims; ``None`` returns ``x`` itself.
        value: what replaces the entries that do not count; any real, in the units of ``x``.

    Gradient goes to the entries that count; elsewhere it is exactly 0, whatever they hold.

    Raises:
        ShapeError: if ``x.shape`` does not start with ``mask.shape``.

    Source: definition.
    """
    if mask is None:
        return x
    require_prefix(mask, x)
    mask = mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim))
    # A Python scalar of the tensor's own kind: a float would promote integers and bools.
    if x.dtype == torch.bool:
        return torch.where(mask, x, bool(value))
    if not (x.is_floating_point() or x.is_complex()):
        return torch.where(mask, x, int(value))
    return torch.where(mask, x, value)


def combine_masks(*masks: Tensor | None) -> Tensor | None:
    """The logical AND of the masks that are not ``None``; ``None`` if there is none.

    Args:
        masks: bool, of equal shape ``[*S]``.

    Raises:
        ShapeError: if the shapes differ.

    Source: definition.
    """
    combined: Tensor | None = None
    for mask in masks:
        if mask is None:
            continue
        if combined is not None:
            require_same_shape(mask=combined, other=mask)
        combined = mask if combined is None else combined & mask
    return combined


def valid_count(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """The number of entries of ``x`` that count, dimensionless, 0-dim in the dtype of ``x``.

    Args:
        x: ``[*S, ...]``, floating point.
        mask: bool ``[*S]``; ``None``: all entries count.

    At least 1, so that the mean over nothing is 0 and not 0/0. No gradient.

    Raises:
        ShapeError: if ``x.shape`` does not start with ``mask.shape``.

    Source: definition.
    """
    if mask is None:
        return x.new_full((), max(x.numel(), 1))
    require_prefix(mask, x)
    # Counted as an integer: half precision cannot count beyond a few hundred.
    count = mask.sum() * math.prod(x.shape[mask.ndim :])
    return count.clamp_min(1).to(x.dtype)


def reduce(
    x: Tensor,
    mask: Tensor | None = None,
    reduction: str = "mean",
    *,
    count: Tensor | float | None = None,
) -> Tensor:
    """The sum or mean of the entries that count, 0-dim, or ``x`` with zeros elsewhere.

    ``"none"``: ``x`` where the mask is True, else 0. ``"sum"``: its sum. ``"mean"``: the sum
    divided by ``count``.

    Args:
        x: ``[*S]``.
        mask: bool ``[*S]``; ``None``: all entries count.
        reduction: ``"none"``, ``"sum"`` or ``"mean"``.
        count: denominator of the mean, ≥ 1, float or 0-dim, for example the number of valid
            entries on all ranks; default :func:`valid_count`.

    Gradient goes to the entries that count. With nothing valid the result is 0, with a graph and
    zero gradients.

    Raises:
        ShapeError: if ``mask`` has not the shape of ``x``.
        ConfigError: if the reduction is unknown.

    Source: definition.
    """
    if reduction == "mean" and mask is None and count is None and x.numel():
        return x.mean()
    if reduction not in ("none", "sum", "mean"):
        raise ConfigError(f"reduction must be 'none', 'sum' or 'mean', found {reduction!r}")
    if mask is not None:
        require_same_shape(x=x, mask=mask)
    selected = fill(x, mask)
    if reduction == "none":
        return selected
    if reduction == "sum":
        return selected.sum()
    if count is None:
        count = valid_count(x, mask)
    return selected.sum() / count


def masked_mean(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """The mean of the entries that count, 0-dim; 0 if none does.

    Args:
        x: ``[*S]``.
        mask: bool ``[*S]``; ``None``: all entries count.

    Gradient goes to the entries that count.

    Raises:
        ShapeError: if ``mask`` has not the shape of ``x``.

    Source: definition.
    """
    return reduce(x, mask, "mean")


def masked_moments(
    x: Tensor, mask: Tensor | None = None, *, keep_dims: tuple[int, ...] = ()
) -> tuple[Tensor, Tensor]:
    """The mean and the unbiased standard deviation of the entries that count.

    ``mean = sum(x) / n``, ``std = sqrt(sum((x - mean)^2) / (n - 1))`` over all dims but
    ``keep_dims``, n being the number of entries that count. No entry: mean 0. One entry or none:
    std 0.

    Args:
        x: ``[*S, ...]``, floating point.
        mask: bool ``[*S]``, given trailing singleton dims; ``None``: all entries count.
        keep_dims: dims of ``x`` along which statistics stay separate; negative ones count from the
            end.

    Returns:
        Both in the units and the shape of ``x``, with every reduced dim of size 1.

    Gradient goes to the entries that count, and is finite where the std is 0.

    Raises:
        ShapeError: if ``x.shape`` does not start with ``mask.shape``.
        ConfigError: if a dim is out of range or named twice.

    Source: definition.
    """
    dims = _reduced_dims(x, keep_dims)
    several = x.numel() > 0 and math.prod([x.shape[dim] for dim in dims]) > 1
    if several and mask is None and not x.requires_grad:
        # In one pass, exact for a constant; its gradient is not finite there.
        std, mean = torch.std_mean(x, dims, keepdim=True)
        return mean, std
    count = _sum(fill(torch.ones_like(x), mask), dims)
    selected = fill(x, mask)
    mean = _sum(selected, dims) / count.clamp_min(1)
    # The second pass sees only deviations: it corrects the rounding of the first sum, so a constant
    # far from 0 has std 0.
    mean = mean + _sum(fill(selected - mean, mask), dims) / count.clamp_min(1)
    deviation = fill(selected - mean, mask)
    variance = _sum(deviation * deviation, dims) / (count - 1).clamp_min(1)
    # The derivative of sqrt is infinite at 0; "!= 0" lets NaN through where "> 0" would hide it.
    positive = variance != 0
    std = torch.where(positive, torch.where(positive, variance, 1.0).sqrt(), 0.0)
    return mean, std


def _reduced_dims(x: Tensor, keep_dims: tuple[int, ...]) -> list[int]:
    if any(not -x.ndim <= dim < x.ndim for dim in keep_dims):
        raise ConfigError(
            f"dims {keep_dims} must lie in [-{x.ndim}, {x.ndim}) for shape {list(x.shape)}"
        )
    kept = {dim % x.ndim for dim in keep_dims}
    if len(kept) != len(keep_dims):
        raise ConfigError(f"dims {keep_dims} name a dim twice for shape {list(x.shape)}")
    return [dim for dim in range(x.ndim) if dim not in kept]


def _sum(x: Tensor, dims: list[int]) -> Tensor:
    # torch sums over everything when the list of dims is empty.
    return x.sum(dims, keepdim=True) if dims else x
