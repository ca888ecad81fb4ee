"""Actors, critics and data for the losses, as TensorDict modules and as plain tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
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
from torchrl.modules import IndependentNormal, TanhNormal

NORMAL, TANH, CATEGORICAL = "normal", "tanh", "categorical"
CLASSES: dict[str, Any] = {
    NORMAL: IndependentNormal,
    TANH: TanhNormal,
    CATEGORICAL: Categorical,
}
PARAMETERS = {
    NORMAL: ("loc", "scale"),
    TANH: ("loc", "scale"),
    CATEGORICAL: ("logits",),
}
MIN_SCALE = 1e-3


class Head(NamedTuple):
    """One action: its key, its family, and its number of dims or classes."""

    name: str
    family: str
    size: int

    @property
    def width(self) -> int:
        """How many network outputs it takes."""
        return self.size if self.family == CATEGORICAL else 2 * self.size


THREE_HEADS = (Head("move", NORMAL, 4), Head("say", CATEGORICAL, 5), Head("gear", CATEGORICAL, 3))
ONE_TANH = (Head("action", TANH, 4),)


def categorical_heads(n: int, classes: int = 6) -> tuple[Head, ...]:
    """So many discrete heads of equal size."""
    return tuple(Head(f"a{i}", CATEGORICAL, classes) for i in range(n))


def split(flat: Tensor, heads: Sequence[Head]) -> list[tuple[Tensor, ...]]:
    """The distribution parameters of every head, out of one network output ``[..., widths]``."""
    parts = flat.split([head.width for head in heads], -1)
    out: list[tuple[Tensor, ...]] = []
    for head, part in zip(heads, parts, strict=True):
        if head.family == CATEGORICAL:
            out.append((part,))
        else:
            loc, raw = part.chunk(2, -1)
            out.append((loc, nn.functional.softplus(raw) + MIN_SCALE))
    return out


class Split(nn.Module):
    """``split`` as a module, the parameters of all heads in a row."""

    def __init__(self, heads: Sequence[Head]) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, flat: Tensor) -> tuple[Tensor, ...]:
        """The parameters of all heads in a row."""
        return tuple(p for parameters in split(flat, self.heads) for p in parameters)


def mlp(sizes: Sequence[int]) -> nn.Sequential:
    """A tanh perceptron through layers of these sizes."""
    layers: list[nn.Module] = []
    for i, (size, out) in enumerate(pairwise(sizes)):
        layers += [nn.Linear(size, out)] + ([nn.Tanh()] if i < len(sizes) - 2 else [])
    return nn.Sequential(*layers)


@dataclass(frozen=True)
class Layout:
    """Sizes of networks and data.

    Attributes:
        batch: batch size, as many dims as given.
        observation: number of observations.
        hidden: cells of the networks' hidden layers.
        trunk: sizes after the observation of a trunk shared by actor and critic; empty: none.
        group: name of the group of agents that everything lies in, with the agents as the last
            batch dim; "" for none.
    """

    batch: tuple[int, ...]
    observation: int = 8
    hidden: tuple[int, ...] = (64, 64)
    trunk: tuple[int, ...] = ()
    group: str = ""

    def key(self, *name: str) -> Any:
        """A key, inside the group if there is one."""
        path = (self.group, *name) if self.group else name
        return path if len(path) > 1 else path[0]


@dataclass
class Plain:
    """The same problem without TensorDict.

    Attributes:
        trunk: shared network, identity where there is none.
        policy: network from the trunk's output to the parameters of all heads in a row.
        critic: network from the trunk's output to the value.
        heads: the heads.
        observation, actions, log_probs, advantage, value_target: the data; actions and log-probs
            are lists, one per head.
    """

    trunk: nn.Module
    policy: nn.Module
    critic: nn.Module
    heads: tuple[Head, ...]
    observation: Tensor
    actions: list[Tensor]
    log_probs: list[Tensor]
    advantage: Tensor
    value_target: Tensor


@dataclass
class Problem:
    """A policy that has learned a little since it collected the data."""

    actor: ProbabilisticTensorDictSequential
    critic: TensorDictSequential
    data: TensorDict
    plain: Plain
    layout: Layout

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Every parameter once, in one order."""
        nets = (self.plain.trunk, self.plain.policy, self.plain.critic)
        return [parameter for net in nets for parameter in net.parameters()]


