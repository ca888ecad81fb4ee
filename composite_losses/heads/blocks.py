"""Heads of one family evaluated together: the number of operations hardly grows with the heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from composite_losses.heads.shapes import sum_event
from composite_losses.heads.terms import Terms


@dataclass
class Block:
    """One head, or several of one family and shape, stacked after the sample dims.

    Attributes:
        positions: the heads' positions in the plan.
        heads: their terms one by one.
        terms: the terms that are evaluated: of the one head, or of all, ``[*S, h]``.
    """

    positions: tuple[int, ...]
    heads: tuple[Terms, ...]
    terms: Terms

    @property
    def stacked(self) -> bool:
        """Whether the block holds several heads."""
        return len(self.heads) > 1

    def actions(self, actions: Sequence[Tensor], ndim: int) -> Tensor:
        """Returns the block's actions as its terms expect them."""
        if not self.stacked:
            return actions[self.positions[0]]
        pairs = zip(self.heads, self.positions, strict=True)
        return torch.stack([head.stackable(actions[i]) for head, i in pairs], ndim)

    def column(self, value: Tensor, ndim: int) -> Tensor:
        """Returns a per-sample term of the block as ``[*S, h]``, event dims summed."""
        if not self.stacked:
            one = value.ndim == ndim + 1 and value.shape[-1] == 1
            return value if one else sum_event(value, ndim).unsqueeze(-1)
        return sum_event(value, ndim + 1)


def blocks(terms: Sequence[Terms], ndim: int) -> list[Block]:
    """Returns the heads grouped by family and shape.

    Args:
        terms: one per head.
        ndim: number of sample dims.
    """
    groups: dict[object, list[int]] = {}
    for i, term in enumerate(terms):
        kind = term.kind(ndim)
        groups.setdefault(i if kind is None else kind, []).append(i)
    out = []
    for members in groups.values():
        heads = tuple(terms[i] for i in members)
        whole = heads[0].alone() if len(heads) == 1 else heads[0].stacked(heads, ndim)
        out.append(Block(tuple(members), heads, whole))
    return out


def columns(parts: Sequence[Block], values: Sequence[Tensor]) -> Tensor:
    """Returns terms of all blocks, ``[*S, h]`` each, as ``[*S, H]`` in the plan's order."""
    order = [i for part in parts for i in part.positions]
    joined = values[0] if len(values) == 1 else torch.cat(list(values), -1)
    if order == sorted(order):
        return joined
    by_position = dict(zip(order, joined.unbind(-1), strict=True))
    return torch.stack([by_position[i] for i in range(len(order))], -1)


def log_probs(
    parts: Sequence[Block], actions: Sequence[Tensor], valid: Tensor | None, ndim: int
) -> Tensor:
    """Returns the log-probs of the actions in nats, ``[*S, H]``.

    Args:
        parts: the blocks of all heads.
        actions: one per head, in its distribution's shape.
        valid: bool ``[*S, H]``, where row and head count; elsewhere a neutral action is scored.
        ndim: number of sample dims.
    """
    masks = None if valid is None else valid.unbind(-1)
    values = []
    for part in parts:
        action = part.actions(actions, ndim)
        if masks is not None:
            mask = masks[part.positions[0]]
            if part.stacked:
                mask = torch.stack([masks[i] for i in part.positions], -1)
            action = neutralised(action, mask, part.terms)
        values.append(part.column(part.terms.log_prob(action), ndim))
    return columns(parts, values)


def neutralised(action: Tensor, mask: Tensor, terms: Terms) -> Tensor:
    """Returns the actions with a neutral one where ``mask``, of their leading dims, is off."""
    wide = mask.reshape(mask.shape + (1,) * (action.ndim - mask.ndim))
    neutral = terms.neutral()
    if not isinstance(neutral, Tensor):
        return torch.where(wide, action, torch.full_like(action, neutral))
    return torch.where(wide, action, neutral.to(action.dtype))


def per_block(parts: Sequence[Block], value: Callable[[Terms], Tensor], ndim: int) -> Tensor:
    """Returns a term of every head, ``[*S, H]``, computed block by block."""
    return columns(parts, [part.column(value(part.terms), ndim) for part in parts])


def divergences(parts: Sequence[Block], old: Sequence[Terms], samples: int, ndim: int) -> Tensor:
    """Returns KL(old ‖ new) of every head in nats, ``[*S, H]``.

    Args:
        parts: the blocks of the current policy.
        old: the terms of the other policy, one per head.
        samples: samples where a KL has no formula.
        ndim: number of sample dims.
    """
    values = []
    for part in parts:
        others = [old[i] for i in part.positions]
        alike = all(o.kind(ndim) == h.kind(ndim) for o, h in zip(others, part.heads, strict=True))
        if not part.stacked or alike:
            other = others[0].stacked(others, ndim) if part.stacked else others[0].alone()
            values.append(part.column(other.kl(part.terms, samples), ndim))
            continue
        pairs = zip(others, part.heads, strict=True)
        each = [sum_event(other.kl(head, samples), ndim) for other, head in pairs]
        values.append(torch.stack(each, -1))
    return columns(parts, values)
