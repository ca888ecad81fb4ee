"""Random policies against the naive reference, and what must not change a loss.

Heads in trees up to three levels deep, of ten kinds, made in five ways; batches of no, one or two
dims, with or without agents, whose sizes often coincide; row, agent, head and action masks with
garbage behind them; every geometry and option. Float64, tolerances of the table.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tensordict import TensorDictBase
from torch import Tensor

from tests.cases.builders_fl import garbage
from tests.losses.strategies import F64, KINDS, LOSSES, Problem, heads, problems
from tests.losses.worlds import World, build, make_loss, mask_key, rekeyed
from tests.reference import families
from tests.reference import policy as reference
from tests.tolerances import TOLERANCES, assert_close

# The entropy of a tanh-normal is a fit, right to 4.5e-7 nats per element, heads of up to 3.
TANH = {"rtol": 1e-5, "atol": 1e-5}
# Of a finite difference: rounding is 1e-16 · loss / STEP, curvature · STEP / 2.
STEP = 1e-7
DIFFERENCE = {"rtol": 1e-5, "atol": 1e-5}
NAMES = {"loss_objective": "loss_actor", "loss_critic": "loss_value"}  # in REINFORCE


# --- the reference --------------------------------------------------------------------------------


def rows(world: World) -> list[reference.Row]:
    """What the reference sees of the current weights; NaN for what does not count."""
    problem, td = world.problem, world.clean
    actions = [td[problem.action(i)] for i in range(len(problem.heads))]
    now, obs = world.params(), td[problem.key("observation")]
    with torch.no_grad():
        value = world.critic(obs)
    made = []
    for index in product(*map(range, problem.sample)):
        valid = bool(world.mask[index])
        row = reference.Row(
            log_prob=[],
            behaviour=[],
            joint=None,
            entropy=[],
            active=[bool(on[index]) for on in world.active],
            valid=valid,
            advantage=float(td[problem.key("advantage")][index]),
            value=float(value[index]),
            target=float(td[problem.key("value_target")][index]),
            old_value=float(td[problem.key("state_value")][index]),
            agent=index[-1] if problem.agents else 0,
        )
        for i, head in enumerate(problem.heads):
            kind = KINDS[head.kind].reference
            if not (valid and row.active[i]):
                numbers = (math.nan, math.nan, math.nan, math.nan)
            else:
                p, q = (
                    {k: x[index].reshape(-1).tolist() for k, x in params[i].items()}
                    for params in (world.behaviour, now)
                )
                action = actions[i][index].reshape(-1).tolist()
                numbers = (
                    families.LOG_PROB[kind](q, action),
                    families.LOG_PROB[kind](p, action),
                    families.ENTROPY[kind](q),
                    families.KL[kind](p, q) if problem.loss == "klpen" else math.nan,
                )
            parts = (row.log_prob, row.behaviour, row.entropy, row.kl)
            for part, number in zip(parts, numbers, strict=True):
                part.append(number)
        if problem.source == "joint":
            row.joint, row.behaviour = row.over_heads(row.behaviour), None
        made.append(row)
    return made


def in_float32(number: float) -> float:
    """As a coefficient is kept."""
    return torch.tensor(number, dtype=torch.float32).item()


def surrogate(problem: Problem) -> reference.Surrogate:
    options, n = problem.options, len(problem.heads)
    if problem.loss in ("a2c", "reinforce"):
        return reference.Score()
    if problem.loss in ("ppo", "klpen"):
        return reference.Unclipped(options.get("beta"))
    eps, weights = options["eps"], options["head_weights"] or {}
    each = [eps.get(i, in_float32(0.2)) if isinstance(eps, dict) else eps for i in range(n)]
    pairs = [x if isinstance(x, tuple) else (x, x) for x in each]
    return reference.Clip(
        options["ratio"],
        [low for low, _ in pairs],
        [high for _, high in pairs],
        options["mix"],
        options["dual_clip"],
        [weights.get(i, 1.0) for i in range(n)],
    )


def expected_losses(world: World, made: Sequence[reference.Row]) -> dict[str, float]:
    problem, options = world.problem, world.problem.options
    coeff, norm = options["entropy"], options["norm"]
    n = len(problem.heads)
    out = reference.losses(
        made,
        surrogate(problem),
        entropy_coeffs=[coeff[i] if isinstance(coeff, dict) else coeff for i in range(n)],
        critic_kind=options["kind"],
        critic_coeff=options["coeff"],
        value_clip=options["value_clip"],
        advantages=reference.normalised(made, norm == "agent") if norm else None,
    )
    if not problem.critic:
        del out["loss_critic"]
    if problem.loss == "reinforce":
        return {NAMES.get(name, name): value for name, value in out.items()}
    return out


def expected_metrics(world: World, made: Sequence[reference.Row]) -> dict[str, float]:
    problem = world.problem
    clip = problem.options["value_clip"]
    out = reference.metrics(made, surrogate(problem), problem.names(), clip)
    if not problem.critic:
        out.pop("explained_variance", None)
        out.pop("value_clip_fraction", None)
    return out


# --- the loss -------------------------------------------------------------------------------------


def snapshot(td: TensorDictBase) -> dict[Any, Any]:
    """Everything that a call could have changed in the data: to the bit, and where it lies."""
    seen: dict[Any, Any] = {(): (td.batch_size, list(td.keys()))}
    for key, value in td.items(include_nested=True):
        if isinstance(value, Tensor):
            bits = value.detach().numpy().tobytes()
            seen[key] = (value.shape, value.dtype, value.requires_grad, value.data_ptr(), bits)
        else:
            seen[key] = (value.batch_size, id(value), list(value.keys()))
    return seen


def gradients(value: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """Of one loss, zeros where none flows."""
    if not value.requires_grad:
        return [torch.zeros_like(w) for w in weights]
    grads = torch.autograd.grad(value, weights, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(w) if g is None else g for w, g in zip(weights, grads, strict=True)]


def compare(name: str, actual: Tensor, expected: float, *, loose: bool) -> None:
    if math.isnan(expected):
        assert actual.isnan(), name
    elif loose:
        torch.testing.assert_close(actual, torch.tensor(expected, dtype=actual.dtype), **TANH)
    else:
        assert_close(actual, expected)


def slope(world: World, losses: dict[str, float], direction: Sequence[Tensor]) -> dict[str, float]:
    """The derivative of the reference's losses along a direction of all weights."""
    with torch.no_grad():
        for w, d in zip(world.weights, direction, strict=True):
            w += STEP * d
    return {
        name: (value - losses[name]) / STEP
        for name, value in expected_losses(world, rows(world)).items()
    }


