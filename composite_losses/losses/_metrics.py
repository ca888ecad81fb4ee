"""Metrics: 0-dim, detached, over the entries that count."""

from __future__ import annotations

import torch
from torch import Tensor

from composite_losses import functional as F
from composite_losses.losses.samples import Samples
from composite_losses.losses.surrogates import Surrogate, head_means

RATIO_METRICS = (
    "kl_approx",
    "kl_k3",
    "clip_fraction",
    "ESS",
    "max_ratio",
    "mean_ratio",
)
HEAD_METRICS = ("kl_approx", "clip_fraction")


def ratio_metrics(samples: Samples, surrogate: Surrogate) -> dict[str, Tensor]:
    """Returns the metrics of the ratio, per batch.

    ``kl_approx``, ``kl_k3`` and ``clip_fraction`` describe the ratio that the trust region acts on
    (π/π_prox); ``ESS``, ``max_ratio`` and ``mean_ratio`` the weight of the data (π/π_behaviour).
    """
    mask = samples.mask
    log_ratio = samples.joint_log_ratio.detach()
    weight = samples.behaviour_log_ratio
    ratio = F.ratio(weight)
    return {
        "kl_approx": F.masked_mean(F.k1(log_ratio), mask),
        "kl_k3": F.masked_mean(F.k3(log_ratio), mask),
        "clip_fraction": surrogate.clip_fraction(samples).detach(),
        "ESS": F.effective_sample_size(weight, mask),
        "max_ratio": F.masked_max(ratio, mask),
        "mean_ratio": F.masked_mean(ratio, mask),
    }


def head_ratio_metrics(
    samples: Samples, surrogate: Surrogate, names: tuple[str, ...]
) -> dict[str, Tensor]:
    """Returns ``kl_approx/<head>`` and ``clip_fraction/<head>``; NaN for a joint log-prob."""
    if samples.joint_only:
        nan = samples.log_prob.new_full((), float("nan"))
        return {f"{metric}/{name}": nan.clone() for metric in HEAD_METRICS for name in names}
    log_ratio = samples.log_ratio
    if log_ratio is None:
        return {}
    kl = head_means(-log_ratio.detach(), samples.valid_heads)
    clip = surrogate.head_clip_fraction(samples).detach()
    out = {f"kl_approx/{name}": value for name, value in zip(names, kl.unbind(), strict=True)}
    return out | {
        f"clip_fraction/{name}": value for name, value in zip(names, clip.unbind(), strict=True)
    }


def entropy_metrics(entropy: Tensor, samples: Samples, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Returns ``entropy`` (nats, summed over heads) and, for several, ``entropy/<head>``."""
    entropy = entropy.detach()
    out = {"entropy": F.masked_mean(F.entropy_sum(entropy, 1.0, samples.active), samples.mask)}
    if len(names) > 1:
        each = head_means(entropy, samples.valid_heads)
        out |= {f"entropy/{name}": v for name, v in zip(names, each.unbind(), strict=True)}
    return out


def all_reduced_count(count: Tensor) -> Tensor:
    """Returns the ranks' mean valid count: averaged gradients are the whole batch's."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return count
    total = count.clone()
    torch.distributed.all_reduce(total)
    return total / torch.distributed.get_world_size()
