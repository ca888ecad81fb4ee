"""REINFORCE on the trajectory that was collected."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from composite_losses import functional as F
from composite_losses.errors import ConfigError, MissingKeyError, ShapeError
from composite_losses.heads.keys import as_key, listing, path, read_tensor
from composite_losses.heads.shapes import shown
from composite_losses.losses import _frame
from composite_losses.losses._base import BaseLoss
from composite_losses.losses._door import MECHANICS, VALUE, Door
from composite_losses.losses._frame import Frame
from composite_losses.losses._options import scalar
from composite_losses.losses.surrogates import Score, Surrogate

BASELINES = ("none", "mean", "leave_one_out")


class ReinforceLoss(Door, BaseLoss):
    """REINFORCE loss (part ``Score``), with TorchRL's keywords.

    The stored actions are scored: nothing is resampled. The critic is optional. Without one, and
    without an ``advantage`` entry, the reward-to-go within each trajectory serves, along the dim
    named "time" (else the last batch dim), cut at ``done``; in reward units, discounted by
    ``gamma`` per step. Outputs ``loss_actor``, and ``loss_value`` with a critic; ``loss_entropy``
    where an ``entropy_coeff`` is given.

    Keywords: see TorchRL's ``ReinforceLoss`` and, besides ``PolicyLoss``'s:

    Args:
        gamma: discount per step, in [0, 1].
        baseline: ``"none"``; ``"mean"`` subtracts the mean over batch and time;
            ``"leave_one_out"`` the mean of the other trajectories (first batch dim) at the same
            step.
        entropy_coeff: entropy coefficient, in units of the objective per nat, a number or a mapping
            by head; None for no bonus.

    Shapes:
        The log-prob of each head is ``[*S]``, in nats. Data: advantage, value, value target and
        reward ``[*S, 1]``, in units of return; done ``[*S, 1]``, bool. Losses are 0-dim, ``[*S]``
        with ``reduction="none"``; metrics are 0-dim.

    Raises:
        ConfigError: an unknown baseline, a gamma outside [0, 1], or another option out of its
            range; (call, ``validate=True``) an action outside its head's support.
        TypeError: an unknown keyword, one given twice, or no policy as actor.
        MissingKeyError: (call) no advantage, and no reward or done to compute it from.
        ShapeError: (call) an entry whose shape does not fit the samples.
        GraphError: (call) a stored value requires grad, with ``clip_value``.
        NonFiniteError: (call, ``validate=True``) a log-prob that counts is not finite.

    Source: Williams 1992, "Simple statistical gradient-following algorithms for connectionist
    reinforcement learning", Machine Learning 8; leave-one-out: Kool, van Hoof and Welling 2019,
    "Buy 4 REINFORCE samples, get a baseline for free!", ICLR workshop.
    """

    label = "Reinforce"
    objective_key = "loss_actor"
    value_key = "loss_value"
    options: ClassVar[dict[str, Any]] = {
        "gamma": 0.99,
        "baseline": "none",
        "delay_value": False,
        "entropy_coeff": None,
        "samples_mc_entropy": 1,
        **VALUE,
        **MECHANICS,
    }
    _discount: Tensor

    def __init__(self, *args: Any, **options: Any) -> None:
        """Checks the options of the return, then builds the loss."""
        gamma, baseline = options.pop("gamma", 0.99), options.pop("baseline", "none")
        if baseline not in BASELINES:
            raise ConfigError(f"baseline: expected one of {BASELINES}, found {baseline!r}.")
        if gamma is None or not 0.0 <= float(gamma) <= 1.0:
            raise ConfigError(f"gamma: expected a number in [0, 1], found {gamma!r}.")
        super().__init__(*args, **options)
        self.baseline = baseline
        self.register_buffer("_discount", scalar("gamma", gamma).clone(), persistent=False)

    def _surrogate(self, options: dict[str, Any]) -> Surrogate:
        """Returns the score function; without a coefficient there is no entropy bonus."""
        for name in ("gamma", "baseline"):
            options.pop(name)
        options["entropy_bonus"] = options["entropy_coeff"] is not None
        return Score()

    def _return_keys(self) -> list[NestedKey]:
        """Keys that an advantage is computed from."""
        if self.critic_network is not None:
            return super()._return_keys()
        shared = [self._shared_keys[k] for k in ("reward", "done") if k in self._shared_keys]
        names = (self.tensor_keys.reward, self.tensor_keys.done, *shared)
        return [as_key(("next", *path(name))) for name in names]

    def _computed_advantage(self, td: TensorDictBase, frame: Frame) -> tuple[Tensor, Tensor | None]:
        """Returns the return minus its baseline where there is no critic."""
        if self.critic_network is not None:
            return super()._computed_advantage(td, frame)
        reward = self._per_sample(td, frame, self.tensor_keys.reward)
        done = self._per_sample(td, frame, self.tensor_keys.done)
        dim = _frame.time_dim(td)
        if dim is None:
            returns = F.fill(reward, frame.mask)
        else:
            returns = F.reward_to_go(reward, done, self._discount, dim=dim, mask=frame.mask)
        if self.baseline == "leave_one_out" and (dim is None or dim == 0):
            raise ShapeError(
                "baseline='leave_one_out' needs several trajectories: a batch dim before the time "
                f"dim, found batch size {shown(td.batch_size)}."
            )
        base = F.baseline(returns, self.baseline, frame.mask, dim=dim if dim is not None else -1)
        return (returns - base).unsqueeze(-1).detach(), None

    def _per_sample(self, td: TensorDictBase, frame: Frame, name: NestedKey) -> Tensor:
        """Returns a ``("next", name)`` entry as ``[*S]``; a root entry expands over the agents.

        Raises:
            MissingKeyError: it is not there.
            ShapeError: it has another shape.
        """
        key = as_key(("next", *path(name)))
        value = read_tensor(td, key)
        if value is None:
            raise MissingKeyError(
                f"{type(self).__name__} has no critic and the data have no advantage "
                f"{self.tensor_keys.advantage!r}, so it needs {key!r} for the reward-to-go. Keys "
                f"present: {listing(td)}."
            )
        root = frame.sample[: frame.root_ndim]
        if value.shape in ((*frame.sample, 1), (*root, 1)):
            value = value.squeeze(-1)
        if value.shape == frame.sample:
            return value
        if value.shape == root:
            extra = len(frame.sample) - len(root)
            return value.reshape(*root, *(1,) * extra).expand(frame.sample)
        raise ShapeError(
            f"{key!r}: expected shape {shown((*frame.sample, 1))} or {shown((*root, 1))}, found "
            f"{shown(torch.Size(value.shape))}."
        )
