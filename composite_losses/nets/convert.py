"""Weights from and to TorchRL's multi-agent nets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from composite_losses.errors import ConfigError
from composite_losses.nets._torchrl import TorchRLConvNet, TorchRLMLP
from composite_losses.nets.base import MultiAgentNet
from composite_losses.nets.conv import MultiAgentConvNet
from composite_losses.nets.layers import AgentDropout, StackedConv2d, StackedLinear
from composite_losses.nets.mlp import MultiAgentMLP
from composite_losses.nets.norms import StackedNorm


def from_torchrl(net: nn.Module) -> MultiAgentNet:
    """Returns the library's net with the weights and outputs of a TorchRL multi-agent net.

    Args:
        net: TorchRL's ``MultiAgentMLP`` or ``MultiAgentConvNet``, its input size known.

    Raises:
        ConfigError: another kind of net, or one with layers that have no counterpart.
    """
    if not isinstance(net, (TorchRLMLP, TorchRLConvNet)):
        raise ConfigError(f"from_torchrl: no counterpart for {type(net).__name__}.")
    params = net.params.data
    if any(isinstance(p, nn.parameter.UninitializedTensorMixin) for p in params.values(True, True)):
        raise ConfigError("from_torchrl: the net has not seen its input size; call it once.")
    layers = list(net._empty_net)
    device = next(iter(params.values(True, True))).device
    options: dict[str, Any] = {
        "centralized": net.centralized,
        "share_params": bool(net.share_params),
        "device": device,
        "dropout_randomness": "same" if net._vmap_randomness == "same" else "different",
    }
    template = next(m for m in layers if isinstance(m, (nn.Linear, nn.Conv2d)))
    if isinstance(net, TorchRLMLP):
        out = _mlp(net, layers, template, options)
    else:
        out = _conv(net, layers, template, options)
    slots = sorted(params.keys(), key=int)
    blocks = [b for b in out.blocks if next(iter(b.parameters()), None) is not None]
    if len(slots) != len(blocks):
        raise ConfigError(f"from_torchrl: layers without a counterpart in {net}.")
    with torch.no_grad():
        for slot, block in zip(slots, blocks, strict=True):
            for name, value in params.get(slot).items():
                _own(block, name).copy_(value if not net.share_params else _fit(block, name, value))
    return out.to(dtype=template_dtype(params)).train(net.training)


def template_dtype(params: TensorDictBase) -> torch.dtype:
    """Returns the dtype of the first floating-point parameter."""
    for value in params.values(True, True):
        if value.is_floating_point():
            return value.dtype
    return torch.get_default_dtype()


def _own(block: nn.Module, name: str) -> Tensor:
    """Returns the tensor of a block that holds ``name``."""
    holder: Any = block.single_layer if _plain_norm(block) else block
    return getattr(holder, name).data


def _plain_norm(block: nn.Module) -> bool:
    """Returns whether a norm holds one ordinary layer."""
    return isinstance(block, StackedNorm) and block.single_layer is not None


def _fit(block: nn.Module, name: str, value: Tensor) -> Tensor:
    """Returns a shared parameter with the leading set dim of its block."""
    return value if _plain_norm(block) else value.unsqueeze(0)


def _activation(layers: Sequence[nn.Module]) -> Any:
    """Returns a factory of the net's activation."""
    known = (nn.Linear, nn.Conv2d, nn.Dropout)
    for module in layers:
        if not isinstance(module, known) and type(module).__module__.startswith(
            "torch.nn.modules.activation"
        ):
            return type(module)
    return nn.Identity


def _norm(layers: Sequence[nn.Module]) -> tuple[Any, dict[str, Any]]:
    """Returns the norm class of the net and its arguments."""
    for module in layers:
        if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
            return type(module), {"normalized_shape": module.normalized_shape, "eps": module.eps}
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
            return type(module), {"num_features": module.num_features, "eps": module.eps}
        if isinstance(module, nn.GroupNorm):
            return type(module), {
                "num_groups": module.num_groups,
                "num_channels": module.num_channels,
            }
    return None, {}


