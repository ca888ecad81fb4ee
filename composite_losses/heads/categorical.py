"""The categorical family, evaluated straight from its logits."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from composite_losses.functional import distributions as formula
from composite_losses.heads.terms import Terms, in_float32

# On the CPU the softmax of a short last dim is many times slower than that of a first dim.
SHORT = 16


class CategoricalTerms(Terms):
    """Categorical terms from logits ``[*batch, n]``; forbidden ones weigh nothing."""

    discrete = True

    def __init__(
        self,
        logits: Tensor,
        allowed: Tensor | None = None,
        *,
        one_hot: bool = False,
        normalised: bool = False,
    ) -> None:
        """Takes the logits; they are normalised once, when first needed."""
        self.logits = in_float32(logits)
        self.classes = logits.shape[-1]
        self.allowed = None if allowed is None else allowed.expand(logits.shape)
        self.normalised = normalised
        self.one_hot = one_hot
        self.batch_shape = logits.shape[:-1]
        self.event_shape = logits.shape[-1:] if one_hot else torch.Size()
        self.playable = None if self.allowed is None else self.allowed.any(-1)
        # where the classes run in ``log_probs``
        self.dim = 0 if self.classes < SHORT and logits.device.type == "cpu" else -1
        self._log_probs: Tensor | None = None

    @property
    def log_probs(self) -> Tensor:
        """Log-probs of all classes, along ``dim``."""
        if self._log_probs is None:
            logits, allowed = self.logits, self.allowed
            if self.dim == 0:
                logits = logits.movedim(-1, 0)
                allowed = None if allowed is None else allowed.movedim(-1, 0)
            self._log_probs = formula.bounded_log_probs(
                logits, allowed, normalised=self.normalised, dim=self.dim
            )
        return self._log_probs

    def kind(self, ndim: int) -> Hashable | None:
        """Returns the batch shape: heads may differ in their number of classes."""
        if len(self.batch_shape) != ndim:
            return None
        return ("categorical", self.batch_shape, self.normalised, self.logits.dtype)

    def stacked(self, heads: Sequence[Terms], dim: int) -> Terms:
        """Returns the terms of several heads, padded with classes that weigh nothing."""
        members = [head for head in heads if isinstance(head, CategoricalTerms)]
        widest = max(head.classes for head in members)
        # lifted to the lowest logit that counts when the log-probs are formed
        floor = torch.finfo(self.logits.dtype).min
        logits = [_padded(head.logits, widest, floor) for head in members]
        allowed = None
        if any(head.allowed is not None for head in members):
            masks = [
                torch.ones_like(head.logits, dtype=torch.bool)
                if head.allowed is None
                else head.allowed
                for head in members
            ]
            allowed = torch.stack([_padded(mask, widest, False) for mask in masks], dim)
        return CategoricalTerms(torch.stack(logits, dim), allowed, normalised=self.normalised)

    def stackable(self, action: Tensor) -> Tensor:
        """Returns the class index."""
        return self._index(action)

    def _index(self, action: Tensor) -> Tensor:
        """Returns the class index of an action, ``[..., *batch]``."""
        return action.argmax(-1) if self.one_hot else action.long()

    def log_prob(self, action: Tensor) -> Tensor:
        """Returns the log-prob of the stored class."""
        index, log_probs = self._index(action), self.log_probs
        if self.batch_shape != index.shape:  # several actions per distribution
            log_probs = log_probs.movedim(self.dim, -1).expand(*index.shape, self.classes)
            return log_probs.gather(-1, index.unsqueeze(-1)).squeeze(-1)
        return log_probs.gather(self.dim, index.unsqueeze(self.dim)).squeeze(self.dim)

    def entropy(self, samples: int = 1) -> Tensor:
        """Returns −Σ p log p over the allowed classes."""
        return -(self.log_probs.exp() * self.log_probs).sum(self.dim)

    def kl(self, other: Terms, samples: int = 1) -> Tensor:
        """Returns Σ p (log p − log q)."""
        if not isinstance(other, CategoricalTerms):
            raise TypeError("KL of a categorical head needs two categorical policies")
        return (self.log_probs.exp() * (self.log_probs - other.log_probs)).sum(self.dim)

    def contains(self, action: Tensor) -> Tensor:
        """Returns where the action is a class that the mask allows."""
        if self.one_hot:
            index = action.argmax(-1)
            inside = (action.sum(-1) == 1) & ((action == 0) | (action == 1)).all(-1)
        else:
            inside = (action >= 0) & (action < self.classes) & (action == action.long())
            index = torch.where(inside, action.long(), torch.zeros_like(action.long()))
        if self.allowed is not None:
            inside = inside & self.allowed.gather(-1, index.unsqueeze(-1)).squeeze(-1)
        return inside

    def neutral(self) -> float:
        """Returns class 0."""
        return 0.0

    def mode(self) -> Tensor:
        """Returns the most likely allowed class."""
        index = self.log_probs.argmax(self.dim)
        return torch.nn.functional.one_hot(index, self.classes) if self.one_hot else index


def _padded(x: Tensor, classes: int, value: float) -> Tensor:
    """Returns ``x [..., n]`` widened to ``[..., classes]``."""
    missing = classes - x.shape[-1]
    return torch.constant_pad_nd(x, (0, missing), value) if missing else x
