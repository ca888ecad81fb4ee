"""Surrogate parts: the policy objective of a loss, with the options it owns.

A surrogate is a module whose ``forward(samples)`` returns the objective to maximise, ``[*S, 1]``.
Its coefficients are buffers: they follow ``.to()``, live in the ``state_dict``, can be scheduled in
place and do not recompile a compiled loss.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from composite_losses import functional as F
from composite_losses.errors import ConfigError
from composite_losses.heads import HeadPlan
from composite_losses.losses._options import eps_pair, head_position, plain, scalar
from composite_losses.losses.samples import Samples

GEOMETRIES = ("joint", "per_head", "leafwise", "mixed")
Eps = float | Tensor | tuple[float, float]


class Surrogate(nn.Module, abc.ABC):
    """The policy objective of a loss.

    Attributes:
        uses_ratio: whether the behaviour log-prob is read.
        uses_heads: whether a log-prob per head is needed, so that a joint one does not serve.
        uses_kl: whether KL(old ‖ new) is computed from stored parameters.
    """

    uses_ratio: bool = True
    uses_heads: bool = False
    uses_kl: bool = False

    def bind(self, plan: HeadPlan) -> None:
        """Resolves options given per head against the actor's heads."""

    @abc.abstractmethod
    def forward(self, samples: Samples) -> Tensor:
        """Returns the objective to maximise, ``[*S, 1]``; gradient: the current log-prob."""

    def clipped(self, samples: Samples) -> Tensor:
        """Returns 1 where the surrogate clips: ``[*S, 1]``, or ``[*S, H]`` with a clip per head."""
        return torch.zeros_like(samples.joint_log_ratio)

    def head_clipped(self, samples: Samples) -> Tensor:
        """Returns 1 where each head's ratio is beyond its clip bounds, ``[*S, H]``."""
        return torch.zeros_like(samples.log_prob)

    def reports(self, samples: Samples) -> dict[str, Tensor]:
        """Returns additional 0-dim outputs of this surrogate."""
        return {}

    @property
    def report_keys(self) -> tuple[str, ...]:
        """Names of the additional outputs."""
        return ()


class Ratio(Surrogate):
    """The unclipped importance-weighted objective r·A, ``[*S, 1]``, in units of return.

    Raises:
        RuntimeError: (call) the samples have no log-ratio.

    Source: Schulman et al. 2017, eq. (6), arXiv 1707.06347.
    """

    def forward(self, samples: Samples) -> Tensor:
        """Returns Π r_h · A, ``[*S, 1]``."""
        return samples.ratio * samples.advantage


class Score(Surrogate):
    """The score-function objective log π(a)·A, ``[*S, 1]``, in nats times units of return.

    No behaviour log-prob is read.

    Raises:
        ShapeError: (call) an advantage that is not ``[*S, 1]``.

    Source: Williams 1992, Machine Learning 8.
    """

    uses_ratio = False

    def forward(self, samples: Samples) -> Tensor:
        """Returns Σ log π_h(a_h) · A, ``[*S, 1]``."""
        log_prob = samples.log_prob
        joint = log_prob if log_prob.shape[-1] == 1 else log_prob.sum(-1, keepdim=True)
        return F.score(joint, samples.advantage)


