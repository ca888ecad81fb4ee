"""Actors, data, garbage and comparisons for the cases on masks, normalisation, mechanics, metrics.

Nothing here asks the library for a number: actions and log-probs come from the distributions of
torch and TorchRL; what is expected is mostly the loss of the same data with the rows cut out.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    CompositeDistribution,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import Tensor, nn
from torch import distributions as d
from torchrl.modules import IndependentNormal, MaskedCategorical, OneHotCategorical, TanhNormal

import composite_losses as cl

Heads = str | dict[str, str]
OBS = 4


# --- families ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """A distribution class, the size of every parameter, and which parameters are positive."""

    cls: Any
    sizes: dict[str, int]
    positive: tuple[str, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    masked: bool = False


FAMILIES = {
    "categorical": Family(d.Categorical, {"logits": 3}),
    "one_hot": Family(OneHotCategorical, {"logits": 3}),
    "masked": Family(MaskedCategorical, {"logits": 4}, masked=True),
    "normal": Family(IndependentNormal, {"loc": 2, "scale": 2}, ("scale",)),
    "plain_normal": Family(d.Normal, {"loc": 2, "scale": 2}, ("scale",)),
    "tanh": Family(
        TanhNormal, {"loc": 2, "scale": 2}, ("scale",), {"low": 2.0, "high": 5.0, "event_dims": 1}
    ),
    "beta": Family(
        d.Beta, {"concentration1": 2, "concentration0": 2}, ("concentration1", "concentration0")
    ),
    "dirichlet": Family(d.Dirichlet, {"concentration": 3}, ("concentration",)),
    "gamma": Family(d.Gamma, {"concentration": 2, "rate": 2}, ("concentration", "rate")),
    "bernoulli": Family(d.Bernoulli, {"logits": 2}),
}
PAIR = {"move": "normal", "gear": "categorical"}
SIX = {
    "arm": "tanh",
    "grip": "beta",
    "mix": "dirichlet",
    "push": "gamma",
    "flags": "bernoulli",
    "say": "masked",
}
TRIO = {"arm": "tanh", "say": "masked", "move": "normal"}


class Parameters(nn.Module):
    """All distribution parameters of a policy from one observation; action masks pass through."""

    def __init__(self, families: list[Family], size: int = OBS) -> None:
        super().__init__()
        self.families = families
        total = sum(sum(f.sizes.values()) for f in families)
        self.net = nn.Sequential(nn.Linear(size, 6), nn.Tanh(), nn.Linear(6, total))

    def forward(self, observation: Tensor, *masks: Tensor) -> tuple[Tensor, ...]:
        sizes = [size for f in self.families for size in f.sizes.values()]
        pieces = iter(self.net(observation).split(sizes, -1))
        given = iter(masks)
        out: list[Tensor] = []
        for family in self.families:
            for name in family.sizes:
                piece = next(pieces)
                out.append(
                    nn.functional.softplus(piece) + 0.5 if name in family.positive else piece
                )
            if family.masked:
                out.append(next(given))
        return tuple(out)


def at(group: bool, *key: str) -> Any:
    """A key at the root, or the same key inside the group "agents"."""
    parts = ("agents", *key) if group else key
    return parts if len(parts) > 1 else parts[0]


def head_map(heads: Heads) -> dict[str, Family]:
    named = {"action": heads} if isinstance(heads, str) else heads
    return {name: FAMILIES[kind] for name, kind in named.items()}


def action_key(heads: Heads, name: str, group: bool = False) -> Any:
    return at(group, "action") if isinstance(heads, str) else at(group, "action", name)


def log_prob_key(heads: Heads, name: str, group: bool = False) -> Any:
    if isinstance(heads, str):
        return at(group, "action_log_prob")
    return at(group, "action", f"{name}_log_prob")


def parameter_keys(heads: Heads, name: str, group: bool = False) -> dict[str, Any]:
    """Parameter name → key of its entry; a masked family's mask is one of its parameters."""
    family = head_map(heads)[name]
    names = [*family.sizes, *(["mask"] if family.masked else [])]
    if isinstance(heads, str):
        return {p: at(group, "action_mask" if p == "mask" else p) for p in names}
    return {p: at(group, "params", name, p) for p in names}


