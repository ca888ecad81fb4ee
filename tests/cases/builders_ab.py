"""Policies, data and hand computations shared by the cases about composite actions and keys.

What is compared against is worked out with torch alone; the package appears only in the table of
losses at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as tf
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import CompositeDistribution, InteractionType, TensorDictModule
from torch import Tensor, nn
from torch import distributions as D
from torchrl.modules import IndependentNormal, ProbabilisticActor

import composite_losses as cl

Path = tuple[str, ...]
OBS = 4

# name -> (root batch shape, number of agents or None)
FORMS: dict[str, tuple[tuple[int, ...], int | None]] = {
    "flat": ((6,), None),
    "time": ((4, 5), None),
    "agents1": ((6,), 1),
    "agents2": ((6,), 2),
    "agents3": ((6,), 3),
    "agents4": ((6,), 4),
    "A==B": ((3,), 3),
    "A==B==T": ((3, 3), 3),
    "one": ((1,), 1),
}
CLASSES: dict[str, Any] = {
    "cat": D.Categorical,
    "onehot": D.OneHotCategorical,
    "normal": D.Normal,  # not Independent: its log-prob keeps the event dim
    "independent": IndependentNormal,
    "beta": D.Beta,
    "dirichlet": D.Dirichlet,
}


@dataclass(frozen=True)
class Spec:
    """One head: its action key inside the group, its kind, its number of classes or dims."""

    key: str | Path
    kind: str
    n: int

    @property
    def path(self) -> Path:
        return (self.key,) if isinstance(self.key, str) else self.key

    @property
    def width(self) -> int:
        return self.n if self.kind in ("cat", "onehot", "dirichlet") else 2 * self.n


def bare(path: Sequence[str]) -> Any:
    """A path as a nested key: a string where it has one element."""
    return path[0] if len(path) == 1 else tuple(path)


def parameters(kind: str, raw: Tensor) -> dict[str, Tensor]:
    """Distribution parameters from the output of a linear layer."""
    if kind in ("cat", "onehot"):
        return {"logits": raw}
    if kind == "dirichlet":
        return {"concentration": tf.softplus(raw) + 0.5}
    first, second = raw.chunk(2, -1)
    if kind == "beta":
        return {
            "concentration1": tf.softplus(first) + 1.0,
            "concentration0": tf.softplus(second) + 1.0,
        }
    return {"loc": first, "scale": tf.softplus(second) + 0.3}


def plain(kind: str, params: dict[str, Tensor]) -> D.Distribution:
    """The head's distribution, from torch.distributions only."""
    return (D.Normal if kind == "independent" else CLASSES[kind])(**params)


def per_sample(kind: str, value: Tensor) -> Tensor:
    """A log-prob or entropy summed over the event dim that Normal and Beta keep."""
    return value.sum(-1) if kind in ("normal", "independent", "beta") else value


class Net(nn.Module):
    """One linear layer per head, so that the gradient of a head can be told apart."""

    def __init__(self, specs: Sequence[Spec], obs: int = OBS) -> None:
        super().__init__()
        self.specs = list(specs)
        self.layers = nn.ModuleList(nn.Linear(obs, spec.width) for spec in specs)

    def params(self, obs: Tensor) -> list[dict[str, Tensor]]:
        pairs = zip(self.specs, self.layers, strict=True)
        return [parameters(spec.kind, layer(obs)) for spec, layer in pairs]

    def forward(self, obs: Tensor) -> tuple[Tensor, ...]:
        return tuple(value for params in self.params(obs) for value in params.values())

    def names(self) -> list[list[str]]:
        with torch.no_grad():
            return [list(p) for p in self.params(torch.zeros(self.layers[0].in_features))]


def composite_actor(
    net: Net, group: Path = (), *, wrapper: Any = ProbabilisticActor, **options: Any
) -> Any:
    """A composite policy over the heads of ``net``: random samples, stored log-probs."""
    module = TensorDictModule(
        net,
        in_keys=[bare((*group, "observation"))],
        out_keys=[
            bare((*group, "params", f"dist{i}", name))
            for i, names in enumerate(net.names())
            for name in names
        ],
    )
    keys = [bare((*group, *spec.path)) for spec in net.specs]
    names = [f"dist{i}" for i in range(len(net.specs))]
    kinds = [CLASSES[spec.kind] for spec in net.specs]
    options = {
        "in_keys": [bare((*group, "params"))],
        "out_keys": keys,
        "distribution_class": CompositeDistribution,
        "distribution_kwargs": {
            "distribution_map": dict(zip(names, kinds, strict=True)),
            "name_map": dict(zip(names, keys, strict=True)),
        },
        "return_log_prob": True,
        "default_interaction_type": InteractionType.RANDOM,
    } | options
    return wrapper(module, **options)


def single_actor(net: Net, group: Path = (), **options: Any) -> Any:
    """A policy with one distribution, no composite: its parameters lie beside the action."""
    (spec,) = net.specs
    keys = [bare((*group, name)) for name in net.names()[0]]
    options = {
        "in_keys": keys,
        "out_keys": [bare((*group, *spec.path))],
        "distribution_class": CLASSES[spec.kind],
        "return_log_prob": True,
        "default_interaction_type": InteractionType.RANDOM,
    } | options
    module = TensorDictModule(net, in_keys=[bare((*group, "observation"))], out_keys=keys)
    return ProbabilisticActor(module, **options)


