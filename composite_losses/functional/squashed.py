"""The normal distribution squashed by tanh to an interval, in nats.

``low + (high - low) (tanh(X) + 1) / 2`` with X normal. Elementwise; gradient goes to every
floating-point parameter and to ``value``.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from composite_losses.functional.distributions import normal_entropy, normal_log_prob

# Standard deviations and weights of a mixture of centred normals that stands for the logistic
# density sech(x)^2 / 2: see `tanh_normal_entropy`. Fitted to minimise the largest error of E|x + L|
# over all x, which is 4.5e-7.
_LOGISTIC_STDS = (
    0.46102937270329103,
    0.650886047558925,
    0.9153461241210079,
    1.2850450135175553,
    1.800507728947937,
)
_LOGISTIC_WEIGHTS = (
    0.06223123198301881,
    0.3434990898273571,
    0.41732949917835016,
    0.1631943667363008,
    0.013745812274973188,
)


def tanh_normal_log_prob(
    loc: Tensor, scale: Tensor, low: Tensor | float, high: Tensor | float, value: Tensor
) -> Tensor:
    """The log-density, nats, of ``low + (high - low) (tanh(X) + 1) / 2``, X normal, at ``value``.

    ``log N(x; loc, scale) - 2 (log 2 - x - softplus(-2 x)) - log((high - low) / 2)``, where x is
    the inverse at ``value``.

    Args:
        loc: any shape, before the tanh.
        scale: likewise.
        low: lower bound, float or tensor, in the units of ``value``.
        high: upper bound, above ``low``, likewise in its units.
        value: in ``[low, high]``. At a bound it is moved inside by the resolution of its dtype, so
            that result and gradients are finite.

    Source: Haarnoja et al. 2018, "Soft actor-critic", appendix C, eq. (21), arXiv 1801.01290.
    """
    x = tanh_inverse(value, low, high)
    return normal_log_prob(loc, scale, x) - tanh_log_slope(x, low, high)


def tanh_inverse(value: Tensor, low: Tensor | float, high: Tensor | float) -> Tensor:
    """The x with ``low + (high - low) (tanh(x) + 1) / 2 = value``; finite at the bounds.

    Args:
        value: any shape, in ``[low, high]``; at a bound it is moved inside by the resolution of
            its dtype.
        low: lower bound, float or tensor, in the units of ``value``.
        high: upper bound, above ``low``, likewise in its units.

    Source: definition, the inverse of the transform.
    """
    y = (value - (high + low) / 2) / ((high - low) / 2)
    limit = 1 - torch.finfo(y.dtype).resolution
    return torch.atanh(y.clamp(-limit, limit))


def tanh_log_slope(x: Tensor, low: Tensor | float, high: Tensor | float) -> Tensor:
    """The log of the derivative of ``low + (high - low) (tanh(x) + 1) / 2``, nats; any shape.

    ``2 (log 2 - x - softplus(-2 x)) + log((high - low) / 2)``

    Args:
        x: any shape, before the tanh.
        low: lower bound, float or tensor, in the units of the value.
        high: upper bound, above ``low``, likewise in its units.

    Source: Haarnoja et al. 2018, appendix C, arXiv 1801.01290.
    """
    return _log_tanh_slope(x) + _log((high - low) / 2)


def tanh_normal_entropy(
    loc: Tensor, scale: Tensor, low: Tensor | float, high: Tensor | float
) -> Tensor:
    """The differential entropy, nats, of ``low + (high - low) (tanh(X) + 1) / 2`` with X normal.

    Deterministic and within 1e-6. ``H(X) + E[log(1 - tanh(X)^2)] + log((high - low) / 2)``. Since
    the second derivative of ``log(1 - tanh(x)^2)`` is -4 times the density ``sech(x)^2 / 2`` of a
    logistic variable L, ``log(1 - tanh(x)^2) = 2 log 2 - 2 E|x + L|``. L is a scale mixture of
    normals; with five of them, of weight w and std c, ``E|X + L| = sum w E|N(loc, scale^2 + c^2)|``
    in closed form, with an error that is bounded for every loc and scale.

    Args:
        loc: any shape, before the tanh.
        scale: likewise.
        low: lower bound, float or tensor, in the units of the value.
        high: upper bound, above ``low``, likewise in its units.

    Source: Andrews and Mallows 1974, "Scale mixtures of normal distributions", JRSS B 36; the
    fit as in Monahan and Stefanski 1992, "Normal scale mixture approximations to F*(z)".
    """
    # Filled on the device: a constant tensor copied from the host would synchronise.
    stds = torch.stack([loc.new_full((), std) for std in _LOGISTIC_STDS])
    weights = torch.stack([loc.new_full((), weight) for weight in _LOGISTIC_WEIGHTS])
    spread = (scale.unsqueeze(-1).square() + stds.square()).sqrt()
    z = loc.unsqueeze(-1) / spread
    # E|N(loc, spread^2)|, the mean of a folded normal.
    folded = spread * (
        math.sqrt(2 / math.pi) * (-0.5 * z.square()).exp() + z * torch.erf(z * math.sqrt(0.5))
    )
    log_slope = 2 * math.log(2) - 2 * (folded * weights).sum(-1)
    return normal_entropy(scale) + log_slope + _log((high - low) / 2)


def _log_tanh_slope(x: Tensor) -> Tensor:
    # log(1 - tanh(x)^2) without forming 1 - tanh(x)^2, which is 0 for large |x|.
    return 2 * (math.log(2) - x - F.softplus(-2 * x))


def _log(x: Tensor | float) -> Tensor | float:
    return x.log() if isinstance(x, Tensor) else math.log(x)
