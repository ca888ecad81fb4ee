"""Groups of agents that learn together: every group its own networks and loss, one ``GroupLoss``.

Run it with ``python -m composite_losses.demo.groups``; ``--help`` lists the options.
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from tensordict import TensorDictBase
from tensordict.nn import (
    CompositeDistribution,
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import Tensor, nn
from torch.distributions import Categorical
from torchrl.envs import EnvBase, SerialEnv
from torchrl.envs.libs.pettingzoo import PettingZooWrapper
from torchrl.envs.libs.vmas import VmasEnv
from tqdm import tqdm

from composite_losses import GroupLoss, IPPOLoss, MAPPOLoss, MultiAgentMLP, StackHeads
from composite_losses.demo.settings import Settings
from composite_losses.demo.training import minibatches, now, update

HEADS = ("move_x", "move_y", "say")
"""Names of the choices of a multi-discrete action."""
RUNNER = slice(12, 14)
"""Where a hunter of ``simple_tag`` observes the runner, relative to itself."""


@dataclass(frozen=True)
class Task:
    """An environment, and what a run on it depends on.

    Args:
        make_env: builds it for a seed.
        settings: of the run.
        shaping: changes the rewards that are learned from; returns are the environment's.
        rounds: of evaluation before and after the training, one episode of every environment each.
    """

    make_env: Callable[[int, Settings], EnvBase]
    settings: Settings
    shaping: Callable[[TensorDictBase], None] = lambda data: None
    rounds: int = 3


@dataclass
class GroupHistory:
    """What a run leaves behind.

    Args:
        returns: group → undiscounted return per episode and agent; one per iteration.
        random: group → the same of random actions, on episodes of their own.
        learned: group → the same of the policies after training, on as many episodes.
        seconds: wall-clock time of the training.
    """

    returns: dict[str, list[float]] = field(default_factory=dict)
    random: dict[str, float] = field(default_factory=dict)
    learned: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0


# --- environments --------------------------------------------------------------------------------


def vmas_tag(seed: int, settings: Settings) -> EnvBase:
    """VMAS: three hunters and a runner; rewards by group, ends at the root."""
    return VmasEnv("simple_tag", num_envs=settings.envs, continuous_actions=False, seed=seed)


def vmas_talk(seed: int, settings: Settings) -> EnvBase:
    """VMAS: a leader that moves and speaks, three that move and hear it, and two that flee."""
    return VmasEnv(
        "simple_world_comm",
        num_envs=settings.envs,
        continuous_actions=False,
        multidiscrete_actions=True,
        seed=seed,
    )


class InTurn(SerialEnv):
    """A ``SerialEnv`` whose end leaves PyTorch's number of threads as it was.

    TorchRL raises it by one per environment, also when the object is collected as garbage; the
    small networks of the next run are then many times slower on a machine with other work.
    """

    def close(self, **options: bool) -> None:
        """Closes the environments."""
        threads = torch.get_num_threads()
        super().close(**options)
        torch.set_num_threads(threads)


def pettingzoo_tag(seed: int, settings: Settings) -> EnvBase:
    """PettingZoo's MPE: the same game; rewards and ends by group.

    The environments are stepped one after the other, but the policy acts once for all of them.
    A step of one takes a millisecond or two, so there are no buffers, nor the wrappers that check
    the agents' order.
    """
    from mpe2 import simple_tag_v3

    def one() -> EnvBase:
        game = simple_tag_v3.parallel_env(max_cycles=settings.steps)
        game.aec_env = game.aec_env.unwrapped
        return PettingZooWrapper(
            game,
            categorical_actions=True,
            use_mask=False,
            done_on_any=False,
        )

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "PettingZoo in TorchRL is tested", UserWarning)
        env = InTurn(settings.envs, one, use_buffers=False)
        env.set_seed(seed)
        env.group_map = env.group_map[0]  # of a SerialEnv: one per environment, all equal
    return env


def approach(data: TensorDictBase) -> None:
    """Adds to a hunter's reward a hundred times by how much it has come closer to the runner.

    A catch is rare and pays all hunters ten, whoever it was: in the few thousand steps of a run
    that is mostly noise to each of them. A hunter comes closer by at most 0.23 a step, so what is
    added outweighs the catches: mostly it is chasing that is learned. Its return is catches only.

    Potential-based shaping (Ng et al. 1999) would discount the distance after the step; this does
    not, so it may change which policy is best.
    """
    here, after = (td["adversary", "observation"][..., RUNNER] for td in (data, data["next"]))
    closer = here.norm(dim=-1, keepdim=True) - after.norm(dim=-1, keepdim=True)
    data["next", "adversary", "reward"] = data["next", "adversary", "reward"] + 100 * closer


FAST = Settings(learning_rate=3e-3, gamma=0.8, epochs=10, minibatches=2)
TASKS: dict[str, Task] = {
    "vmas_tag": Task(vmas_tag, replace(FAST, iterations=15, envs=60), approach),
    "vmas_talk": Task(vmas_talk, replace(FAST, iterations=15, envs=60)),
    "pettingzoo_tag": Task(
        pettingzoo_tag, replace(FAST, iterations=12, envs=16), approach, rounds=8
    ),
}


# --- networks and loss ---------------------------------------------------------------------------


class Split(nn.Module):
    """Cuts one network output into the logits of every head."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.sizes = sizes

    def forward(self, logits: Tensor) -> tuple[Tensor, ...]:
        """Returns one tensor ``[..., choices]`` per head."""
        return torch.split(logits, self.sizes, dim=-1)


