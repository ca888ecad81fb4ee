"""The networks of a loss: registration, functional parameters, modes, conversions."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictParams
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from composite_losses.errors import ConfigError
from composite_losses.heads.keys import as_key, path
from composite_losses.heads.modules import calls
from composite_losses.losses._torchrl import Mixin, swapped

# modules that draw random numbers in train mode, whatever their options
RANDOM_MODULES = (nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


def draws_random(module: nn.Module) -> bool:
    """Returns whether the module draws random numbers in train mode."""
    if isinstance(module, nn.RNNBase):
        return module.dropout > 0 and module.num_layers > 1
    if isinstance(module, nn.MultiheadAttention):
        return module.dropout > 0
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    return isinstance(module, RANDOM_MODULES)


@contextlib.contextmanager
def frozen(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Context in which the parameters collect no gradient."""
    for p in parameters:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in parameters:
            p.requires_grad_(True)


class Held:
    """Where a network and a parameter tree keep the same tensors, as long as they do."""

    def __init__(self, network: nn.Module, params: TensorDictParams) -> None:
        """Pairs every entry of the tree with the network's own."""
        self.params, self.tree = params, params._param_td
        self.pairs: list[tuple[Any, Any, str]] | None = []
        self.same = False
        for key in self.tree.keys(True, True):
            *parents, name = path(key)
            module: Any = network
            node: Any = self.tree
            for parent in parents:
                module, node = module._modules.get(parent), node.get(parent, None)
                if module is None or node is None:
                    self.pairs = None
                    return
            own = module._parameters if name in module._parameters else module._buffers
            self.pairs.append((own, node, name))

    def look(self) -> bool:
        """Returns whether every tensor of the tree is the network's."""
        self.same = self.pairs is not None and all(
            own.get(name) is node._get_str(name, None) for own, node, name in self.pairs
        )
        if not self.same:
            self.pairs = None  # for good: the network's tensors may be of another device
        return self.same


class Networks(Mixin):
    """Mixin of a loss: its networks and their parameters."""

    actor_network: nn.Module
    critic_network: nn.Module | None
    actor_network_params: TensorDictParams | None
    critic_network_params: TensorDictParams | None
    target_actor_network_params: TensorDictParams | None
    target_critic_network_params: TensorDictParams | None
    _functional: bool
    separate_losses: bool
    delay_actor: bool
    delay_value: bool

    def _register_networks(self, actor: nn.Module, critic: nn.Module | None) -> None:
        """Registers actor and critic, functional or not, as TorchRL's losses do.

        Raises:
            ConfigError: delayed parameters of networks that are not functionalised.
        """
        if not self._functional and (self.delay_actor or self.delay_value):
            what = "delay_actor" if self.delay_actor else "delay_value"
            raise ConfigError(
                f"{what}=True requires functional=True: the delayed parameters exist only for "
                "functionalised networks."
            )
        if self._functional:
            self.convert_to_functional(
                actor, "actor_network", create_target_params=self.delay_actor
            )
        else:
            self.actor_network = actor
            self.actor_network_params = None
            self.target_actor_network_params = None
        if self._functional and critic is not None:
            shared = list(actor.parameters()) if self.separate_losses else None
            self.convert_to_functional(
                critic,
                "critic_network",
                create_target_params=self.delay_value,
                compare_against=shared,
            )
        else:
            self.critic_network = critic
            self.critic_network_params = None
            self.target_critic_network_params = None
        own = {id(p) for p in actor.parameters()}
        separate = self.separate_losses and not self._functional and critic is not None
        # what the critic shares with the actor learns from the policy only
        self._shared = (
            [p for p in critic.parameters() if id(p) in own]
            if separate and critic is not None
            else []
        )
        self._critic_calls = [] if critic is None else list(calls(critic))
        self._held: dict[str, Held] = {}
        self._hold()

    @property
    def functional(self) -> bool:
        """Whether the networks' parameters are held by the loss, as TensorDictParams."""
        return self._functional

    def _with(
        self, network: nn.Module, params: TensorDictParams | None
    ) -> contextlib.AbstractContextManager[Any]:
        """Context in which the network holds the given parameters."""
        if not self._functional or not isinstance(params, TensorDictParams):
            return contextlib.nullcontext()
        if self._holds(network, params):
            return contextlib.nullcontext()
        return cast(contextlib.AbstractContextManager[Any], swapped(params, network))

    def _without_shared_gradients(self) -> contextlib.AbstractContextManager[None]:
        """Context in which parameters that actor and critic share collect no gradient."""
        trainable = [p for p in self._shared if p.requires_grad]
        return frozen(trainable) if trainable else contextlib.nullcontext()

    def _hold(self) -> None:
        """Looks whether the networks hold the functional parameters; a compiled call goes by it."""
        for name in ("actor_network", "critic_network"):
            params = self._modules.get(f"{name}_params")
            if isinstance(params, TensorDictParams):
                self._holds(getattr(self, name), params)

    def _holds(self, network: nn.Module, params: TensorDictParams) -> bool:
        """Returns whether the network's own parameters are the given ones: no need to swap them."""
        name = "actor_network" if network is self.actor_network else "critic_network"
        if params is not self._modules.get(f"{name}_params"):
            return False
        held = self._held.get(name)
        if torch.compiler.is_compiling():
            return held is not None and held.params is params and held.same
        if held is None or held.params is not params or held.tree is not params._param_td:
            held = self._held[name] = Held(network, params)
        return held.look()

    @property
    def _cached_critic_network_params_detached(self) -> TensorDictBase | None:
        """Detached critic parameters, for the value estimator."""
        return None if self.critic_network_params is None else self.critic_network_params.detach()

    _cached_detach_critic_network_params = _cached_critic_network_params_detached

    def train(self, mode: bool = True) -> Any:
        """Sets the mode of the loss and of its networks, functional or not."""
        super().train(mode)
        for network in (self.actor_network, self.critic_network):
            if isinstance(network, nn.Module):
                network.train(mode)
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Returns what is pickled or copied, and which entries share memory, which that loses."""
        first: dict[Any, Any] = {}
        twins: dict[Any, Any] = {}
        for key, value in self._entries().items():
            place = _place(value)
            if place is not None and first.setdefault(place, key) != key:
                twins[key] = first[place]
        return {**self.__dict__, "_held": {}, "_twins": twins}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores a pickled loss, and gives entries that shared memory the same again."""
        twins = state.pop("_twins", {})
        super().__setstate__(state)
        entries = self._entries()
        for key, first in twins.items():
            if entries[key] is not entries[first]:
                entries[key].data = entries[first].data
        self._hold()

    def _entries(self) -> dict[Any, Tensor]:
        """Returns the tensors of all parameter trees, and of the networks."""
        trees = {n: m for n, m in self._modules.items() if isinstance(m, TensorDictParams)}
        out = {(n, key): x for n, tree in trees.items() for key, x in tree.items(True, True)}
        for name in ("actor_network", "critic_network"):
            network = getattr(self, name)
            if network is not None:
                for key, value in (*network.named_parameters(), *network.named_buffers()):
                    out[name, key] = value
        return out

    def __deepcopy__(self, memo: dict[Any, Any]) -> Any:
        """Returns a copy in which what shares memory here shares it, also with the networks.

        ``TensorDict.__deepcopy__`` copies every parameter tree by itself.
        """
        for module in self.modules():
            if isinstance(module, TensorDictParams) and id(module) not in memo:
                _copied_tree(module, memo)
        out = memo[id(self)] = type(self).__new__(type(self))
        out.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return out

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Applies a conversion to every tensor, and to what the functional forward reads.

        ``TensorDictParams`` keeps stale tensors when a conversion replaces parameters (to
        ``meta``, or with swapped parameters), so their trees are rebuilt here.
        """
        trees = {n: m for n, m in self._modules.items() if isinstance(m, TensorDictParams)}
        for name in trees:
            del self._modules[name]
        super()._apply(fn)
        self._held.clear()
        replaced: dict[int, Tensor] = {}
        for tree in trees.values():
            _convert(tree, fn, replaced)
        self._modules.update(trees)
        self._hold()
        return self


def _copied_tree(tree: TensorDictParams, memo: dict[Any, Any]) -> None:
    """Puts a deep copy of a parameter tree into the memo, its tensors by way of the memo."""
    inner = tree._param_td
    fresh = inner.apply(lambda value: _copied(value, memo), filter_empty=False)
    if inner.is_locked:
        fresh.lock_()
    memo[id(inner)] = fresh
    cls: Any = type(tree)
    out = memo[id(tree)] = cls.__new__(cls)
    out.__setstate__(copy.deepcopy(tree.__getstate__(), memo))


def _place(value: Tensor) -> Any:
    """Returns where a tensor's numbers lie, or None where there are none yet."""
    if is_lazy(value) or not value.data_ptr():
        return None
    return value.data_ptr(), value.dtype, value.shape, value.stride()