def make_actor(heads: Heads, group: bool = False, size: int = OBS) -> nn.Module:
    """A policy: one plain distribution for a family's name, a composite for a mapping of heads."""
    families = head_map(heads)
    in_keys = [at(group, "observation")]
    out_keys: list[Any] = []
    for name, family in families.items():
        in_keys += [at(group, f"{name}_mask")] if family.masked else []
        written = parameter_keys(heads, name, group)
        if family.masked and isinstance(heads, str):  # the distribution reads the data's own mask
            written = {**written, "mask": at(group, "passed_mask")}
        out_keys += written.values()
    net = TensorDictModule(Parameters(list(families.values()), size), in_keys, out_keys)
    if isinstance(heads, str):
        family = families["action"]
        keys: Any = parameter_keys(heads, "action", group)
        dist = ProbabilisticTensorDictModule(
            keys, [at(group, "action")], distribution_class=family.cls,
            distribution_kwargs=family.kwargs, return_log_prob=True,
            log_prob_key=at(group, "action_log_prob"),
        )  # fmt: skip
        return ProbabilisticTensorDictSequential(net, dist)
    kwargs = {
        "distribution_map": {name: f.cls for name, f in families.items()},
        "name_map": {name: action_key(heads, name, group) for name in families},
        "extra_kwargs": {name: f.kwargs for name, f in families.items() if f.kwargs},
    }
    dist = ProbabilisticTensorDictModule(
        [at(group, "params")],
        [action_key(heads, name, group) for name in families],
        distribution_class=CompositeDistribution,
        distribution_kwargs=kwargs,
        return_log_prob=True,
    )
    return ProbabilisticTensorDictSequential(net, dist)


def make_critic(group: bool = False, size: int = OBS) -> TensorDictModule:
    net = nn.Sequential(nn.Linear(size, 5), nn.Tanh(), nn.Linear(5, 1))
    return TensorDictModule(net, [at(group, "observation")], [at(group, "state_value")])


def networks(heads: Heads, group: bool = False) -> tuple[nn.Module, nn.Module]:
    """Actor and critic with the same weights at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return make_actor(heads, group), make_critic(group)


# --- data ----------------------------------------------------------------------------------------


def make_data(
    heads: Heads,
    shape: tuple[int, ...],
    *,
    group: bool = False,
    source: str = "stored",
    seed: int = 1,
) -> TensorDict:
    """Data of a behaviour policy whose ratios to the current one spread around 1.

    ``shape`` is the sample shape S; in a group its last dim is the agents', and the root has the
    others. ``source``: "stored" and "joint" store log-probs, "params" parameters; "all" everything.
    """
    gen = torch.Generator().manual_seed(seed)
    actor, _ = networks(heads, group)

    def normal(*size: int) -> Tensor:
        return torch.randn(*shape, *size, generator=gen)

    here = {
        "observation": normal(OBS),
        "advantage": 3 * normal(1),
        "value_target": 2 * normal(1),
        "state_value": normal(1),
    }
    after = {
        "observation": normal(OBS),
        "reward": normal(1),
        "done": torch.rand(*shape, 1, generator=gen) < 0.2,
        "terminated": torch.zeros(*shape, 1, dtype=torch.bool),
    }
    for name, family in head_map(heads).items():
        if family.masked:
            allowed = torch.rand(*shape, 4, generator=gen) < 0.7
            allowed[..., 0] = True
            here[f"{name}_mask"] = allowed
    inner = {k: TensorDict(v, shape) for k, v in (("here", here), ("after", after))}
    td = inner["here"].set("next", inner["after"])
    if group:
        both = {"agents": td.exclude("next"), "next": {"agents": inner["after"]}}
        td = TensorDict(both, shape[:-1])
    _behaviour(td, actor, heads, group, source, gen)
    return td


def _behaviour(
    td: TensorDict, actor: nn.Module, heads: Heads, group: bool, source: str, gen: torch.Generator
) -> None:
    """Writes actions, and log-probs or parameters, of a policy near the actor's."""
    families = head_map(heads)
    masks = [td[at(group, f"{n}_mask")] for n, f in families.items() if f.masked]
    with torch.no_grad():
        values = iter(actor[0].module(td[at(group, "observation")], *masks))
    total: Tensor | float = 0.0
    ndim = td[at(group, "advantage")].ndim - 1
    state = torch.random.get_rng_state()
    torch.manual_seed(int(torch.randint(2**31, (), generator=gen)))
    for name, family in families.items():
        params: dict[str, Tensor] = {}
        for parameter in family.sizes:
            value = next(values)
            noise = 0.15 * torch.randn(value.shape, generator=gen)
            params[parameter] = (
                value * noise.exp() if parameter in family.positive else value + noise
            )
        if family.masked:
            params["mask"] = next(values)
        dist = family.cls(**params, **family.kwargs)
        action = dist.sample()
        td[action_key(heads, name, group)] = action
        log_prob = dist.log_prob(action)
        total = total + (log_prob if log_prob.ndim == ndim else log_prob.flatten(ndim).sum(-1))
        if source in ("stored", "all"):
            td[log_prob_key(heads, name, group)] = log_prob
        if source in ("params", "all"):
            for parameter, key in parameter_keys(heads, name, group).items():
                td[key] = params[parameter]
    torch.random.set_rng_state(state)
    if source == "joint":
        td[at(group, "sample_log_prob")] = total


