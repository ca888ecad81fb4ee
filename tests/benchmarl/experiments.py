"""Tiny BenchMARL experiments on VMAS, and what they leave behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchmarl.algorithms import IppoConfig, MappoConfig, ippo, mappo
from benchmarl.environments import VmasTask
from benchmarl.experiment import Callback, Experiment, ExperimentConfig
from benchmarl.models import GruConfig, MlpConfig
from tensordict import TensorDictBase
from torch import Tensor

Loss = Callable[..., Any]
ENVS, STEPS, ITERATIONS = 4, 20, 3
EPISODE = 15  # ends inside what an iteration collects
LEARNING_RATE = 1e-3
CONFIGS: dict[str, tuple[type[Any], Any]] = {
    "mappo": (MappoConfig, mappo),
    "ippo": (IppoConfig, ippo),
}


class Record(Callback):
    """Keeps what an experiment collected, trained on and reported."""

    def __init__(self) -> None:
        super().__init__()
        self.collected: list[TensorDictBase] = []
        self.minibatches: list[TensorDictBase] = []
        self.reported: list[TensorDictBase] = []

    def on_batch_collected(self, batch: TensorDictBase) -> None:
        self.collected.append(batch.clone())

    def on_train_step(self, batch: TensorDictBase, group: str) -> None:
        self.minibatches.append(batch)

    def on_train_end(self, training_td: TensorDictBase, group: str) -> None:
        self.reported.append(training_td)


def tiny(**options: Any) -> ExperimentConfig:
    """A configuration of three iterations, with no evaluation and no logger."""
    config = ExperimentConfig.get_from_yaml()
    frames = ENVS * STEPS
    chosen = {
        "loggers": [],
        "create_json": False,
        "evaluation": False,
        "render": False,
        "max_n_iters": ITERATIONS,
        "max_n_frames": None,
        "lr": LEARNING_RATE,
        "on_policy_collected_frames_per_batch": frames,
        "on_policy_n_envs_per_worker": ENVS,
        "on_policy_minibatch_size": frames // 2,
        "on_policy_n_minibatch_iters": 2,
        **options,
    }
    for name, value in chosen.items():
        setattr(config, name, value)
    return config


def model(kind: str = "mlp") -> Any:
    """The configuration of a small network."""
    config = {"mlp": MlpConfig, "gru": GruConfig}[kind].get_from_yaml()
    if kind == "mlp":
        config.num_cells = [16, 16]
    else:
        config.hidden_size, config.mlp_num_cells = 16, [16]
    return config


def experiment(
    folder: Path,
    algorithm: Any,
    *,
    task: VmasTask = VmasTask.BALANCE,
    network: str = "mlp",
    continuous: bool = True,
    task_options: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Experiment, Record]:
    """An experiment that has not run yet, and what will record it."""
    chosen = task.get_from_yaml()
    chosen.config.update({"max_steps": EPISODE, **(task_options or {})})
    record = Record()
    found = Experiment(
        task=chosen,
        algorithm_config=algorithm,
        model_config=model(network),
        critic_model_config=model(network),
        seed=0,
        config=tiny(save_folder=str(folder), prefer_continuous_actions=continuous, **options),
        callbacks=[record],
    )
    return found, record


def configured(config: type[Any], **options: Any) -> Any:
    """An algorithm's configuration: BenchMARL's defaults and these options."""
    algorithm = config.get_from_yaml()
    for name, value in options.items():
        setattr(algorithm, name, value)
    return algorithm


def weights(run: Experiment) -> dict[str, Tensor]:
    """A copy of every weight of every group's actor and critic."""
    return {
        f"{group}.{name}": value.detach().clone()
        for group, loss in run.losses.items()
        for name, value in loss.named_parameters()
    }


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference between two sets of weights of the same names."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def random_state_kept(make: Loss) -> Loss:
    """The loss with the random state after a call as it was before.

    TorchRL estimates the entropy of a ``TanhNormal`` from a random sample even where its
    coefficient is 0, so what is collected next depends on the loss.
    """

    def made(**options: Any) -> Any:
        loss = make(**options)
        forward = loss.forward

        def kept(tensordict: TensorDictBase) -> TensorDictBase:
            with torch.random.fork_rng():
                return forward(tensordict)

        loss.forward = kept
        return loss

    return made
