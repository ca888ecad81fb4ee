"""Why the ratio is not 1 on fresh data: ``diagnose``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor, nn

from composite_losses import functional as F
from composite_losses.heads import Behaviour, Scratch, Terms, find
from composite_losses.heads.blocks import blocks
from composite_losses.heads.categorical import CategoricalTerms
from composite_losses.heads.keys import path, read
from composite_losses.heads.shapes import shown
from composite_losses.heads.terms import HALF
from composite_losses.losses._base import BaseLoss
from composite_losses.losses._checks import Pairs, changed_mask, compared, count_rows
from composite_losses.losses._frame import Frame
from composite_losses.losses._networks import draws_random
from composite_losses.losses._torchrl import loss_context

# what float32 arithmetic in another order may leave
TOLERANCE = 1e-4


@dataclass
class Diagnosis:
    """What ``diagnose`` found.

    Attributes:
        sources: head → ``"stored"``, ``"joint"`` or ``"params"``.
        max_abs_log_ratio: head → largest |log π − log π_behaviour| in nats over the rows that count
            (for a joint log-prob one value, under every head).
        non_finite: head → number of rows that count whose behaviour or current log-prob is not
            finite.
        masked_fraction: fraction of the rows that do not count, in [0, 1].
        reasons: sentences; empty when all is well.
        heads: head → (action key, action shape, log-prob key, log-prob shape), for reading.

    Source: definition.
    """

    sources: dict[str, str]
    max_abs_log_ratio: dict[str, float]
    non_finite: dict[str, int]
    masked_fraction: float
    reasons: list[str] = field(default_factory=list)
    heads: dict[str, tuple[NestedKey, str, NestedKey | None, str]] = field(default_factory=dict)

    def __str__(self) -> str:
        """Returns a readable report with heads, keys and shapes."""
        lines = [f"{'head':<14} {'source':<8} {'max|log r|':>11} {'non-finite':>10}  entries"]
        for name, source in self.sources.items():
            action, action_shape, key, shape = self.heads[name]
            entries = f"action {action!r} {action_shape}, log-prob {key!r} {shape}"
            lines.append(
                f"{name:<14} {source:<8} {self.max_abs_log_ratio[name]:>11.3g} "
                f"{self.non_finite[name]:>10d}  {entries}"
            )
        lines.append(f"masked rows: {self.masked_fraction:.1%}")
        if self.reasons:
            lines += ["what is wrong:", *(f"  - {reason}" for reason in self.reasons)]
        else:
            lines.append("all is well: the current policy is the behaviour policy of these data")
        return "\n".join(lines)


def diagnose(loss: BaseLoss, tensordict: TensorDictBase) -> Diagnosis:
    """Returns where the behaviour log-probs come from and why the ratio is not 1, if it is not.

    Meant for fresh data, before the first update. Needs no advantage; reads values back from the
    device; the data and the loss stay unchanged. Runs under recurrent mode and deterministic
    exploration, as ``forward`` does.

    Args:
        loss: any loss of this library.
        tensordict: data as the loss would get them, of any batch size ``[*B]``.

    Raises:
        MissingKeyError: no behaviour log-prob can be found for a head.

    Source: definition; log-ratios are in nats.
    """
    loss._settle(tensordict)
    with torch.no_grad(), loss_context(loss), unchanged_buffers(loss):
        td = Scratch(tensordict)
        frame = loss._frame(td, loss._stored_advantage(td))
        loss._neutralise(td, frame, for_advantage=False)
        terms = loss._run_actor(td)
        active = loss._active(frame, terms)
        parameters = loss._blended_parameters(tensordict, td, frame, active)
        behaviour = find(
            loss._program,
            loss._plan,
            tensordict,
            source=loss.source,
            joint_ok=not loss.surrogate.uses_heads,
            parameters=parameters,
        )
        actions = loss._actions(tensordict, terms)
        inside = [_inside(t, a) for t, a in zip(terms, actions, strict=True)]
        parts = blocks(terms, len(frame.sample))
        now, old = loss._aligned(frame, parts, behaviour, inside, active, frame.mask)
        gaps = _gaps(behaviour, now, old)
        report = _measured(loss, tensordict, frame, behaviour, now, old, gaps, active)
        off = _beyond(report, TOLERANCE)
        rounded = list(_half_reasons(loss, behaviour, old))
        if off and rounded:
            off = _beyond(report, 2**-7 * float(F.masked_max(old.abs())) if old is not None else 0)
            report.reasons += rounded
        reasons = report.reasons
        outside = [
            count_rows(~term.contains(action), frame, active, i)
            for i, (term, action) in enumerate(zip(terms, actions, strict=True))
        ]
        reasons += _support_reasons(loss, terms, outside)
        if off:
            pairs = [compared(loss._program, h, tensordict, td) for h in loss._plan.heads]
            reasons += _random_reasons(loss.actor_network)
            reasons += _clipping_reasons(loss, frame, terms, actions, gaps)
            reasons += _key_reasons(loss, behaviour, terms, tensordict, now, old)
            # an action mask that forbids stored actions is named already
            known = {i for i, term in enumerate(terms) if outside[i] and _allowed(term) is not None}
            looked = [i for i, h in enumerate(loss._plan.heads) if h.name in off and i not in known]
            changed = {
                i: changed_mask(loss._plan.heads[i], frame, terms[i], active, i, pairs[i])
                for i in looked
                if pairs[i]
            }
            reasons += [reason for found, _ in changed.values() for reason in found]
            same = [i for i, (_, equal) in changed.items() if equal]
            # one log-prob for all heads: equal parameters of one explain nothing
            if behaviour.joint is None or len(same) == len(terms):
                reasons += [_same_parameters(loss, i, pairs[i], tensordict) for i in same]
            if not reasons:
                reasons.append(_unexplained(loss, report, terms, pairs))
    return report


@contextmanager
def unchanged_buffers(loss: BaseLoss) -> Iterator[None]:
    """Context that ends with the buffers (running statistics) as they were at its start."""
    networks = (loss.actor_network, loss.actor_network_params)
    buffers = [b for m in networks if m is not None for b in m.buffers()]
    before = [b.clone() for b in buffers]
    try:
        yield
    finally:
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)


def _inside(term: Terms, action: Tensor) -> Tensor:
    """Returns the action, a neutral one where a categorical head has no such class."""
    if not isinstance(term, CategoricalTerms) or term.one_hot:
        return action
    return action.clamp(0, term.classes - 1)


def _gaps(behaviour: Behaviour, now: Tensor, old: Tensor | None) -> list[Tensor]:
    """Returns log π − log π_behaviour of every head, ``[*S]``; the joint one for each."""
    if old is None:
        old = now
    if behaviour.joint is None:
        return list((now - old).unbind(-1))
    return [now.sum(-1) - old.squeeze(-1)] * now.shape[-1]


def _beyond(report: Diagnosis, limit: float) -> set[str]:
    """Returns the heads whose log-ratio exceeds the limit."""
    return {name for name, gap in report.max_abs_log_ratio.items() if not gap <= limit}


def _measured(
    loss: BaseLoss,
    td: TensorDictBase,
    frame: Frame,
    behaviour: Behaviour,
    now: Tensor,
    old: Tensor | None,
    gaps: list[Tensor],
    active: Tensor | None,
) -> Diagnosis:
    """Returns the report with its numbers."""
    n = now.shape[-1]
    rows = torch.ones(frame.sample, dtype=torch.bool, device=now.device)
    if frame.mask is not None:
        rows = frame.mask
    valid = rows.unsqueeze(-1).expand_as(now) if active is None else active & rows.unsqueeze(-1)
    if old is None:
        old = now
    joint = behaviour.joint is not None
    both = [now[..., i].isfinite() & old[..., 0 if joint else i].isfinite() for i in range(n)]
    ratios, broken, heads = {}, {}, {}
    for i, head in enumerate(loss._plan.heads):
        mask = rows if joint else valid[..., i]
        ratios[head.name] = _largest(gaps[i], mask & both[i])
        broken[head.name] = int((~both[i] & mask).sum())
        action = read(td, head.action)
        key = behaviour.joint_key if joint else behaviour.keys[i]
        stored = behaviour.joint if joint else behaviour.stored[i]
        shape = "rebuilt from stored parameters" if stored is None else shown(stored.shape)
        where = shown(action.shape) if isinstance(action, Tensor) else "?"
        heads[head.name] = (head.action, where, key, shape)
    masked = float((~rows).sum()) / max(rows.numel(), 1)
    reasons = [
        f"head {name!r}: {count} row(s) that count have a log-prob that is not finite."
        for name, count in broken.items()
        if count
    ]
    return Diagnosis(dict(behaviour.sources), ratios, broken, masked, reasons, heads)


def _largest(x: Tensor, mask: Tensor) -> float:
    """Returns the largest |x| over the mask; 0 where it is empty."""
    value = F.masked_max(x.abs(), mask)
    return float(value)


def _half_reasons(loss: BaseLoss, behaviour: Behaviour, old: Tensor | None) -> Iterator[str]:
    """Yields stored log-probs in half precision, whose rounding alone moves the ratio."""
    for head, key, stored in zip(loss._plan.heads, behaviour.keys, behaviour.stored, strict=True):
        if stored is not None and stored.dtype in HALF:
            yield (
                f"head {head.name!r}: the stored log-prob {key!r} is {stored.dtype}: its rounding "
                "moves the ratio. Store log-probs in float32."
            )


def _random_reasons(actor: nn.Module) -> Iterator[str]:
    """Yields modules in train mode that draw random numbers or use batch statistics."""
    for name, module in actor.named_modules():
        if not module.training:
            continue
        if draws_random(module):
            yield (
                f"module {name!r} ({type(module).__name__}) is in train mode and draws random "
                "numbers (dropout): the network that scores is not the one that acted. Call "
                "loss.eval()."
            )
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            yield (
                f"module {name!r} ({type(module).__name__}) is in train mode and uses batch "
                "statistics, which differ between collection and update. Call loss.eval()."
            )


def _allowed(term: Terms) -> Tensor | None:
    """Returns a head's action mask, or None where it has none."""
    return term.allowed if isinstance(term, CategoricalTerms) else None


