"""The actor program: a policy as deterministic steps and distributions, run without sampling.

The stored actions stay where they are, so a later head that is conditioned on an earlier action
sees the stored one; nothing is drawn and no entry of the user's data is written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from tensordict import NestedKey, TensorDictBase, is_tensor_collection
from tensordict.nn import (
    CompositeDistribution,
    ProbabilisticTensorDictModule,
    TensorDictSequential,
)
from torch import Tensor, nn
from torch.distributions import Distribution

from composite_losses.errors import ConfigError, MissingKeyError
from composite_losses.heads.keys import as_key, children, key_list, path, read, suffixed
from composite_losses.heads.modules import calls, input_keys
from composite_losses.heads.plan import Slot
from composite_losses.heads.registry import construct, from_distribution, from_parameters
from composite_losses.heads.scratch import Scratch
from composite_losses.heads.terms import Terms, in_float32

Found = dict[NestedKey, Terms]


def unwrapped(cls: Callable[..., Any], kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Returns a distribution class without its ``functools.partial`` layers, and all its kwargs."""
    merged = dict(kwargs)
    while isinstance(cls, functools.partial) and not cls.args:
        merged = {**cls.keywords, **merged}
        cls = cls.func
    return cls, merged


def promoted(value: Any) -> Any:
    """Returns half-precision tensors in float32, those of a tree included."""
    if isinstance(value, Tensor):
        return in_float32(value)
    return value.apply(promoted) if is_tensor_collection(value) else value


def default_log_probs(action: NestedKey) -> tuple[NestedKey, ...]:
    """Returns the keys of an action's log-prob where nothing is declared.

    A composite inside a composite suffixes every level of its log-probs.
    """
    parts = path(action)
    levels = tuple(f"{part}_log_prob" for part in parts)
    own = suffixed(action, "_log_prob")
    return own, *(as_key((*parts[:k], *levels[k:])) for k in range(len(parts) - 2, -1, -1))


class Component:
    """One distribution inside a probabilistic module: its class and where its parameters lie.

    Attributes:
        write: key under which the sample is written.
        where: path of the parameters inside the module's parameter entry; None where the module's
            own in_keys are the parameters.
    """

    def __init__(
        self,
        write: NestedKey,
        cls: Callable[..., Any],
        kwargs: Mapping[str, Any],
        where: tuple[str, ...] | None,
    ) -> None:
        """Unwraps the class once."""
        self.write = as_key(path(write))
        self.cls, self.kwargs = unwrapped(cls, kwargs)
        self.where = where

    def expand(self) -> Iterator[Component]:
        """Yields the leaf components: a composite's heads, of any nesting, else itself."""
        if self.cls is not CompositeDistribution or "distribution_map" not in self.kwargs:
            yield self
            return
        names = {path(k): path(v) for k, v in (self.kwargs.get("name_map") or {}).items()}
        extra = {path(k): v for k, v in (self.kwargs.get("extra_kwargs") or {}).items()}
        nested = self.where is not None
        for name, cls in self.kwargs["distribution_map"].items():
            key = path(name)
            written = names.get(key, key)
            prefix = (*path(self.write), *written) if nested else written
            where = (*(self.where or ()), *(("params",) if nested else ()), *key)
            yield from Component(as_key(prefix), cls, extra.get(key, {}), where).expand()

    def build(self, parameters: Mapping[str, Any]) -> Terms | Distribution:
        """Returns the terms from parameters: by formula, else the distribution object itself."""
        given = {name: promoted(value) for name, value in parameters.items()}
        given.update(self.kwargs)
        terms = from_parameters(self.cls, given)
        return terms if terms is not None else cast(Distribution, construct(self.cls, given))


