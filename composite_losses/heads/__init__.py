"""From TensorDicts to tensors: head plan, behaviour log-prob, distribution terms."""

from composite_losses.heads.actor import ActorProgram
from composite_losses.heads.chain import Behaviour, find, resolve_log_probs
from composite_losses.heads.plan import Head, HeadPlan, Slot, compile_plan
from composite_losses.heads.registry import FAMILIES, INSTANCES, from_distribution
from composite_losses.heads.scratch import Scratch
from composite_losses.heads.stack import StackHeads
from composite_losses.heads.terms import DistributionTerms, Terms

__all__ = [
    "FAMILIES",
    "INSTANCES",
    "ActorProgram",
    "Behaviour",
    "DistributionTerms",
    "Head",
    "HeadPlan",
    "Scratch",
    "Slot",
    "StackHeads",
    "Terms",
    "compile_plan",
    "find",
    "from_distribution",
    "resolve_log_probs",
]
