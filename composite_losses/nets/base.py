"""What the feed-forward multi-agent networks share: sharing, agent dim, checks, views."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from composite_losses.errors import ConfigError, ShapeError
from composite_losses.nets.layers import AgentDropout, StackedConv2d, StackedLinear
from composite_losses.nets.norms import StackedNorm, detached
from composite_losses.nets.products import Index

Sharing = bool | Sequence[int]
# blocks that take the set of each row block
STACKED = (StackedLinear, StackedConv2d, StackedNorm)


def agent_sets(share_params: Sharing, n_agents: int) -> tuple[int, ...]:
    """Returns the parameter set of every agent.

    Args:
        share_params: True for one set, False for one per agent, or the set of each agent.
        n_agents: number of agents.

    Raises:
        ConfigError: a mapping of another length, or whose sets are not 0, 1, … without a gap.
    """
    if isinstance(share_params, bool):
        return (0,) * n_agents if share_params else tuple(range(n_agents))
    sets = tuple(int(s) for s in share_params)
    if len(sets) != n_agents:
        raise ConfigError(
            f"share_params: expected one parameter set per agent, {n_agents}, found {len(sets)}."
        )
    if sorted(set(sets)) != list(range(max(sets) + 1)):
        raise ConfigError(
            f"share_params: expected sets numbered from 0 without a gap, found {list(sets)}."
        )
    return sets


class MultiAgentNet(nn.Module, abc.ABC):
    """A network for agents along one dim, with parameters shared, unshared or by cluster; abstract.

    Subclasses hold a list of ``blocks``: layers called as ``layer(x, index)``, activations, norms
    and dropouts, in order.
    """

    # dims of one agent's input: features, or channels and space
    event_ndim: int
    _index: Tensor | None
    _sets: Tensor

    def __init__(
        self,
        *,
        n_agents: int,
        centralized: bool | None,
        share_params: Sharing | None,
        agent_dim: int,
        dropout_randomness: str,
        agent_id: bool,
        centralised: bool | None = None,
        vmap_randomness: str = "error",
    ) -> None:
        """Validates and keeps the options."""
        super().__init__()
        centralized = centralised if centralized is None else centralized
        if centralized is None:
            raise TypeError("centralized arg must be passed.")
        if share_params is None:
            raise TypeError("share_params arg must be passed.")
        if vmap_randomness not in ("different", "same", "error"):
            raise ConfigError(
                "vmap_randomness: expected 'different', 'same' or 'error', found "
                f"{vmap_randomness!r}."
            )
        if vmap_randomness != "error":
            dropout_randomness = vmap_randomness
        if dropout_randomness not in ("different", "same"):
            raise ConfigError(
                f"dropout_randomness: expected 'different' or 'same', found {dropout_randomness!r}."
            )
        if isinstance(n_agents, bool) or n_agents < 1:
            raise ConfigError(f"n_agents: expected a positive integer, found {n_agents!r}.")
        self.n_agents = n_agents
        self.centralized = bool(centralized)
        self.share_params = share_params if isinstance(share_params, bool) else tuple(share_params)
        self.agent_dim = agent_dim
        self.dropout_randomness = dropout_randomness
        self.agent_id = agent_id
        # whether each agent is computed alone and alike, so that any number can be
        self._any_number = share_params is True and not self.centralized and not agent_id
        self.sets = agent_sets(share_params, n_agents)
        self.n_sets = max(self.sets) + 1
        identity = self.sets == tuple(range(n_agents))
        index = None if identity or self.n_sets == 1 else torch.tensor(self.sets)
        self.register_buffer("_index", index, persistent=False)
        self.register_buffer("_sets", torch.tensor(self.sets), persistent=False)
        self.blocks = nn.ModuleList()

    def reset_parameters(self) -> None:
        """Draws new parameters for every layer; unshared agents differ again."""
        for block in self.blocks:
            reset = getattr(block, "reset_parameters", None)
            if callable(reset):
                reset()

    def _finish(
        self,
        blocks: list[nn.Module],
        activation: Callable[..., nn.Module] | None,
        activation_kwargs: dict[str, Any],
        norm: tuple[Callable[..., nn.Module] | None, dict[str, Any]],
        dropout: float | None,
        device: torch.device | str | None,
        order: str,
    ) -> None:
        """Adds what follows a layer, in the given order (letters d, n, a)."""
        for letter in order:
            if letter == "d" and dropout is not None:
                blocks.append(AgentDropout(dropout, self.dropout_randomness == "same"))
            elif letter == "n" and norm[0] is not None:
                blocks.append(StackedNorm(norm[0], norm[1], self.n_sets, device))
            elif letter == "a" and activation is not None:
                block = activation(**activation_kwargs)
                if self.n_sets > 1 and next(block.parameters(), None) is not None:
                    raise ConfigError(
                        f"activation_class: {type(block).__name__} has parameters, which agents "
                        "with own parameter sets would share; use one without."
                    )
                blocks.append(block)

    def _masks_differ(self) -> bool:
        """Returns whether agents that share activations must be told apart by their dropout."""
        dropout = any(isinstance(block, AgentDropout) for block in self.blocks)
        return dropout and self.training and self.dropout_randomness == "different"

    def _run(
        self,
        x: Tensor,
        index: Index,
        start: int,
        agent_dim: int | None = None,
        split: tuple[int, tuple[int, int]] | None = None,
    ) -> Tensor:
        """Returns the activations after the blocks from ``start`` on.

        Args:
            x: the activations.
            index: set of each row block, or None.
            start: first block to run.
            agent_dim: dim of the agents, None where they share one activation.
            split: (dim, sizes) to unflatten before ``agent_dim`` is a dim of its own.
        """
        for block in list(self.blocks)[start:] if start else self.blocks:
            if isinstance(block, STACKED):
                x = block(x, index)
            elif isinstance(block, AgentDropout):
                x = block(x, agent_dim, split)
            else:
                x = block(x)
        return x

    def _checked(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, int]:
        """Returns the input, several joined, and the dim of its agents counted from the start.

        Raises:
            ShapeError: too few dims, or another number of agents than the net was built for.
        """
        x = inputs[0] if len(inputs) == 1 else torch.cat(inputs, -1)
        if x.ndim < self.event_ndim + 1:
            raise ShapeError(
                f"{type(self).__name__}: expected at least {self.event_ndim + 1} dims (agents and "
                f"{self.event_ndim} event dims), found shape {list(x.shape)}."
            )
        dim = self.agent_dim if self.agent_dim >= 0 else x.ndim + self.agent_dim
        if not 0 <= dim < x.ndim or (not self._any_number and x.shape[dim] != self.n_agents):
            raise ShapeError(
                f"{type(self).__name__}: Multi-agent network expected input with "
                f"shape[{self.agent_dim}]={self.n_agents} agents, but got "
                f"{x.shape[dim] if 0 <= dim < x.ndim else 'no such dim'} in {list(x.shape)}."
            )
        return x, dim

    def agent(self, position: int) -> nn.Sequential:
        """Returns agent ``position``'s network as an ``nn.Sequential`` that shares its memory.

        In-place writes are seen both ways; gradients do not flow back through the view. With
        ``agent_id`` its input ends with the one-hot id; a centralised one takes the agents'
        features (channels) side by side.
        """
        if not -self.n_agents <= position < self.n_agents:
            raise ConfigError(f"agent: expected 0 to {self.n_agents - 1}, found {position}.")
        if any(is_lazy(parameter) for parameter in self.parameters()):
            raise ConfigError("agent: the net has not seen its input size; call it once.")
        index = self.sets[position]
        layers = [self._single(block, index) for block in self.blocks]
        return nn.Sequential(*layers, *self._tail()).train(self.training)

    def _single(self, block: nn.Module, index: int) -> nn.Module:
        """Returns one set's part of a block."""
        single = getattr(block, "single", None)
        if callable(single):
            return single(index)
        return nn.Dropout(block.p) if isinstance(block, AgentDropout) else detached(block)

    def _tail(self) -> list[nn.Module]:
        """Returns what ends one agent's network."""
        return []

    def extra_repr(self) -> str:
        """Returns agents and sharing."""
        return (
            f"n_agents={self.n_agents}, share_params={self.share_params}, "
            f"centralized={self.centralized}, agent_dim={self.agent_dim}, n_sets={self.n_sets}"
        )


def per_layer(value: Any, n: int, name: str) -> list[dict[str, Any]]:
    """Returns keyword arguments given once or per layer as a list.

    Raises:
        ConfigError: a list of another length.
    """
    if value is None:
        return [{} for _ in range(n)]
    if isinstance(value, dict):
        return [value] * n
    listed = list(value)
    if len(listed) != n:
        raise ConfigError(f"{name}: expected one dict or {n}, found {len(listed)}.")
    return listed
