"""PPO under TorchRL's names: unclipped, clipped, with KL penalty."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from composite_losses.losses._base import BaseLoss
from composite_losses.losses._clip import CLIP, ClipDoor
from composite_losses.losses._door import (
    ADVANTAGE,
    CRITIC_COEFF,
    ENTROPY,
    MECHANICS,
    PROXIMAL,
    VALUE,
    Door,
    assign,
)
from composite_losses.losses.surrogates import KLPenalty, Ratio, Surrogate

PPO_OPTIONS = {**ENTROPY, **CRITIC_COEFF, **VALUE, **ADVANTAGE, **PROXIMAL, **MECHANICS}


class PPOLoss(Door, BaseLoss):
    """Unclipped importance-weighted policy loss (part ``Ratio``), with TorchRL's keywords.

    Keywords: see TorchRL's ``PPOLoss``, and ``PolicyLoss`` for what is new (``log_prob_source``,
    ``validate``, ``heads``, ``sync_counts``, ``metrics``).

    Shapes:
        Data: the log-prob of each head ``[*S]``, in nats; advantage, value and value target
        ``[*S, 1]``, in units of return. Losses are 0-dim, ``[*S]`` with ``reduction="none"``;
        metrics are 0-dim.

    Raises:
        ConfigError: an option out of its range, or options that contradict each other; (call,
            ``validate=True``) an action outside its head's support.
        TypeError: an unknown keyword, one given twice, or no policy as actor.
        MissingKeyError: (call) no advantage or no behaviour log-prob is found.
        ShapeError: (call) an entry whose shape does not fit the samples.
        GraphError: (call) a stored log-prob or value requires grad.
        NonFiniteError: (call, ``validate=True``) a log-prob that counts is not finite.

    Source: Schulman et al. 2017, "Proximal policy optimization algorithms", eq. (6), arXiv
    1707.06347.
    """

    options: ClassVar[dict[str, Any]] = PPO_OPTIONS

    def _surrogate(self, options: dict[str, Any]) -> Surrogate:
        """Returns the unclipped ratio."""
        return Ratio()


class ClipPPOLoss(ClipDoor, BaseLoss):
    """Clipped PPO loss (part ``Clip``), with TorchRL's keywords.

    Keywords: see TorchRL's ``ClipPPOLoss``, ``Clip`` for ``ratio``, ``mix``, ``dual_clip`` and
    ``head_weights``, and ``PolicyLoss`` for the rest. ``clip_epsilon`` is a number, a pair, or
    (with ``ratio="per_head"`` and ``"leafwise"``) a mapping by head; ``clip_value=True`` takes it
    over.

    Shapes:
        Data: the log-prob of each head ``[*S]``, in nats; advantage, value and value target
        ``[*S, 1]``, in units of return. Losses are 0-dim, ``[*S]`` with ``reduction="none"``;
        metrics are 0-dim.

    Raises:
        ConfigError: an option out of its range, or options that contradict each other; (call,
            ``validate=True``) an action outside its head's support.
        TypeError: an unknown keyword, one given twice, or no policy as actor.
        MissingKeyError: (call) no advantage or no behaviour log-prob is found.
        ShapeError: (call) an entry whose shape does not fit the samples.
        GraphError: (call) a stored log-prob or value requires grad.
        NonFiniteError: (call, ``validate=True``) a log-prob that counts is not finite.

    Source: Schulman et al. 2017, "Proximal policy optimization algorithms", eq. (7), arXiv
    1707.06347; for several heads see ``Clip``.
    """

    options: ClassVar[dict[str, Any]] = {**CLIP, **PPO_OPTIONS}


class KLPENPPOLoss(Door, BaseLoss):
    """PPO with an adaptive KL penalty (part ``KLPenalty``), with TorchRL's keywords.

    Needs the behaviour policy's distribution parameters in the data. Outputs ``kl`` (nats) and
    ``beta`` besides the metrics.

    Args:
        dtarg: KL to aim for, in nats.
        beta: initial penalty coefficient, in units of the objective per nat.
        increment: factor ≥ 1 by which beta grows.
        decrement: factor ≤ 1 by which it shrinks.
        samples_mc_kl: samples where the KL has no formula.

    The other keywords are ``PPOLoss``'s.

    Shapes:
        Data: the log-prob of each head ``[*S]``, in nats; advantage, value and value target
        ``[*S, 1]``, in units of return. Losses are 0-dim, ``[*S]`` with ``reduction="none"``;
        metrics are 0-dim.

    Raises:
        ConfigError: an option out of its range, or options that contradict each other; (call,
            ``validate=True``) an action outside its head's support.
        TypeError: an unknown keyword, one given twice, or no policy as actor.
        MissingKeyError: (call) no advantage, behaviour log-prob or stored distribution
            parameter is found.
        ShapeError: (call) an entry whose shape does not fit the samples.
        GraphError: (call) a stored log-prob or value requires grad.
        NonFiniteError: (call, ``validate=True``) a log-prob that counts is not finite.

    Source: Schulman et al. 2017, "Proximal policy optimization algorithms", section 4, arXiv
    1707.06347.
    """

    options: ClassVar[dict[str, Any]] = {
        "dtarg": 0.01,
        "beta": 1.0,
        "increment": 2.0,
        "decrement": 0.5,
        "samples_mc_kl": 1,
        **PPO_OPTIONS,
    }
    surrogate: KLPenalty

    def _surrogate(self, options: dict[str, Any]) -> Surrogate:
        """Returns the penalised ratio."""
        part = KLPenalty(
            options.pop("beta"),
            target=options.pop("dtarg"),
            increment=options.pop("increment"),
            decrement=options.pop("decrement"),
        )
        part.samples = options.pop("samples_mc_kl")
        return part

    @property
    def beta(self) -> Tensor:
        """Penalty coefficient: a 0-dim buffer that adapts in training mode."""
        return self.surrogate.beta

    @beta.setter
    def beta(self, value: Any) -> None:
        assign(self.surrogate, "beta", value)

    @property
    def dtarg(self) -> Tensor:
        """Target KL in nats: a 0-dim buffer."""
        return self.surrogate.target

    @dtarg.setter
    def dtarg(self, value: Any) -> None:
        assign(self.surrogate, "target", value)

    @property
    def increment(self) -> Tensor:
        """Factor by which beta grows: a 0-dim buffer."""
        return self.surrogate.increment

    @increment.setter
    def increment(self, value: Any) -> None:
        assign(self.surrogate, "increment", value)

    @property
    def decrement(self) -> Tensor:
        """Factor by which beta shrinks: a 0-dim buffer."""
        return self.surrogate.decrement

    @decrement.setter
    def decrement(self, value: Any) -> None:
        assign(self.surrogate, "decrement", value)

    @property
    def samples_mc_kl(self) -> int:
        """Samples where the KL has no formula."""
        return self.surrogate.samples or self.entropy.samples
