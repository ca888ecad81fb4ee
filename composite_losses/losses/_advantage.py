"""The advantage of a batch: stored, or computed; the frame, and data that are safe to read."""

from __future__ import annotations

import logging
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from composite_losses.errors import ConfigError, MissingKeyError, ShapeError
from composite_losses.heads.keys import (
    Path,
    as_key,
    holder_batch,
    key_list,
    listing,
    path,
    read,
    read_tensor,
)
from composite_losses.heads.scratch import Data, Scratch
from composite_losses.heads.shapes import shown
from composite_losses.losses import _frame
from composite_losses.losses._frame import Frame
from composite_losses.losses._torchrl import Mixin, loss_context

logger = logging.getLogger("composite_losses")


class AdvantageSide(Mixin):
    """Mixin of a loss: reads the batch's frame and its advantage, or computes the latter."""

    _shared_keys: dict[str, NestedKey]

    def _stored_advantage(self, td: Data) -> Tensor | TensorDictBase | None:
        """Returns the stored advantage, without its graph, or None."""
        value = read(td, self.tensor_keys.advantage)
        if isinstance(value, Tensor):
            return value.detach() if value.requires_grad else value
        if isinstance(value, TensorDictBase):
            if getattr(self.surrogate, "ratio", None) != "per_head":
                raise ConfigError(
                    f"advantage {self.tensor_keys.advantage!r}: one advantage per head needs "
                    "ratio='per_head'."
                )
            return value.detach()
        return None

    def _frame(self, td: Data, advantage: Tensor | TensorDictBase | None) -> Frame:
        """Returns the frame of the batch."""
        sample = _frame.sample_shape(
            td,
            self._plan,
            advantage,
            advantage_key=self.tensor_keys.advantage,
        )
        if advantage is None and len(sample) == td.batch_dims:
            sample = self._longer_sample(td)
        mask = _frame.find_mask(td, sample, *self._mask_keys())
        active = {
            position: _frame.required_mask(td, sample, key)
            for position, key in self._head_active_keys().items()
        }
        return Frame(sample, td.batch_dims, mask, active)

    def _longer_sample(self, td: Scratch) -> torch.Size:
        """Returns the sample shape of a group whose TensorDict does not tell its agents apart."""
        root, names = td.batch_size, self.tensor_keys
        if self.team_value:
            # a team's value does not show them, the policy does
            with torch.no_grad(), loss_context(self):
                terms = self._run_actor(Scratch(td.tensordict().copy()))
            for term in terms:
                if len(term.batch_shape) > len(root):
                    return term.batch_shape[: len(root) + 1]
            return root
        for key in (names.value, ("next", *path(names.reward))):
            value = read_tensor(td, as_key(path(key)))
            if value is None or value.ndim < 2 or value.shape[-1] != 1:
                continue
            if len(value.shape) > len(root) + 1 and value.shape[: len(root)] == root:
                return value.shape[:-1]
        if self.critic_network is None or len(path(names.value)) < 2:
            return root
        # no entry has a sample's shape, so the critic's output must show it
        held = self._with(self.critic_network, self.critic_network_params)
        with torch.no_grad(), loss_context(self), held:
            value = read_tensor(self.critic_network(td.tensordict().copy()), names.value)
        if value is None or value.ndim < len(root) + 2 or value.shape[-1] != 1:
            return root
        return value.shape[:-1]

    def _neutralise(self, td: Scratch, frame: Frame, for_advantage: bool) -> None:
        """Replaces what rows that do not count hold, wherever networks will read."""
        if frame.mask is None:
            return
        keys = self._network_keys()
        if for_advantage and self.critic_network is not None:
            keys += [as_key(("next", *path(k))) for k in key_list(self.critic_network.in_keys)]
        _frame.neutralise(
            td,
            keys,
            frame,
            one_keys=self._program.parameter_keys,
            keep_finite=self._recurrent,
        )
        if for_advantage:
            names = self.tensor_keys
            dim = _frame.time_dim(td)
            if dim is not None:
                _frame.neutralise_trajectory(
                    td, frame, names.reward, (names.done, names.terminated), dim
                )

    def _share_signals(self, td: Scratch, frame: Frame) -> None:
        """Gives every agent, in a copy of the data, the reward and ends that a whole team shares.

        A group without an entry of its own takes the root's. What has the root's batch shape is
        expanded over the agents, decided by shapes, so that B = T = A changes nothing.
        """
        if self.critic_network is None and not self._return_keys():
            raise MissingKeyError(
                f"advantage {self.tensor_keys.advantage!r} not found, and without a critic network "
                f"it cannot be computed. Keys present: {listing(td)}."
            )
        if self.team_value:
            self._open_groups(td)
        found: list[tuple[Path, Tensor]] = []
        for name in ("reward", "done", "terminated"):
            parts = ("next", *path(getattr(self.tensor_keys, name)))
            source, value = as_key(parts), read_tensor(td, as_key(parts))
            if value is None and name in self._shared_keys:
                source = as_key(("next", *path(self._shared_keys[name])))
                value = read_tensor(td, source)
            if value is not None:
                own = source == as_key(parts)
                found.append((parts, self._signal(name, source, value, td, frame, own=own)))
        if self.critic_network is not None:
            self._check_signals(td, {as_key(parts) for parts, _ in found})
        td.lay(found)

    def _signal(
        self, name: str, key: NestedKey, value: Tensor, td: Scratch, frame: Frame, *, own: bool
    ) -> Tensor:
        """Returns a reward or an end in the shape that the value estimator expects.

        Raises:
            ShapeError: it has neither the team's nor the agents' shape.
        """
        root, sample = td.batch_size, frame.sample
        if value.shape == ((*root, 1) if self.team_value else (*sample, 1)):
            return value
        if self.team_value:
            if name != "reward" and value.shape == (*sample, 1):
                return value.flatten(len(root)).all(-1, keepdim=True)
            raise ShapeError(
                f"{key!r}: team_value=True needs the team's {name}, {shown((*root, 1))}, found "
                f"{shown(value.shape)}. Name it with set_keys({name}=...)."
            )
        if value.shape == (*root, 1):
            extra = (1,) * (len(sample) - len(root))
            return value.reshape(*root, *extra, 1).expand(*sample, 1)
        if own and len(sample) == len(root):
            return value  # the estimator may know more of the samples than the batch size says
        shapes = " or ".join(dict.fromkeys((shown((*root, 1)), shown((*sample, 1)))))
        raise ShapeError(
            f"{key!r}: expected the {name} of shape {shapes}, found {shown(value.shape)}. Give it "
            f"that shape (its last dim is 1), or name another entry with set_keys({name}=...)."
        )

    def _check_signals(self, td: Scratch, found: set[NestedKey]) -> None:
        """Raises MissingKeyError unless all is there that the value estimator reads."""
        if not self._writes_value():
            raise self._not_written()
        used = getattr(self._value_estimator, "tensor_keys", self.tensor_keys)
        for name in ("reward", "done"):
            key = as_key(("next", *path(getattr(used, name))))
            if key not in found and read(td, key) is None:
                raise MissingKeyError(
                    f"{name} {key!r}: not found, and the advantage {self.tensor_keys.advantage!r} "
                    f"cannot be computed without it. Keys present: {listing(td)}. Fix: store it, "
                    f"or name it with set_keys({name}=...)."
                )

    def _computed_advantage(self, td: Scratch, frame: Frame) -> tuple[Tensor, Tensor | None]:
        """Returns (advantage, value target) from the value estimator, which writes on the copy."""
        names = self.tensor_keys
        self._estimate(td)
        advantage = td.get(names.advantage).detach()
        root = (*td.batch_size, 1)
        if self.team_value and advantage.shape == root:
            extra = (1,) * (len(frame.sample) - td.batch_dims)
            advantage = advantage.reshape(*td.batch_size, *extra, 1).expand(*frame.sample, 1)
        if advantage.shape[: td.batch_dims] != td.batch_size or advantage.shape[-1] != 1:
            raise ShapeError(
                f"advantage {names.advantage!r}: the value estimator gave "
                f"{shown(advantage.shape)}, expected {shown((*frame.sample, 1))}. Give the reward, "
                "done and value keys of the actions' group with set_keys(...)."
            )
        return advantage, td.get(names.value_target)

    def _estimate(self, td: Scratch, params: Any = None, target_params: Any = None) -> None:
        """Runs the value estimator on a copy of the data, whose entries are safe to read."""
        names = self.tensor_keys
        if self._value_estimator is None:
            logger.info(
                "%s builds its default value estimator %s; make_value_estimator(...) sets another.",
                type(self).__name__,
                self.default_value_estimator,
            )
        if read(td, as_key(("next", *path(names.value)))) is None:
            # a value of one step only is not what an estimator can go by
            td.drop(names.value)
        estimator = self.value_estimator
        if self._functional:
            params = self._cached_critic_network_params_detached if params is None else params
            if target_params is None:
                target_params = self.target_critic_network_params
        data = td.tensordict()
        try:
            estimator(data, params=params, target_params=target_params)
        except (KeyError, RuntimeError) as error:
            self._explain(data, error)
            raise

    def _explain(self, td: TensorDictBase, error: Exception) -> None:
        """Raises MissingKeyError where an estimator failed for want of what the critic reads."""
        critic = self.critic_network
        for key in [] if critic is None else key_list(list(critic.in_keys)):
            for wanted in (key, as_key(("next", *path(key)))):
                if read(td, wanted) is None:
                    raise MissingKeyError(
                        f"{wanted!r}: not found; the critic reads it for the advantage "
                        f"{self.tensor_keys.advantage!r}, which the data do not hold. Fix: store "
                        "one of both."
                    ) from error

    def _open_groups(self, data: Scratch) -> None:
        """Shortens the batch size of groups, in a copy, so that they can hold a team's entries."""
        names, td = self.tensor_keys, data.tensordict()
        for name in ("advantage", "value_target", "value", "reward", "done", "terminated"):
            key = getattr(names, name)
            for parts in (path(key)[:-1], ("next", *path(key)[:-1])):
                node = read(td, as_key(parts)) if parts else None
                if isinstance(node, TensorDictBase) and node.batch_dims > td.batch_dims:
                    node.batch_size = td.batch_size

    @torch.no_grad()
    def _estimated(
        self, tensordict: TensorDictBase, params: Any = None, target_params: Any = None
    ) -> dict[NestedKey, Tensor]:
        """Returns the advantage and the value target of a batch, by key; the batch is unchanged."""
        self._settle(tensordict)
        names = self.tensor_keys
        td = Scratch(tensordict)
        frame = self._frame(td, None)
        self._share_signals(td, frame)
        td.drop(names.advantage)
        self._neutralise(td, frame, for_advantage=True)
        self._estimate(td, params, target_params)
        out: dict[NestedKey, Tensor] = {}
        for key in (names.advantage, names.value_target):
            value, shape = td.get(key).detach(), holder_batch(tensordict, key)
            if self.team_value and (key == names.advantage or len(path(key)) > 1):
                # the group's batch size may not tell its agents apart
                shape = frame.sample if len(frame.sample) > len(shape) else shape
            extra = len(shape) - (value.ndim - 1)
            if extra > 0:
                value = value.reshape(*value.shape[:-1], *(1,) * extra, 1)
                value = value.expand(*shape, 1).clone()
            out[as_key(path(key))] = value
        return out
