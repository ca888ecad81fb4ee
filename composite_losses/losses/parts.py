"""The other parts of a loss: value term, entropy term, advantage standardisation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from composite_losses import functional as F
from composite_losses.errors import ConfigError, MissingKeyError
from composite_losses.heads import HeadPlan
from composite_losses.losses._options import scalar

KINDS = ("l1", "l2", "smooth_l1")


class ValueTerm(nn.Module):
    """The value loss: coeff · error(value, target), with optional PPO value clipping.

    Args:
        kind: ``"l1"``, ``"l2"`` or ``"smooth_l1"``.
        coeff: coefficient of the term, dimensionless.
        clip: largest change of the value from the stored one, in the value's units; the worse of
            both errors counts.
        norm: a TorchRL ``ValueNorm``: the error (and the clip) is between normalised values. It is
            updated in training mode, with the targets that count.

    Raises:
        ConfigError: an unknown kind, or a clip that is not a number.

    Shapes:
        Value and target ``[*S, 1]``, in units of return → the loss ``[*S, 1]``.

    Source: see ``functional.value_error``; ``clip``: Engstrom et al. 2020, arXiv 2005.12729.
    """

    coeff: Tensor
    clip: Tensor | None
    norm: Any

    def __init__(
        self,
        kind: str = "smooth_l1",
        *,
        coeff: float = 1.0,
        clip: float | None = None,
        norm: nn.Module | None = None,
    ) -> None:
        """Validates the options and registers them as buffers."""
        super().__init__()
        if kind not in KINDS:
            raise ConfigError(f"kind of value loss: expected one of {KINDS}, found {kind!r}.")
        self.kind = kind
        self.norm = norm
        self.register_buffer("coeff", scalar("critic_coeff", coeff).clone())
        self.register_buffer("clip", None if clip is None else scalar("clip_value", clip).clone())

    def forward(
        self,
        value: Tensor,
        target: Tensor,
        old_value: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns (coeff · error, where it was clipped or None), in the value's shape.

        Args:
            value: the critic's output, ``[*S, 1]``.
            target: what it should be, ``[*S, 1]``.
            old_value: the behaviour critic's, ``[*S, 1]``.
            mask: ``[*S]``, True where a row counts: what the normaliser learns from.
        """
        if self.norm is not None:
            self._learn(target, mask)
            value, target = self.norm.normalize(value), self.norm.normalize(target)
            old_value = None if old_value is None else self.norm.normalize(old_value)
        if self.clip is None or old_value is None:
            return self.coeff * F.value_error(value, target, self.kind), None
        error, clipped = F.clipped_value_error(value, old_value, target, self.clip, self.kind)
        return self.coeff * error, clipped

    def _learn(self, target: Tensor, mask: Tensor | None) -> None:
        """Updates the normaliser with the targets that count, in training mode."""
        if self.norm is None or not self.training:
            return
        if mask is not None:
            # exempt from the rule against boolean indexing: a normaliser sees valid rows only
            target = target[mask]
        if target.numel():
            self.norm.update(target.detach())