class Clip(Surrogate):
    """The clipped objective, ``[*S, 1]``, in units of return; four geometries for several heads.

    With P(r, A) = min(r A, clip(r) A), clip(r) = r kept in [1 − low, 1 + high]:

    * ``"joint"``: P(Π r_h, A); the product is clipped.
    * ``"per_head"``: Σ w_h P(r_h, A_h); every head has its own clip.
    * ``"leafwise"``: min(Π r_h A, Π clip(r_h) A); every ratio is clamped, then multiplied.
    * ``"mixed"``: mix · joint + (1 − mix) · per_head.

    Args:
        eps: clip range ≥ 0: a number, a pair (low, high) for [1−low, 1+high] with low < 1, or
            (``per_head`` and ``leafwise``) a mapping head → number or pair, 0.2 for heads it does
            not name.
        ratio: the geometry.
        mix: weight of the joint term in ``"mixed"``, in [0, 1].
        dual_clip: c > 1 bounds the objective by c·A where A < 0.
        head_weights: mapping head → w_h, dimensionless, for ``per_head`` and ``mixed``; 1 for
            heads it does not name.

    Raises:
        ConfigError: an option out of its range, or one that the geometry does not use.

    Source: Schulman et al. 2017, eq. (7), arXiv 1707.06347; ``dual_clip``: Ye et al. 2020, arXiv
    1912.09729; the geometries for several heads: definition.
    """

    eps_low: Tensor
    eps_high: Tensor | None
    mix: Tensor
    dual_clip: Tensor | None
    head_weights: Tensor | None

    def __init__(
        self,
        eps: Eps | Mapping[Any, Eps] = 0.2,
        *,
        ratio: str = "joint",
        mix: float = 0.5,
        dual_clip: float | None = None,
        head_weights: Mapping[Any, float] | None = None,
    ) -> None:
        """Validates the options and registers them as buffers."""
        super().__init__()
        if ratio not in GEOMETRIES:
            raise ConfigError(f"ratio: expected one of {GEOMETRIES}, found {ratio!r}.")
        self.ratio = ratio
        self.uses_heads = ratio != "joint"
        self.asymmetric = isinstance(eps, Sequence)
        self._eps_by_head = plain(eps) if isinstance(eps, Mapping) else None
        if self._eps_by_head is not None and ratio not in ("per_head", "leafwise"):
            raise ConfigError(
                f"eps: a mapping by head needs ratio='per_head' or 'leafwise', found {ratio!r}."
            )
        first: Any = 0.2 if isinstance(eps, Mapping) else eps
        low, high = eps_pair(first)
        for value in (self._eps_by_head or {}).values():
            eps_pair(value)
        mix_value = float(scalar("mix", mix))
        if not 0.0 <= mix_value <= 1.0:
            raise ConfigError(f"mix: expected a number in [0, 1], found {mix}.")
        if dual_clip is not None and not float(scalar("dual_clip", dual_clip)) > 1.0:
            raise ConfigError(f"dual_clip: expected a number > 1, found {dual_clip}.")
        self._bounds: Any = None
        self._weights_by_head = None if head_weights is None else dict(head_weights)
        if self._weights_by_head is not None and ratio not in ("per_head", "mixed"):
            raise ConfigError(f"head_weights: needs ratio='per_head' or 'mixed', found {ratio!r}.")
        self.register_buffer("eps_low", low)
        # one buffer where both bounds are one number, so that scheduling it moves both
        self.register_buffer("eps_high", high if self.asymmetric else None)
        self.register_buffer("mix", torch.tensor(mix_value))
        self.register_buffer(
            "dual_clip", None if dual_clip is None else torch.tensor(float(dual_clip))
        )
        self.register_buffer("head_weights", None)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Applies a conversion, after which the clip interval is computed anew."""
        self._bounds = None
        return super()._apply(fn, recurse)

    def bind(self, plan: HeadPlan) -> None:
        """Turns mappings by head into one buffer element per head."""
        n = len(plan.heads)
        device = self.eps_low.device
        if self._eps_by_head is not None and self.eps_low.ndim == 0:
            low, high = self.eps_low.expand(n).clone(), self.upper.expand(n).clone()
            for key, value in self._eps_by_head.items():
                position = head_position(plan, key, "eps")
                low[position], high[position] = eps_pair(value)
            self.eps_low, self.eps_high = low, high
        if self._weights_by_head is not None and self.head_weights is None:
            weights = torch.ones(n, device=device)
            for key, weight in self._weights_by_head.items():
                weights[head_position(plan, key, "head_weights")] = float(weight)
            self.head_weights = weights

    @property
    def upper(self) -> Tensor:
        """The upper clip range."""
        return self.eps_low if self.eps_high is None else self.eps_high

    def log_bounds(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns the clip interval as log-ratios and as ratios, anew where eps was written."""
        low, high = self.eps_low, self.upper
        if torch.compiler.is_compiling() or low.device.type == "meta":
            return _log_bounds(low, high, dtype)
        state = (low._version, high._version, dtype, low.device)
        known = self._bounds
        if known is None or known[0] is not low or known[1] is not high or known[2] != state:
            self._bounds = known = (low, high, state, _log_bounds(low, high, dtype))
        return cast(tuple[Tensor, Tensor, Tensor, Tensor], known[3])

    def forward(self, samples: Samples) -> Tensor:
        """Returns the clipped objective, ``[*S, 1]``."""
        if self.ratio == "joint":
            return self._joint(samples)
        if self.ratio == "per_head":
            return self._per_head(samples)
        if self.ratio == "leafwise":
            correction = samples.joint_correction
            return F.leafwise(
                cast(Tensor, samples.log_ratio),
                samples.advantage.squeeze(-1),
                self.eps_low,
                self.upper,
                dual_clip=self.dual_clip,
                log_correction=None if correction is None else correction.squeeze(-1),
            ).unsqueeze(-1)
        return self.mix * self._joint(samples) + (1 - self.mix) * self._per_head(samples)

    def _clipped_log_ratio(self, log_ratio: Tensor) -> Tensor:
        """Returns log-ratios within the clip bounds."""
        low, high = self.log_bounds(log_ratio.dtype)[:2]
        return torch.clamp(log_ratio, low, high)

    def _joint(self, samples: Samples) -> Tensor:
        """Returns P of the product of the ratios."""
        advantage = samples.advantage
        gain, correction = samples.ratio * advantage, samples.joint_correction
        # The clipped gain is the smaller one only beyond the clip bounds, where it is a constant.
        with torch.no_grad():
            clipped = self._clipped_ratio(samples, correction)
            clipped_gain = clipped * advantage
            clips = clipped_gain < gain
            if correction is None:
                samples.remember("clipped", clipped.ne_(samples.ratio))  # 0 or 1, in its dtype
        objective = torch.where(clips, clipped_gain, gain)
        if self.dual_clip is None:
            return objective
        lowest = self.dual_clip * advantage
        return torch.where(advantage < 0, torch.maximum(objective, lowest), objective)

    def _clipped_ratio(self, samples: Samples, correction: Tensor | None) -> Tensor:
        """Returns the joint ratio within the clip bounds, ``[*S, 1]``."""
        if correction is not None:
            within = self._clipped_log_ratio(samples.joint_log_ratio)
            return F.ratio(within + correction)
        low, high = self.log_bounds(samples.ratio.dtype)[2:]
        return torch.clamp(samples.ratio, low, high)

    def _per_head(self, samples: Samples) -> Tensor:
        """Returns the weighted sum of P of every head's ratio."""
        log_ratio = cast(Tensor, samples.log_ratio)
        return F.per_head(
            log_ratio,
            samples.advantage.expand_as(log_ratio),
            self.eps_low,
            self.upper,
            weights=self.head_weights,
            active=samples.active,
            dual_clip=self.dual_clip,
            log_correction=samples.head_correction,
        ).unsqueeze(-1)

    def clipped(self, samples: Samples) -> Tensor:
        """Returns 1 where a row's joint ratio, any of its heads', or each head's is clipped."""
        if self.ratio == "per_head":
            return self.head_clipped(samples)
        if self.ratio == "leafwise":
            return self.head_clipped(samples).amax(-1, keepdim=True)
        known = samples.remembered("clipped")
        if known is not None:
            return known
        joint = samples.joint_log_ratio
        return self._clipped_log_ratio(joint).ne_(joint)

    def head_clipped(self, samples: Samples) -> Tensor:
        """Returns 1 where each head's ratio is beyond its clip bounds, ``[*S, H]``."""
        log_ratio = cast(Tensor, samples.log_ratio)
        return self._clipped_log_ratio(log_ratio).ne_(log_ratio)


