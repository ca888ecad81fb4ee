"""The head plan: which heads a policy has and where the data hold what belongs to each.

Compiled once from the actor and the user's keys, then applied at every call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tensordict import NestedKey

from composite_losses.errors import ConfigError
from composite_losses.heads.keys import (
    as_key,
    is_key,
    key_list,
    path,
    sibling,
    suffixed,
    unique,
)

LEGACY_LOG_PROB = "sample_log_prob"


@dataclass(frozen=True)
class Slot:
    """One distribution of the actor, as the actor declares it.

    Attributes:
        action: key under which the actor writes the sample.
        log_probs: keys under which the actor may write the log-prob of this one head.
    """

    action: NestedKey
    log_probs: tuple[NestedKey, ...] = ()


@dataclass(frozen=True)
class Head:
    """One head: a distribution of the actor and the entries of the data that belong to it.

    Attributes:
        name: last element of the action key, or the path joined with "/" where that is ambiguous.
        slot: key of the distribution in the actor.
        action: key of the stored action.
        column: column of the stored action, where several heads are stacked in one entry.
        log_probs: candidates for the stored log-prob, in the order they are tried.
    """

    name: str
    slot: NestedKey
    action: NestedKey
    column: int | None
    log_probs: tuple[NestedKey, ...]


@dataclass(frozen=True)
class HeadPlan:
    """The heads of a policy, in the actor's order.

    Attributes:
        heads: the heads.
        joint: candidates for one log-prob of all heads.
        names: names of the heads.
        inside: one action key of every nested TensorDict that holds any.
    """

    heads: tuple[Head, ...]
    joint: tuple[NestedKey, ...]
    names: tuple[str, ...] = ()
    inside: tuple[NestedKey, ...] = ()

    def index(self, key: NestedKey) -> int | None:
        """Returns the position of the head that ``key`` stands for, or None.

        A head answers to its name, its action key, ``<action>_log_prob``, ``<action>_entropy`` and
        every key under which its log-prob may be stored.
        """
        wanted = as_key(path(key))
        for position, head in enumerate(self.heads):
            if wanted == head.name:
                return position
        for position, head in enumerate(self.heads):
            aliases = {head.action, head.slot, *head.log_probs}
            for base in (head.action, head.slot):
                aliases |= {suffixed(base, "_log_prob"), suffixed(base, "_entropy")}
            if len(self.heads) > 1:
                aliases.discard(LEGACY_LOG_PROB)
            if wanted in aliases and (head.column is None or wanted != head.action):
                return position
        return None


def head_names(actions: Sequence[NestedKey]) -> list[str]:
    """Returns a distinct name per action key: its last element, or the whole path if ambiguous."""
    last = [path(key)[-1] for key in actions]
    return [
        name if last.count(name) == 1 else "/".join(path(key))
        for name, key in zip(last, actions, strict=True)
    ]


def compile_plan(
    slots: Sequence[Slot],
    joint: Iterable[NestedKey] = (),
    *,
    action: NestedKey | Sequence[NestedKey] | None = None,
    log_prob: NestedKey | Sequence[NestedKey] | None = None,
    columns: Mapping[str, tuple[NestedKey, int]] | None = None,
) -> HeadPlan:
    """Returns the head plan of an actor under the user's keys.

    Args:
        slots: the actor's distributions.
        joint: keys under which the actor itself declares one log-prob for all its heads.
        action: what the user set as action key(s); one key for several heads renames nothing.
        log_prob: what the user set as log-prob key(s); one key for several heads is a joint one.
        columns: head name → (key, column), where the data hold the heads in one stacked entry.

    Raises:
        ConfigError: a list of keys whose length is not the number of heads, or an unknown head.
    """
    discovered = [slot.action for slot in slots]
    given = _paired(action, discovered, "action")
    actions = list(discovered) if given is None else given
    names = head_names(actions)
    log_probs, user_joint = _user_log_probs(log_prob, action, actions, slots)
    stacked = _stacked(columns, names, discovered)
    heads = []
    for i, slot in enumerate(slots):
        key, column = stacked.get(i, (actions[i], None))
        # a key that holds several stacked heads names no log-prob of a single one
        own = slot.action if column is not None else key
        candidates = [*log_probs[i], *slot.log_probs, suffixed(own, "_log_prob")]
        if len(slots) == 1:
            candidates += [sibling(own, LEGACY_LOG_PROB), LEGACY_LOG_PROB]
        heads.append(Head(names[i], slot.action, key, column, unique(candidates)))
    together: tuple[NestedKey, ...] = ()
    if len(slots) > 1:
        beside = [sibling(head.action, LEGACY_LOG_PROB) for head in heads]
        shared = _common_parent(actions)
        beside += [as_key((*shared[:k], LEGACY_LOG_PROB)) for k in range(len(shared), -1, -1)]
        together = unique([*user_joint, *joint, *beside, LEGACY_LOG_PROB])
    held = {path(head.action)[:-1]: head.action for head in reversed(heads)}
    inside = tuple(key for parent, key in held.items() if parent)
    return HeadPlan(tuple(heads), together, tuple(names), inside)


def _paired(
    keys: NestedKey | Sequence[NestedKey] | None, discovered: list[NestedKey], what: str
) -> list[NestedKey] | None:
    """Returns the user's keys in the discovered order, or None where they say nothing."""
    if keys is None:
        return None
    listed = key_list(keys)
    if is_key(keys) and len(discovered) > 1:
        # One key for a composite actor (trainers send action="action"): the heads stay.
        return None
    if len(listed) == 1 and len(discovered) == 1:
        if path(discovered[0])[: len(path(listed[0]))] == path(listed[0]):
            return None  # a prefix: the entry that holds the head's action
        return listed
    if len(listed) != len(discovered):
        raise ConfigError(
            f"set_keys({what}=...): expected one key per head, {len(discovered)} "
            f"({', '.join(map(repr, discovered))}), found {len(listed)} "
            f"({', '.join(map(repr, listed))})."
        )
    rest = iter([key for key in listed if key not in discovered])
    if set(listed) == set(discovered):
        return None
    kept = set(listed) & set(discovered)
    if kept:
        return [key if key in kept else next(rest) for key in discovered]
    return listed


