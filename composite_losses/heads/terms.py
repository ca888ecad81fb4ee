"""What a head contributes per sample: log-prob, entropy, KL — the interface and the fallback.

A family evaluates these straight from its parameters; whatever no family knows goes through the
methods of its own distribution object, with equal results.
"""

from __future__ import annotations

import abc
import warnings
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution, Independent, kl_divergence

HALF = (torch.float16, torch.bfloat16)


def in_float32(x: Tensor) -> Tensor:
    """Returns a half-precision tensor in float32: log-probs are never formed in half precision."""
    return x.float() if x.dtype in HALF else x


class Terms(abc.ABC):
    """Per-sample terms of one head's distribution.

    Attributes:
        batch_shape: shape of one log-prob.
        event_shape: shape that an action has beyond ``batch_shape``.
        playable: ``[*batch_shape]`` bool, False where an action mask forbids every action, or None.
        bounds: (low, high) of a bounded continuous support, or None.
        discrete: whether the actions are classes or counts.
        analytic: whether entropy and KL have a formula, so that nothing is sampled.
    """

    batch_shape: torch.Size
    event_shape: torch.Size
    playable: Tensor | None = None
    bounds: tuple[Tensor | float, Tensor | float] | None = None
    discrete: bool = False
    analytic: bool = True

    @abc.abstractmethod
    def log_prob(self, action: Tensor) -> Tensor:
        """Returns the log-prob of the action in nats, ``[*batch_shape]``."""

    @abc.abstractmethod
    def entropy(self, samples: int = 1) -> Tensor:
        """Returns the entropy in nats, ``[*batch_shape]``; ``samples`` where it is estimated."""

    @abc.abstractmethod
    def kl(self, other: Terms, samples: int = 1) -> Tensor:
        """Returns KL(self ‖ other) in nats, ``[*batch_shape]``."""

    @abc.abstractmethod
    def contains(self, action: Tensor) -> Tensor:
        """Returns where the action is in the support and not forbidden, ``[*batch_shape]``."""

    @abc.abstractmethod
    def neutral(self) -> Tensor | float:
        """Returns an action inside the support, for rows that do not count."""

    def kind(self, ndim: int) -> Hashable | None:
        """Returns what heads must share to be evaluated together, or None where one stands alone.

        Args:
            ndim: number of sample dims.
        """
        return None

    def stacked(self, heads: Sequence[Terms], dim: int) -> Terms:
        """Returns the terms of several heads of one kind, stacked at ``dim``."""
        raise TypeError(f"{type(self).__name__} stands alone")

    def alone(self) -> Terms:
        """Returns the terms for a head that is evaluated by itself: ``[*S]`` or ``[*S, 1]``."""
        return self

    def stackable(self, action: Tensor) -> Tensor:
        """Returns an action in the form, of equal shape, in which several heads' are stacked."""
        return action

    @abc.abstractmethod
    def mode(self) -> Tensor:
        """Returns the deterministic action, ``[*batch_shape, *event_shape]``."""


def monte_carlo_kl(p: Terms, q: Terms, sample: Tensor) -> Tensor:
    """Returns the estimate of KL(p ‖ q) from samples of p along dim 0, ``[*batch_shape]``."""
    return (p.log_prob(sample) - q.log_prob(sample)).mean(0)


