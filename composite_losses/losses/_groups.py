"""What every loss over a map of agent groups shares: members, keys, the sum of the losses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor, nn

from composite_losses.errors import ConfigError, MissingKeyError
from composite_losses.heads.keys import as_key, listing, path, read
from composite_losses.heads.terms import in_float32
from composite_losses.losses._base import BaseLoss
from composite_losses.losses._options import scalar
from composite_losses.losses._outputs import Outputs, packed
from composite_losses.losses._torchrl import LossMeta, LossModule

# what a group keeps under its own name, and what may stand at the root for all groups
GROUP_KEYS = ("advantage", "value_target", "value", "reward", "done", "terminated")
SHARED_KEYS = ("reward", "done", "terminated")


class GroupEstimator:
    """Computes the advantages and value targets of all groups, and writes them into the data."""

    def __init__(self, groups: Groups) -> None:
        """Keeps the loss whose members estimate."""
        self.groups = groups

    def __call__(
        self, tensordict: TensorDictBase, params: Any = None, target_params: Any = None
    ) -> TensorDictBase:
        """Returns ``tensordict`` with every group's advantage and value target.

        Args:
            tensordict: the data, time along the dim named "time" (else the last batch dim).
            params: group name → critic parameters; the current ones, detached, by default.
            target_params: group name → critic parameters of the next state.

        Raises:
            MissingKeyError: a group has no entry in the data and ``missing`` is "error".
        """
        written: dict[NestedKey, Tensor] = {}  # all groups', or none where one fails
        for name, loss in self.groups.losses.items():
            if loss.critic_network is None or self.groups._skips(name, tensordict):
                continue
            written |= loss._estimated(
                tensordict, (params or {}).get(name), (target_params or {}).get(name)
            )
        for key, value in written.items():
            tensordict.set(key, value)
        return tensordict


class Groups(Outputs, LossModule, metaclass=LossMeta):
    """Base of the losses over a map of groups; abstract."""

    # whether every member must have a ratio
    needs_ratio: ClassVar[bool] = False

    def __init__(
        self,
        losses: Mapping[str, BaseLoss],
        coeff: Mapping[str, float] | None = None,
        missing: str = "error",
    ) -> None:
        """Registers the members and gives them their groups' keys."""
        super().__init__()
        self.missing = missing
        _check_members(losses, self.needs_ratio)
        self._names = tuple(losses)
        weights = None if coeff is None else _vector(coeff, self._names)
        # what the losses of an absent group are: a backward pass over nothing else works
        self._zero = torch.zeros((), requires_grad=True)
        self._selected_in_keys: list[NestedKey] | None = None
        self._selected_out_keys: list[str] | None = None
        for name, loss in losses.items():
            self.add_module(_child(name), loss)
            _adopt(loss, name)
        first = next(iter(self.parameters()), None)
        if weights is not None and first is not None:
            weights = weights.to(first.device)
        self.register_buffer("coeff", weights)

    @classmethod
    def from_group_map(
        cls,
        group_map: Mapping[str, Any] | Iterable[str],
        make_loss: Callable[[str], BaseLoss],
        **options: Any,
    ) -> Any:
        """Returns the loss over ``{group: make_loss(group)}``.

        Args:
            group_map: the groups: an environment's ``group_map``, or their names.
            make_loss: builds the loss of the group with the given name.
            **options: the constructor's.

        Raises:
            ConfigError: one string instead of names.
        """
        if isinstance(group_map, str):
            raise ConfigError(
                f"group_map: expected a mapping or a list of group names, found {group_map!r}."
            )
        return cls({name: make_loss(name) for name in group_map}, **options)

    @property
    def missing(self) -> str:
        """What happens where the data hold no entry of a group: "error" or "skip"."""
        return self._missing

    @missing.setter
    def missing(self, value: str) -> None:
        if value not in ("error", "skip"):
            raise ConfigError(f"missing: expected 'error' or 'skip', found {value!r}.")
        self._missing = value

    @property
    def losses(self) -> Mapping[str, BaseLoss]:
        """The members: group name → loss."""
        return MappingProxyType({name: self._member(name) for name in self._names})

    def _member(self, name: str) -> BaseLoss:
        """Returns the loss of a group.

        Raises:
            KeyError: there is no such group.
        """
        if name not in self._names:
            raise MissingKeyError(
                f"group {name!r}: not known; the groups are {', '.join(map(repr, self._names))}."
            )
        return self._modules[_child(name)]

    # --- forward --------------------------------------------------------------------------------

    def _outputs(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Returns the summed losses, and every group's losses and metrics as ``"<group>/<name>"``.

        Raises:
            MissingKeyError: a group has no entry in the data and ``missing`` is "error".
        """
        totals: dict[str, Tensor] = {}
        entries: dict[str, Tensor] = {}
        for position, name in enumerate(self._names):
            member = self._member(name)
            skipped = self._skips(name, tensordict)
            out = self._blank(member) if skipped else dict(member(tensordict).items())
            for key, value in out.items():
                entries[f"{name}/{key}"] = value
                if key.startswith("loss"):
                    part = value if self.coeff is None else value * self.coeff[position]
                    totals[key] = totals[key] + part if key in totals else part
        return packed(totals | entries)

    def _skips(self, name: str, td: TensorDictBase) -> bool:
        """Returns whether a group has no entry in the data, and may have none.

        A root entry that the networks of several groups read is no group's own.
        """
        member = self._member(name)
        if any(read(td, head.action) is not None for head in member._plan.heads):
            return False
        shared = {k for n in self._names if n != name for k in self._member(n)._network_keys()}
        if any(read(td, key) is not None for key in member._network_keys() if key not in shared):
            return False
        if self.missing == "error":
            raise MissingKeyError(
                f"group {name!r}: the data hold no entry of it. Keys present: {listing(td)}. "
                "Fix: collect it, or build the loss with missing='skip'."
            )
        return True

    def _blank(self, member: BaseLoss) -> dict[str, Tensor]:
        """Returns the outputs of a group that has no entry in the data: losses 0, metrics NaN.

        Where ranks count together, another rank may have the group and waits for this one's
        counts and gradients: no row, and 0 for every parameter.
        """
        like = next(iter(member.parameters()), self._zero)
        zero, nan = self._zero.to(like), like.detach().new_full((), float("nan"))
        out = {key: zero if key.startswith("loss") else nan for key in member.out_keys}
        if not member.sync_counts:
            return out
        trained = [p for p in member.parameters() if p.requires_grad]
        # of no entry: a graph that reads nothing
        nothing = in_float32(sum((p.flatten()[:0].sum().to(zero) for p in trained), zero))
        rows, none = nothing.expand(1, 1), torch.zeros(1, 1, dtype=torch.bool, device=zero.device)
        for key in out:
            if key.startswith("loss"):  # the member reduces each of its losses once
                out[key] = member._reduced(rows, none)
        return out

    # --- keys -----------------------------------------------------------------------------------

    def set_keys(self, group: str | None = None, /, **keys: Any) -> None:
        """Sets keys of one group's loss, as that loss's ``set_keys`` does.

        Args:
            group: the group; without one, plain names are set inside every group, and a bare
                ``action="action"`` (TorchRL's trainers send it) changes nothing.
            **keys: see the members' ``set_keys``. ``None`` restores the group's default. A reward,
                done or terminated key other than the default has no entry at the root to fall
                back to.

        Raises:
            ValueError, KeyError: as the members'; no group's keys are changed then.
        """
        if group is not None:
            self._set_keys(group, keys)
            return
        if keys.get("action") == "action":
            keys = {name: key for name, key in keys.items() if name != "action"}
        previous = {name: loss._keys_state() for name, loss in self.losses.items()}
        try:
            for name in self._names:
                own = {k: (name, v) if isinstance(v, str) else v for k, v in keys.items()}
                self._set_keys(name, own)
        except Exception:
            for name, state in previous.items():
                self._member(name)._restore_keys(state)
            raise

    def _set_keys(self, group: str, keys: Mapping[str, Any]) -> None:
        """Sets keys of one group's loss; None is the group's default where it has its own."""
        member = self._member(group)
        defaults = {name: _default(member, group, name) for name in GROUP_KEYS}
        own = {k: defaults[k] if v is None and k in defaults else v for k, v in keys.items()}
        try:
            member.set_keys(**own)
        except ConfigError as error:
            raise ConfigError(f"group {group!r}: {error}") from None
        for name in SHARED_KEYS:
            if name not in own:
                continue
            member._shared_keys.pop(name, None)
            if path(own[name]) == path(defaults[name]):
                member._shared_keys[name] = getattr(member.default_keys(), name)

    @property
    def in_keys(self) -> list[NestedKey]:
        """Every entry that a call may read, of all groups."""
        if self._selected_in_keys is not None:
            return self._selected_in_keys
        return list(dict.fromkeys(k for loss in self.losses.values() for k in loss.in_keys))

    @in_keys.setter
    def in_keys(self, values: list[NestedKey] | None) -> None:
        self._selected_in_keys = values

    def _all_out_keys(self) -> list[str]:
        """Names of all outputs: the sums first."""
        names = {name: loss.out_keys for name, loss in self.losses.items()}
        totals = [k for keys in names.values() for k in keys if k.startswith("loss")]
        entries = [f"{name}/{key}" for name, keys in names.items() for key in keys]
        return [*dict.fromkeys(totals), *entries]

    @property
    def loss_mask_key(self) -> Any:
        """The members' validity mask, where they agree."""
        keys = [loss.loss_mask_key for loss in self.losses.values()]
        return keys[0] if all(key == keys[0] for key in keys) else None

    @loss_mask_key.setter
    def loss_mask_key(self, value: Any) -> None:
        for loss in self.losses.values():
            loss.loss_mask_key = value

    # --- value estimation and mechanics ---------------------------------------------------------

    def make_value_estimator(self, value_type: Any = None, **hyperparams: Any) -> Any:
        """Builds the value estimator of every group that has a critic."""
        for loss in self.losses.values():
            if loss.critic_network is not None:
                loss.make_value_estimator(value_type, **hyperparams)
        return self

    @property
    def value_estimator(self) -> GroupEstimator:
        """Callable that writes every group's advantage and value target into the data."""
        return GroupEstimator(self)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the members' parameters, shared ones once."""
        seen: set[int] = set()
        for name in self._names:
            child = f"{prefix}.{_child(name)}" if prefix else _child(name)
            for key, parameter in self._member(name).named_parameters(child, recurse):
                if not remove_duplicate or id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield key, parameter

    def reset(self) -> None:
        """Resets what the members' surrogates adapt."""
        for loss in self.losses.values():
            loss.reset()


def _child(name: str) -> str:
    """Returns the name under which a group's loss is a submodule: without dots, no attribute's."""
    return "group_" + name.replace("%", "%25").replace(".", "%2E")


def _check_members(losses: Mapping[str, BaseLoss], needs_ratio: bool) -> None:
    """Raises ConfigError unless the members can be summed under their names."""
    if not isinstance(losses, Mapping):
        raise ConfigError(
            f"losses: expected a mapping group name → loss, found {type(losses).__name__}."
        )
    if not losses:
        raise ConfigError("GroupLoss: expected at least one group, found none.")
    owners: dict[int, str] = {}
    for name, loss in losses.items():
        if not isinstance(name, str) or name.startswith("loss"):
            raise ConfigError(
                f"group {name!r}: expected a string that does not start with 'loss' (trainers sum "
                "every entry that does)."
            )
        if not isinstance(loss, BaseLoss):
            raise ConfigError(
                f"group {name!r}: expected a loss of this library, found {type(loss).__name__}."
            )
        if loss.reduction == "none":
            raise ConfigError(
                f"group {name!r}: reduction='none' gives losses of several shapes, which cannot be "
                "summed; use 'mean' or 'sum'."
            )
        if needs_ratio and not loss.surrogate.uses_ratio:
            raise ConfigError(f"group {name!r}: HAPPO needs a loss with a ratio (PPO).")
        owner = owners.setdefault(id(loss), name if loss._group is None else loss._group)
        if owner != name:
            raise ConfigError(
                f"group {name!r}: the same loss is that of group {owner!r}, and its keys point "
                "there. Give every group a loss of its own: from_group_map(..., make_loss), or "
                "copy.deepcopy(loss) before a group has taken it."
            )


def _vector(coeff: Mapping[str, float], names: tuple[str, ...]) -> Tensor:
    """Returns the groups' coefficients in order, 1 where the mapping says nothing."""
    if not isinstance(coeff, Mapping):
        raise ConfigError(f"coeff: expected a mapping group name → weight, found {coeff!r}.")
    for name in coeff:
        if name not in names:
            raise ConfigError(
                f"coeff: unknown group {name!r}; the groups are {', '.join(map(repr, names))}."
            )
    return torch.stack([scalar(f"coeff[{name!r}]", coeff.get(name, 1.0)) for name in names])


def _default(loss: BaseLoss, group: str, name: str) -> NestedKey:
    """Returns a member's default key of the given name, inside its group."""
    return as_key((group, *path(getattr(loss.default_keys(), name))))


def _adopt(loss: BaseLoss, group: str) -> None:
    """Points the keys that a member still has at their defaults at the group's entries."""
    defaults = loss.default_keys()
    own = {
        name: _default(loss, group, name)
        for name in GROUP_KEYS
        if getattr(loss.tensor_keys, name) == getattr(defaults, name)
    }
    for name in SHARED_KEYS:
        if name in own:
            loss._shared_keys[name] = getattr(defaults, name)
    loss.set_keys(**own)
    loss._group = group