# --- losses --------------------------------------------------------------------------------------

Factory = Callable[..., Any]


def native(surrogate: Callable[[], nn.Module]) -> Factory:
    return lambda actor, critic, **kw: cl.PolicyLoss(actor, critic, surrogate=surrogate(), **kw)


def clip(**kw: Any) -> Factory:
    return native(lambda: cl.Clip(0.1, **kw))


def door(cls: type, **kw: Any) -> Factory:
    return lambda actor, critic, **more: cls(actor, critic, **{**kw, **more})


NATIVE: dict[str, Factory] = {
    "joint": clip(),
    "per_head": clip(ratio="per_head"),
    "leafwise": clip(ratio="leafwise"),
    "mixed": clip(ratio="mixed", mix=0.3),
    "dual": clip(dual_clip=1.05),
    "ratio": native(cl.Ratio),
    "score": native(cl.Score),
    "penalty": native(cl.KLPenalty),
}
DOORS: dict[str, Factory] = {
    "PPOLoss": door(cl.PPOLoss),
    "ClipPPOLoss": door(cl.ClipPPOLoss),
    "ClipPPOLoss-per_head": door(cl.ClipPPOLoss, ratio="per_head", clip_epsilon=(0.1, 0.3)),
    "ClipPPOLoss-leafwise": door(cl.ClipPPOLoss, ratio="leafwise"),
    "ClipPPOLoss-mixed": door(cl.ClipPPOLoss, ratio="mixed"),
    "KLPENPPOLoss": door(cl.KLPENPPOLoss),
    "A2CLoss": door(cl.A2CLoss),
    "ReinforceLoss": door(cl.ReinforceLoss, entropy_coeff=0.02),
    "ReinforceLoss-alone": lambda actor, critic, **kw: cl.ReinforceLoss(actor, **kw),
}
LOSSES = {**NATIVE, **DOORS}
# one per class, for what does not depend on the surrogate
CLASSES = {
    "PolicyLoss": NATIVE["per_head"],
    **{n: DOORS[n] for n in DOORS if "-" not in n},
}
KL = ("penalty", "KLPENPPOLoss")
JOINT = ("joint", "dual", "ratio", "penalty", "PPOLoss", "ClipPPOLoss", "KLPENPPOLoss")
RATIO = tuple(n for n in LOSSES if n != "score" and n[:3] not in ("A2C", "Rei"))
# a joint log-prob serves the joint ratio only, and a KL needs the parameters
SOURCES = [(n, "all" if n in KL else "stored") for n in RATIO] + [(n, "params") for n in RATIO]
SOURCES += [(n, "joint") for n in JOINT if n not in KL]
NORM = ["PPOLoss", "ClipPPOLoss", "KLPENPPOLoss"]
OPTIONS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "clip_value": ({"clip_value": 0.2}, list(DOORS)[:-1]),
    "value_term": ({"value": cl.ValueTerm("l2", coeff=0.7, clip=0.3)}, ["per_head", "score"]),
    "normalised": ({"normalize_advantage": True}, NORM),
    "norm_part": ({"advantage": cl.AdvantageNorm()}, list(NATIVE)),
    "delayed": ({"delay_actor": True}, [*NORM, *NATIVE]),
    "capped": ({"max_importance_ratio": 1.02}, [*NORM, *NATIVE]),
    "delayed_capped": ({"delay_actor": True, "max_importance_ratio": 1.02}, NORM),
    "not_functional": ({"functional": False}, list(CLASSES)),
    "separate": ({"separate_losses": True}, ["PolicyLoss", "A2CLoss", "ReinforceLoss"]),
    "no_metrics": ({"metrics": False}, list(CLASSES)),
    "sum": ({"reduction": "sum"}, list(CLASSES)),
}


