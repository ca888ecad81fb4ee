"""Stacked layers: one parameter set per agent (or cluster of agents), computed together.

Parameters are ordinary ``nn.Parameter``s with a leading set dim ``M``. Layers take activations
set-major, ``[M, N, ...]``, one block of rows per set, or with a single set in any layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedParameter

from composite_losses.errors import ConfigError
from composite_losses.nets.products import Index, chosen, products


class StackedLinear(nn.Module):
    """``M`` linear layers as one batched product.

    Args:
        n_sets: number of parameter sets M.
        in_features: input features F of one set.
        out_features: output features of one set.
        bias: whether a bias is added.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Parameters: ``weight [M, out, in]``, ``bias [M, out]``, initialised per set as ``nn.Linear``
    initialises one layer: uniform in ±1/√in.

    Shapes:
        ``[M, N, in]`` → ``[M, N, out]``; any ``[..., in]`` → ``[..., out]`` if M is 1.

    Source: definition: ``nn.Linear`` with each set.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        n_sets: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Creates and initialises the parameters."""
        super().__init__()
        self.n_sets, self.in_features, self.out_features = n_sets, in_features, out_features
        shape = (n_sets, out_features, in_features)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        if bias:
            self.bias = nn.Parameter(torch.empty(shape[:2], device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws new parameters, different ones for every set."""
        fan_in = self.weight.shape[-1]
        bound = 1 / math.sqrt(fan_in) if fan_in > 0 else 0.0
        for parameter in (self.weight, self.bias):
            if parameter is not None:
                nn.init.uniform_(parameter, -bound, bound)

    def forward(self, x: Tensor, index: Index = None) -> Tensor:
        """Returns the products: ``[M, N, in]`` → ``[M, N, out]``, or any ``[..., in]`` if M is 1.

        Args:
            x: the activations.
            index: ``[K]`` set of each of K row blocks ``x [K, N, in]``; None where K is M.
        """
        weight, bias = self.weight, self.bias
        if index is not None:
            weight, bias = chosen(weight, index), None if bias is None else chosen(bias, index)
        return products(x, weight, bias)

    def fan_out(self, x: Tensor) -> Tensor:
        """Returns the products of one input with all sets: ``[N, in]`` → ``[M, N, out]``.

        One large product, where a batched one would read the input M times.
        """
        bias = None if self.bias is None else self.bias.flatten()
        out = F.linear(x, self.weight.flatten(0, 1), bias)
        return out.unflatten(-1, (self.n_sets, self.out_features)).transpose(0, 1)

    def single(self, position: int) -> nn.Linear:
        """Returns set ``position`` as an ``nn.Linear`` that shares its memory."""
        size = self.weight.shape[-1]
        layer = nn.Linear(size, self.out_features, bias=self.bias is not None, device="meta")
        layer.weight = nn.Parameter(self.weight.data[position])
        if self.bias is not None:
            layer.bias = nn.Parameter(self.bias.data[position])
        return layer

    def extra_repr(self) -> str:
        """Returns sets and features."""
        return f"n_sets={self.n_sets}, {self.in_features}, {self.out_features}"


class LazyStackedLinear(LazyModuleMixin, StackedLinear):
    """A ``StackedLinear`` that learns its input features from the first call.

    Args:
        extra_features: features that the weight has beyond the input's (an agent id).
    """

    cls_to_become = StackedLinear
    weight: UninitializedParameter

    def __init__(
        self,
        n_sets: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        extra_features: int = 0,
    ) -> None:
        """Creates the parameters without their input features."""
        super().__init__(n_sets, 0, 0, bias=False, device=device, dtype=dtype)
        self.out_features = out_features
        self.extra_features = extra_features
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.weight = UninitializedParameter(**options)
        if bias:
            self.bias = UninitializedParameter(**options)

    def reset_parameters(self) -> None:
        """Draws new parameters once their size is known."""
        if not self.has_uninitialized_params():
            super().reset_parameters()

    def initialize_parameters(self, x: Tensor, *args: object) -> None:
        """Gives the parameters the size that the first input asks for."""
        if not self.has_uninitialized_params():
            self.in_features = self.weight.shape[-1]  # a state_dict has given the weight
            return
        with torch.no_grad():
            self.in_features = x.shape[-1] + self.extra_features
            self.weight.materialize((self.n_sets, self.out_features, self.in_features))
            if isinstance(self.bias, UninitializedParameter):
                self.bias.materialize((self.n_sets, self.out_features))
            self.reset_parameters()


def sized(layer: nn.Module, x: Tensor) -> None:
    """Gives a lazy layer, used without its ``forward``, the size that its first input asks for."""
    if isinstance(layer, LazyModuleMixin):
        layer._infer_parameters(layer, (x,))