class Step:
    """A probabilistic module of the actor: reads parameters, gives the terms of its heads."""

    def __init__(self, module: ProbabilisticTensorDictModule) -> None:
        """Reads what the module declares, whatever TensorDict's aggregate switch says."""
        self.module = module
        self.in_keys = [as_key(path(key)) for key in module.in_keys]
        self.dist_keys = [path(key)[-1] for key in module.dist_keys]
        # The public properties raise when the aggregate switch changed after construction.
        self.out_keys = [as_key(path(key)) for key in module._out_keys]
        self.declared = [as_key(path(k)) for k in (module._log_prob_keys or [])]
        joint = module._log_prob_key
        self.joint = [as_key(path(joint))] if joint is not None else []
        root = Component(
            self.out_keys[0], module.distribution_class, dict(module.distribution_kwargs), None
        )
        self.components = list(root.expand())
        self.custom = type(module).get_dist is not ProbabilisticTensorDictModule.get_dist
        single = isinstance(root.cls, type) and issubclass(root.cls, Distribution)
        self.static = not self.custom and (
            self.dist_keys == ["params"] if self.composite else single
        )
        if not self.composite and len(self.out_keys) > 1:
            self.components = [Component(key, root.cls, root.kwargs, None) for key in self.out_keys]
        # where the parameters of a composite's heads lie
        self._nodes: dict[tuple[str, ...], NestedKey] = {
            c.where: as_key((*path(self.in_keys[0]), *c.where))
            for c in self.components
            if c.where is not None
        }

    @property
    def composite(self) -> bool:
        """Whether the heads' parameters are read from inside one parameter entry."""
        return self.components[0].where is not None

    def slots(self) -> list[Slot]:
        """Returns one slot per head, with the log-prob keys that the module declares for it."""
        writes = [component.write for component in self.components]
        slots = []
        for write in writes:
            keys: list[NestedKey] = []
            if len(self.declared) == len(writes) and write in self.out_keys:
                keys.append(self.declared[self.out_keys.index(write)])
            elif len(writes) == 1:
                keys += [*self.declared, *self.joint]
            slots.append(Slot(write, tuple(dict.fromkeys([*keys, *default_log_probs(write)]))))
        return slots

    def joint_keys(self) -> list[NestedKey]:
        """Returns the keys of the one log-prob that the module declares for all its heads."""
        return [*self.joint, *self.declared] if len(self.components) > 1 else []

    def parameter_keys(self, component: Component) -> list[NestedKey]:
        """Returns where the data hold the component's parameters."""
        return self.in_keys if component.where is None else [self._nodes[component.where]]

    def parameters(
        self, td: TensorDictBase | Scratch, component: Component
    ) -> dict[str, Any] | None:
        """Returns the distribution's parameters in the data, or None if any is missing."""
        if component.where is None:
            values = {
                name: read(td, key) for name, key in zip(self.dist_keys, self.in_keys, strict=True)
            }
            return None if any(value is None for value in values.values()) else values
        found = children(td, self._nodes[component.where])
        if found is None:
            return None
        # an empty node is what is left of other heads' parameters
        return {
            k: v
            for k, v in found.items()
            if isinstance(v, Tensor) or not (is_tensor_collection(v) and v.is_empty())
        }

    def terms(self, td: TensorDictBase | Scratch, only: NestedKey | None = None) -> Found:
        """Returns the terms of the heads (or of one) from the parameters in ``td``.

        Raises:
            MissingKeyError: names the entry without which the distribution cannot be built.
        """
        found: Found = {}
        if not self.static:
            dist = self._distribution(td)
            for key, terms in flattened(self.out_keys[0], dist):
                found[key] = terms
            return found
        for component in self.components:
            if only is not None and component.write != only:
                continue
            parameters = self.parameters(td, component)
            if parameters is None:
                missing = [k for k in self.parameter_keys(component) if read(td, k) is None]
                raise MissingKeyError(
                    f"head {component.write!r}: its distribution reads "
                    f"{', '.join(map(repr, self.in_keys))}; not found after running the actor: "
                    f"{', '.join(map(repr, missing))}. Fix: store it with the batch, or let the "
                    "actor's network write it."
                )
            built = component.build(parameters)
            if isinstance(built, Terms):
                found[component.write] = built
            else:
                found.update(flattened(component.write, built))
        return found

    def _distribution(self, td: TensorDictBase | Scratch) -> Distribution:
        """Returns the distribution of a module whose class only a call reveals."""
        if self.custom:
            inputs = (td.tensordict() if isinstance(td, Scratch) else td).copy()
            for key in self.in_keys:
                value = read(td, key)
                if value is not None:
                    inputs.set(key, promoted(value))
            return cast(Distribution, self.module.get_dist(inputs))
        values = {
            n: promoted(read(td, k)) for n, k in zip(self.dist_keys, self.in_keys, strict=True)
        }
        cls, kwargs = unwrapped(
            self.module.distribution_class, dict(self.module.distribution_kwargs)
        )
        return cast(Distribution, construct(cls, {**values, **kwargs}))


def flattened(key: NestedKey, dist: Terms | Distribution) -> Iterator[tuple[NestedKey, Terms]]:
    """Yields (action key, terms) of a distribution, the heads of composites one by one."""
    if isinstance(dist, Terms):
        yield key, dist
    elif isinstance(dist, CompositeDistribution):
        for name, part in dist.dists.items():
            inner = as_key(path(name))
            if isinstance(part, CompositeDistribution):
                for sub, terms in flattened(inner, part):
                    yield as_key((*path(inner), *path(sub))), terms
            else:
                yield inner, from_distribution(part)
    else:
        yield key, from_distribution(dist)


