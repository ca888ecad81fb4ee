"""Regression errors of a value estimate, per sample."""

import torch
import torch.nn.functional as F
from torch import Tensor

from composite_losses.errors import ConfigError
from composite_losses.functional.shapes import require_same_shape


def value_error(value: Tensor, target: Tensor, kind: str = "smooth_l1") -> Tensor:
    """The error of each value, any shape.

    With ``d = value - target``: ``"l1"`` is ``|d|``; ``"l2"`` is ``d^2``; ``"smooth_l1"`` is
    ``d^2 / 2`` where ``|d| < 1``, else ``|d| - 1/2``.

    Args:
        value: any shape, in units of return.
        target: the same shape and units, detached by the caller.
        kind: ``"l1"``, ``"l2"`` or ``"smooth_l1"``.

    Gradient goes to ``value``.

    Raises:
        ShapeError: if the shapes differ.
        ConfigError: if the kind is unknown.

    Source: definition; ``"smooth_l1"``: Girshick 2015, "Fast R-CNN", eq. (3), arXiv 1504.08083.
    """
    require_same_shape(value=value, target=target)
    if kind == "l1":
        return F.l1_loss(value, target, reduction="none")
    if kind == "l2":
        return F.mse_loss(value, target, reduction="none")
    if kind == "smooth_l1":
        return F.smooth_l1_loss(value, target, reduction="none")
    raise ConfigError(f"kind must be 'l1', 'l2' or 'smooth_l1', found {kind!r}")


def clipped_value_error(
    value: Tensor, old_value: Tensor, target: Tensor, clip: Tensor | float, kind: str = "smooth_l1"
) -> tuple[Tensor, Tensor]:
    """The larger error of the value and of the value kept near the old one, and where it was kept.

    ``max(err(value), err(old_value + clamp(value - old_value, -clip, clip)))``

    Args:
        value: any shape, in units of return.
        old_value: the same shape, the value when the data was collected; detached by the caller.
        target: the same shape, detached by the caller.
        clip: largest change, float or 0-dim, in units of return.
        kind: see :func:`value_error`.

    Returns:
        ``(error, was_clipped)``, the second bool: True where the change exceeds ``clip``.

    Gradient goes to ``value``; exactly 0 where the clamped term is the larger one and clamps.

    Raises:
        ShapeError: if the shapes differ.
        ConfigError: if the kind is unknown.

    Source: Engstrom et al. 2020, "Implementation matters in deep policy gradients", section 3,
    arXiv 2005.12729.
    """
    require_same_shape(value=value, old_value=old_value, target=target)
    change = value - old_value
    limit = clip if isinstance(clip, Tensor) else change.new_full((), clip)
    limited = torch.clamp(change, -limit, limit)
    error = torch.maximum(
        value_error(value, target, kind), value_error(old_value + limited, target, kind)
    )
    return error, change != limited
