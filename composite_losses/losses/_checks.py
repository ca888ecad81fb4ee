"""Checks that look at values, for ``validate=True``: they wait for the device."""

from __future__ import annotations

from torch import Tensor

from composite_losses.errors import ConfigError, NonFiniteError
from composite_losses.heads import Behaviour, HeadPlan, Terms
from composite_losses.losses._frame import Frame


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