class EntropyTerm(nn.Module):
    """The entropy bonus: −Σ coeff_h · H_h.

    Args:
        coeff: in units of the objective per nat: one number for all heads, or a mapping that names
            every head by its name, its action key, ``<action>_log_prob`` or ``<action>_entropy``.
        samples: samples where an entropy (or KL) has no formula.

    Raises:
        ConfigError: a coefficient that is not a number, or samples that are not a positive integer.
        KeyError: the mapping does not name every head, or names one that is not there.

    Shapes:
        The heads' entropies ``[*S, H]``, in nats → the loss ``[*S, 1]``.

    Source: Mnih et al. 2016, section 4, arXiv 1602.01783.
    """

    coeff: Tensor

    def __init__(
        self, coeff: float | Tensor | Mapping[Any, float] = 0.01, *, samples: int = 1
    ) -> None:
        """Registers the coefficient as a buffer."""
        super().__init__()
        if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
            raise ConfigError(f"samples: expected a positive integer, found {samples!r}.")
        self.samples = samples
        self._by_head = dict(coeff) if isinstance(coeff, Mapping) else None
        if isinstance(coeff, Mapping):
            for key, value in coeff.items():
                scalar(f"entropy_coeff[{key!r}]", value)
            initial = torch.zeros(())
        else:
            initial = scalar("entropy_coeff", coeff).clone()
        self.register_buffer("coeff", initial)
        self._checked: tuple[Tensor | None, int] = (None, -1)
        self._weight: Tensor | None = None
        self._off = False
        self._look()

    def bind(self, plan: HeadPlan) -> None:
        """Turns a mapping by head into one buffer element per head.

        Raises:
            MissingKeyError: the mapping does not name every head, or names one that is not there.
        """
        if self._by_head is None or self.coeff.ndim == 1:
            return
        values: dict[int, float] = {}
        for key, value in self._by_head.items():
            position = plan.index(key)
            if position is None:
                raise MissingKeyError(
                    f"entropy_coeff: unknown head {key!r}; the heads are "
                    f"{', '.join(map(repr, plan.names))}."
                )
            values[position] = float(value)
        missing = [name for i, name in enumerate(plan.names) if i not in values]
        if missing:
            raise MissingKeyError(
                f"Missing entropy coeff for head {', '.join(map(repr, missing))}: the mapping must "
                f"name every head ({', '.join(map(repr, plan.names))})."
            )
        ordered = [values[i] for i in range(len(plan.names))]
        self.coeff = torch.tensor(ordered, device=self.coeff.device, dtype=self.coeff.dtype)
        self._look()

    def _look(self) -> None:
        """Reads the coefficient back: whether it is 0."""
        self._checked, self._weight = (None, -1), None
        if self.coeff.device.type != "meta":
            self._know(off=not bool(self.coeff.any()))

    def _know(self, *, off: bool) -> None:
        """Keeps what holds as long as nobody writes the coefficient."""
        self._off = off
        self._checked = (self.coeff, self.coeff._version)
        self._weight = -self.coeff.detach()

    def write(self, value: float | Tensor) -> None:
        """Writes the coefficient in place: a number, 0-dim, or ``[H]``."""
        with torch.no_grad():
            given = torch.as_tensor(value)
            given = given.reshape(()) if given.numel() == 1 else given
            self.coeff.copy_(given.to(self.coeff))
        self._know(off=given.device.type != "meta" and not bool(given.any()))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores a copy, and looks at its coefficient."""
        super().__setstate__(state)
        self._look()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Applies a conversion, and looks at the new coefficient."""
        super()._apply(fn, recurse)
        self._look()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Loads the coefficient and looks whether it is 0."""
        super()._load_from_state_dict(*args, **kwargs)
        self._look()

    @property
    def off(self) -> bool:
        """Whether every coefficient is known to be 0, so that the entropy is only a metric.

        A buffer that was written or replaced by other means counts as not 0: to read it back
        would wait for the device.
        """
        return self._known and self._off

    @property
    def _known(self) -> bool:
        """Whether the coefficient is the one that was looked at."""
        if torch.compiler.is_compiling():
            return False  # a graph must serve every coefficient
        coeff, (known, version) = self.coeff, self._checked
        return coeff is known and coeff._version == version

    def forward(self, entropy: Tensor, total: Tensor) -> Tensor:
        """Returns the loss −Σ coeff_h H_h, ``[*S, 1]``.

        Args:
            entropy: of the heads, nats, 0 where one does not count, ``[*S, H]``.
            total: its sum, ``[*S, 1]``.
        """
        coeff = self.coeff
        if coeff.ndim == 0:
            weight = self._weight if self._known else None
            return total * (-coeff if weight is None else weight)
        return -F.entropy_sum(entropy, coeff).unsqueeze(-1)


class AdvantageNorm(nn.Module):
    """Standardised advantage (A − mean) / max(std, 1e-6) over the valid entries.

    Args:
        per_agent: separate statistics per dim of ``S`` beyond the root batch (per agent).
        exclude_dims: further dims of the advantage ``[*S, 1]`` that keep separate statistics.
        pool_all: whether the statistics are the whole batch's where there is no agent dim to
            exclude: in a group, where ``S`` has no dim beyond the root batch, elsewhere where
            ``exclude_dims`` are all dims of ``S``.

    Shapes:
        ``[*S, 1]`` in units of return → ``[*S, 1]``, dimensionless.

    Raises:
        ShapeError: (call) a mask that does not fit the advantage.

    Source: Andrychowicz et al. 2020, arXiv 2006.05990, as ``functional.standardise``.
    """

    def __init__(
        self,
        *,
        per_agent: bool = False,
        exclude_dims: tuple[int, ...] = (),
        pool_all: bool = False,
    ) -> None:
        """Keeps the options."""
        super().__init__()
        self.pool_all = pool_all
        self.per_agent = per_agent
        self.exclude_dims = tuple(exclude_dims)

    def forward(
        self,
        advantage: Tensor,
        mask: Tensor | None,
        *,
        root_ndim: int,
        fresh_target: Tensor | None = None,
        in_group: bool = False,
    ) -> Tensor:
        """Returns the standardised advantage ``[*S, 1]``; 0 where masked."""
        kept = self.exclude_dims
        if self.pool_all and advantage.ndim - 1 <= (root_ndim if in_group else len(kept)):
            kept = ()
        if self.per_agent:
            named = {dim % advantage.ndim for dim in kept}
            kept = (*kept, *(d for d in range(root_ndim, advantage.ndim - 1) if d not in named))
        return F.standardise(advantage, mask, keep_dims=kept)


class AdvantageScale(nn.Module):
    """Advantage divided by the running scale of the value targets.

    Args:
        norm: a TorchRL ``ValueNorm``, updated in training mode with the valid value targets that
            the loss itself has just computed.
    """

    def __init__(self, norm: nn.Module) -> None:
        """Keeps the normaliser as a submodule."""
        super().__init__()
        self.norm = norm

    def forward(
        self,
        advantage: Tensor,
        mask: Tensor | None,
        *,
        root_ndim: int,
        fresh_target: Tensor | None = None,
        in_group: bool = False,
    ) -> Tensor:
        """Returns the scaled advantage ``[*S, 1]``."""
        if fresh_target is not None and self.training:
            self.norm.update(fresh_target.detach())  # type: ignore[operator]
        return advantage / self.norm.scale()  # type: ignore[operator]
