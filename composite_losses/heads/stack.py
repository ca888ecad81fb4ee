"""Stacking heads into the one entry that multi-discrete environments read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModuleBase

from composite_losses.errors import MissingKeyError, ShapeError
from composite_losses.heads.keys import as_key, listing, path, read_tensor


class StackHeads(TensorDictModuleBase):
    """Writes the heads of an actor, ``[*S]`` each, as one entry ``[*S, H]``.

    Put it after the actor, in a ``TensorDictSequential``; the losses read the single heads and
    leave the stacked entry alone.

    Args:
        in_keys: action keys of the heads, in the environment's order.
        out_key: the entry that the environment reads.

    Raises:
        MissingKeyError: a head is not there.
        ShapeError: the heads' shapes differ.

    Example:
        >>> stack = StackHeads(["move", "say"], "action")
        >>> td = TensorDict({"move": torch.zeros(5), "say": torch.ones(5)}, [5])
        >>> stack(td)["action"].shape
        torch.Size([5, 2])
    """

    def __init__(self, in_keys: Sequence[NestedKey], out_key: NestedKey) -> None:
        """Keeps the keys."""
        super().__init__()
        self.in_keys = [as_key(path(key)) for key in in_keys]
        self.out_keys = [as_key(path(out_key))]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Returns the TensorDict with the stacked entry added."""
        values = []
        for key in self.in_keys:
            value = read_tensor(tensordict, key)
            if value is None:
                raise MissingKeyError(
                    f"StackHeads: no head under {key!r}. Keys present: {listing(tensordict)}."
                )
            values.append(value)
        if any(value.shape != values[0].shape for value in values):
            found = ", ".join(
                f"{k!r} {list(v.shape)}" for k, v in zip(self.in_keys, values, strict=True)
            )
            raise ShapeError(f"StackHeads: expected heads of one shape, found {found}.")
        return tensordict.set(self.out_keys[0], torch.stack(values, -1))
