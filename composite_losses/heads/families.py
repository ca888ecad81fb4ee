"""Families: terms evaluated straight from a distribution's parameters, by formula."""

from __future__ import annotations

import torch
from torch import Tensor

from composite_losses.functional import distributions as formula
from composite_losses.heads.terms import Terms, in_float32


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
        """Normalises the logits once, for log-prob, entropy and KL alike."""
        logits = in_float32(logits)
        self.classes = logits.shape[-1]
        self.allowed = None if allowed is None else allowed.expand(logits.shape)
        self.log_probs = (
            logits if normalised else formula.categorical_log_probs(logits, self.allowed)
        )
        self.one_hot = one_hot
        self.batch_shape = logits.shape[:-1]
        self.event_shape = logits.shape[-1:] if one_hot else torch.Size()
        self.playable = None if self.allowed is None else self.allowed.any(-1)

    def _index(self, action: Tensor) -> Tensor:
        """Returns the class index of an action, ``[..., *batch]``."""
        return action.argmax(-1) if self.one_hot else action.long()

    def log_prob(self, action: Tensor) -> Tensor:
        """Returns the log-prob of the stored class."""
        index = self._index(action).unsqueeze(-1)
        log_probs = self.log_probs.expand(*index.shape[:-1], self.classes)
        return log_probs.gather(-1, index).squeeze(-1)

    def entropy(self, samples: int = 1) -> Tensor:
        """Returns −Σ p log p over the allowed classes."""
        return -(self.log_probs.exp() * self.log_probs).sum(-1)

    def kl(self, other: Terms, samples: int = 1) -> Tensor:
        """Returns Σ p (log p − log q)."""
        if not isinstance(other, CategoricalTerms):
            raise TypeError("KL of a categorical head needs two categorical policies")
        return (self.log_probs.exp() * (self.log_probs - other.log_probs)).sum(-1)

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
        index = self.log_probs.argmax(-1)
        return torch.nn.functional.one_hot(index, self.classes) if self.one_hot else index


class ElementwiseTerms(Terms):
    """Terms of a family with independent elements; the last ``event_ndim`` dims are one action.

    Subclasses name their parameters in ``parameters`` and give the element formulas.
    """

    parameters: tuple[Tensor, ...]

    def __init__(self, *parameters: Tensor, event_ndim: int = 0) -> None:
        """Takes the parameter tensors, which broadcast against each other."""
        self.parameters = parameters = tuple(in_float32(p) for p in parameters)
        shape = torch.broadcast_shapes(*(p.shape for p in parameters))
        self.event_ndim = event_ndim
        cut = len(shape) - event_ndim
        self.batch_shape, self.event_shape = shape[:cut], shape[cut:]

    def _sum(self, x: Tensor) -> Tensor:
        """Returns the elements' terms summed over the event dims."""
        if self.event_ndim == 0:
            return x
        return x.sum(-1) if self.event_ndim == 1 else x.flatten(-self.event_ndim).sum(-1)

    def _all(self, x: Tensor) -> Tensor:
        """Returns whether all elements of an action satisfy a condition."""
        return x.flatten(-self.event_ndim).all(-1) if self.event_ndim else x

    def _expanded(self, x: Tensor) -> Tensor:
        """Returns an elementwise term in the full shape, where parameters broadcast."""
        return x.expand(self.batch_shape + self.event_shape)

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

    def log_prob(self, action: Tensor) -> Tensor:
        """Returns the Gaussian log-density."""
        loc, scale = self.parameters
        return self._sum(formula.normal_log_prob(loc, scale, action))

    def entropy(self, samples: int = 1) -> Tensor:
        """Returns ½ log(2πe σ²), summed."""
        return self._sum(self._expanded(formula.normal_entropy(self.parameters[1])))

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

    def log_prob(self, action: Tensor) -> Tensor:
        """Returns the log-density with the change of variables; finite at the bounds.

        Both terms are summed apart, as TorchRL does, so that a fresh ratio is exactly 1.
        """
        x = formula.tanh_inverse(action, self.low, self.high)
        slope = self._sum(formula.tanh_log_slope(x, self.low, self.high))
        return self._sum(formula.normal_log_prob(*self.parameters, x)) - slope

    def entropy(self, samples: int = 1) -> Tensor:
        """Returns the entropy by quadrature: deterministic and differentiable."""
        loc, scale = self.parameters
        value = formula.tanh_normal_entropy(loc, scale, self.low, self.high)
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
        return x.flatten(1 - self.event_ndim).sum(-1) if self.event_ndim > 1 else x

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
