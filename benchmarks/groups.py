"""Groups of agents: ``GroupLoss`` and one backward against a loss and a backward per group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torchrl.objectives
from tensordict import TensorDict
from torch import Tensor, nn

import composite_losses as cl
from benchmarks.case import Case, Provider, Settings
from benchmarks.losses import PPO_LOSSES, total
from benchmarks.problems import THREE_HEADS, Layout, Problem, make_problem

AGENTS = 3
OPTIONS = {"clip_epsilon": 0.2, "entropy_coeff": 0.01}
KEYS = ("advantage", "value_target", "reward", "done", "terminated")


class OneByOne:
    """Losses of several groups, called one after the other."""

    def __init__(self, losses: dict[str, nn.Module]) -> None:
        self.losses = losses

    def __call__(self, data: TensorDict) -> dict[str, Any]:
        """The outputs of every group."""
        return {name: loss(data) for name, loss in self.losses.items()}


def member(cls: Callable[..., Any], problem: Problem) -> Any:
    """A multi-agent loss of one group, its keys set by hand."""
    loss = cls(problem.actor, problem.critic, **OPTIONS)
    keys = {name: problem.layout.key(name) for name in KEYS}
    loss.set_keys(value=problem.layout.key("state_value"), **keys)
    return loss


def group_case(n: int, batch: int, device: torch.device) -> Case:
    """The case of so many groups of three agents with three heads each."""
    problems = {
        f"group{i}": make_problem(THREE_HEADS, Layout((batch, AGENTS), group=f"group{i}"), device)
        for i in range(n)
    }
    data = TensorDict({}, [batch], device=device)
    for name, problem in problems.items():
        data[name] = problem.data[name]
    parameters = [p for problem in problems.values() for p in problem.parameters]

    def provider(
        name: str,
        call: Callable[..., Any],
        outputs: Callable[[Any], dict[str, Tensor]],
        backward: Callable[[Any], None],
    ) -> Provider:
        grads: Callable[[], Sequence[Tensor | None]] = lambda: [p.grad for p in parameters]  # noqa: E731
        return Provider(name, call, (data,), outputs, backward, parameters, grads)

    def summed(out: dict[str, Any]) -> dict[str, Tensor]:
        return {key: sum(each[key] for each in out.values()) for key in PPO_LOSSES}

    def one_by_one(out: dict[str, Any]) -> None:
        for each in out.values():
            total(each, PPO_LOSSES).backward()

    theirs = {k: member(torchrl.objectives.multiagent.MAPPOLoss, p) for k, p in problems.items()}
    ours = {k: member(cl.MAPPOLoss, p) for k, p in problems.items()}
    together = cl.GroupLoss(
        {k: cl.MAPPOLoss(p.actor, p.critic, **OPTIONS) for k, p in problems.items()}
    )
    providers = [
        provider("torchrl, one by one", OneByOne(theirs), summed, one_by_one),
        provider("ours, one by one", OneByOne(ours), summed, one_by_one),
        provider(
            "ours",
            together,
            lambda out: {key: out[key] for key in PPO_LOSSES},
            lambda out: total(out, PPO_LOSSES).backward(),
        ),
    ]
    title = f"MAPPO, three heads, {AGENTS} agents, B={batch}"
    return Case(title, providers, "groups", n)


def cases(settings: Settings) -> Iterator[Case]:
    """All cases, one at a time."""
    for n in (1, 2, 4, 8):
        yield group_case(n, 256, settings.device)
