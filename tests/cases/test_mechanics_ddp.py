"""Two ranks under DDP: the gradients of the whole batch, whatever is missing on one of them."""

import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tensordict import TensorDict
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tests.cases.builders_fl import KL, PAIR, build, make_data, total_loss

pytestmark = pytest.mark.slow
RANKS, ROWS = 2, 4
LAYOUTS = {"B": ((RANKS * ROWS,), False), "BA": ((RANKS * ROWS, 2), True)}
LOSSES = [
    "PPOLoss", "ClipPPOLoss", "ClipPPOLoss-per_head", "ClipPPOLoss-leafwise", "ClipPPOLoss-mixed",
    "KLPENPPOLoss", "A2CLoss", "ReinforceLoss", "PolicyLoss", "ReinforceLoss-alone",
]  # fmt: skip


def all_true(shape: tuple[int, ...]) -> Tensor:
    return torch.ones(shape, dtype=torch.bool)


def lone(shape: tuple[int, ...]) -> Tensor:
    """Nothing counts on the second rank."""
    mask = all_true(shape)
    mask[ROWS:] = False
    return mask


def uneven(shape: tuple[int, ...]) -> Tensor:
    """One row counts on the first rank, three on the second."""
    mask = all_true(shape)
    mask[1:ROWS] = False
    mask[-1] = False
    return mask


# situation -> (rows that count, rows where "gear" acts)
SITUATIONS: dict[str, tuple[Callable[..., Tensor] | None, Callable[..., Tensor] | None]] = {
    "all": (None, None),
    "uneven": (uneven, None),
    "empty": (lone, None),
    "inactive": (None, lone),
    "uneven and inactive": (uneven, lone),
    "keywords": (lone, None),
    "sum": (uneven, None),
}


def problem(name: str, heads: Any, layout: str, situation: str) -> tuple[Any, TensorDict]:
    """The loss and the whole batch, the same in every process; no penalty coefficient adapts."""
    shape, group = LAYOUTS[layout]
    options = {"reduction": "sum"} if situation == "sum" else {}
    rows, acts = SITUATIONS[situation]
    loss = build(name, heads, group=group, functional=False, sync_counts=True, **options).eval()
    data = make_data(heads, shape, group=group, source="all" if name in KL else "stored")
    at = "agents" if group else None
    if rows is not None:
        data[(at, "counts") if at else "counts"] = rows(shape)
        loss.set_keys(agent_mask=(at, "counts") if at else "counts")
    if acts is not None and heads == PAIR:
        data[(at, "shifts") if at else "shifts"] = acts(shape)
        loss.set_keys(head_active={"gear": (at, "shifts") if at else "shifts"})
    return loss, data


def worker(rank: int, port: int, jobs: list[tuple[str, Any, str, str]], folder: str) -> None:
    """One rank: its half of every batch through DDP; rank 0 writes the gradients it ends with."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=60),
    )
    found = {}
    for job in jobs:
        loss, data = problem(*job)
        half = data[rank * ROWS : (rank + 1) * ROWS]
        keywords = job[-1] == "keywords"
        wrapped = DistributedDataParallel(loss, find_unused_parameters=keywords).eval()
        for _ in range(2):  # an error about unused parameters comes with the second call
            wrapped.zero_grad(set_to_none=True)
            if keywords:  # DDP looks for unused parameters in a tuple, not in a TensorDict
                given = {key: half.get(key, None) for key in loss.in_keys}
                given = {
                    key if isinstance(key, str) else "_".join(key): value
                    for key, value in given.items()
                    if value is not None
                }
                out = dict(zip(loss.out_keys, wrapped(**given), strict=True))
            else:
                out = wrapped(half)
            total_loss(out).backward()
        found[named(job)] = [p.grad.clone() for p in loss.parameters()]
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


JOBS = [
    *((name, PAIR, "B", situation) for name in LOSSES for situation in SITUATIONS),
    *((name, PAIR, "BA", "uneven and inactive") for name in LOSSES),
    *((name, "normal", "B", "empty") for name in LOSSES),
    *((name, "normal", "BA", "uneven") for name in LOSSES),
]


def named(job: tuple[str, Any, str, str]) -> str:
    name, heads, layout, situation = job
    kind = heads if isinstance(heads, str) else "composite"
    return f"{name}-{kind}-{layout}-{situation.replace(' ', '_')}"


@pytest.fixture(scope="module")
def gradients(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[Tensor]]]:
    """Job → gradients, of each rank."""
    folder: Path = tmp_path_factory.mktemp("ddp")
    mp.spawn(worker, (free_port(), JOBS, str(folder)), nprocs=RANKS)
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


@pytest.mark.parametrize("job", JOBS, ids=named)
def test_gradients_of_the_whole_batch(job: Any, gradients: Any) -> None:
    """Case 127: two gloo ranks give the gradient of one process with all rows, to 1e-6.

    Also where no row counts on one rank, or a head acts nowhere on it: nothing is unused.
    """
    loss, data = problem(*job)
    total_loss(loss(data)).backward()
    first, second = (each[named(job)] for each in gradients)
    for (name, parameter), left, right in zip(loss.named_parameters(), first, second, strict=True):
        assert torch.equal(left, right), name
        torch.testing.assert_close(left, parameter.grad, rtol=1e-6, atol=1e-6)
    assert any(g.abs().max() > 1e-3 for g in first)
