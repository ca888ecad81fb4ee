"""The keys of a loss: what can be set, what is read, and the value estimator that shares them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tensordict import NestedKey
from torch import nn

from composite_losses.errors import ConfigError
from composite_losses.heads import ActorProgram, HeadPlan, compile_plan
from composite_losses.heads.keys import as_key, is_key, key_list, path
from composite_losses.losses._metrics import Labels
from composite_losses.losses._outputs import Outputs
from composite_losses.losses._torchrl import (
    AUTO_MASK_KEYS,
    ValueEstimatorBase,
    ValueEstimators,
    build_value_estimator,
)

ESTIMATOR_KEYS = ("advantage", "value", "value_target", "reward", "done", "terminated")


@dataclass
class AcceptedKeys:
    """Keys that ``set_keys`` accepts, and their defaults.

    Attributes:
        advantage: the advantage, ``[*S, 1]``.
        value_target: the value target, ``[*S, 1]``.
        value: the value, in the data (behaviour) and in the critic's output.
        sample_log_prob: the behaviour log-prob: one key, or a list with one per head. One key
            for several heads means one joint log-prob.
        action: the action: one key, or a list with one per head.
        reward: the reward, under ``"next"``.
        done: the end of a trajectory, under ``"next"``.
        terminated: the end by termination, under ``"next"``.
        agent_mask: True where an agent (or a row) counts, ``[*S]`` or ``[*S, 1]``.
        head_active: head name → key of a mask, True where that head counts.
        factor: what multiplies the (standardised) advantage, without gradient, ``[*B, 1]`` or
            ``[*S, 1]``; 1 where it is absent.
    """

    advantage: NestedKey = "advantage"
    value_target: NestedKey = "value_target"
    value: NestedKey = "state_value"
    sample_log_prob: NestedKey | list[NestedKey] = "action_log_prob"
    action: NestedKey | list[NestedKey] = "action"
    reward: NestedKey = "reward"
    done: NestedKey = "done"
    terminated: NestedKey = "terminated"
    agent_mask: NestedKey | None = None
    head_active: Mapping[Any, NestedKey] | None = None
    factor: NestedKey | None = None


class Keys(Outputs):
    """Mixin of a loss: its keys, head plan and value estimator."""

    _tensor_keys: Any
    _program: ActorProgram
    _plan: HeadPlan
    _labels: Labels
    _columns: dict[str, tuple[NestedKey, int]] | None
    _user_keys: dict[str, Any]
    _selected_in_keys: list[NestedKey] | None
    _shared_keys: dict[str, NestedKey]
    # the group whose keys a loss over groups has given to this one
    _group: str | None = None
    actor_network: nn.Module
    critic_network: nn.Module | None

    def _adopt_actor_keys(self) -> None:
        """Shows the keys that the actor declares, as TorchRL's losses do."""
        steps = self._program.steps
        actions = [key for step in steps for key in step.out_keys]
        log_probs = [key for step in steps for key in (step.declared or step.joint)]
        for name, keys in (("action", actions), ("sample_log_prob", log_probs)):
            if keys:
                setattr(self._tensor_keys, name, keys[0] if len(keys) == 1 else keys)

    def _compile_plan(self) -> None:
        """Compiles the head plan from the actor and the user's keys."""
        self._plan = compile_plan(
            self._program.slots,
            self._program.joint,
            action=self._user_keys.get("action"),
            log_prob=self._user_keys.get("sample_log_prob"),
            columns=self._columns,
        )
        self._labels = Labels(self._plan.names)

    def set_keys(self, **kwargs: Any) -> None:
        """Sets the keys of the entries that the loss reads.

        Args:
            **kwargs: any of advantage, value_target, value, sample_log_prob, action, reward, done,
                terminated, agent_mask, head_active, factor. ``None`` restores a default. ``action``
                and ``sample_log_prob`` take one key or a list with one per head; one action key for
                a composite actor renames nothing.

        Raises:
            ValueError: an unknown name.
            ConfigError: what is no key, or a list whose length is not the number of heads.
            KeyError: a value that the critic does not write, where there is a value estimator.

        No key is changed where one is refused.
        """
        for name, key in kwargs.items():
            if name not in AcceptedKeys.__dataclass_fields__:
                raise ValueError(
                    f"{name} is not an accepted tensordict key. Accepted keys are: "
                    f"{', '.join(AcceptedKeys.__dataclass_fields__)}."
                )
            _check_key(name, key)
        previous = self._keys_state()
        try:
            super().set_keys(**kwargs)
            self._keep_user_keys(kwargs)
            self._compile_plan()
            self._head_active_keys()
            self._forward_value_estimator_keys()
        except Exception:
            self._restore_keys(previous)
            raise

    def _keep_user_keys(self, given: Mapping[str, Any]) -> None:
        """Notes which keys of actions and log-probs are the user's, and shows the actor's else."""
        names = ("action", "sample_log_prob")
        for name in names:
            if name in given:
                self._user_keys.pop(name, None)
                if given[name] is not None:
                    self._user_keys[name] = given[name]
        if any(given.get(name, "") is None for name in names):
            restored = replace(self._tensor_keys)
            self._adopt_actor_keys()
            for name in names:
                if given.get(name, "") is not None:
                    setattr(self._tensor_keys, name, getattr(restored, name))

    def _keys_state(self) -> tuple[AcceptedKeys, dict[str, Any], dict[str, NestedKey]]:
        """Returns what ``_restore_keys`` goes back to."""
        return replace(self._tensor_keys), dict(self._user_keys), dict(self._shared_keys)

    def _restore_keys(self, state: tuple[Any, dict[str, Any], dict[str, NestedKey]]) -> None:
        """Sets the keys back to what they were."""
        self._tensor_keys, self._user_keys, self._shared_keys = state
        self._compile_plan()
        self._forward_value_estimator_keys()

    def _head_active_keys(self) -> dict[int, NestedKey]:
        """Returns head position → key of the mask that says where the head counts."""
        found: dict[int, NestedKey] = {}
        for name, key in (self.tensor_keys.head_active or {}).items():
            position = self._plan.index(name)
            if position is None:
                raise ConfigError(
                    f"set_keys(head_active=...): unknown head {name!r}; the heads are "
                    f"{', '.join(map(repr, self._plan.names))}."
                )
            found[position] = as_key(path(key))
        return found

    def _mask_keys(self) -> tuple[list[NestedKey], list[NestedKey]]:
        """Returns (mask keys that may be absent, mask keys that must be there)."""
        key = self.loss_mask_key
        optional = list(AUTO_MASK_KEYS) if key == "auto" else []
        required = [] if key is None or key == "auto" else [key]
        if self.tensor_keys.agent_mask is not None:
            required.append(self.tensor_keys.agent_mask)
        return [as_key(path(k)) for k in optional], [as_key(path(k)) for k in required]

    def _network_keys(self) -> list[NestedKey]:
        """Keys that the networks read from the data."""
        keys = list(self._program.input_keys)
        if self.critic_network is not None:
            keys += list(self.critic_network.in_keys)  # type: ignore[arg-type]
        return list(dict.fromkeys(as_key(path(key)) for key in keys))

    def _own_in_keys(self) -> list[NestedKey]:
        """Keys that a loss of this kind reads besides networks, actions, value and masks."""
        return []

    @property
    def in_keys(self) -> list[NestedKey]:
        """Every entry that a call may read, optional ones included, and nothing else."""
        if self._selected_in_keys is not None:
            return self._selected_in_keys
        names = self.tensor_keys
        optional, required = self._mask_keys()
        keys: list[NestedKey] = [
            *self._network_keys(),
            *(head.action for head in self._plan.heads),
            names.advantage,
        ]
        if self.critic_network is not None:
            critic_keys = key_list(list(self.critic_network.in_keys))  # type: ignore[arg-type]
            keys += [names.value_target, names.value]
            keys += [as_key(("next", *path(key))) for key in critic_keys]
        keys += self._return_keys()
        keys += self._own_in_keys()
        if self.value_type == getattr(ValueEstimators, "VTrace", None):
            keys += key_list(names.sample_log_prob)
            keys += [as_key(("next", *path(k))) for k in self._program.input_keys]
        keys += [*optional, *required, *self._head_active_keys().values()]
        keys += [] if names.factor is None else [names.factor]
        return list(dict.fromkeys(as_key(path(key)) for key in keys))

    @in_keys.setter
    def in_keys(self, values: list[NestedKey] | None) -> None:
        self._selected_in_keys = values

    def _return_keys(self) -> list[NestedKey]:
        """Keys that an advantage is computed from, where the data hold none."""
        if self.critic_network is None:
            return []
        names = (self.tensor_keys.reward, self.tensor_keys.done, self.tensor_keys.terminated)
        # a group's own entries, and the root's that stand in for them
        return [as_key(("next", *path(name))) for name in (*names, *self._shared_keys.values())]

    def make_value_estimator(self, value_type: Any = None, **hyperparams: Any) -> Any:
        """Builds the value estimator that computes the advantage where the data hold none.

        Args:
            value_type: a ``ValueEstimators`` member, an estimator or an estimator class of TorchRL;
                GAE by default.
            **hyperparams: its options, e.g. ``gamma`` and ``lmbda``.
        """
        value_type = self.default_value_estimator if value_type is None else value_type
        if isinstance(value_type, ValueEstimatorBase) or (
            isinstance(value_type, type) and issubclass(value_type, ValueEstimatorBase)
        ):
            return super().make_value_estimator(value_type, **hyperparams)
        if "device" not in hyperparams and self._default_device is not None:
            hyperparams["device"] = self._default_device
        if self.critic_network is not None and not self._writes_value():
            raise self._not_written()
        build_value_estimator(self, value_type, self._estimator_keys(), **hyperparams)
        return self

    def _estimator_keys(self) -> dict[str, Any]:
        """Keys that the value estimator shares with the loss."""
        keys = {name: getattr(self.tensor_keys, name) for name in ESTIMATOR_KEYS}
        return {**keys, "sample_log_prob": self.tensor_keys.sample_log_prob}

    def _forward_value_estimator_keys(self, **kwargs: Any) -> None:
        """Passes the keys on to the value estimator, if there is one."""
        if self._value_estimator is not None:
            self._value_estimator.set_keys(**self._estimator_keys())


def _one_key(value: Any) -> bool:
    """Returns whether a value is one key, a configuration's list of strings included."""
    listed = isinstance(value, Sequence) and bool(value) and all(isinstance(x, str) for x in value)
    return is_key(value) or listed


def _check_key(name: str, value: Any) -> None:
    """Raises ConfigError unless the value can be the key of that name."""
    expected, fits = "one key: a string or a tuple of strings", value is None or _one_key(value)
    if name in ("action", "sample_log_prob"):
        expected += ", or a list with one per head"
        fits = fits or (isinstance(value, Sequence) and all(map(_one_key, value)))
    if name == "head_active":
        expected = "a mapping head name → key"
        fits = value is None or (isinstance(value, Mapping) and all(map(_one_key, value.values())))
    if not fits:
        raise ConfigError(
            f"set_keys({name}=...): expected {expected} (None restores the default), "
            f"found {value!r}."
        )