@pytest.mark.parametrize("loss", LOSSES)
@settings(max_examples=200)
@given(st.data())
def test_equals_the_reference(loss: str, data: st.DataObject) -> None:
    """Every loss, metric and gradient of a random problem is the naive one; the input is unchanged.

    Cases 2, 3, 4, 7, 19, 23, 25, 34, 36, 67, 80, 81: wherever the log-prob comes from, whatever is
    masked. The gradient is compared along a random direction of all weights.
    """
    problem = data.draw(problems(loss))
    world = build(problem)
    module = make_loss(world)
    before, state = snapshot(world.td), torch.get_rng_state()
    out = module(world.td)
    assert snapshot(world.td) == before
    assert torch.equal(torch.get_rng_state(), state)
    made = rows(world)
    losses = expected_losses(world, made)
    wanted = losses | expected_metrics(world, made)
    assert list(out.keys()) == module.out_keys
    undefined = {"explained_variance", "clip_fraction"}  # of one row; of leafwise and mixed
    assert wanted.keys() <= set(out.keys()) <= wanted.keys() | undefined
    tanh = any(head.kind == "tanh_normal" for head in problem.heads)
    for name, value in wanted.items():
        assert out[name].shape == ()
        compare(name, out[name], value, loose=tanh and "entropy" in name)
    sizes = [torch.randn_like(w) for w in world.weights]
    norm = math.sqrt(sum(float(d.square().sum()) for d in sizes))
    direction = [d / norm for d in sizes]
    grads = {name: gradients(out[name], world.weights) for name in losses}
    for name, value in slope(world, losses, direction).items():
        actual = sum((g * d).sum() for g, d in zip(grads[name], direction, strict=True))
        expected = torch.tensor(value, dtype=actual.dtype)
        torch.testing.assert_close(actual, expected, **DIFFERENCE, msg=f"gradient of {name}")
    if loss == "klpen":
        adapted = reference.adapted(problem.options["beta"], wanted["kl"], 0.01, 2.0, 0.5)
        assert_close(module.beta, adapted if any(r.acts for r in made) else problem.options["beta"])


# --- what changes nothing -------------------------------------------------------------------------

Outcome = tuple[dict[str, Tensor], list[Tensor]]


def outcome(world: World, td: TensorDictBase | None = None, **extra: Any) -> Outcome:
    """All outputs, and the gradient of the sum of the losses."""
    out = make_loss(world, **extra)(world.td if td is None else td)
    total = sum(value.sum() for name, value in out.items() if name.startswith("loss"))
    return {k: v.detach() for k, v in out.items()}, gradients(total, world.weights)


