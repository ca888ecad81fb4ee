"""HAPPO: groups updated one after the other, each with what the others have already changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from tensordict import TensorDictBase
from torch import Tensor

from composite_losses import functional as F
from composite_losses.errors import ConfigError, ShapeError
from composite_losses.heads.keys import holder_batch, path, read_tensor
from composite_losses.heads.shapes import shown
from composite_losses.losses._base import BaseLoss
from composite_losses.losses._groups import Groups

ORDERS = ("random", "fixed")


class HAPPOLoss(Groups):
    """Heterogeneous-agent PPO: agent groups updated in sequence.

    A group's advantage is multiplied by the factor M = Π new/old ratios of the groups updated
    before it, per sample, without gradient; with M = 1 the loss is ``GroupLoss``. The factor is
    the entry ``set_keys(group, factor=...)`` of the data, by default
    ``(group, "happo_factor")``, 1 where it is absent::

        for group in loss.update_order(data):
            for _ in range(epochs):
                step(loss.losses[group](data))
            loss.update_factor(data, group)

    Args:
        losses: group name → loss with a ratio (PPO and its kin).
        order: ``"random"`` draws a new order at every ``update_order()``, ``"fixed"`` keeps that of
            ``losses``.
        coeff: group name → weight of its losses in the sums, dimensionless.
        missing: ``"error"`` or ``"skip"``, where the data hold no entry of a group: it has no turn
            and no factor.

    Shapes:
        Data: each group's entries as its loss takes them; S is ``[*B, A]``, the root batch and the
        group's agents (``[*B]`` without any). Log-probs are in nats, advantages in units of return.
        Outputs are 0-dim. The factor is ``[*B, 1]``, or ``[*B, A, 1]`` where the group has agents;
        it is dimensionless.

    Raises:
        ConfigError: an unknown order, a member without a ratio, or what ``GroupLoss`` refuses.
        MissingKeyError: (call) the data hold no entry of a group and ``missing`` is "error", or a
            member finds no entry it needs.
        ShapeError: (call) an entry whose shape does not fit the samples.
        GraphError: (call) a stored log-prob or value requires grad.
        NonFiniteError: (call, a member that validates) a log-prob that counts is not finite.

    Source: Kuba et al. 2022, "Trust region policy optimisation in multi-agent reinforcement
    learning", eq. (10), arXiv 2109.11251.
    """

    needs_ratio: ClassVar[bool] = True

    def __init__(
        self,
        losses: Mapping[str, BaseLoss],
        order: str = "random",
        *,
        coeff: Mapping[str, float] | None = None,
        missing: str = "error",
    ) -> None:
        """Gives every member the key of its factor."""
        _check_order(order)
        super().__init__(losses, coeff=coeff, missing=missing)
        self.order = order
        for name, loss in losses.items():
            if loss.tensor_keys.factor is None:
                loss.set_keys(factor=(name, "happo_factor"))

    @property
    def order(self) -> str:
        """How ``update_order`` orders the groups: "random" or "fixed"."""
        return self._order

    @order.setter
    def order(self, value: str) -> None:
        _check_order(value)
        self._order = value

    def update_order(self, tensordict: TensorDictBase | None = None) -> list[str]:
        """Returns the groups in the order of their updates; torch's random state draws it.

        Args:
            tensordict: the data: groups that they do not hold are left out.

        Raises:
            MissingKeyError: a group has no entry in the data and ``missing`` is "error".
        """
        present = self._names if tensordict is None else self._present(tensordict)
        if self.order == "fixed":
            return list(present)
        drawn = [self._names[i] for i in torch.randperm(len(self._names)).tolist()]
        return [name for name in drawn if name in present]

    def _present(self, tensordict: TensorDictBase) -> tuple[str, ...]:
        """Returns the groups that the data hold; see ``_skips``."""
        return tuple(name for name in self._names if not self._skips(name, tensordict))

    def reset_factor(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Returns ``tensordict`` with its groups' factors set to 1: before a new sequence.

        Raises:
            MissingKeyError: a group has no entry in the data and ``missing`` is "error".
        """
        for name in self._present(tensordict):
            root = tensordict.batch_size
            like = next(iter(self._member(name).parameters()), torch.zeros(()))
            ones = torch.ones((*root, 1), dtype=like.dtype, device=tensordict.device or like.device)
            self._write(tensordict, name, ones)
        return tensordict

    def update_factor(
        self, tensordict: TensorDictBase, group: str, agent: int | None = None
    ) -> TensorDictBase:
        """Returns ``tensordict``, the factors of the others multiplied by ``group``'s ratio.

        Call it after the update of the group. The ratio is Π new/old over the group's heads and
        agents; masked agents count as 1. A group that has no entry in the data has none, and
        nothing is written for one.

        Args:
            tensordict: the data the group was updated on; the factors in it are written.
            group: the group that was just updated.
            agent: where the group's agents have parameters of their own and are updated one by
                one, the agent: its ratio then multiplies the other agents of the group, too.

        Raises:
            ShapeError: the group has no such agent.
            MissingKeyError: a group has no entry in the data and ``missing`` is "error".
        """
        member, present = self._member(group), self._present(tensordict)
        if group not in present:
            return tensordict
        log_ratio = member._behaviour_log_ratio(tensordict)
        root = tensordict.batch_dims
        agents = log_ratio.flatten(root) if log_ratio.ndim > root else log_ratio.unsqueeze(-1)
        if agent is None:
            ratio = F.ratio(agents.sum(-1, keepdim=True))
        else:
            if log_ratio.ndim != root + 1 or not 0 <= agent < log_ratio.shape[-1]:
                raise ShapeError(
                    f"group {group!r}: agent {agent} is not one of the agents of its log-probs "
                    f"{shown(log_ratio.shape)} (root batch {shown(tensordict.batch_size)})."
                )
            ratio = F.ratio(agents[..., agent : agent + 1])
            others = ratio.unsqueeze(-2).expand(*log_ratio.shape, 1).clone()
            others.select(root, agent).fill_(1.0)
            self._multiply(tensordict, group, others)
        for name in present:
            if name != group:
                self._multiply(tensordict, name, ratio)
        return tensordict

    def _multiply(self, td: TensorDictBase, group: str, ratio: Tensor) -> None:
        """Multiplies a group's factor by a ratio, ``[*B, 1]`` or ``[*B, A, 1]`` each."""
        factor = read_tensor(td, self._member(group).tensor_keys.factor)
        if factor is None:
            factor = torch.ones_like(ratio)
        while factor.ndim < ratio.ndim:
            factor = factor.unsqueeze(-2)
        while ratio.ndim < factor.ndim:
            ratio = ratio.unsqueeze(-2)
        self._write(td, group, (factor * ratio).detach())

    def _write(self, td: TensorDictBase, group: str, factor: Tensor) -> None:
        """Writes a group's factor, expanded over the agents where the group's batch has them."""
        key: Any = self._member(group).tensor_keys.factor
        batch = holder_batch(td, key)
        if len(path(key)) > 1 and len(batch) > factor.ndim - 1:
            extra = len(batch) - (factor.ndim - 1)
            shape = (*factor.shape[:-1], *(1,) * extra, 1)
            factor = factor.reshape(shape).expand(*batch, 1).clone()
        td.set(key, factor)


def _check_order(order: str) -> None:
    """Raises ConfigError where the order is unknown."""
    if order not in ORDERS:
        raise ConfigError(f"order: expected one of {ORDERS}, found {order!r}.")
