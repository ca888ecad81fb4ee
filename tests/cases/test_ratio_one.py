"""The ratio: 1 on fresh data whatever the head, network and precision; finite when extreme."""

import math
import warnings

import pytest
import torch
import torch.distributions as D
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn

import composite_losses as cl
from composite_losses.errors import NonFiniteError
from tests.cases.builders_ce import (
    ALL_LOSSES,
    BATCHES,
    GEOMETRIES,
    KINDS,
    RATIO_LOSSES,
    STOCHASTIC,
    WIDTH,
    DistActor,
    OwnHead,
    actor_of,
    at,
    clip_loss,
    collect,
    finite,
    fresh,
    gradients,
    inputs_of,
    log_prob_keys,
    recurrent,
    stochastic,
    trajectory,
)

B = WIDTH
TWO_HEADS = {"move": "tanh", "gear": "categorical"}
SOURCES = pytest.mark.parametrize("source", ["stored", "params"])
TINY = 2e-6  # two roundings of a log-prob between 4 and 8; 1e-6 is asked for in test_many_rows


def assert_ratio_one(loss, td, source):
    """The health check: |log-ratio| is what rounding leaves, in every head, all metrics say 1."""
    assert set(loss.log_prob_source(td).values()) == {source}
    both = loss.log_probs(td)
    for key, value in both["behaviour"].items(include_nested=True, leaves_only=True):
        assert value.dtype == torch.float32
        assert (both["current"].get(key) - value).abs().max() < TINY, key
    report = cl.diagnose(loss, td)
    assert report.reasons == []
    assert all(gap < TINY for gap in report.max_abs_log_ratio.values())
    out = loss(td)
    assert out["clip_fraction"] == 0
    assert abs(out["kl_approx"].item()) < 2e-6
    assert out["ESS"].item() == pytest.approx(1.0, abs=1e-5)
    for name in ("max_ratio", "mean_ratio"):
        assert out[name].item() == pytest.approx(1.0, abs=5e-6)
    assert finite(gradients(loss, out).values())


@BATCHES
@SOURCES
@pytest.mark.parametrize("kind", [k for k in KINDS if k != "truncated"])
def test_every_head_type(kind, source, batch, agents):
    """Case 74: same weights, same data: ratio 1, with stored log-probs and parameters."""
    actor, td = fresh(kind, batch, agents=agents)
    loss = clip_loss(actor, agents=agents, log_prob_source=source, validate=True)
    assert_ratio_one(loss, td, source)


@BATCHES
@SOURCES
def test_truncated_normal(source, batch, agents):
    """Case 74: so for TruncatedNormal, whose samples lie in its support."""
    actor, td = fresh("truncated", batch, agents=agents)
    loss = clip_loss(actor, agents=agents, log_prob_source=source)
    assert loss(td)["max_ratio"].item() == pytest.approx(1.0, abs=1e-6)
    loss = clip_loss(actor, agents=agents, log_prob_source=source, validate=True)
    assert_ratio_one(loss, td, source)


@pytest.mark.parametrize("kind", KINDS)
def test_many_rows(kind):
    """Case 74: |log-ratio| < 1e-6 in fp32 for thousands of rows of every head type."""
    actor, td = fresh(kind, (20_000,))
    loss = clip_loss(actor)
    gap = loss.log_probs(td)["current", "action"] - td["action_log_prob"]
    assert gap.abs().max() < 1e-6


COMPOSITES = {
    "two": TWO_HEADS,
    "three": {"a": "normal", "b": "masked", "c": "beta"},
    "many": {"a": "dirichlet", "b": "bernoulli", "c": "one_hot", "d": "gamma", "e": "mixture"},
}


@BATCHES
@SOURCES
@pytest.mark.parametrize("kinds", COMPOSITES)
def test_composites(kinds, source, batch, agents):
    """Case 74: several heads at once."""
    actor, td = fresh(COMPOSITES[kinds], batch, agents=agents)
    loss = clip_loss(actor, agents=agents, log_prob_source=source, validate=True)
    assert_ratio_one(loss, td, source)


