"""BenchMARL's MAPPO and IPPO train to the same weights with ``ClipPPOLoss`` of either library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torchrl.objectives
from benchmarl.environments import VmasTask

import composite_losses as cl
from tests.benchmarl.experiments import (
    CONFIGS,
    ITERATIONS,
    Loss,
    configured,
    distance,
    experiment,
    random_state_kept,
    weights,
)

# A twelfth of what the weights move by. Rounding leaves 1e-7.
SAME = 1e-3
MOVED = 1e-2

# what differs from BenchMARL's defaults: of the algorithm, and of the experiment
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "normal": ({"use_tanh_normal": False, "entropy_coef": 0.01}, {}),
    "tanh": ({}, {}),
    "discrete": ({"entropy_coef": 0.01}, {"continuous": False}),
    "navigation": ({"use_tanh_normal": False}, {"task": VmasTask.NAVIGATION}),
    "unshared": (
        {"use_tanh_normal": False, "loss_critic_type": "smooth_l1"},
        {"share_policy_params": False},
    ),
    "two groups": ({}, {"task": VmasTask.SIMPLE_TAG, "continuous": False}),
    "recurrent": ({}, {"continuous": False, "network": "gru"}),
}


def trained(
    name: str, case: str, loss: Loss, folder: Path, monkeypatch: pytest.MonkeyPatch, **more: Any
) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """Weights before and after training with the loss put in place of TorchRL's, and the record."""
    config, module = CONFIGS[name]
    options, setting = CASES[case]
    monkeypatch.setattr(module, "ClipPPOLoss", loss)
    run, record = experiment(folder, configured(config, **{**options, **more}), **setting)
    start = weights(run)
    run.run()
    return start, weights(run), record


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_weights_as_with_torchrl(
    name: str, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One seed, three iterations of collecting and training: the weights agree."""
    theirs = torchrl.objectives.ClipPPOLoss
    if case == "tanh":
        theirs = random_state_kept(theirs)
    start, expected, _ = trained(name, case, theirs, tmp_path, monkeypatch)
    same_start, found, record = trained(name, case, cl.ClipPPOLoss, tmp_path, monkeypatch)
    assert distance(start, same_start) == 0
    assert distance(start, expected) > MOVED
    assert distance(expected, found) < SAME
    assert len(record.reported) % ITERATIONS == 0
    for reported in record.reported:
        assert all(value.isfinite().all() for value in reported.values())


@pytest.mark.parametrize("name", CONFIGS)
def test_another_objective_gives_other_weights(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is put in place is what trains: without clipping the weights end elsewhere."""
    _, expected, _ = trained(name, "normal", cl.ClipPPOLoss, tmp_path, monkeypatch)
    _, found, _ = trained(name, "normal", cl.ClipPPOLoss, tmp_path, monkeypatch, clip_epsilon=1e-4)
    assert distance(expected, found) > SAME


def test_the_entropy_of_a_tanh_normal_draws_no_random_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BenchMARL's default distribution: the loss leaves what is collected next alone."""
    _, expected, _ = trained(
        "mappo", "tanh", random_state_kept(cl.ClipPPOLoss), tmp_path, monkeypatch
    )
    _, found, _ = trained("mappo", "tanh", cl.ClipPPOLoss, tmp_path, monkeypatch)
    assert distance(expected, found) == 0
