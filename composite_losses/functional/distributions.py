"""Log-probs, entropies and divergences as formulas on distribution parameters, in nats.

Elementwise unless stated: parameters and values broadcast against each other like in torch
arithmetic, and event dims are summed by the caller. Gradient goes to every floating-point parameter
and to ``value``. ``kl`` is the Kullback-Leibler divergence ``KL(p || q)``. Sources where none is
given: the density itself, and for the divergences Gil, Alajaji and Linder 2013, "Renyi divergence
measures for commonly used univariate continuous distributions", Information Sciences 249.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from composite_losses.functional.shapes import require_same_shape

_LOG_SQRT_2PI = math.log(math.sqrt(2 * math.pi))


def normal_log_prob(
    loc: Tensor, scale: Tensor, value: Tensor, log_scale: Tensor | None = None
) -> Tensor:
    """The log-density of a normal distribution at ``value``, nats.

    ``-(value - loc)^2 / (2 scale^2) - log scale - log(2 pi) / 2``, rounded where
    ``torch.distributions.Normal`` rounds, so that a fresh ratio is exactly 1.

    Args:
        loc: any shape.
        scale: positive, in the units of ``value``.
        value: where the density is taken.
        log_scale: ``log(scale)``, where the caller has it.

    Source: definition of the density.
    """
    log_scale = scale.log() if log_scale is None else log_scale
    # Halving is exact, and so is a change of sign.
    negative = torch.addcdiv(log_scale, (value - loc) ** 2, scale**2, value=0.5)
    return torch.rsub(negative, -_LOG_SQRT_2PI)


def normal_entropy(scale: Tensor, log_scale: Tensor | None = None) -> Tensor:
    """The differential entropy ``1/2 + log(2 pi) / 2 + log scale`` of a normal distribution, nats.

    Args:
        scale: positive, any shape.
        log_scale: ``log(scale)``, where the caller has it.

    Source: Cover and Thomas 2006, "Elements of information theory", ch. 8.
    """
    return (0.5 + _LOG_SQRT_2PI) + (scale.log() if log_scale is None else log_scale)


def normal_kl(loc_p: Tensor, scale_p: Tensor, loc_q: Tensor, scale_q: Tensor) -> Tensor:
    """The divergence of two normal distributions, nats; any shape.

    ``(v + ((loc_p - loc_q) / scale_q)^2 - 1 - log v) / 2`` with ``v = (scale_p / scale_q)^2``. Also
    the divergence of two tanh-normals with equal bounds: a bijection leaves it unchanged.

    Source: Gil, Alajaji and Linder 2013, Information Sciences 249; Kullback and Leibler 1951.
    """
    variance_ratio = (scale_p / scale_q).square()
    return 0.5 * (variance_ratio + ((loc_p - loc_q) / scale_q).square() - 1 - variance_ratio.log())


def categorical_log_probs(logits: Tensor, allowed: Tensor | None = None) -> Tensor:
    """The normalised log-probs of all entries, ``[..., n]``, nats.

    ``logits - log sum_j exp(logits_j)``, the sum over the allowed entries j.
    An entry is forbidden where ``allowed`` is False or the logit is -inf. There the result is the
    most negative finite number, and the gradient exactly 0, also where a whole row is forbidden:
    -inf would turn into NaN in products with 0. A NaN logit stays NaN.

    Args:
        logits: ``[..., n]``, unnormalised.
        allowed: bool ``[..., n]``; ``None``: all.

    Gradient goes to allowed logits.

    Raises:
        ShapeError: if ``allowed`` has not the shape of ``logits``.

    Source: Huang and Ontanon 2020, "A closer look at invalid action masking in policy
    gradient algorithms", arXiv 2006.14171.
    """
    counts = logits != -torch.inf
    if allowed is not None:
        require_same_shape(logits=logits, allowed=allowed)
        counts = counts & allowed
    lowest = torch.finfo(logits.dtype).min
    # Selected before the softmax for the gradient, and after it because `lowest - log_sum` may
    # round to -inf.
    normalised = torch.log_softmax(torch.where(counts, logits, lowest), -1)
    return torch.where(counts, normalised, lowest)


def _lowest_logit(dtype: torch.dtype) -> float:
    # Weighs nothing, and does not overflow in sums or in the product with a (scaled) gradient.
    return -math.sqrt(torch.finfo(dtype).max)


def bounded_log_probs(
    logits: Tensor, allowed: Tensor | None = None, *, normalised: bool = False, dim: int = -1
) -> Tensor:
    """The normalised log-probs ``[..., n]``, nats, finite for forbidden entries, in few operations.

    As :func:`categorical_log_probs`, but a forbidden entry has minus the square root of the largest
    number, and a row where nothing is allowed is uniform (without gradient): for callers that drop
    such rows.

    Args:
        logits: ``[..., n]``, unnormalised unless ``normalised``.
        allowed: bool ``[..., n]``; ``None``: all.
        normalised: whether ``logits`` are log-probs already.
        dim: where the entries run, if not along the last dim.

    Gradient goes to allowed logits.

    Source: as :func:`categorical_log_probs`.
    """
    floor = _lowest_logit(logits.dtype)
    if allowed is not None:
        logits = logits.masked_fill(~allowed, floor)
    logits = logits.clamp(min=floor)
    return logits if normalised else logits.log_softmax(dim)


def categorical_log_prob(logits: Tensor, index: Tensor, allowed: Tensor | None = None) -> Tensor:
    """The log-prob of the chosen entry, ``[...]``, nats; see :func:`categorical_log_probs`.

    Args:
        logits: ``[..., n]``, unnormalised.
        index: integer ``[...]``, in [0, n).
        allowed: bool ``[..., n]``; ``None``: all.

    Raises:
        ShapeError: if ``index`` has not the leading shape of ``logits``, or ``allowed`` not its
            shape.

    Source: as :func:`categorical_log_probs`.
    """
    require_same_shape(leading_logits=logits[..., 0], index=index)
    log_probs = categorical_log_probs(logits, allowed)
    return log_probs.gather(-1, index.long().unsqueeze(-1)).squeeze(-1)


def categorical_entropy(logits: Tensor, allowed: Tensor | None = None) -> Tensor:
    """The entropy ``-sum_j p_j log p_j`` over the allowed entries, ``[...]``, nats.

    0 with zero gradient where nothing is allowed.

    Args:
        logits: ``[..., n]``, unnormalised.
        allowed: bool ``[..., n]``; ``None``: all.

    Raises:
        ShapeError: if ``allowed`` has not the shape of ``logits``.

    Source: Cover and Thomas 2006, "Elements of information theory", ch. 2.
    """
    log_probs = categorical_log_probs(logits, allowed)
    return -(log_probs.exp() * log_probs).sum(-1)


def categorical_kl(
    logits_p: Tensor,
    logits_q: Tensor,
    allowed_p: Tensor | None = None,
    allowed_q: Tensor | None = None,
) -> Tensor:
    """The divergence ``sum_j p_j (log p_j - log q_j)``, ``[...]``, nats.

    Very large but finite where q forbids what p allows.

    Args:
        logits_p: ``[..., n]``, unnormalised.
        logits_q: the same shape.
        allowed_p: bool ``[..., n]``; ``None``: all.
        allowed_q: likewise.

    Raises:
        ShapeError: if the shapes differ.

    Source: Cover and Thomas 2006, "Elements of information theory", ch. 2.
    """
    require_same_shape(logits_p=logits_p, logits_q=logits_q)
    log_p = categorical_log_probs(logits_p, allowed_p)
    return (log_p.exp() * (log_p - categorical_log_probs(logits_q, allowed_q))).sum(-1)


def bernoulli_log_prob(logits: Tensor, value: Tensor) -> Tensor:
    """The log-prob of ``value``, nats, accurate for large logits.

    ``value log sigmoid(logits) + (1 - value) log sigmoid(-logits)``

    Args:
        logits: any shape.
        value: 0 or 1, of any dtype.

    Source: definition.
    """
    logits, value = torch.broadcast_tensors(logits, value.to(logits.dtype))
    return -F.binary_cross_entropy_with_logits(logits, value, reduction="none")


def bernoulli_entropy(logits: Tensor) -> Tensor:
    """The entropy ``-p log p - (1 - p) log(1 - p)``, nats; any shape.

    ``softplus(-|x|) + |x| sigmoid(-|x|)`` for x the ``logits``, which has no cancellation.

    Source: Cover and Thomas 2006, "Elements of information theory", ch. 2.
    """
    size = logits.abs()
    return F.softplus(-size) + size * torch.sigmoid(-size)


def bernoulli_kl(logits_p: Tensor, logits_q: Tensor) -> Tensor:
    """The divergence ``p (log p - log q) + (1 - p) (log(1 - p) - log(1 - q))``, nats; any shape.

    With ``p = sigmoid(logits_p)``, ``q = sigmoid(logits_q)``; ``-log p = softplus(-logits_p)``.

    Source: Cover and Thomas 2006, "Elements of information theory", ch. 2.
    """
    one = torch.sigmoid(logits_p) * (F.softplus(-logits_q) - F.softplus(-logits_p))
    zero = torch.sigmoid(-logits_p) * (F.softplus(logits_q) - F.softplus(logits_p))
    return one + zero


def beta_log_prob(concentration1: Tensor, concentration0: Tensor, value: Tensor) -> Tensor:
    """The log-density of a beta distribution at x in (0, 1), the ``value``, nats; any shape.

    ``(a - 1) log x + (b - 1) log(1 - x) - log B(a, b)``, with ``a = concentration1``,
    ``b = concentration0``.

    Source: definition of the density.
    """
    log_low: Tensor = torch.xlogy(concentration1 - 1, value)
    log_high: Tensor = torch.special.xlog1py(concentration0 - 1, -value)
    return log_low + log_high - _log_beta(concentration1, concentration0)


def beta_entropy(concentration1: Tensor, concentration0: Tensor) -> Tensor:
    """The differential entropy of a beta distribution, nats; any shape.

    ``log B(a, b) - (a - 1) psi(a) - (b - 1) psi(b) + (a + b - 2) psi(a + b)``, with
    ``a = concentration1``, ``b = concentration0`` and psi the digamma function.

    Source: Cover and Thomas 2006, "Elements of information theory", ch. 8.
    """
    total = concentration1 + concentration0
    return (
        _log_beta(concentration1, concentration0)
        - (concentration1 - 1) * torch.digamma(concentration1)
        - (concentration0 - 1) * torch.digamma(concentration0)
        + (total - 2) * torch.digamma(total)
    )


def beta_kl(
    concentration1_p: Tensor,
    concentration0_p: Tensor,
    concentration1_q: Tensor,
    concentration0_q: Tensor,
) -> Tensor:
    """The divergence of two beta distributions, nats; any shape.

    ``log B(q) - log B(p) + (a_p - a_q) psi(a_p) + (b_p - b_q) psi(b_p) - (t_p - t_q) psi(t_p)``,
    with ``a_p = concentration1_p``, ``b_p = concentration0_p``, ``a_q = concentration1_q``,
    ``b_q = concentration0_q``, ``t = a + b``, psi the digamma and B the beta function.

    Source: Gil, Alajaji and Linder 2013, Information Sciences 249; Kullback and Leibler 1951.
    """
    change1, change0 = concentration1_p - concentration1_q, concentration0_p - concentration0_q
    return (
        _log_beta(concentration1_q, concentration0_q)
        - _log_beta(concentration1_p, concentration0_p)
        + change1 * torch.digamma(concentration1_p)
        + change0 * torch.digamma(concentration0_p)
        - (change1 + change0) * torch.digamma(concentration1_p + concentration0_p)
    )


def gamma_log_prob(concentration: Tensor, rate: Tensor, value: Tensor) -> Tensor:
    """The log-density of a gamma distribution at x > 0, the ``value``, nats; any shape.

    ``a log rate + (a - 1) log x - rate x - log Gamma(a)``, with ``a = concentration``.

    Source: definition of the density.
    """
    density = (
        torch.xlogy(concentration, rate) + torch.xlogy(concentration - 1, value) - rate * value
    )
    return density - torch.lgamma(concentration)


def gamma_entropy(concentration: Tensor, rate: Tensor) -> Tensor:
    """The differential entropy ``a - log rate + log Gamma(a) + (1 - a) psi(a)``, nats; any shape.

    With ``a = concentration``, and psi the digamma function.

    Source: Cover and Thomas 2006, "Elements of information theory", ch. 8.
    """
    return (
        concentration
        - rate.log()
        + torch.lgamma(concentration)
        + (1 - concentration) * torch.digamma(concentration)
    )


def gamma_kl(
    concentration_p: Tensor, rate_p: Tensor, concentration_q: Tensor, rate_q: Tensor
) -> Tensor:
    """The divergence of two gamma distributions, nats; any shape.

    ``(a_p - a_q) psi(a_p) - log Gamma(a_p) + log Gamma(a_q) + a_q log(r_p / r_q)
    + a_p (r_q / r_p - 1)``, with ``a_p = concentration_p``, ``r_p = rate_p``,
    ``a_q = concentration_q``, ``r_q = rate_q`` and psi the digamma function.

    Source: Gil, Alajaji and Linder 2013, Information Sciences 249; Kullback and Leibler 1951.
    """
    return (
        (concentration_p - concentration_q) * torch.digamma(concentration_p)
        - torch.lgamma(concentration_p)
        + torch.lgamma(concentration_q)
        + concentration_q * (rate_p / rate_q).log()
        + concentration_p * (rate_q / rate_p - 1)
    )


def dirichlet_log_prob(concentration: Tensor, value: Tensor) -> Tensor:
    """The log-density ``sum_j (a_j - 1) log x_j - log B(a)``, ``[...]``, nats.

    Args:
        concentration: ``[..., n]``.
        value: ``[..., n]``, on the simplex.

    Source: definition of the density.
    """
    return torch.xlogy(concentration - 1, value).sum(-1) - _log_multivariate_beta(concentration)


def dirichlet_entropy(concentration: Tensor) -> Tensor:
    """The differential entropy of a Dirichlet distribution, ``[...]``, nats.

    ``log B(a) + (t - n) psi(t) - sum_j (a_j - 1) psi(a_j)``, with ``t = sum_j a_j``.

    Args:
        concentration: ``[..., n]``.

    Source: Cover and Thomas 2006, "Elements of information theory", ch. 8.
    """
    total = concentration.sum(-1)
    return (
        _log_multivariate_beta(concentration)
        + (total - concentration.shape[-1]) * torch.digamma(total)
        - ((concentration - 1) * torch.digamma(concentration)).sum(-1)
    )


def dirichlet_kl(concentration_p: Tensor, concentration_q: Tensor) -> Tensor:
    """The divergence of Dirichlet distributions with concentrations p and q, ``[...]``, nats.

    ``log B(q) - log B(p) + sum_j (p_j - q_j) (psi(p_j) - psi(t_p))``, with ``t_p = sum_j p_j``.

    Args:
        concentration_p: ``[..., n]``.
        concentration_q: ``[..., n]``.

    Source: Gil, Alajaji and Linder 2013, Information Sciences 249; Kullback and Leibler 1951.
    """
    score = torch.digamma(concentration_p) - torch.digamma(concentration_p.sum(-1, keepdim=True))
    return (
        _log_multivariate_beta(concentration_q)
        - _log_multivariate_beta(concentration_p)
        + ((concentration_p - concentration_q) * score).sum(-1)
    )


def _log_beta(a: Tensor, b: Tensor) -> Tensor:
    return torch.lgamma(a) + torch.lgamma(b) - torch.lgamma(a + b)


def _log_multivariate_beta(concentration: Tensor) -> Tensor:
    return torch.lgamma(concentration).sum(-1) - torch.lgamma(concentration.sum(-1))
