"""The four kinds of networks on three agents, small, with every way of sharing."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import composite_losses as cl
from composite_losses.nets import StackedConv2d, StackedLinear
from tests.nets import loops

A, F, H, C, SIZE = 3, 4, 5, 2, 6
SHARING: dict[str, bool | tuple[int, ...]] = {
    "shared": True,
    "unshared": False,
    "clustered": (0, 1, 0),
}
SETS = {"shared": [0, 0, 0], "unshared": [0, 1, 2], "clustered": [0, 1, 0]}
FEEDFORWARD = ["mlp", "conv"]
RECURRENT = ["gru", "lstm"]
KINDS = [*FEEDFORWARD, *RECURRENT]
CELLS = {"gru": nn.GRU, "lstm": nn.LSTM}


def make(kind: str, sharing: str, *, lazy: bool = False, **options: Any) -> Any:
    """A network of a kind; three layers, or two recurrent ones."""
    share = SHARING[sharing]
    if kind in RECURRENT:
        cls = cl.MultiAgentGRU if kind == "gru" else cl.MultiAgentLSTM
        return cls(F, H, A, share_params=share, **{"num_layers": 2, **options})
    options = {"centralized": False, "share_params": share, **options}
    if kind == "mlp":
        options = {"depth": 2, "num_cells": 7, **options}
        return cl.MultiAgentMLP(None if lazy else F, 2, A, **options)
    options = {"num_cells": [3, 4], "kernel_sizes": 3, "strides": 1, **options}
    return cl.MultiAgentConvNet(A, in_features=None if lazy else C, **options)


def event(kind: str) -> tuple[int, ...]:
    """The shape of one agent's input."""
    return (C, SIZE, SIZE) if kind == "conv" else (F,)


def inputs(
    kind: str, *batch: int, dtype: torch.dtype = torch.float32, num_layers: int = 2
) -> tuple[Any, ...]:
    """The arguments of one call: the agents' inputs, and for a recurrent net its state."""
    x = torch.randn(*batch, A, *event(kind), dtype=dtype)
    if kind not in RECURRENT:
        return (x,)
    shape = (*batch, A, num_layers, H)
    states = tuple(torch.randn(shape, dtype=dtype) for _ in range(1 + (kind == "lstm")))
    return x, states[0] if kind == "gru" else states


def layers(net: nn.Module) -> list[loops.Layer]:
    """Weights and biases of the stacked layers, in order."""
    return [
        (m.weight, m.bias) for m in net.modules() if isinstance(m, (StackedLinear, StackedConv2d))
    ]


def by_agent(
    kind: str, net: Any, sharing: str, arguments: Sequence[Any], **options: Any
) -> list[Tensor]:
    """What one call must return, agent by agent: the outputs, then the state tensors."""
    sets = SETS[sharing]
    if kind in FEEDFORWARD:
        return [loops.feedforward(layers(net), sets, arguments[0], **options)]
    x, state = arguments
    hidden = [state] if kind == "gru" else state
    parameters = dict(net.named_parameters())
    y, finals = loops.recurrent(CELLS[kind], parameters, sets, x.unsqueeze(1), hidden)
    return [y.squeeze(1), *finals]


def flat(out: Any) -> list[Tensor]:
    """The tensors of a network's result, in order."""
    return torch.utils._pytree.tree_leaves(out)
