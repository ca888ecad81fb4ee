"""Deterministic modules of a network, called straight on tensors where that is all they do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tensordict import NestedKey, TensorDict, TensorDictBase, is_tensor_collection
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn

from composite_losses.errors import MissingKeyError
from composite_losses.heads.keys import as_key, key_list, listing, path
from composite_losses.heads.scratch import Scratch


class Call:
    """One module of a network, applied to scratch data.

    A plain ``TensorDictModule`` hands its inputs to its module and its outputs to the scratch data,
    without a TensorDict in between; anything else gets a TensorDict and does what it does.
    """

    def __init__(self, module: nn.Module) -> None:
        """Looks once at what kind of module it is."""
        self.module: Any = module
        self.in_keys = key_list(getattr(module, "in_keys", None) or [])
        self.out_keys = key_list(getattr(module, "out_keys", None) or [])
        self.plain = (
            isinstance(module, TensorDictModule)
            and type(module).forward is TensorDictModule.forward
            and module._kwargs is None
            and module.method is None
            and not module.method_kwargs
            and module.inplace is True
        )

    def __call__(self, data: Scratch) -> None:
        """Runs the module; ``data`` receives its outputs."""
        if not self.plain or hooked(self.module):
            td = data.tensordict()
            out = self.module(td)
            if out is not td:
                td.update(out)
            return
        inputs = [data.get(key) for key in self.in_keys]
        try:
            out = self.module.module(*inputs)
        except Exception as error:
            missing = [k for k, v in zip(self.in_keys, inputs, strict=True) if v is None]
            if missing:
                raise MissingKeyError(
                    f"{', '.join(map(repr, missing))}: a network of the loss reads it, and it was "
                    f"not found. Keys present: {listing(data.tensordict())}. Fix: store it "
                    "with the batch."
                ) from error
            raise
        for key, value in zip(self.out_keys, self._outputs(out), strict=True):
            if key != "_":
                data.set(key, value)

    def _outputs(self, out: Any) -> tuple[Any, ...]:
        """Returns a module's result as one value per out_key."""
        named = isinstance(out, (dict, TensorDictBase))
        if named and all(key in out for key in self.out_keys):
            out = tuple(out[key] for key in self.out_keys)
        if not isinstance(out, tuple):
            out = (out,)
        if len(out) != len(self.out_keys):
            raise RuntimeError(
                f"{type(self.module).__name__}: its module gave {len(out)} output(s) for "
                f"{len(self.out_keys)} out_keys: {self.out_keys}."
            )
        return tuple(x if _known(x) else TensorDict.from_any(x) for x in out)


def calls(module: nn.Module) -> Iterator[Call]:
    """Yields the calls of a deterministic network in order, plain sequences opened."""
    if (
        isinstance(module, TensorDictSequential)
        and type(module).forward is TensorDictSequential.forward
        and not module.partial_tolerant
        and not hooked(module)
    ):
        children = module.module
        for child in children.values() if isinstance(children, nn.ModuleDict) else children:
            yield from calls(child)
    else:
        yield Call(module)


def input_keys(reads: list[Any]) -> list[NestedKey]:
    """Returns what a sequence of calls (and steps) reads that none of its calls has written.

    A parent of what was written, and what lies inside it, come from the run, too.
    """
    written: list[tuple[str, ...]] = []
    found: dict[NestedKey, None] = {}
    for item in reads:
        for key in map(path, item.in_keys):
            if not any(key[: len(w)] == w[: len(key)] for w in written):
                found[as_key(key)] = None
        if isinstance(item, Call):
            written += map(path, item.out_keys)
    return list(found)


def _known(value: object) -> bool:
    """Returns whether a value can be stored as it is."""
    return isinstance(value, Tensor) or is_tensor_collection(value)


def hooked(module: nn.Module) -> bool:
    """Returns whether something listens to the module's calls."""
    return bool(module._forward_hooks or module._forward_pre_hooks)