class DistributionTerms(Terms):
    """The terms of any ``torch.distributions.Distribution``, through its own methods."""

    def __init__(self, distribution: Distribution) -> None:
        """Wraps the distribution; its own argument validation is left out of the hot path."""
        self.distribution = distribution
        self.batch_shape = distribution.batch_shape
        self.event_shape = distribution.event_shape
        if isinstance(distribution, Categorical):
            # one-hot variants subclass Categorical and keep its empty event shape
            self.event_shape = distribution.mode.shape[len(self.batch_shape) :]
        self.analytic = _has_entropy(distribution)
        origin = type(getattr(distribution, "base_dist", distribution)).__module__
        # elsewhere a formula may give NaN, which only a look at the values would show
        self.trusted = origin.partition(".")[0] in ("torch", "torchrl", "tensordict")
        support = _support(distribution)
        self.discrete = support is not None and support.is_discrete
        low, high = getattr(distribution, "low", None), getattr(distribution, "high", None)
        if isinstance(low, Tensor) and isinstance(high, Tensor):
            self.bounds = (low, high)

    def log_prob(self, action: Tensor) -> Tensor:
        """Returns ``distribution.log_prob(action)`` in nats, ``[*batch_shape]``."""
        return in_float32(_tensor(self.distribution.log_prob(action)))

    def entropy(self, samples: int = 1) -> Tensor:
        """Returns the analytic entropy, or −mean log p over samples where there is none.

        Samples are reparameterised where the distribution can; elsewhere the score function gives
        the gradient: ∇H = −E[log p ∇log p].
        """
        if self.analytic:
            try:
                value = in_float32(_tensor(self.distribution.entropy()))
                known = self.trusted or torch.compiler.is_compiling() or value.is_meta
                if known or bool(value.isfinite().all()):
                    return value
            except NotImplementedError:
                pass
        shape = torch.Size((samples,))
        if self.distribution.has_rsample:
            return -self.log_prob(self.distribution.rsample(shape)).mean(0)
        log_prob = self.log_prob(self.distribution.sample(shape))
        value = log_prob.detach()
        return -(value + (log_prob - value) * value).mean(0)

    def kl(self, other: Terms, samples: int = 1) -> Tensor:
        """Returns the registered KL, or its estimate from ``samples`` samples."""
        if isinstance(other, DistributionTerms):
            try:
                return in_float32(_tensor(kl_divergence(self.distribution, other.distribution)))
            except NotImplementedError:
                pass
        with torch.no_grad():
            sample = self.distribution.sample(torch.Size((samples,)))
        return monte_carlo_kl(self, other, sample)

    def contains(self, action: Tensor) -> Tensor:
        """Returns where the support or range holds the action, or it is finite: ``[*batch_shape]``.

        Finiteness counts where the distribution has neither.
        """
        support = _support(self.distribution)
        if self.bounds is not None:
            inside = (action >= self.bounds[0]) & (action <= self.bounds[1])
        else:
            inside = action.isfinite() if support is None else support.check(action)
        n = len(self.batch_shape)
        return inside if inside.ndim <= n else inside.flatten(n).all(-1)

    def neutral(self) -> Tensor | float:
        """Returns the detached mean where the support has a boundary, else 0."""
        if self.bounds is not None:
            return (self.bounds[0] + self.bounds[1]) / 2
        support = _support(self.distribution)
        if support is None or support.is_discrete or _is_real(support):
            return 0.0
        try:
            return _tensor(self.distribution.mean).detach()
        except (NotImplementedError, AttributeError):
            return 0.0

    def mode(self) -> Tensor:
        """Returns the deterministic sample: ``deterministic_sample``, else mode, else mean."""
        for name in ("deterministic_sample", "mode", "mean"):
            try:
                return _tensor(getattr(self.distribution, name))
            except (AttributeError, NotImplementedError, RuntimeError):
                continue
        raise NotImplementedError(f"{type(self.distribution).__name__} has no deterministic sample")


def _support(distribution: Distribution) -> torch.distributions.constraints.Constraint | None:
    """Returns the support, or None where the class does not say (or says it in error)."""
    try:
        return distribution.support
    except (NotImplementedError, TypeError, AttributeError):
        return None


def _is_real(support: torch.distributions.constraints.Constraint) -> bool:
    """Returns whether the support is the whole real line, per element."""
    inner = getattr(support, "base_constraint", support)
    return isinstance(inner, type(torch.distributions.constraints.real))


def _tensor(value: object) -> Tensor:
    """Returns the value, which a distribution must give as one tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"expected a tensor from the distribution, found {type(value).__name__}")
    return value


def _has_entropy(distribution: Distribution) -> bool:
    """Returns whether the class overrides ``Distribution.entropy``, ``Independent`` resolved."""
    if isinstance(distribution, Independent):
        return _has_entropy(distribution.base_dist)
    return type(distribution).entropy is not Distribution.entropy


def without_validation(distribution: Distribution) -> Distribution:
    """Returns the distribution with its argument checks off, bases included.

    The checks read values back from the device; the library's ``validate=True`` does them with a
    message that names the head.
    """
    node: object = distribution
    while isinstance(node, Distribution):
        node._validate_args = False
        node = getattr(node, "base_dist", None)
    return distribution


class Validation:
    """Context in which new distributions skip their argument checks; no effect under compile."""

    def __enter__(self) -> None:
        """Turns the default off."""
        self.previous = Distribution._validate_args
        if self.previous and not torch.compiler.is_compiling():
            Distribution.set_default_validate_args(False)

    def __exit__(self, *exc: object) -> None:
        """Restores the default."""
        if self.previous and not torch.compiler.is_compiling():
            Distribution.set_default_validate_args(True)


def quiet_mode(terms: Terms) -> Tensor:
    """Returns ``terms.mode()`` without the fall-back warnings of the distribution."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return terms.mode()
