"""The losses that the demo compares."""

from functools import partial
from typing import Any, Protocol

import torchrl.objectives
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule
from torchrl.objectives import LossModule

import composite_losses
from composite_losses.demo.settings import ESTIMATES, Settings

AGENT_DIM = 1  # of an advantage [N, A, 1]


class MakeLoss(Protocol):
    """Builds a loss for an actor and a critic."""

    def __call__(
        self,
        actor: ProbabilisticTensorDictSequential,
        critic: TensorDictModule,
        settings: Settings,
    ) -> LossModule:
        """Returns the loss, its keys set."""


def clip_ppo_loss(
    actor: ProbabilisticTensorDictSequential,
    critic: TensorDictModule,
    settings: Settings,
    *,
    loss_class: type[LossModule],
    **options: Any,
) -> LossModule:
    """A clipped PPO loss. Ours and TorchRL's take the same keywords and the same keys."""
    loss = loss_class(
        actor,
        critic,
        clip_epsilon=settings.clip_epsilon,
        entropy_coeff=settings.entropy_coeff,
        normalize_advantage=True,
        normalize_advantage_exclude_dims=(AGENT_DIM,),
        **options,
    )
    loss.set_keys(**ESTIMATES)
    return loss


JOINT = "ours, joint ratio"
PER_HEAD = "ours, per-head ratio"
TORCHRL = "TorchRL"

METHODS: dict[str, MakeLoss] = {
    JOINT: partial(clip_ppo_loss, loss_class=composite_losses.ClipPPOLoss, ratio="joint"),
    TORCHRL: partial(clip_ppo_loss, loss_class=torchrl.objectives.ClipPPOLoss),
    PER_HEAD: partial(clip_ppo_loss, loss_class=composite_losses.ClipPPOLoss, ratio="per_head"),
}
"""Builders by name. The first two are the same objective, computed by two libraries."""
