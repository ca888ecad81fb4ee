"""``diagnose``: silent on fresh data, and each cause of a ratio that is not 1 by its name."""

import copy
import math

import pytest
import torch
from torch import nn

import composite_losses as cl
from composite_losses.errors import GraphError, MissingKeyError, ShapeError
from tests.cases.builders_ce import (
    ALL_LOSSES,
    BATCHES,
    KINDS,
    STOCHASTIC,
    WIDTH,
    actor_of,
    at,
    clip_loss,
    collect,
    fresh,
    inputs_of,
    log_prob_keys,
    recurrent,
    set_group,
    stochastic,
    trajectory,
)

ROWS = 16
TWO_HEADS = {"move": "tanh", "gear": "categorical"}
MANY = {"a": "normal", "b": "masked", "c": "beta", "d": "bernoulli", "e": "dirichlet"}
CONTINUOUS = {"move": "independent", "gear": "categorical"}
AGENTS = pytest.mark.parametrize("agents", [None, 1, 2, 3])


def moved(actor, size=0.3):
    """The same policy with other weights."""
    other = copy.deepcopy(actor)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(size * torch.randn_like(p))
    return other


def said(report, *words):
    """Whether one of the reasons holds all the words."""
    return any(all(word.lower() in reason.lower() for word in words) for reason in report.reasons)


def unnamed(report, head):
    return not any(f"head {head!r}" in reason for reason in report.reasons)


# --- all is well ---


@BATCHES
@pytest.mark.parametrize("kinds", [*KINDS, TWO_HEADS, MANY], ids=str)
@pytest.mark.parametrize("source", ["stored", "params"])
def test_fresh_data_of_every_head_type(source, kinds, batch, agents):
    actor, td = fresh(kinds, batch, agents=agents)
    loss = clip_loss(actor, agents=agents, log_prob_source=source)
    report = cl.diagnose(loss, td)
    names = ["action"] if isinstance(kinds, str) else list(kinds)
    assert isinstance(report, cl.Diagnosis)
    assert report.reasons == []
    assert report.sources == dict.fromkeys(names, source)
    assert list(report.max_abs_log_ratio) == names
    assert all(0 <= gap < 2e-6 for gap in report.max_abs_log_ratio.values())
    assert report.non_finite == dict.fromkeys(names, 0)
    assert report.masked_fraction == 0.0
    assert all(type(gap) is float for gap in report.max_abs_log_ratio.values())
    assert all(type(count) is int for count in report.non_finite.values())


@pytest.mark.parametrize("name", ALL_LOSSES)
@AGENTS
def test_fresh_data_of_every_loss(agents, name):
    actor, td = fresh(TWO_HEADS, (ROWS,), agents=agents)
    cls, options = ALL_LOSSES[name]
    report = cl.diagnose(clip_loss(actor, cls=cls, agents=agents, critic=True, **options), td)
    assert report.reasons == []
    assert max(report.max_abs_log_ratio.values()) < 2e-6


@AGENTS
def test_text_shows_heads_keys_and_shapes(agents):
    actor, td = fresh(TWO_HEADS, (WIDTH,), agents=agents)
    text = str(cl.diagnose(clip_loss(actor, agents=agents), td))
    for head, key in zip(TWO_HEADS, log_prob_keys(TWO_HEADS, agents), strict=True):
        assert head in text
        assert repr(at(agents, head)) in text
        assert repr(key) in text
        for shape in (td[at(agents, head)].shape, td[key].shape):
            assert str(list(shape)) in text
    assert "stored" in text


@AGENTS
def test_without_advantage(agents):
    actor, td = fresh(TWO_HEADS, (ROWS,), agents=agents)
    bare = td.exclude(at(agents, "advantage"), at(agents, "value_target"))
    report = cl.diagnose(clip_loss(actor, agents=agents), bare)
    assert report.reasons == []
    assert max(report.max_abs_log_ratio.values()) < 2e-6


@AGENTS
def test_joint_log_prob(agents):
    """One log-prob for all heads: its gap stands under every head."""
    actor, td = fresh(TWO_HEADS, (ROWS,), agents=agents)
    keys = log_prob_keys(TWO_HEADS, agents)
    joint = sum(td[key] for key in keys)
    td = td.exclude(*keys)
    td[at(agents, "sample_log_prob")] = joint
    loss = clip_loss(actor, agents=agents)
    report = cl.diagnose(loss, td)
    assert report.sources == {"move": "joint", "gear": "joint"}
    assert report.reasons == []
    td[at(agents, "sample_log_prob")] = joint - 0.25
    report = cl.diagnose(loss, td)
    for gap in report.max_abs_log_ratio.values():
        assert gap == pytest.approx(0.25, abs=1e-5)
    assert report.reasons


