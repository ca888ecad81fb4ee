"""Checks that look at values: ``validate=True``. They wait for the device, the hot path does not."""

from __future__ import annotations

from torch import Tensor

from composite_losses.errors import ConfigError, NonFiniteError
from composite_losses.heads import Behaviour, HeadPlan, Terms
from composite_losses.losses._frame import Frame


def _count(bad: Tensor, mask: Tensor | None) -> int:
    """Returns the number of bad rows that count."""
    if mask is not None:
        n = mask.ndim
        bad = (bad.flatten(n).any(-1) if bad.ndim > n else bad) & mask
    return int(bad.sum())


def check_policy(
    plan: HeadPlan,
    frame: Frame,
    terms: list[Terms],
    actions: list[Tensor],
    current: list[Tensor],
    active: Tensor | None,
) -> None:
    """Raises unless every action lies in its head's support and has a finite current log-prob.

    Raises:
        ConfigError: an action outside the support or range, or forbidden by its action mask.
        NonFiniteError: a current log-prob that is NaN or infinite.
    """
    for i, head in enumerate(plan.heads):
        mask = frame.head_mask(i)
        if active is not None:
            mask = active[..., i] if mask is None else mask & active[..., i]
        outside = _count(~terms[i].contains(actions[i]), mask)
        if outside:
            raise ConfigError(
                f"head {head.name!r}: {outside} stored action(s) under {head.action!r} lie outside the "
                "distribution's support or are forbidden by its action mask. Store the action that "
                "was sampled, not the one the environment clipped, together with its mask."
            )
        broken = _count(~current[i].isfinite(), mask)
        if broken:
            raise NonFiniteError(
                f"head {head.name!r}: the current log-prob is not finite in {broken} row(s): the actor "
                "gives NaN or infinite distribution parameters there."
            )


def check_behaviour(
    plan: HeadPlan,
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
        bad = _count(~old.isfinite(), mask)
        if bad:
            raise NonFiniteError(_message(f"joint log-prob {behaviour.joint_key!r}", bad))
        return
    for i, head in enumerate(plan.heads):
        valid = mask
        if active is not None:
            valid = active[..., i] if valid is None else valid & active[..., i]
        bad = _count(~old[..., i].isfinite(), valid)
        if bad:
            raise NonFiniteError(_message(f"head {head.name!r} ({behaviour.keys[i]!r})", bad))


def _message(what: str, rows: int) -> str:
    """Returns the message about non-finite behaviour log-probs."""
    return (
        f"{what}: the behaviour log-prob is not finite in {rows} row(s) that count. A missing "
        "log-prob is not 0: mask those rows (loss_mask_key, agent_mask) or collect them anew."
    )