class StackedConv2d(nn.Module):
    """``M`` 2-d convolutions as one grouped convolution.

    Args:
        n_sets: number of parameter sets M.
        in_channels: input channels of one set.
        out_channels: output channels of one set.
        kernel_size: kernel size.
        stride: stride.
        padding: padding.
        bias: whether a bias is added.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Parameters: ``weight [M, out, in, kh, kw]``, ``bias [M, out]``, initialised per set as
    ``nn.Conv2d`` initialises one layer.

    Shapes:
        ``[N, M·in, h, w]`` → ``[N, M·out, h', w']``.

    Source: definition: ``nn.Conv2d`` with each set.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        n_sets: int,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Creates and initialises the parameters."""
        super().__init__()
        self.n_sets, self.in_channels, self.out_channels = n_sets, in_channels, out_channels
        self.kernel_size, self.stride, self.padding = map(_pair, (kernel_size, stride, padding))
        shape = (n_sets, out_channels, in_channels, *self.kernel_size)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        if bias:
            self.bias = nn.Parameter(torch.empty(shape[:2], device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws new parameters, different ones for every set."""
        fan_in = math.prod(self.weight.shape[2:])
        bound = 1 / math.sqrt(fan_in) if fan_in > 0 else 0.0
        for parameter in (self.weight, self.bias):
            if parameter is not None:
                nn.init.uniform_(parameter, -bound, bound)

    def forward(self, x: Tensor, index: Index = None) -> Tensor:
        """Returns the convolutions ``[N, K·in, h, w]`` → ``[N, K·out, h', w']``, K blocks.

        Args:
            x: the activations, the blocks' channels side by side.
            index: ``[K]`` set of each block; None where K is M.
        """
        weight, bias = chosen(self.weight, index), self.bias
        bias = None if bias is None else chosen(bias, index).flatten()
        return F.conv2d(
            x, weight.flatten(0, 1), bias, self.stride, self.padding, groups=weight.shape[0]
        )

    def fan_out(self, x: Tensor) -> Tensor:
        """Returns the convolutions of one input with all sets, ``[N, in, …]``→``[N, M·out, …]``."""
        bias = None if self.bias is None else self.bias.flatten()
        return F.conv2d(x, self.weight.flatten(0, 1), bias, self.stride, self.padding)

    def single(self, position: int) -> nn.Conv2d:
        """Returns set ``position`` as an ``nn.Conv2d`` that shares its memory."""
        layer = nn.Conv2d(
            self.weight.shape[2],
            self.out_channels,
            self.kernel_size,
            self.stride,
            self.padding,
            bias=self.bias is not None,
            device="meta",
        )
        layer.weight = nn.Parameter(self.weight.data[position])
        if self.bias is not None:
            layer.bias = nn.Parameter(self.bias.data[position])
        return layer

    def extra_repr(self) -> str:
        """Returns sets, channels and kernel."""
        return (
            f"n_sets={self.n_sets}, {self.in_channels}, {self.out_channels}, "
            f"kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}"
        )


class LazyStackedConv2d(LazyModuleMixin, StackedConv2d):
    """A ``StackedConv2d`` that learns its input channels from the first call."""

    cls_to_become = StackedConv2d
    weight: UninitializedParameter

    def __init__(
        self,
        n_sets: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        blocks: int = 1,
    ) -> None:
        """Creates parameters without input channels; ``blocks`` inputs will lie side by side."""
        super().__init__(
            n_sets, 0, 0, kernel_size, stride, padding, bias=False, device=device, dtype=dtype
        )
        self.out_channels = out_channels
        self.blocks = blocks
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.weight = UninitializedParameter(**options)
        if bias:
            self.bias = UninitializedParameter(**options)

    def reset_parameters(self) -> None:
        """Draws new parameters once their size is known."""
        if not self.has_uninitialized_params():
            super().reset_parameters()

    def initialize_parameters(self, x: Tensor, *args: object) -> None:
        """Gives the parameters the size that the first input asks for."""
        if not self.has_uninitialized_params():
            self.in_channels = self.weight.shape[2]  # a state_dict has given the weight
            return
        with torch.no_grad():
            self.in_channels = x.shape[-3] // self.blocks
            shape = (self.n_sets, self.out_channels, self.in_channels, *self.kernel_size)
            self.weight.materialize(shape)
            if isinstance(self.bias, UninitializedParameter):
                self.bias.materialize((self.n_sets, self.out_channels))
            self.reset_parameters()


class AgentDropout(nn.Module):
    """Dropout with a mask per agent, or one mask for all agents.

    Args:
        p: probability of an element to be zeroed.
        same: whether all agents share one mask.
    """

    def __init__(self, p: float, same: bool = False) -> None:
        """Keeps the options."""
        super().__init__()
        if not 0.0 <= p <= 1.0:
            raise ConfigError(f"dropout: expected a probability in [0, 1], found {p}.")
        self.p, self.same = p, same

    def forward(
        self,
        x: Tensor,
        agent_dim: int | None = None,
        split: tuple[int, tuple[int, int]] | None = None,
    ) -> Tensor:
        """Returns the activations with elements zeroed in training mode.

        Args:
            x: the activations.
            agent_dim: dim along which the agents lie, or None where they share one activation.
            split: (dim, sizes) to unflatten before ``agent_dim`` is a dim of its own.
        """
        if not self.same or agent_dim is None or not self.training:
            return F.dropout(x, self.p, self.training)
        apart = x if split is None else x.unflatten(*split)
        ones = torch.ones_like(apart.narrow(agent_dim, 0, 1))
        return (apart * F.dropout(ones, self.p, True)).reshape(x.shape)

    def extra_repr(self) -> str:
        """Returns the options."""
        return f"p={self.p}, same={self.same}"


def _pair(value: int | Sequence[int]) -> tuple[int, int]:
    """Returns a size as (height, width)."""
    if isinstance(value, int):
        return (value, value)
    height, width = value
    return (height, width)