def build(name: str | Factory, heads: Heads, *, group: bool = False, **options: Any) -> Any:
    """A loss with fresh networks, its keys set for a group where there is one."""
    factory = LOSSES.get(name) or CLASSES[name] if isinstance(name, str) else name
    loss = factory(*networks(heads, group), **options)
    if group:
        names = ("advantage", "value_target", "reward", "done", "terminated")
        loss.set_keys(value=("agents", "state_value"), **{n: ("agents", n) for n in names})
    return loss


def outcome(loss: Any, td: TensorDictBase) -> tuple[dict[str, Tensor], dict[str, Tensor | None]]:
    """Outputs, detached, and the gradient of the sum of all losses for every parameter."""
    loss.zero_grad(set_to_none=True)
    out = loss(td)
    total_loss(out).backward()
    grads = {
        name: None if p.grad is None else p.grad.clone() for name, p in loss.named_parameters()
    }
    return {key: value.detach().clone() for key, value in out.items()}, grads


def total_loss(out: Any) -> Tensor:
    return sum(v.sum() for k, v in out.items() if k.startswith("loss"))


def same(left: Any, right: Any, *, nan: bool = False, tol: float = 1e-5) -> None:
    """Equal outputs and equal gradients of two ``outcome`` results, all finite unless ``nan``."""
    assert list(left[0]) == list(right[0])
    for i in (0, 1):
        for key, value in left[i].items():
            other = right[i][key]
            assert (value is None) == (other is None), key
            if value is None:
                continue
            assert nan or value.isfinite().all(), f"{key}: {value}"
            torch.testing.assert_close(
                value, other, rtol=tol, atol=tol, equal_nan=nan, msg=lambda m, k=key: f"{k}: {m}"
            )


# --- masks ---------------------------------------------------------------------------------------

# (how the mask is given, sample shape, whether inside a group)
LAYOUTS: list[tuple[str, tuple[int, ...], bool]] = [
    ("root1", (9,), False), ("key", (9,), False),
    ("collector", (4, 5), False), ("shifted", (4, 5), False),
    ("group", (6, 1), True), ("group1", (6, 2), True), ("root", (6, 3), True),
    ("collector", (3, 3), True), ("group", (2, 3, 3), True),
]  # fmt: skip
LAYOUT_IDS = [f"{h}-{'x'.join(map(str, s))}{'-group' if g else ''}" for h, s, g in LAYOUTS]
KINDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "huge": 1e30}


