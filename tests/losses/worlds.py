"""A drawn problem as a policy, a critic, a rollout and a loss."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    CompositeDistribution,
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import Tensor, nn

import composite_losses as cl
from tests.cases.builders_ab import bare
from tests.cases.builders_fl import poison
from tests.losses.strategies import F64, KINDS, OBS, HeadNet, Path, Problem

# --- actors ---------------------------------------------------------------------------------------


class AllHeads(nn.Module):
    """The parameters of all heads, from the observation and the action masks."""

    def __init__(self, nets: Sequence[HeadNet]) -> None:
        super().__init__()
        self.nets = nn.ModuleList(nets)

    def forward(self, obs: Tensor, *masks: Tensor) -> tuple[Tensor, ...]:
        rest, made = iter(masks), []
        for net in self.nets:
            made += net(obs, *([next(rest)] if net.masked else []))
        return tuple(made)


def step(keys: Sequence[Any], out: Sequence[Any], cls: Any, **options: Any) -> Any:
    """A probabilistic module that samples at random and writes log-probs."""
    return ProbabilisticTensorDictModule(
        in_keys=list(keys),
        out_keys=list(out),
        distribution_class=cls,
        return_log_prob=True,
        default_interaction_type=InteractionType.RANDOM,
        **options,
    )


def nested(classes: dict[Path, Any]) -> dict[str, Any]:
    """A distribution map with a composite for every inner node of the tree of paths."""
    made: dict[str, Any] = {}
    for name in dict.fromkeys(path[0] for path in classes):
        below = {path[1:]: cls for path, cls in classes.items() if path[0] == name}
        made[name] = below.get(()) or functools.partial(
            CompositeDistribution, distribution_map=nested(below)
        )
    return made


def make_actor(problem: Problem, nets: Sequence[HeadNet]) -> Any:
    """The actor that ``problem.make`` names, over the given layers."""
    observation, actions = problem.key("observation"), [problem.action(i) for i in range(len(nets))]
    masks = [[problem.key(f"mask{i}")] if net.masked else [] for i, net in enumerate(nets)]
    entries = [
        [bare((*problem.parameters(i), name)) for name in net.names()] for i, net in enumerate(nets)
    ]
    classes = [KINDS[net.head.kind].cls for net in nets]
    if problem.make == "sequence":
        modules = []
        for i, net in enumerate(nets):
            reads = [observation, *([actions[0]] if net.conditioned else []), *masks[i]]
            modules.append(TensorDictModule(net, reads, entries[i]))
            key = problem.key(*problem.heads[i].path[:-1], f"{problem.heads[i].path[-1]}_log_prob")
            modules.append(step(entries[i], [actions[i]], classes[i], log_prob_key=key))
        return ProbabilisticTensorDictSequential(*modules)
    module = TensorDictModule(AllHeads(nets), [observation, *chain(*masks)], list(chain(*entries)))
    if problem.make == "single":
        return ProbabilisticTensorDictSequential(module, step(entries[0], actions, classes[0]))
    if problem.make == "tree":
        options = {"distribution_map": dict(zip(actions, classes, strict=True))}
    else:
        if problem.make == "map":
            kinds = {f"d{i}": cls for i, cls in enumerate(classes)}
            names = dict(zip(kinds, actions, strict=True))
        else:
            kinds = nested({h.path: c for h, c in zip(problem.heads, classes, strict=True)})
            names = {name: problem.key(name) for name in kinds}
        options, actions = {"distribution_map": kinds, "name_map": names}, list(names.values())
    last = step(
        [problem.key("params")], actions, CompositeDistribution, distribution_kwargs=options
    )
    return ProbabilisticTensorDictSequential(module, last)


# --- data -----------------------------------------------------------------------------------------


@dataclass
class World:
    """A problem made real.

    Attributes:
        clean: the data before garbage: what the reference reads.
        td: the data that the loss reads.
        mask: ``[*S]``; active: per head ``[*S]``, action masks that forbid everything included.
        behaviour: per head the parameters of the policy that collected the data.
        weights: of all heads and the critic.
    """

    problem: Problem
    nets: list[HeadNet]
    critic: nn.Linear
    actor: Any
    clean: TensorDict
    td: TensorDict
    mask: Tensor
    active: list[Tensor]
    behaviour: list[dict[str, Tensor]]
    weights: list[Tensor]

    def params(self) -> list[dict[str, Tensor]]:
        """The current policy's parameters, per head."""
        return parameters(self.problem, self.nets, self.clean)


def parameters(
    problem: Problem, nets: Sequence[HeadNet], td: TensorDict
) -> list[dict[str, Tensor]]:
    made = []
    for i, net in enumerate(nets):
        rest = [td[problem.action(0)]] if net.conditioned else []
        rest += [td[problem.key(f"mask{i}")]] if net.masked else []
        with torch.no_grad():
            made.append(net.params(td[problem.key("observation")], *rest))
    return made


