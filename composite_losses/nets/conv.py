"""Multi-agent convolutional networks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from composite_losses.errors import ConfigError, ShapeError
from composite_losses.nets.base import MultiAgentNet, Sharing, per_layer
from composite_losses.nets.layers import LazyStackedConv2d, StackedConv2d, sized
from composite_losses.nets.norms import detached


class MultiAgentConvNet(MultiAgentNet):
    """A ConvNet per agent, computed by grouped convolutions, with TorchRL's arguments.

    Input ``[*B, A, C, H, W]``, output ``[*B, A, out]``: channels and space of the last layer,
    flattened (or what ``aggregator_class`` makes of them). A shared, decentralised net accepts
    another number of agents at call time.

    Args:
        n_agents: number of agents A.
        centralized: whether every agent sees all agents' images (``centralised`` works too).
        share_params: True (one parameter set), False (one per agent), or the set of each agent.
        in_features: channels C of one agent; None to learn them from the first call.
        device: device of the parameters.
        num_cells: output channels of the layers; [32, 32, 32].
        kernel_sizes: kernel sizes, once or per layer.
        strides: strides, once or per layer.
        paddings: paddings, once or per layer.
        activation_class: activation after every layer.
        agent_dim: dim of the agents; it keeps its place.
        activation_kwargs: its arguments, once or per layer.
        norm_class: norm after every activation.
        norm_kwargs: its arguments, once or per layer.
        dropout: probability in [0, 1] after every activation.
        dropout_randomness: ``"different"`` masks per agent, or the ``"same"``.
        bias_last_layer: whether the last layer has a bias.
        agent_id: whether one constant channel per agent, 1 for its own, is appended to the input.
        depth: number of layers, where no other option gives it.
        aggregator_class: what ends the net, applied to ``[N, C, H, W]``; None keeps channels and
            space.
        aggregator_kwargs: its arguments.
        squeeze_output: whether the last two dims, of size 1, are dropped at the end.
        vmap_randomness: TorchRL's word for ``dropout_randomness``; ``"error"``: as that says.
        use_td_params: TorchRL's, without effect.

    Raises:
        ConfigError: options that contradict each other.
        TypeError: ``centralized`` or ``share_params`` left out.
        ShapeError: (call) another number of agents, or more than one pixel to squeeze.

    Source: TorchRL's ``torchrl.modules.MultiAgentConvNet``: its arguments and layers.
    """

    event_ndim = 3

    def __init__(
        self,
        n_agents: int,
        centralized: bool | None = None,
        share_params: Sharing | None = None,
        *,
        in_features: int | None = None,
        device: torch.device | str | None = None,
        num_cells: Sequence[int] | int | None = None,
        kernel_sizes: Sequence[int | Sequence[int]] | int = 5,
        strides: Sequence[int | Sequence[int]] | int = 2,
        paddings: Sequence[int | Sequence[int]] | int = 0,
        activation_class: Callable[..., nn.Module] = nn.ELU,
        agent_dim: int = -4,
        activation_kwargs: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
        norm_class: Callable[..., nn.Module] | None = None,
        norm_kwargs: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
        dropout: float | None = None,
        dropout_randomness: str = "different",
        bias_last_layer: bool = True,
        agent_id: bool = False,
        depth: int | None = None,
        aggregator_class: Callable[..., nn.Module] | None = nn.Flatten,
        aggregator_kwargs: dict[str, Any] | None = None,
        squeeze_output: bool = False,
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
        self.in_features = in_features
        cells, kernels, steps, pads = layer_sizes(depth, num_cells, kernel_sizes, strides, paddings)
        self.kernel_sizes, self.strides, self.paddings = kernels, steps, pads
        self.out_features = cells[-1]
        n = len(cells)
        activations = per_layer(activation_kwargs, n, "activation_kwargs")
        norms = per_layer(norm_kwargs, n, "norm_kwargs")
        extra = n_agents if agent_id else 0
        first = in_features
        if first is not None:
            first = (first * n_agents if self.centralized else first) + extra
        sizes = [first, *cells]
        blocks: list[nn.Module] = []
        fanned = self.centralized and not agent_id
        for i in range(n):
            bias = bias_last_layer or i < n - 1
            size = sizes[i]
            if size is None:
                side = 1 if fanned or self.n_sets == 1 else n_agents
                blocks.append(
                    LazyStackedConv2d(
                        self.n_sets,
                        cells[i],
                        kernels[i],
                        steps[i],
                        pads[i],
                        bias,
                        device,
                        blocks=side,
                    )
                )
            else:
                blocks.append(
                    StackedConv2d(
                        self.n_sets, size, cells[i], kernels[i], steps[i], pads[i], bias, device
                    )
                )
            norm = (norm_class, norms[i])
            self._finish(
                blocks, activation_class, activations[i], norm, dropout, device, order="and"
            )
        self.blocks.extend(blocks)
        self.aggregator = self._aggregator(aggregator_class, aggregator_kwargs)
        self.squeeze_output = squeeze_output

    def _aggregator(
        self, aggregator_class: Callable[..., nn.Module] | None, kwargs: dict[str, Any] | None
    ) -> nn.Module | None:
        """Returns what ends the net; None where channels and space are kept."""
        if aggregator_class is None:
            return None
        if aggregator_class is nn.Flatten and kwargs is None:
            kwargs = {"start_dim": -3}
        aggregator = aggregator_class(**(kwargs or {}))
        if self.n_sets > 1 and next(aggregator.parameters(), None) is not None:
            raise ConfigError(
                f"aggregator_class: {type(aggregator).__name__} has parameters, which agents with "
                "own parameter sets would share; use one without."
            )
        return aggregator

    @property
    def _empty_net(self) -> MultiAgentConvNet:
        """The holder of one agent's sizes, under the name at which clients of TorchRL look."""
        return self

    def reset_parameters(self) -> None:
        """Draws new parameters for every layer; unshared agents differ again."""
        super().reset_parameters()
        reset = getattr(self.aggregator, "reset_parameters", None)
        if callable(reset):
            reset()

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        """Returns the agents' features, flattened ``[*B, A, out]`` unless the net ends otherwise.

        Args:
            x: images ``[*B, A, C, H, W]``.
            *more: further inputs, concatenated along the last dim.
        """
        x, dim = self._checked((x, *more))
        if dim != x.ndim - 4:
            x = x.movedim(dim, -4)
        batch = x.shape[:-4]
        if len(batch) != 1:
            x = x.reshape(-1, *x.shape[-4:])
        fanned = self.centralized and not self.agent_id
        if self.centralized:
            x = x.flatten(1, 2)
            if self.agent_id:
                x = x.unsqueeze(1).expand(-1, self.n_agents, *x.shape[1:])
        if self.agent_id:
            x = self._with_id(x)
        y = self._features(x, fanned)
        if len(batch) != 1:
            y = y.reshape(*batch, *y.shape[1:])
        return y if dim == len(batch) else y.movedim(len(batch), dim)

    def _with_id(self, x: Tensor) -> Tensor:
        """Returns images ``[N, A, C + A, H, W]`` with the agents' constant id channels."""
        ids = torch.eye(self.n_agents, dtype=x.dtype, device=x.device)[..., None, None]
        return torch.cat([x, ids.expand(x.shape[0], -1, -1, *x.shape[-2:])], 2)

    def _features(self, x: Tensor, fanned: bool) -> Tensor:
        """Returns the features ``[N, A, …]`` of ``[N, A, C, …]``, of ``[N, C', …]`` if fanned."""
        if not fanned:
            return self._split(x, 0, x.shape[1])
        first = cast(StackedConv2d, self.blocks[0])
        sized(first, x)
        if self._masks_differ():
            hidden = first.fan_out(x).unflatten(1, (self.n_sets, -1))
            return self._split(hidden.index_select(1, self._sets), 1, self.n_agents)
        y = self._run(first.fan_out(x), None, 1, 1, (1, (self.n_sets, -1)))
        y = self._ended(y, self.n_sets)
        if self.n_sets == 1:
            return y.expand(-1, self.n_agents, *y.shape[2:])
        return y if self._index is None else y.index_select(1, self._index)

    def _split(self, x: Tensor, start: int, agents: int) -> Tensor:
        """Returns the features ``[N, A, …]`` of activations ``[N, A, C, H, W]``."""
        if self.n_sets == 1:
            y = self._run(x.flatten(0, 1), None, start, 1, (0, (-1, agents)))
        else:
            y = self._run(x.flatten(1, 2), self._index, start, 1, (1, (agents, -1)))
        return self._ended(y, agents)

    def _ended(self, y: Tensor, agents: int) -> Tensor:
        """Returns the features ``[N, A, …]`` of what the last layer made of ``agents`` agents."""
        if self.n_sets > 1:
            y = y.unflatten(1, (agents, -1)).flatten(0, 1)
        if self.aggregator is not None:
            y = self.aggregator(y)
        if self.squeeze_output:
            if y.shape[-2:] != (1, 1):
                raise ShapeError(
                    f"squeeze_output: expected last two dims of size 1, found {list(y.shape[-2:])}."
                )
            y = y.flatten(-3)
        return y.unflatten(0, (-1, agents))

    def _tail(self) -> list[nn.Module]:
        """Returns what ends one agent's network."""
        tail = [] if self.aggregator is None else [detached(self.aggregator)]
        return [*tail, nn.Flatten(-3)] if self.squeeze_output else tail


def layer_sizes(
    depth: int | None, num_cells: Any, kernels: Any, strides: Any, paddings: Any
) -> tuple[list[int], list[Any], list[Any], list[Any]]:
    """Returns cells, kernel sizes, strides and paddings per layer.

    Raises:
        ConfigError: lists of different lengths.
    """
    if num_cells is None:
        num_cells = 32 if depth is not None else [32, 32, 32]
    given = {
        "num_cells": num_cells,
        "kernel_sizes": kernels,
        "strides": strides,
        "paddings": paddings,
    }
    lengths = {len(v) for v in given.values() if not isinstance(v, int)}
    if depth is not None:
        lengths.add(depth)
    if len(lengths) != 1 or 0 in lengths:
        raise ConfigError(
            "num_cells, kernel_sizes, strides, paddings and depth: expected one length > 0, found "
            f"{given}."
        )
    n = lengths.pop()
    cells, sizes, steps, pads = ([v] * n if isinstance(v, int) else list(v) for v in given.values())
    return cells, sizes, steps, pads
