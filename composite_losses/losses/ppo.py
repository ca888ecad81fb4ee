"""PPO under TorchRL's names: unclipped, clipped, with KL penalty."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from composite_losses.errors import ConfigError
from composite_losses.losses._base import BaseLoss
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
from composite_losses.losses.surrogates import Clip, KLPenalty, Ratio, Surrogate

PPO_OPTIONS = {**ENTROPY, **CRITIC_COEFF, **VALUE, **ADVANTAGE, **PROXIMAL, **MECHANICS}


class PPOLoss(Door, BaseLoss):
    """Unclipped importance-weighted policy loss (part ``Ratio``), with TorchRL's keywords.

    Keywords: see TorchRL's ``PPOLoss``, and ``PolicyLoss`` for what is new (``log_prob_source``,
    ``validate``, ``heads``, ``sync_counts``, ``metrics``).
    """

    options: ClassVar[dict[str, Any]] = PPO_OPTIONS

    def _surrogate(self, options: dict[str, Any]) -> Surrogate:
        """Returns the unclipped ratio."""
        return Ratio()


class ClipPPOLoss(Door, BaseLoss):
    """Clipped PPO loss (part ``Clip``), with TorchRL's keywords.

    Keywords: see TorchRL's ``ClipPPOLoss``, ``Clip`` for ``ratio``, ``mix``, ``dual_clip`` and
    ``head_weights``, and ``PolicyLoss`` for the rest. ``clip_epsilon`` is a number, a pair, or (with
    ``ratio="per_head"`` and ``"leafwise"``) a mapping by head; ``clip_value=True`` takes it over.
    """

    options: ClassVar[dict[str, Any]] = {
        "clip_epsilon": 0.2,
        "ratio": "joint",
        "mix": 0.5,
        "dual_clip": None,
        "head_weights": None,
        **PPO_OPTIONS,
    }
    surrogate: Clip

    def _surrogate(self, options: dict[str, Any]) -> Surrogate:
        """Returns the clipped surrogate."""
        eps, clip_value = options.pop("clip_epsilon"), options["clip_value"]
        if isinstance(clip_value, bool):
            if clip_value and isinstance(eps, (tuple, list, dict)):
                raise ConfigError(
                    "clip_value=True cannot infer the value-clip threshold from "
                    f"clip_epsilon={eps}. Pass a float, e.g. clip_value=0.2."
                )
            options["clip_value"] = eps if clip_value else None
        names = ("ratio", "mix", "dual_clip", "head_weights")
        return Clip(eps, **{name: options.pop(name) for name in names})

    @property
    def clip_epsilon(self) -> Tensor:
        """Symmetric clip range: a 0-dim buffer, or one element per head."""
        self._of_kind("clip_epsilon", asymmetric=False)
        return self.surrogate.eps_low

    @clip_epsilon.setter
    def clip_epsilon(self, value: Any) -> None:
        self._of_kind("clip_epsilon", asymmetric=False)
        assign(self.surrogate, "eps_low", value)
        assign(self.surrogate, "eps_high", value)

    @property
    def clip_epsilon_low(self) -> Tensor:
        """Lower clip range of an asymmetric pair: a 0-dim buffer."""
        self._of_kind("clip_epsilon_low", asymmetric=True)
        return self.surrogate.eps_low

    @clip_epsilon_low.setter
    def clip_epsilon_low(self, value: Any) -> None:
        self._of_kind("clip_epsilon_low", asymmetric=True)
        assign(self.surrogate, "eps_low", value)

    @property
    def clip_epsilon_high(self) -> Tensor:
        """Upper clip range of an asymmetric pair: a 0-dim buffer."""
        self._of_kind("clip_epsilon_high", asymmetric=True)
        return self.surrogate.eps_high

    @clip_epsilon_high.setter
    def clip_epsilon_high(self, value: Any) -> None:
        self._of_kind("clip_epsilon_high", asymmetric=True)
        assign(self.surrogate, "eps_high", value)

    def _of_kind(self, name: str, *, asymmetric: bool) -> None:
        """Raises AttributeError where the loss was built with the other kind of clip range."""
        if self.surrogate.asymmetric == asymmetric:
            return
        if self.surrogate.asymmetric:
            raise AttributeError(
                f"{name!r}: this {type(self).__name__} was built with an asymmetric clip_epsilon pair; "
                "use 'clip_epsilon_low' and 'clip_epsilon_high'."
            )
        raise AttributeError(
            f"{name!r}: this {type(self).__name__} was built with a symmetric clip_epsilon; use "
            "'clip_epsilon'."
        )

    @property
    def _clip_bounds(self) -> tuple[Tensor, Tensor]:
        """Log of the clip range."""
        return (-self.surrogate.eps_low).log1p(), self.surrogate.eps_high.log1p()


class KLPENPPOLoss(Door, BaseLoss):
    """PPO with an adaptive KL penalty (part ``KLPenalty``), with TorchRL's keywords.

    Needs the behaviour policy's distribution parameters in the data. Outputs ``kl`` (nats) and
    ``beta`` besides the metrics.
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
