"""One training run: collect an episode of every environment, estimate advantages, update."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import set_composite_lp_aggregate
from torchrl.envs.libs.vmas import VmasEnv
from torchrl.objectives import LossModule
from torchrl.objectives.value import MultiAgentGAE
from tqdm import tqdm

from composite_losses.demo.methods import MakeLoss
from composite_losses.demo.policy import make_actor, make_critic, make_policy
from composite_losses.demo.settings import ESTIMATES, REWARD, Settings

LOSSES = ("loss_objective", "loss_entropy", "loss_critic")
METRICS = ("kl_approx", "clip_fraction")


@dataclass
class History:
    """What a run leaves behind.

    Args:
        returns: undiscounted return per episode, mean over environments; one per iteration.
        losses: one row of :data:`LOSSES` per update; one list of rows per iteration.
        update_seconds: loss forward, backward and optimiser step; one per update.
        seconds: wall-clock time of the whole run.
    """

    returns: list[float] = field(default_factory=list)
    losses: list[list[list[float]]] = field(default_factory=list)
    update_seconds: list[float] = field(default_factory=list)
    seconds: float = 0.0


def now(device: str) -> float:
    """Seconds on a clock that waits for the work queued on the device."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def make_env(seed: int, settings: Settings) -> VmasEnv:
    """The task: each of two agents moves on two axes and tells the other which landmark to go to.

    Both get the same reward, minus the two distances to the landmarks. Only the other agent knows
    an agent's landmark; it is drawn anew for every episode.
    """
    return VmasEnv(
        scenario="simple_reference",
        num_envs=settings.envs,
        continuous_actions=False,
        multidiscrete_actions=True,
        device=settings.device,
        seed=seed,
    )


def minibatches(data: TensorDictBase, settings: Settings) -> Iterator[TensorDictBase]:
    """Yields the rows of the data in random order, in equal parts, once per epoch."""
    n_rows = data.shape[0]
    for _ in range(settings.epochs):
        # Drawn on the CPU, so that every device sees the same order.
        order = torch.randperm(n_rows).to(settings.device)
        for rows in order.tensor_split(settings.minibatches):
            yield data[rows]


def update(
    loss: LossModule, optimiser: torch.optim.Optimizer, batch: TensorDictBase
) -> TensorDictBase:
    """One gradient step on one minibatch; returns the loss's output."""
    output = loss(batch)
    total = torch.stack([output[name] for name in LOSSES]).sum()
    optimiser.zero_grad()
    total.backward()
    optimiser.step()
    return output.detach()


@set_composite_lp_aggregate(False)  # TorchRL's loss reads one log-prob per head only like this
def train(label: str, make_loss: MakeLoss, seed: int, settings: Settings) -> History:
    """Trains new networks on new environments.

    All that is random follows from the seed: two methods meet the same environments, initial
    weights and order of minibatches, and draw the same actions as long as their weights agree.

    Args:
        label: shown at the progress bar.
        make_loss: builds the loss under test.
        seed: of this run.
        settings: everything else.
    """
    start = now(settings.device)
    env = make_env(seed, settings)
    torch.manual_seed(seed)
    actor, critic = make_actor(settings), make_critic(settings)
    policy = make_policy(actor)
    estimator = MultiAgentGAE(
        gamma=settings.gamma, lmbda=settings.lmbda, value_network=critic, device=settings.device
    )
    estimator.set_keys(reward=REWARD, **ESTIMATES)
    loss = make_loss(actor, critic, settings)
    optimiser = torch.optim.Adam(loss.parameters(), lr=settings.learning_rate)

    history = History()
    with tqdm(range(settings.iterations), desc=f"{label:26}", unit="it") as bar:
        for _ in bar:
            with torch.no_grad():
                data = env.rollout(settings.steps, policy, break_when_any_done=False)
                data["next", REWARD] = data["next", REWARD].to(settings.dtype)
                estimator(data)
            history.returns.append(episode_return(data))
            outputs = []
            for batch in minibatches(data.exclude("next").reshape(-1), settings):
                before = now(settings.device)
                outputs.append(update(loss, optimiser, batch))
                history.update_seconds.append(now(settings.device) - before)
            history.losses.append(rows(outputs, LOSSES))
            kl, clipped = torch.tensor(rows(outputs, METRICS)).mean(0).tolist()
            bar.set_postfix_str(
                f"return {history.returns[-1]:.1f}, KL {kl:.4f}, clipped {clipped:.0%}"
            )
    history.seconds = now(settings.device) - start
    return history


def episode_return(data: TensorDictBase) -> float:
    """Sum over time of the agents' mean reward, averaged over environments."""
    reward = data["next", REWARD]  # [envs, steps, A, 1]
    return reward.mean(-2).sum(1).mean().item()


def rows(outputs: list[TensorDictBase], names: tuple[str, ...]) -> list[list[float]]:
    """The named entries of every output, one row each."""
    stacked: TensorDict = torch.stack(outputs)
    return torch.stack([stacked[name] for name in names], dim=-1).tolist()