@dataclass
class Scene:
    """A policy, a critic, a fresh rollout, and the hand computations that belong to them."""

    net: Net
    actor: Any
    critic: Any
    td: TensorDict
    group: Path
    sample: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)

    def key(self, name: str) -> Any:
        return bare((*self.group, name))

    def keys(self) -> dict[str, Any]:
        return {
            "advantage": self.key("advantage"),
            "value_target": self.key("value_target"),
            "value": self.key("state_value"),
            "reward": self.key("reward"),
            "done": self.key("done"),
            "terminated": self.key("terminated"),
        }

    def loss(self, name: str = "clip_joint", critic: bool = True, **options: Any) -> Any:
        made = LOSSES[name](self.actor, self.critic if critic else None, **options)
        made.set_keys(**self.keys())
        return made

    def action_key(self, i: int) -> Any:
        return bare((*self.group, *self.net.specs[i].path))

    def log_prob_key(self, i: int) -> Any:
        path = (*self.group, *self.net.specs[i].path)
        return bare((*path[:-1], path[-1] + "_log_prob"))

    @property
    def obs(self) -> Tensor:
        return self.td.get(self.key("observation"))

    @property
    def advantage(self) -> Tensor:
        return self.td.get(self.key("advantage")).squeeze(-1)

    def log_prob_entries(self) -> list[Tensor]:
        """Current log-probs of the stored actions by torch.distributions, event dims kept."""
        entries = []
        for i, params in enumerate(self.net.params(self.obs)):
            kind = self.net.specs[i].kind
            value = plain(kind, params).log_prob(self.td.get(self.action_key(i)))
            entries.append(value.sum(-1) if kind == "independent" else value)
        return entries

    def log_probs(self) -> Tensor:
        """Current log-prob of the stored actions by torch.distributions, ``[*S, H]``."""
        return torch.stack([self._summed(v) for v in self.log_prob_entries()], -1)

    def _summed(self, value: Tensor) -> Tensor:
        return value.sum(-1) if value.ndim > len(self.sample) else value

    def stored(self) -> Tensor:
        """The stored log-probs, event dims summed, ``[*S, H]``."""
        values = [self.td.get(self.log_prob_key(i)) for i in range(len(self.net.specs))]
        return torch.stack([self._summed(value) for value in values], -1)

    def entropies(self) -> Tensor:
        """Entropies by torch.distributions, ``[*S, H]``."""
        pairs = zip(self.net.specs, self.net.params(self.obs), strict=True)
        return torch.stack([per_sample(s.kind, plain(s.kind, p).entropy()) for s, p in pairs], -1)

    def log_ratio(self) -> Tensor:
        return self.log_probs() - self.stored()

    def set_log_ratio(self, *values: float) -> None:
        """Stores log-probs such that head h has the log-ratio ``values[h]`` in every row."""
        with torch.no_grad():
            for i, (value, current) in enumerate(zip(values, self.log_prob_entries(), strict=True)):
                dims = current[..., 0].numel() / current.numel() if self._has_event(current) else 1
                self.td.set(self.log_prob_key(i), current - value * dims)

    def _has_event(self, value: Tensor) -> bool:
        return value.ndim > len(self.sample)

    def move(self, scale: float = 0.1) -> None:
        """Moves the weights, so that the current policy is not the behaviour policy."""
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for p in self.net.parameters():
                p.add_(scale * torch.randn(p.shape, generator=generator))


def rollout(
    actor: Any, shape: tuple[int, ...], agents: int | None, group: Path, dtype: torch.dtype
) -> TensorDict:
    """Fresh data of the actor, with everything a loss may read."""
    sample = shape if agents is None else (*shape, agents)

    def inside(**entries: Tensor) -> TensorDict:
        td = TensorDict(entries, batch_size=sample)
        for name in reversed(group):
            td = TensorDict({name: td}, batch_size=shape)
        return td

    td = inside(
        observation=torch.randn(*sample, OBS, dtype=dtype),
        advantage=torch.randn(*sample, 1, dtype=dtype),
        value_target=torch.randn(*sample, 1, dtype=dtype),
        state_value=torch.randn(*sample, 1, dtype=dtype),
    )
    done = torch.zeros(*sample, 1, dtype=torch.bool)
    td["next"] = inside(
        observation=torch.randn(*sample, OBS, dtype=dtype),
        reward=torch.randn(*sample, 1, dtype=dtype),
        state_value=torch.randn(*sample, 1, dtype=dtype),
        done=done,
        terminated=done.clone(),
    )
    with torch.no_grad():
        return actor(td)