def _user_log_probs(
    log_prob: NestedKey | Sequence[NestedKey] | None,
    action: NestedKey | Sequence[NestedKey] | None,
    actions: list[NestedKey],
    slots: Sequence[Slot],
) -> tuple[list[list[NestedKey]], list[NestedKey]]:
    """Returns the user's log-prob keys per head, and as joint keys."""
    n = len(slots)
    none: list[list[NestedKey]] = [[] for _ in range(n)]
    if log_prob is None:
        return none, []
    listed = key_list(log_prob)
    if len(listed) == 1:
        return ([[listed[0]]], []) if n == 1 else (none, listed)
    if len(listed) != n:
        raise ConfigError(
            f"set_keys(sample_log_prob=...): expected one key (a joint log-prob) or {n}, one per "
            f"head ({', '.join(map(repr, actions))}), found {len(listed)}."
        )
    order = list(range(n))
    declared = [(*slot.log_probs[:1], suffixed(slot.action, "_log_prob")) for slot in slots]
    owners = [next((i for i in range(n) if key in declared[i]), None) for key in listed]
    if sorted(o for o in owners if o is not None) == list(range(n)):
        order = [o for o in owners if o is not None]
    elif action is not None and not is_key(action):
        # TorchRL pairs the two lists by position, whatever the actor's order is.
        order = [
            actions.index(key) if key in actions else i for i, key in enumerate(key_list(action))
        ]
    for key, head in zip(listed, order, strict=True):
        none[head].append(key)
    return none, []


def _stacked(
    columns: Mapping[str, tuple[NestedKey, int]] | None,
    names: list[str],
    discovered: list[NestedKey],
) -> dict[int, tuple[NestedKey, int]]:
    """Returns head position → (key, column) of the heads that are read from a stacked entry."""
    found: dict[int, tuple[NestedKey, int]] = {}
    for name, value in (columns or {}).items():
        keys = [name, *path(name)] if isinstance(name, tuple) else [name]
        matches = [i for i, known in enumerate(names) if known in keys or discovered[i] == name]
        if not matches:
            raise ConfigError(
                f"heads={{...}}: the actor has no head {name!r}; its heads are "
                f"{', '.join(map(repr, names))}."
            )
        if not (isinstance(value, Sequence) and len(value) == 2 and isinstance(value[1], int)):
            raise ConfigError(f"heads={{{name!r}: ...}}: expected (key, column), found {value!r}.")
        column = (as_key(path(value[0])), value[1])
        if column in found.values():
            raise ConfigError(f"heads={{{name!r}: {value!r}}}: another head reads that column.")
        found[matches[0]] = column
    return found


def _common_parent(keys: Sequence[NestedKey]) -> tuple[str, ...]:
    """Returns the longest path that all keys' parents start with."""
    parents = [path(key)[:-1] for key in keys]
    shared: list[str] = []
    for parts in zip(*parents, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return tuple(shared)
