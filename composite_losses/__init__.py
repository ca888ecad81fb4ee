"""PPO, A2C and REINFORCE losses for policies with several action heads and groups of agents."""

from composite_losses import errors, export, functional, nets
from composite_losses.heads import StackHeads, resolve_log_probs
from composite_losses.losses import (
    A2CLoss,
    AdvantageNorm,
    Clip,
    ClipPPOLoss,
    Diagnosis,
    EntropyTerm,
    GroupLoss,
    HAPPOLoss,
    IPPOLoss,
    KLPenalty,
    KLPENPPOLoss,
    MAPPOLoss,
    PolicyLoss,
    PPOLoss,
    Ratio,
    ReinforceLoss,
    Score,
    ValueTerm,
    diagnose,
    param_groups,
)
from composite_losses.nets import (
    MultiAgentConvNet,
    MultiAgentGRU,
    MultiAgentLSTM,
    MultiAgentMLP,
)

__version__ = "0.1.0"

__all__ = [
    "A2CLoss",
    "AdvantageNorm",
    "Clip",
    "ClipPPOLoss",
    "Diagnosis",
    "EntropyTerm",
    "GroupLoss",
    "HAPPOLoss",
    "IPPOLoss",
    "KLPENPPOLoss",
    "KLPenalty",
    "MAPPOLoss",
    "MultiAgentConvNet",
    "MultiAgentGRU",
    "MultiAgentLSTM",
    "MultiAgentMLP",
    "PPOLoss",
    "PolicyLoss",
    "Ratio",
    "ReinforceLoss",
    "Score",
    "StackHeads",
    "ValueTerm",
    "__version__",
    "diagnose",
    "errors",
    "export",
    "functional",
    "nets",
    "param_groups",
    "resolve_log_probs",
]
