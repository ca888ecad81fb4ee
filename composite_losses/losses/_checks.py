"""Checks that look at values, for ``validate=True`` and ``diagnose``: they wait for the device."""

from __future__ import annotations

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from composite_losses.errors import ConfigError, NonFiniteError
from composite_losses.heads import ActorProgram, Behaviour, Head, HeadPlan, Scratch, Terms
from composite_losses.heads.keys import path, read
from composite_losses.losses._frame import Frame

# logits at or below it forbid a class
NEVER = -1e4
# key → (stored, current)
Pairs = dict[NestedKey, tuple[Tensor, Tensor]]


def count_rows(bad: Tensor, frame: Frame, active: Tensor | None, position: int) -> int:
    """Returns the number of bad rows in which both the row and the head count."""
    bad = bad.flatten(len(frame.sample)).any(-1) if bad.ndim > len(frame.sample) else bad
    return _count(bad, _head_mask(frame, active, position))


def _count(bad: Tensor, mask: Tensor | None) -> int:
    """Returns the number of bad rows that count."""
    if mask is not None:
        bad = (bad.flatten(mask.ndim).any(-1) if bad.ndim > mask.ndim else bad) & mask
    return int(bad.sum())


def _head_mask(frame: Frame, active: Tensor | None, position: int) -> Tensor | None:
    """Returns where both the row and the head count."""
    mask = frame.head_mask(position)
    if active is None:
        return mask
    return active[..., position] if mask is None else mask & active[..., position]


def check_actions(
    plan: HeadPlan,
    frame: Frame,
    terms: list[Terms],
    actions: list[Tensor],
    active: Tensor | None,
) -> None:
    """Raises unless every action that counts lies in its head's support.

    Raises:
        ConfigError: an action outside the support or range, or forbidden by its action mask.
    """
    for i, head in enumerate(plan.heads):
        outside = count_rows(~terms[i].contains(actions[i]), frame, active, i)
        if outside:
            raise ConfigError(
                f"head {head.name!r}: {outside} stored action(s) under {head.action!r} lie outside "
                "the distribution's support or are forbidden by its action mask. Store the action "
                "that was sampled, not the one the environment clipped, together with its mask."
            )


def check_policy(plan: HeadPlan, frame: Frame, log_prob: Tensor, active: Tensor | None) -> None:
    """Raises unless every action that counts has a finite current log-prob.

    Raises:
        NonFiniteError: names the head and the number of rows.
    """
    for i, head in enumerate(plan.heads):
        broken = count_rows(~log_prob[..., i].isfinite(), frame, active, i)
        if broken:
            raise NonFiniteError(
                f"head {head.name!r} ({head.action!r}): the current log-prob is not finite in "
                f"{broken} row(s): the actor gives NaN or infinite distribution parameters there."
            )


def check_behaviour(
    plan: HeadPlan,
    frame: Frame,
    behaviour: Behaviour | None,
    old: Tensor | None,
    active: Tensor | None,
    mask: Tensor | None,
) -> None:
    """Raises unless the behaviour log-probs are finite in every row that counts.

    Raises:
        NonFiniteError: names the head and the number of rows.
    """
    if behaviour is None or old is None:
        return
    if behaviour.joint is not None:
        bad = _count(~old.squeeze(-1).isfinite(), mask)
        if bad:
            raise NonFiniteError(_message(f"joint log-prob {behaviour.joint_key!r}", bad))
        return
    for i, head in enumerate(plan.heads):
        bad = count_rows(~old[..., i].isfinite(), frame, active, i)
        if bad:
            raise NonFiniteError(_message(f"head {head.name!r} ({behaviour.keys[i]!r})", bad))


def _message(what: str, rows: int) -> str:
    """Returns the message about non-finite behaviour log-probs."""
    return (
        f"{what}: the behaviour log-prob is not finite in {rows} row(s) that count. A missing "
        "log-prob is not 0: mask those rows (loss_mask_key, agent_mask) or collect them anew."
    )


def compared(
    program: ActorProgram, head: Head, td: TensorDictBase, after: TensorDictBase | Scratch
) -> Pairs:
    """Returns the stored and the current distribution parameters of a head, by key.

    What the actor itself reads from the data is on both sides, and left out.
    """
    inputs = [path(key) for key in program.input_keys]
    pairs: Pairs = {}
    for key in program.keys_of(head.slot) or program.parameter_keys:
        stored, current = _leaves(key, read(td, key)), _leaves(key, read(after, key))
        if path(key) in inputs or not stored:
            continue
        if {k: v.shape for k, v in stored.items()} != {k: v.shape for k, v in current.items()}:
            return {}
        pairs |= {k: (v, current[k].to(v.dtype)) for k, v in stored.items()}
    return pairs


def changed_mask(
    head: Head,
    frame: Frame,
    term: Terms,
    active: Tensor | None,
    position: int,
    pairs: Pairs,
) -> tuple[list[str], bool]:
    """Returns (reasons for an action mask that was changed, whether all parameters are equal)."""
    masks, others = {}, 0
    for key, (stored, current) in pairs.items():
        differs = stored != current
        if term.discrete:
            never = (stored if stored.dtype == torch.bool else stored > NEVER) ^ (
                current if stored.dtype == torch.bool else current > NEVER
            )
            masks[key] = _rows(never, frame, active, position)
            if stored.dtype.is_floating_point:
                differs = (stored > NEVER) & (current > NEVER)
                differs = differs & ~stored.isclose(current, rtol=1e-5, atol=1e-5)
            else:
                differs = differs & ~never
        others += _rows(differs, frame, active, position)
    too = (
        "; other parameters differ, too: the weights have moved since, or another policy collected "
        "the data."
    )
    reasons = [
        f"head {head.name!r}: the action mask in the data is not the one "
        f"that the policy acted with: the stored {key!r} and the current one forbid different "
        f"actions in {rows} row(s){too if others else '.'}"
        for key, rows in masks.items()
        if rows
    ]
    return reasons, not others and not reasons


def _rows(bad: Tensor, frame: Frame, active: Tensor | None, position: int) -> int:
    """Returns in how many rows that count anything is bad; one where an entry has no rows."""
    if bad.shape[: len(frame.sample)] == frame.sample:
        return count_rows(bad, frame, active, position)
    return int(bad.any())


def _leaves(key: NestedKey, value: object) -> dict[NestedKey, Tensor]:
    """Returns the tensors of an entry, by their keys."""
    if isinstance(value, Tensor):
        return {key: value}
    if isinstance(value, TensorDictBase):
        leaves = value.items(True, True)
        return {(*path(key), *path(k)): v for k, v in leaves if isinstance(v, Tensor)}
    return {}
