"""Families of independent elements, evaluated straight from their parameters, by formula."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from composite_losses.functional import distributions as formula
from composite_losses.functional import squashed
from composite_losses.heads.terms import Terms, in_float32


class ElementwiseTerms(Terms):
    """Terms of a family with independent elements; the last ``event_ndim`` dims are one action.

    Subclasses name their parameters in ``parameters`` and give the element formulas.
    """

    parameters: tuple[Tensor, ...]
    keepdim: bool = False

    def __init__(self, *parameters: Tensor, event_ndim: int = 0) -> None:
        """Takes the parameter tensors, which broadcast against each other."""
        self.parameters = parameters = tuple(in_float32(p) for p in parameters)
        shape = parameters[0].shape
        if any(p.shape != shape for p in parameters):
            shape = torch.broadcast_shapes(*(p.shape for p in parameters))
        self.event_ndim = event_ndim
        cut = len(shape) - event_ndim
        self.batch_shape, self.event_shape = shape[:cut], shape[cut:]

    def kind(self, ndim: int) -> Hashable | None:
        """Returns family, shape and dtype; a head whose batch has other dims stands alone."""
        if len(self.batch_shape) < ndim:
            return None
        extra = self._extra()
        if extra is None:
            return None
        dtype = self.parameters[0].dtype
        return (type(self), self.batch_shape, self.event_shape, dtype, extra)

    def _extra(self) -> tuple[Hashable, ...] | None:
        """Returns the further constants that heads of one kind share, or None if they cannot."""
        return ()

    def stacked(self, heads: Sequence[Terms], dim: int) -> Terms:
        """Returns the terms of several heads of equal shape."""
        members = [head for head in heads if isinstance(head, ElementwiseTerms)]
        sets = zip(*([head._expanded(p) for p in head.parameters] for head in members), strict=True)
        return self._like(*(torch.stack(tensors, dim) for tensors in sets))

    def _like(self, *parameters: Tensor) -> ElementwiseTerms:
        """Returns terms of this family with other parameters."""
        return type(self)(*parameters, event_ndim=self.event_ndim)

    def _sum(self, x: Tensor) -> Tensor:
        """Returns the elements' terms summed over the event dims."""
        if self.event_ndim == 0:
            return x
        if self.event_ndim > 1:
            x = x.flatten(-self.event_ndim)
        return x.sum(-1, keepdim=self.keepdim)

    def alone(self) -> Terms:
        """Returns these terms with the summed event dims kept as one of size 1."""
        if self.event_ndim == 0:
            return self
        out = object.__new__(type(self))
        out.__dict__.update(self.__dict__, keepdim=True)
        return out

    def _all(self, x: Tensor) -> Tensor:
        """Returns whether all elements of an action satisfy a condition."""
        return x.flatten(-self.event_ndim).all(-1) if self.event_ndim else x

    def _expanded(self, x: Tensor) -> Tensor:
        """Returns an elementwise term in the full shape, where parameters broadcast."""
        shape = self.batch_shape + self.event_shape
        return x if x.shape == shape else x.expand(shape)

    def _peer(self, other: Terms) -> tuple[Tensor, ...]:
        """Returns the parameters of the other policy, which must be of the same family."""
        if not isinstance(other, type(self)):
            raise TypeError(
                f"KL needs two policies of one family, found {type(self).__name__} and "
                f"{type(other).__name__}"
            )
        return other.parameters


