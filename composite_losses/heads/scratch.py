"""Scratch data: what a call computes, laid over the user's entries, which stay as they are."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase

from composite_losses.heads.keys import Path, as_key, path, read, walk


class Scratch:
    """A view of a batch that can be written; nothing is copied before a module needs a TensorDict.

    Reads see what was written first, then the batch.
    """

    def __init__(self, tensordict: TensorDictBase) -> None:
        """Starts with nothing written."""
        self._td = tensordict
        self._own = False
        self._written: dict[Path, Any] = {}
        # first elements of what was written
        self._touched: set[str] = set()

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
        parts = path(key)
        if parts[0] not in self._touched:
            return read(self._td, key)
        for k in range(len(parts), 0, -1):
            if parts[:k] in self._written:
                return walk(self._written[parts[:k]], parts[k:])
        if any(written[: len(parts)] == parts for written in self._written):
            return walk(self.tensordict(), parts)
        return walk(self._td, parts)

    def set(self, key: NestedKey, value: Any) -> None:
        """Lays an entry over the batch."""
        parts = path(key)
        self._written[parts] = value
        self._touched.add(parts[0])

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
        self._written = {}
        self._touched = set()
        return self._td

    def keys(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the keys of the batch and of what was written."""
        return self.tensordict().keys(*args, **kwargs)

    def fork(self) -> Scratch:
        """Returns scratch data that starts with the same entries and is written apart."""
        twin = Scratch(self._td.copy() if self._own else self._td)
        twin._own = self._own
        twin._written = dict(self._written)
        twin._touched = set(self._touched)
        return twin


Data = TensorDictBase | Scratch