def _mlp(
    net: TorchRLMLP, layers: list[nn.Module], template: nn.Module, options: dict[str, Any]
) -> MultiAgentMLP:
    """Returns the library's MLP with the structure of TorchRL's."""
    linear = [m for m in layers if isinstance(m, nn.Linear)]
    norm_class, norm_kwargs = _norm(layers)
    dropout = next((m.p for m in layers if isinstance(m, nn.Dropout)), None)
    inputs = linear[0].in_features // (net.n_agents if net.centralized else 1)
    return MultiAgentMLP(
        inputs,
        linear[-1].out_features,
        net.n_agents,
        num_cells=[m.out_features for m in linear[:-1]],
        activation_class=_activation(layers),
        norm_class=norm_class,
        norm_kwargs=norm_kwargs,
        dropout=dropout,
        bias_last_layer=linear[-1].bias is not None,
        activate_last_layer=not isinstance(layers[-1], nn.Linear),
        **options,
    )


def _conv(
    net: TorchRLConvNet, layers: list[nn.Module], template: nn.Module, options: dict[str, Any]
) -> MultiAgentConvNet:
    """Returns the library's ConvNet with the structure of TorchRL's."""
    convs = [m for m in layers if isinstance(m, nn.Conv2d)]
    norm_class, norm_kwargs = _norm(layers)
    return MultiAgentConvNet(
        net.n_agents,
        in_features=convs[0].in_channels // (net.n_agents if net.centralized else 1),
        num_cells=[m.out_channels for m in convs],
        kernel_sizes=[m.kernel_size for m in convs],
        strides=[m.stride for m in convs],
        paddings=[m.padding for m in convs],
        activation_class=_activation(layers),
        norm_class=norm_class,
        norm_kwargs=norm_kwargs,
        bias_last_layer=convs[-1].bias is not None,
        **options,
    )


def to_torchrl(net: MultiAgentNet) -> nn.Module:
    """Returns TorchRL's multi-agent net with the weights and outputs of the library's.

    A net shared by cluster becomes an unshared one, each agent with its cluster's weights.

    Raises:
        ConfigError: an option that TorchRL's nets do not have (agent ids, another agent dim).
    """
    if net.agent_id or net.agent_dim != -1 - net.event_ndim:
        raise ConfigError("to_torchrl: TorchRL's nets have no agent_id and a fixed agent_dim.")
    first = net.blocks[0]
    shared = net.n_sets == 1 and net.share_params is not False
    options = {
        "centralized": net.centralized,
        "share_params": shared,
        "device": first.weight.device,
        "activation_class": next((type(b) for b in net.blocks if not _structural(b)), nn.Identity),
    }
    norm = next((b for b in net.blocks if isinstance(b, StackedNorm)), None)
    if norm is not None:
        options["norm_class"], options["norm_kwargs"] = _norm([norm.template])
    seen = net.n_agents if net.centralized else 1
    if isinstance(net, MultiAgentMLP):
        linear = [b for b in net.blocks if isinstance(b, StackedLinear)]
        dropout = next((b.p for b in net.blocks if isinstance(b, AgentDropout)), None)
        if norm is not None:
            options["norm_kwargs"] = [options["norm_kwargs"]] * (len(linear) - 1)
        out: Any = TorchRLMLP(
            linear[0].in_features // seen,
            linear[-1].out_features,
            net.n_agents,
            num_cells=[b.out_features for b in linear[:-1]],
            depth=len(linear) - 1,
            dropout=dropout,
            bias_last_layer=linear[-1].bias is not None,
            activate_last_layer=not isinstance(net.blocks[-1], StackedLinear),
            **options,
        )
    else:
        convs = [b for b in net.blocks if isinstance(b, StackedConv2d)]
        if norm is not None:
            options["norm_kwargs"] = [options["norm_kwargs"]] * len(convs)
        out = TorchRLConvNet(
            net.n_agents,
            in_features=convs[0].in_channels // seen,
            num_cells=[b.out_channels for b in convs],
            kernel_sizes=[b.kernel_size for b in convs],
            strides=[b.stride for b in convs],
            paddings=[b.padding for b in convs],
            bias_last_layer=convs[-1].bias is not None,
            **options,
        )
    out = out.to(first.weight.dtype)
    views = [net.agent(i) for i in range(1 if shared else net.n_agents)]
    slots = sorted(out.params.data.keys(), key=int)
    with torch.no_grad():
        for slot in slots:
            for name, target in out.params.data.get(slot).items():
                rows = [view[int(slot)].state_dict()[name] for view in views]
                target.copy_(rows[0] if shared else torch.stack(rows))
    return out.train(net.training)


def _structural(block: nn.Module) -> bool:
    """Returns whether a block is a layer, norm or dropout rather than an activation."""
    return isinstance(block, (StackedLinear, StackedConv2d, StackedNorm, AgentDropout))
