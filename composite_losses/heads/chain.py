"""The behaviour log-prob: stored → joint → rebuilt from stored parameters → a clear error.

The current network is never asked: a behaviour log-prob computed from it would make every ratio 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor, nn

from composite_losses.errors import ConfigError, GraphError, MissingKeyError
from composite_losses.heads.actor import ActorProgram
from composite_losses.heads.keys import key_list, listing, read, read_tensor
from composite_losses.heads.plan import Head, HeadPlan, compile_plan
from composite_losses.heads.shapes import fit_action
from composite_losses.heads.terms import Terms

Source = Literal["auto", "stored", "params"]
SOURCES = ("auto", "stored", "params")
JOINT = "sample_log_prob"


@dataclass
class Behaviour:
    """The behaviour log-prob as it was found.

    Attributes:
        sources: head name → ``"stored"``, ``"joint"`` or ``"params"``.
        stored: per head the tensor as stored, or None.
        joint: one log-prob for all heads, or None.
        keys: per head the key it was found under (the action key where it is rebuilt).
        rebuilt: per head the terms from stored parameters, or None.
    """

    sources: dict[str, str] = field(default_factory=dict)
    stored: list[Tensor | None] = field(default_factory=list)
    joint: Tensor | None = None
    joint_key: NestedKey | None = None
    keys: list[NestedKey] = field(default_factory=list)
    rebuilt: list[Terms | None] = field(default_factory=list)


def check_source(source: str) -> None:
    """Raises ConfigError unless ``source`` is one of the three words of the chain."""
    if source not in SOURCES:
        raise ConfigError(f"log_prob_source: expected one of {SOURCES}, found {source!r}.")


def detached(key: NestedKey, value: Tensor) -> Tensor:
    """Returns a stored entry, which must not carry a graph.

    Raises:
        GraphError: the entry requires grad.
    """
    if value.requires_grad:
        raise GraphError(
            f"tensordict stored {key} requires grad. What the behaviour policy stored is data: "
            "collect under torch.no_grad(), or detach the entry."
        )
    return value


def find(
    program: ActorProgram,
    plan: HeadPlan,
    td: TensorDictBase,
    *,
    source: str = "auto",
    joint_ok: bool = False,
    parameters: TensorDictBase | None = None,
) -> Behaviour:
    """Returns the behaviour log-prob of every head, by the chain.

    Args:
        program: the actor.
        plan: the head plan.
        td: the data; nothing is written.
        source: ``"auto"``, or ``"stored"`` / ``"params"`` to force one kind.
        joint_ok: whether one log-prob for all heads serves.
        parameters: where the stored parameters are read, if not from ``td``.

    Raises:
        MissingKeyError: a head for which every step fails.
        GraphError: an entry that is used requires grad.
    """
    out = Behaviour()
    n = len(plan.heads)
    out.stored, out.rebuilt = [None] * n, [None] * n
    out.keys = [head.action for head in plan.heads]
    if source != "params":
        for i, head in enumerate(plan.heads):
            for key in head.log_probs:
                value = read_tensor(td, key)
                if value is not None:
                    out.stored[i], out.keys[i] = detached(key, value), key
                    out.sources[head.name] = "stored"
                    break
        if not out.sources and joint_ok:
            for key in plan.joint:
                value = read_tensor(td, key)
                if value is not None:
                    out.joint, out.joint_key = detached(key, value), key
                    out.sources = dict.fromkeys(plan.names, "joint")
                    return out
    for i, head in enumerate(plan.heads):
        if head.name in out.sources:
            continue
        if source != "stored":
            where = td if parameters is None else parameters
            _refuse_graph(program, where)
            with torch.no_grad():
                out.rebuilt[i] = program.rebuild(where, head.slot)
        if out.rebuilt[i] is None:
            raise _missing(program, plan, head, td, source, joint_ok)
        out.sources[head.name] = "params"
    return out


def _refuse_graph(program: ActorProgram, td: TensorDictBase) -> None:
    """Raises GraphError where a stored distribution parameter carries a graph."""
    for key in program.parameter_keys:
        value = read(td, key)
        if isinstance(value, Tensor):
            detached(key, value)
        elif isinstance(value, TensorDictBase):
            for inner, leaf in value.items(include_nested=True, leaves_only=True):
                detached((key, inner), leaf)


def _missing(
    program: ActorProgram,
    plan: HeadPlan,
    head: Head,
    td: TensorDictBase,
    source: str,
    joint_ok: bool,
) -> MissingKeyError:
    """Returns the error that names everything that was tried for a head."""
    tried = []
    if source != "params":
        tried.append(f"stored: {', '.join(map(repr, head.log_probs))}")
        if joint_ok and plan.joint:
            tried.append(f"joint: {', '.join(map(repr, plan.joint))}")
        elif plan.joint:
            tried.append("joint: not enough here, log-probs per head are needed")
    if source != "stored":
        keys = program.parameter_keys
        tried.append(
            f"params: {', '.join(map(repr, keys))} (distribution parameters of {head.slot!r})"
            if keys
            else "params: this actor declares no distribution parameters"
        )
    return MissingKeyError(
        f"head {head.name!r}: no behaviour log-prob found (log_prob_source={source!r}). "
        f"Tried {'; '.join(tried)}. Keys present: {listing(td)}. Fix: build the actor with "
        "return_log_prob=True, or keep the distribution's parameter keys in the data, or name the "
        "entry with set_keys(sample_log_prob=...)."
    )


def stored_action(td: TensorDictBase, head: Head, known: NestedKey | None = None) -> Tensor:
    """Returns the stored action of a head; its column where several heads are stacked.

    Args:
        td: the data.
        head: the head.
        known: the key by which the user knows a stored action with a graph; the head's by default.

    Raises:
        MissingKeyError: no entry under the head's action key.
        ConfigError: a stacked entry without that column.
        GraphError: the entry requires grad.
    """
    action = read_tensor(td, head.action)
    if action is None:
        raise MissingKeyError(
            f"head {head.name!r}: no action under {head.action!r}. Keys present: {listing(td)}. "
            "Fix: give the actor a name_map that writes the action there, or name it with "
            "set_keys(action=...)."
        )
    detached(head.action if known is None else known, action)
    if head.column is None:
        return action
    if action.ndim == 0 or not -action.shape[-1] <= head.column < action.shape[-1]:
        raise ConfigError(
            f"head {head.name!r}: the stacked action {head.action!r} has shape "
            f"{list(action.shape)}, no column {head.column}."
        )
    return action[..., head.column]


def resolve_log_probs(
    actor: nn.Module,
    td: TensorDictBase,
    *,
    source: Source = "auto",
    log_prob_keys: NestedKey | Sequence[NestedKey] | None = None,
) -> tuple[TensorDict, dict[str, str]]:
    """Returns the behaviour log-probs that the data hold, and where each was found.

    No network runs and nothing is written. A log-prob rebuilt from stored parameters scores the
    stored action under ``no_grad``, in float32 or float64.

    Args:
        actor: any policy with TensorDict's probabilistic interface.
        td: data of any batch size.
        source: ``"auto"`` (stored, else joint, else params), ``"stored"`` or ``"params"``.
        log_prob_keys: key(s) of the stored log-prob, as in ``set_keys(sample_log_prob=...)``.

    Returns:
        A TensorDict nested like the action keys, one entry in nats per head in its
        distribution's batch shape (a joint log-prob under ``"sample_log_prob"``), and a dict
        head name → ``"stored" | "joint" | "params"``.

    Raises:
        MissingKeyError: names the head, everything tried, what is present, and the fix.
        GraphError: a stored entry requires grad.
    """
    check_source(source)
    program = ActorProgram(actor)
    if not program.settled:
        with torch.no_grad():
            program.discover(td)
    plan = compile_plan(
        program.slots,
        program.joint,
        log_prob=None if log_prob_keys is None else _one_or_list(log_prob_keys),
    )
    found = find(program, plan, td, source=source, joint_ok=True)
    return as_tensordict(found, plan, td), found.sources


def _one_or_list(keys: NestedKey | Sequence[NestedKey]) -> NestedKey | list[NestedKey]:
    """Returns one key as itself and several as a list."""
    listed = key_list(keys)
    return listed[0] if len(listed) == 1 else listed


def as_tensordict(found: Behaviour, plan: HeadPlan, td: TensorDictBase) -> TensorDict:
    """Returns the behaviour log-probs nested like the action keys, detached."""
    out = TensorDict({}, batch_size=td.batch_size)
    if found.joint is not None:
        out.set(JOINT, found.joint.detach())
        return out
    for i, head in enumerate(plan.heads):
        value = found.stored[i]
        terms = found.rebuilt[i]
        if value is None and terms is not None:
            with torch.no_grad():
                action = stored_action(td, head)
                value = terms.log_prob(
                    fit_action(action, terms.batch_shape, terms.event_shape, key=head.action)
                )
        if value is not None:
            out.set(head.slot if head.column is not None else head.action, value.detach())
    return out
