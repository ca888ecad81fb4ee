"""Metrics: 0-dim, detached, over the entries that count, gathered in one pass over the batch."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from composite_losses import functional as F
from composite_losses.losses.samples import Samples
from composite_losses.losses.surrogates import Surrogate

RATIO_METRICS = (
    "kl_approx",
    "kl_k3",
    "clip_fraction",
    "ESS",
    "max_ratio",
    "mean_ratio",
)
HEAD_METRICS = ("kl_approx", "clip_fraction")


class Labels:
    """Names of the metrics of each head, ``<metric>/<head>``; none where there is one head."""

    def __init__(self, names: tuple[str, ...]) -> None:
        """Forms the names once."""
        self.several = len(names) > 1
        self.entropy, self.kl_approx, self.clip_fraction = (
            tuple(f"{metric}/{name}" for name in names) if self.several else (metric,)
            for metric in ("entropy", *HEAD_METRICS)
        )

    @property
    def entropies(self) -> tuple[str, ...]:
        """Names of the heads' entropies."""
        return self.entropy if self.several else ()

    @property
    def ratios(self) -> tuple[str, ...]:
        """Names of the metrics of the heads' ratios."""
        return self.kl_approx + self.clip_fraction if self.several else ()


class Means:
    """Means over the batch of any number of per-sample columns, taken together."""

    def __init__(self, rows: Tensor | None, heads: Tensor | None) -> None:
        """Keeps where a row ``[*S, 1]`` and where a head ``[*S, H]`` counts; None: everywhere."""
        self.rows, self.heads = rows, heads
        self.names: list[str] = []
        self.columns: list[Tensor] = []

    def add(self, names: Iterable[str], columns: Tensor) -> None:
        """Adds columns, ``[*S, 1]`` or ``[*S, H]``, with one name each."""
        self.names += names
        self.columns.append(columns)

    def result(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Returns (name → mean, name → number of entries), 0-dim; the mean of nothing is 0."""
        joined = torch.cat(self.columns, -1) if len(self.columns) > 1 else self.columns[0]
        dims = list(range(joined.ndim - 1))
        if self.rows is None and self.heads is None and joined.numel():
            means = joined.mean(dims) if dims else joined
            return dict(zip(self.names, means.unbind(), strict=True)), {}
        valid = torch.cat([self._valid(c) for c in self.columns], -1)
        sums = F.fill(joined, valid)
        count = valid
        if dims:
            sums, count = sums.sum(dims), valid.sum(dims)
        count = count.to(joined.dtype)
        means = sums / count.clamp_min(1)
        return (
            dict(zip(self.names, means.unbind(), strict=True)),
            dict(zip(self.names, count.unbind(), strict=True)),
        )

    def _valid(self, column: Tensor) -> Tensor:
        """Returns where the entries of a column count."""
        mask = self.rows if column.shape[-1] == 1 or self.heads is None else self.heads
        if mask is None:
            return torch.ones_like(column, dtype=torch.bool)
        return mask.expand_as(column)


@torch.no_grad()
def collected(
    samples: Samples,
    surrogate: Surrogate,
    entropy: Tensor,
    total: Tensor,
    labels: Labels,
) -> dict[str, Tensor]:
    """Returns the metrics of the policy.

    ``kl_approx``, ``kl_k3`` and ``clip_fraction`` describe the ratio that the trust region acts on
    (π/π_prox); ``ESS``, ``max_ratio`` and ``mean_ratio`` the weight of the data (π/π_behaviour).
    ``<metric>/<head>`` is NaN where only a joint log-prob is known.
    """
    means = Means(samples.row_mask, samples.valid_heads)
    means.add(("entropy",), total)
    if labels.several:
        means.add(labels.entropy, entropy)
    if surrogate.uses_ratio:
        _add_ratio(means, samples, surrogate, labels)
    out, count = means.result()
    if not surrogate.uses_ratio:
        return out
    if "clip_fraction" not in out:
        stacked = torch.stack([out[key] for key in labels.clip_fraction])
        if count:
            weights = torch.stack([count[key] for key in labels.clip_fraction])
            out["clip_fraction"] = (stacked * weights).sum() / weights.sum().clamp_min(1)
        else:
            out["clip_fraction"] = stacked.mean()
    if samples.joint_only:
        nan = samples.log_prob.new_full((), float("nan"))
        out |= {label: nan.clone() for label in labels.ratios}
    out["ESS"] = F.effective_sample_size(samples.behaviour_log_ratio, samples.row_mask)
    out["max_ratio"] = F.masked_max(samples.ratio, samples.row_mask)
    return out


def _add_ratio(means: Means, samples: Samples, surrogate: Surrogate, labels: Labels) -> None:
    """Adds the columns of the ratio's metrics."""
    joint, log_ratio = samples.joint_log_ratio, samples.log_ratio
    separate = labels.several and not samples.joint_only and log_ratio is not None
    means.add(("kl_approx",), -joint)
    means.add(("kl_k3",), F.k3(joint) if samples.correction is not None else _k3(samples))
    means.add(("mean_ratio",), samples.ratio)
    clipped = surrogate.clipped(samples)
    if clipped.shape[-1] == 1:
        means.add(("clip_fraction",), clipped)
    if separate and log_ratio is not None:
        means.add(labels.kl_approx, -log_ratio)
        means.add(labels.clip_fraction, surrogate.head_clipped(samples))


def _k3(samples: Samples) -> Tensor:
    """Returns r − 1 − log r where the weight of the data is the ratio itself."""
    if samples.cap is not None:
        return F.k3(samples.joint_log_ratio)
    return torch.expm1(samples.bounded) - samples.bounded


def all_reduced_count(x: Tensor, mask: Tensor | None) -> Tensor:
    """Returns the ranks' mean valid count: averaged gradients are the whole batch's."""
    if not _distributed():
        return F.valid_count(x, mask)
    each = 1 if mask is None else x.shape[mask.ndim :].numel()
    total = x.new_full((), x.numel()) if mask is None else (mask.sum() * each).to(x.dtype)
    torch.distributed.all_reduce(total)
    return total.clamp_min(1) / ranks()


def ranks() -> int:
    """Returns the number of processes that train together."""
    return torch.distributed.get_world_size() if _distributed() else 1


def _distributed() -> bool:
    """Returns whether there is a process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()
