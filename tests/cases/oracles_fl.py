"""What the losses should be, by hand: plain torch and loops, nothing from the library."""

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch import distributions as d


def gae_by_hand(
    td: TensorDict, mask: Tensor, critic: nn.Module, *, group: bool = False,
    gamma: float = 0.99, lmbda: float = 0.95,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Advantage and value target ``[B, T, (A,) 1]`` of every sequence alone, step by step."""
    here, after = (td["agents"], td["next", "agents"]) if group else (td, td["next"])
    with torch.no_grad():
        value, later = critic(here["observation"]), critic(after["observation"])
    advantage = torch.zeros_like(value)
    agents = range(mask.shape[2]) if group else [None]
    for b in range(mask.shape[0]):
        for a in agents:
            carry = 0.0
            for t in reversed(range(mask.shape[1])):
                i = (b, t) if a is None else (b, t, a)
                if not mask[i]:
                    continue
                alive = 1.0 - float(after["terminated"][i])
                going = 1.0 - float(after["done"][i])
                delta = (
                    float(after["reward"][i]) + gamma * alive * float(later[i]) - float(value[i])
                )
                carry = delta + gamma * lmbda * going * carry
                advantage[i] = carry
    return advantage, advantage + value


def returns_by_hand(
    reward: Tensor, done: Tensor, mask: Tensor, gamma: float, baseline: str
) -> Tensor:
    """Reward-to-go less its baseline, ``[B, T, (A,) 1]``, for masks that are False at the tail."""
    returns = torch.zeros_like(reward)
    for i in mask.nonzero().tolist():
        b, t, rest = i[0], i[1], tuple(i[2:])
        total, discount = 0.0, 1.0
        for s in range(t, reward.shape[1]):
            if not mask[(b, s, *rest)]:
                break
            total += discount * float(reward[(b, s, *rest, 0)])
            discount *= gamma
            if done[(b, s, *rest, 0)]:
                break
        returns[(*i, 0)] = total
    base = torch.zeros_like(returns)
    if baseline == "mean":
        base = returns[mask].mean().expand_as(returns)
    if baseline == "leave_one_out":
        for i in mask.nonzero().tolist():
            b, rest = i[0], tuple(i[1:])
            others = [float(returns[(o, *rest, 0)]) for o in range(len(mask))
                      if o != b and mask[(o, *rest)]]  # fmt: skip
            base[(*i, 0)] = sum(others) / len(others) if others else 0.0
    return returns - base


def head_terms(loss: Any, td: TensorDict, active: Tensor, name: str) -> dict[str, Tensor]:
    """Losses and metrics of heads "move" (Normal) and "gear" (Categorical, where it is active).

    Every quantity of "gear" is formed from the rows where it is active, and placed.
    """
    loc, scale, logits = loss.actor_network[0].module(td["observation"])
    move = d.Independent(d.Normal(loc, scale), 1)
    gear = d.Categorical(logits=logits[active])
    old = td["params"]
    old_move = d.Independent(d.Normal(old["move", "loc"], old["move", "scale"]), 1)
    old_gear = d.Categorical(logits=old["gear", "logits"][active])
    action, gears = td["action"], td["action", "gear"][active]

    def place(x: Tensor) -> Tensor:
        return torch.zeros(active.shape).masked_scatter(active, x)

    lp = torch.stack([move.log_prob(action["move"]), place(gear.log_prob(gears))], -1)
    before = [old_move.log_prob(action["move"]), place(old_gear.log_prob(gears))]
    lr = lp - torch.stack(before, -1)
    on = torch.stack([torch.ones_like(active), active], -1)
    entropy = torch.stack([move.entropy(), place(gear.entropy())], -1)
    kl = d.kl_divergence(old_move, move) + place(d.kl_divergence(old_gear, gear))
    advantage = td["advantage"].squeeze(-1)
    part = loss.surrogate
    low, high = (1 - part.eps_low, 1 + part.upper) if hasattr(part, "eps_low") else (0, 9e9)

    def clipped(r: Tensor, a: Tensor) -> Tensor:
        return torch.minimum(r * a, r.clamp(low, high) * a)

    joint = lr.sum(-1).exp()
    heads = (clipped(lr.exp(), advantage.unsqueeze(-1)) * on).sum(-1)
    kind = getattr(part, "ratio", name)
    if kind == "joint":
        objective, outside = clipped(joint, advantage), (joint < low) | (joint > high)
    elif kind == "per_head":
        objective, outside = heads, None
    elif kind == "leafwise":
        kept = lr.exp().clamp(low, high).prod(-1)
        objective = torch.minimum(joint * advantage, kept * advantage)
        outside = ((lr.exp() < low) | (lr.exp() > high)).any(-1)
    elif kind == "mixed":
        objective = part.mix * clipped(joint, advantage) + (1 - part.mix) * heads
        outside = (joint < low) | (joint > high)
    elif name in ("score", "A2CLoss", "ReinforceLoss"):
        objective, outside = lp.sum(-1) * advantage, None
    else:
        objective, outside = joint * advantage, torch.zeros_like(active)
        if name in ("penalty", "KLPENPPOLoss"):
            objective = objective - 1.0 * kl
    coeff = float(loss.entropy.coeff)
    key = "loss_actor" if name == "ReinforceLoss" else "loss_objective"
    out = {key: -objective.mean(), "loss_entropy": -coeff * entropy.sum(-1).mean()}
    out["total"] = out[key] + out["loss_entropy"]
    out |= {"entropy": entropy.sum(-1).mean(), "entropy/move": entropy[..., 0].mean()}
    out["entropy/gear"] = entropy[..., 1][active].mean()
    out |= {"kl_approx": -lr.sum(-1).mean(), "kl": kl.mean(), "mean_ratio": joint.mean()}
    out |= {"kl_approx/move": -lr[..., 0].mean(), "kl_approx/gear": -lr[..., 1][active].mean()}
    beyond = (lr.exp() < low) | (lr.exp() > high)
    if kind == "per_head":
        outside = beyond[on]
    if outside is not None:
        out["clip_fraction"] = outside.float().mean()
    out["clip_fraction/gear"] = beyond[..., 1][active].float().mean()
    return {k: v if k == "total" else v.detach() for k, v in out.items()}
