"""TorchRL's trainers around our losses, as they stand: no subclass, no adapter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.checkpoint import Checkpoint, GlobalRNGState
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, SamplerWithoutReplacement, TensorDictReplayBuffer
from torchrl.modules import ProbabilisticActor
from torchrl.objectives import LossModule
from torchrl.objectives.value import GAE
from torchrl.trainers import DefaultOptimizationStepper, Trainer
from torchrl.trainers.algorithms import A2CTrainer, PPOTrainer, ReinforceTrainer
from torchrl.trainers.trainers import ReplayBufferTrainer, UpdateWeights, ValueEstimatorHook

import composite_losses as cl
from examples.steering import LENGTH, Steering, make_actor, make_critic

ENVS = 4
FRAMES = ENVS * LENGTH  # one episode of every environment
MINIBATCH = FRAMES // 2

# what these trainers and their parts warn of when they are built, in TorchRL 0.14
WARNINGS = (
    "ignore:.* is an experimental/prototype feature:UserWarning",
    "ignore:The '(post_loss|optimizer)' hook stage will be replaced:FutureWarning",
    # its stepper hands the logger losses that still have their graph
    "ignore:Converting a tensor with requires_grad=True:UserWarning",
)


@dataclass(frozen=True)
class Case:
    """A trainer and the loss that it trains.

    ``gae``: whether the trainer writes advantages; ``replay``: whether it draws flat minibatches,
    or hands over whole trajectories.
    """

    trainer: type[Trainer]
    loss: Callable[..., LossModule]
    options: dict[str, Any] = field(default_factory=dict)
    critic: bool = True
    gae: bool = True
    replay: bool = True
    nested: bool = False


def per_head(actor: Any, critic: Any, **options: Any) -> LossModule:
    surrogate, value = cl.Clip(0.2, ratio="per_head"), cl.ValueTerm("l2", coeff=0.5)
    return cl.PolicyLoss(actor, critic, surrogate=surrogate, value=value, **options)


BY_HEAD = {"entropy_coeff": {"move": 0.0, "gear": 0.02}}
CASES = {
    "ppo": Case(PPOTrainer, cl.ClipPPOLoss, {"normalize_advantage": True, **BY_HEAD}),
    "ppo-unclipped": Case(PPOTrainer, cl.PPOLoss, {"clip_value": 0.2}, nested=True),
    "ppo-kl": Case(PPOTrainer, cl.KLPENPPOLoss, {"beta": 0.7, "dtarg": 1e-4}),
    "ppo-native": Case(PPOTrainer, per_head, nested=True),
    "a2c": Case(A2CTrainer, cl.A2CLoss, BY_HEAD),
    "a2c-nested": Case(A2CTrainer, cl.A2CLoss, nested=True),
    "reinforce": Case(ReinforceTrainer, cl.ReinforceLoss),
    "reinforce-alone": Case(
        ReinforceTrainer,
        cl.ReinforceLoss,
        {"baseline": "leave_one_out"},
        critic=False,
        gae=False,
        replay=False,
    ),
    "plain": Case(Trainer, cl.ClipPPOLoss, {"ratio": "per_head"}),
    "plain-nested": Case(Trainer, cl.PPOLoss, nested=True),
}


def make_loss(case: Case) -> tuple[LossModule, ProbabilisticActor]:
    """The case's loss over fresh networks, and the actor, which shares its weights."""
    actor = make_actor(nested=case.nested)
    return case.loss(actor, make_critic() if case.critic else None, **case.options), actor


def make_trainer(
    case: Case,
    loss: LossModule,
    policy: Any,
    *,
    batches: int,
    logger: Any = None,
    file: Path | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
    **options: Any,
) -> Trainer:
    """A trainer that collects ``batches`` batches, one episode of every environment each.

    Args:
        case: which trainer.
        loss: what it trains.
        policy: what collects, sharing the loss's weights.
        batches: after which it stops.
        logger: logs at every batch.
        file: where a checkpoint is written at the end.
        optimizer: of the loss's parameters.
        **options: the trainer's.
    """
    collector = Collector(
        Steering(ENVS, nested=case.nested),
        policy,
        frames_per_batch=FRAMES,
        total_frames=-1,
        reset_at_each_iter=True,
        auto_register_policy_transforms=False,
    )
    checkpoint = Checkpoint()
    checkpoint.register("rng", GlobalRNGState())
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(FRAMES),
        sampler=SamplerWithoutReplacement(),
        batch_size=MINIBATCH,
    )
    shared: dict[str, Any] = {
        "collector": collector,
        "loss_module": loss,
        "optimizer": optimizer(loss.parameters(), lr=1e-2),
        "total_frames": batches * FRAMES,
        "frame_skip": 1,
        "optim_steps_per_batch": None if case.replay else 1,
        "logger": logger,
        "log_interval": 0,
        "progress_bar": False,
        "save_trainer_file": file,
        "checkpoint": checkpoint,
        "clip_norm": 1.0,
        **options,
    }
    if case.trainer is not Trainer:
        # a composite policy writes no entry "action" whose norm could be logged
        return case.trainer(
            **shared,
            replay_buffer=buffer if case.replay else None,
            add_gae=case.gae,
            log_actions=False,
        )
    trainer = Trainer(**shared, optimization_stepper=DefaultOptimizationStepper(), num_epochs=2)
    gae = GAE(gamma=0.99, lmbda=0.95, value_network=loss.critic_network)
    ValueEstimatorHook(gae).register(trainer)
    replay = ReplayBufferTrainer(buffer, flatten_tensordicts=True, iterate=True)
    trainer.register_op("pre_epoch", replay.extend)
    trainer.register_op("process_optim_batch", replay.sample)
    trainer.register_module("replay_buffer", replay)
    UpdateWeights(collector, 1).register(trainer)
    return trainer


class Record:
    """What a trainer averaged over every batch's optimisation steps."""

    def __init__(self, trainer: Trainer) -> None:
        self.rows: list[dict[str, torch.Tensor]] = []
        trainer.register_op("post_optim_complete_log", self)

    def __call__(self, optim_steps: int, average_losses: TensorDictBase) -> None:
        self.rows.append(dict(average_losses.items()))


def weights(loss: LossModule) -> dict[str, torch.Tensor]:
    """A copy of everything that the loss's state dict holds."""
    return {
        key: value.clone() for key, value in loss.state_dict().items() if hasattr(value, "clone")
    }
