"""Naive oracles: plain Python numbers and loops, one sample at a time."""

import math
from collections.abc import Callable, Sequence

Numbers = Sequence[float]


def moments(values: Numbers) -> tuple[float, float]:
    """Mean and unbiased standard deviation; (0, 0) of nothing, std 0 of one value."""
    if not values:
        return 0.0, 0.0
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return mean, 0.0
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))


def clipped(
    ratio: float, advantage: float, low: float, high: float, dual: float | None = None
) -> float:
    """PPO's clipped objective of one sample, from the ratio itself."""
    kept = min(max(ratio, 1 - low), 1 + high)
    objective = min(ratio * advantage, kept * advantage)
    if dual is not None and advantage < 0:
        objective = max(objective, dual * advantage)
    return objective


def corrected_clipped(
    ratio: float, correction: float, advantage: float, low: float, high: float
) -> float:
    """The same where ``ratio`` is to a proximal policy, ``correction`` = proximal / behaviour."""
    kept = min(max(ratio, 1 - low), 1 + high)
    return min(ratio * correction * advantage, kept * correction * advantage)


def per_head(
    ratios: Numbers,
    advantages: Numbers,
    low: Numbers,
    high: Numbers,
    weights: Numbers,
    active: Sequence[bool],
) -> float:
    total = 0.0
    for h, ratio in enumerate(ratios):
        if active[h]:
            total += weights[h] * clipped(ratio, advantages[h], low[h], high[h])
    return total


def leafwise(ratios: Numbers, advantage: float, low: Numbers, high: Numbers) -> float:
    product = kept = 1.0
    for h, ratio in enumerate(ratios):
        product *= ratio
        kept *= min(max(ratio, 1 - low[h]), 1 + high[h])
    return min(product * advantage, kept * advantage)


def reward_to_go(
    rewards: Numbers, dones: Sequence[bool], gamma: float, valid: Sequence[bool]
) -> list[float]:
    """For each step, the sum from there until the trajectory, or its valid part, ends."""
    result = []
    for start in range(len(rewards)):
        total, discount = 0.0, 1.0
        for step in range(start, len(rewards)):
            if not valid[step]:
                break
            total += discount * rewards[step]
            discount *= gamma
            if dones[step]:
                break
        result.append(total)
    return result


def leave_one_out(returns: Sequence[Numbers], valid: Sequence[Sequence[bool]]) -> list[list[float]]:
    """``returns[i][t]``: mean of the other trajectories valid at t, else 0."""
    result = []
    for i, row in enumerate(returns):
        others_row = []
        for t in range(len(row)):
            others = [returns[j][t] for j in range(len(returns)) if j != i and valid[j][t]]
            others_row.append(math.fsum(others) / len(others) if others else 0.0)
        result.append(others_row)
    return result


def effective_sample_size(ratios: Numbers) -> float:
    if not ratios:
        return 0.0
    return math.fsum(ratios) ** 2 / math.fsum(w * w for w in ratios) / len(ratios)


def explained_variance(values: Numbers, targets: Numbers) -> float:
    def variance(numbers: Numbers) -> float:
        mean = math.fsum(numbers) / len(numbers)
        return math.fsum((n - mean) ** 2 for n in numbers) / len(numbers)

    residual = [t - v for v, t in zip(values, targets, strict=True)]
    return 1 - variance(residual) / variance(targets)


def categorical_log_prob(logits: Numbers, index: int, allowed: Sequence[bool]) -> float:
    top = max(x for x, ok in zip(logits, allowed, strict=True) if ok)
    total = math.fsum(math.exp(x - top) for x, ok in zip(logits, allowed, strict=True) if ok)
    return logits[index] - top - math.log(total)


def integral(
    function: Callable[[float], float], low: float, high: float, steps: int = 20_000
) -> float:
    """Composite Simpson rule."""
    width = (high - low) / steps
    inner = math.fsum(function(low + i * width) * (4 if i % 2 else 2) for i in range(1, steps))
    return (function(low) + inner + function(high)) * width / 3


def normal_density(x: float, loc: float, scale: float) -> float:
    return math.exp(-0.5 * ((x - loc) / scale) ** 2) / (scale * math.sqrt(2 * math.pi))


def tanh_normal_entropy(loc: float, scale: float, low: float, high: float) -> float:
    """``H(X) + E[log dy/dx]``, ``y = low + (high - low)(tanh x + 1) / 2``."""

    def weighted_log_slope(x: float) -> float:
        log_cosh = abs(x) + math.log1p(math.exp(-2 * abs(x))) - math.log(2)
        return normal_density(x, loc, scale) * (-2 * log_cosh)

    expected = integral(weighted_log_slope, loc - 10 * scale, loc + 10 * scale, steps=2_000)
    entropy = 0.5 * math.log(2 * math.pi * math.e * scale**2)
    return entropy + expected + math.log((high - low) / 2)
