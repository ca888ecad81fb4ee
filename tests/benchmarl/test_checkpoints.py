"""Checkpoints of losses under the older TensorDict, which puts metadata beside the weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchrl.objectives
from benchmarl.algorithms import MappoConfig, mappo
from torch import Tensor, nn

import composite_losses as cl
from tests.benchmarl.experiments import configured, experiment


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    """Returns BenchMARL's loss of that class, with other weights each time."""
    draw = torch.Generator()

    def make(kind: Any) -> Any:
        monkeypatch.setattr(mappo, "ClipPPOLoss", kind)
        run, _ = experiment(tmp_path, configured(MappoConfig))
        (loss,) = run.losses.values()
        with torch.no_grad():
            for weight in loss.parameters():
                weight.normal_(generator=draw)
        run.close()
        return loss

    return make


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.named_parameters(), other.named_parameters(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


@pytest.mark.parametrize("nested", [False, True], ids=["alone", "in a module"])
@pytest.mark.parametrize("kind", [torchrl.objectives.ClipPPOLoss, cl.ClipPPOLoss])
def test_strict_load(kind: Any, nested: bool, made: Callable[[Any], Any]) -> None:
    """Ours loads a checkpoint of either library, alone or inside another module."""
    first, second = made(kind), made(cl.ClipPPOLoss)
    assert not same_weights(first, second)
    if nested:
        nn.ModuleList([second]).load_state_dict(nn.ModuleList([first]).state_dict())
    else:
        second.load_state_dict(first.state_dict())
    assert same_weights(first, second)


def test_only_tensors(made: Callable[[Any], Any]) -> None:
    """A checkpoint of ours names tensors, and leaves what another module put there alone."""
    ours, theirs = made(cl.ClipPPOLoss), made(torchrl.objectives.ClipPPOLoss)
    assert all(isinstance(value, Tensor) for value in ours.state_dict().values())
    assert not {"__batch_size", "__device"} & {k.rpartition(".")[2] for k in ours.state_dict()}
    both = nn.ModuleList([theirs, ours])
    both.load_state_dict(both.state_dict())
    assert {k for k in both.state_dict() if k[0] == "0"} == {f"0.{k}" for k in theirs.state_dict()}
