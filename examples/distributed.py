"""Trains one policy on several processes: each steps its own environments, DDP averages gradients.

    torchrun --nproc-per-node 2 -m examples.distributed

On several machines, on each of them: ``torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d
--rdzv-endpoint HOST:29500 -m examples.distributed``. With plain ``python`` it is a single process.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torchrl.objectives.value import GAE

from composite_losses import ClipPPOLoss
from examples.steering import LENGTH, Steering, make_actor, make_critic

ITERATIONS, EPOCHS = 40, 4
LOSSES = ("loss_objective", "loss_entropy", "loss_critic")


def mean_over_ranks(value: torch.Tensor) -> float:
    """Returns the mean of a number that every rank has."""
    value = value.clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def train() -> tuple[float, float]:
    """Returns the reward per step at the start and at the end, over all ranks.

    Raises:
        SystemExit: the ranks do not hold the same weights in the end.
    """
    rank = dist.get_rank()
    torch.manual_seed(rank)  # other starts and actions on every rank; DDP copies rank 0's weights
    actor, critic = make_actor(), make_critic()
    # The loss calls the networks themselves, and its means are over the rows of all ranks.
    loss = ClipPPOLoss(actor, critic, entropy_coeff=1e-3, functional=False, sync_counts=True)
    wrapped = DistributedDataParallel(loss)
    estimator = GAE(gamma=0.95, lmbda=0.9, value_network=critic)
    optimiser = torch.optim.Adam(loss.parameters(), lr=1e-2)
    environment = Steering(8 + rank)  # ranks need not have the same number of rows
    rewards = []
    for _ in range(ITERATIONS):
        with torch.no_grad():
            data = estimator(environment.rollout(LENGTH, actor))
        rewards.append(mean_over_ranks(data["next", "reward"].mean()))
        for _ in range(EPOCHS):
            out = wrapped(data)
            optimiser.zero_grad()
            torch.stack([out[name] for name in LOSSES]).sum().backward()
            optimiser.step()
    weights = torch.cat([p.detach().flatten() for p in loss.parameters()])
    if mean_over_ranks(weights.norm()) != weights.norm().item():
        raise SystemExit("the ranks have different weights")
    return rewards[0], sum(rewards[-5:]) / 5


def main() -> None:
    """Trains; the first rank prints the result."""
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": 29500}.items():
        os.environ.setdefault(name, str(value))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")  # "nccl" and a device per LOCAL_RANK for networks on GPUs
    before, after = train()
    if dist.get_rank() == 0:
        ranks = dist.get_world_size()
        sys.stdout.write(
            f"{ranks} rank(s): reward per step {before:.3f} before, {after:.3f} after\n"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
