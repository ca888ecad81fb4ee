"""The frame of a batch: its sample shape, its masks, and data that are safe to read.

Masks act here, before any network or formula sees a row that does not count: what such a row holds
is replaced, because 0 × NaN in a weight gradient is NaN.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import torch
from tensordict import NestedKey, TensorDictBase, is_tensor_collection
from torch import Tensor, nn

from composite_losses import functional as F
from composite_losses.errors import MissingKeyError, ShapeError
from composite_losses.heads.keys import as_key, holder_batch, listing, path, read, read_tensor
from composite_losses.heads.plan import HeadPlan
from composite_losses.heads.scratch import Data, Scratch
from composite_losses.heads.shapes import mask_to_sample, shown


@dataclass
class Frame:
    """The frame of one batch.

    Attributes:
        sample: the sample shape ``S``.
        root_ndim: batch dims of the root.
        mask: ``[*S]``, True where a row counts, or None where all do.
        head_active: head position → ``[*S]``, True where the head counts.
    """

    sample: torch.Size
    root_ndim: int
    mask: Tensor | None
    head_active: dict[int, Tensor]

    @property
    def root(self) -> torch.Size:
        """The root's batch size."""
        return self.sample[: self.root_ndim]

    def head_mask(self, position: int) -> Tensor | None:
        """Returns where both the row and the head count, ``[*S]``, or None."""
        return F.combine_masks(self.mask, self.head_active.get(position))


def sample_shape(
    td: Data,
    plan: HeadPlan,
    advantage: Tensor | TensorDictBase | None,
    *,
    advantage_key: NestedKey,
) -> torch.Size:
    """Returns the sample shape: the advantage's without its last dim, else the actions' batch size.

    Raises:
        ShapeError: the advantage's last dim is not 1, or its shape is not that of the actions'
            batch.
    """
    holder = td.batch_size
    for key in plan.inside:
        batch = holder_batch(td, key)
        if len(batch) > len(holder):
            holder = batch
    if advantage is None:
        return torch.Size(holder)
    leaves = (
        [advantage]
        if isinstance(advantage, Tensor)
        else list(advantage.values(include_nested=True, leaves_only=True))
    )
    shape = leaves[0].shape
    for leaf in leaves:
        if leaf.ndim == 0 or leaf.shape[-1] != 1 or leaf.shape != shape:
            raise ShapeError(
                f"advantage {advantage_key!r}: expected shape [*S, 1] with one value per sample, "
                f"found {shown(leaf.shape)}; against the log-probs ({_log_probs(plan)}) it would "
                "broadcast to an outer product over samples. Give it its last dim: "
                "advantage.unsqueeze(-1)."
            )
    sample = shape[:-1]
    root = td.batch_size
    if len(sample) < len(root) and shape != root:
        raise ShapeError(
            f"advantage {advantage_key!r}: expected shape {shown((*root, 1))}, found "
            f"{shown(shape)} (log-probs: {_log_probs(plan)}). Give it its last dim: "
            "advantage.unsqueeze(-1)."
        )
    if len(holder) > len(root) and sample != holder:
        raise ShapeError(
            f"advantage {advantage_key!r}: expected shape {shown((*holder, 1))}, one value per "
            f"agent (the actions {plan.heads[0].action!r} and log-probs {_log_probs(plan)} have "
            f"batch shape {shown(holder)}), found {shown(shape)}. Expand a shared advantage over "
            "the agents."
        )
    return sample


def _log_probs(plan: HeadPlan) -> str:
    """Returns the heads' first log-prob keys, for a message."""
    return ", ".join(repr(head.log_probs[0]) for head in plan.heads)


def find_mask(
    td: Data,
    sample: torch.Size,
    optional: Iterable[NestedKey],
    required: Iterable[NestedKey],
) -> Tensor | None:
    """Returns the AND of all masks, ``[*S]``, or None where there is none.

    Raises:
        MissingKeyError: a mask that the user named is not there.
        ShapeError: a mask of another shape.
    """
    mask: Tensor | None = None
    for key in optional:
        value = read_tensor(td, key)
        if value is not None:
            mask = F.combine_masks(mask, mask_to_sample(value, sample, key=key))
    for key in required:
        mask = F.combine_masks(mask, required_mask(td, sample, key))
    return mask


