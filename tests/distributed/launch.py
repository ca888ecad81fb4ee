"""Two gloo ranks on this machine: a function runs on each, and what they return comes back."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS = 2


def on_ranks(work: Callable[..., Any], folder: Path, *arguments: Any, seconds: int = 60) -> Any:
    """Returns ``work(rank, *arguments)`` of every rank, in order.

    Args:
        work: a function of a module; returns what ``torch.load`` takes: tensors, numbers, dicts.
        folder: where the ranks meet and leave their results.
        arguments: the same on all ranks.
        seconds: after which a rank gives up waiting for another.
    """
    mp.spawn(_rank, (work, str(folder), arguments, seconds), nprocs=RANKS)
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


def _rank(rank: int, work: Any, folder: str, arguments: tuple[Any, ...], seconds: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=seconds)
    )
    torch.save(work(rank, *arguments), f"{folder}/{rank}.pt")
    dist.destroy_process_group()
