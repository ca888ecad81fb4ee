"""Groups of agents that differ in everything, their data, and losses; no numbers of the library.

Networks are plain torch modules over the last dim, so that they take any number of agents, none
included. Actions and log-probs come from the distributions of torch and TorchRL.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from tensordict import TensorDict
from tensordict.nn import (
    CompositeDistribution,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import Tensor, nn
from torch.distributions import Categorical
from torchrl.modules import IndependentNormal

import composite_losses as cl

SIGNALS = ("reward", "done", "terminated")


class Net(nn.Module):
    """An MLP over the last dim; counts its calls under its label, copies of it included."""

    calls: ClassVar[Counter[str]] = Counter()

    def __init__(self, label: str, n_in: int, n_out: int, layer: nn.Module | None = None) -> None:
        super().__init__()
        self.label = label
        middle = nn.Tanh() if layer is None else layer
        self.net = nn.Sequential(nn.Linear(n_in, 6), middle, nn.Linear(6, n_out))

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():  # a counter would be a guard
            self.calls[self.label] += 1
        return self.net(x)


class Central(Net):
    """A value per agent from what all agents see (of a fixed number of agents)."""

    def __init__(self, label: str, n_in: int, agents: int) -> None:
        super().__init__(label, n_in * agents, agents)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(-2)).unsqueeze(-1)


class Heads(nn.Module):
    """Distribution parameters of every head from one network."""

    def __init__(self, label: str, n_in: int, heads: Mapping[str, str], layer: Any = None) -> None:
        super().__init__()
        self.heads = dict(heads)
        self.sizes = [4 if kind == "normal" else 3 for kind in heads.values()]
        self.net = Net(label, n_in, sum(self.sizes), layer)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        out: list[Tensor] = []
        for kind, part in zip(self.heads.values(), self.net(x).split(self.sizes, -1), strict=True):
            if kind == "normal":
                loc, scale = part.chunk(2, -1)
                out += [loc, nn.functional.softplus(scale) + 0.3]
            else:
                out.append(part)
        return tuple(out)


@dataclass(frozen=True)
class Spec:
    """A group: number of agents, observation size, heads (one named "action" is not nested)."""

    agents: int
    obs: int
    heads: tuple[tuple[str, str], ...]
    make: str = "MAPPOLoss"
    options: tuple[tuple[str, Any], ...] = ()


# other numbers of agents, observations, action kinds, heads, algorithms, coefficients
HUNTER = Spec(3, 5, (("move", "normal"), ("gear", "categorical")))
PREY = Spec(2, 9, (("action", "categorical"),), "IPPOLoss", (("entropy_coeff", 0.1),))
DRONE = Spec(1, 4, (("action", "normal"),), "ClipPPOLoss", (("clip_epsilon", 0.1),))
TREE = Spec(2, 3, (("grow", "categorical"), ("fall", "categorical")), "A2CLoss")
STONE = Spec(2, 3, (("action", "normal"),), "KLPENPPOLoss", (("loss_critic_type", "l2"),))
MOUSE = Spec(4, 2, (("action", "categorical"),), "ReinforceLoss")
TWO = {"hunter": HUNTER, "prey": PREY}
SIX = {**TWO, "drone": DRONE, "tree": TREE, "stone": STONE, "mouse": MOUSE}


def action_key(group: str, head: str) -> Any:
    return (group, "action") if head == "action" else (group, "action", head)


def log_prob_key(group: str, head: str) -> Any:
    key = action_key(group, head)
    return (*key[:-1], f"{key[-1]}_log_prob")


def make_actor(group: str, spec: Spec, layer: nn.Module | None = None) -> Any:
    """A policy of a group: a plain distribution for a head named "action", else a composite."""
    kinds = {"normal": IndependentNormal, "categorical": Categorical}
    names = {"normal": ("loc", "scale"), "categorical": ("logits",)}
    heads = dict(spec.heads)
    out_keys = [(group, "params", h, p) for h, kind in heads.items() for p in names[kind]]
    net = TensorDictModule(
        Heads(f"{group} actor", spec.obs, heads, layer), [(group, "observation")], out_keys
    )
    if list(heads) == ["action"]:
        kind = heads["action"]
        dist = ProbabilisticTensorDictModule(
            {p: (group, "params", "action", p) for p in names[kind]},
            [(group, "action")],
            distribution_class=kinds[kind],
            return_log_prob=True,
            log_prob_key=(group, "action_log_prob"),
        )
        return ProbabilisticTensorDictSequential(net, dist)
    dist = ProbabilisticTensorDictModule(
        [(group, "params")],
        [action_key(group, h) for h in heads],
        distribution_class=CompositeDistribution,
        distribution_kwargs={
            "distribution_map": {h: kinds[kind] for h, kind in heads.items()},
            "name_map": {h: action_key(group, h) for h in heads},
        },
        return_log_prob=True,
    )
    return ProbabilisticTensorDictSequential(net, dist)


def make_critic(group: str, spec: Spec, net: nn.Module | None = None) -> TensorDictModule:
    net = Net(f"{group} critic", spec.obs, 1) if net is None else net
    return TensorDictModule(net, [(group, "observation")], [(group, "state_value")])


def networks(group: str, spec: Spec) -> tuple[Any, TensorDictModule]:
    """Actor and critic with the same weights at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(len(group) + spec.obs)
        return make_actor(group, spec), make_critic(group, spec)


