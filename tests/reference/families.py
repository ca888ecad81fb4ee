"""Families of distributions, one sample at a time: plain numbers, written after their definitions.

Several elements are independent and add up.
"""

import math
from collections.abc import Callable, Mapping

from tests.reference.functional import Numbers, integral, normal_density

Parameters = Mapping[str, Numbers]

# --- log-prob of one action, entropy --------------------------------------------------------------


def digamma(x: float) -> float:
    """The derivative of ``log Gamma``: the recurrence up to 12, then the asymptotic series."""
    total = 0.0
    while x < 12:
        total -= 1 / x
        x += 1
    square = 1 / (x * x)
    series = square * (1 / 12 - square * (1 / 120 - square * (1 / 252 - square / 240)))
    return total + math.log(x) - 0.5 / x - series


def log_beta(concentration: Numbers) -> float:
    return math.fsum(map(math.lgamma, concentration)) - math.lgamma(math.fsum(concentration))


def log_sum_exp(numbers: Numbers) -> float:
    top = max(numbers)
    return top + math.log(math.fsum(math.exp(x - top) for x in numbers))


def normal_log_prob(p: Parameters, action: Numbers) -> float:
    return math.fsum(
        -0.5 * ((x - m) / s) ** 2 - math.log(s) - 0.5 * math.log(2 * math.pi)
        for x, m, s in zip(action, p["loc"], p["scale"], strict=True)
    )


def normal_entropy(p: Parameters) -> float:
    return math.fsum(0.5 * math.log(2 * math.pi * math.e * s * s) for s in p["scale"])


def categorical_log_prob(p: Parameters, action: Numbers) -> float:
    (index,) = action
    return p["logits"][int(index)] - log_sum_exp(p["logits"])


def categorical_entropy(p: Parameters) -> float:
    total = log_sum_exp(p["logits"])
    return -math.fsum(math.exp(x - total) * (x - total) for x in p["logits"])


def one_hot_log_prob(p: Parameters, action: Numbers) -> float:
    return p["logits"][list(action).index(1)] - log_sum_exp(p["logits"])


def bernoulli_log_prob(p: Parameters, action: Numbers) -> float:
    return math.fsum(
        -math.log1p(math.exp(-x if a else x)) for x, a in zip(p["logits"], action, strict=True)
    )


def bernoulli_entropy(p: Parameters) -> float:
    probabilities = [1 / (1 + math.exp(-x)) for x in p["logits"]]
    return -math.fsum(q * math.log(q) + (1 - q) * math.log(1 - q) for q in probabilities)


def beta_log_prob(p: Parameters, action: Numbers) -> float:
    return math.fsum(
        (a - 1) * math.log(x) + (b - 1) * math.log(1 - x) - log_beta([a, b])
        for x, a, b in zip(action, p["concentration1"], p["concentration0"], strict=True)
    )


def beta_entropy(p: Parameters) -> float:
    pairs = zip(p["concentration1"], p["concentration0"], strict=True)
    return math.fsum(dirichlet_entropy({"concentration": pair}) for pair in pairs)


def gamma_log_prob(p: Parameters, action: Numbers) -> float:
    return math.fsum(
        a * math.log(r) + (a - 1) * math.log(x) - r * x - math.lgamma(a)
        for x, a, r in zip(action, p["concentration"], p["rate"], strict=True)
    )


def gamma_entropy(p: Parameters) -> float:
    return math.fsum(
        a - math.log(r) + math.lgamma(a) + (1 - a) * digamma(a)
        for a, r in zip(p["concentration"], p["rate"], strict=True)
    )


def dirichlet_log_prob(p: Parameters, action: Numbers) -> float:
    pairs = zip(action, p["concentration"], strict=True)
    return math.fsum((a - 1) * math.log(x) for x, a in pairs) - log_beta(p["concentration"])


def dirichlet_entropy(p: Parameters) -> float:
    numbers = p["concentration"]
    total = math.fsum(numbers)
    return (
        log_beta(numbers)
        + (total - len(numbers)) * digamma(total)
        - math.fsum((a - 1) * digamma(a) for a in numbers)
    )


def tanh_normal_log_prob(p: Parameters, action: Numbers) -> float:
    """On (-1, 1): ``log N(atanh y) - log(1 - y^2)``."""
    inside = normal_log_prob(p, [math.atanh(y) for y in action])
    return inside - math.fsum(math.log(1 - y * y) for y in action)


