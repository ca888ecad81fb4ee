"""Metrics: their numbers, shapes, denominators and names."""

import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torch import distributions as d

import composite_losses as cl
from tests.cases import actors_fl as odd
from tests.cases import builders_fl as fl
from tests.cases.builders_fl import LOSSES, PAIR, build, make_data, make_mask, outcome

LAYOUTS = [(4,), (2, 2), (1, 4), (4, 1), (1, 2, 2)]


def run(
    weights: Tensor, cls: Any = cl.ClipPPOLoss, mask: Tensor | None = None, **kw: Any
) -> TensorDict:
    """Output of a loss on data ``[*S]`` whose ratios are ``weights`` (one Normal head)."""
    entries = {name: kw.pop(name) for name in ("value", "target", "old_value") if name in kw}
    zero = torch.zeros(weights.shape)
    old = entries.pop("old_value", zero)
    columns = {"target": zero, "advantage": zero + 1, **entries}
    td = odd.echo_data(zero, zero + 1, log_ratio=weights.log(), **columns)
    td.update({"state_value": old.unsqueeze(-1), "loc": zero.unsqueeze(-1)})
    td["scale"] = torch.ones_like(td["loc"])
    loss = cls(*odd.Echo.networks(), **kw)
    if mask is not None:
        td["alive"] = mask
        loss.set_keys(agent_mask="alive")
    return loss(td).detach()


# --- 131: ESS ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", LAYOUTS)
@pytest.mark.parametrize("cls", [cl.PPOLoss, cl.ClipPPOLoss, cl.KLPENPPOLoss])
def test_ess(cls: Any, shape: tuple[int, ...]) -> None:
    """Case 131: weights (1, 1, 1, 3) → 36/12 = 3 of 4 = 0.75, one scalar for any layout."""
    out = run(torch.tensor([1.0, 1.0, 1.0, 3.0]).reshape(shape), cls)
    assert float(out["ESS"]) == pytest.approx(0.75, abs=1e-6)
    assert all(v.shape == () for v in out.values())
    assert (float(out["max_ratio"]), float(out["mean_ratio"])) == pytest.approx((3.0, 1.5))


@pytest.mark.parametrize("how", ["[6]", "[2, 3]", "[6, 1]"])
def test_ess_with_a_mask(how: str) -> None:
    """Case 131: masked rows with a huge weight: still 0.75 of the four that count."""
    shape = tuple(int(x) for x in how.strip("[]").split(", "))
    weights = torch.tensor([1.0, 1e9, 1.0, 1.0, 1e-9, 3.0]).reshape(shape)
    mask = torch.tensor([True, False, True, True, False, True]).reshape(shape)
    out = run(weights, mask=mask)
    assert float(out["ESS"]) == pytest.approx(0.75, abs=1e-6)
    assert (float(out["max_ratio"]), float(out["mean_ratio"])) == pytest.approx((3.0, 1.5))


@pytest.mark.parametrize("agents", [1, 2, 3])
def test_shapes_of_a_group(agents: int) -> None:
    """Case 131: on [6, A] every metric is one detached scalar; so is each with reduction "none"."""
    td = make_data(PAIR, (6, agents), group=True, source="all")
    for name in LOSSES:
        for reduction in ("mean", "none"):
            out = build(name, PAIR, group=True, reduction=reduction)(td)
            assert out.batch_size == ()
            for key, value in out.items():
                is_loss = key.startswith("loss")
                assert value.requires_grad == is_loss, key
                full = is_loss and reduction == "none"
                assert value.shape == ((6, agents) if full else ()), key


def test_ess_bounds() -> None:
    """Case 131: in (0, 1]: equal weights 1, one dominant weight of n: 1/n; no overflow."""
    assert float(run(torch.full((5,), 2.0))["ESS"]) == pytest.approx(1.0)
    assert float(run(torch.tensor([1e-12, 1e-12, 1e-12, 1e12]))["ESS"]) == pytest.approx(0.25)
    extreme = torch.tensor([1e-38, 1.0, 3e38, 3e38])
    assert float(run(extreme)["ESS"]) == pytest.approx(0.5, abs=1e-5)


# --- 132: clip_fraction --------------------------------------------------------------------------


