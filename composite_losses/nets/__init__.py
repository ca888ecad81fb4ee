"""Multi-agent networks, computed by batched products."""

from composite_losses.nets._torchrl import RecurrentModule
from composite_losses.nets.conv import MultiAgentConvNet
from composite_losses.nets.convert import from_torchrl, to_torchrl
from composite_losses.nets.layers import StackedConv2d, StackedLinear
from composite_losses.nets.mlp import MultiAgentMLP
from composite_losses.nets.recurrent import MultiAgentGRU, MultiAgentLSTM

__all__ = [
    "MultiAgentConvNet",
    "MultiAgentGRU",
    "MultiAgentLSTM",
    "MultiAgentMLP",
    "RecurrentModule",
    "StackedConv2d",
    "StackedLinear",
    "from_torchrl",
    "to_torchrl",
]
