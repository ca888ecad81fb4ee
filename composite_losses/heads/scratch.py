"""Scratch data: what a call computes, laid over the user's entries, which stay as they are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase

from composite_losses.heads.keys import Path, as_key, items, path, read, walk


def overlap(parts: Path, others: Iterable[Path]) -> bool:
    """Returns whether an entry lies inside one of the others, or one of them inside it."""
    return any(other != parts and other[: len(parts)] == parts[: len(other)] for other in others)


class Scratch:
    """A view of a batch that can be written; nothing is copied before a module needs a TensorDict.

    Reads see what was written first, then the batch.
    """

    def __init__(self, tensordict: TensorDictBase) -> None:
        """Starts with nothing written."""
        self._td = tensordict
        self._own = False
        self._written: dict[Path, Any] = {}
        # first elements of what was written; the same entries by the node that holds them; and the
        # nodes above those
        self._touched: set[str] = set()
        self._nodes: dict[Path, dict[str, Any]] = {}
        self._above: set[Path] = set()

    @property
    def batch_size(self) -> torch.Size:
        """Batch size of the root."""
        return torch.Size(self._td.batch_size)

    @property
    def batch_dims(self) -> int:
        """Number of batch dims of the root."""
        return int(self._td.batch_dims)

    @property
    def names(self) -> list[str | None]:
        """Names of the batch dims."""
        return list(self._td.names)

    def get(self, key: NestedKey) -> Any:
        """Returns the entry under ``key``, or None."""
        if (key if isinstance(key, str) else path(key)[0]) not in self._touched:
            return read(self._td, key)
        parts = path(key)
        laid = self._laid(parts)
        if laid is not None:
            return walk(self._written[laid], parts[len(laid) :])
        if parts in self._nodes or parts in self._above:
            return walk(self.tensordict(), parts)
        return walk(self._td, parts)

    def children(self, key: NestedKey) -> dict[str, Any] | None:
        """Returns what lies directly under ``key``, by name, or None where nothing does."""
        parts = path(key)
        if parts in self._above or self._laid(parts) is not None:
            return items(walk(self.tensordict(), parts))
        new, found = self._nodes.get(parts), items(walk(self._td, parts))
        if new is None:
            return found
        return new if found is None else {**found, **new}

    def set(self, key: NestedKey, value: Any) -> None:
        """Lays an entry over the batch."""
        self.lay(((path(key), value),))

    def lay(self, entries: Iterable[tuple[Path, Any]]) -> None:
        """Lays entries over the batch, none of them inside another."""
        before = self._touched
        touched = set(before)
        for parts, value in entries:
            if parts[0] in before and overlap(parts, self._written):
                self.tensordict()  # one lies in the other: the order decides
                before, touched = self._touched, set()
            self._written[parts] = value
            touched.add(parts[0])
            if len(parts) > 1:
                self._nodes.setdefault(parts[:-1], {})[parts[-1]] = value
                for k in range(1, len(parts) - 1):
                    self._above.add(parts[:k])
        self._touched = touched

    def drop(self, key: NestedKey) -> None:
        """Hides the entry under ``key``."""
        self.tensordict().exclude(key, inplace=True)

    def tensordict(self) -> TensorDictBase:
        """Returns a shallow copy of the batch with what was written, for a module to work on.

        What the module writes there is seen by later reads.
        """
        if not self._own:
            self._td, self._own = self._td.copy(), True
        for parts, value in self._written.items():
            self._td.set(as_key(parts), value)
        self._forget()
        return self._td

    def _laid(self, parts: Path) -> Path | None:
        """Returns what was laid over the batch and is the entry, or holds it, or None."""
        for k in range(len(parts), 0, -1):
            if parts[:k] in self._written:
                return parts[:k]
        return None

    def _forget(self) -> None:
        """Drops what was laid over the batch."""
        self._written, self._nodes = {}, {}
        self._touched, self._above = set(), set()

    def keys(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the keys of the batch and of what was written."""
        return self.tensordict().keys(*args, **kwargs)

    def fork(self) -> Scratch:
        """Returns scratch data that starts with the same entries and is written apart."""
        twin = Scratch(self._td.copy() if self._own else self._td)
        twin._own = self._own
        twin.lay(self._written.items())
        return twin


Data = TensorDictBase | Scratch