@pytest.mark.parametrize("shape", LAYOUTS)
@pytest.mark.parametrize("ratio", ["joint", "per_head", "leafwise", "mixed"])
def test_clip_fraction(ratio: str, shape: tuple[int, ...]) -> None:
    """Case 132: ratios (0.7, 0.9, 1.1, 1.3), eps 0.2 → 0.5."""
    weights = torch.tensor([0.7, 0.9, 1.1, 1.3]).reshape(shape)
    assert float(run(weights, clip_epsilon=0.2, ratio=ratio)["clip_fraction"]) == 0.5
    mask = torch.tensor([True, True, True, False]).reshape(shape)
    masked = run(weights, mask=mask, clip_epsilon=0.2, ratio=ratio)
    assert float(masked["clip_fraction"]) == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("eps", "expected"), [(0.05, 1.0), (0.35, 0.0), ((0.35, 0.2), 0.25), ((0.2, 0.35), 0.25)]
)
def test_clip_fraction_of_other_ranges(eps: Any, expected: float) -> None:
    """Case 132: the same ratios with other clip ranges, asymmetric pairs included."""
    out = run(torch.tensor([0.7, 0.9, 1.1, 1.3]), clip_epsilon=eps)
    assert float(out["clip_fraction"]) == expected


def test_unclipped_losses_clip_nothing() -> None:
    """Case 132: a loss without a clip range reports 0."""
    for cls in (cl.PPOLoss, cl.KLPENPPOLoss):
        assert float(run(torch.tensor([0.1, 9.0]), cls)["clip_fraction"]) == 0.0


def two_heads(ratio: str, active: bool) -> dict[str, float]:
    """Metrics of heads with log-ratios move (.3, −.3, 0, .1), gear (−.3, −.3, .3, 0), eps 0.2."""
    td = make_data(PAIR, (4,))
    loss = build(lambda a, c: cl.ClipPPOLoss(a, c, ratio=ratio), PAIR)
    now = loss.log_probs(td)["current", "action"].detach()
    td["action", "move_log_prob"] = now["move"] - torch.tensor([0.3, -0.3, 0.0, 0.1])
    td["action", "gear_log_prob"] = now["gear"] - torch.tensor([-0.3, -0.3, 0.3, 0.0])
    if active:
        loss.set_keys(head_active={"gear": "on"})
        td["on"] = torch.tensor([True, False, False, True])
    return {key: float(value.detach()) for key, value in loss(td).items()}


# sums of log-ratios: all heads (0, −.6, .3, .1); gear active in rows 0 and 3: (0, −.3, 0, .1)
@pytest.mark.parametrize(
    ("ratio", "active", "expected"),
    [
        ("joint", False, {"clip_fraction": 2 / 4}),
        ("per_head", False, {"clip_fraction": 5 / 8}),  # (row, head) pairs
        ("leafwise", False, {"clip_fraction": 3 / 4}),  # rows with any clipped head
        ("joint", True, {"clip_fraction": 1 / 4}),
        ("per_head", True, {"clip_fraction": 3 / 6}),  # active pairs only
        ("leafwise", True, {"clip_fraction": 2 / 4}),
    ],
)
def test_clip_fraction_of_two_heads(ratio: str, active: bool, expected: dict[str, float]) -> None:
    """Case 132: pairs for per_head, rows for joint and leafwise; each head has its own."""
    got = two_heads(ratio, active)
    expected = {**expected, "clip_fraction/move": 2 / 4}
    expected["clip_fraction/gear"] = 1 / 2 if active else 3 / 4
    expected["kl_approx"] = -(-0.3 + 0.1) / 4 if active else -(-0.6 + 0.3 + 0.1) / 4
    expected["kl_approx/move"] = -0.1 / 4
    expected["kl_approx/gear"] = 0.3 / 2 if active else 0.3 / 4
    logs = (0.0, -0.3, 0.0, 0.1) if active else (0.0, -0.6, 0.3, 0.1)
    expected["kl_k3"] = sum(math.exp(x) - 1 - x for x in logs) / 4
    expected["mean_ratio"] = sum(math.exp(x) for x in logs) / 4
    expected["max_ratio"] = math.exp(max(logs))
    weights = [math.exp(x) for x in logs]
    expected["ESS"] = sum(weights) ** 2 / sum(w * w for w in weights) / 4
    assert {key: got[key] for key in expected} == pytest.approx(expected, abs=1e-5)


# --- 134: consistency ----------------------------------------------------------------------------


@pytest.mark.parametrize("group", [False, True])
@pytest.mark.parametrize("name", fl.RATIO)
def test_fresh_data(name: str, group: bool) -> None:
    """Case 134: on fresh data kl ≈ 0, clip_fraction 0, ratios 1, ESS 1; and not after a change."""
    shape = (6, 3) if group else (6,)
    td = make_data(fl.SIX, shape, group=group, source="params")
    loss = build(name, fl.SIX, group=group)
    actor = loss.get_stateful_net("actor_network")
    with torch.no_grad():
        actor[0](td)  # the data's parameters are the current ones: the behaviour policy is this one
    prefix = ("agents", "params") if group else "params"
    for key, value in td[prefix].items(True, True):
        td[prefix][key] = value.detach().clone()
    out = loss(td).detach()
    zeros = {k: v for k, v in out.items() if k.split("/")[0] in ("kl_approx", "kl_k3", "kl")}
    zeros |= {k: v for k, v in out.items() if k.startswith("clip_fraction")}
    assert len(zeros) == 3 + 2 * len(fl.SIX) + (name in fl.KL)
    for key, value in zeros.items():
        assert abs(float(value)) < 1e-6, key
    for key in ("ESS", "max_ratio", "mean_ratio"):
        assert float(out[key]) == pytest.approx(1.0, abs=1e-5), key
    with torch.no_grad():
        for p in loss.parameters():
            p.mul_(-2.0)
    moved = loss(td).detach()
    assert float(moved["kl_k3"]) > 1e-2
    clips = name[:4] not in ("rati", "pena", "PPOL", "KLPE")
    assert (float(moved["clip_fraction"]) > 0.05) == clips