def _support_reasons(loss: BaseLoss, terms: list[Terms], outside: list[int]) -> Iterator[str]:
    """Yields actions outside their support, and actions that an action mask forbids."""
    for head, term, count in zip(loss._plan.heads, terms, outside, strict=True):
        if count and _allowed(term) is not None:
            yield (
                f"head {head.name!r}: its action mask forbids {count} stored action(s) under "
                f"{head.action!r}: the mask in the data is not the one the policy acted with."
            )
        elif count:
            yield (
                f"head {head.name!r}: {count} stored action(s) under {head.action!r} lie outside "
                "the distribution's support."
            )


def _clipping_reasons(
    loss: BaseLoss, frame: Frame, terms: list[Terms], actions: list[Tensor], gaps: list[Tensor]
) -> Iterator[str]:
    """Yields heads whose continuous actions pile up at their bounds, where the ratio is not 1.

    A sample that its own distribution rounds to a bound keeps its log-prob.
    """
    for i, head in enumerate(loss._plan.heads):
        action = actions[i]
        if not action.dtype.is_floating_point or terms[i].discrete:
            continue
        mask = frame.head_mask(i)
        gap = gaps[i].reshape(gaps[i].shape + (1,) * (action.ndim - gaps[i].ndim))
        differs = ~(gap.expand(action.shape).abs() <= TOLERANCE)
        width = action.shape[-1] if terms[i].event_shape else 1
        flat = (action if mask is None else action[mask]).reshape(-1, width)
        differs = (differs if mask is None else differs[mask]).reshape(-1, width)
        if flat.shape[0] == 0:
            continue
        low, high = flat.amin(0, keepdim=True), flat.amax(0, keepdim=True)
        at_low, at_high = flat == low, flat == high
        spread = low != high
        # a continuous sample hardly ever repeats its own extreme
        at_bound = (at_low & spread & (at_low.sum(0) > 1)) | (
            at_high & spread & (at_high.sum(0) > 1)
        )
        bounds = terms[i].bounds
        if bounds is not None:
            at_bound = at_bound | (flat <= bounds[0]) | (flat >= bounds[1])
        count = int((at_bound & differs).sum())
        if count:
            yield (
                f"head {head.name!r}: {count} value(s) of {head.action!r} sit exactly at their "
                "bounds: the stored action was clipped after it was sampled. Store the sampled "
                "action and let the environment clip its own copy."
            )


