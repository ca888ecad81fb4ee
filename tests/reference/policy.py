"""A policy loss, one row and one head at a time: plain numbers, written after its definition."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.reference.functional import (
    Numbers,
    clipped,
    effective_sample_size,
    explained_variance,
    leafwise,
    moments,
)


@dataclass
class Row:
    """One sample.

    Attributes:
        log_prob: of the stored action under the current policy, per head.
        behaviour: under the policy that collected it, per head; ``None`` if only joint.
        joint: the behaviour policy's log-prob of all active heads together.
        entropy: of the current policy, per head.
        kl: KL(old ‖ current), per head; empty where no loss needs it.
        active: whether a head counts.
        valid: whether the row counts.
        agent: whose row it is, where statistics are kept per agent.
    """

    log_prob: list[float]
    behaviour: list[float] | None
    joint: float | None
    entropy: list[float]
    active: list[bool]
    valid: bool
    advantage: float
    value: float
    target: float
    old_value: float
    agent: int = 0
    kl: list[float] = field(default_factory=list)

    @property
    def acts(self) -> bool:
        """Whether the policy terms count: the row does, and at least one head."""
        return self.valid and any(self.active)

    def head_log_ratios(self) -> list[float]:
        """Per head, 0 (the factor 1) where it is inactive."""
        triples = zip(self.log_prob, self.behaviour, self.active, strict=True)
        return [now - old if on else 0.0 for now, old, on in triples]

    def log_ratio(self) -> float:
        """Of all heads together."""
        if self.behaviour is None:
            return self.over_heads(self.log_prob) - self.joint
        return math.fsum(self.head_log_ratios())

    def over_heads(self, numbers: Sequence[float]) -> float:
        """The sum over the heads that count."""
        return math.fsum(x for x, on in zip(numbers, self.active, strict=True) if on)


@dataclass
class Score:
    """log π(a)·A: no behaviour policy is asked."""

    def objective(self, row: Row, advantage: float) -> float:
        return row.over_heads(row.log_prob) * advantage


@dataclass
class Unclipped:
    """r·A, less ``beta`` times the KL where that is given."""

    beta: float | None = None

    def objective(self, row: Row, advantage: float) -> float:
        gain = math.exp(row.log_ratio()) * advantage
        return gain if self.beta is None else gain - self.beta * row.over_heads(row.kl)

    def clip_fraction(self, rows: Sequence[Row]) -> float:
        return 0.0

    def clips(self, h: int, log_ratio: float) -> bool:
        return False


@dataclass
class Clip:
    """The clipped objective of one row; ``low``, ``high`` and ``weights`` by head."""

    ratio: str
    low: list[float]
    high: list[float]
    mix: float = 0.5
    dual: float | None = None
    weights: list[float] = field(default_factory=list)

    def objective(self, row: Row, advantage: float) -> float:
        if self.ratio == "joint":
            return self.of_product(row, advantage)
        if self.ratio == "per_head":
            return self.of_heads(row, advantage)
        if self.ratio == "mixed":
            product, heads = self.of_product(row, advantage), self.of_heads(row, advantage)
            return self.mix * product + (1 - self.mix) * heads
        ratios = [math.exp(x) for x in row.head_log_ratios()]
        value = leafwise(ratios, advantage, self.low, self.high)
        return max(value, self.dual * advantage) if self.dual and advantage < 0 else value

    def of_product(self, row: Row, advantage: float) -> float:
        return clipped(math.exp(row.log_ratio()), advantage, self.low[0], self.high[0], self.dual)

    def of_heads(self, row: Row, advantage: float) -> float:
        total = 0.0
        for h, log_ratio in enumerate(row.head_log_ratios()):
            if row.active[h]:
                ratio = math.exp(log_ratio)
                gain = clipped(ratio, advantage, self.low[h], self.high[h], self.dual)
                total += self.weights[h] * gain
        return total

    def clips(self, h: int, log_ratio: float) -> bool:
        return not 1 - self.low[h] <= math.exp(log_ratio) <= 1 + self.high[h]

    def clip_fraction(self, rows: Sequence[Row]) -> float | None:
        """Of the joint ratio, or of active (row, head) pairs; the other geometries define none."""
        if self.ratio == "joint":
            return mean([float(self.clips(0, row.log_ratio())) for row in rows])
        if self.ratio != "per_head":
            return None
        pairs = [(row, h) for row in rows for h, on in enumerate(row.active) if on]
        return mean([float(self.clips(h, row.head_log_ratios()[h])) for row, h in pairs])


Surrogate = Score | Unclipped | Clip


def mean(numbers: Sequence[float]) -> float:
    """Of nothing: 0."""
    return math.fsum(numbers) / len(numbers) if numbers else 0.0


def normalised(rows: Sequence[Row], per_agent: bool) -> dict[int, float]:
    """Index of a row that acts -> its standardised advantage; a single one gives 0."""
    result = {}
    groups = {row.agent for row in rows} if per_agent else {None}
    for agent in groups:
        members = [i for i, r in enumerate(rows) if r.acts and agent in (None, r.agent)]
        centre, spread = moments([rows[i].advantage for i in members])
        for i in members:
            result[i] = (rows[i].advantage - centre) / max(spread, 1e-6)
    return result


def value_error(value: float, target: float, kind: str) -> float:
    distance = abs(value - target)
    if kind == "l1":
        return distance
    if kind == "l2":
        return distance**2
    return 0.5 * distance**2 if distance < 1 else distance - 0.5


def losses(
    rows: Sequence[Row],
    surrogate: Surrogate,
    *,
    entropy_coeffs: Numbers,
    critic_kind: str,
    critic_coeff: float,
    value_clip: float | None,
    advantages: Mapping[int, float] | None = None,
) -> dict[str, float]:
    """The three losses, means over the rows that count for each."""
    policy = [i for i, row in enumerate(rows) if row.acts]
    objectives = [
        surrogate.objective(rows[i], rows[i].advantage if advantages is None else advantages[i])
        for i in policy
    ]
    weighted = [[c * h for c, h in zip(entropy_coeffs, r.entropy, strict=True)] for r in rows]
    bonuses = [rows[i].over_heads(weighted[i]) for i in policy]
    errors = []
    for row in rows:
        if not row.valid:
            continue
        error = value_error(row.value, row.target, critic_kind)
        if value_clip is not None:
            change = min(max(row.value - row.old_value, -value_clip), value_clip)
            error = max(error, value_error(row.old_value + change, row.target, critic_kind))
        errors.append(critic_coeff * error)
    return {
        "loss_objective": -mean(objectives),
        "loss_entropy": -mean(bonuses),
        "loss_critic": mean(errors),
    }


def metrics(
    rows: Sequence[Row], surrogate: Surrogate, names: Sequence[str], value_clip: float | None
) -> dict[str, float]:
    """Every metric that has one definition, over the rows (and heads) that count for it."""
    policy = [row for row in rows if row.acts]
    valid = [row for row in rows if row.valid]
    result = {"entropy": mean([row.over_heads(row.entropy) for row in policy])}
    if not isinstance(surrogate, Score):
        result |= ratio_metrics(policy, surrogate)
    if isinstance(surrogate, Unclipped) and surrogate.beta is not None:
        result |= {
            "kl": mean([row.over_heads(row.kl) for row in policy]),
            "beta": surrogate.beta,
        }
    if len(valid) > 1:
        values, targets = [r.value for r in valid], [r.target for r in valid]
        result["explained_variance"] = explained_variance(values, targets)
    if value_clip is not None:
        changes = [abs(r.value - r.old_value) for r in valid]
        result["value_clip_fraction"] = mean([float(x > value_clip) for x in changes])
    joint_only = any(row.behaviour is None for row in rows)
    for h, name in enumerate(names if len(names) > 1 else ()):
        own = [row for row in policy if row.active[h]]
        result[f"entropy/{name}"] = mean([row.entropy[h] for row in own])
        if isinstance(surrogate, Score):
            continue
        logs = [] if joint_only else [row.head_log_ratios()[h] for row in own]
        clips = [float(surrogate.clips(h, x)) for x in logs]
        result[f"kl_approx/{name}"] = math.nan if joint_only else -mean(logs)
        result[f"clip_fraction/{name}"] = math.nan if joint_only else mean(clips)
    return result


def ratio_metrics(rows: Sequence[Row], surrogate: Unclipped | Clip) -> dict[str, float]:
    """Of the joint ratio, over rows that all count."""
    logs = [row.log_ratio() for row in rows]
    ratios = [math.exp(x) for x in logs]
    result = {
        "kl_approx": -mean(logs),
        "kl_k3": mean([r - 1 - x for r, x in zip(ratios, logs, strict=True)]),
        "ESS": effective_sample_size(ratios),
        "max_ratio": max(ratios, default=0.0),
        "mean_ratio": mean(ratios),
    }
    fraction = surrogate.clip_fraction(rows)
    return result if fraction is None else {**result, "clip_fraction": fraction}


def adapted(beta: float, kl: float, target: float, increment: float, decrement: float) -> float:
    """The penalty's coefficient after a call in training mode."""
    if kl > 1.5 * target:
        return beta * increment
    return beta * decrement if kl < target / 1.5 else beta
