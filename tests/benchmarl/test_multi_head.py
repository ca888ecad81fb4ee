"""Several heads in BenchMARL: how far it goes by itself, and what an algorithm of ours adds.

VMAS ``simple_reference``: each agent moves on two axes, 3 choices each, and says one of 10 words.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torchrl.objectives
from benchmarl.algorithms import ippo, mappo
from benchmarl.algorithms.common import Algorithm
from benchmarl.environments import VmasTask
from torchrl.data import Categorical, Composite, MultiCategorical
from torchrl.envs.utils import ExplorationType, set_exploration_type

import composite_losses as cl
from tests.benchmarl.experiments import (
    CONFIGS,
    configured,
    distance,
    experiment,
    weights,
)
from tests.benchmarl.multi_head import MultiHeadIppoConfig, MultiHeadMappoConfig

MULTI_DISCRETE = {"multidiscrete_actions": True}
GROUP, HEADS = "agents", ["head_0", "head_1", "head_2"]
OURS = {"mappo": (MultiHeadMappoConfig, mappo), "ippo": (MultiHeadIppoConfig, ippo)}
BY_HEAD = {"head_0": 0.0, "head_1": 0.01, "head_2": 0.05}


def prepared(folder: Path, algorithm: Any, **options: Any) -> Any:
    return experiment(
        folder, algorithm, task=VmasTask.SIMPLE_REFERENCE, continuous=False, **options
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_benchmarl_alone_flattens(name: str, tmp_path: Path) -> None:
    """Its discrete actions are one Categorical over all 3 · 3 · 10 = 90 combinations."""
    run, _ = prepared(tmp_path, configured(CONFIGS[name][0]))
    spec = run.action_spec[GROUP, "action"]
    assert isinstance(spec, Categorical) and not isinstance(spec, MultiCategorical)
    assert spec.space.n == 90


@pytest.mark.parametrize("name", CONFIGS)
def test_benchmarl_alone_knows_no_multi_discrete_action(name: str, tmp_path: Path) -> None:
    """It passes the check of the specs and fails where the policy is built."""
    with pytest.raises(AttributeError, match="'BoxList' object has no attribute 'n'"):
        prepared(tmp_path, configured(CONFIGS[name][0]), task_options=MULTI_DISCRETE)


def test_benchmarl_refuses_two_action_keys() -> None:
    """Whatever the algorithm: one entry per group, and it is called "action"."""
    spec = Composite({GROUP: {"move": Categorical(3), "say": Categorical(10)}})
    algorithm = type("Any", (), {"state_spec": None, "group_map": {GROUP: []}})()
    algorithm.action_spec = spec
    with pytest.raises(ValueError, match="Action spec must contain one entry per group"):
        Algorithm._check_specs(algorithm)


@pytest.mark.parametrize("ratio", ["joint", "per_head"])
@pytest.mark.parametrize("name", OURS)
def test_several_heads_train(
    name: str, ratio: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stored log-probs by head, ratio 1 on fresh data, entropy coefficients by head."""
    config, module = OURS[name]
    monkeypatch.setattr(module, "ClipPPOLoss", partial(cl.ClipPPOLoss, ratio=ratio))
    algorithm = configured(config, entropy_coef=BY_HEAD)
    run, record = prepared(tmp_path, algorithm, task_options=MULTI_DISCRETE)
    loss, start = run.losses[GROUP], weights(run)
    with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
        fresh = run.test_env.rollout(5, run.policy)
    assert cl.diagnose(loss, run.algorithm.process_batch(GROUP, fresh)).reasons == []
    run.run()
    assert distance(start, weights(run)) > 1e-3
    batch = record.minibatches[0]
    assert batch[GROUP, "action"].shape[-1] == len(HEADS)
    assert loss.log_prob_source(batch) == dict.fromkeys(HEADS, "stored")
    # the first step of each iteration sees fresh data
    for reported in record.reported:
        for head in HEADS:
            assert reported[f"kl_approx/{head}"][0].abs() < 1e-6
            assert reported[f"kl_approx/{head}"][1:].abs().max() > 0


@pytest.mark.parametrize("name", OURS)
def test_the_same_weights_as_with_torchrl_told_the_heads(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TorchRL's loss clips the joint ratio too, once its keys are lists of the heads'."""

    def theirs(**options: Any) -> Any:
        loss = torchrl.objectives.ClipPPOLoss(**options)
        set_keys = loss.set_keys

        def told(**keys: Any) -> None:
            keys["action"] = [(GROUP, head) for head in HEADS]
            keys["sample_log_prob"] = [(GROUP, f"{head}_log_prob") for head in HEADS]
            set_keys(**keys)

        loss.set_keys = told
        return loss

    config, module = OURS[name]
    ends = []
    for loss in (theirs, cl.ClipPPOLoss):
        monkeypatch.setattr(module, "ClipPPOLoss", loss)
        run, _ = prepared(tmp_path, configured(config), task_options=MULTI_DISCRETE)
        run.run()
        ends.append(weights(run))
    assert distance(*ends) < 1e-3
