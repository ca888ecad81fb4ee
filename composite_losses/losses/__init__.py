"""The loss modules and their parts."""

from composite_losses.losses.a2c import A2CLoss
from composite_losses.losses.diagnosis import Diagnosis, diagnose
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
    "KLPENPPOLoss",
    "KLPenalty",
    "PPOLoss",
    "PolicyLoss",
    "Ratio",
    "ReinforceLoss",
    "Score",
    "ValueTerm",
    "diagnose",
]
