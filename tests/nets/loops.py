"""Naive oracles: one agent at a time, with torch.nn's own layers; nothing of the package."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Layer = tuple[Tensor, Tensor | None]


def feedforward(
    layers: Sequence[Layer],
    sets: Sequence[int],
    x: Tensor,
    *,
    centralized: bool = False,
    agent_id: bool = False,
) -> Tensor:
    """Outputs ``[B, A, out]`` of ``x [B, A, *event]``; weights and biases have a leading set dim.

    Perceptrons (tanh between the layers) and ConvNets (ELU after every layer, then flattened).
    """
    images = layers[0][0].ndim == 5
    agents = x.shape[1]
    outputs = []
    for agent, index in enumerate(sets):
        y = torch.cat([x[:, i] for i in range(agents)], 1) if centralized else x[:, agent]
        if agent_id:
            one_hot = torch.zeros(agents, dtype=x.dtype)
            one_hot[agent] = 1
            one_hot = one_hot[:, None, None].expand(-1, *x.shape[-2:]) if images else one_hot
            y = torch.cat([y, one_hot.expand(len(y), *one_hot.shape)], 1)
        for position, (weight, bias) in enumerate(layers):
            one = None if bias is None else bias[index]
            if images:
                y = F.elu(F.conv2d(y, weight[index], one))
            else:
                y = F.linear(y, weight[index], one)
                y = y.tanh() if position < len(layers) - 1 else y
        outputs.append(y.flatten(1))
    return torch.stack(outputs, 1)


def recurrent(
    kind: type[nn.RNNBase],
    parameters: Mapping[str, Tensor],
    sets: Sequence[int],
    x: Tensor,
    hidden: Sequence[Tensor] | None = None,
    is_init: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Outputs ``[B, T, A, H]`` and final states ``[B, A, L, H]`` of ``x [B, T, A, F]``.

    ``is_init [B, T, A]``: a sequence is cut before each such step, and its pieces are run apart.
    """
    B, T, A, _ = x.shape
    width = parameters["weight_hh_l0"].shape[-1]
    depth = sum(name.startswith("weight_hh") for name in parameters)
    states = 2 if kind is nn.LSTM else 1
    out = x.new_zeros(B, T, A, width)
    finals = [x.new_zeros(B, A, depth, width) for _ in range(states)]
    for agent in range(A):
        net = kind(x.shape[-1], width, depth, batch_first=True, dtype=x.dtype)
        net.load_state_dict({k: v[sets[agent]] for k, v in parameters.items()})
        for row in range(B):
            cuts = [] if is_init is None else is_init[row, :, agent].nonzero().flatten().tolist()
            state = None if hidden is None else [h[row, agent, :, None] for h in hidden]
            edges = sorted({0, T, *cuts})
            for start, end in pairwise(edges):
                if start in cuts:
                    state = None
                given = None if state is None else (state[0] if states == 1 else tuple(state))
                y, last = net(x[row : row + 1, start:end, agent], given)
                out[row, start:end, agent] = y[0]
                state = [last] if states == 1 else list(last)
            for i, tensor in enumerate(state or ()):
                finals[i][row, agent] = tensor[:, 0]
    return out, finals