def same(actual: Outcome, expected: Outcome, *, exact: bool = False) -> None:
    """Equal outputs, NaN where NaN is, and equal gradients."""
    assert list(actual[0]) == list(expected[0])
    tolerance = {"rtol": 0.0, "atol": 0.0} if exact else TOLERANCES[F64]
    for name, value in expected[0].items():
        torch.testing.assert_close(actual[0][name], value, equal_nan=True, msg=name, **tolerance)
    for a, b in zip(actual[1], expected[1], strict=True):
        torch.testing.assert_close(a, b, **tolerance)


@settings(max_examples=40)
@given(problems(), st.sampled_from(["nan", "inf", "-inf", "huge", "mixed"]))
def test_what_does_not_count_may_hold_anything(problem: Problem, other: str) -> None:
    """Case 80: other garbage in rows and heads that do not count, to the bit the same result."""
    same(outcome(build(problem)), outcome(build(replace(problem, garbage=other))), exact=True)


@settings(max_examples=40)
@given(problems(rows=True), st.integers(1, 2))
def test_appended_masked_rows_change_nothing(problem: Problem, extra: int) -> None:
    """Case 81: every loss, gradient and metric counts the valid rows only."""
    world = build(replace(problem, mask=problem.mask or "agent"))
    more = world.td[:extra].clone()
    for i, key in enumerate(list(more.keys(include_nested=True, leaves_only=True))):
        leaf = more[key]
        more[key] = garbage(leaf.shape, leaf.dtype, problem.garbage, i)
    more[mask_key(world.problem)] = torch.zeros_like(more[mask_key(world.problem)])
    same(outcome(world, torch.cat([world.td, more], 0)), outcome(world))


@settings(max_examples=40)
@given(problems(rows=True))
def test_the_order_of_rows_changes_nothing(problem: Problem) -> None:
    """Case 47: a row's value depends on no other row."""
    world = build(problem)
    order = torch.randperm(problem.root[0])
    same(outcome(world, world.td[order]), outcome(world))


@settings(max_examples=60)
@given(problems(), st.data())
def test_keys_and_their_order_change_nothing(problem: Problem, data: st.DataObject) -> None:
    """Cases 11, 15: heads in another order, under other nested keys, from another kind of actor."""
    assume(problem.make != "sequence")  # there a later head reads the first action
    world = build(problem)
    n = len(problem.heads)
    order = data.draw(st.permutations(range(n)))
    shape = data.draw(heads(n).filter(lambda made: len(made) == n))
    makes = ["map", "tree", "nested", "sequence", *(["single"] if n == 1 else [])]
    other = rekeyed(world, order, [head.path for head in shape], data.draw(st.sampled_from(makes)))
    names = dict(zip(other.problem.names(), (problem.names()[i] for i in order), strict=True))
    out, grads = outcome(other)
    renamed = {}
    for name, value in out.items():
        metric, _, head = name.partition("/")
        renamed[f"{metric}/{names[head]}" if head else name] = value
    expected = outcome(world)
    assert set(renamed) == set(expected[0])
    same(({name: renamed[name] for name in expected[0]}, grads), expected)


@settings(max_examples=40)
@given(problems())
def test_sources_agree(problem: Problem) -> None:
    """Case 33: stored, joint and rebuilt behaviour log-probs give one result."""
    several = len(problem.heads) > 1
    joint_ok = several and problem.options.get("ratio", "joint") == "joint"
    made = {
        source: outcome(build(replace(problem, source=source)))
        for source in ("stored", "params", *(["some"] if several else []), *["joint"] * joint_ok)
    }
    for source, (out, grads) in made.items():
        known = {k: v for k, v in out.items() if source != "joint" or not v.isnan()}
        assert {k.partition("/")[0] for k in out.keys() - known.keys()} <= {
            "kl_approx",
            "clip_fraction",
        }
        same((known, grads), ({k: made["stored"][0][k] for k in known}, made["stored"][1]))


@settings(max_examples=40)
@given(problems())
def test_reductions_agree(problem: Problem) -> None:
    """Case 128: "none" is ``[*S]``, 0 where masked; its sum is "sum", per valid row "mean"."""
    world = build(problem)
    each = outcome(world, reduction="none")
    total, mean = outcome(world, reduction="sum"), outcome(world)
    same((each[0] | total[0], each[1]), total)
    acts = torch.stack(world.active).any(0) & world.mask
    for name in (name for name in each[0] if name.startswith("loss")):
        counts = world.mask if name in ("loss_critic", "loss_value") else acts
        assert each[0][name].shape == problem.sample
        assert not each[0][name][~counts].any()
        assert_close(each[0][name].sum(), total[0][name])
        assert_close(total[0][name] / max(int(counts.sum()), 1), mean[0][name])
