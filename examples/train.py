"""Trains a composite policy from a Hydra configuration, with TorchRL's trainer.

    pip install hydra-core
    python -m examples.train
    python -m examples.train loss=native loss.surrogate.ratio=mixed 'loss.surrogate.eps=0.2'
    python -m examples.train loss=a2c trainer=a2c seed=1

The configuration is in ``examples/config``. The log (one CSV file per output of the loss) goes to
``build/examples``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import hydra
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import nn
from torchrl.envs import EnvBase
from torchrl.envs.utils import set_exploration_type
from torchrl.modules import ProbabilisticActor

log = logging.getLogger(__name__)


def as_keys(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys as TensorDict wants them: a nested one is a tuple, not a list."""
    return {
        name: tuple(key) if isinstance(key, Sequence) and not isinstance(key, str) else key
        for name, key in keys.items()
    }


def make_loss(config: DictConfig) -> tuple[nn.Module, ProbabilisticActor]:
    """Returns the configured loss and its actor, which shares the loss's weights."""
    actor, critic = instantiate(config.actor), instantiate(config.critic)
    loss = instantiate(config.loss, actor_network=actor, critic_network=critic)
    loss.set_keys(**as_keys(config["keys"]))
    return loss, actor


def mean_reward(environment: EnvBase, actor: ProbabilisticActor, steps: int = 64) -> float:
    """Returns the reward per step of the policy's most likely actions."""
    with torch.no_grad(), set_exploration_type("deterministic"):
        data = environment.rollout(steps, actor, break_when_any_done=False)
    return data["next", "reward"].mean().item()


def train(config: DictConfig) -> tuple[float, float]:
    """Returns the reward per step before and after training."""
    torch.manual_seed(config.seed)
    loss, actor = make_loss(config)
    environment = instantiate(config.environment)
    before = mean_reward(environment, actor)
    trainer = instantiate(config.trainer)(
        collector=instantiate(config.collector)(environment, actor),
        loss_module=loss,
        optimizer=instantiate(config.optimizer)(loss.parameters()),
        replay_buffer=instantiate(config.replay_buffer),
        logger=instantiate(config.logger),
    )
    trainer.train()
    return before, mean_reward(instantiate(config.environment), actor)


@hydra.main(version_base="1.3", config_path="config", config_name="train")
def main(config: DictConfig) -> None:
    """Trains and logs the result."""
    log.info("reward per step: %.3f before, %.3f after", *train(config))


if __name__ == "__main__":
    main()
