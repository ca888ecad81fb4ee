"""What the surrogates see: plain tensors of one batch, heads as the last axis."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from composite_losses import functional as F


@dataclass
class Samples:
    """Per-sample tensors of one batch. What belongs to no single head has a last dim of 1.

    Attributes:
        log_prob: current log-prob, ``[*S, H]``.
        advantage: ``[*S, 1]``, or ``[*S, H]`` where every head has its own.
        mask: ``[*S]``, True where the policy terms count, or None.
        active: ``[*S, H]``, True where a head counts, or None where all do.
        log_ratio: log(π/π_prox) per head ``[*S, H]``; ``[*S, 1]`` where only a joint log-prob is
            known; None for losses without a ratio.
        correction: log(π_prox/π_behaviour) of the same shape, without gradient, or None.
        cap: largest behaviour ratio π/π_behaviour, or None.
        kl: KL(old ‖ new) per sample ``[*S, 1]``, or None.
        joint_only: whether only a joint log-prob is known.
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
    _cache: dict[str, Tensor] = field(default_factory=dict)

    @property
    def row_mask(self) -> Tensor | None:
        """The mask as ``[*S, 1]``, or None."""
        return None if self.mask is None else self.mask.unsqueeze(-1)

    @property
    def joint_log_ratio(self) -> Tensor:
        """The log of the product of the heads' ratios, ``[*S, 1]``."""
        if "joint" not in self._cache:
            ratio = _present(self.log_ratio)
            one = ratio.shape[-1] == 1
            self._cache["joint"] = ratio if one else ratio.sum(-1, keepdim=True)
        return self._cache["joint"]

    @property
    def joint_correction(self) -> Tensor | None:
        """The correction of the joint ratio, ``[*S, 1]``, capped."""
        total = self.correction
        if total is not None and total.shape[-1] != 1:
            total = total.sum(-1, keepdim=True)
        return self._capped(total, self.joint_log_ratio)

    @property
    def head_correction(self) -> Tensor | None:
        """The correction of each head's ratio, ``[*S, H]``, capped."""
        return self._capped(self.correction, _present(self.log_ratio))

    @property
    def behaviour_log_ratio(self) -> Tensor:
        """log(π/π_behaviour), the weight that the data carry, ``[*S, 1]``."""
        if "weight" not in self._cache:
            correction = self.joint_correction
            joint = self.joint_log_ratio
            self._cache["weight"] = joint if correction is None else joint + correction
        return self._cache["weight"]

    @property
    def bounded(self) -> Tensor:
        """``behaviour_log_ratio``, bounded so that its ``exp`` is finite."""
        if "bounded" not in self._cache:
            self._cache["bounded"] = F.clamp_log_ratio(self.behaviour_log_ratio)
        return self._cache["bounded"]

    @property
    def ratio(self) -> Tensor:
        """π/π_behaviour, ``[*S, 1]``, finite."""
        if "ratio" not in self._cache:
            self._cache["ratio"] = self.bounded.exp()
        return self._cache["ratio"]

    @property
    def valid_heads(self) -> Tensor | None:
        """``[*S, H]``, True where both the row and the head count, or None where all do."""
        return valid_heads(self.mask, self.active, self.log_prob.shape)

    def remember(self, name: str, value: Tensor) -> None:
        """Keeps what the surrogate has computed, for the metrics."""
        self._cache[name] = value

    def remembered(self, name: str) -> Tensor | None:
        """Returns what was kept, or None."""
        return self._cache.get(name)

    def _capped(self, correction: Tensor | None, log_ratio: Tensor) -> Tensor | None:
        """Returns the correction lowered so that the behaviour ratio does not exceed the cap.

        The cap lifts the behaviour log-prob, which carries no gradient: a capped sample keeps its
        policy gradient, scaled, where a clamp on the ratio would remove it.
        """
        if self.cap is None:
            return correction
        room = self.cap.log() - log_ratio.detach()
        return torch.minimum(torch.zeros_like(room) if correction is None else correction, room)


def valid_heads(
    mask: Tensor | None, active: Tensor | None, shape: tuple[int, ...]
) -> Tensor | None:
    """Returns where both the row and the head count, in the shape ``[*S, H]``, or None."""
    if active is None:
        return None if mask is None else mask.unsqueeze(-1).expand(shape)
    return active if mask is None else active & mask.unsqueeze(-1)


def _present(value: Tensor | None) -> Tensor:
    """Returns a tensor that a ratio surrogate cannot do without."""
    if value is None:
        raise RuntimeError("this surrogate needs the behaviour log-prob")
    return value
