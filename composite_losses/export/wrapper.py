"""Networks and policies as plain functions of named tensors: what every export format needs."""

from __future__ import annotations

import keyword
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
    set_interaction_type,
)
from torch import Tensor, nn

from composite_losses.errors import ConfigError, MissingKeyError
from composite_losses.heads import ActorProgram, Scratch
from composite_losses.heads.actor import Step
from composite_losses.heads.keys import as_key, listing, path, read_tensor


def argument_name(key: NestedKey) -> str:
    """Returns the name of a key as an argument: its path joined with "_", as dispatch names it."""
    name = "_".join(path(key))
    if not name.isidentifier() or keyword.iskeyword(name) or name == "self":
        raise ConfigError(f"key {key!r}: {name!r} is not a valid argument name for an export.")
    return name


class NamedTensors(nn.Module):
    """A TensorDict module, or a policy as its deterministic actions, as a function of tensors.

    ``forward`` takes one tensor per in_key, by name, and returns a dict of named tensors. Use
    ``named`` to build one: it gives every instance a ``forward`` with its own argument names.
    """

    def __init__(self, module: TensorDictModuleBase, in_keys: list[NestedKey]) -> None:
        """Compiles the policy, if it is one."""
        super().__init__()
        self.module = module
        self.in_keys = in_keys
        self.names = [argument_name(key) for key in in_keys]
        self.program: ActorProgram | None = None
        self.stages: list[Any] = [module]
        self.outputs = [as_key(path(key)) for key in module.out_keys]
        inner = list(module.modules())
        if any(isinstance(m, ProbabilisticTensorDictModule) for m in inner) or (
            not isinstance(module, TensorDictSequential) and hasattr(module, "get_dist")
        ):
            self.program = ActorProgram(module)
            self.stages = list(_stages(module))
            self.outputs = list(self._policy_outputs(inner))
        heads = [slot.action for slot in self.program.slots] if self.program else []
        keys = list(dict.fromkeys([*heads, *self.outputs]))
        if len({argument_name(key) for key in keys}) != len(keys):
            raise ConfigError(f"outputs {keys}: two of them have the same name.")

    def _policy_outputs(self, inner: Sequence[nn.Module]) -> Iterator[NestedKey]:
        """Yields the keys of what is made of the actions, and of recurrent states."""
        steps = [i for i, stage in enumerate(self.stages) if isinstance(stage, Step)]
        for stage in self.stages[steps[-1] + 1 :] if steps else ():
            yield from (as_key(path(key)) for key in stage.out_keys)
        for module in inner:
            if getattr(module, "is_recurrent", False):
                for key in getattr(module, "out_keys", ()):
                    if path(key)[0] == "next":
                        yield as_key(path(key))

    def run(self, values: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """Returns the named outputs for inputs in the order of ``in_keys``."""
        td = TensorDict({}, batch_size=[])
        for key, value in zip(self.in_keys, values, strict=True):
            td.set(key, value)
        heads: list[NestedKey] = []
        for stage in self.stages:
            if self.program is not None and self.program.opaque:
                found = self.program.run(Scratch(td))
            elif isinstance(stage, Step):
                found = stage.terms(td)
            else:
                out = stage(td)
                if out is not td:
                    td.update(out)
                continue
            heads += found
            for key, terms in found.items():
                td.set(key, terms.mode())
        return {argument_name(key): td.get(key) for key in dict.fromkeys([*heads, *self.outputs])}


def _stages(module: nn.Module) -> Iterator[Any]:
    """Yields a policy's modules in the order they run, distributions as steps."""
    if isinstance(module, ProbabilisticTensorDictModule):
        yield Step(module)
    elif isinstance(module, TensorDictSequential) and any(
        isinstance(m, ProbabilisticTensorDictModule) for m in module.modules()
    ):
        children = module.module
        for child in children.values() if isinstance(children, nn.ModuleDict) else children:
            yield from _stages(child)
    else:
        yield module


def named(module: TensorDictModuleBase) -> NamedTensors:
    """Returns the module as a function of named tensors.

    The generated ``forward`` has one parameter per input: exporters trace it with dynamic shapes,
    strict and not, where ``**kwargs`` cannot be traced.
    """
    keys = [as_key(path(key)) for key in module.in_keys if not _produced(module, key)]
    names = [argument_name(key) for key in keys]
    if len(set(names)) != len(names):
        raise ConfigError(f"in_keys {keys}: two of them have the same argument name.")
    arguments = ", ".join(names)
    source = f"def forward(self, {arguments}):\n    return self.run(({arguments},))\n"
    namespace: dict[str, Any] = {}
    exec(source, namespace)
    kind = type("NamedTensors", (NamedTensors,), {"forward": namespace["forward"]})
    return kind(module, keys)


def _produced(module: nn.Module, key: NestedKey) -> bool:
    """Returns whether a listed input is the parameter entry that the module itself writes into.

    A composite's parameter entry is listed as an input, since what is written are its leaves.
    """
    wanted = path(key)
    readers = [m for m in module.modules() if isinstance(m, ProbabilisticTensorDictModule)]
    if all(wanted != path(k) for m in readers for k in m.in_keys):
        return False
    written = [
        path(k)
        for m in module.modules()
        if isinstance(m, TensorDictModuleBase) and m not in readers and m is not module
        for k in getattr(m, "out_keys", [])
    ]
    return any(parts[: len(wanted)] == wanted for parts in written)


def prepared(module: nn.Module, example: Any) -> tuple[nn.Module, tuple[Any, ...]]:
    """Returns (module to call, its arguments) for a network, TensorDict module or policy.

    Args:
        module: the network or policy.
        example: a tensor, a tuple of tensors (nested for states), or for a TensorDict module a
            TensorDict or a mapping of argument names.

    Raises:
        MissingKeyError: an input that the module reads is not in the example.
        ConfigError: an example of another kind.
    """
    if isinstance(module, NamedTensors) or not isinstance(module, TensorDictModuleBase):
        if isinstance(example, Tensor):
            return module, (example,)
        if isinstance(example, (tuple, list)):
            return module, tuple(example)
        if isinstance(module, NamedTensors) and isinstance(example, (Mapping, TensorDictBase)):
            return module, _named_arguments(module, example)
        raise ConfigError(
            f"example: expected a tensor or a tuple of tensors for {type(module).__name__}, found "
            f"{type(example).__name__}."
        )
    function = named(module)
    if isinstance(example, Tensor):
        return function, (example,)
    if isinstance(example, (tuple, list)):
        return function, tuple(example)
    return function, _named_arguments(function, example)


def _named_arguments(function: NamedTensors, example: Any) -> tuple[Tensor, ...]:
    """Returns the function's inputs out of a TensorDict or a mapping."""
    values = []
    for key, name in zip(function.in_keys, function.names, strict=True):
        if isinstance(example, TensorDictBase):
            value = read_tensor(example, key)
            present = listing(example)
        else:
            value = example.get(name)
            present = ", ".join(map(repr, example))
        if value is None:
            raise MissingKeyError(
                f"example: no input {key!r} (argument {name!r}). Present: {present}."
            )
        values.append(value)
    return tuple(values)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Context of eval mode, no graph and no exploration."""
    modes = {m: m.training for m in module.modules()}
    module.eval()
    try:
        with torch.no_grad(), set_interaction_type(InteractionType.DETERMINISTIC):
            yield
    finally:
        for m, mode in modes.items():
            m.training = mode
