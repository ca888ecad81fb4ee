"""Policy objectives per sample, to be maximised.

``A`` is the advantage, detached by the caller; ``C(r)`` clips the ratio r to
``[1 - eps_low, 1 + eps_high]``; ``P(r, A) = min(r A, C(r) A)``. Gradient goes to the log-prob or
log-ratio only. ``log_correction`` is the detached ``log(pi_prox / pi_behaviour)``, in nats, where
the log-ratio is taken against a proximal policy; it is added after clipping (Hilton, Cobbe and
Schulman 2021, "Batch size-invariance for policy optimization", arXiv 2110.00641).
"""

import torch
from torch import Tensor

from composite_losses.errors import ShapeError
from composite_losses.functional.masking import fill
from composite_losses.functional.ratios import clamp_log_ratio, clip_log_ratio, joint, ratio
from composite_losses.functional.shapes import require_per_head, require_same_shape


def score(log_prob: Tensor, advantage: Tensor) -> Tensor:
    """The objective ``log pi(a|s) A``, whose gradient is the score-function estimate, ``[*S]``.

    Args:
        log_prob: ``[*S]``, nats.
        advantage: ``[*S]``, detached by the caller, in units of return.

    Gradient goes to ``log_prob``.

    Raises:
        ShapeError: if the shapes differ.

    Source: Williams 1992, "Simple statistical gradient-following algorithms for connectionist
    reinforcement learning", Machine Learning 8.
    """
    require_same_shape(log_prob=log_prob, advantage=advantage)
    return log_prob * advantage


def unclipped(log_ratio: Tensor, advantage: Tensor, log_correction: Tensor | None = None) -> Tensor:
    """The unclipped objective ``r A``, ``[*S]``.

    Args:
        log_ratio: ``[*S]``, nats.
        advantage: ``[*S]``, detached by the caller, in units of return.
        log_correction: ``[*S]``, nats, the detached ``log(pi_prox / b)`` of decoupled PPO; added
            after clipping.

    Gradient goes to ``log_ratio``; 0 beyond the overflow bound.

    Raises:
        ShapeError: if the shapes differ.

    Source: Schulman et al. 2017, "Proximal policy optimization algorithms", eq. (6), arXiv
    1707.06347; the correction: Hilton, Cobbe and Schulman 2021, arXiv 2110.00641.
    """
    require_same_shape(log_ratio=log_ratio, advantage=advantage)
    return ratio(_corrected(log_ratio, log_correction)) * advantage


def clipped(
    log_ratio: Tensor,
    advantage: Tensor,
    eps_low: Tensor | float,
    eps_high: Tensor | float,
    *,
    dual_clip: Tensor | float | None = None,
    log_correction: Tensor | None = None,
) -> Tensor:
    """The clipped objective, ``[*S]``.

    ``P(r, A) = min(r A, C(r) A)``, with ``C(r) = clamp(r, 1 - eps_low, 1 + eps_high)``; with
    ``dual_clip`` c, ``max(P, c A)`` where A < 0.

    Args:
        log_ratio: ``[*S]``, nats.
        advantage: ``[*S]``, detached by the caller, in units of return.
        eps_low: in [0, 1], float or 0-dim.
        eps_high: ≥ 0, float or 0-dim.
        dual_clip: c > 1, or ``None``.
        log_correction: ``[*S]``, nats, the detached ``log(pi_prox / b)`` of decoupled PPO; added
            after clipping.

    Gradient goes to ``log_ratio`` where the unclipped term is the smaller one or the ratio is
    within its bounds; exactly 0 elsewhere, and finite for any finite log-ratio.

    Raises:
        ShapeError: if the shapes differ.

    Source: Schulman et al. 2017, eq. (7), arXiv 1707.06347; dual clip: Ye et al. 2020, "Mastering
    complex control in MOBA games with deep reinforcement learning", eqs. (4) and (5), arXiv
    1912.09729; the correction: Hilton, Cobbe and Schulman 2021, arXiv 2110.00641.
    """
    require_same_shape(log_ratio=log_ratio, advantage=advantage)
    clipped_log_ratio = clip_log_ratio(log_ratio, eps_low, eps_high)
    return _pessimistic(log_ratio, clipped_log_ratio, advantage, dual_clip, log_correction)


