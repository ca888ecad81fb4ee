"""The loss modules and their parts."""

from composite_losses.losses.a2c import A2CLoss
from composite_losses.losses.diagnosis import Diagnosis, diagnose
from composite_losses.losses.groups import GroupLoss
from composite_losses.losses.happo import HAPPOLoss
from composite_losses.losses.multiagent import IPPOLoss, MAPPOLoss
from composite_losses.losses.optim import param_groups
from composite_losses.losses.parts import AdvantageNorm, EntropyTerm, ValueTerm
from composite_losses.losses.policy import PolicyLoss
from composite_losses.losses.ppo import ClipPPOLoss, KLPENPPOLoss, PPOLoss
from composite_losses.losses.reinforce import ReinforceLoss
from composite_losses.losses.surrogates import Clip, KLPenalty, Ratio, Score

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
    "PPOLoss",
    "PolicyLoss",
    "Ratio",
    "ReinforceLoss",
    "Score",
    "ValueTerm",
    "diagnose",
    "param_groups",
]
