"""Deterministic modules of a network, called straight on tensors where that is all they do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tensordict import NestedKey, TensorDict, TensorDictBase, is_tensor_collection
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn

from composite_losses.errors import MissingKeyError
from composite_losses.heads.keys import as_key, key_list, listing, path
from composite_losses.heads.scratch import Scratch, overlap

# the out_key of an output that is not kept
IGNORED = ("_",)


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
        self.out_paths = [path(key) for key in self.out_keys]
        self.plain = (
            isinstance(module, TensorDictModule)
            and type(module).forward is TensorDictModule.forward
            and module._kwargs is None
            and module.method is None
            and not module.method_kwargs
            and module.inplace is True
            and not any(overlap(out, self.out_paths) for out in self.out_paths)
        )

    def __call__(self, data: Scratch) -> None:
        """Runs the module; ``data`` receives its outputs."""
        module = self.module
        if not self.plain or hooked(module):
            td = data.tensordict()
            try:
                out = module(td)
            except KeyError as error:
                self._name_missing(data, error)
                raise
            if out is not td:
                td.update(out)
            return
        inputs = [data.get(key) for key in self.in_keys]
        inner = module._modules.get("module")
        try:
            out = (module.module if inner is None else inner)(*inputs)
        except Exception as error:
            self._name_missing(data, error)
            raise
        entries = zip(self.out_paths, self._outputs(out), strict=True)
        data.lay(entry for entry in entries if entry[0] != IGNORED)

    def _name_missing(self, data: Scratch, error: Exception) -> None:
        """Raises MissingKeyError if the module failed on inputs that are not there."""
        missing = [key for key in self.in_keys if data.get(key) is None]
        if missing and not isinstance(error, MissingKeyError):
            raise MissingKeyError(
                f"{', '.join(map(repr, missing))}: a network of the loss reads it, and it was not "
                f"found. Keys present: {listing(data.tensordict())}. Fix: store it with the batch."
            ) from error

    def _outputs(self, out: Any) -> tuple[Any, ...]:
        """Returns a module's result as one value per out_key."""
        if isinstance(out, Tensor) and len(self.out_paths) == 1:
            return (out,)
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