def per_head(
    log_ratio: Tensor,
    advantage: Tensor,
    eps_low: Tensor | float,
    eps_high: Tensor | float,
    *,
    weights: Tensor | None = None,
    active: Tensor | None = None,
    dual_clip: Tensor | float | None = None,
    log_correction: Tensor | None = None,
) -> Tensor:
    """The objective ``sum_h w_h P(r_h, A_h)``, each head clipped by itself, ``[*S]``.

    ``C(r) = clamp(r, 1 - eps_low, 1 + eps_high)``, ``P(r, A) = min(r A, C(r) A)``.

    Args:
        log_ratio: ``[*S, H]``, nats.
        advantage: ``[*S]``, the same for every head, or ``[*S, H]``; detached by the
            caller, in units of return.
        eps_low: in [0, 1], float, 0-dim or ``[H]``.
        eps_high: ≥ 0, float, 0-dim or ``[H]``.
        weights: ``[H]``, dimensionless; ``None``: 1 each, so that the gradient at r = 1 equals
            that of the joint ratio.
        active: bool ``[*S, H]``; an inactive head contributes 0 and may hold anything.
        dual_clip: c > 1, or ``None``; acts on each head.
        log_correction: ``[*S, H]``, nats, the detached ``log(pi_prox / b)`` of decoupled PPO; added
            after clipping.

    Gradient goes to ``log_ratio`` of active heads, as in :func:`clipped`.

    Raises:
        ShapeError: if a shape is not one of those above.

    Source: definition; one clip per head as in Fan et al. 2019, "Hybrid actor-critic reinforcement
    learning in parameterized action space", arXiv 1903.01344; P as in :func:`clipped`.
    """
    if advantage.shape == log_ratio.shape[:-1]:
        advantage = advantage.unsqueeze(-1).expand_as(log_ratio)
    require_same_shape(log_ratio=log_ratio, advantage=advantage)
    if active is not None:
        require_same_shape(log_ratio=log_ratio, active=active)
        log_ratio = fill(log_ratio, active)
        advantage = fill(advantage, active)  # P(1, 0) = 0
        if log_correction is not None:
            log_correction = fill(log_correction, active)
    gain = clipped(
        log_ratio, advantage, eps_low, eps_high, dual_clip=dual_clip, log_correction=log_correction
    )
    if weights is not None:
        require_per_head("weights", weights, log_ratio)
        gain = gain * weights
    return gain.sum(-1)


def leafwise(
    log_ratio: Tensor,
    advantage: Tensor,
    eps_low: Tensor | float,
    eps_high: Tensor | float,
    *,
    dual_clip: Tensor | float | None = None,
    log_correction: Tensor | None = None,
) -> Tensor:
    """The clipped objective where each ratio is clamped before all are multiplied, ``[*S]``.

    ``min(prod_h r_h A, prod_h C(r_h) A)``, with ``C(r) = clamp(r, 1 - eps_low, 1 + eps_high)``.

    Args:
        log_ratio: ``[*S, H]``, nats; an inactive head holds 0, the factor 1.
        advantage: ``[*S]``, detached by the caller, in units of return.
        eps_low: in [0, 1], float, 0-dim or ``[H]``.
        eps_high: ≥ 0, float, 0-dim or ``[H]``.
        dual_clip: c > 1, or ``None``.
        log_correction: ``[*S]``, nats, the detached ``log(pi_prox / b)`` of the joint action; added
            after clipping.

    Gradient goes to ``log_ratio``: to every head where the unclipped product is the smaller one,
    else to the heads within their bounds.

    Raises:
        ShapeError: if a shape is not one of those above.

    Source: definition; the clip as in :func:`clipped`.
    """
    joint_log_ratio = joint(log_ratio)
    require_same_shape(joint_log_ratio=joint_log_ratio, advantage=advantage)
    clipped_log_ratio = joint(clip_log_ratio(log_ratio, eps_low, eps_high))
    return _pessimistic(joint_log_ratio, clipped_log_ratio, advantage, dual_clip, log_correction)


