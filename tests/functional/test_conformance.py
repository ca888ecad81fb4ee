"""One table that drives what every public function promises; a function without a row fails.

Compilation as one graph, the meta device, gradients, untouched inputs, masked garbage.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import composite_losses.functional as F
from tests.tolerances import assert_close

F64 = torch.float64
S, H, N = (4, 3), 2, 5  # samples, heads, categories
NAN, INF = float("nan"), float("inf")


@dataclass(frozen=True)
class Row:
    """A call of one public function.

    `inputs` are drawn anew for each test. `grad` names the inputs that receive gradient; `select`
    names the mask and the inputs whose masked entries must not matter, where the function has one.
    """

    call: Callable[..., Any]
    inputs: dict[str, Callable[[], Tensor]]
    grad: tuple[str, ...] = ()
    select: tuple[str, ...] = ()

    def draw(self) -> dict[str, Tensor]:
        return {name: make() for name, make in self.inputs.items()}


def normal(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(shape, dtype=F64)


def positive(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.rand(shape, dtype=F64) + 0.5


def unit(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.rand(shape, dtype=F64) * 0.8 + 0.1


def small(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.full(shape, 0.2, dtype=F64)


def flags(*shape: int) -> Callable[[], Tensor]:
    # Both kinds for certain, whatever the seed.
    return lambda: torch.arange(torch.Size(shape).numel()).view(shape) % 3 != 1


def simplex(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.softmax(torch.randn(shape, dtype=F64), -1)


def pair(kl: Callable[..., Tensor]) -> Row:
    inputs = {"a": positive(*S), "b": positive(*S), "c": positive(*S), "d": positive(*S)}
    return Row(lambda a, b, c, d: kl(a, b, c, d), inputs, ("a", "b", "c", "d"))


LOGITS = {"x": normal(*S, N), "allowed": flags(*S, N)}
HEADS = {"x": normal(*S, H), "a": normal(*S), "low": small(H), "high": small(H)}
OPTIONS = {"corr": normal(*S, H), "w": positive(H), "ok": flags(*S, H)}
SCALARS = {"low": small(), "high": small()}
MASKED = {"x": normal(*S), "m": flags(*S)}
X = {"x": normal(*S)}

ROWS: dict[str, Row] = {
    # masking
    "fill": Row(lambda x, m: F.fill(x, m), MASKED, ("x",), ("m", "x")),
    "combine_masks": Row(
        lambda m, n: F.combine_masks(m, None, n), {"m": flags(*S), "n": flags(*S)}
    ),
    "valid_count": Row(lambda x, m: F.valid_count(x, m), MASKED, (), ("m", "x")),
    "valid_count:all": Row(lambda x: F.valid_count(x), X),
    "reduce": Row(lambda x, m: F.reduce(x, m), MASKED, ("x",), ("m", "x")),
    "reduce:sum": Row(lambda x, m: F.reduce(x, m, "sum"), MASKED, ("x",), ("m", "x")),
    "reduce:none": Row(lambda x, m: F.reduce(x, m, "none"), MASKED, ("x",), ("m", "x")),
    "reduce:all": Row(lambda x: F.reduce(x), X, ("x",)),
    "reduce:count": Row(
        lambda x, m, n: F.reduce(x, m, count=n), {**MASKED, "n": positive()}, ("x",), ("m", "x")
    ),
    "masked_mean": Row(lambda x, m: F.masked_mean(x, m), MASKED, ("x",), ("m", "x")),
    "masked_moments": Row(
        lambda x, m: F.masked_moments(x, m, keep_dims=(-1,)), MASKED, ("x",), ("m", "x")
    ),
    # ratios
    "clamp_log_ratio": Row(F.clamp_log_ratio, {"log_ratio": normal(*S)}, ("log_ratio",)),
    "log_ratio": Row(
        lambda x, y, m: F.log_ratio(x, y, m),
        {"x": normal(*S, H), "y": normal(*S, H), "m": flags(*S)},
        ("x", "y"),
        ("m", "x", "y"),
    ),
    "joint": Row(lambda x: F.joint(x), {"x": normal(*S, H)}, ("x",)),
    "ratio": Row(lambda x: F.ratio(x), X, ("x",)),
    "log_clip_bounds": Row(lambda low, high: F.log_clip_bounds(low, high), SCALARS),
    "log_clip_bounds:floats": Row(lambda: F.log_clip_bounds(0.2, 0.3), {}),
    "clip_log_ratio": Row(
        lambda x, low, high: F.clip_log_ratio(x, low, high),
        {"x": normal(*S, H), "low": small(H), "high": small(H)},
        ("x",),
    ),
    "clip_log_ratio:floats": Row(lambda x: F.clip_log_ratio(x, 0.2, 0.3), X, ("x",)),
    # surrogates
    "score": Row(lambda x, a: F.score(x, a), {"x": normal(*S), "a": normal(*S)}, ("x",)),
    "unclipped": Row(
        lambda x, a, c: F.unclipped(x, a, c),
        {"x": normal(*S), "a": normal(*S), "c": normal(*S)},
        ("x",),
    ),
    "clipped": Row(
        lambda x, a, low, high, corr: F.clipped(
            x, a, low, high, dual_clip=3.0, log_correction=corr
        ),
        {"x": normal(*S), "a": normal(*S), "corr": normal(*S), **SCALARS},
        ("x",),
    ),
    "clipped:plain": Row(
        lambda x, a: F.clipped(x, a, 0.2, 0.3), {"x": normal(*S), "a": normal(*S)}, ("x",)
    ),
    "per_head": Row(
        lambda x, a, low, high, corr, w, ok: F.per_head(
            x, a, low, high, weights=w, active=ok, dual_clip=3.0, log_correction=corr
        ),
        {**HEADS, **OPTIONS},
        ("x",),
        ("ok", "x", "corr"),
    ),
    "per_head:own_advantage": Row(
        lambda x, a, ok: F.per_head(x, a, 0.2, 0.3, active=ok),
        {"x": normal(*S, H), "a": normal(*S, H), "ok": flags(*S, H)},
        ("x",),
        ("ok", "x", "a"),
    ),
    "pessimistic": Row(
        lambda g, c, a: F.pessimistic(g, c, a, 3.0),
        {"g": normal(*S), "c": normal(*S), "a": normal(*S)},
        ("g", "c"),
    ),
    "leafwise": Row(
        lambda x, a, low, high, corr: F.leafwise(
            x, a, low, high, dual_clip=3.0, log_correction=corr
        ),
        {**HEADS, "corr": normal(*S)},
        ("x",),
    ),
    "mixed": Row(
        lambda x, a, low, high, mix, corr, w, ok: F.mixed(
            x, a, low, high, mix=mix, weights=w, active=ok, dual_clip=3.0, log_correction=corr
        ),
        {**HEADS, **OPTIONS, **SCALARS, "mix": small()},
        ("x",),
        ("ok", "x", "corr"),
    ),
    "mixed:plain": Row(
        lambda x, a: F.mixed(x, a, 0.2, 0.3), {"x": normal(*S, H), "a": normal(*S)}, ("x",)
    ),
    # divergences
    "k1": Row(lambda x: F.k1(x), X, ("x",)),
    "k2": Row(lambda x: F.k2(x), X, ("x",)),
    "k3": Row(lambda x: F.k3(x), X, ("x",)),
    # distributions
    "normal_log_prob": Row(
        lambda loc, scale, x: F.normal_log_prob(loc, scale, x),
        {"loc": normal(*S), "scale": positive(*S), "x": normal(*S)},
        ("loc", "scale", "x"),
    ),
    "normal_entropy": Row(lambda x: F.normal_entropy(x), {"x": positive(*S)}, ("x",)),
    "normal_kl": pair(F.normal_kl),
    "categorical_log_probs": Row(
        lambda x, allowed: F.categorical_log_probs(x, allowed), LOGITS, ("x",), ("allowed", "x")
    ),
    "categorical_log_probs:all": Row(lambda x: F.categorical_log_probs(x), X, ("x",)),
    "categorical_log_prob": Row(
        lambda x, allowed, index: F.categorical_log_prob(x, index, allowed),
        {**LOGITS, "index": lambda: torch.randint(N, S)},
        ("x",),
        ("allowed", "x"),
    ),
    "categorical_entropy": Row(
        lambda x, allowed: F.categorical_entropy(x, allowed), LOGITS, ("x",), ("allowed", "x")
    ),
    "categorical_kl": Row(
        lambda x, y, allowed: F.categorical_kl(x, y, allowed, allowed),
        {**LOGITS, "y": normal(*S, N)},
        ("x", "y"),
        ("allowed", "x", "y"),
    ),
    "bernoulli_log_prob": Row(
        lambda x, v: F.bernoulli_log_prob(x, v), {"x": normal(*S), "v": flags(*S)}, ("x",)
    ),
    "bernoulli_entropy": Row(lambda x: F.bernoulli_entropy(x), X, ("x",)),
    "bernoulli_kl": Row(
        lambda x, y: F.bernoulli_kl(x, y), {"x": normal(*S), "y": normal(*S)}, ("x", "y")
    ),
    "beta_log_prob": Row(
        lambda a, b, v: F.beta_log_prob(a, b, v),
        {"a": positive(*S), "b": positive(*S), "v": unit(*S)},
        ("a", "b", "v"),
    ),
    "beta_entropy": Row(
        lambda a, b: F.beta_entropy(a, b), {"a": positive(*S), "b": positive(*S)}, ("a", "b")
    ),
    "beta_kl": pair(F.beta_kl),
    "gamma_log_prob": Row(
        lambda a, b, v: F.gamma_log_prob(a, b, v),
        {"a": positive(*S), "b": positive(*S), "v": positive(*S)},
        ("a", "b", "v"),
    ),
    "gamma_entropy": Row(
        lambda a, b: F.gamma_entropy(a, b), {"a": positive(*S), "b": positive(*S)}, ("a", "b")
    ),
    "gamma_kl": pair(F.gamma_kl),
    "dirichlet_log_prob": Row(
        lambda a, v: F.dirichlet_log_prob(a, v),
        {"a": positive(*S, N), "v": simplex(*S, N)},
        ("a", "v"),
    ),
    "dirichlet_entropy": Row(lambda a: F.dirichlet_entropy(a), {"a": positive(*S, N)}, ("a",)),
    "dirichlet_kl": Row(
        lambda a, b: F.dirichlet_kl(a, b),
        {"a": positive(*S, N), "b": positive(*S, N)},
        ("a", "b"),
    ),
    "bounded_log_probs": Row(
        lambda x, ok: F.bounded_log_probs(x, ok),
        {"x": normal(*S, N), "ok": flags(*S, N)},
        ("x",),
    ),
    "tanh_inverse": Row(lambda v: F.tanh_inverse(v, -1.0, 2.0), {"v": unit(*S)}, ("v",)),
    "tanh_log_slope": Row(lambda x: F.tanh_log_slope(x, -1.0, 2.0), {"x": normal(*S)}, ("x",)),
    "tanh_normal_log_prob": Row(
        lambda loc, scale, v: F.tanh_normal_log_prob(loc, scale, -1.0, 2.0, v),
        {"loc": normal(*S), "scale": positive(*S), "v": unit(*S)},
        ("loc", "scale", "v"),
    ),
    "tanh_normal_log_prob:tensors": Row(
        lambda loc, scale, low, high, v: F.tanh_normal_log_prob(loc, scale, -low, high, v),
        {
            "loc": normal(*S),
            "scale": positive(*S),
            "low": positive(3),
            "high": lambda: positive(3)() + 0.5,
            "v": unit(*S),
        },
        ("loc", "scale", "low", "high", "v"),
    ),
    "tanh_normal_entropy": Row(
        lambda loc, scale: F.tanh_normal_entropy(loc, scale, -1.0, 2.0),
        {"loc": normal(*S), "scale": positive(*S)},
        ("loc", "scale"),
    ),
    "tanh_normal_entropy:tensors": Row(
        lambda loc, scale, low, high: F.tanh_normal_entropy(loc, scale, -low, high),
        {"loc": normal(*S), "scale": positive(*S), "low": positive(3), "high": positive(3)},
        ("loc", "scale", "low", "high"),
    ),
    # values, entropy, advantages
    **{
        f"value_error:{kind}": Row(
            lambda x, y, kind=kind: F.value_error(x, y, kind),
            {"x": normal(*S), "y": normal(*S)},
            ("x",),
        )
        for kind in ("l1", "l2", "smooth_l1")
    },
    "clipped_value_error": Row(
        lambda x, o, y, clip: F.clipped_value_error(x, o, y, clip),
        {"x": normal(*S), "o": normal(*S), "y": normal(*S), "clip": small()},
        ("x",),
    ),
    "clipped_value_error:float": Row(
        lambda x, o, y: F.clipped_value_error(x, o, y, 0.2, "l2"),
        {"x": normal(*S), "o": normal(*S), "y": normal(*S)},
        ("x",),
    ),
    "entropy_sum": Row(
        lambda x, c, ok: F.entropy_sum(x, c, ok),
        {"x": normal(*S, H), "c": positive(H), "ok": flags(*S, H)},
        ("x",),
        ("ok", "x"),
    ),
    "standardise": Row(
        lambda x, m: F.standardise(x, m, keep_dims=(-2,)),
        {"x": normal(*S, 1), "m": flags(*S)},
        ("x",),
        ("m", "x"),
    ),
    # returns
    "reward_to_go": Row(
        lambda x, done, m: F.reward_to_go(x, done, 0.9, dim=-1, mask=m),
        {**MASKED, "done": lambda: flags(*S)() & (torch.rand(S) > 0.5)},
        ("x",),
        ("m", "x"),
    ),
    "reward_to_go:gamma": Row(
        lambda x, done, g: F.reward_to_go(x, done, g, dim=0),
        {**X, "done": flags(*S), "g": unit()},
        ("x", "g"),
    ),
    **{
        f"baseline:{kind}": Row(
            lambda x, m, kind=kind: F.baseline(x, kind, m),
            MASKED,
            () if kind == "none" else ("x",),
            ("m", "x"),
        )
        for kind in ("none", "mean", "leave_one_out")
    },
    # metrics
    "effective_sample_size": Row(
        lambda x, m: F.effective_sample_size(x, m), MASKED, (), ("m", "x")
    ),
    "clip_fraction": Row(
        lambda x, low, high, m: F.clip_fraction(x, low, high, m),
        {"x": normal(*S, H), "low": small(H), "high": small(H), "m": flags(*S, H)},
        (),
        ("m", "x"),
    ),
    "explained_variance": Row(
        lambda x, y, m: F.explained_variance(x, y, m),
        {**MASKED, "y": normal(*S)},
        (),
        ("m", "x", "y"),
    ),
    "masked_max": Row(lambda x, m: F.masked_max(x, m), MASKED, (), ("m", "x")),
}

# Functions whose result mixes samples, or has none.
REDUCING = {
    "valid_count",
    "reduce",
    "masked_mean",
    "masked_moments",
    "log_clip_bounds",
    "standardise",
    "reward_to_go",
    "baseline",
    "effective_sample_size",
    "clip_fraction",
    "explained_variance",
    "masked_max",
}

each_row = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)


def rows_with(field: str) -> pytest.MarkDecorator:
    rows = [pytest.param(row, id=name) for name, row in ROWS.items() if getattr(row, field)]
    return pytest.mark.parametrize("row", rows)


def floats(result: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(result) if leaf.is_floating_point()]


def weighted_sum(result: Any) -> Tensor:
    """A scalar in which no two entries play the same part; forbidden entries stay finite."""
    total = torch.zeros((), dtype=F64)
    for leaf in floats(result):
        weights = torch.linspace(0.5, 1.5, leaf.numel(), dtype=F64).view(leaf.shape)
        total = total + (leaf.clamp_min(-1e3) * weights).sum()
    return total


def test_every_public_function_has_a_row():
    assert {name.split(":")[0] for name in ROWS} == set(F.__all__)


def test_every_function_of_a_chapter_is_public():
    modules = [m for n, m in vars(F).items() if inspect.ismodule(m) and n != "shapes"]
    defined = {
        name
        for module in modules
        for name, member in vars(module).items()
        if inspect.isfunction(member) and member.__module__ == module.__name__
    }
    assert {name for name in defined if not name.startswith("_")} == set(F.__all__)


def test_names_are_sorted():
    assert sorted(F.__all__) == F.__all__


@each_row
def test_compiles_as_one_graph(row):
    """Forward and backward, with the numbers of the eager call, but for the order of products."""
    inputs = row.draw()
    leaves = [inputs[name].requires_grad_() for name in row.grad]
    torch._dynamo.reset()
    outcomes = []
    for call in (row.call, torch.compile(row.call, fullgraph=True, backend="eager")):
        result = call(**inputs)
        gradients = torch.autograd.grad(weighted_sum(result), leaves) if leaves else ()
        outcomes.append([*tree_leaves(result), *gradients])
    for actual, expected in zip(*reversed(outcomes), strict=True):
        assert_close(actual, expected)


@each_row
def test_runs_without_data(row):
    # The meta device refuses whatever would read a value on the host.
    inputs = row.draw()
    on_meta = row.call(**tree_map(lambda x: x.to("meta"), inputs))
    for meta, leaf in zip(tree_leaves(on_meta), tree_leaves(row.call(**inputs)), strict=True):
        assert (meta.shape, meta.dtype) == (leaf.shape, leaf.dtype)


@each_row
def test_keeps_float32_and_the_inputs(row):
    inputs = tree_map(lambda x: x.float() if x.is_floating_point() else x, row.draw())
    before = tree_map(torch.clone, inputs)
    result = row.call(**inputs)
    assert all(leaf.dtype == torch.float32 for leaf in floats(result))
    for name, tensor in inputs.items():
        assert tensor._version == 0
        assert torch.equal(tensor, before[name])
    expected = row.call(**tree_map(lambda x: x.double() if x.is_floating_point() else x, inputs))
    for leaf, exact in zip(tree_leaves(result), tree_leaves(expected), strict=True):
        if leaf.is_floating_point():
            # A forbidden entry holds the lowest number of its dtype.
            leaf, exact = leaf.clamp_min(-1e15), exact.clamp_min(-1e15)
        assert_close(leaf, exact)


@pytest.mark.parametrize("row", [r for n, r in ROWS.items() if n.split(":")[0] not in REDUCING])
def test_is_per_sample(row):
    """A sample alone gives what it gives in its batch: no other dim is taken for heads."""
    inputs = row.draw()
    together = row.call(**inputs)
    for i in range(S[0]):
        one = {n: x[i] if x.shape[: len(S)] == S else x for n, x in inputs.items()}
        for alone, leaf in zip(tree_leaves(row.call(**one)), tree_leaves(together), strict=True):
            assert_close(alone, leaf[i])


@rows_with("grad")
def test_gradient_equals_finite_differences(row):
    inputs = row.draw()
    for name in row.grad:
        inputs[name].requires_grad_()

    def scalar(*tensors: Tensor) -> Tensor:
        return weighted_sum(row.call(**{**inputs, **dict(zip(row.grad, tensors, strict=True))}))

    assert torch.autograd.gradcheck(scalar, [inputs[name] for name in row.grad])


@rows_with("select")
@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("nothing_valid", [False, True])
def test_masked_garbage_changes_nothing(row, poison, nothing_valid):
    """Value and gradient equal those of zeros in the masked entries; no gradient goes there."""
    mask_name, *names = row.select
    inputs = row.draw()
    if nothing_valid:
        inputs[mask_name] = torch.zeros_like(inputs[mask_name])
    mask = inputs[mask_name]
    outcomes = []
    for garbage in (0.0, poison):
        drawn = dict(inputs)
        for name in names:
            counts = mask.reshape(mask.shape + (1,) * (drawn[name].ndim - mask.ndim))
            drawn[name] = torch.where(counts, drawn[name], garbage)
            drawn[name].requires_grad_(name in row.grad)
        result = row.call(**drawn)
        leaves = [drawn[name] for name in names if name in row.grad]
        gradients = torch.autograd.grad(weighted_sum(result), leaves) if leaves else ()
        for gradient in gradients:
            counts = mask.reshape(mask.shape + (1,) * (gradient.ndim - mask.ndim))
            assert torch.equal(torch.where(counts, 0.0, gradient), torch.zeros_like(gradient))
        outcomes.append([*tree_leaves(result), *gradients])
    for ours, expected in zip(*reversed(outcomes), strict=True):
        assert ours.isfinite().all()
        assert torch.equal(ours, expected)
