"""Normalisation of advantages."""

import torch
from torch import Tensor

from composite_losses.errors import ShapeError
from composite_losses.functional.masking import fill, masked_moments


def standardise(
    advantage: Tensor,
    mask: Tensor | None = None,
    *,
    keep_dims: tuple[int, ...] = (),
    eps: float = 1e-6,
) -> Tensor:
    """The advantages with mean 0 and std 1 over the entries that count, 0 elsewhere.

    ``(A - mean) / max(std, eps)`` with the unbiased std; a single valid entry gives 0.

    Args:
        advantage: ``[*S, 1]``, or any shape; in units of return, the result dimensionless.
        mask: bool, broadcastable to the advantage once ``[*S]`` has been given trailing singleton
            dims; masked entries may hold anything.
        keep_dims: dims of ``advantage`` along which statistics stay separate, for example its agent
            dim; negative ones count from the end.
        eps: smallest divisor, > 0, in the units of the advantage.

    Gradient goes through the statistics, too; callers pass detached advantages.

    Raises:
        ShapeError: if the mask cannot be broadcast.
        ConfigError: if a dim is out of range or named twice.

    Source: Andrychowicz et al. 2020, "What matters in on-policy reinforcement learning? A
    large-scale empirical study" (per-minibatch advantage normalisation), arXiv 2006.05990.
    """
    mask = _broadcast(mask, advantage)
    mean, std = masked_moments(advantage, mask, keep_dims=keep_dims)
    # Twice: before, so that a masked NaN cannot reach the gradient of the std; after, because
    # 0 - mean is not 0.
    return fill((fill(advantage, mask) - mean) / std.clamp_min(eps), mask)


def _broadcast(mask: Tensor | None, x: Tensor) -> Tensor | None:
    if mask is None:
        return None
    sizes = zip(mask.shape, x.shape, strict=False)
    if mask.ndim > x.ndim or any(size not in (1, expected) for size, expected in sizes):
        raise ShapeError(
            f"mask {list(mask.shape)} cannot be broadcast to advantage {list(x.shape)}"
        )
    mask = mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim))
    return torch.broadcast_to(mask, x.shape)
