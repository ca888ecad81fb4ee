"""Nested keys: paths, siblings, and reads that never raise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, is_tensor_collection, unravel_key

Path = tuple[str, ...]


def path(key: NestedKey) -> Path:
    """Returns a key as a tuple of strings, nested tuples unravelled."""
    if isinstance(key, str):
        return (key,)
    if all(isinstance(part, str) for part in key):
        return tuple(key)
    flat = unravel_key(key)
    return (flat,) if isinstance(flat, str) else tuple(flat)


def as_key(parts: Path) -> NestedKey:
    """Returns a path as TensorDict writes it: a bare string where there is one element."""
    return parts[0] if len(parts) == 1 else parts


def suffixed(key: NestedKey, suffix: str) -> NestedKey:
    """Returns the key with ``suffix`` added to its last element."""
    parts = path(key)
    return as_key((*parts[:-1], parts[-1] + suffix))


def sibling(key: NestedKey, name: str) -> NestedKey:
    """Returns the key ``name`` beside ``key``, in the same nested TensorDict."""
    return as_key((*path(key)[:-1], name))


def is_key(value: object) -> bool:
    """Returns whether ``value`` is one key (a string or a tuple of strings), not a list of keys."""
    if isinstance(value, str):
        return True
    return isinstance(value, tuple) and bool(value) and all(is_key(v) for v in value)


def key_list(value: NestedKey | Sequence[NestedKey]) -> list[NestedKey]:
    """Returns one key or several as a list of unravelled keys."""
    keys = [value] if is_key(value) else list(value)
    return [as_key(path(cast(NestedKey, key))) for key in keys]


def unique(keys: Sequence[NestedKey]) -> tuple[NestedKey, ...]:
    """Returns the keys without repetitions, first occurrence first."""
    return tuple(dict.fromkeys(keys))


class Reader(Protocol):
    """What entries can be read from: a TensorDict, or scratch data over one."""

    def get(self, key: NestedKey) -> Any:
        """Returns the entry under ``key``, or None."""

    def children(self, key: NestedKey) -> dict[str, Any] | None:
        """Returns what lies directly under ``key``, or None."""


def read(td: TensorDictBase | Reader, key: NestedKey) -> object | None:
    """Returns the entry under ``key``, or None where there is none.

    ``TensorDict.get`` raises where a prefix of the key is a tensor; for a look-up that tries one
    candidate after the other, that is an absent entry like any other.
    """
    if type(td) is TensorDict and isinstance(key, str):
        return cast(object, cast(Any, td)._get_str(key, None))
    if isinstance(td, TensorDictBase):
        return walk(td, path(key))
    return cast(object, td.get(key))


def is_tree(node: object) -> bool:
    """Returns whether it is a TensorDict or a tensorclass.

    ``is_tensor_collection`` consults all classes that it has met, which a compiled graph guards, so
    it is asked last.
    """
    return isinstance(node, TensorDictBase) or (
        node is not None and not isinstance(node, torch.Tensor) and is_tensor_collection(node)
    )


def walk(node: object, parts: Path) -> object | None:
    """Returns the entry of a tree, or None where a part of the path is missing."""
    for part in parts:
        if type(node) is TensorDict:
            node = cast(Any, node)._get_str(part, None)
        elif is_tree(node):
            node = cast(TensorDictBase, node).get(part, None)
        else:
            return None
    return node


def items(node: object) -> dict[str, Any] | None:
    """Returns the entries of a nested TensorDict by name, or None where it is none or empty."""
    return dict(cast(TensorDictBase, node).items()) or None if is_tree(node) else None


def children(td: TensorDictBase | Reader, key: NestedKey) -> dict[str, Any] | None:
    """Returns what lies directly under ``key``, by name, or None where nothing does."""
    if isinstance(td, TensorDictBase):
        return items(walk(td, path(key)))
    return td.children(key)


def read_tensor(td: TensorDictBase | Reader, key: NestedKey) -> torch.Tensor | None:
    """Returns the tensor under ``key``, or None where there is none or it is a TensorDict."""
    value = read(td, key)
    return value if isinstance(value, torch.Tensor) else None


def holder_batch(td: TensorDictBase, key: NestedKey) -> torch.Size:
    """Returns the batch size of the TensorDict that holds the entry ``key``."""
    parent = path(key)[:-1]
    node = read(td, as_key(parent)) if parent else td
    return torch.Size(node.batch_size if isinstance(node, TensorDictBase) else td.batch_size)


def listing(td: TensorDictBase) -> str:
    """Returns the keys that are present, for an error message."""
    keys = sorted(td.keys(include_nested=True, leaves_only=True), key=lambda k: path(k))
    return ", ".join(repr(key) for key in keys) or "none"
