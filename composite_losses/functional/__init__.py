"""Pure tensor maths, per sample: no TensorDict, no state, no reduction that was not asked for.

Everything runs on the ``meta`` device, compiles as one graph and never waits for the device.

Words: S is the batch (and the agents), H the action heads, the last axis. ``A`` is the advantage,
in units of return (dimensionless once standardised), detached by the caller. ``pi`` is the current
policy, ``b`` the one that collected the data, ``r = pi / b`` the ratio, ``r_h`` that of head h.
``C(r) = clamp(r, 1 - eps_low, 1 + eps_high)`` is the clipped ratio, ``P(r, A) = min(r A, C(r) A)``
the clipped objective. In decoupled PPO ``r`` is
``pi / pi_prox``, the clip acts on it, and ``log_correction`` is ``log(pi_prox / b)``, in nats.
Masks are bool, True where an entry counts. Log-probs, entropies and divergences are in nats.
Parameters of distributions broadcast against each other and against ``value``.
"""

from composite_losses.functional.advantages import standardise
from composite_losses.functional.distributions import (
    bernoulli_entropy,
    bernoulli_kl,
    bernoulli_log_prob,
    beta_entropy,
    beta_kl,
    beta_log_prob,
    bounded_log_probs,
    categorical_entropy,
    categorical_kl,
    categorical_log_prob,
    categorical_log_probs,
    dirichlet_entropy,
    dirichlet_kl,
    dirichlet_log_prob,
    gamma_entropy,
    gamma_kl,
    gamma_log_prob,
    normal_entropy,
    normal_kl,
    normal_log_prob,
)
from composite_losses.functional.divergences import k1, k2, k3
from composite_losses.functional.entropy import entropy_sum
from composite_losses.functional.masking import (
    combine_masks,
    fill,
    masked_mean,
    masked_moments,
    reduce,
    valid_count,
)
from composite_losses.functional.metrics import (
    clip_fraction,
    effective_sample_size,
    explained_variance,
    masked_max,
)
from composite_losses.functional.ratios import (
    clamp_log_ratio,
    clip_log_ratio,
    joint,
    log_clip_bounds,
    log_ratio,
    ratio,
)
from composite_losses.functional.returns import baseline, reward_to_go
from composite_losses.functional.squashed import (
    tanh_inverse,
    tanh_log_slope,
    tanh_normal_entropy,
    tanh_normal_log_prob,
)
from composite_losses.functional.surrogates import (
    clipped,
    leafwise,
    mixed,
    per_head,
    pessimistic,
    score,
    unclipped,
)
from composite_losses.functional.values import clipped_value_error, value_error

__all__ = [
    "baseline",
    "bernoulli_entropy",
    "bernoulli_kl",
    "bernoulli_log_prob",
    "beta_entropy",
    "beta_kl",
    "beta_log_prob",
    "bounded_log_probs",
    "categorical_entropy",
    "categorical_kl",
    "categorical_log_prob",
    "categorical_log_probs",
    "clamp_log_ratio",
    "clip_fraction",
    "clip_log_ratio",
    "clipped",
    "clipped_value_error",
    "combine_masks",
    "dirichlet_entropy",
    "dirichlet_kl",
    "dirichlet_log_prob",
    "effective_sample_size",
    "entropy_sum",
    "explained_variance",
    "fill",
    "gamma_entropy",
    "gamma_kl",
    "gamma_log_prob",
    "joint",
    "k1",
    "k2",
    "k3",
    "leafwise",
    "log_clip_bounds",
    "log_ratio",
    "masked_max",
    "masked_mean",
    "masked_moments",
    "mixed",
    "normal_entropy",
    "normal_kl",
    "normal_log_prob",
    "per_head",
    "pessimistic",
    "ratio",
    "reduce",
    "reward_to_go",
    "score",
    "standardise",
    "tanh_inverse",
    "tanh_log_slope",
    "tanh_normal_entropy",
    "tanh_normal_log_prob",
    "unclipped",
    "valid_count",
    "value_error",
]