def _log_bounds(
    low: Tensor, high: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the clip interval of a dtype, as log-ratios and as ratios."""
    with torch.no_grad():
        lower, upper = (bound.to(dtype) for bound in F.log_clip_bounds(low, high))
        return lower, upper, lower.exp(), upper.exp()


class KLPenalty(Surrogate):
    """r·A − β KL(old ‖ new) with an adapted β, ``[*S, 1]``, in units of return.

    β acts, and is reported, before its adaptation: β ← β·increment where the mean KL exceeds
    1.5·target, β·decrement where it is below target/1.5; in training mode only, and only where a
    row counts. KL is in nats.

    Args:
        beta: initial penalty coefficient, in units of the objective per nat.
        target: KL to aim for, in nats.
        increment: factor ≥ 1.
        decrement: factor ≤ 1.

    Raises:
        ConfigError: a factor on the wrong side of 1.
        RuntimeError: (call) the samples have no log-ratio.

    Source: Schulman et al. 2017, section 4, arXiv 1707.06347.
    """

    uses_kl = True
    # samples where the KL has no formula; None takes the entropy term's
    samples: int | None = None
    beta: Tensor
    target: Tensor
    increment: Tensor
    decrement: Tensor

    def __init__(
        self,
        beta: float = 1.0,
        *,
        target: float = 0.01,
        increment: float = 2.0,
        decrement: float = 0.5,
    ) -> None:
        """Validates the options and registers them as buffers."""
        super().__init__()
        if increment < 1.0:
            raise ConfigError(f"increment should be >= 1.0 in KLPENPPOLoss, got {increment:4.4f}")
        if decrement > 1.0:
            raise ConfigError(f"decrement should be <= 1.0 in KLPENPPOLoss, got {decrement:4.4f}")
        self.initial_beta = float(beta)
        for name, value in (
            ("beta", beta),
            ("target", target),
            ("increment", increment),
            ("decrement", decrement),
        ):
            self.register_buffer(name, scalar(name, value).clone())

    def forward(self, samples: Samples) -> Tensor:
        """Returns Π r_h · A − β Σ KL_h, ``[*S, 1]``."""
        objective = samples.ratio * samples.advantage
        # A copy: the adaptation changes β before the backward pass reads it. It is made by a
        # reduction, because a compiled graph recomputes a plain clone from the changed buffer.
        return objective - self.beta.expand(8).amax() * cast(Tensor, samples.kl)

    def reports(self, samples: Samples) -> dict[str, Tensor]:
        """Returns ``kl`` and ``beta`` as they acted, then adapts β in training mode."""
        kl = F.masked_mean(cast(Tensor, samples.kl).detach(), samples.row_mask)
        beta = self.beta.clone()
        if self.training:
            grown = torch.where(kl > self.target * 1.5, beta * self.increment, beta)
            adapted = torch.where(kl < self.target / 1.5, beta * self.decrement, grown)
            if samples.mask is not None:
                adapted = torch.where(samples.mask.any(), adapted, beta)
            with torch.no_grad():
                self.beta.copy_(adapted)
        return {"kl": kl, "beta": beta}

    @property
    def report_keys(self) -> tuple[str, ...]:
        """Names of the additional outputs."""
        return ("kl", "beta")

    def reset(self) -> None:
        """Sets β back to its initial value."""
        with torch.no_grad():
            self.beta.fill_(self.initial_beta)
