"""Typed shape checks that print both shapes."""

from torch import Tensor

from composite_losses.errors import ShapeError


def require_same_shape(**tensors: Tensor) -> None:
    """Nothing; the tensors, given by name, must have equal shapes.

    Raises:
        ShapeError: with every name and shape, so that no operand is broadcast silently.
    """
    first, *others = tensors.values()
    if any(tensor.shape != first.shape for tensor in others):
        found = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
        raise ShapeError(f"shapes must be equal, found {found}")


def require_prefix(mask: Tensor, x: Tensor) -> None:
    """Nothing; the shape of ``x`` must start with the shape of ``mask``.

    Raises:
        ShapeError: with both shapes.
    """
    if mask.shape != x.shape[: mask.ndim]:
        raise ShapeError(
            f"the tensor's shape {list(x.shape)} must start with the mask's, {list(mask.shape)}"
        )


def require_per_head(name: str, option: Tensor, x: Tensor) -> None:
    """Nothing; ``option`` must be 0-dim or have one entry per head (last dim of ``x``).

    Raises:
        ShapeError: with the name of the option, its shape and the number of heads.
    """
    if option.ndim > 0 and option.shape != x.shape[-1:]:
        heads = x.shape[-1] if x.ndim else "none"
        raise ShapeError(
            f"{name} must be 0-dim or [heads], found {list(option.shape)}; heads: {heads}"
        )
