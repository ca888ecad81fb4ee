"""Losses: plain PyTorch, ours and TorchRL's on the same networks and data.

The metrics are each library's own: TorchRL's PPO logs the seven that the hand-written one computes;
ours adds ``kl_k3`` and, per head, ``entropy``, ``kl_approx`` and ``clip_fraction``. TorchRL's A2C
and REINFORCE of several heads log none, ours and the hand-written ones two. Where actor and critic
share a trunk, both libraries run it twice, the hand-written loss once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torchrl.objectives
from tensordict import TensorDict
from torch import Tensor

import composite_losses as cl
from benchmarks import handwritten
from benchmarks.case import Case, Provider, Settings
from benchmarks.problems import (
    ONE_TANH,
    THREE_HEADS,
    Head,
    Layout,
    Plain,
    Problem,
    categorical_heads,
    make_problem,
)

EPS, ENTROPY = 0.2, 0.01


class A2C(torchrl.objectives.A2CLoss):
    """TorchRL's, whose own ``in_keys`` raise a TypeError where there are several heads."""

    in_keys = property(lambda self: list(self.actor_network.in_keys))


Names = tuple[str, ...]
PPO_LOSSES: Names = ("loss_objective", "loss_entropy", "loss_critic")
# loss → (ours, TorchRL's, their options, names of the losses, hand-written)
LOSSES: dict[str, tuple[type, type, dict[str, Any], Names, Callable[[Plain], Any]]] = {
    "ClipPPO": (
        cl.ClipPPOLoss,
        torchrl.objectives.ClipPPOLoss,
        {"clip_epsilon": EPS, "entropy_coeff": ENTROPY},
        PPO_LOSSES,
        functools.partial(handwritten.ppo, eps=EPS, entropy_coeff=ENTROPY),
    ),
    "PPO": (
        cl.PPOLoss,
        torchrl.objectives.PPOLoss,
        {"entropy_coeff": ENTROPY},
        PPO_LOSSES,
        functools.partial(handwritten.ppo, eps=None, entropy_coeff=ENTROPY),
    ),
    "A2C": (
        cl.A2CLoss,
        A2C,
        {"entropy_bonus": False},
        ("loss_objective", "loss_critic"),
        functools.partial(handwritten.score, names=("loss_objective", "loss_critic")),
    ),
    "REINFORCE": (
        cl.ReinforceLoss,
        torchrl.objectives.ReinforceLoss,
        {},
        ("loss_actor", "loss_value"),
        functools.partial(handwritten.score, names=("loss_actor", "loss_value")),
    ),
}
NOTES = {"A2C": {"torchrl": "in_keys patched: it raises for several heads"}}


def total(out: Any, names: Names) -> Tensor:
    """The sum of the losses."""
    value = out[names[0]]
    for name in names[1:]:
        value = value + out[name]
    return value


def named(out: Any, without: Names) -> dict[str, Tensor]:
    """The outputs of one tensor each, flat."""
    return {k: v for k, v in out.items() if isinstance(v, Tensor) and k not in without}


def loss_case(
    title: str,
    kind: str,
    problem: Problem,
    *,
    variable: str = "",
    value: int = 0,
    sampled_entropy: bool = False,
) -> Case:
    """The case of one loss on one problem.

    Args:
        title: name of the case.
        kind: name of the loss.
        problem: networks and data.
        variable: what the series varies.
        value: its value.
        sampled_entropy: whether the entropy is an estimate, so that neither it nor the gradients
            can be compared.
    """
    ours, theirs, options, names, by_hand = LOSSES[kind]
    without = ("entropy", "loss_entropy") if sampled_entropy else ()
    parameters = problem.parameters

    def provider(name: str, call: Callable[..., Any], data: Plain | TensorDict) -> Provider:
        return Provider(
            name,
            call,
            (data,),
            lambda out: named(out, without),
            lambda out: total(out, names).backward(),
            parameters,
            lambda: [parameter.grad for parameter in parameters],
        )

    providers = [provider("hand-written", by_hand, problem.plain)]
    for name, cls in (("ours", ours), ("torchrl", theirs)):
        loss = cls(problem.actor, problem.critic, **options)
        providers.append(provider(name, loss, problem.data))
    return Case(
        title,
        providers,
        variable,
        value,
        exact=not sampled_entropy,
        notes=NOTES.get(kind, {}),
    )


def three_heads(batch: int, device: torch.device) -> Problem:
    """A Normal head of 4 dims and two discrete ones, of 5 and 3 classes; 2×64 cells."""
    return make_problem(THREE_HEADS, Layout((batch,)), device)


def many_heads(n: int, batch: int, device: torch.device) -> Problem:
    """So many discrete heads of 6 classes; 2×64 cells."""
    heads: tuple[Head, ...] = categorical_heads(n)
    return make_problem(heads, Layout((batch,)), device)


def torchrl_shape(device: torch.device) -> Problem:
    """The shape of TorchRL's own benchmark of PPO: [128, 10], 8 observations, 4 actions."""
    layout = Layout((128, 10), hidden=(128, 128), trunk=(128, 128, 128, 64))
    return make_problem(ONE_TANH, layout, device)


def cases(settings: Settings) -> Iterator[Case]:
    """All cases, one at a time: large data do not wait for their turn."""
    quick, device = settings.quick, settings.device
    for kind in LOSSES:
        problem = three_heads(64, device)
        yield loss_case(f"{kind}, three heads, B=64", kind, problem)
    yield loss_case("ClipPPO, 16 categorical heads, B=256", "ClipPPO", many_heads(16, 256, device))
    title = "ClipPPO, TanhNormal, [128, 10], shared trunk"
    yield loss_case(title, "ClipPPO", torchrl_shape(device), sampled_entropy=True)
    for n in (1, 2, 4, 8, 16, 32):
        problem = many_heads(n, 256, device)
        yield loss_case(
            "ClipPPO, categorical heads, B=256", "ClipPPO", problem, variable="heads", value=n
        )
    sizes = (64, 2048, 65536) if quick else (64, 256, 1024, 4096, 16384, 65536)
    for size in sizes:
        problem = three_heads(size, device)
        yield loss_case(
            "ClipPPO, three heads", "ClipPPO", problem, variable="batch size", value=size
        )