def _key_reasons(
    loss: BaseLoss,
    behaviour: Behaviour,
    terms: list[Terms],
    td: TensorDictBase,
    now: Tensor,
    old: Tensor | None,
) -> Iterator[str]:
    """Yields log-prob entries that look like something else, and better candidates."""
    if old is None or behaviour.joint is not None:
        return
    for i, head in enumerate(loss._plan.heads):
        if behaviour.stored[i] is None:
            continue
        if float((now[..., i] - old[..., i]).abs().amax() if now.numel() else 0.0) <= TOLERANCE:
            continue
        key = behaviour.keys[i]
        for other, value in td.items(include_nested=True, leaves_only=True):
            if path(other) == path(key) or not isinstance(value, Tensor):
                continue
            value = value.squeeze(-1) if value.shape == (*now.shape[:-1], 1) else value
            if value.shape != now.shape[:-1] or not value.dtype.is_floating_point:
                continue
            if now.numel() and bool(((value - now[..., i]).abs() <= TOLERANCE).all()):
                yield (
                    f"head {head.name!r}: key {key!r} looks wrong: {other!r} holds exactly the "
                    "log-prob of the current policy. Set it with set_keys(sample_log_prob=...)."
                )
                break
        else:
            stored = old[..., i]
            discrete = isinstance(terms[i], CategoricalTerms)
            if discrete and bool((stored > TOLERANCE).any()):
                yield (
                    f"head {head.name!r}: key {key!r} looks wrong: it holds positive values, "
                    "which no discrete log-prob has (probabilities, or another quantity?)."
                )


