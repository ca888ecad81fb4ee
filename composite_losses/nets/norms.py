"""Normalisation with parameters and statistics per set."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from composite_losses.errors import ConfigError
from composite_losses.nets.products import Index, chosen

LAYER_NORMS = (nn.LayerNorm, nn.RMSNorm)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)
STACKED = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def detached(layer: nn.Module, values: Mapping[str, Tensor] | None = None) -> nn.Module:
    """Returns a copy of a layer on the same memory, through which no gradient flows back.

    Args:
        layer: what to copy.
        values: other tensors for its parameters and buffers, by name.
    """
    values = values or {}
    memo: dict[int, Any] = {}
    for name, parameter in layer.named_parameters():
        data = values.get(name, parameter.data)
        memo[id(parameter)] = nn.Parameter(data, parameter.requires_grad)
    for name, buffer in layer.named_buffers():
        memo[id(buffer)] = values.get(name, buffer)
    return copy.deepcopy(layer, memo)


class StackedNorm(nn.Module):
    """``M`` normalisation layers of one class, computed together.

    ``LayerNorm`` and ``RMSNorm`` for features, ``BatchNorm1d`` for rows, ``BatchNorm2d`` and
    ``GroupNorm`` for channels. With one set any class works.

    Args:
        norm_class: the class of one layer.
        norm_kwargs: its arguments.
        n_sets: number of parameter sets M.
        device: device of the parameters.

    Raises:
        ConfigError: a class that cannot be stacked.
    """

    template: nn.Module
    single_layer: nn.Module | None
    num_batches_tracked: Tensor | None

    def __init__(
        self,
        norm_class: Callable[..., nn.Module],
        norm_kwargs: dict[str, Any],
        n_sets: int,
        device: torch.device | str | None = None,
    ) -> None:
        """Builds one layer per set and stacks their parameters and statistics."""
        super().__init__()
        layers = []
        for _ in range(n_sets):
            layer = norm_class(**norm_kwargs)
            layers.append(layer if device is None else layer.to(device))
        self.n_sets = n_sets
        # not a submodule: its parameters and statistics are not the net's
        object.__setattr__(self, "template", layers[0])
        self.kind = type(layers[0])
        self.single_layer = layers[0] if n_sets == 1 else None
        if n_sets == 1:
            return
        known = (*LAYER_NORMS, *BATCH_NORMS, nn.GroupNorm)
        if self.kind not in known:
            raise ConfigError(
                f"norm_class: {self.kind.__name__} cannot be stacked for unshared parameters; use "
                f"one of {', '.join(k.__name__ for k in known)}."
            )
        if self.kind in BATCH_NORMS and getattr(layers[0], "momentum", None) is None:
            raise ConfigError(
                "norm_class: a cumulative average (momentum=None) cannot be stacked for unshared "
                "parameters; give a momentum."
            )
        for name, parameter in layers[0].named_parameters():
            rows = [dict(layer.named_parameters())[name].data for layer in layers]
            self.register_parameter(name, nn.Parameter(torch.stack(rows), parameter.requires_grad))
        for name, _ in layers[0].named_buffers():
            rows = [dict(layer.named_buffers())[name] for layer in layers]
            self.register_buffer(name, torch.stack(rows))
        for name in STACKED:
            if not hasattr(self, name):
                setattr(self, name, None)

    @property
    def holder(self) -> nn.Module:
        """The module that holds parameters and statistics: the single layer, or this one."""
        return self if self.single_layer is None else self.single_layer

    def reset_parameters(self) -> None:
        """Sets weights to 1, biases to 0 and statistics to their start."""
        if self.single_layer is not None:
            reset = getattr(self.single_layer, "reset_parameters", None)
            if callable(reset):
                reset()
            return
        with torch.no_grad():
            for name, value in zip(STACKED, (1.0, 0.0, 0.0, 1.0, 0), strict=True):
                tensor = getattr(self, name)
                if tensor is not None:
                    tensor.fill_(value)

    def forward(self, x: Tensor, index: Index = None) -> Tensor:
        """Returns the normalised activations, ``[K, N, F]`` or (channels) ``[N, K·C, h, w]``."""
        if self.single_layer is not None:
            return self._shared(self.single_layer, x)
        if self.kind in LAYER_NORMS:
            return self._features(x, index)
        if self.kind is nn.BatchNorm1d:
            return self._rows(x, index)
        return self._channels(x, index)

    def _shared(self, layer: nn.Module, x: Tensor) -> Tensor:
        """Returns the activations of a single set, in any layout."""
        if isinstance(layer, nn.BatchNorm1d):
            return cast(Tensor, layer(x.flatten(0, -2)).unflatten(0, x.shape[:-1]))
        return cast(Tensor, layer(x))

    def _parameter(self, name: str, index: Index) -> Tensor | None:
        """Returns a parameter or statistic with one row per block."""
        tensor = getattr(self, name)
        return None if tensor is None else chosen(tensor, index)

    def _features(self, x: Tensor, index: Index) -> Tensor:
        """Returns layer or RMS norm over the last dims, ``[K, N, F]`` or ``[N, K·C, h, w]``."""
        layer: Any = self.template
        shape = layer.normalized_shape
        images = x.ndim == 4
        if images:
            x = x.unflatten(1, (self.n_sets if index is None else index.shape[0], -1))
        if self.kind is nn.LayerNorm:
            x = nn.functional.layer_norm(x, shape, eps=layer.eps)
        else:
            x = nn.functional.rms_norm(x, shape, eps=layer.eps)
        weight, bias = self._parameter("weight", index), self._parameter("bias", index)
        # [K, *shape], broadcast over the rows between blocks and normalised dims, or before blocks
        between = (1,) * ((3 if images else 2) - len(shape))
        if weight is not None:
            x = x * weight.reshape(-1, *between, *shape)
        if bias is not None:
            x = x + bias.reshape(-1, *between, *shape)
        return x.flatten(1, 2) if images else x

    def _rows(self, x: Tensor, index: Index) -> Tensor:
        """Returns batch norm over the rows of each block, ``[K, N, F]``."""
        blocks, _, features = x.shape
        flat = x.transpose(0, 1).flatten(1)
        return self._batch_norm(flat, index).unflatten(-1, (blocks, features)).transpose(0, 1)

    def _channels(self, x: Tensor, index: Index) -> Tensor:
        """Returns batch or group norm over the channels of each block, ``[N, K·C, h, w]``."""
        if self.kind is nn.BatchNorm2d:
            return self._batch_norm(x, index)
        layer: Any = self.template
        blocks = self.n_sets if index is None else index.shape[0]
        weight, bias = self._parameter("weight", index), self._parameter("bias", index)
        return nn.functional.group_norm(
            x,
            layer.num_groups * blocks,
            None if weight is None else weight.flatten(),
            None if bias is None else bias.flatten(),
            layer.eps,
        )

    def _batch_norm(self, x: Tensor, index: Index) -> Tensor:
        """Returns batch norm of ``[N, K·C, ...]`` with the statistics of each set."""
        layer: Any = self.template
        weight, bias = self._parameter("weight", index), self._parameter("bias", index)
        mean, var = self._parameter("running_mean", index), self._parameter("running_var", index)
        update = self.training and mean is not None
        if update and index is not None:
            raise ConfigError(
                "norm_class: batch statistics of agents that share a parameter set by mapping "
                "cannot be updated together; use LayerNorm, or share_params True or False."
            )
        out = nn.functional.batch_norm(
            x,
            None if mean is None else mean.reshape(-1),
            None if var is None else var.reshape(-1),
            None if weight is None else weight.flatten(),
            None if bias is None else bias.flatten(),
            self.training or mean is None,
            0.1 if layer.momentum is None else layer.momentum,
            layer.eps,
        )
        if update and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        return out

    def single(self, position: int) -> nn.Module:
        """Returns set ``position`` as one layer that shares its memory."""
        if self.single_layer is not None:
            return detached(self.single_layer)
        own = {}
        for name in STACKED:
            tensor = getattr(self, name)
            if tensor is not None:
                own[name] = tensor.data[position]
        return detached(self.template, own)

    def extra_repr(self) -> str:
        """Returns class and number of sets."""
        return f"{self.kind.__name__}, n_sets={self.n_sets}"