def scene(
    specs: Sequence[Spec],
    form: str = "flat",
    *,
    dtype: torch.dtype = torch.float32,
    actor: Callable[..., Any] = composite_actor,
    **options: Any,
) -> Scene:
    """A policy with the given heads and a fresh rollout of the given form."""
    shape, agents = FORMS[form]
    group: Path = () if agents is None else ("agents",)
    net = Net(specs).to(dtype)
    policy = actor(net, group, **options)
    critic = TensorDictModule(
        nn.Linear(OBS, 1, dtype=dtype),
        in_keys=[bare((*group, "observation"))],
        out_keys=[bare((*group, "state_value"))],
    )
    td = rollout(policy, shape, agents, group, dtype)
    return Scene(net, policy, critic, td, group, shape if agents is None else (*shape, agents))


# the forms where a bad reduction or a broadcast would show
CORE = ("flat", "time", "agents1", "agents2", "A==B")
FEW = ("time", "agents1", "A==B")
# The usual pair of heads, and one of every kind.
HYBRID = (Spec("gear", "cat", 3), Spec("move", "normal", 2))
DISCRETE = (Spec("a", "cat", 3), Spec("b", "cat", 5))
ALL_KINDS = (
    Spec("cat", "cat", 3),
    Spec("onehot", "onehot", 4),
    Spec("normal", "normal", 2),
    Spec("independent", "independent", 2),
    Spec("beta", "beta", 2),
    Spec("dirichlet", "dirichlet", 3),
)


def gradients(value: Tensor, net: nn.Module) -> list[Tensor]:
    """Gradients of the net's parameters, zeros where none flows."""
    params = list(net.parameters())
    grads = torch.autograd.grad(value, params, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(params, grads, strict=True)]


def total(out: TensorDictBase) -> Tensor:
    """The sum of the losses."""
    return sum(v.sum() for k, v in out.items() if k.startswith("loss"))  # type: ignore[return-value]


def assert_same(
    out: TensorDictBase, expected: TensorDictBase, *, exact: bool = False, skip: tuple = ()
) -> None:
    """Two outputs of a loss have the same keys and values; NaN equals NaN."""
    assert set(out.keys()) == set(expected.keys())
    tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-5, "atol": 1e-6}
    for name in out.keys():  # noqa: SIM118
        if name in skip:
            continue
        torch.testing.assert_close(
            out[name],
            expected[name],
            equal_nan=True,
            msg=lambda m, n=name: f"{n}: {m}",
            **tolerance,
        )


def snapshot(td: TensorDictBase) -> dict[Any, tuple[Any, ...]]:
    """Everything that a call could have changed in the data, to the bit."""
    seen: dict[Any, tuple[Any, ...]] = {(): ((), td.batch_size, list(td.names), td.is_locked)}
    for key, value in td.items(include_nested=True):
        if isinstance(value, TensorDictBase):
            seen[key] = (value.batch_size, list(value.names), value.is_locked, id(value))
        else:
            bits = value.detach().clone().contiguous().reshape(-1).view(torch.uint8).tolist()
            seen[key] = (
                tuple(value.shape),
                value.dtype,
                value.requires_grad,
                value.data_ptr(),
                bits,
            )
    return seen


def geometric(
    kind: str, log_ratio: Tensor, advantage: Tensor, eps: float = 0.2, mix: float = 0.5
) -> Tensor:
    """The objective per sample of one ratio geometry: ``log_ratio [*S, H]``, ``advantage [*S]``."""

    def clipped(r: Tensor, a: Tensor) -> Tensor:
        return torch.minimum(r * a, r.clamp(1 - eps, 1 + eps) * a)

    ratio = log_ratio.exp()
    product = log_ratio.sum(-1).exp()
    if kind == "joint":
        return clipped(product, advantage)
    if kind == "per_head":
        return clipped(ratio, advantage.unsqueeze(-1)).sum(-1)
    if kind == "leafwise":
        clamped = ratio.clamp(1 - eps, 1 + eps).prod(-1)
        return torch.minimum(product * advantage, clamped * advantage)
    joint = geometric("joint", log_ratio, advantage, eps)
    return mix * joint + (1 - mix) * geometric("per_head", log_ratio, advantage, eps)


GEOMETRIES = ("joint", "per_head", "leafwise", "mixed")
LOSSES: dict[str, Callable[..., Any]] = {
    "ppo": cl.PPOLoss,
    **{
        f"clip_{kind}": lambda actor, critic, kind=kind, **options: cl.ClipPPOLoss(
            actor, critic, ratio=kind, **options
        )
        for kind in GEOMETRIES
    },
    "klpen": cl.KLPENPPOLoss,
    "a2c": cl.A2CLoss,
    "reinforce": cl.ReinforceLoss,
    "native": lambda actor, critic, **options: cl.PolicyLoss(
        actor, critic, **({"surrogate": cl.Clip(0.2)} | options)
    ),
}
RATIO_LOSSES = [name for name in LOSSES if name not in ("a2c", "reinforce")]
JOINT_LOSSES = ["ppo", "clip_joint", "native"]


def objective(out: TensorDictBase) -> Tensor:
    """The policy loss, whatever its name."""
    return out["loss_actor"] if "loss_actor" in out.keys() else out["loss_objective"]  # noqa: SIM118