@pytest.mark.parametrize(("net", "agents"), [("lstm", None), ("gru", None), ("gru", 3)])
def test_recurrent_actor(net, agents):
    """It runs under recurrent mode, as ``forward`` does."""
    actor, states = recurrent(net, "categorical", agents)
    td = trajectory(actor, "categorical", states, agents)
    assert cl.diagnose(clip_loss(actor, agents=agents), td).reasons == []


@AGENTS
def test_masked_rows(agents):
    """Rows that do not count are no reason, whatever they hold; their fraction is reported."""
    actor, td = fresh(CONTINUOUS, (ROWS,), agents=agents)
    mask = torch.rand(td[at(agents, "advantage")].shape[:-1]) < 0.7
    td[at(agents, "valid")] = mask
    loss = clip_loss(actor, agents=agents)
    loss.set_keys(agent_mask=at(agents, "valid"))
    for name in ("move_log_prob", "observation", "move"):
        td[at(agents, name)][~mask] = math.nan
    td[at(agents, "gear")][~mask] = 99
    report = cl.diagnose(loss, td)
    assert report.reasons == []
    assert report.non_finite == {"move": 0, "gear": 0}
    assert max(report.max_abs_log_ratio.values()) < 2e-6
    assert report.masked_fraction == pytest.approx((~mask).float().mean().item(), abs=1e-6)


@AGENTS
@pytest.mark.parametrize("name", ["joint", "klpen", "reinforce"])
def test_nothing_changes(name, agents):
    """Data, weights, buffers, modes, gradients and the random state are what they were."""
    actor, td = fresh({"move": "no_entropy", "gear": "masked"}, (ROWS,), agents=agents)
    cls, options = ALL_LOSSES[name]
    loss = clip_loss(moved(actor), cls=cls, agents=agents, critic=True, **options)
    before, state = td.clone(), {k: v.clone() for k, v in loss.state_dict().items()}
    modes = [m.training for m in loss.modules()]
    generator = torch.get_rng_state()
    cl.diagnose(loss, td)
    assert torch.equal(generator, torch.get_rng_state())
    assert (td == before).all()
    assert set(td.keys(True, True)) == set(before.keys(True, True))
    assert all(torch.equal(v, state[k]) for k, v in loss.state_dict().items())
    assert modes == [m.training for m in loss.modules()]
    assert all(p.grad is None for p in loss.parameters())


# --- what is wrong ---


@pytest.mark.parametrize("layer", STOCHASTIC)
@pytest.mark.parametrize("functional", [True, False])
def test_dropout(functional, layer):
    """A module in train mode that draws random numbers is named; in eval mode all is well."""
    _, td, loss = stochastic(TWO_HEADS, layer, functional)
    report = cl.diagnose(loss.train(), td)
    assert max(report.max_abs_log_ratio.values()) > 1e-3
    assert said(report, "train mode", "dropout")
    assert cl.diagnose(loss.eval(), td).reasons == []


def test_dropout_that_drops_nothing():
    body = nn.Sequential(nn.Linear(WIDTH, 8), nn.Dropout(0.0))
    actor = actor_of("normal", body=body)
    td = collect(actor, inputs_of("normal", (ROWS,)))
    td["action_log_prob"] -= 1.0
    assert not said(cl.diagnose(clip_loss(actor), td), "dropout")


CLIPPABLE = ["independent", "independent_normal", "normal", "tanh", "tanh_tensor", "beta"]


@AGENTS
@pytest.mark.parametrize("kind", CLIPPABLE)
def test_clipped_actions(kind, agents):
    """Actions clipped after sampling: the head is named, the other one is not."""
    kinds = {"move": kind, "gear": "categorical"}
    actor, td = fresh(kinds, (ROWS,), agents=agents)
    loss = clip_loss(actor, agents=agents)
    key = at(agents, "move")
    # a box that some of the samples leave; for a bounded support its own bounds
    low, high = {"tanh": (-2, 3), "beta": (0, 1)}.get(kind, (-0.3, 0.3))
    if kind == "tanh_tensor":
        low, high = (KINDS[kind].kwargs[name] for name in ("low", "high"))
    wide = (td[key] - 0.5) * 4 if kind in ("tanh", "tanh_tensor", "beta") else td[key]
    td[key] = torch.minimum(torch.maximum(wide, torch.as_tensor(low)), torch.as_tensor(high))
    report = cl.diagnose(loss, td)
    assert report.max_abs_log_ratio["move"] > 1e-3
    assert said(report, "head 'move'", "clipped", "bounds")
    assert unnamed(report, "gear")


