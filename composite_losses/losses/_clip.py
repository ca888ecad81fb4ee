"""The clipped surrogate under TorchRL's names, shared by the losses that clip."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from composite_losses.errors import ConfigError
from composite_losses.losses._door import Door, assign
from composite_losses.losses.surrogates import Clip, Surrogate

CLIP: dict[str, Any] = {
    "clip_epsilon": 0.2,
    "ratio": "joint",
    "mix": 0.5,
    "dual_clip": None,
    "head_weights": None,
}


class ClipDoor(Door):
    """Mixin of a loss of the door whose surrogate is ``Clip``."""

    surrogate: Any

    def _surrogate(self, options: dict[str, Any]) -> Surrogate:
        """Returns the clipped surrogate."""
        eps, clip_value = options.pop("clip_epsilon"), options["clip_value"]
        if isinstance(clip_value, bool):
            if clip_value and isinstance(eps, (Sequence, Mapping)):
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
        if self.surrogate.eps_high is not None:
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
                f"{name!r}: this {type(self).__name__} was built with an asymmetric clip_epsilon "
                "pair; use 'clip_epsilon_low' and 'clip_epsilon_high'."
            )
        raise AttributeError(
            f"{name!r}: this {type(self).__name__} was built with a symmetric clip_epsilon; use "
            "'clip_epsilon'."
        )

    @property
    def _clip_bounds(self) -> tuple[Tensor, Tensor]:
        """Log of the clip range."""
        return (-self.surrogate.eps_low).log1p(), self.surrogate.upper.log1p()
