"""Weights from and to TorchRL's multi-agent nets."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from composite_losses.errors import ConfigError
from composite_losses.nets._torchrl import TorchRLConvNet, TorchRLMLP
from composite_losses.nets.base import MultiAgentNet
from composite_losses.nets.conv import MultiAgentConvNet
from composite_losses.nets.layers import AgentDropout, StackedConv2d, StackedLinear
from composite_losses.nets.mlp import MultiAgentMLP
from composite_losses.nets.norms import StackedNorm

WEIGHTED = (nn.Linear, nn.LazyLinear, nn.Conv2d, nn.LazyConv2d)
NORM_OPTIONS: dict[type[nn.Module], tuple[str, ...]] = {
    nn.LayerNorm: ("normalized_shape", "eps", "elementwise_affine"),
    nn.RMSNorm: ("normalized_shape", "eps", "elementwise_affine"),
    nn.BatchNorm1d: ("num_features", "eps", "momentum", "affine", "track_running_stats"),
    nn.BatchNorm2d: ("num_features", "eps", "momentum", "affine", "track_running_stats"),
    nn.GroupNorm: ("num_groups", "num_channels", "eps", "affine"),
}


def from_torchrl(net: nn.Module) -> MultiAgentNet:
    """Returns the library's net with the weights and outputs of a TorchRL multi-agent net.

    Args:
        net: TorchRL's ``MultiAgentMLP`` or ``MultiAgentConvNet``, its input size known.

    Raises:
        ConfigError: another kind of net, or one with layers that have no counterpart.

    Source: TorchRL's ``MultiAgentMLP`` and ``MultiAgentConvNet``.
    """
    if not isinstance(net, (TorchRLMLP, TorchRLConvNet)):
        raise ConfigError(f"from_torchrl: no counterpart for {type(net).__name__}.")
    params = net.params.data
    if any(is_lazy(p) for p in net.params.values(True, True)):
        raise ConfigError("from_torchrl: the net has not seen its input size; call it once.")
    out = _mlp(net, params) if isinstance(net, TorchRLMLP) else _conv(net, params)
    slots = sorted(params.keys(), key=int)
    blocks = [b for b in out.blocks if next(iter(b.parameters()), None) is not None]
    if len(slots) != len(blocks):
        raise ConfigError(f"from_torchrl: layers without a counterpart in {net}.")
    with torch.no_grad():
        for slot, block in zip(slots, blocks, strict=True):
            holder = block.holder if isinstance(block, StackedNorm) else block
            for name, value in params.get(slot).items():
                target = getattr(holder, name)
                target.copy_(value.reshape(target.shape))
    return out.train(net.training)


def _options(net: Any, params: TensorDictBase) -> dict[str, Any]:
    """Returns what both kinds of nets are built with."""
    return {
        "centralized": net.centralized,
        "share_params": bool(net.share_params),
        "device": next(iter(params.values(True, True))).device,
        "dropout_randomness": "same" if net._vmap_randomness == "same" else "different",
    }


def _dtype(params: TensorDictBase) -> torch.dtype:
    """Returns the dtype of the first floating-point parameter."""
    for value in params.values(True, True):
        if value.is_floating_point():
            return cast(torch.dtype, value.dtype)
    return torch.get_default_dtype()


def _stages(layers: Sequence[nn.Module]) -> tuple[list[Any], list[list[nn.Module]]]:
    """Returns the layers with weights, and what follows each.

    Raises:
        ConfigError: a layer of another kind.
    """
    weighted: list[Any] = []
    after: list[list[nn.Module]] = []
    for layer in layers:
        if type(layer) in WEIGHTED:
            weighted.append(layer)
            after.append([])
        elif after and type(layer).__module__.partition(".")[0] != "torchrl":
            after[-1].append(layer)
        else:
            raise ConfigError(f"from_torchrl: no counterpart for the layer {layer}.")
    return weighted, after


def _between(after: Sequence[Sequence[nn.Module]]) -> dict[str, Any]:
    """Returns the options of activations and norms out of what follows the layers."""
    norms = [m for stage in after for m in stage if type(m) in NORM_OPTIONS]
    activations = [
        {"x": m} for stage in after for m in stage if m not in norms and type(m) is not nn.Dropout
    ]
    return {
        "activation_class": copy.deepcopy,
        "activation_kwargs": activations,
        **_norm_options(norms),
    }


def _norm_options(norms: Sequence[nn.Module]) -> dict[str, Any]:
    """Returns the class of the norms and the arguments of each."""
    kinds = {type(m) for m in norms}
    if not kinds:
        return {}
    kind = kinds.pop()
    if kinds or kind not in NORM_OPTIONS:
        raise ConfigError(f"expected norms of one class that converts, found {list(norms)}.")
    kwargs = [{name: getattr(m, name) for name in NORM_OPTIONS[kind]} for m in norms]
    if kind is nn.LayerNorm:
        for options, norm in zip(kwargs, norms, strict=True):
            options["bias"] = not options["elementwise_affine"] or norm.bias is not None
    return {"norm_class": kind, "norm_kwargs": kwargs}


def _mlp(net: TorchRLMLP, params: TensorDictBase) -> MultiAgentNet:
    """Returns the library's MLP with the structure of TorchRL's."""
    linear, after = _stages(list(net._empty_net))
    dropout = next((m.p for s in after for m in s if isinstance(m, nn.Dropout)), None)
    first = params.get("0").get("weight")
    out = MultiAgentMLP(
        first.shape[-1] // (net.n_agents if net.centralized else 1),
        linear[-1].out_features,
        net.n_agents,
        num_cells=[m.out_features for m in linear[:-1]],
        dropout=dropout,
        bias_last_layer=linear[-1].bias is not None,
        activate_last_layer=bool(after[-1]),
        **_between(after),
        **_options(net, params),
    )
    return out.to(dtype=_dtype(params))


def _conv(net: TorchRLConvNet, params: TensorDictBase) -> MultiAgentNet:
    """Returns the library's ConvNet with the structure of TorchRL's."""
    *layers, last = net._empty_net
    if type(last).__name__ != "SquashDims" or getattr(last, "ndims_in", None) != 3:
        raise ConfigError(f"from_torchrl: no counterpart for the layer {last}.")
    convs, after = _stages(layers)
    first = params.get("0").get("weight")
    out = MultiAgentConvNet(
        net.n_agents,
        in_features=first.shape[-3] // (net.n_agents if net.centralized else 1),
        num_cells=[m.out_channels for m in convs],
        kernel_sizes=[m.kernel_size for m in convs],
        strides=[m.stride for m in convs],
        paddings=[m.padding for m in convs],
        bias_last_layer=convs[-1].bias is not None,
        **_between(after),
        **_options(net, params),
    )
    return out.to(dtype=_dtype(params))


def to_torchrl(net: MultiAgentNet) -> nn.Module:
    """Returns TorchRL's multi-agent net with the weights and outputs of the library's.

    A net shared by cluster becomes an unshared one, each agent with its cluster's weights.

    Args:
        net: the library's ``MultiAgentMLP`` or ``MultiAgentConvNet``.

    Raises:
        ConfigError: an option that TorchRL's nets do not have (agent ids, another agent dim,
            dropout in a ConvNet).

    Source: TorchRL's ``MultiAgentMLP`` and ``MultiAgentConvNet``.
    """
    if net.agent_id or net.agent_dim != -1 - net.event_ndim:
        raise ConfigError("to_torchrl: TorchRL's nets have no agent_id and a fixed agent_dim.")
    shared = net.n_sets == 1 and net.share_params is not False
    views = [net.agent(i) for i in range(1 if shared else net.n_agents)]
    weighted = [b for b in net.blocks if isinstance(b, (StackedLinear, StackedConv2d))]
    norms = [b.template for b in net.blocks if isinstance(b, StackedNorm)]
    drops = [b.p for b in net.blocks if isinstance(b, AgentDropout)]
    known = (StackedLinear, StackedConv2d, StackedNorm, AgentDropout)
    weight = weighted[0].weight
    seen = net.n_agents if net.centralized else 1
    options: dict[str, Any] = {
        "centralized": net.centralized,
        "share_params": shared,
        "device": weight.device,
        "vmap_randomness": net.dropout_randomness,
        "activation_class": copy.deepcopy,
        "activation_kwargs": [{"x": b} for b in net.blocks if not isinstance(b, known)],
        "bias_last_layer": weighted[-1].bias is not None,
        **_norm_options(norms),
    }
    out: Any
    if isinstance(net, MultiAgentMLP):
        linear = [b for b in weighted if isinstance(b, StackedLinear)]
        out = TorchRLMLP(
            weight.shape[-1] // seen,
            linear[-1].out_features,
            net.n_agents,
            num_cells=[b.out_features for b in linear[:-1]],
            depth=len(linear) - 1,
            dropout=drops[0] if drops else None,
            activate_last_layer=not isinstance(net.blocks[-1], StackedLinear),
            **options,
        )
    else:
        convs = [b for b in weighted if isinstance(b, StackedConv2d)]
        if drops:
            raise ConfigError("to_torchrl: TorchRL's ConvNet has no dropout.")
        if repr(net.aggregator) != repr(nn.Flatten(-3)) or net.squeeze_output:
            raise ConfigError("to_torchrl: expected features that are flattened at the end.")
        out = TorchRLConvNet(
            net.n_agents,
            in_features=weight.shape[2] // seen,
            num_cells=[b.out_channels for b in convs],
            kernel_sizes=[b.kernel_size for b in convs],
            strides=[b.stride for b in convs],
            paddings=[b.padding for b in convs],
            **options,
        )
    out = out.to(weight.dtype)
    with torch.no_grad():
        for slot, entry in out.params.data.items():
            for name, target in entry.items():
                _fill(target, [view[int(slot)].state_dict().get(name) for view in views])
    return out.train(net.training)


def _fill(target: Tensor, rows: Sequence[Tensor | None]) -> None:
    """Writes the agents' values; zeros where they have none: TorchRL always has a last bias."""
    found = [row for row in rows if row is not None]
    if found:
        target.copy_(torch.stack(found).reshape(target.shape))
    else:
        target.zero_()
