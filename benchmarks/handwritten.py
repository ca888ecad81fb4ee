"""The losses as a careful engineer writes them by hand: plain tensors, formulas, no distributions.

They compute the losses and metrics that TorchRL's PPO logs: ``entropy``, ``kl_approx``,
``clip_fraction``, ``ESS``, ``max_ratio``, ``mean_ratio``, ``explained_variance``; A2C and REINFORCE
``entropy`` and ``explained_variance``. A trunk that actor and critic share runs once, and
discrete heads of one size are evaluated together.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.problems import CATEGORICAL, NORMAL, Head, Plain, split

LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


def categorical(logits: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy, ``[...]``, of logits ``[..., n]``."""
    log_probs = logits.log_softmax(-1)
    log_prob = log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1)
    return log_prob, -(log_probs.exp() * log_probs).sum(-1)


def normal(loc: Tensor, scale: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy of independent normals, summed over the last dim."""
    n = loc.shape[-1]
    log_scale = scale.log().sum(-1)
    log_prob = -0.5 * ((action - loc) / scale).square().sum(-1) - log_scale - n * LOG_SQRT_2PI
    return log_prob, log_scale + n * (0.5 + LOG_SQRT_2PI)


def tanh_normal(loc: Tensor, scale: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """Log-prob of normals squashed to (−1, 1), and the entropy's estimate from one sample each."""
    limit = 1 - torch.finfo(action.dtype).eps
    x = action.clamp(-limit, limit).atanh()
    drawn = loc + scale * torch.randn_like(loc)
    log_prob = normal(loc, scale, x)[0] - _log_slope(x)
    return log_prob, _log_slope(drawn) - normal(loc, scale, drawn)[0]


def _log_slope(x: Tensor) -> Tensor:
    """log(1 − tanh² x), summed over the last dim."""
    return (2 * (math.log(2) - x - F.softplus(-2 * x))).sum(-1)


def joint_terms(flat: Tensor, heads: tuple[Head, ...], actions: list[Tensor]) -> tuple[Tensor, ...]:
    """Log-prob and entropy summed over the heads, ``[...]``."""
    first = heads[0]
    if len(heads) > 1 and all(head[1:] == (CATEGORICAL, first.size) for head in heads):
        logits = flat.unflatten(-1, (len(heads), first.size))
        log_prob, entropy = categorical(logits, torch.stack(actions, -1))
        return log_prob.sum(-1), entropy.sum(-1)
    terms = []
    for head, parameters, action in zip(heads, split(flat, heads), actions, strict=True):
        if head.family == CATEGORICAL:
            terms.append(categorical(parameters[0], action))
        else:
            density = normal if head.family == NORMAL else tanh_normal
            terms.append(density(*parameters, action))
    log_prob, entropy = terms[0]
    for more in terms[1:]:
        log_prob, entropy = log_prob + more[0], entropy + more[1]
    return log_prob, entropy


def explained_variance(value: Tensor, target: Tensor) -> Tensor:
    """1 − var(target − value) / var(target)."""
    variance = target.var(unbiased=False)
    return 1 - (target - value).var(unbiased=False) / (variance + torch.finfo(value.dtype).eps)


def ppo(plain: Plain, eps: float | None, entropy_coeff: float) -> dict[str, Tensor]:
    """PPO, clipped or (``eps=None``) not, on the joint ratio."""
    hidden = plain.trunk(plain.observation)
    log_prob, entropy = joint_terms(plain.policy(hidden), plain.heads, plain.actions)
    old = plain.log_probs
    behaviour = old[0] if len(old) == 1 else torch.stack(old).sum(0)
    log_ratio = log_prob - behaviour
    ratio = log_ratio.exp()
    advantage = plain.advantage.squeeze(-1)
    gain = ratio * advantage
    if eps is not None:
        gain = torch.minimum(gain, ratio.clamp(1 - eps, 1 + eps) * advantage)
    value = plain.critic(hidden)
    out = {
        "loss_objective": -gain.mean(),
        "loss_entropy": -entropy_coeff * entropy.mean(),
        "loss_critic": F.smooth_l1_loss(value, plain.value_target),
    }
    with torch.no_grad():
        flat, r = log_ratio.detach().flatten(), ratio.detach()
        out["entropy"] = entropy.detach().mean()
        out["kl_approx"] = -flat.mean()
        if eps is not None:
            out["clip_fraction"] = ((r - 1).abs() > eps).float().mean()
        effective = (2 * flat.logsumexp(0) - (2 * flat).logsumexp(0)).exp()
        out["ESS"] = effective / flat.shape[0]
        out["max_ratio"], out["mean_ratio"] = r.max(), r.mean()
        out["explained_variance"] = explained_variance(value, plain.value_target)
    return out


def score(
    plain: Plain, names: tuple[str, str], *, critic_coeff: float = 1.0, loss: str = "smooth_l1"
) -> dict[str, Tensor]:
    """A2C without entropy bonus, and REINFORCE with a critic: ``names`` of the two losses."""
    hidden = plain.trunk(plain.observation)
    log_prob, entropy = joint_terms(plain.policy(hidden), plain.heads, plain.actions)
    value = plain.critic(hidden)
    distance = F.smooth_l1_loss if loss == "smooth_l1" else F.mse_loss
    out = {
        names[0]: -(log_prob * plain.advantage.squeeze(-1)).mean(),
        names[1]: critic_coeff * distance(value, plain.value_target),
    }
    with torch.no_grad():
        out["entropy"] = entropy.detach().mean()
        out["explained_variance"] = explained_variance(value, plain.value_target)
    return out