def choices(env: EnvBase, group: str) -> list[int]:
    """Numbers of choices of one agent's action: one, or several of a multi-discrete action."""
    spec = env.full_action_spec_unbatched[group, "action"]
    return spec.nvec[0].tolist() if hasattr(spec, "nvec") else [spec.space.n]


def network(
    env: EnvBase, group: str, n_outputs: int, settings: Settings, *, critic: bool
) -> MultiAgentMLP:
    """A network ``[*B, A, observations] -> [*B, A, n_outputs]``, each agent with its own weights.

    A critic sees the observations of the whole group, and its weights are shared.
    """
    return MultiAgentMLP(
        n_agent_inputs=env.full_observation_spec_unbatched[group, "observation"].shape[-1],
        n_agent_outputs=n_outputs,
        n_agents=len(env.group_map[group]),
        centralized=critic,
        share_params=critic,
        depth=2,
        num_cells=settings.cells,
        activation_class=nn.Tanh,
        device=settings.device,
    )


def make_actor(env: EnvBase, group: str, settings: Settings) -> ProbabilisticTensorDictSequential:
    """The group's actor: one Categorical, or one per choice of a multi-discrete action."""
    sizes = choices(env, group)
    net = network(env, group, sum(sizes), settings, critic=False)
    first = TensorDictModule(net, [(group, "observation")], [(group, "logits")])
    options = {"default_interaction_type": InteractionType.RANDOM, "return_log_prob": True}
    if len(sizes) == 1:
        dist = ProbabilisticTensorDictModule(
            {"logits": (group, "logits")},
            [(group, "action")],
            distribution_class=Categorical,
            log_prob_key=(group, "action_log_prob"),
            **options,
        )
        return ProbabilisticTensorDictSequential(first, dist)
    heads = HEADS[: len(sizes)]
    params = [(group, "params", head, "logits") for head in heads]
    dist = ProbabilisticTensorDictModule(
        [(group, "params")],
        [(group, head) for head in heads],
        distribution_class=CompositeDistribution,
        distribution_kwargs={
            "distribution_map": dict.fromkeys(heads, Categorical),
            "name_map": {head: (group, head) for head in heads},
        },
        **options,
    )
    split = TensorDictModule(Split(sizes), [(group, "logits")], params)
    return ProbabilisticTensorDictSequential(first, split, dist)


def make_policy(
    env: EnvBase, actors: dict[str, ProbabilisticTensorDictSequential]
) -> TensorDictSequential:
    """All actors, the heads of multi-discrete actions stacked for the environment."""
    steps: list[nn.Module] = []
    for group, actor in actors.items():
        steps.append(actor)
        heads = HEADS[: len(choices(env, group))]
        if len(heads) > 1:
            steps.append(StackHeads([(group, head) for head in heads], (group, "action")))
    return TensorDictSequential(*steps)


def make_loss(
    env: EnvBase, actors: dict[str, ProbabilisticTensorDictSequential], settings: Settings
) -> GroupLoss:
    """MAPPO with a central critic for the groups of several agents, IPPO for the others."""

    def member(group: str) -> MAPPOLoss | IPPOLoss:
        net = network(env, group, 1, settings, critic=True)
        critic = TensorDictModule(net, [(group, "observation")], [(group, "state_value")])
        loss_class = MAPPOLoss if len(env.group_map[group]) > 1 else IPPOLoss
        return loss_class(
            actors[group],
            critic,
            clip_epsilon=settings.clip_epsilon,
            entropy_coeff=settings.entropy_coeff,
        )

    loss = GroupLoss.from_group_map(env.group_map, member)
    loss.make_value_estimator(gamma=settings.gamma, lmbda=settings.lmbda)
    return loss


# --- training ------------------------------------------------------------------------------------