@pytest.mark.parametrize("name", [n for n in fl.RATIO if n not in fl.KL])
def test_kl_and_clip_fraction_agree(name: str) -> None:
    """Case 134: whatever the ratios: kl_k3 ≥ 0, and it is 0 only where no ratio can be clipped."""
    for scale in (0.0, 0.05, 1.0):
        td = make_data(PAIR, (40,))
        loss = build(name, PAIR)
        now = loss.log_probs(td)["current", "action"].detach()
        for head in PAIR:
            td["action", f"{head}_log_prob"] = now[head] + scale * torch.randn(40)
        out = loss(td).detach()
        assert float(out["kl_k3"]) >= 0.0
        assert (float(out["kl_k3"]) < 1e-6) == (scale == 0.0)
        assert scale > 0.0 or float(out["clip_fraction"]) == 0.0
        assert float(out["mean_ratio"]) <= float(out["max_ratio"]) + 1e-6


# --- 135: coefficient 0 --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["PPOLoss", "ClipPPOLoss", "KLPENPPOLoss", "A2CLoss"])
@pytest.mark.parametrize("coeff", ["entropy_coef", "entropy_coeff"])
def test_entropy_without_a_coefficient(name: str, coeff: str) -> None:
    """Case 135: coefficient 0: the entropy metric is there, loss_entropy is 0 without a graph."""
    td = make_data(PAIR, (6,), source="all")
    out = build(name, PAIR, **{coeff: 0.0})(td)
    reference = build(name, PAIR, entropy_coeff=0.3)(td)
    for key in ("entropy", "entropy/move", "entropy/gear"):
        torch.testing.assert_close(out[key], reference[key])
        assert float(out[key]) > 0.1
    assert float(out["loss_entropy"]) == 0.0
    assert out["loss_entropy"].grad_fn is None
    torch.testing.assert_close(reference["loss_entropy"], -0.3 * reference["entropy"])


def test_entropy_without_a_coefficient_native() -> None:
    """Case 135: likewise for EntropyTerm(0), by head, and after a coefficient is scheduled to 0."""
    td = make_data(PAIR, (6,))
    for coeff in (0.0, {"move": 0.0, "gear": 0.0}):
        term = cl.EntropyTerm(coeff)
        out = build(lambda a, c: cl.PolicyLoss(a, c, surrogate=cl.Ratio(), entropy=term), PAIR)(td)  # noqa: B023
        assert float(out["entropy"]) > 0.1
        assert float(out["loss_entropy"]) == 0.0 and out["loss_entropy"].grad_fn is None
    loss = build("ClipPPOLoss", PAIR)
    assert loss(td)["loss_entropy"].grad_fn is not None
    loss.entropy_coeff = 0.0
    assert loss(td)["loss_entropy"].grad_fn is None
    loss.entropy_coeff = 0.5
    out = loss(td)
    torch.testing.assert_close(out["loss_entropy"].detach(), -0.5 * out["entropy"])


def test_no_graph_through_an_unused_entropy() -> None:
    """Case 135: at coefficient 0 the backward pass has no entropy node to pay for."""
    td = make_data("normal", (6,))
    nodes = {}
    for coeff in (0.0, 0.1):
        out = build("PPOLoss", "normal", entropy_coeff=coeff)(td)
        seen, stack = set(), [fl.total_loss(out).grad_fn]
        while stack:
            node = stack.pop()
            if node is not None and node not in seen:
                seen.add(node)
                stack += [n for n, _ in node.next_functions]
        nodes[coeff] = len(seen)
    assert nodes[0.0] < nodes[0.1] - 2


@pytest.mark.parametrize("name", ["PPOLoss", "ClipPPOLoss", "KLPENPPOLoss", "A2CLoss"])
def test_value_term_without_a_coefficient(name: str) -> None:
    """Case 135: a critic coefficient scheduled to 0 keeps explained_variance; the loss is 0."""
    td = make_data(PAIR, (6,), source="all")
    loss = build(name, PAIR)
    expected = loss(td)["explained_variance"]
    loss.critic_coeff = 0.0
    out, grads = outcome(loss, td)
    assert float(out["loss_critic"]) == 0.0
    torch.testing.assert_close(out["explained_variance"], expected)
    assert all(not g.any() for k, g in grads.items() if "critic" in k and g is not None)


