"""Compiled losses: one graph, the numbers of eager mode, nothing recompiled while training."""

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend

import composite_losses as cl
from tests.cases.builders_fl import CLASSES, DOORS, KL, PAIR, build, make_data, networks, total_loss

GRID = [
    *(pytest.param(n, PAIR, True, id=f"{n}-composite-functional") for n in (*DOORS, "PolicyLoss")),
    *(pytest.param(n, "normal", False, id=f"{n}-single-modules") for n in CLASSES),
]
LAYOUTS = {"B": ((6,), False), "BT": ((3, 4), False), "BA": ((5, 2), True)}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:No target network updater:UserWarning"),
    # TensorDict's to_module looks at an option of dynamo that torch 2.13 calls deprecated.
    pytest.mark.filterwarnings(
        "ignore:torch._dynamo.config.inline_inbuilt_nn_modules:FutureWarning"
    ),
]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """No graph of another test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def batch(name: str, heads: Any, layout: str, seed: int = 1) -> TensorDict:
    shape, group = LAYOUTS[layout]
    source = "all" if name in KL else "stored"
    return make_data(heads, shape, group=group, source=source, seed=seed)


class Pair:
    """The same loss twice: compiled with a counting backend, and eager."""

    def __init__(self, name: str, heads: Any, layout: str, backend: str, **options: Any) -> None:
        group = LAYOUTS[layout][1]
        self.counter: Any = (
            CompileCounter() if backend == "eager" else CompileCounterWithBackend(backend)
        )
        self.eager = build(name, heads, group=group, **options)
        self.inner = build(name, heads, group=group, **options)
        self.compiled = torch.compile(self.inner, fullgraph=True, backend=self.counter)

    def compare(self, data: TensorDict) -> dict[str, Tensor]:
        """Outputs and gradients of both are equal; returns those of the compiled one."""
        # The eager one first: TensorDict remembers the types it has met, and dynamo guards that.
        outputs = []
        for run, loss in ((self.eager, self.eager), (self.compiled, self.inner)):
            loss.zero_grad(set_to_none=True)
            out = run(data)
            total_loss(out).backward()
            outputs.append(out)
        expected, found = outputs
        assert list(found.keys()) == list(self.inner.out_keys)
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, msg=lambda m, k=key: f"{k}: {m}")
        pairs = zip(self.eager.named_parameters(), self.inner.parameters(), strict=True)
        for (key, left), right in pairs:
            assert left.grad is not None, key
            torch.testing.assert_close(right.grad, left.grad, msg=lambda m, k=key: f"{k}: {m}")
        return dict(found.items())

    @property
    def count(self) -> int:
        return self.counter.frame_count


@pytest.mark.parametrize(("name", "heads", "functional"), GRID)
def test_one_graph_for_all_minibatches(name: str, heads: Any, functional: bool) -> None:
    """Case 126: forward and backward equal eager mode; other contents do not compile again."""
    pair = Pair(name, heads, "B", "eager", functional=functional)
    for seed in range(3):
        pair.compare(batch(name, heads, "B", seed))
    assert pair.count == 1


@pytest.mark.parametrize(
    ("name", "layout"), list(zip(CLASSES, itertools.cycle(["BT", "BA"]), strict=False))
)
def test_backward_is_compiled(name: str, layout: str) -> None:
    """Case 126: aot_eager traces the backward pass as well, over time and over agents."""
    pair = Pair(name, PAIR, layout, "aot_eager")
    for seed in range(2):
        pair.compare(batch(name, PAIR, layout, seed))
    assert pair.count == 1


COEFFICIENTS: dict[str, list[dict[str, Any]]] = {
    "PPOLoss": [{"entropy_coeff": 0.3, "critic_coeff": 0.2}],
    "ClipPPOLoss": [{"clip_epsilon": 0.05}, {"clip_epsilon": torch.tensor(0.4)}],
    "ClipPPOLoss-per_head": [{"clip_epsilon_low": 0.01, "clip_epsilon_high": 0.02}],
    "ClipPPOLoss-leafwise": [{"clip_epsilon": 0.01, "entropy_coeff": torch.tensor(0.7)}],
    "ClipPPOLoss-mixed": [{"clip_epsilon": 0.01}],
    "KLPENPPOLoss": [{"beta": 5.0}, {"dtarg": 1e-6, "increment": 3.0, "decrement": 0.1}],
    "A2CLoss": [{"entropy_coeff": 0.3, "critic_coeff": 0.2}],
    "ReinforceLoss": [{"entropy_coeff": 0.3}],
}


@pytest.mark.parametrize("name", COEFFICIENTS)
def test_coefficients_do_not_recompile(name: str) -> None:
    """Case 126: a coefficient set between two calls acts at once, in the graph that exists."""
    pair = Pair(name, PAIR, "B", "eager")
    data = batch(name, PAIR, "B")
    before = pair.compare(data)
    for values in COEFFICIENTS[name]:
        for key, value in values.items():
            setattr(pair.eager, key, value)
            setattr(pair.inner, key, value)
        after = pair.compare(data)
        before, last = after, before
        if "dtarg" not in values:  # acts on beta, after the call
            assert any(k.startswith("loss") and after[k] != last[k] for k in after)
    pair.compare(data)
    assert pair.count == 1


@pytest.mark.parametrize(("start", "how"), [(0.0, "buffer"), (0.01, "setter")])
def test_entropy_coefficient_from_and_to_zero(start: float, how: str) -> None:
    """Case 126: a schedule that passes 0 gives the gradients of eager mode, and one graph.

    At 0 the entropy is a metric only; the compiled loss may not remember that.
    """
    pair = Pair("ClipPPOLoss", PAIR, "B", "eager", entropy_coeff=start)
    data = batch("ClipPPOLoss", PAIR, "B")
    for value in (start, 0.5, 0.0, 0.2):
        for loss in (pair.eager, pair.inner):
            if how == "setter":
                loss.entropy_coeff = value
            else:
                loss.entropy.coeff.fill_(value)
        pair.compare(data)
    assert pair.count == 1


@pytest.mark.parametrize("name", ["ClipPPOLoss-mixed", "KLPENPPOLoss", "ReinforceLoss"])
def test_masks_do_not_recompile(name: str) -> None:
    """Case 126: which rows count is content too: some, other ones, none."""
    pair = Pair(name, PAIR, "BT", "eager")
    for i, rate in enumerate((0.5, 0.8, 0.0)):
        data = batch(name, PAIR, "BT", i)
        mask = torch.rand(3, 4, 1, generator=torch.Generator().manual_seed(i)) < rate
        data["collector", "mask"] = mask
        found = pair.compare(data)
        if not mask.any():
            assert all(v == 0 for k, v in found.items() if k.startswith("loss"))
    assert pair.count == 1


@pytest.mark.parametrize("name", ["ClipPPOLoss-mixed", "KLPENPPOLoss"])
def test_every_option_compiles(name: str) -> None:
    """Case 126: value clip, standardisation, capped and delayed policy, reductions by row."""
    options = {
        "clip_value": 0.2,
        "normalize_advantage": True,
        "delay_actor": True,
        "max_importance_ratio": 1.02,
        "reduction": "none",
        "entropy_coeff": {"move": 0.1, "gear": 0.2},
    }
    pair = Pair(name, PAIR, "B", "eager", **options)
    for seed in range(2):
        pair.compare(batch(name, PAIR, "B", seed))
    assert pair.count == 1


def test_training_steps_of_a_compiled_loss() -> None:
    """Case 126: three optimiser steps leave the weights of eager mode."""
    pair = Pair("ClipPPOLoss", PAIR, "B", "aot_eager")
    before = [p.detach().clone() for p in pair.inner.parameters()]
    optimisers = [torch.optim.SGD(loss.parameters(), lr=0.1) for loss in (pair.eager, pair.inner)]
    for seed in range(3):
        pair.compare(batch("ClipPPOLoss", PAIR, "B", seed))
        for optimiser in optimisers:
            optimiser.step()
    assert pair.count == 1
    for left, right, start in zip(
        pair.eager.parameters(), pair.inner.parameters(), before, strict=True
    ):
        torch.testing.assert_close(right, left)
        assert not torch.equal(right, start)


def test_the_region_warns_of_nothing() -> None:
    """Case 126: no warning of the library inside a compiled region, not even once."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pair = Pair("ClipPPOLoss", PAIR, "B", "eager", functional=False)
        pair.compare(batch("ClipPPOLoss", PAIR, "B"))
    assert pair.count == 1


def test_mode_of_a_compiled_loss() -> None:
    """Case 126: eval() reaches the dropout of a compiled actor; the ratio is 1 on fresh data."""
    actor, critic = networks(PAIR)
    actor[0].module.net.insert(1, nn.Dropout(0.5))
    loss = cl.ClipPPOLoss(actor, critic).eval()
    data = batch("ClipPPOLoss", PAIR, "B")
    with torch.no_grad():
        actor(data)
    loss(data)
    found = torch.compile(loss, fullgraph=True, backend=CompileCounter())(data)
    assert abs(found["kl_approx"]) < 1e-6