@AGENTS
@pytest.mark.parametrize("kind", ["bernoulli", "categorical", "torch_one_hot", "masked_one_hot"])
def test_discrete_actions_are_not_clipped(kind, agents):
    """0 and 1 are values of a discrete action, not the bounds of a box."""
    actor, td = fresh({"gear": kind, "move": "independent"}, (ROWS,), agents=agents)
    report = cl.diagnose(clip_loss(moved(actor), agents=agents), td)
    assert report.max_abs_log_ratio["gear"] > 1e-3
    assert not said(report, "head 'gear'", "clipped")


OUTSIDE = {
    "tanh": 3.5,
    "tanh_tensor": 3.5,
    "truncated": -2.5,
    "beta": 1.2,
    "kumaraswamy": 1.2,
    "gamma": -0.1,
    "dirichlet": 0.7,
    "bernoulli": 0.5,
    "categorical": WIDTH,
    "probs": -1,
    "masked": WIDTH,
    "one_hot": 0,
    "torch_one_hot": 1,
    "masked_one_hot": 0,
    "normal": math.nan,
    "independent": math.inf,
    "mixture": math.nan,
}


@AGENTS
@pytest.mark.parametrize("kind", OUTSIDE)
def test_actions_outside_their_support(kind, agents):
    """An action outside its head's support or range is named, with the number of actions."""
    kinds = {"gear": "categorical", "move": kind}
    actor, td = fresh(kinds, (ROWS,), agents=agents)
    loss = clip_loss(actor, agents=agents)
    td[at(agents, "move")][0] = OUTSIDE[kind]
    report = cl.diagnose(loss, td)
    count = 1 if agents is None else agents
    assert said(report, "head 'move'", f"{count} stored action", "support") or said(
        report, "head 'move'", f"{count} stored action", "mask"
    )
    assert unnamed(report, "gear")


@AGENTS
@pytest.mark.parametrize("kind", ["masked", "masked_one_hot"])
@pytest.mark.parametrize("single", [True, False])
def test_forbidden_actions(single, kind, agents):
    """An action mask that forbids the stored action is named, with the number of actions."""
    kinds = kind if single else {"gear": kind, "move": "independent"}
    name = "action" if single else "gear"
    actor, td = fresh(kinds, (ROWS,), agents=agents)
    loss = clip_loss(actor, agents=agents)
    action, mask = td[at(agents, name)], td[at(agents, f"{name}_mask")]
    index = (action if kind == "masked" else action.argmax(-1)).unsqueeze(-1)
    mask[:2] = True
    mask[:2] = mask[:2].scatter(-1, index[:2], False)  # two rows forbid what was done
    report = cl.diagnose(loss, td)
    count = 2 * (1 if agents is None else agents)
    assert said(report, f"head {name!r}", "mask", "forbid", f"{count} stored action")
    if not single:
        assert unnamed(report, "move")


@AGENTS
@pytest.mark.parametrize("kinds", ["categorical", TWO_HEADS], ids=str)
def test_wrong_key(kinds, agents):
    """A log-prob key that holds something else: both keys are named."""
    actor, td = fresh(kinds, (ROWS,), agents=agents)
    keys = log_prob_keys(kinds, agents)
    wrong = at(agents, "old_value")
    td[wrong] = torch.randn(td[keys[-1]].shape)
    loss = clip_loss(actor, agents=agents)
    loss.set_keys(sample_log_prob=[*keys[:-1], wrong])
    report = cl.diagnose(loss, td)
    head = "action" if isinstance(kinds, str) else "gear"
    assert said(report, f"head {head!r}", repr(wrong), repr(keys[-1]), "key")
    if head == "gear":
        assert unnamed(report, "move")


