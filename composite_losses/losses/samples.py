"""What the surrogates see: plain tensors of one batch, heads as the last axis."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from composite_losses import functional as F


@dataclass
class Samples:
    """Per-sample tensors of one batch.

    Attributes:
        log_prob: current log-prob, ``[*S, H]``.
        advantage: ``[*S]``, or ``[*S, H]`` where every head has its own.
        mask: ``[*S]``, True where the policy terms count, or None.
        active: ``[*S, H]``, True where a head counts, or None where all do.
        log_ratio: log(π/π_prox) per head ``[*S, H]``; ``[*S]`` where only a joint log-prob is
            known; None for losses without a ratio.
        correction: log(π_prox/π_behaviour) of the same shape, without gradient, or None.
        cap: largest behaviour ratio π/π_behaviour, or None.
        kl: KL(old ‖ new) per sample ``[*S]``, or None.
    """

    log_prob: Tensor
    advantage: Tensor
    mask: Tensor | None = None
    active: Tensor | None = None
    log_ratio: Tensor | None = None
    correction: Tensor | None = None
    cap: Tensor | None = None
    kl: Tensor | None = None
    joint_only: bool = False

    @property
    def joint_log_ratio(self) -> Tensor:
        """The log of the product of the heads' ratios, ``[*S]``."""
        ratio = _present(self.log_ratio)
        return ratio if self.joint_only else F.joint(ratio)

    @property
    def joint_correction(self) -> Tensor | None:
        """The correction of the joint ratio, ``[*S]``, capped."""
        total = self.correction
        if total is not None and not self.joint_only:
            total = F.joint(total)
        return self._capped(total, self.joint_log_ratio)

    @property
    def head_correction(self) -> Tensor | None:
        """The correction of each head's ratio, ``[*S, H]``, capped."""
        return self._capped(self.correction, _present(self.log_ratio))

    @property
    def behaviour_log_ratio(self) -> Tensor:
        """log(π/π_behaviour), the weight that the data carry, ``[*S]``, without gradient."""
        log_ratio, correction = self.joint_log_ratio.detach(), self.joint_correction
        return log_ratio if correction is None else log_ratio + correction

    @property
    def valid_heads(self) -> Tensor | None:
        """``[*S, H]``, True where both the row and the head count, or None where all do."""
        if self.active is None:
            return None if self.mask is None else self.mask.unsqueeze(-1).expand_as(self.log_prob)
        return self.active if self.mask is None else self.active & self.mask.unsqueeze(-1)

    def _capped(self, correction: Tensor | None, log_ratio: Tensor) -> Tensor | None:
        """Returns the correction lowered so that the behaviour ratio does not exceed the cap.

        The cap lifts the behaviour log-prob, which carries no gradient: a capped sample keeps its
        policy gradient, scaled, where a clamp on the ratio would remove it.
        """
        if self.cap is None:
            return correction
        room = self.cap.log() - log_ratio.detach()
        return torch.minimum(torch.zeros_like(room) if correction is None else correction, room)


def _present(value: Tensor | None) -> Tensor:
    """Returns a tensor that a ratio surrogate cannot do without."""
    if value is None:
        raise RuntimeError("this surrogate needs the behaviour log-prob")
    return value