def member(group: str, spec: Spec, **options: Any) -> Any:
    """A group's loss with fresh networks; its keys are at their defaults."""
    return getattr(cl, spec.make)(*networks(group, spec), **{**dict(spec.options), **options})


def own_keys(group: str) -> dict[str, Any]:
    """The keys of a group's loss, spelled out for ``set_keys``."""
    names = ("advantage", "value_target", *SIGNALS)
    return {"value": (group, "state_value"), **{name: (group, name) for name in names}}


def by_hand(specs: Mapping[str, Spec], **options: Any) -> dict[str, Any]:
    """One loss per group with its keys set by hand: what users wire without ``GroupLoss``."""
    losses = {name: member(name, spec, **options) for name, spec in specs.items()}
    for name, loss in losses.items():
        loss.set_keys(**own_keys(name))
    return losses


def group_loss(specs: Mapping[str, Spec], cls: Any = None, **options: Any) -> Any:
    cls = cl.GroupLoss if cls is None else cls
    return cls({name: member(name, spec) for name, spec in specs.items()}, **options)


def make_data(
    specs: Mapping[str, Spec],
    root: tuple[int, ...] = (4, 5),
    *,
    shared: tuple[str, ...] = ("done", "terminated"),
    estimated: bool = True,
    seed: int = 1,
    flat: bool = False,
) -> TensorDict:
    """Data of all groups, by policies whose ratios to the current ones spread around 1.

    Args:
        specs: the groups.
        root: the root's batch size, time last.
        shared: signals that stand at the root; the others in every group.
        estimated: whether advantages, value targets and values are there.
        seed: of the data.
        flat: whether a group's TensorDict has the root's batch size, without the agents.
    """
    gen = torch.Generator().manual_seed(seed)
    signals = {
        "reward": lambda *s: torch.randn(*s, 1, generator=gen),
        "done": lambda *s: torch.rand(*s, 1, generator=gen) < 0.3,
        "terminated": lambda *s: torch.zeros(*s, 1, dtype=torch.bool),
    }
    td = TensorDict({"next": TensorDict({}, root)}, root)
    for name in shared:
        td["next", name] = signals[name](*root)
    for group, spec in specs.items():
        shape = (*root, spec.agents)
        here, after = TensorDict({}, shape), TensorDict({}, shape)
        here["observation"] = torch.randn(*shape, spec.obs, generator=gen)
        after["observation"] = torch.randn(*shape, spec.obs, generator=gen)
        for name in ("advantage", "value_target", "state_value") if estimated else ():
            here[name] = 2 * torch.randn(*shape, 1, generator=gen)
        for name in SIGNALS:
            if name not in shared:
                after[name] = signals[name](*shape)
        td[group], td["next", group] = here, after
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(int(torch.randint(2**31, (), generator=gen)))
            networks(group, spec)[0](td)
        for head, _ in spec.heads:
            key = log_prob_key(group, head)
            td[key] = td[key] + 0.2 * torch.randn(shape, generator=gen)
        if flat:
            td[group].batch_size = td["next", group].batch_size = root
    return td


def total(out: Any) -> Tensor:
    """The sum of all entries that a trainer would sum."""
    return sum(value.sum() for key, value in out.items() if key.startswith("loss"))


def gradients(loss: Any, out: Any) -> dict[str, Tensor | None]:
    """Gradient of the total for every parameter."""
    names, params = zip(*loss.named_parameters(), strict=True)
    grads = torch.autograd.grad(total(out), params, allow_unused=True)
    return dict(zip(names, grads, strict=True))


def alive_masks(
    specs: Mapping[str, Spec], root: tuple[int, ...], seed: int = 3
) -> dict[str, Tensor]:
    """For every group ``[*B, A]``, about 60 % True, two of them surely, one surely False."""
    gen = torch.Generator().manual_seed(seed)
    masks = {}
    for name, spec in specs.items():
        mask = torch.rand(*root, spec.agents, generator=gen) < 0.6
        flat = mask.view(-1)
        flat[:2], flat[-1] = True, False
        masks[name] = mask
    return masks