def collect(env: EnvBase, settings: Settings, policy: nn.Module | None) -> TensorDictBase:
    """One episode of every environment; of random actions without a policy."""
    with torch.no_grad():
        return env.rollout(settings.steps, policy, break_when_any_done=False)


def group_returns(data: TensorDictBase, env: EnvBase) -> dict[str, float]:
    """Group → the environment's own return per episode and agent."""
    return {
        group: data["next", group, "reward"].sum(1).mean().item()  # over time; all else
        for group in env.group_map
    }


def evaluate(
    env: EnvBase, settings: Settings, policy: nn.Module | None, rounds: int
) -> dict[str, float]:
    """Group → return per episode and agent, mean over fresh episodes that nothing learns from."""
    found = [group_returns(collect(env, settings, policy), env) for _ in range(rounds)]
    return {group: statistics.fmean(each[group] for each in found) for group in env.group_map}


def train(label: str, task: Task, seed: int) -> GroupHistory:
    """Trains new networks of all groups on a new environment; all that is random has the seed.

    Args:
        label: shown at the progress bar.
        task: the environment and its settings.
        seed: of this run.
    """
    settings = task.settings
    env = task.make_env(seed, settings)
    torch.manual_seed(seed)
    history = GroupHistory(random=evaluate(env, settings, None, task.rounds))
    start = now(settings.device)
    actors = {group: make_actor(env, group, settings) for group in env.group_map}
    policy, loss = make_policy(env, actors), make_loss(env, actors, settings)
    optimiser = torch.optim.Adam(loss.parameters(), lr=settings.learning_rate)
    history.returns = {group: [] for group in env.group_map}
    with tqdm(range(settings.iterations), desc=f"{label:26}", unit="it") as bar:
        for _ in bar:
            data = collect(env, settings, policy)
            for group, value in group_returns(data, env).items():
                history.returns[group].append(value)
            task.shaping(data)
            loss.value_estimator(data)
            for batch in minibatches(data.exclude("next").reshape(-1), settings):
                update(loss, optimiser, batch)
            shown = ", ".join(f"{g} {values[-1]:.1f}" for g, values in history.returns.items())
            bar.set_postfix_str(shown)
    history.seconds = now(settings.device) - start
    history.learned = evaluate(env, settings, policy, task.rounds)
    return history


@dataclass(frozen=True)
class Gain:
    """How much more a group's return is than that of random actions, over seeds.

    Args:
        learned: mean return after training.
        random: mean return of random actions.
        error: standard error of their difference.
    """

    learned: float
    random: float
    error: float

    @property
    def errors(self) -> float:
        """The gain in standard errors."""
        return (self.learned - self.random) / max(self.error, 1e-12)


def gain(runs: Sequence[GroupHistory], group: str) -> Gain:
    """The gain of a group over at least two runs of different seeds."""
    learned = [run.learned[group] for run in runs]
    random = [run.random[group] for run in runs]
    variance = (statistics.variance(learned) + statistics.variance(random)) / len(runs)
    return Gain(statistics.fmean(learned), statistics.fmean(random), variance**0.5)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the tasks and prints what every group has learned."""
    parser = argparse.ArgumentParser(
        prog="python -m composite_losses.demo.groups",
        description="Trains groups of agents with one GroupLoss and prints their returns.",
    )
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=f"of {', '.join(TASKS)}")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="SEED")
    parser.add_argument("--iterations", type=int, help="default: the task's")
    parser.add_argument("--envs", type=int, help="episodes of an iteration, default: the task's")
    options = parser.parse_args(arguments)
    unknown = set(options.tasks) - set(TASKS)
    if unknown:
        parser.error(f"unknown task {', '.join(sorted(unknown))}; expected of {', '.join(TASKS)}")
    if len(options.seeds) < 2:
        parser.error("--seeds: a standard error needs two or more")
    torch.set_num_threads(1)
    given = {k: v for k in ("iterations", "envs") if (v := getattr(options, k)) is not None}
    for name in options.tasks or ["vmas_tag"]:
        task = replace(TASKS[name], settings=replace(TASKS[name].settings, **given))
        start = time.perf_counter()
        runs = [train(f"{name}, seed {seed}", task, seed) for seed in options.seeds]
        print(f"\n{'group':16}{'random':>10}{'learned':>10}{'gain / standard error':>24}")
        for group in runs[0].returns:
            found = gain(runs, group)
            print(f"{group:16}{found.random:10.2f}{found.learned:10.2f}{found.errors:24.1f}")
        print(f"{name}: {len(runs)} seeds, {time.perf_counter() - start:.0f} s\n")


if __name__ == "__main__":
    main()
