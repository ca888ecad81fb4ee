"""The TorchRL door: TorchRL's keywords, translated once into parts.

Every loss of the door declares the options it takes as a table of name → default; the constructor
checks the names, and ``translate`` builds the parts. Attributes that TorchRL exposes are properties
that read and write the parts' buffers.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from composite_losses.errors import ConfigError
from composite_losses.losses._checkpoint import adopt
from composite_losses.losses._options import scalar
from composite_losses.losses._torchrl import Mixin
from composite_losses.losses.parts import AdvantageNorm, AdvantageScale, EntropyTerm, ValueTerm
from composite_losses.losses.surrogates import Surrogate

# older spellings that clients still pass
ALIASES = {
    "entropy_coef": "entropy_coeff",
    "critic_coef": "critic_coeff",
    "actor": "actor_network",
    "critic": "critic_network",
}
MECHANICS: dict[str, Any] = {
    "functional": True,
    "separate_losses": False,
    "reduction": None,
    "log_prob_source": "auto",
    "validate": False,
    "heads": None,
    "sync_counts": False,
    "metrics": True,
    "team_value": False,
    "log_explained_variance": True,
    "device": None,
}
VALUE: dict[str, Any] = {"loss_critic_type": "smooth_l1", "clip_value": None}
CRITIC_COEFF: dict[str, Any] = {"critic_coeff": None}
ENTROPY: dict[str, Any] = {
    "entropy_bonus": True,
    "entropy_coeff": None,
    "samples_mc_entropy": 1,
}
ADVANTAGE: dict[str, Any] = {
    "normalize_advantage": False,
    "normalize_advantage_exclude_dims": (),
    "advantage_norm": None,
}
PROXIMAL: dict[str, Any] = {"delay_actor": False, "max_importance_ratio": None}


def checked(name: str, options: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Returns the options with the given values, older spellings resolved.

    Raises:
        TypeError: an unknown keyword, with the list of the valid ones, or one given twice.
    """
    valid = {"actor_network": None, "critic_network": None, **options}
    out = dict(valid)
    seen: set[str] = set()
    for key, value in given.items():
        target = ALIASES.get(key, key)
        if target not in valid:
            raise TypeError(
                f"{name}() got an unexpected keyword argument {key!r}; valid ones are "
                f"{', '.join(sorted(valid))}."
            )
        if target in seen:
            other = next(k for k in given if k != key and ALIASES.get(k, k) == target)
            raise TypeError(f"{name}() got {target!r} twice: as {other!r} and as {key!r}.")
        seen.add(target)
        out[target] = value
    return out


def translate(options: dict[str, Any], surrogate: Surrogate) -> dict[str, Any]:
    """Returns the keyword arguments of ``BaseLoss``, parts included, for TorchRL's options."""
    options = dict(options)
    actor, critic = options.pop("actor_network"), options.pop("critic_network")
    coeff = options.pop("critic_coeff", None)
    keep_value = critic is not None and not (isinstance(coeff, (int, float)) and coeff == 0)
    kind, clip = options.pop("loss_critic_type"), options.pop("clip_value")
    multi_agent = "value_norm" in options
    norm = options.pop("value_norm", None)
    value = ValueTerm(kind, coeff=1.0 if coeff is None else coeff, clip=clip, norm=norm)
    bonus = options.pop("entropy_bonus", True)
    samples = options.pop("samples_mc_entropy", 1)
    coefficient = options.pop("entropy_coeff", None)
    entropy = EntropyTerm(0.01 if coefficient is None else coefficient, samples=samples)
    return {
        "actor_network": actor,
        "critic_network": critic,
        "surrogate": surrogate,
        "value": value if keep_value else None,
        "entropy": entropy,
        "entropy_bonus": bonus,
        "advantage": _advantage_part(options, multi_agent),
        **options,
    }


def _advantage_part(options: dict[str, Any], per_agent: bool) -> nn.Module | None:
    """Returns the advantage part that TorchRL's options ask for."""
    standardise = options.pop("normalize_advantage", False)
    exclude = options.pop("normalize_advantage_exclude_dims", ())
    norm = options.pop("advantage_norm", None)
    if norm is not None and standardise:
        raise ConfigError(
            "normalize_advantage=True and advantage_norm are mutually exclusive: pass either the "
            "mean/std standardisation flag or a ValueNorm instance, not both."
        )
    if norm is not None:
        return AdvantageScale(norm)
    if not standardise:
        return None
    return AdvantageNorm(exclude_dims=tuple(exclude), pool_all=per_agent)