@AGENTS
@pytest.mark.parametrize("kind", ["categorical", "one_hot", "torch_one_hot", "masked"])
def test_probabilities_instead_of_log_probs(kind, agents):
    """Positive values under the key of a discrete head's log-prob are no log-probs."""
    actor, td = fresh(kind, (ROWS,), agents=agents)
    key = log_prob_keys(kind, agents)[0]
    td[key] = td[key].exp()
    report = cl.diagnose(clip_loss(actor, agents=agents), td)
    assert said(report, "head 'action'", repr(key), "key", "positive")


@AGENTS
@pytest.mark.parametrize("kinds", ["normal", TWO_HEADS], ids=str)
def test_overwritten_parameters(kinds, agents):
    """Stored parameters that equal the current ones, while the stored log-probs do not fit."""
    actor, td = fresh(kinds, (ROWS,), agents=agents)
    new = moved(actor)
    loss = clip_loss(new, agents=agents)
    assert not said(cl.diagnose(loss, td), "parameters", "equal", "current")
    with torch.no_grad():
        td = new[0](td)  # the new network's parameters over the stored ones
    report = cl.diagnose(loss, td)
    assert said(report, "parameters", "equal", "current")


@AGENTS
@pytest.mark.parametrize("source", ["stored", "params"])
def test_moved_weights(source, agents):
    """Without another cause, the text says by how much the worst head is off."""
    actor, td = fresh(CONTINUOUS, (ROWS,), agents=agents)
    loss = clip_loss(moved(actor), agents=agents, log_prob_source=source)
    report = cl.diagnose(loss, td)
    gaps = report.max_abs_log_ratio
    assert min(gaps.values()) > 1e-3
    worst = max(gaps, key=gaps.get)
    assert said(report, f"head {worst!r}", f"{gaps[worst]:.3g}")
    assert report.reasons[0] in str(report)


@AGENTS
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_log_probs(value, agents):
    """Non-finite rows are counted for their head, and do not hide the gap of the others."""
    actor, td = fresh(CONTINUOUS, (ROWS,), agents=agents)
    key = log_prob_keys(CONTINUOUS, agents)[0]
    td[key].view(-1)[:3] = value
    td[key].view(-1)[5] -= 0.5
    report = cl.diagnose(clip_loss(actor, agents=agents), td)
    assert report.non_finite == {"move": 3, "gear": 0}
    assert report.max_abs_log_ratio["move"] == pytest.approx(0.5, abs=1e-5)
    assert said(report, "head 'move'", "3 row", "finite")
    assert unnamed(report, "gear")


def test_two_causes_at_once():
    """Every cause is named, not the first one only."""
    kinds = {"move": "independent", "gear": "masked"}
    body = STOCHASTIC["dropout"]()
    actor = actor_of(kinds, body=body).eval()
    td = collect(actor, inputs_of(kinds, (ROWS,)))
    td["move"] = td["move"].clamp(-0.3, 0.3)
    td["gear_mask"][0] = True
    td["gear_mask"][0, td["gear"][0]] = False
    report = cl.diagnose(clip_loss(actor).train(), td)
    assert said(report, "train mode", "dropout")
    assert said(report, "head 'move'", "clipped")
    assert said(report, "head 'gear'", "forbid")


# --- what it cannot look at ---


@AGENTS
def test_errors(agents):
    """Missing, misshapen and graph-carrying entries are the same clear errors as in ``forward``."""
    actor, td = fresh("independent", (WIDTH,), agents=agents)
    loss = clip_loss(actor, agents=agents, log_prob_source="stored")
    key = log_prob_keys("independent", agents)[0]
    with pytest.raises(MissingKeyError, match="action_log_prob"):
        cl.diagnose(loss, td.exclude(key))
    bad = td.clone()
    bad[key] = bad[key].unsqueeze(-1).expand(*bad[key].shape, WIDTH)
    with pytest.raises(ShapeError, match="action_log_prob"):
        cl.diagnose(loss, bad)
    graph = td.clone()
    graph[key] = graph[key].clone().requires_grad_()
    with pytest.raises(GraphError, match="action_log_prob"):
        cl.diagnose(loss, graph)


def test_other_losses_of_a_group():
    """Keys that the user set are those that are read and shown."""
    actor, td = fresh("normal", (WIDTH,), agents=2)
    td.rename_key_(("agents", "action_log_prob"), ("agents", "old"))
    loss = set_group(cl.PPOLoss(actor))
    loss.set_keys(sample_log_prob=("agents", "old"))
    report = cl.diagnose(loss, td)
    assert report.reasons == []
    assert report.sources == {"action": "stored"}
    assert repr(("agents", "old")) in str(report)