class NormalTerms(ElementwiseTerms):
    """Terms of Normal(loc, scale)."""

    _log_scale: Tensor | None = None

    @property
    def log_scale(self) -> Tensor:
        """Log of the scale, computed once."""
        if self._log_scale is None:
            self._log_scale = self.parameters[1].log()
        return self._log_scale

    def log_prob(self, action: Tensor) -> Tensor:
        """Returns the Gaussian log-density."""
        loc, scale = self.parameters
        return self._sum(formula.normal_log_prob(loc, scale, action, self.log_scale))

    def entropy(self, samples: int = 1) -> Tensor:
        """Returns ½ log(2πe σ²), summed."""
        value = formula.normal_entropy(self.parameters[1], self.log_scale)
        return self._sum(self._expanded(value))

    def kl(self, other: Terms, samples: int = 1) -> Tensor:
        """Returns the Gaussian KL, summed."""
        return self._sum(formula.normal_kl(*self.parameters, *self._peer(other)))

    def contains(self, action: Tensor) -> Tensor:
        """Returns where the action is finite."""
        return self._all(action.isfinite())

    def neutral(self) -> Tensor | float:
        """Returns 0."""
        return 0.0

    def mode(self) -> Tensor:
        """Returns the mean."""
        return self._expanded(self.parameters[0])


class TanhNormalTerms(NormalTerms):
    """Terms of a Normal squashed by tanh to (low, high)."""

    def __init__(
        self,
        loc: Tensor,
        scale: Tensor,
        low: Tensor | float,
        high: Tensor | float,
        *,
        event_ndim: int = 0,
    ) -> None:
        """Takes the parameters before the squashing and the bounds after it."""
        super().__init__(loc, scale, event_ndim=event_ndim)
        self.low, self.high = low, high
        self.bounds = (low, high)

    def _extra(self) -> tuple[Hashable, ...] | None:
        """Returns the bounds where they are numbers."""
        if isinstance(self.low, Tensor) or isinstance(self.high, Tensor):
            return None
        return (self.low, self.high)

    def _like(self, *parameters: Tensor) -> ElementwiseTerms:
        """Returns terms with the same bounds and other parameters."""
        loc, scale = parameters
        return TanhNormalTerms(loc, scale, self.low, self.high, event_ndim=self.event_ndim)

    def log_prob(self, action: Tensor) -> Tensor:
        """Returns the log-density with the change of variables; finite at the bounds.

        Both terms are summed apart, as TorchRL does, so that a fresh ratio is exactly 1.
        """
        x = squashed.tanh_inverse(action, self.low, self.high)
        slope = self._sum(squashed.tanh_log_slope(x, self.low, self.high))
        loc, scale = self.parameters
        return self._sum(formula.normal_log_prob(loc, scale, x, self.log_scale)) - slope

    def entropy(self, samples: int = 1) -> Tensor:
        """Returns the entropy by quadrature: deterministic and differentiable."""
        loc, scale = self.parameters
        value = squashed.tanh_normal_entropy(loc, scale, self.low, self.high)
        return self._sum(self._expanded(value))

    def contains(self, action: Tensor) -> Tensor:
        """Returns where the action lies within the bounds."""
        return self._all((action >= self.low) & (action <= self.high))

    def neutral(self) -> Tensor | float:
        """Returns the middle of the range."""
        return (self.low + self.high) / 2

    def mode(self) -> Tensor:
        """Returns the squashed mean."""
        half = (self.high - self.low) / 2
        return self._expanded(self.parameters[0].tanh() * half + (self.high + self.low) / 2)


class BernoulliTerms(ElementwiseTerms):
    """Terms of Bernoulli(logits)."""

    discrete = True

    def log_prob(self, action: Tensor) -> Tensor:
        """Returns the log-prob of a 0/1 action."""
        (logits,) = self.parameters
        return self._sum(formula.bernoulli_log_prob(logits, action.to(logits.dtype)))

    def entropy(self, samples: int = 1) -> Tensor:
        """Returns the binary entropy, summed."""
        return self._sum(formula.bernoulli_entropy(*self.parameters))

    def kl(self, other: Terms, samples: int = 1) -> Tensor:
        """Returns the Bernoulli KL, summed."""
        return self._sum(formula.bernoulli_kl(*self.parameters, *self._peer(other)))

    def contains(self, action: Tensor) -> Tensor:
        """Returns where the action is 0 or 1."""
        return self._all((action == 0) | (action == 1))

    def neutral(self) -> float:
        """Returns 0."""
        return 0.0

    def mode(self) -> Tensor:
        """Returns 1 where it is the likelier outcome."""
        (logits,) = self.parameters
        return (logits > 0).to(logits.dtype)