def make_mask(shape: tuple[int, ...], seed: int = 2) -> Tensor:
    """About 60 % True, at least two True and one False."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.6
    flat = mask.view(-1)
    flat[0] = flat[1] = True
    flat[-1] = False
    return mask


def tail_mask(lengths: list[int], steps: int) -> Tensor:
    """``[B, T]``, True for the first ``lengths[b]`` steps."""
    return torch.arange(steps) < torch.tensor(lengths).unsqueeze(-1)


def garbage(shape: torch.Size, dtype: torch.dtype, kind: str, position: int = 0) -> Tensor:
    """What a masked row may hold: a special number, or for "mixed" all of them in turn."""
    if dtype == torch.bool:
        return torch.full(shape, kind in ("nan", "huge"))
    if not dtype.is_floating_point:
        return torch.full(shape, -7 if kind in ("nan", "-inf") else 10**6, dtype=dtype)
    if kind in KINDS:
        return torch.full(shape, KINDS[kind], dtype=dtype)
    values = torch.tensor([*KINDS.values(), -1e30, 3.5], dtype=dtype)
    index = torch.arange(position, position + shape.numel()) % len(values)
    return values[index].reshape(shape)


def poison(td: TensorDict, mask: Tensor, kind: str, *, keys: Any = None) -> TensorDict:
    """A copy whose masked rows hold garbage in every entry (or in ``keys``); action masks False."""
    td = td.clone()
    for i, key in enumerate(list(td.keys(True, True))):
        if keys is not None and key not in keys:
            continue
        leaf = td[key]
        assert leaf.shape[: mask.ndim] == mask.shape, key
        rows = leaf[~mask]
        leaf[~mask] = garbage(rows.shape, rows.dtype, kind, i)
        if "mask" in str(key):
            leaf[~mask] = False
    return td


def cut(td: TensorDict, mask: Tensor, group: bool = False) -> TensorDict:
    """The same data with the rows cut out: the valid rows, flat."""
    if not group:
        return td[mask]
    inner, after = td["agents"][mask], td["next", "agents"][mask]
    return TensorDict({"agents": inner, "next": {"agents": after}}, inner.batch_size)


def mask_with(loss: Any, td: TensorDict, mask: Tensor, how: str) -> None:
    """Stores the mask and tells the loss where it is."""
    column = mask.unsqueeze(-1)
    if how == "collector":
        td["collector", "mask"] = column
    elif how == "shifted":
        td["shifted_valid"] = column
    elif how == "key":
        td["my", "valid"] = column
        loss.loss_mask_key = ("my", "valid")
    elif how == "root":
        td["alive"] = mask
        loss.set_keys(agent_mask="alive")
    elif how == "root1":
        td["alive"] = column
        loss.set_keys(agent_mask="alive")
    elif how == "group":
        td["agents", "alive"] = mask
        loss.set_keys(agent_mask=("agents", "alive"))
    elif how == "group1":
        td["agents", "alive"] = column
        loss.set_keys(agent_mask=("agents", "alive"))
    else:
        raise ValueError(how)


def masked_against_cut(
    name: str | Factory, heads: Heads, td: TensorDict, mask: Tensor, kind: str, how: str = "root",
    *, group: bool = False, nan: bool = False,
    **options: Any,
) -> None:  # fmt: skip
    """Loss, gradients and metrics of poisoned data equal those with the rows cut out."""
    masked, short = (build(name, heads, group=group, **copy.deepcopy(options)) for _ in range(2))
    for loss in (masked, short):
        if loss.delay_actor:  # another proximal policy than the current one
            for i, p in enumerate(loss.target_actor_network_params.values(True, True)):
                p.data.mul_(1 + 0.1 * (-1) ** i)
    data = poison(td, mask, kind)
    mask_with(masked, data, mask, how)
    before = data.clone()
    same(outcome(masked, data), outcome(short, cut(td, mask, group)), nan=nan)
    unchanged(data, before)


def unchanged(td: TensorDict, before: TensorDict) -> None:
    """The user's data are what they were, bit by bit."""
    assert set(td.keys(True, True)) == set(before.keys(True, True))
    for key, value in before.items(True, True):
        assert torch.equal(td[key].nan_to_num(7.25), value.nan_to_num(7.25)), key


def normalised_by_hand(advantage: Tensor, mask: Tensor, keep: tuple[int, ...] = ()) -> Tensor:
    """``(A − mean) / max(std, 1e-6)`` of ``[*S, 1]``, separate statistics along kept dims."""
    out = torch.zeros_like(advantage)
    groups: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for index in mask.nonzero().tolist():
        groups.setdefault(tuple(index[dim] for dim in keep), []).append(tuple(index))
    for rows in groups.values():
        values = [float(advantage[(*row, 0)]) for row in rows]
        mean = math.fsum(values) / len(values)
        spread = math.fsum((v - mean) ** 2 for v in values) / max(len(values) - 1, 1)
        for row, value in zip(rows, values, strict=True):
            out[(*row, 0)] = (value - mean) / max(math.sqrt(spread), 1e-6)
    return out