def tanh_normal_entropy(p: Parameters) -> float:
    """``H(X) + E[log(1 - tanh(X)^2)]``; Simpson at 20 points per standard deviation."""

    def weighted(x: float, loc: float, scale: float) -> float:
        log_cosh = abs(x) + math.log1p(math.exp(-2 * abs(x))) - math.log(2)
        return normal_density(x, loc, scale) * -2 * log_cosh

    return normal_entropy(p) + math.fsum(
        integral(lambda x, m=m, s=s: weighted(x, m, s), m - 8 * s, m + 8 * s, steps=320)
        for m, s in zip(p["loc"], p["scale"], strict=True)
    )


def allowed(p: Parameters) -> Numbers:
    """Logits of the classes that the action mask allows."""
    return [x for x, ok in zip(p["logits"], p["mask"], strict=True) if ok]


def masked_log_prob(p: Parameters, action: Numbers) -> float:
    return p["logits"][int(action[0])] - log_sum_exp(allowed(p))


def masked_entropy(p: Parameters) -> float:
    return categorical_entropy({"logits": allowed(p)})


# --- KL(p || q), p the old policy; elements add up ------------------------------------------------


def normal_kl(p: Parameters, q: Parameters) -> float:
    """Also of two tanh-normals: a bijection leaves it unchanged."""
    rows = zip(p["loc"], p["scale"], q["loc"], q["scale"], strict=True)
    return math.fsum(
        math.log(t / s) + (s * s + (m - n) ** 2) / (2 * t * t) - 0.5 for m, s, n, t in rows
    )


def categorical_kl(p: Parameters, q: Parameters) -> float:
    a, b = log_sum_exp(p["logits"]), log_sum_exp(q["logits"])
    pairs = zip(p["logits"], q["logits"], strict=True)
    return math.fsum(math.exp(x - a) * ((x - a) - (y - b)) for x, y in pairs)


def masked_kl(p: Parameters, q: Parameters) -> float:
    return categorical_kl({"logits": allowed(p)}, {"logits": allowed(q)})


def bernoulli_kl(p: Parameters, q: Parameters) -> float:
    pairs = zip(p["logits"], q["logits"], strict=True)
    return math.fsum(categorical_kl({"logits": (x, 0)}, {"logits": (y, 0)}) for x, y in pairs)


def dirichlet_kl(p: Parameters, q: Parameters) -> float:
    a, b = p["concentration"], q["concentration"]
    total = digamma(math.fsum(a))
    return (
        log_beta(b)
        - log_beta(a)
        + math.fsum((x - y) * (digamma(x) - total) for x, y in zip(a, b, strict=True))
    )


def beta_kl(p: Parameters, q: Parameters) -> float:
    pairs = [zip(r["concentration1"], r["concentration0"], strict=True) for r in (p, q)]
    return math.fsum(
        dirichlet_kl({"concentration": x}, {"concentration": y})
        for x, y in zip(*pairs, strict=True)
    )


def gamma_kl(p: Parameters, q: Parameters) -> float:
    rows = zip(p["concentration"], p["rate"], q["concentration"], q["rate"], strict=True)
    return math.fsum(
        (a - b) * digamma(a)
        - math.lgamma(a)
        + math.lgamma(b)
        + b * math.log(r / s)
        + a * (s - r) / r
        for a, r, b, s in rows
    )


LOG_PROB: dict[str, Callable[[Parameters, Numbers], float]] = {
    "normal": normal_log_prob,
    "categorical": categorical_log_prob,
    "one_hot": one_hot_log_prob,
    "bernoulli": bernoulli_log_prob,
    "beta": beta_log_prob,
    "gamma": gamma_log_prob,
    "dirichlet": dirichlet_log_prob,
    "tanh_normal": tanh_normal_log_prob,
    "masked": masked_log_prob,
}
ENTROPY: dict[str, Callable[[Parameters], float]] = {
    "normal": normal_entropy,
    "categorical": categorical_entropy,
    "one_hot": categorical_entropy,
    "bernoulli": bernoulli_entropy,
    "beta": beta_entropy,
    "gamma": gamma_entropy,
    "dirichlet": dirichlet_entropy,
    "tanh_normal": tanh_normal_entropy,
    "masked": masked_entropy,
}
KL: dict[str, Callable[[Parameters, Parameters], float]] = {
    "normal": normal_kl,
    "categorical": categorical_kl,
    "one_hot": categorical_kl,
    "bernoulli": bernoulli_kl,
    "beta": beta_kl,
    "gamma": gamma_kl,
    "dirichlet": dirichlet_kl,
    "tanh_normal": normal_kl,
    "masked": masked_kl,
}