@SOURCES
@pytest.mark.parametrize("agents", [None, 1, 3])
@pytest.mark.parametrize("name", RATIO_LOSSES)
def test_every_loss(name, agents, source):
    """Case 74: for every loss and geometry; the loss is −Σ w A, clipped nowhere."""
    actor, td = fresh(TWO_HEADS, (B,), agents=agents)
    cls, options = RATIO_LOSSES[name]
    loss = clip_loss(actor, cls=cls, agents=agents, log_prob_source=source, **options)
    assert_ratio_one(loss, td, source)
    weight = {"per_head": 2.0, "mixed": 1.5}.get(name, 1.0)
    expected = -weight * td[at(agents, "advantage")].mean()
    torch.testing.assert_close(loss(td)["loss_objective"], expected, rtol=1e-5, atol=1e-5)


@SOURCES
@pytest.mark.parametrize("kinds", ["categorical", "tanh", TWO_HEADS], ids=str)
@pytest.mark.parametrize(
    ("net", "agents"), [("lstm", None), ("gru", None), ("gru", 1), ("gru", 2), ("gru", 3)]
)
def test_recurrent_actors(net, agents, kinds, source):
    """Case 74: collected step by step, scored along time, with resets inside: ratio 1."""
    actor, states = recurrent(net, kinds, agents)
    td = trajectory(actor, kinds, states, agents)
    loss = clip_loss(actor, agents=agents, log_prob_source=source)
    before = td.clone()
    assert_ratio_one(loss, td, source)
    assert (td == before).all()
    # it matters where the state is reset
    td["is_init"][1, 3] = False
    assert cl.diagnose(loss, td).max_abs_log_ratio != pytest.approx(
        dict.fromkeys(loss.log_prob_source(td), 0.0), abs=1e-5
    )


# --- layers that draw random numbers ---


@pytest.mark.parametrize("functional", [True, False])
@pytest.mark.parametrize("layer", STOCHASTIC)
@pytest.mark.parametrize("kinds", ["categorical", TWO_HEADS], ids=str)
def test_dropout_in_train_mode(kinds, layer, functional):
    """Case 75: train mode warns once; eval mode reaches the actor and gives ratio 1."""
    actor, td, loss = stochastic(kinds, layer, functional)
    loss.train()
    assert all(module.training for module in actor.modules())
    with pytest.warns(UserWarning, match=r"(?i)train"):
        out = loss(td)
    assert out["kl_k3"] > 1e-6
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss(td)  # once
    loss.eval()
    assert not any(module.training for module in actor.modules())
    assert_ratio_one(loss, td, "stored")


@pytest.mark.parametrize("layer", STOCHASTIC)
@pytest.mark.parametrize("kinds", ["categorical", TWO_HEADS], ids=str)
def test_dropout_is_diagnosed(kinds, layer):
    """Case 75: so ``diagnose`` names the layer that is in train mode."""
    _, td, loss = stochastic(kinds, layer)
    report = cl.diagnose(loss.train(), td)
    assert max(report.max_abs_log_ratio.values()) > 1e-3
    assert any("train" in r and "dropout" in r for r in report.reasons)
    assert cl.diagnose(loss.eval(), td).reasons == []


def test_batch_norm_in_train_mode():
    """Case 75: batch statistics are found by ``diagnose``, and not changed; eval gives ratio 1."""
    body = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Tanh())
    actor = actor_of("normal", body=body).eval()
    td = collect(actor, inputs_of("normal", (16,)))
    loss = clip_loss(actor)
    before = {k: v.clone() for k, v in body.state_dict().items()}
    loss.train()
    assert any("BatchNorm" in reason for reason in cl.diagnose(loss, td).reasons)
    assert all(torch.equal(v, before[k]) for k, v in body.state_dict().items())
    assert_ratio_one(loss.eval(), td, "stored")


# --- precision ---

PRECISE = [k for k in KINDS if k not in ("truncated", "kumaraswamy", "mixture")]
AUTOCAST = pytest.mark.parametrize("autocast", [True, False])


def low_precision(kinds, agents, autocast, dtype=torch.bfloat16):
    """(actor, data, context) of a bf16 network, or of an fp32 one under autocast."""
    actor, td = fresh(kinds, (B,), agents=agents)
    if not autocast:
        actor = actor.to(dtype)
        td[at(agents, "observation")] = td[at(agents, "observation")].to(dtype)
    context = torch.autocast("cpu", torch.bfloat16, enabled=autocast)
    with context, torch.no_grad():  # actions of the fp32 net, parameters of this one
        return actor, actor[0](td.exclude(*log_prob_keys(kinds, agents))), context