class ActorProgram:
    """A policy compiled to deterministic modules and probabilistic steps, in execution order.

    Attributes:
        actor: the policy.
        slots: its heads, as far as they are known without running it.
        settled: whether ``slots`` is final; otherwise the first run settles it.
    """

    def __init__(self, actor: nn.Module) -> None:
        """Walks the actor once.

        Raises:
            ConfigError: the actor has no distribution.
        """
        self.actor = actor
        self.modules = list(_leaves(actor))
        steps = [m for m in self.modules if isinstance(m, Step)]
        self.opaque = not steps
        if self.opaque and not callable(getattr(actor, "get_dist", None)):
            raise ConfigError(
                f"actor_network: expected a policy with TensorDict's probabilistic interface "
                f"(ProbabilisticActor, ProbabilisticTensorDictSequential or a module with "
                f"get_dist), found {type(actor).__name__}."
            )
        self.steps = steps
        self.slots = [slot for step in steps for slot in step.slots()]
        self.joint = [key for step in steps for key in step.joint_keys()]
        self.settled = bool(steps) and all(step.static for step in steps)
        if self.opaque:
            self.slots = [Slot(key_list(getattr(actor, "out_keys", None) or "action")[0])]
        last = max((i for i, m in enumerate(self.modules) if isinstance(m, Step)), default=-1)
        actions = {slot.action for slot in self.slots}
        # what follows the last distribution (exploration, stacking) and whatever writes an action
        # is not needed to score stored actions
        self.modules = [
            m
            for m in self.modules[: last + 1]
            if isinstance(m, Step) or not actions & {as_key(path(k)) for k in m.out_keys}
        ]

    @property
    def parameter_keys(self) -> list[NestedKey]:
        """Keys of the distribution parameters, as a behaviour policy stores them."""
        return [key for step in self.steps for key in step.in_keys]

    @property
    def input_keys(self) -> list[NestedKey]:
        """Keys that a run reads from the data: network inputs, action masks, earlier actions."""
        if self.opaque:
            return key_list(getattr(self.actor, "in_keys", None) or [])
        return input_keys(self.modules)

    def keys_of(self, slot: NestedKey) -> list[NestedKey]:
        """Returns where the data hold the distribution parameters of one head."""
        for step in self.steps:
            for component in step.components:
                if component.write == slot and step.static:
                    return step.parameter_keys(component)
        return []

    def run(self, data: Scratch) -> Found:
        """Returns the terms of every head; one pass through the networks, nothing sampled.

        ``data`` receives what the deterministic modules write.
        """
        if self.opaque:
            dist = self.actor.get_dist(data.tensordict())  # type: ignore[operator]
            found = dict(flattened(self.slots[0].action, dist))
        else:
            found = {}
            for module in self.modules:
                if isinstance(module, Step):
                    found.update(module.terms(data))
                else:
                    module(data)
        if not self.settled:
            self._settle(found)
        return found

    def discover(self, td: TensorDictBase) -> None:
        """Settles the heads from parameters that the data hold, without running a network."""
        if not self.opaque and all(read(td, key) is not None for key in self.parameter_keys):
            self._settle({k: t for step in self.steps for k, t in step.terms(td).items()})

    def _settle(self, found: Found) -> None:
        """Replaces the guessed slots by the heads that a run has shown."""
        known = {slot.action: slot for slot in self.slots}
        if set(known) != set(found):
            self.slots = [known.get(key, Slot(key, default_log_probs(key))) for key in found]
            self.joint = [*self.joint, *(k for step in self.steps for k in step.declared)]
        self.settled = True

    def stored_parameters(self, td: TensorDictBase, slot: NestedKey) -> dict[str, Any] | None:
        """Returns the parameters that the data hold for one head, or None if any is missing."""
        for step in self.steps:
            for component in step.components:
                if component.write == slot and step.static:
                    return step.parameters(td, component)
            if not step.static and all(read(td, key) is not None for key in step.in_keys):
                return {
                    name: read(td, key)
                    for name, key in zip(step.dist_keys, step.in_keys, strict=True)
                }
        return None

    def rebuild(self, td: TensorDictBase, slot: NestedKey) -> Terms | None:
        """Returns the terms of one head from the parameters in ``td``, running no network."""
        for step in self.steps:
            if step.static and all(c.write != slot for c in step.components):
                continue
            if self.stored_parameters(td, slot) is None:
                continue
            terms = step.terms(td, only=slot).get(slot)
            if terms is not None:
                return terms
        return None


def _leaves(module: nn.Module) -> Iterator[Any]:
    """Yields the modules in execution order; sequences with a distribution inside are opened."""
    if isinstance(module, ProbabilisticTensorDictModule):
        yield Step(module)
        return
    inside = any(isinstance(m, ProbabilisticTensorDictModule) for m in module.modules())
    if isinstance(module, TensorDictSequential) and inside:
        children = module.module
        ordered = children.values() if isinstance(children, nn.ModuleDict) else children
        for child in ordered:
            yield from _leaves(child)
    elif not inside and hasattr(module, "out_keys"):
        yield from calls(module)