class BetaTerms(ElementwiseTerms):
    """Terms of Beta(concentration1, concentration0)."""

    bounds = (0.0, 1.0)

    def log_prob(self, action: Tensor) -> Tensor:
        """Returns the log-density; finite at 0 and 1, where the clamp cuts the gradient."""
        alpha, beta = self.parameters
        eps = torch.finfo(action.dtype).eps
        return self._sum(formula.beta_log_prob(alpha, beta, action.clamp(eps, 1 - eps)))

    def entropy(self, samples: int = 1) -> Tensor:
        """Returns the differential entropy, summed."""
        return self._sum(formula.beta_entropy(*self.parameters))

    def kl(self, other: Terms, samples: int = 1) -> Tensor:
        """Returns the Beta KL, summed."""
        return self._sum(formula.beta_kl(*self.parameters, *self._peer(other)))

    def contains(self, action: Tensor) -> Tensor:
        """Returns where the action lies in [0, 1]."""
        return self._all((action >= 0) & (action <= 1))

    def neutral(self) -> float:
        """Returns ½."""
        return 0.5

    def mode(self) -> Tensor:
        """Returns the mean, which exists for every parameter, unlike the mode."""
        alpha, beta = self.parameters
        return alpha / (alpha + beta)


class GammaTerms(ElementwiseTerms):
    """Terms of Gamma(concentration, rate)."""

    def log_prob(self, action: Tensor) -> Tensor:
        """Returns the log-density."""
        concentration, rate = self.parameters
        return self._sum(formula.gamma_log_prob(concentration, rate, action))

    def entropy(self, samples: int = 1) -> Tensor:
        """Returns the differential entropy, summed."""
        return self._sum(self._expanded(formula.gamma_entropy(*self.parameters)))

    def kl(self, other: Terms, samples: int = 1) -> Tensor:
        """Returns the Gamma KL, summed."""
        return self._sum(formula.gamma_kl(*self.parameters, *self._peer(other)))

    def contains(self, action: Tensor) -> Tensor:
        """Returns where the action is not negative."""
        return self._all(action >= 0)

    def neutral(self) -> float:
        """Returns 1."""
        return 1.0

    def mode(self) -> Tensor:
        """Returns the mean."""
        concentration, rate = self.parameters
        return concentration / rate


class DirichletTerms(ElementwiseTerms):
    """Terms of Dirichlet(concentration): one simplex per action, ``event_ndim`` ≥ 1."""

    def _outer(self, x: Tensor) -> Tensor:
        """Returns per-simplex terms summed over the event dims before the simplex."""
        x = x.flatten(1 - self.event_ndim).sum(-1) if self.event_ndim > 1 else x
        return x.unsqueeze(-1) if self.keepdim else x

    def log_prob(self, action: Tensor) -> Tensor:
        """Returns the log-density on the simplex; finite at its border."""
        (concentration,) = self.parameters
        eps = torch.finfo(action.dtype).eps
        return self._outer(formula.dirichlet_log_prob(concentration, action.clamp(min=eps)))

    def entropy(self, samples: int = 1) -> Tensor:
        """Returns the differential entropy."""
        return self._outer(formula.dirichlet_entropy(*self.parameters))

    def kl(self, other: Terms, samples: int = 1) -> Tensor:
        """Returns the Dirichlet KL."""
        return self._outer(formula.dirichlet_kl(*self.parameters, *self._peer(other)))

    def contains(self, action: Tensor) -> Tensor:
        """Returns where the action is a point of the simplex, to 1e-4."""
        inside = (action >= 0).all(-1) & ((action.sum(-1) - 1).abs() < 1e-4)
        return inside.flatten(1 - self.event_ndim).all(-1) if self.event_ndim > 1 else inside

    def neutral(self) -> float:
        """Returns the middle of the simplex."""
        return 1.0 / self.parameters[0].shape[-1]

    def mode(self) -> Tensor:
        """Returns the mean."""
        (concentration,) = self.parameters
        return concentration / concentration.sum(-1, keepdim=True)