def make_problem(heads: Sequence[Head], layout: Layout, device: torch.device) -> Problem:
    """Networks and collected data, the same at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return _make(tuple(heads), layout, device)


def _make(heads: tuple[Head, ...], layout: Layout, device: torch.device) -> Problem:
    sizes = (layout.observation, *layout.trunk)
    trunk = mlp(sizes) if layout.trunk else nn.Identity()
    policy = mlp((sizes[-1], *layout.hidden, sum(head.width for head in heads)))
    value = mlp((sizes[-1], *layout.hidden, 1))
    nets = nn.ModuleList([trunk, policy, value]).to(device)
    actor = _actor(heads, layout, trunk, policy)
    critic = TensorDictSequential(
        TensorDictModule(trunk, [layout.key("observation")], [layout.key("hidden")]),
        TensorDictModule(value, [layout.key("hidden")], [layout.key("state_value")]),
    )
    data = _data(heads, layout, actor, device)
    with torch.no_grad():
        for parameter in nets.parameters():
            parameter.add_(0.03 * torch.randn_like(parameter))
    plain = Plain(
        trunk,
        policy,
        value,
        heads,
        data[layout.key("observation")],
        [data[layout.key(head.name)] for head in heads],
        [data[layout.key(f"{head.name}_log_prob")] for head in heads],
        data[layout.key("advantage")],
        data[layout.key("value_target")],
    )
    return Problem(actor, critic, data, plain, layout)


def _actor(
    heads: tuple[Head, ...], layout: Layout, trunk: nn.Module, policy: nn.Module
) -> ProbabilisticTensorDictSequential:
    """The actor of several heads (a composite) or of one."""
    several = len(heads) > 1
    prefixes = [("params", head.name) if several else () for head in heads]
    keys = [
        layout.key(*prefix, name)
        for head, prefix in zip(heads, prefixes, strict=True)
        for name in PARAMETERS[head.family]
    ]
    if several:
        inputs: Any = [layout.key("params")]
        cls: Any = CompositeDistribution
        kwargs: dict[str, Any] = {
            "distribution_map": {head.name: CLASSES[head.family] for head in heads},
            "name_map": {head.name: layout.key(head.name) for head in heads},
        }
    else:
        inputs = dict(zip(PARAMETERS[heads[0].family], keys, strict=True))
        cls = CLASSES[heads[0].family]
        kwargs = {"safe_tanh": False} if heads[0].family == TANH else {}
    return ProbabilisticTensorDictSequential(
        TensorDictModule(trunk, [layout.key("observation")], [layout.key("hidden")]),
        TensorDictModule(nn.Sequential(policy, Split(heads)), [layout.key("hidden")], keys),
        ProbabilisticTensorDictModule(
            in_keys=inputs,
            out_keys=[layout.key(head.name) for head in heads],
            distribution_class=cls,
            distribution_kwargs=kwargs,
            default_interaction_type=InteractionType.RANDOM,
            return_log_prob=True,
        ),
    )


def _data(
    heads: tuple[Head, ...],
    layout: Layout,
    actor: ProbabilisticTensorDictSequential,
    device: torch.device,
) -> TensorDict:
    """What the actor collects on random observations, with advantage and value target."""
    sample = layout.batch

    def normal(size: int) -> Tensor:
        return torch.randn(*sample, size).to(device)

    root = sample[:-1] if layout.group else sample
    data = TensorDict({}, root, device=device)
    if layout.group:
        data[layout.group] = TensorDict({}, sample, device=device)
    data[layout.key("observation")] = normal(layout.observation)
    with torch.no_grad():
        actor(data)
    data = data.exclude(layout.key("hidden"))
    data[layout.key("advantage")] = normal(1)
    data[layout.key("value_target")] = normal(1)
    return data