def assign(part: nn.Module, name: str, value: Any) -> None:
    """Writes a number or tensor into a part's buffer, in place where there is one."""
    buffer = part._buffers[name]
    if buffer is None:
        part._buffers[name] = scalar(name, value).clone()
        return
    with torch.no_grad():
        given = torch.as_tensor(value, dtype=buffer.dtype, device=buffer.device)
        buffer.copy_(given.reshape(()) if given.numel() == 1 else given)


class Door(Mixin):
    """Mixin of a loss: TorchRL's constructor keywords and attributes.

    A loss declares ``options`` (name → default) and builds its surrogate from them.
    """

    options: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Shows the declared options in the constructor's signature."""
        super().__init_subclass__(**kwargs)
        kind = inspect.Parameter
        cls.__signature__ = inspect.Signature(
            [
                kind("actor_network", kind.POSITIONAL_OR_KEYWORD, default=None),
                kind("critic_network", kind.POSITIONAL_OR_KEYWORD, default=None),
                *(kind(n, kind.KEYWORD_ONLY, default=d) for n, d in cls.options.items()),
            ]
        )

    def __init__(
        self,
        actor_network: nn.Module | None = None,
        critic_network: nn.Module | None = None,
        **options: Any,
    ) -> None:
        """Checks the options' names and translates them into parts."""
        named = {"actor_network": actor_network, "critic_network": critic_network}
        given = {k: v for k, v in named.items() if v is not None} | options
        values = checked(type(self).__name__, self.options, given)
        asked = given.get("critic_coeff", given.get("critic_coef"))
        if values["critic_network"] is None and asked is not None and float(asked) != 0.0:
            raise TypeError("Missing positional arguments actor_network or critic_network.")
        surrogate = self._surrogate(values)
        super().__init__(**translate(values, surrogate))

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Loads a checkpoint of this loss, or of TorchRL's loss of the same name."""
        adopt(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _surrogate(self, options: dict[str, Any]) -> Surrogate:
        """Returns the surrogate, taking the options that are its own out of the table."""
        raise TypeError(f"{type(self).__name__} declares no surrogate")

    @property
    def entropy_coeff(self) -> Tensor:
        """Entropy coefficient: a 0-dim buffer, or one element per head."""
        return self.entropy.coeff

    @entropy_coeff.setter
    def entropy_coeff(self, value: Any) -> None:
        if isinstance(value, Mapping):
            fresh = EntropyTerm(value, samples=self.entropy.samples)
            fresh.bind(self._plan)
            value = fresh.coeff.expand(len(self._plan.heads))
            if self.entropy.coeff.ndim == 0:
                self.entropy.coeff = value.to(self.entropy.coeff).clone()
        self.entropy.write(value)

    @property
    def critic_coeff(self) -> Tensor | None:
        """Coefficient of the value loss: a 0-dim buffer, or None without a value loss."""
        return None if self.value is None else self.value.coeff

    @critic_coeff.setter
    def critic_coeff(self, value: Any) -> None:
        if self.value is None:
            raise AttributeError("critic_coeff: this loss has no value term.")
        assign(self.value, "coeff", value)

    @property
    def clip_value(self) -> Tensor | None:
        """Largest change of the value from the stored one: a 0-dim buffer, or None."""
        return None if self.value is None else self.value.clip

    @clip_value.setter
    def clip_value(self, value: Any) -> None:
        if self.value is None:
            raise AttributeError("clip_value: this loss has no value term.")
        if value is None:
            self.value.clip = None
        else:
            assign(self.value, "clip", value)

    @property
    def loss_critic_type(self) -> str | None:
        """Kind of value loss: "l1", "l2" or "smooth_l1"."""
        return None if self.value is None else self.value.kind

    @property
    def samples_mc_entropy(self) -> int:
        """Samples where an entropy has no formula."""
        return self.entropy.samples

    @property
    def normalize_advantage(self) -> bool:
        """Whether the advantage is standardised."""
        return isinstance(self.advantage, AdvantageNorm)

    @property
    def normalize_advantage_exclude_dims(self) -> tuple[int, ...]:
        """Dims of the advantage that keep separate statistics."""
        part = self.advantage
        return part.exclude_dims if isinstance(part, AdvantageNorm) else ()

    @property
    def advantage_norm(self) -> nn.Module | None:
        """The running normaliser that scales the advantage, or None."""
        return self.advantage.norm if isinstance(self.advantage, AdvantageScale) else None