def mixed(
    log_ratio: Tensor,
    advantage: Tensor,
    eps_low: Tensor | float,
    eps_high: Tensor | float,
    *,
    mix: Tensor | float = 0.5,
    weights: Tensor | None = None,
    active: Tensor | None = None,
    dual_clip: Tensor | float | None = None,
    log_correction: Tensor | None = None,
) -> Tensor:
    """The weighted mean of the joint and the per-head objective, ``[*S]``.

    ``m P(prod_h r_h, A) + (1 - m) sum_h w_h P(r_h, A)``, with P as in :func:`clipped`:
    ``P(r, A) = min(r A, C(r) A)``, ``C(r) = clamp(r, 1 - eps_low, 1 + eps_high)``.

    Args:
        log_ratio: ``[*S, H]``, nats.
        advantage: ``[*S]``, detached by the caller, in units of return.
        eps_low: in [0, 1], float or 0-dim, for the joint ratio and for each head.
        eps_high: ≥ 0, likewise.
        mix: m in [0, 1], float or 0-dim.
        weights: ``[H]``, dimensionless, of the second term.
        active: bool ``[*S, H]``; an inactive head is the factor 1 in the first term, 0 in the
            second, and may hold anything.
        dual_clip: c > 1, or ``None``.
        log_correction: ``[*S, H]``, nats, the detached ``log(pi_prox / b)`` of decoupled PPO; added
            after clipping.

    Gradient goes to ``log_ratio`` of active heads, as in :func:`clipped` and :func:`per_head`.

    Raises:
        ShapeError: if a shape is not one of those above.

    Source: definition, from :func:`clipped` and :func:`per_head`.
    """
    for name, option in (("eps_low", eps_low), ("eps_high", eps_high), ("mix", mix)):
        if isinstance(option, Tensor) and option.ndim:
            raise ShapeError(f"{name} must be 0-dim, found {list(option.shape)}")
    if log_correction is not None:
        require_same_shape(log_ratio=log_ratio, log_correction=log_correction)
        log_correction = fill(log_correction, active)
    log_ratio = fill(log_ratio, active)
    product = clipped(
        joint(log_ratio),
        advantage,
        eps_low,
        eps_high,
        dual_clip=dual_clip,
        log_correction=None if log_correction is None else joint(log_correction),
    )
    separate = per_head(
        log_ratio,
        advantage,
        eps_low,
        eps_high,
        weights=weights,
        active=active,
        dual_clip=dual_clip,
        log_correction=log_correction,
    )
    return mix * product + (1 - mix) * separate


def pessimistic(
    gain: Tensor,
    clipped_gain: Tensor,
    advantage: Tensor,
    dual_clip: Tensor | float | None = None,
) -> Tensor:
    """The smaller of the plain and the clipped gain; with ``dual_clip`` c at least c A for A < 0.

    ``min(r A, C(r) A)``, with ``C(r)`` the clipped ratio, then ``max(., c A)`` where A < 0.

    Args:
        gain: ``r A``, any shape.
        clipped_gain: ``C(r) A``, the same shape.
        advantage: the same shape, detached by the caller, in units of return.
        dual_clip: c > 1, or ``None``.

    Gradient goes to the smaller gain; where both are equal it is split in two equal halves.

    Raises:
        ShapeError: if the shapes differ.

    Source: as :func:`clipped`.
    """
    require_same_shape(gain=gain, clipped_gain=clipped_gain, advantage=advantage)
    objective = torch.minimum(gain, clipped_gain)
    if dual_clip is None:
        return objective
    return torch.where(advantage < 0, torch.maximum(objective, dual_clip * advantage), objective)


def _corrected(log_ratio: Tensor, log_correction: Tensor | None) -> Tensor:
    if log_correction is None:
        return log_ratio
    require_same_shape(log_ratio=log_ratio, log_correction=log_correction)
    return log_ratio + log_correction


def _pessimistic(
    log_ratio: Tensor,
    clipped_log_ratio: Tensor,
    advantage: Tensor,
    dual_clip: Tensor | float | None,
    log_correction: Tensor | None,
) -> Tensor:
    gain = clamp_log_ratio(_corrected(log_ratio, log_correction)).exp() * advantage
    clipped_gain = clamp_log_ratio(_corrected(clipped_log_ratio, log_correction)).exp() * advantage
    return pessimistic(gain, clipped_gain, advantage, dual_clip)