@AUTOCAST
@pytest.mark.parametrize("agents", [None, 1, 3])
@pytest.mark.parametrize("kinds", [*PRECISE, TWO_HEADS], ids=str)
def test_bf16_logits(kinds, agents, autocast):
    """Case 76: logits of a bf16 net: log-probs in fp32, |log-ratio| < 1e-6 on our paths."""
    actor, td, context = low_precision(kinds, agents, autocast)
    for source in ("stored", "params"):
        loss = clip_loss(actor, agents=agents, log_prob_source=source)
        with context:
            data = td.clone()
            if source == "stored":
                current = clip_loss(actor, agents=agents).log_probs(td)["current"]
                names = ["action"] if isinstance(kinds, str) else kinds
                for name, key in zip(names, log_prob_keys(kinds, agents), strict=True):
                    data[key] = current[at(agents, name)].detach()
            both, out = loss.log_probs(data), loss(data)
        for key, value in both["current"].items(include_nested=True, leaves_only=True):
            assert value.dtype == torch.float32
            assert both["behaviour"].get(key).dtype == torch.float32
            assert (value - both["behaviour"].get(key)).abs().max() < 1e-6
        for key, value in out.items():
            assert value.dtype == torch.float32, key
            assert value.isfinite(), key
        assert out["max_ratio"].item() == pytest.approx(1.0, abs=5e-6)
        assert finite(gradients(loss, out).values())