def build(problem: Problem) -> World:
    """The policy, its rollout, weights moved after it, and garbage where nothing counts."""
    torch.manual_seed(problem.seed)
    sequence = problem.make == "sequence"
    nets = [HeadNet(h, conditioned=sequence and i > 0) for i, h in enumerate(problem.heads)]
    critic = nn.Linear(OBS, 1, dtype=F64)
    actor = make_actor(problem, nets)
    entries = {"observation": torch.randn(*problem.sample, OBS, dtype=F64)}
    for name in ("advantage", "value_target", "state_value"):
        entries[name] = torch.randn(*problem.sample, 1, dtype=F64)
    for i, net in enumerate(nets):
        if net.masked:
            allowed = torch.rand(*problem.sample, net.head.n + 1) < 0.7
            allowed[..., 0] |= ~allowed.any(-1)
            entries[f"mask{i}"] = allowed
    td = TensorDict(entries, problem.sample)
    if problem.group:
        td = TensorDict({problem.group[0]: td}, problem.root)
    with torch.no_grad():
        actor(td)
        behaviour = parameters(problem, nets, td)
        for module in (*nets, critic):
            for p in module.parameters():
                p.add_(0.15 * torch.randn_like(p))
    mask = torch.ones(problem.sample, dtype=torch.bool)
    if problem.mask == "root":
        mask = (torch.rand(problem.root) < 0.7).unsqueeze(-1).expand(problem.sample)
    elif problem.mask is not None:
        mask = torch.rand(problem.sample) < 0.7
    active = [torch.ones_like(mask) for _ in nets]
    for i in problem.active:
        active[i] = torch.rand(problem.sample) < 0.7
    switched = list(active)
    if problem.spare:
        for i, net in enumerate(nets):
            if net.masked:
                playable = torch.rand(problem.sample) < 0.7
                for key in (problem.key(f"mask{i}"), (*problem.parameters(i), "mask")):
                    td[bare(as_path(key))] &= playable.unsqueeze(-1)
                active[i] = active[i] & playable
    modules = [*nets, *([critic] if problem.critic else [])]
    weights = [p for module in modules for p in module.parameters()]
    world = World(problem, nets, critic, actor, td, td.clone(), mask, active, behaviour, weights)
    place_log_probs(world)
    spoil(world)
    place_masks(world, switched)
    return world


def as_path(key: Any) -> Path:
    return (key,) if isinstance(key, str) else tuple(key)


def log_prob_key(problem: Problem, td: TensorDictBase, i: int) -> Any:
    """The key under which the actor wrote the log-prob of a head."""
    path = problem.heads[i].path
    own = problem.key(*path[:-1], f"{path[-1]}_log_prob")
    # a composite inside a composite suffixes the names above, too
    levels = [
        problem.key(*path[:k], *(f"{name}_log_prob" for name in path[k:])) for k in range(len(path))
    ]
    keys = td.keys(include_nested=True, leaves_only=True)
    return next(key for key in (own, *levels) if key in keys)


def place_log_probs(world: World) -> None:
    """Leaves the behaviour log-prob where ``problem.source`` says, and nowhere else it is read."""
    problem, td = world.problem, world.td
    ndim = len(problem.sample)
    keys = [log_prob_key(problem, td, i) for i in range(len(problem.heads))]
    if problem.source == "joint":
        heads = [x.flatten(ndim).sum(-1) if x.ndim > ndim else x for x in (td[k] for k in keys)]
        pairs = zip(heads, world.active, strict=True)
        td[problem.key("sample_log_prob")] = sum(torch.where(on, x, 0.0) for x, on in pairs)
    for i, key in enumerate(keys):
        if problem.source == "params" and problem.forced:
            td[key] = td[key] - 1  # there, but not to be read
        elif problem.source in ("joint", "params") or (problem.source == "some" and i % 2):
            del td[key]
    if problem.source == "stored" and problem.forced and problem.loss != "klpen":
        for i, net in enumerate(world.nets):
            for name in net.names():
                del td[bare((*problem.parameters(i), name))]


def spoil(world: World) -> None:
    """Garbage in every entry of a masked row, and in what an inactive head stored."""
    problem = world.problem
    for i, active in enumerate(world.active):
        own = head_entries(world, i)
        world.td = poison(world.td, active, problem.garbage, keys=own)
    world.td = poison(world.td, world.mask, problem.garbage)


def head_entries(world: World, i: int) -> list[Any]:
    """The keys of what a head alone stores and reads."""
    problem, td = world.problem, world.td
    keys = [log_prob_key(problem, world.clean, i)]
    keys += [bare((*problem.parameters(i), name)) for name in world.nets[i].names()]
    if not any(net.conditioned for net in world.nets) or i > 0:
        keys.append(problem.action(i))
    present = td.keys(include_nested=True, leaves_only=True)
    return [key for key in keys if key in present]


def mask_key(problem: Problem) -> Any:
    """Where the row mask lies, in one of the ways that a loss can be told about."""
    if problem.mask == "collector":
        return ("collector", "mask")
    if problem.mask == "shifted":
        return "shifted_valid"
    return "valid" if problem.mask == "root" else problem.key("valid")


