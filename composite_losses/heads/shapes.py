"""Shape rules: what is squeezed, what is summed, what is an error. Never a silent broadcast."""

from __future__ import annotations

import torch
from tensordict import NestedKey
from torch import Tensor

from composite_losses.errors import ShapeError


def shown(shape: torch.Size | tuple[int, ...]) -> str:
    """Returns a shape the way the messages print it."""
    return str(list(shape))


def sum_event(x: Tensor, sample_ndim: int) -> Tensor:
    """Returns ``x [*S, ...]`` summed over the dims beyond the sample dims, ``[*S]``."""
    return x if x.ndim == sample_ndim else x.flatten(sample_ndim).sum(-1)


def fit_action(action: Tensor, batch: torch.Size, event: torch.Size, *, key: NestedKey) -> Tensor:
    """Returns the action in its distribution's shape, a stray trailing singleton squeezed.

    Args:
        action: the stored action.
        batch: batch shape of the distribution.
        event: event shape of one action.
        key: the action's key, for the message.

    Raises:
        ShapeError: any other difference; a broadcast would score the wrong actions.
    """
    expected = batch + event
    if action.shape == expected:
        return action
    if action.shape == (*expected, 1):
        return action.squeeze(-1)
    raise ShapeError(
        f"action {key!r}: expected shape {shown(expected)} (batch {shown(batch)} + event "
        f"{shown(event)}), found {shown(action.shape)}. Reshape the stored action to the "
        "shape that the actor's distribution samples."
    )


def per_sample(
    current: torch.Size,
    stored: Tensor | None,
    sample: torch.Size,
    *,
    head: str,
    key: NestedKey,
    advantage_key: NestedKey,
) -> Tensor | None:
    """Returns the stored log-prob of one head as ``[*S]``, checked against the current one.

    Event dims that an un-``Independent`` distribution leaves are summed if and only if both sides
    have them; a trailing singleton by which the two differ is squeezed. Only shapes decide, so
    dims of equal size change nothing.

    Args:
        current: shape of the log-prob under the current policy, ``[*S]`` or ``[*S, *event]``.
        stored: log-prob that the data hold, or None.
        sample: the sample shape ``S``.
        head: name of the head.
        key: key of the stored entry (of the action where nothing is stored).
        advantage_key: key of the advantage, which fixes ``S``.

    Raises:
        ShapeError: names the head, the keys, both shapes and the expected one.
    """
    if current == sample and (stored is None or stored.shape == sample):
        return stored
    n = len(sample)
    shape = current
    if stored is not None and stored.shape != shape:
        if stored.shape == (*shape, 1):
            stored = stored.squeeze(-1)
        elif shape == (*stored.shape, 1):
            shape = stored.shape
    fits = shape[:n] == sample and (stored is None or stored.shape == shape)
    if not fits:
        found = f"current log-prob {shown(current)}"
        if stored is not None:
            found += f", stored log-prob {key!r} {shown(stored.shape)}"
        raise ShapeError(
            f"head {head!r}: expected one log-prob per sample, {shown(sample)} (the shape of the "
            f"advantage {advantage_key!r} without its last dim), found {found}. Give the "
            "advantage the shape [*S, 1], where S is the batch shape of the actions (agents "
            "included), and store the log-prob that the actor itself writes."
        )
    return None if stored is None else sum_event(stored, n)


def mask_to_sample(mask: Tensor, sample: torch.Size, *, key: NestedKey) -> Tensor:
    """Returns a boolean mask as ``[*S]``; masks of the leading dims expand over the others.

    Accepted: ``[*S]``, ``[*S, 1]``, and for any leading part ``P`` of ``S`` (the root batch of a
    group) ``[*P]`` and ``[*P, 1]``.

    Raises:
        ShapeError: any other shape.
    """
    mask = mask.bool()
    if mask.shape == sample:
        return mask
    if mask.shape == (*sample, 1):
        return mask.squeeze(-1)
    n = len(sample)
    for k in range(n - 1, -1, -1):
        prefix = sample[:k]
        if mask.shape == (*prefix, 1):
            mask = mask.squeeze(-1)
        if mask.shape == prefix:
            return mask.reshape(*prefix, *(1,) * (n - k)).expand(sample)
    raise ShapeError(
        f"mask {key!r}: expected shape {shown(sample)}, {shown((*sample, 1))} or a leading part "
        f"of it, found {shown(mask.shape)}."
    )