def _copied(value: Tensor, memo: dict[Any, Any]) -> Tensor:
    """Returns the copy of a tree's tensor, once for all trees and networks that have it."""
    if id(value) in memo:
        return cast(Tensor, memo[id(value)])
    if value.is_leaf:
        return copy.deepcopy(value, memo)
    out = memo[id(value)] = value.detach().clone()
    out.__dict__.update(value.__dict__)  # what marks a buffer
    return out


def _convert(
    tree: TensorDictParams, fn: Callable[[Tensor], Tensor], replaced: dict[int, Tensor]
) -> None:
    """Converts a parameter tree's tensors, keeping Parameter objects that can live on."""
    inner = tree._param_td
    inner._erase_cache()
    flat: dict[tuple[str, ...], Tensor] = {}
    with torch.no_grad():
        for key, value in inner.items(True, True):
            flat[path(key)] = _converted(value, fn, replaced)
    fresh = TensorDict({}, batch_size=inner.batch_size)
    for key in inner.keys(True, False):
        if key not in flat and path(key) not in flat:
            fresh.set(key, TensorDict({}, batch_size=inner.get(key).batch_size))
    for parts, value in flat.items():
        fresh.set(as_key(parts), value)
    tree._param_td = fresh
    tree._reset_params()


def _converted(
    value: Tensor, fn: Callable[[Tensor], Tensor], replaced: dict[int, Tensor]
) -> Tensor:
    """Returns the converted tensor: the same Parameter with new data, or a new one of its kind."""
    if id(value) in replaced:
        return replaced[id(value)]
    data = fn(value.data)
    same_kind = torch._has_compatible_shallow_copy_type(value, data)
    if same_kind:
        value.data = data
        out = value
        if value.grad is not None:
            value.grad.data = fn(value.grad.data)
    elif isinstance(value, nn.Parameter):
        out = nn.Parameter(data, requires_grad=value.requires_grad)
    else:
        out = type(value)(data) if type(value) is not Tensor else data
    replaced[id(value)] = out
    return out