def _same_parameters(loss: BaseLoss, position: int, pairs: Pairs, td: TensorDictBase) -> str:
    """Returns what may be wrong where the parameters are equal and the log-probs are not."""
    head, program = loss._plan.heads[position], loss._program
    inputs = [path(key) for key in program.input_keys]
    masks = [
        f"the action mask {key!r} in the data is not the one that the policy acted with, "
        for key in program.keys_of(head.slot)
        if path(key) in inputs and getattr(read(td, key), "dtype", None) == torch.bool
    ]
    return (
        f"head {head.name!r}: the stored parameters {', '.join(map(repr, pairs))} equal the "
        f"current ones, yet the log-probs differ: {''.join(masks)}the action or the log-prob entry "
        "does not belong to these parameters, or the parameters were overwritten by the current "
        "policy."
    )


def _unexplained(loss: BaseLoss, report: Diagnosis, terms: list[Terms], pairs: list[Pairs]) -> str:
    """Returns what is left where log-probs differ and nothing shows why."""
    gaps = report.max_abs_log_ratio
    worst = max(gaps, key=lambda name: gaps[name])
    unseen = any(_allowed(t) is not None and not p for t, p in zip(terms, pairs, strict=True))
    return (
        f"head {worst!r}: the current log-prob differs from the behaviour one by up to "
        f"{gaps[worst]:.3g} nats: the weights have moved since the data were collected, another "
        "policy collected them, or an entry that the actor reads was changed"
        f"{' (the action mask, for example)' if unseen else ''}."
    )