def required_mask(td: Data, sample: torch.Size, key: NestedKey) -> Tensor:
    """Returns the mask under ``key``, ``[*S]``.

    Raises:
        MissingKeyError: it is not there.
    """
    value = read_tensor(td, key)
    if value is None:
        raise MissingKeyError(
            f"mask {key!r}: not found in the data. Keys present: {listing(td)}. Fix: store it, or "
            "set the key back to None."
        )
    return mask_to_sample(value, sample, key=key)


def is_recurrent(network: nn.Module | None) -> bool:
    """Returns whether the network carries a state along time."""
    if network is None:
        return False
    kinds = (nn.RNNBase, nn.RNNCellBase)
    return any(
        isinstance(m, kinds)
        or getattr(m, "is_recurrent", False)
        or any(path(k)[-1] == "is_init" for k in _keys(m))
        for m in network.modules()
    )


def _keys(module: nn.Module) -> list[NestedKey]:
    """Returns the in_keys of a module that has any."""
    keys = getattr(module, "in_keys", None)
    return list(keys) if isinstance(keys, (list, tuple)) else []


def neutralise(
    td: Scratch,
    keys: Iterable[NestedKey],
    frame: Frame,
    *,
    one_keys: Iterable[NestedKey] = (),
    keep_finite: bool = False,
) -> None:
    """Replaces, in a copy of the data, what rows that do not count hold under ``keys``.

    Args:
        td: the copy.
        keys: what will be read.
        frame: the frame, with its mask.
        one_keys: entries that become 1: distribution parameters that the data hold (a scale of 0
            has no density), True in action masks; others become 0.
        keep_finite: replace non-finite values only (recurrent nets: the state flows on).
    """
    if frame.mask is None:
        return
    flags = {as_key(path(key)) for key in one_keys}
    for key in keys:
        value = read(td, key)
        if value is None:
            continue
        fill = as_key(path(key)) in flags
        td.set(key, _neutral(value, frame, fill=fill, keep_finite=keep_finite))


def _neutral(value: object, frame: Frame, *, fill: bool, keep_finite: bool) -> object:
    """Returns an entry with the masked rows replaced, nested entries leaf by leaf."""
    if is_tensor_collection(value):
        tree = cast(TensorDictBase, value)
        return tree.apply(lambda x: _neutral(x, frame, fill=fill, keep_finite=keep_finite))
    if not isinstance(value, Tensor):
        return value
    mask = mask_for(value, frame)
    if mask is None:
        return value
    substitute = torch.full_like(value, 1 if fill else 0)
    if keep_finite and value.dtype.is_floating_point:
        return torch.where(mask | value.isfinite(), value, substitute)
    if keep_finite and not fill:
        return value
    return torch.where(mask, value, substitute)


def mask_for(value: Tensor, frame: Frame) -> Tensor | None:
    """Returns the mask broadcastable to an entry: per sample, or per row of the root."""
    mask = cast(Tensor, frame.mask)
    n, root = len(frame.sample), frame.root_ndim
    if value.shape[:n] != frame.sample:
        if value.shape[:root] != frame.sample[:root]:
            return None
        if n > root:
            mask = mask.flatten(root).any(-1)
        n = root
    return mask.reshape(mask.shape + (1,) * (value.ndim - n))


def neutralise_trajectory(
    td: Scratch, frame: Frame, reward: NestedKey, ends: Iterable[NestedKey], time_dim: int
) -> None:
    """Cuts the trajectories, in a copy of the data, where a row that does not count follows.

    Rewards of masked rows become 0; masked rows and the row before one are the end of a
    trajectory, so an advantage never reaches into padding.
    """
    if frame.mask is None:
        return
    key = as_key(("next", *path(reward)))
    value = read_tensor(td, key)
    if value is not None:
        td.set(key, _neutral(value, frame, fill=False, keep_finite=False))
    for name in ends:
        key = as_key(("next", *path(name)))
        value = read_tensor(td, key)
        if value is None:
            continue
        mask = mask_for(value, frame)
        if mask is None:
            continue
        mask = mask.expand(value.shape)
        end = value | ~mask
        if path(name)[-1] != "terminated" and value.shape[time_dim] > 1:
            n = value.shape[time_dim]
            follows = mask.narrow(time_dim, 1, n - 1)
            last = torch.ones_like(mask.narrow(time_dim, 0, 1))
            end = end | ~torch.cat([follows, last], time_dim)
        td.set(key, end)


def time_dim(td: Data) -> int | None:
    """Returns the dim named "time", else the last batch dim, else None."""
    names = list(td.names) if td.batch_dims else []
    if "time" in names:
        return names.index("time")
    return td.batch_dims - 1 if td.batch_dims else None
