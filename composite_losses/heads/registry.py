"""The family registry: from a distribution class, or an object, to its terms.

``FAMILIES`` maps an exact class to a builder that turns the constructor's keyword arguments into
terms, or returns None for options it does not know; ``INSTANCES`` does the same for a distribution
object. Only exact classes match, so a subclass that overrides a method never takes the fast path by
accident. Other layers register the classes of the libraries they import.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch import distributions as d
from torch.distributions.utils import probs_to_logits

from composite_losses.heads.categorical import CategoricalTerms
from composite_losses.heads.families import (
    BernoulliTerms,
    BetaTerms,
    DirichletTerms,
    ElementwiseTerms,
    GammaTerms,
    NormalTerms,
    TanhNormalTerms,
)
from composite_losses.heads.terms import DistributionTerms, Terms, Validation, without_validation

Builder = Callable[..., Terms | None]
FAMILIES: dict[Any, Builder] = {}
INSTANCES: dict[Any, Callable[[Any], Terms | None]] = {}


def full_scale(loc: Tensor, scale: Any) -> Tensor:
    """Returns a scale given as tensor, number or callable of ``loc`` as a tensor."""
    if isinstance(scale, Tensor):
        return scale
    if callable(scale):
        return full_scale(loc, scale(loc))
    return torch.full((), float(scale), dtype=loc.dtype, device=loc.device)


def normalised_logits(probs: Tensor) -> Tensor:
    """Returns the log-probs of unnormalised probabilities, clamped as torch.distributions does."""
    return probs_to_logits(probs / probs.sum(-1, keepdim=True))


def categorical(
    probs: Tensor | None = None,
    logits: Tensor | None = None,
    *,
    one_hot: bool = False,
    validate_args: bool | None = None,
) -> Terms | None:
    """Builds the terms of a categorical class from logits or probabilities."""
    if probs is None:
        return None if logits is None else CategoricalTerms(logits, one_hot=one_hot)
    if logits is not None:
        return None
    return CategoricalTerms(normalised_logits(probs), one_hot=one_hot, normalised=True)


def normal(loc: Tensor, scale: Any, *, validate_args: bool | None = None) -> Terms:
    """Builds the terms of an elementwise Normal."""
    return NormalTerms(loc, full_scale(loc, scale))


def bernoulli(
    probs: Tensor | None = None,
    logits: Tensor | None = None,
    *,
    validate_args: bool | None = None,
) -> Terms | None:
    """Builds the terms of an elementwise Bernoulli."""
    if probs is None:
        return None if logits is None else BernoulliTerms(logits)
    return BernoulliTerms(probs_to_logits(probs, is_binary=True)) if logits is None else None


def beta(
    concentration1: Any, concentration0: Any, *, validate_args: bool | None = None
) -> Terms | None:
    """Builds the terms of an elementwise Beta."""
    if not (isinstance(concentration1, Tensor) and isinstance(concentration0, Tensor)):
        return None
    return BetaTerms(concentration1, concentration0)


def gamma(concentration: Any, rate: Any, *, validate_args: bool | None = None) -> Terms | None:
    """Builds the terms of an elementwise Gamma."""
    if not isinstance(concentration, Tensor):
        return None
    return GammaTerms(concentration, full_scale(concentration, rate))


def dirichlet(concentration: Tensor, *, validate_args: bool | None = None) -> Terms:
    """Builds the terms of a Dirichlet."""
    return DirichletTerms(concentration, event_ndim=1)


def independent(distribution: Any) -> Terms | None:
    """Builds the terms of an ``Independent`` whose base is an elementwise family."""
    base = from_distribution(distribution.base_dist)
    extra = distribution.reinterpreted_batch_ndims
    if not isinstance(base, ElementwiseTerms):
        return None
    if isinstance(base, TanhNormalTerms):
        loc, scale = base.parameters
        return TanhNormalTerms(loc, scale, base.low, base.high, event_ndim=base.event_ndim + extra)
    return type(base)(*base.parameters, event_ndim=base.event_ndim + extra)


FAMILIES.update(
    {
        d.Categorical: categorical,
        d.OneHotCategorical: functools.partial(categorical, one_hot=True),
        d.Normal: normal,
        d.Bernoulli: bernoulli,
        d.Beta: beta,
        d.Gamma: gamma,
        d.Dirichlet: dirichlet,
    }
)
_OBJECTS: dict[Any, Callable[[Any], Terms | None]] = {
    d.Categorical: lambda x: CategoricalTerms(x.logits),
    d.OneHotCategorical: lambda x: CategoricalTerms(x.logits, one_hot=True),
    d.Normal: lambda x: NormalTerms(x.loc, x.scale),
    d.Bernoulli: lambda x: BernoulliTerms(x.logits),
    d.Beta: lambda x: BetaTerms(x.concentration1, x.concentration0),
    d.Gamma: lambda x: GammaTerms(x.concentration, x.rate),
    d.Dirichlet: lambda x: DirichletTerms(x.concentration, event_ndim=1),
    d.Independent: independent,
}
INSTANCES.update(_OBJECTS)


def from_distribution(distribution: d.Distribution) -> Terms:
    """Returns the terms of a distribution object: its family's formulas, else its own methods."""
    extract = INSTANCES.get(type(distribution))
    terms = None if extract is None else extract(distribution)
    return DistributionTerms(without_validation(distribution)) if terms is None else terms


def from_parameters(cls: Callable[..., Any], parameters: Mapping[str, Any]) -> Terms | None:
    """Returns the terms of ``cls(**parameters)`` if its family is known, without building it."""
    builder = FAMILIES.get(cls) if isinstance(cls, type) else None
    if builder is None or not _accepts(builder, parameters):
        return None
    return builder(**parameters)


def construct(cls: Callable[..., Any], parameters: Mapping[str, Any]) -> Any:
    """Returns ``cls(**parameters)`` without argument checks, for what no family knows."""
    inside = isinstance(cls, type) and cls.__module__.startswith("torch.distributions")
    if inside and "validate_args" not in parameters:
        return cls(**parameters, validate_args=False)
    with Validation():
        return cls(**parameters)


def _accepts(builder: Builder, parameters: Mapping[str, Any]) -> bool:
    """Returns whether the builder knows all keyword arguments."""
    function: Any = builder.func if isinstance(builder, functools.partial) else builder
    code = function.__code__
    known = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return "one_hot" not in parameters and all(map(known.__contains__, parameters))
