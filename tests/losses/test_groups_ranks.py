"""A group that one rank's data lack: it takes part in what the other ranks wait for."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import composite_losses as cl
from tests.cases import builders_groups as bg
from tests.cases.builders_groups import TWO, make_data, total

# every loss, and every option that adds an output or a reduction
MEMBERS: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo": ("PPOLoss", {}),
    "clip": ("ClipPPOLoss", {"clip_value": 0.2}),
    "penalty": ("KLPENPPOLoss", {}),
    "a2c": ("A2CLoss", {}),
    "reinforce": ("ReinforceLoss", {}),
    "mappo": ("MAPPOLoss", {}),
    "ippo": ("IPPOLoss", {"clip_value": True}),
    "no entropy": ("PPOLoss", {"entropy_bonus": False}),
    "no metrics": ("PPOLoss", {"metrics": False}),
    "no normaliser": ("MAPPOLoss", {"normalize_advantage": False}),
    "all agents at once": ("PPOLoss", {"normalize_advantage": True}),
    "sum": ("PPOLoss", {"reduction": "sum"}),
}


@pytest.fixture
def reduced() -> Iterator[list[tuple[torch.dtype, torch.Size]]]:
    """What is reduced over a group of one rank: dtype and shape of each tensor."""
    seen: list[tuple[torch.dtype, torch.Size]] = []
    original = dist.all_reduce

    def counting(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append((tensor.dtype, tensor.shape))
        return original(tensor, *args, **kwargs)

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        patch.setattr(dist, "all_reduce", counting)
        yield seen


def loss_of(make: str, options: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Two groups; only the prey's loss, which is tested, counts over ranks."""
    actor, critic = bg.networks("prey", TWO["prey"])
    critic = None if make == "ReinforceLoss" else critic.to(dtype)
    prey = getattr(cl, make)(actor.to(dtype), critic, sync_counts=True, **options)
    return cl.GroupLoss({"hunter": bg.member("hunter", TWO["hunter"]), "prey": prey},
                        missing="skip")  # fmt: skip


@pytest.mark.parametrize("name", MEMBERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_absent_or_not_the_same_is_reduced(reduced: Any, dtype: Any, name: str) -> None:
    """Case 127: else the ranks add each other's unlike numbers, or wait for ever."""
    make, options = MEMBERS[name]
    loss, td = loss_of(make, options, dtype), make_data(TWO)
    if dtype == torch.float64:
        td["prey"] = td["prey"].to(dtype)
    else:
        td["prey", "observation"] = td["prey", "observation"].to(dtype)
    names = list(loss(td).keys())
    losses = [key for key in names if key.startswith("prey/loss")]
    present = list(reduced)
    assert len(present) >= (0 if name == "sum" else len(losses))
    reduced.clear()
    out = loss(td.exclude("prey", ("next", "prey")))
    assert reduced == present
    assert list(out.keys()) == loss.out_keys
    for key, value in out.items():
        if key.startswith("prey/"):
            assert value == 0 if key in losses else value.isnan(), key


@pytest.mark.parametrize("name", ["clip", "penalty", "sum"])
@pytest.mark.parametrize("functional", [True, False])
def test_gradients_of_an_absent_group(functional: bool, name: str) -> None:
    """0 for every parameter that trains, from each of its losses, even where one is NaN."""
    make, options = MEMBERS[name]
    loss = loss_of(make, {**options, "functional": functional})
    member, less = loss.losses["prey"], make_data(TWO).exclude("prey", ("next", "prey"))
    params = list(member.parameters())
    with torch.no_grad():
        params[0].fill_(math.nan)
        params[-1].fill_(math.inf)
    params[1].requires_grad_(False)
    out = loss(less)
    for key in ("loss_objective", "loss_critic"):
        assert out[f"prey/{key}"] == 0
        trained = [p for p in params if p.requires_grad]
        grads = torch.autograd.grad(out[f"prey/{key}"], trained, retain_graph=True)
        assert all(torch.equal(g, torch.zeros_like(p)) for g, p in zip(grads, trained, strict=True))
    assert params[1].grad is None
    total(out).backward()
    assert all(p.grad.isfinite().all() for p in loss.losses["hunter"].parameters())


def test_frozen_absent_group() -> None:
    """A group without a parameter that trains still gives losses that go backward."""
    loss = loss_of(*MEMBERS["ppo"])
    nn.Module.requires_grad_(loss.losses["prey"], False)
    out = loss(make_data(TWO).exclude("prey", ("next", "prey")))
    total(out).backward()
    assert out["prey/loss_objective"] == 0
