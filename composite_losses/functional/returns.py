"""Returns of stored trajectories and the baselines subtracted from them."""

import torch
import torch.nn.functional as F
from torch import Tensor

from composite_losses.errors import ConfigError
from composite_losses.functional.masking import fill
from composite_losses.functional.shapes import require_same_shape


def reward_to_go(
    reward: Tensor,
    done: Tensor,
    gamma: Tensor | float,
    *,
    dim: int = -1,
    mask: Tensor | None = None,
) -> Tensor:
    """The discounted sum of rewards from each step to the end of its trajectory.

    ``R_t = r_t + gamma (1 - done_t) R_{t+1}``, with 0 beyond the last step and at masked ones: a
    valid step never contains anything from a masked step or from later than it.

    Args:
        reward: any shape, one dim of which is time; in units of reward, as the result.
        done: bool, the same shape; True at the last step of a trajectory.
        gamma: discount in [0, 1], float or 0-dim.
        dim: the time dim.
        mask: bool, the leading dims of ``reward``; masked steps may hold anything.

    Gradient goes to ``reward``.

    Raises:
        ShapeError: if the shapes differ.

    Source: Williams 1992 (episodic REINFORCE, section 5), Machine Learning 8; the scan: Hillis and
    Steele 1986, "Data parallel algorithms", CACM 29(12).
    """
    require_same_shape(reward=reward, done=done)
    returns = fill(reward, mask).movedim(dim, -1)
    # A masked step has reward 0 and carries nothing on, so what precedes it receives 0.
    carry = fill(torch.where(done, 0.0, gamma * torch.ones_like(reward)), mask).movedim(dim, -1)
    # Doubling: after the pass with offset k, `returns` holds the sum of 2k steps and `carry` the
    # discount across them. O(T log T) work in log T launches, and nothing is divided, unlike a
    # cumulative sum of discounted rewards.
    offset, steps = 1, returns.shape[-1]
    while offset < steps:
        returns = returns + carry * F.pad(returns[..., offset:], (0, offset))
        carry = carry * F.pad(carry[..., offset:], (0, offset))
        offset *= 2
    return returns.movedim(-1, dim)


def baseline(
    returns: Tensor, kind: str, mask: Tensor | None = None, *, dim: int = -1, batch_dim: int = 0
) -> Tensor:
    """What is subtracted from each return to lower the variance of the score-function estimate.

    ``"none"``: 0. ``"mean"``: the mean of all valid returns. ``"leave_one_out"``: the mean of the
    *other* trajectories' valid returns at the same step; 0 where there is none.

    Args:
        returns: any shape, in units of return.
        kind: ``"none"``, ``"mean"`` or ``"leave_one_out"``.
        mask: bool, the leading dims of ``returns``; masked entries may hold anything.
        dim: the time dim.
        batch_dim: the dim that runs over trajectories. If it is the time dim there is one
            trajectory, hence no other.

    Gradient goes to valid returns.

    Raises:
        ShapeError: if ``returns.shape`` does not start with ``mask.shape``.
        ConfigError: if the kind is unknown.

    Source: Kool, van Hoof and Welling 2019, "Buy 4 REINFORCE samples, get a baseline for free!",
    ICLR workshop; Williams 1992, Machine Learning 8.
    """
    if kind == "none":
        return torch.zeros_like(returns)
    selected = fill(returns, mask)
    valid = fill(torch.ones_like(returns), mask)
    if kind == "mean":
        return (selected.sum() / valid.sum().clamp_min(1)).expand_as(returns)
    if kind != "leave_one_out":
        raise ConfigError(f"baseline must be 'none', 'mean' or 'leave_one_out', found {kind!r}")
    if dim % returns.ndim == batch_dim % returns.ndim:
        return torch.zeros_like(returns)
    others = selected.sum(batch_dim, keepdim=True) - selected
    count = valid.sum(batch_dim, keepdim=True) - valid
    # Selected, not multiplied: the sum less itself leaves a rounding error where nothing is left.
    return torch.where(count > 0, others / count.clamp_min(1), 0.0)
