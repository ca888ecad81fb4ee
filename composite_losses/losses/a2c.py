"""A2C under TorchRL's name."""

from __future__ import annotations

from typing import Any, ClassVar

from tensordict import TensorDictBase
from torch import Tensor

from composite_losses.heads import Scratch
from composite_losses.heads.blocks import blocks
from composite_losses.losses._base import BaseLoss
from composite_losses.losses._door import ENTROPY, MECHANICS, VALUE, Door
from composite_losses.losses._torchrl import loss_context
from composite_losses.losses.surrogates import Score, Surrogate


class A2CLoss(Door, BaseLoss):
    """Advantage actor-critic loss (part ``Score``), with TorchRL's keywords.

    The stored actions are scored; no behaviour log-prob is read.

    Keywords: see TorchRL's ``A2CLoss``, and ``PolicyLoss`` for what is new.

    Shapes:
        The log-prob of each head is ``[*S]``, in nats. Data: advantage, value and value target
        ``[*S, 1]``, in units of return. Losses are 0-dim, ``[*S]`` with ``reduction="none"``;
        metrics are 0-dim.

    Raises:
        ConfigError: an option out of its range, or options that contradict each other; (call,
            ``validate=True``) an action outside its head's support.
        TypeError: an unknown keyword, one given twice, or no policy as actor.
        MissingKeyError: (call) no advantage or no action is found.
        ShapeError: (call) an entry whose shape does not fit the samples.
        GraphError: (call) a stored value requires grad, with ``clip_value``.
        NonFiniteError: (call, ``validate=True``) a log-prob that counts is not finite.

    Source: Mnih et al. 2016, "Asynchronous methods for deep reinforcement learning", arXiv
    1602.01783.
    """

    label = "A2C"
    entropy_first = True
    options: ClassVar[dict[str, Any]] = {
        **ENTROPY,
        "critic_coeff": 1.0,
        **VALUE,
        "advantage_norm": None,
        **MECHANICS,
    }

    def _surrogate(self, options: dict[str, Any]) -> Surrogate:
        """Returns the score function; without a coefficient there is no value loss."""
        if options["critic_coeff"] is None:
            options["critic_coeff"] = 0.0
        return Score()

    def _log_probs(self, tensordict: TensorDictBase) -> tuple[Tensor, list[Any]]:
        """Returns (joint log-prob of the stored actions ``[*S, 1]``, terms of the heads)."""
        self._settle(tensordict)
        with loss_context(self):
            td = Scratch(tensordict)
            frame = self._frame(td, None)
            terms = self._run_actor(td)
            active = self._active(frame, terms)
            actions = self._actions(tensordict, terms)
            parts = blocks(terms, len(frame.sample))
            log_prob, _ = self._aligned(frame, parts, None, actions, active, frame.mask)
        return log_prob.sum(-1, keepdim=True), terms
