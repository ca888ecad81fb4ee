"""Multi-agent perceptrons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from composite_losses.errors import ConfigError
from composite_losses.nets.base import MultiAgentNet, Sharing, per_layer
from composite_losses.nets.layers import LazyStackedLinear, StackedLinear, sized


class MultiAgentMLP(MultiAgentNet):
    """An MLP per agent, computed by batched products, with TorchRL's arguments.

    Input ``[*B, A, F]`` (several are concatenated along their last dim), output ``[*B, A, out]``. A
    shared, decentralised net accepts another number of agents at call time.

    Args:
        n_agent_inputs: features F of one agent; None to learn them from the first call.
        n_agent_outputs: outputs of one agent.
        n_agents: number of agents A.
        centralized: whether every agent sees all agents' inputs (``centralised`` works too).
        share_params: True (one parameter set), False (one per agent), or the set of each agent.
        device: device of the parameters.
        depth: number of hidden layers; the length of ``num_cells``, 3 where that is a number, 0
            where neither is given (as in TorchRL).
        num_cells: cells of the hidden layers, once or per layer; 32.
        activation_class: activation after every hidden layer.
        agent_dim: dim of the agents; it keeps its place.
        activation_kwargs: its arguments, once or per layer.
        norm_class: norm after every hidden layer.
        norm_kwargs: its arguments, once or per layer.
        dropout: probability in [0, 1] after every hidden layer.
        dropout_randomness: ``"different"`` masks per agent, or the ``"same"``.
        bias_last_layer: whether the last layer has a bias.
        activate_last_layer: whether the last layer is activated, too.
        agent_id: whether the one-hot agent id is appended to the input.
        layer_class: ``nn.Linear``; no other layer is computed by batched products.
        layer_kwargs: ``bias`` and ``dtype`` of the layers, once or per layer; a ``bias`` given here
            holds for the last layer, too.
        vmap_randomness: TorchRL's word for ``dropout_randomness``; ``"error"``: as that says.
        use_td_params: TorchRL's, without effect.

    Raises:
        ConfigError: options that contradict each other, or another ``layer_class``.
        TypeError: ``centralized`` or ``share_params`` left out.
        ShapeError: (call) another number of agents.

    Source: TorchRL's ``torchrl.modules.MultiAgentMLP``: its arguments and layers.
    """

    event_ndim = 1

    def __init__(
        self,
        n_agent_inputs: int | None,
        n_agent_outputs: int,
        n_agents: int,
        *,
        centralized: bool | None = None,
        share_params: Sharing | None = None,
        device: torch.device | str | None = None,
        depth: int | None = None,
        num_cells: Sequence[int] | int | None = None,
        activation_class: Callable[..., nn.Module] = nn.Tanh,
        agent_dim: int = -2,
        activation_kwargs: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
        norm_class: Callable[..., nn.Module] | None = None,
        norm_kwargs: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
        dropout: float | None = None,
        dropout_randomness: str = "different",
        bias_last_layer: bool = True,
        activate_last_layer: bool = False,
        agent_id: bool = False,
        layer_class: type[nn.Module] = nn.Linear,
        layer_kwargs: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
        vmap_randomness: str = "error",
        use_td_params: bool = True,
        centralised: bool | None = None,
    ) -> None:
        """Builds the stacked layers."""
        super().__init__(
            n_agents=n_agents,
            centralized=centralized,
            share_params=share_params,
            agent_dim=agent_dim,
            dropout_randomness=dropout_randomness,
            agent_id=agent_id,
            centralised=centralised,
            vmap_randomness=vmap_randomness,
        )
        if layer_class is not nn.Linear:
            raise ConfigError(f"layer_class: expected nn.Linear, found {layer_class!r}.")
        self.n_agent_inputs, self.n_agent_outputs = n_agent_inputs, n_agent_outputs
        cells = hidden_cells(depth, num_cells)
        n = len(cells) + int(activate_last_layer)
        activations = per_layer(activation_kwargs, n, "activation_kwargs")
        norms = per_layer(norm_kwargs, n, "norm_kwargs")
        layers = per_layer(layer_kwargs, len(cells) + 1, "layer_kwargs")
        unknown = sorted({key for options in layers for key in options} - {"bias", "dtype"})
        if unknown:
            raise ConfigError(f"layer_kwargs: expected 'bias' and 'dtype', found {unknown}.")
        extra = n_agents if agent_id else 0
        first = None if n_agent_inputs is None else n_agent_inputs
        if first is not None and self.centralized:
            first *= n_agents
        widths = [*cells, n_agent_outputs]
        sizes = [None if first is None else first + extra, *cells]
        blocks: list[nn.Module] = []
        for i, (size, width) in enumerate(zip(sizes, widths, strict=True)):
            options = {"bias": bias_last_layer or i < len(cells), "device": device, **layers[i]}
            if size is None:
                # a decentralised net appends the id to its input before the first layer sees it
                later = extra if self.centralized else 0
                blocks.append(
                    LazyStackedLinear(self.n_sets, width, extra_features=later, **options)
                )
            else:
                blocks.append(StackedLinear(self.n_sets, size, width, **options))
            if i < n:
                norm = (norm_class, norms[i])
                self._finish(
                    blocks, activation_class, activations[i], norm, dropout, device, order="dna"
                )
        self.blocks.extend(blocks)

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        """Returns the agents' outputs, ``[*B, A, out]``.

        Args:
            x: inputs ``[*B, A, F]``.
            *more: further inputs, concatenated along the last dim.
        """
        x, dim = self._checked((x, *more))
        if self._any_number and dim == x.ndim - 2:
            return self._alike(x)
        last = x.ndim - 2
        if dim != last:
            x = x.movedim(dim, last)
        y = self._centralised(x) if self.centralized else self._decentralised(x)
        return y if dim == last else y.movedim(-2, dim)

    def _alike(self, x: Tensor) -> Tensor:
        """Returns the outputs where one parameter set serves all: agents are rows among others."""
        lead = x.shape[:-1]
        y = self._run(x.flatten(0, -2), None, 0, 1, (0, (-1, lead[-1])))
        return y.reshape(*lead, y.shape[-1])

    def _decentralised(self, x: Tensor) -> Tensor:
        """Returns the outputs where every agent sees its own input."""
        if self.agent_id:
            ids = torch.eye(self.n_agents, dtype=x.dtype, device=x.device)
            x = torch.cat([x, ids.expand(*x.shape[:-1], self.n_agents)], -1)
        if self.n_sets == 1:
            return self._alike(x)
        batch = x.shape[:-2]
        rows = x if len(batch) == 1 else x.reshape(-1, *x.shape[-2:])
        return self._by_agent(self._run(rows.transpose(0, 1), self._index, 0, 0), batch)

    def _by_agent(self, y: Tensor, batch: torch.Size) -> Tensor:
        """Returns the outputs ``[*B, A, out]`` of ``y [A, N, out]``."""
        y = y.transpose(0, 1)
        return y if len(batch) == 1 else y.reshape(*batch, self.n_agents, y.shape[-1])

    def _centralised(self, x: Tensor) -> Tensor:
        """Returns the outputs where every agent sees all inputs: one product serves all."""
        batch = x.shape[:-2]
        rows = x.flatten(-2)
        if len(batch) != 1:
            rows = rows.reshape(-1, rows.shape[-1])
        first = cast(StackedLinear, self.blocks[0])
        sized(first, rows)
        if self.agent_id:
            y = self._run(self._joined_by_id(first, rows), self._index, 1, 0)
        elif self._masks_differ():
            hidden = first.fan_out(rows).index_select(0, self._sets)
            y = self._run(hidden, self._index, 1, 0)
        elif self.n_sets == 1:
            y = self._run(rows, None, 0)
            y = y if len(batch) == 1 else y.reshape(*batch, y.shape[-1])
            return y.unsqueeze(-2).expand(*batch, self.n_agents, y.shape[-1])
        else:
            y = self._run(first.fan_out(rows), None, 1, 0)
            if self._index is not None:
                y = y.index_select(0, self._index)
        return self._by_agent(y, batch)

    def _joined_by_id(self, first: StackedLinear, rows: Tensor) -> Tensor:
        """Returns the first layer's outputs where the id joins the input: a bias per agent."""
        width = rows.shape[-1]
        weight = first.weight
        shared = torch.nn.functional.linear(rows, weight[..., :width].flatten(0, 1))
        hidden = shared.unflatten(-1, (self.n_sets, first.out_features)).transpose(0, 1)
        sets = self._sets
        ids = torch.arange(self.n_agents, device=rows.device)
        bias = weight[sets, :, width + ids]
        if first.bias is not None:
            bias = bias + first.bias[sets]
        return hidden.index_select(0, sets) + bias.unsqueeze(1)


def hidden_cells(depth: int | None, num_cells: Sequence[int] | int | None) -> list[int]:
    """Returns the cells of the hidden layers.

    Raises:
        ConfigError: a depth that is not the length of ``num_cells``.
    """
    if num_cells is None:
        return [32] * (depth or 0)
    if isinstance(num_cells, int):
        return [num_cells] * (3 if depth is None else depth)
    cells = [int(c) for c in num_cells]
    if depth is not None and depth != len(cells):
        raise ConfigError(f"depth: expected {len(cells)}, the length of num_cells, found {depth}.")
    return cells