def place_masks(world: World, switched: Sequence[Tensor]) -> None:
    """Stores the masks, some with a trailing singleton."""
    problem, td, mask = world.problem, world.td, world.mask
    for i in problem.active:
        td[problem.key(f"on{i}")] = switched[i].unsqueeze(-1) if i % 2 else switched[i]
    if problem.mask == "root":
        td["valid"] = mask[..., 0]
    elif problem.mask is not None:
        last = problem.mask in ("agent1", "shifted")
        td[mask_key(problem)] = mask.unsqueeze(-1) if last else mask


def rekeyed(world: World, order: Sequence[int], paths: Sequence[Path], make: str) -> World:
    """The same policy and data, heads in another order and under other keys."""
    old, td = world.problem, world.td
    options = dict(old.options)
    for name, value in options.items():
        if isinstance(value, dict):
            options[name] = {j: value[i] for j, i in enumerate(order) if i in value}
    made = [replace(old.heads[i], path=path) for i, path in zip(order, paths, strict=True)]
    switched = tuple(j for j, i in enumerate(order) if i in old.active)
    new = replace(old, heads=tuple(made), make=make, active=switched, options=options)
    nets = [world.nets[i] for i in order]
    moved: dict[Any, Any] = {}  # new key -> old key
    for j, (i, path) in enumerate(zip(order, paths, strict=True)):
        moved[new.action(j)] = old.action(i)
        moved[new.key(*path[:-1], f"{path[-1]}_log_prob")] = log_prob_key(old, world.clean, i)
        for name in nets[j].names():
            moved[bare((*new.parameters(j), name))] = bare((*old.parameters(i), name))
        for name in ("mask", "on"):
            moved[new.key(f"{name}{j}")] = old.key(f"{name}{i}")
    present = set(td.keys(include_nested=True, leaves_only=True))
    target = td.exclude(*moved.values())
    for key, before in moved.items():
        if before in present:
            target[key] = td[before]
    active = [world.active[i] for i in order]
    behaviour = [world.behaviour[i] for i in order]
    return replace(
        world,
        problem=new,
        nets=nets,
        actor=make_actor(new, nets),
        td=target,
        active=active,
        behaviour=behaviour,
    )


def make_loss(world: World, **extra: Any) -> Any:
    """The loss that the problem names, with its options and keys."""
    problem, options = world.problem, world.problem.options
    critic = TensorDictModule(
        world.critic, [problem.key("observation")], [problem.key("state_value")]
    )
    networks = (world.actor, critic if problem.critic else None)
    source = problem.source if problem.forced and problem.source in ("stored", "params") else "auto"
    common = {"log_prob_source": source, **extra}
    coeff = options["entropy"]
    if isinstance(coeff, dict):
        coeff = {spelled(problem, i, options["spelling"]): x for i, x in coeff.items()}
    clip = {
        name: options.get(name) for name in ("ratio", "mix", "dual_clip", "eps", "head_weights")
    }
    for name in ("eps", "head_weights"):
        if isinstance(clip[name], dict):
            how = "name" if options["spelling"] == "name" else "action"
            clip[name] = {spelled(problem, i, how): x for i, x in clip[name].items()}
    if problem.loss == "policy":
        loss = cl.PolicyLoss(
            *networks,
            surrogate=cl.Clip(clip.pop("eps"), **clip),
            value=cl.ValueTerm(options["kind"], coeff=options["coeff"], clip=options["value_clip"]),
            entropy=cl.EntropyTerm(coeff),
            advantage=cl.AdvantageNorm(per_agent=options["norm"] == "agent")
            if options["norm"]
            else None,
            **common,
        )
    else:
        common |= {"entropy_coeff": coeff, "loss_critic_type": options["kind"]}
        common |= {"clip_value": options["value_clip"]}
        if problem.loss != "reinforce" and problem.critic:
            common["critic_coeff"] = options["coeff"]
        if options["norm"]:
            common["normalize_advantage"] = True
        if problem.loss == "clip":
            common |= {"clip_epsilon": clip.pop("eps"), **clip}
        if problem.loss == "klpen":
            common["beta"] = options["beta"]
        loss = DOOR[problem.loss](*networks, **common)
    names = ("advantage", "value_target", "reward", "done", "terminated")
    loss.set_keys(value=problem.key("state_value"), **{n: problem.key(n) for n in names})
    loss.set_keys(head_active={problem.names()[i]: problem.key(f"on{i}") for i in problem.active})
    if problem.mask == "key":
        loss.loss_mask_key = mask_key(problem)
    elif problem.mask in ("agent", "agent1", "root"):
        loss.set_keys(agent_mask=mask_key(problem))
    return loss.double()  # its coefficients; the networks are double already


DOOR = {
    "clip": cl.ClipPPOLoss,
    "ppo": cl.PPOLoss,
    "klpen": cl.KLPENPPOLoss,
    "a2c": cl.A2CLoss,
    "reinforce": cl.ReinforceLoss,
}


def spelled(problem: Problem, i: int, how: str) -> Any:
    """One of the keys that a mapping by head understands."""
    if how == "name":
        return problem.names()[i]
    path = problem.heads[i].path
    return problem.key(*path[:-1], path[-1] + ("" if how == "action" else f"_{how}"))