@AUTOCAST
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["categorical", "masked", "one_hot", "normal"])
def test_fp32_log_prob_of_half_precision_parameters(kind, dtype, autocast):
    """Case 76: log-prob and entropy are those of the rounded parameters, not computed in bf16."""
    if autocast and dtype == torch.float16:
        dtype = torch.bfloat16
    actor, td, context = low_precision(kind, None, autocast, dtype)
    loss = clip_loss(actor)
    with context:
        current, out = loss.log_probs(td)["current", "action"], loss(td)
    params = td
    if kind == "normal":
        dist = D.Normal(params["loc"].double(), params["scale"].double())
        expected, entropy = dist.log_prob(td["action"].double()), dist.entropy().sum(-1)
    else:
        logits = params["logits"].double()
        if kind == "masked":
            logits = logits.masked_fill(~td["action_mask"], -math.inf)
        index = td["action"].argmax(-1) if kind == "one_hot" else td["action"]
        log_p = logits.log_softmax(-1)
        expected = log_p.gather(-1, index.unsqueeze(-1)).squeeze(-1)
        entropy = -(log_p.exp() * log_p.clamp_min(-1e9)).sum(-1)
    torch.testing.assert_close(current.double(), expected, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(out["entropy"].double(), entropy.mean(), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("way", ["get_dist", "own_head"])
def test_bf16_distribution_objects(way):
    """Case 76: an actor that builds a bf16 distribution itself is scored in fp32, too."""
    if way == "get_dist":
        actor = DistActor()
        logits = lambda td: actor.net(td["observation"].bfloat16())  # noqa: E731
    else:
        net = nn.Linear(WIDTH, WIDTH).bfloat16()
        module = TensorDictModule(net, in_keys=["observation"], out_keys=["logits"])
        head = OwnHead(in_keys=["logits"], out_keys=["action"], distribution_class=D.Categorical)
        actor = ProbabilisticTensorDictSequential(module, head)
        logits = lambda td: 2 * net(td["observation"])  # noqa: E731
    dtype = torch.float32 if way == "get_dist" else torch.bfloat16
    td = TensorDict(observation=torch.randn(64, WIDTH).to(dtype), batch_size=[64])
    td["action"] = torch.randint(WIDTH, (64,))
    td["action_log_prob"], td["advantage"] = torch.zeros(64), torch.randn(64, 1)
    loss = cl.ClipPPOLoss(actor)
    current = loss.log_probs(td)["current", "action"]
    assert current.dtype == torch.float32
    logits = logits(td).detach()
    if way == "get_dist":  # its constructor has already rounded the normalised logits to bf16
        logits = D.Categorical(logits=logits).logits
    log_p = logits.double().log_softmax(-1)
    expected = log_p.gather(-1, td["action"].unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(current.detach().double(), expected, rtol=1e-5, atol=1e-6)
    assert all(v.dtype == torch.float32 for v in loss(td).values())


# --- the gap between the engine and the trainer ---


@BATCHES
@pytest.mark.parametrize("kinds", ["normal", TWO_HEADS], ids=str)
def test_log_prob_gap(kinds, batch, agents):
    """Case 78: an engine that disagrees by 0.3 shows as 0.3; recomputed, the gap is exactly 0."""
    actor, td = fresh(kinds, batch, agents=agents)
    key = log_prob_keys(kinds, agents)[0]
    name = key if isinstance(key, str) else key[-1]
    head = name.removesuffix("_log_prob")
    wide = td[key].ndim > len(td.batch_size) + (agents is not None)
    shift = torch.zeros_like(td[key])
    shift.flatten()[0] = 0.3  # in one event of one row
    td[key] -= shift
    loss = clip_loss(actor, agents=agents, ratio="per_head")
    assert cl.diagnose(loss, td).max_abs_log_ratio[head] == pytest.approx(0.3, abs=1e-5)
    out = loss(td)
    samples = td[at(agents, "advantage")].numel()
    heads = 1 if isinstance(kinds, str) else len(kinds)
    # e^0.3 = 1.35 > 1.2: one of the (row, head) pairs is clipped; −log r is −0.3 in one row
    assert out["clip_fraction"].item() == pytest.approx(1 / samples / heads)
    assert out["kl_approx"].item() == pytest.approx(-0.3 / samples, rel=1e-4)
    assert out["max_ratio"].item() == pytest.approx(math.exp(0.3), rel=1e-5)
    assert wide == (kinds == "normal")
    current = loss.log_probs(td)["current"].detach()
    for key in log_prob_keys(kinds, agents):
        name = (key if isinstance(key, str) else key[-1]).removesuffix("_log_prob")
        td[key] = current[at(agents, name)]
    assert set(cl.diagnose(loss, td).max_abs_log_ratio.values()) == {0.0}
    out = loss(td)
    assert (out["clip_fraction"], out["kl_approx"], out["max_ratio"]) == (0, 0, 1)


@BATCHES
@pytest.mark.parametrize("where", ["current", "stored"])
@pytest.mark.parametrize("name", ALL_LOSSES)
def test_non_finite_head_is_named(name, where, batch, agents):
    """Case 79: NaN in one head's logits or stored log-prob: the error names head and group."""
    if where == "stored" and name in ("a2c", "reinforce"):
        name = "joint"  # these read no stored log-prob
    actor, td = fresh({"gear": "categorical", "move": "normal"}, batch, agents=agents)
    cls, options = ALL_LOSSES[name]
    loss = clip_loss(actor, cls=cls, agents=agents, validate=True, **options)
    assert loss(td)[loss.out_keys[0]].isfinite()
    if where == "stored":
        td[at(agents, "gear_log_prob")].view(-1)[0] = math.nan
    else:
        with torch.no_grad():
            loss.get_parameter(
                next(n for n, _ in loss.named_parameters() if n.endswith("last.bias"))
            )[0] = math.nan  # the first output is a logit of gear
    with pytest.raises(NonFiniteError) as caught:
        loss(td)
    assert "'gear'" in str(caught.value) or "gear_log_prob" in str(caught.value)
    assert "move" not in str(caught.value)
    if agents is not None:
        assert "agents" in str(caught.value)
    report = cl.diagnose(loss, td)
    rows = td[at(agents, "advantage")].numel()
    assert report.non_finite == {"gear": 1 if where == "stored" else rows, "move": 0}
    assert any("gear" in reason for reason in report.reasons)


# --- extreme log-ratios ---

TWO_HEADS = {"move": "independent", "gear": "categorical"}


def shifted(kinds, agents, shift, advantage, dtype=torch.float32):
    """Data whose log-ratio is ``shift`` in every head, with one advantage for all."""
    actor, td = fresh(kinds, (B,), agents=agents)
    actor, td = actor.to(dtype), td.apply(lambda x: x.to(dtype) if x.is_floating_point() else x)
    loss = clip_loss(actor, agents=agents)
    current = loss.log_probs(td)["current"].detach()
    for head in kinds:
        td[at(agents, f"{head}_log_prob")] = current[at(agents, head)] - shift
    td[at(agents, "advantage")] = torch.full_like(td[at(agents, "advantage")], advantage)
    return actor, td


# (shift, advantage): where the clipped branch is chosen. With C = 1.2 or 0.8 per head: joint C,
# per head 2 C, leafwise C², half of joint and per head 1.5 C; the loss is minus that times A.
BOUND = {"joint": lambda c: c, "per_head": lambda c: 2 * c, "leafwise": lambda c: c * c}
BOUND["mixed"] = lambda c: 1.5 * c


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [200.0, 1000.0])
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("agents", [None, 1, 3])
def test_extreme_ratio_where_the_clip_binds(agents, geometry, size, dtype):
    """Case 59: log-ratios of ±200 and ±1000 give the clipped value and a gradient of exactly 0."""
    for shift, advantage, c in ((size, 1.0, 1.2), (-size, -1.0, 0.8)):
        actor, td = shifted(TWO_HEADS, agents, shift, advantage, dtype)
        loss = clip_loss(actor, agents=agents, ratio=geometry, entropy_bonus=False)
        out = loss(td)
        expected = -advantage * BOUND[geometry](c)
        assert out["loss_objective"].item() == pytest.approx(expected, rel=1e-5)
        assert finite(out.values())
        assert out["clip_fraction"] == 1.0
        assert all((g == 0).all() for g in gradients(loss, out).values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [200.0, 1000.0])
@pytest.mark.parametrize("name", RATIO_LOSSES)
@pytest.mark.parametrize("shift", [1.0, -1.0])
def test_extreme_ratio_is_never_nan(shift, name, size, dtype):
    """Case 59: whatever branch is chosen, no NaN in losses and metrics, finite gradients."""
    cls, options = RATIO_LOSSES[name]
    for advantage in (1.0, -1.0, 1e6, -1e6, 0.0):
        actor, td = shifted(TWO_HEADS, None, shift * size, advantage, dtype)
        loss = clip_loss(actor, cls=cls, critic=True, **options).to(dtype)
        out = loss(td)
        for key, value in out.items():
            assert not value.isnan().any(), (key, advantage)
        if abs(advantage) <= 1.0:
            assert out["loss_objective"].isfinite()
        for key, gradient in gradients(loss, out).items():
            assert gradient.isfinite().all(), (key, advantage)


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("size", [200.0, 1000.0])
def test_extreme_ratio_under_dual_clip(size, geometry):
    """Case 59: dual clip c = 3 bounds the loss by c |A| per ratio, also for e^1000."""
    actor, td = shifted(TWO_HEADS, None, size, -1.0)
    loss = clip_loss(actor, ratio=geometry, dual_clip=3.0, entropy_bonus=False)
    out = loss(td)
    # per head twice 3, mixed (3 + 6) / 2
    expected = {"joint": 3.0, "per_head": 6.0, "leafwise": 3.0, "mixed": 4.5}[geometry]
    assert out["loss_objective"].item() == pytest.approx(expected)
    assert all((g == 0).all() for g in gradients(loss, out).values())


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("size", [200.0, 1000.0, -200.0, -1000.0])
def test_extreme_heads_and_rows(geometry, size):
    """Case 59: opposite heads make no NaN; one extreme head in one row leaves all else as it is."""
    actor, td = shifted(TWO_HEADS, None, 0.0, 1.0)
    td["move_log_prob"] -= size
    td["gear_log_prob"] += size
    loss = clip_loss(actor, ratio=geometry)
    out = loss(td)
    assert not any(v.isnan().any() for v in out.values())
    assert finite(gradients(loss, out).values())

    advantage = math.copysign(1.0, size)  # the clip binds in the extreme row
    c = 1.2 if size > 0 else 0.8
    actor, td = shifted(TWO_HEADS, None, 0.05, advantage)
    td["move_log_prob"][0] -= size
    loss = clip_loss(actor, ratio=geometry, entropy_bonus=False, functional=False)
    dist = actor.get_dist(td.copy())
    move = (dist.dists["move"].log_prob(td["move"]) - td["move_log_prob"]).clamp(-1, 1).exp()
    gear = (dist.dists["gear"].log_prob(td["gear"]) - td["gear_log_prob"]).exp()
    move = torch.cat([torch.full((1,), c), move[1:]])
    joint = torch.cat([torch.full((1,), c), move[1:] * gear[1:]])
    each = move + gear
    value = {"joint": joint, "per_head": each, "leafwise": move * gear, "mixed": (joint + each) / 2}
    expected = -advantage * value[geometry].mean()
    found = loss(td)["loss_objective"]
    torch.testing.assert_close(found, expected)
    parameters = list(actor.parameters())
    one, two = torch.autograd.grad(found, parameters), torch.autograd.grad(expected, parameters)
    for a, b in zip(one, two, strict=True):
        torch.testing.assert_close(a, b)