# --- the other metrics of the contract -----------------------------------------------------------


@pytest.mark.parametrize("shape", LAYOUTS)
@pytest.mark.parametrize("cls", [cl.ClipPPOLoss, cl.A2CLoss, cl.ReinforceLoss])
def test_explained_variance(cls: Any, shape: tuple[int, ...]) -> None:
    """Case 131: explained variance is one scalar: target (1, 2, 3, 4), value (1, 2, 3, 0)."""
    value, target = torch.tensor([1.0, 2, 3, 0]), torch.tensor([1.0, 2, 3, 4])
    # var(0, 0, 0, 4) = 3, var(1, 2, 3, 4) = 1.25 → 1 − 2.4
    columns = {"value": value.reshape(shape), "target": target.reshape(shape)}
    out = run(torch.ones(shape), cls, **columns)
    assert out["explained_variance"].shape == ()
    assert float(out["explained_variance"]) == pytest.approx(-1.4, abs=1e-5)
    mask = torch.tensor([True, True, True, False]).reshape(shape)
    masked = run(torch.ones(shape), cls, mask=mask, **columns)
    assert float(masked["explained_variance"]) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(
    "cls", [cl.PPOLoss, cl.ClipPPOLoss, cl.KLPENPPOLoss, cl.A2CLoss, cl.ReinforceLoss]
)
def test_value_clip_fraction(cls: Any) -> None:
    """Case 132: value changes (.1, .3, −.3, .2), clip 0.25 → 0.5; without the third, 1/3."""
    value = torch.tensor([0.1, 0.3, -0.3, 0.2])
    out = run(torch.ones(4), cls, value=value, clip_value=0.25)
    assert float(out["value_clip_fraction"]) == 0.5
    mask = torch.tensor([True, True, False, True])
    assert float(
        run(torch.ones(4), cls, mask=mask, value=value, clip_value=0.25)["value_clip_fraction"]
    ) == (pytest.approx(1 / 3))
    moved = run(torch.ones(4), cls, value=value, clip_value=0.25, old_value=value)
    assert float(moved["value_clip_fraction"]) == 0.0


def test_joint_log_prob_has_no_metrics_per_head() -> None:
    """Case 134: where only a joint log-prob is known, kl and clip_fraction per head are NaN."""
    stored, joint = (make_data(PAIR, (8,), source=s) for s in ("stored", "joint"))
    loss = build("ClipPPOLoss", PAIR)
    a, b = loss(stored).detach(), loss(joint).detach()
    assert list(a.keys()) == list(b.keys())
    for key, value in b.items():
        if key.startswith(("kl_approx/", "clip_fraction/")):
            assert value.isnan() and not a[key].isnan(), key
        else:
            torch.testing.assert_close(value, a[key], msg=key)


@pytest.mark.parametrize("name", LOSSES)
def test_entropy_metric(name: str) -> None:
    """Case 135: entropy = mean over valid rows of the heads' sum, and each head's own mean."""
    td, mask = make_data(PAIR, (9,), source="all"), make_mask((9,))
    loss = build(name, PAIR)
    fl.mask_with(loss, td, mask, "root")
    loc, scale, logits = fl.networks(PAIR)[0][0].module(td["observation"][mask])
    move = d.Independent(d.Normal(loc, scale), 1).entropy().mean().detach()
    gear = d.Categorical(logits=logits).entropy().mean().detach()
    out = loss(td)
    expected = {"entropy": move + gear, "entropy/move": move, "entropy/gear": gear}
    for key, value in expected.items():
        torch.testing.assert_close(out[key], value, msg=key)


@pytest.mark.parametrize("name", LOSSES)
def test_same_keys_at_every_call(name: str) -> None:
    """Case 134: the key set depends on the configuration only, not on masks, sources or modes."""
    loss = build(name, PAIR)
    td = make_data(PAIR, (6,), source="all")
    keys = list(loss(td).keys())
    assert keys == list(loss.out_keys)
    masked = td.clone().set("shifted_valid", torch.zeros(6, 1, dtype=torch.bool))
    batches = [masked, td[:1], make_data(PAIR, (2, 3), source="params")]
    if name not in fl.KL and name in fl.JOINT:
        batches.append(make_data(PAIR, (6,), source="joint"))
    for mode in (True, False):
        loss.train(mode)
        for batch in batches:
            assert list(loss(batch).keys()) == keys
    with torch.no_grad():
        assert list(loss(td).keys()) == keys
    assert all(k in ("loss_objective", "loss_actor", "loss_critic", "loss_value", "loss_entropy")
               for k in keys if k.startswith("loss"))  # fmt: skip
