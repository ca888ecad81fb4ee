"""Validity masks, padding, dead agents: what a masked row holds never matters."""

import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torchrl.modules import RunningValueNorm

import composite_losses as cl
from composite_losses.errors import ConfigError, MissingKeyError, NonFiniteError, ShapeError
from tests.cases import actors_fl as odd
from tests.cases import builders_fl as fl
from tests.cases import oracles_fl as oracle
from tests.cases.builders_fl import LOSSES, PAIR, build, cut, make_data, make_mask, outcome, same

GARBAGE = [*fl.KINDS, "mixed"]
HEADWISE = [n for n in LOSSES if n not in ("dual", "ReinforceLoss-alone")]
LENGTHS = [5, 2, 4]
ACTOR_CRITIC = [n for n in LOSSES if n != "ReinforceLoss-alone"]


# --- 80: what masked rows hold -------------------------------------------------------------------


@pytest.mark.parametrize("kind", GARBAGE)
@pytest.mark.parametrize("name", LOSSES)
def test_garbage_in_every_entry(name: str, kind: str) -> None:
    """Case 80: ±inf, NaN, 1e30 in every entry of masked rows: as if the rows were not there."""
    td = make_data(fl.TRIO, (9,), source="all")
    fl.masked_against_cut(name, fl.TRIO, td, make_mask((9,)), kind)


@pytest.mark.parametrize(("how", "shape", "group"), fl.LAYOUTS, ids=fl.LAYOUT_IDS)
@pytest.mark.parametrize("name", LOSSES)
def test_garbage_in_every_layout(name: str, how: str, shape: Any, group: bool) -> None:
    """Case 80: flat, time and agent batches (1, 2, 3 agents), every way to give the mask."""
    td = make_data(PAIR, shape, group=group, source="all")
    fl.masked_against_cut(name, PAIR, td, make_mask(shape), "mixed", how, group=group)


@pytest.mark.parametrize("kind", ["nan", "huge"])
@pytest.mark.parametrize("name", ["ClipPPOLoss", "KLPENPPOLoss", "A2CLoss", "ReinforceLoss"])
@pytest.mark.parametrize("family", fl.FAMILIES)
def test_garbage_in_every_family(family: str, name: str, kind: str) -> None:
    """Case 80: actions outside the support, parameters NaN, action masks all False, per family."""
    td = make_data(family, (8,), source="all")
    fl.masked_against_cut(name, family, td, make_mask((8,)), kind)


@pytest.mark.parametrize("group", [False, True])
@pytest.mark.parametrize(("name", "source"), fl.SOURCES)
def test_garbage_with_every_source(name: str, group: bool, source: str) -> None:
    """Case 80: stored, joint and rebuilt behaviour log-probs of six families at once."""
    shape = (5, 3) if group else (8,)
    td = make_data(fl.SIX, shape, group=group, source=source)
    joint, how = source == "joint", "group" if group else "root"
    fl.masked_against_cut(name, fl.SIX, td, make_mask(shape), "mixed", how, group=group, nan=joint)


@pytest.mark.filterwarnings("ignore:No target network updater")
@pytest.mark.parametrize(
    ("option", "name"), [(o, n) for o, (_, ns) in fl.OPTIONS.items() for n in ns]
)
def test_garbage_with_every_option(option: str, name: str) -> None:
    """Case 80: value clipping, standardisation, a proximal policy, a capped ratio, and others."""
    td, kw = make_data(PAIR, (4, 5), source="all"), fl.OPTIONS[option][0]
    fl.masked_against_cut(name, PAIR, td, make_mask((4, 5)), "mixed", "collector", **kw)


def test_advantage_per_head() -> None:
    """Case 80: one advantage per head, both with garbage."""
    td = make_data(PAIR, (9,))
    heads = {name: torch.randn(9, 1) for name in PAIR}
    td["advantage"] = TensorDict({"action": TensorDict(heads, [9])}, [9])
    fl.masked_against_cut("per_head", PAIR, td, make_mask((9,)), "mixed")


@pytest.mark.parametrize("name", fl.CLASSES)
def test_valid_rows_bitwise(name: str) -> None:
    """Case 80: the valid rows' losses are bitwise those of clean data; masked rows are 0."""
    td, mask = make_data(fl.TRIO, (9,), source="all"), make_mask((9,))
    loss = build(name, fl.TRIO, reduction="none").eval()  # a KL penalty keeps its coefficient
    clean = loss(td)
    dirty = fl.poison(td, mask, "mixed")
    fl.mask_with(loss, dirty, mask, "root")
    for key, value in loss(dirty).items():
        if key.startswith("loss"):
            assert torch.equal(value, clean[key].where(mask, torch.zeros(()))), key


def test_masks_are_anded() -> None:
    """Case 80: collector mask, shifted_valid, agent mask of the group: all must be True."""
    td = make_data(PAIR, (3, 4, 2), group=True)
    time, shifted, agents = (make_mask(s, i) for i, s in enumerate([(3, 4), (3, 4), (3, 4, 2)]))
    mask = time.unsqueeze(-1) & shifted.unsqueeze(-1) & agents
    assert 0 < mask.sum() < mask.numel()
    loss, short = build("ClipPPOLoss", PAIR, group=True), build("ClipPPOLoss", PAIR, group=True)
    data = fl.poison(td, mask, "mixed")
    fl.mask_with(loss, data, time, "collector")
    fl.mask_with(loss, data, shifted, "shifted")
    fl.mask_with(loss, data, agents, "group1")
    same(outcome(loss, data), outcome(short, cut(td, mask, True)))


def test_mask_key_choices() -> None:
    """Case 80: None ignores TorchRL's masks, a key replaces them, a missing one raises."""
    td, mask = make_data(PAIR, (4, 5)), make_mask((4, 5))
    loss = build("ClipPPOLoss", PAIR)
    full = outcome(loss, td)
    fl.mask_with(loss, td, mask, "collector")
    masked = outcome(loss, td)
    assert not torch.allclose(masked[0]["loss_objective"], full[0]["loss_objective"])
    loss.loss_mask_key = None
    same(outcome(loss, td), full)
    loss.loss_mask_key = ("my", "valid")
    with pytest.raises(MissingKeyError, match="valid"):
        loss(td)
    td["my", "valid"] = mask
    td["collector", "mask"] = torch.ones(4, 5, 1, dtype=torch.bool)
    same(outcome(loss, td), masked)
    td["my", "valid"] = torch.ones(4, 5, 3, dtype=torch.bool)
    with pytest.raises(ShapeError, match="valid"):
        loss(td)


@pytest.mark.parametrize("name", ["PolicyLoss", "ClipPPOLoss", "A2CLoss", "ReinforceLoss"])
def test_validation_sees_valid_rows_only(name: str) -> None:
    """Case 80: validate=True accepts garbage in masked rows and refuses it in a row that counts."""
    td, mask = make_data(fl.TRIO, (9,)), make_mask((9,))
    fl.masked_against_cut(name, fl.TRIO, td, mask, "mixed", validate=True)
    loss = build(name, fl.TRIO, validate=True)
    wrong = td.clone()
    wrong["action", "arm"][0] = 9.0  # beyond (2, 5)
    fl.mask_with(loss, wrong, mask, "root")
    with pytest.raises(ConfigError, match="arm"):
        loss(wrong)
    if name in ("PolicyLoss", "ClipPPOLoss"):
        wrong = td.clone()
        wrong["action", "move_log_prob"][0] = math.nan
        wrong["alive"] = mask
        with pytest.raises(NonFiniteError, match=r"move.*1 row"):
            loss(wrong)


# --- 80: what is computed inside -----------------------------------------------------------------


@pytest.mark.parametrize("kind", ["nan", "mixed"])
@pytest.mark.parametrize("name", ACTOR_CRITIC)
def test_gae_inside(name: str, kind: str) -> None:
    """Case 80: an advantage computed by the loss is that of the separate, unpadded sequences."""
    mask = fl.tail_mask(LENGTHS, 5)
    td = make_data(PAIR, (3, 5), source="all").exclude("advantage", "value_target", "state_value")
    loss, short = build(name, PAIR), td.clone()
    targets = oracle.gae_by_hand(td, mask, fl.networks(PAIR)[1].module)
    short["advantage"], short["value_target"] = targets
    data = fl.poison(td, mask, kind)
    fl.mask_with(loss, data, mask, "collector")
    same(outcome(loss, data), outcome(build(name, PAIR), cut(short, mask)))


@pytest.mark.parametrize("baseline", ["none", "mean", "leave_one_out"])
@pytest.mark.parametrize("kind", ["nan", "mixed"])
@pytest.mark.parametrize("layout", ["time", "agents", "root_reward"])
def test_returns_inside(layout: str, kind: str, baseline: str) -> None:
    """Case 80: REINFORCE's returns and baselines are those of the separate sequences."""
    group, steps = layout != "time", fl.tail_mask(LENGTHS, 5)
    mask = steps.unsqueeze(-1).expand(3, 5, 2) if group else steps
    if layout == "agents":  # which die at different times
        mask = mask & fl.tail_mask([5, 3], 5).T
    td = make_data(PAIR, tuple(mask.shape), group=group)
    dirty, root = fl.poison(td, mask, kind), td["next"]
    if layout == "root_reward":  # of the first agent, for all of them
        root = TensorDict({k: td["next", "agents", k][:, :, 0] for k in ("reward", "done")}, [3, 5])
        dirty["next"] = fl.poison(root, steps, kind)
    after = root["agents"] if layout == "agents" else root
    columns = [after[k].reshape(3, 5, -1, 1) for k in ("reward", "done")]
    wide = [x.expand(3, 5, 2, 1) if group else x.squeeze(2) for x in columns]
    key = ("agents", "advantage") if group else "advantage"
    td[key] = oracle.returns_by_hand(*wide, mask, 0.9, baseline)
    dirty.pop(key)
    actor = fl.networks(PAIR, group)[0]
    loss = cl.ReinforceLoss(actor, gamma=0.9, baseline=baseline, entropy_coeff=0.1)
    loss.set_keys(advantage=key)
    if layout == "agents":
        loss.set_keys(reward=("agents", "reward"), done=("agents", "done"))
    fl.mask_with(loss, dirty, mask, "group" if group else "root")
    got = outcome(loss, dirty)
    loss.set_keys(agent_mask=None)
    same(got, outcome(loss, cut(td, mask, group)))


def test_value_norm_sees_valid_rows_only() -> None:
    """Case 80: a running normaliser is updated with the valid value targets only."""
    mask = fl.tail_mask(LENGTHS, 5)
    td = make_data(PAIR, (3, 5)).exclude("advantage", "value_target", "state_value")
    _, target = oracle.gae_by_hand(td, mask, fl.networks(PAIR)[1].module)
    norm, expected = RunningValueNorm(), RunningValueNorm()
    loss = build("ClipPPOLoss", PAIR, advantage_norm=norm)
    data = fl.poison(td, mask, "mixed")
    fl.mask_with(loss, data, mask, "collector")
    out, _ = outcome(loss, data)
    expected.update(target[mask])
    for key, value in expected.state_dict().items():
        torch.testing.assert_close(norm.state_dict()[key], value)
    assert all(v.isfinite() for v in out.values())


# --- 80: heads that do not count -----------------------------------------------------------------


@pytest.mark.parametrize("source", ["stored", "params"])
@pytest.mark.parametrize("shape", [(9,), (5, 3)])
@pytest.mark.parametrize("name", HEADWISE)
def test_inactive_head(name: str, shape: Any, source: str) -> None:
    """Case 80: an inactive head's action, log-prob and parameters may hold garbage, too."""
    group = shape == (5, 3)
    td, active = make_data(PAIR, shape, group=group, source="all"), make_mask(shape, 8)
    prefix = ("agents",) if group else ()
    own = [(*prefix, *k) for k in (("action", "gear"), ("action", "gear_log_prob"),
                                   ("params", "gear", "logits"))]  # fmt: skip
    data = fl.poison(td, active, "mixed", keys=own)
    loss = build(name, PAIR, group=group, functional=False, log_prob_source=source)
    loss.set_keys(head_active={"gear": (*prefix, "gear_on")})
    data[(*prefix, "gear_on")] = active
    got = outcome(loss, data)
    here = td["agents"] if group else td
    loss.zero_grad()
    expected = oracle.head_terms(loss, here, active, name)
    expected["total"].backward()
    keys = [k for k in expected if k in got[0]]
    assert {"entropy", "entropy/move", "entropy/gear"} <= set(keys)
    grads = {n: p.grad for n, p in loss.actor_network.named_parameters()}
    mine = {n: got[1][f"actor_network.{n}"] for n in grads}
    same(({k: got[0][k] for k in keys}, mine), ({k: expected[k] for k in keys}, grads))


@pytest.mark.parametrize("with_action", [False, True])
@pytest.mark.parametrize("name", ACTOR_CRITIC)
def test_row_without_any_active_head(name: str, with_action: bool) -> None:
    """Case 80: a row whose only action mask is all False counts for the value term only."""
    heads = "masked"
    td, playable = make_data(heads, (8,), source="all"), make_mask((8,))
    dead = td.clone()
    dead["action_mask"][~playable] = False
    own = ["advantage", "action_log_prob", "logits", *(["action"] if with_action else [])]
    got, grads = outcome(build(name, heads), fl.poison(dead, playable, "mixed", keys=own))
    value, value_grads = outcome(build(name, heads), td)
    policy, policy_grads = outcome(build(name, heads), td[playable])
    for key in got:
        critic = key in ("loss_critic", "loss_value", "explained_variance")
        torch.testing.assert_close(got[key], (value if critic else policy)[key], msg=key)
    for key, grad in grads.items():
        other = (value_grads if "critic" in key else policy_grads)[key]
        torch.testing.assert_close(grad, other, msg=key)


@pytest.mark.parametrize("with_action", [False, True])
@pytest.mark.parametrize("name", fl.CLASSES)
def test_unplayable_head(name: str, with_action: bool) -> None:
    """Case 80: one head's action mask all False: that head is inactive there, garbage and all."""
    td, playable = make_data(fl.TRIO, (8,), source="all"), make_mask((8,))
    clean = td.clone().set("on", playable)
    loss = build(name, fl.TRIO)
    loss.set_keys(head_active={"say": "on"})
    dead = td.clone()
    for key in ("say_mask", ("params", "say", "mask")):
        dead[key][~playable] = False
    own = [("action", "say_log_prob"), ("params", "say", "logits")]
    own += [("action", "say")] if with_action else []
    dead = fl.poison(dead, playable, "mixed", keys=own)
    same(outcome(build(name, fl.TRIO), dead), outcome(loss, clean))


@pytest.mark.parametrize("kind", GARBAGE)
@pytest.mark.parametrize("which", odd.ODD)
def test_garbage_in_other_inputs(which: str, kind: str) -> None:
    """Case 80: whatever a network or distribution reads: tokens, nested entries, stored actions."""
    td, mask = odd.odd_data(), make_mask((8,))
    data = fl.poison(td, mask, kind)
    results = []
    for batch in (data, td[mask]):
        torch.manual_seed(1)
        loss = cl.ClipPPOLoss(*odd.ODD[which]())
        if batch is data:
            fl.mask_with(loss, batch, mask, "root1")
        results.append(outcome(loss, batch))
    same(*results)


# --- 81, 83, 84 ----------------------------------------------------------------------------------


def test_mean_over_valid_rows() -> None:
    """Case 81: values (2, 4, 6, 8), mask (1, 1, 0, 0) → 3.0, not 1.5, in every term."""
    values = torch.tensor([2.0, 4.0, 6.0, 8.0])
    zero, one = torch.zeros(4), torch.ones(4)

    def check(cls: type, expected: dict[str, float], loc: Tensor, scale: Tensor, **kw: Any) -> None:
        entries = {"advantage": one, "target": one, "log_ratio": zero, **kw}
        td = odd.echo_data(loc, scale, **entries)
        td.update({"loc": zero.unsqueeze(-1), "scale": one.unsqueeze(-1), "valid": values < 5})
        loss = cls(*odd.Echo.networks(), loss_critic_type="l1", entropy_coeff=2.0)
        loss.set_keys(agent_mask="valid")
        out = loss(td).detach()
        assert {k: float(out[k]) for k in expected} == pytest.approx(expected, abs=1e-5)

    # ratio 1: objective = A; value 0, l1: error = target; entropy of N(0, s) = ½ log(2πe) + log s
    scale = (values - 0.5 * math.log(2 * math.pi * math.e)).exp()
    losses = {"loss_objective": -3.0, "loss_critic": 3.0, "entropy": 3.0, "loss_entropy": -6.0}
    check(cl.ClipPPOLoss, losses, zero, scale, advantage=values, target=values)
    check(cl.ClipPPOLoss, {"kl_approx": 3.0}, zero, one, log_ratio=-values)
    # weights (1, 3 | 9, 9): one of two clipped, ESS = 16 / 10 / 2
    metrics = {"clip_fraction": 0.5, "ESS": 0.8, "max_ratio": 3.0, "mean_ratio": 2.0}
    check(cl.ClipPPOLoss, metrics, zero, one, log_ratio=torch.tensor([1.0, 3.0, 9.0, 9.0]).log())
    check(cl.KLPENPPOLoss, {"kl": 3.0}, (2 * values).sqrt(), one)  # KL = m²/2


@pytest.mark.parametrize("extra", [1, 7])
@pytest.mark.parametrize("name", LOSSES)
def test_appended_masked_rows(name: str, extra: int) -> None:
    """Case 81: every term is invariant to appending masked rows."""
    td = make_data(PAIR, (6,), source="all")
    long = torch.cat([td, td[[0] * extra]])
    mask = torch.arange(6 + extra) < 6
    fl.masked_against_cut(name, PAIR, long, mask, "mixed", "key")


@pytest.mark.parametrize(
    ("how", "shape", "group", "reduction"),
    [("root", (), False, "mean"), ("collector", (4, 5), False, "sum"),
     ("group1", (6, 3), True, "mean"), ("root", (6, 3), True, "none")],
)  # fmt: skip
@pytest.mark.parametrize("name", LOSSES)
def test_all_false_mask(name: str, how: str, shape: Any, group: bool, reduction: str) -> None:
    """Case 83: nothing counts: losses 0 with a graph, zero gradients, metrics 0."""
    td = make_data(PAIR, shape, group=group, source="all")
    loss = build(name, PAIR, group=group, reduction=reduction)
    _, full = outcome(loss, td)
    beta = loss.surrogate.beta.clone() if name in fl.KL else torch.zeros(())
    nothing = torch.zeros(shape, dtype=torch.bool)
    data = fl.poison(td, nothing, "mixed")
    fl.mask_with(loss, data, nothing, how)
    out, grads = outcome(loss, data)
    assert all(loss(data)[k].requires_grad for k in out if k.startswith("loss"))
    for key, value in out.items():
        assert torch.equal(value, beta if key == "beta" else torch.zeros_like(value)), key
        full_shape = reduction == "none" and key.startswith("loss")
        assert value.shape == (shape if full_shape else ()), key
    for key, grad in grads.items():
        assert (grad is None) == (full[key] is None), key
        assert grad is None or torch.equal(grad, torch.zeros_like(grad)), key
    assert name not in fl.KL or torch.equal(loss.surrogate.beta, beta)


@pytest.mark.parametrize("name", LOSSES)
def test_scalar_batch(name: str) -> None:
    """Case 83: batch dims (): a mask that is True changes nothing."""
    td = make_data(PAIR, (), source="all")
    masked, plain = build(name, PAIR), build(name, PAIR)
    expected = outcome(plain, td)
    fl.mask_with(masked, td, torch.tensor(True), "root")
    same(outcome(masked, td), expected)


@pytest.mark.parametrize("name", HEADWISE)
def test_one_head_never_active(name: str) -> None:
    """Case 83: a head that is active nowhere: its metrics are 0, its parameters get no gradient."""
    td = make_data(PAIR, (6,), source="all")
    loss = build(name, PAIR)
    loss.set_keys(head_active={"gear": "on"})
    td["on"] = torch.zeros(6, 1, dtype=torch.bool)
    out, grads = outcome(loss, td)
    assert all(float(v) == 0.0 for k, v in out.items() if k.endswith("/gear"))
    last = next(g for k, g in grads.items() if g is not None and g.shape == (7, 6))
    assert last[:4].abs().sum() > 0  # loc and scale of "move"
    assert torch.equal(last[4:], torch.zeros(3, 6))  # logits of "gear"


@pytest.mark.parametrize("how", ["collector", "root1", "key"])
@pytest.mark.parametrize("kind", GARBAGE)
def test_padding_not_in_the_statistics(kind: str, how: str) -> None:
    """Case 84: normalised advantages of valid rows have mean 0 and std 1, whatever the padding."""
    mask = fl.tail_mask(LENGTHS, 5)
    zero, advantage = torch.zeros(3, 5), torch.randn(3, 5) * 7 + 3
    td = odd.echo_data(zero, zero + 1, log_ratio=zero, advantage=advantage, target=zero)
    td = fl.poison(td, mask, kind)
    loss = cl.ClipPPOLoss(*odd.Echo.networks(), normalize_advantage=True, reduction="none")
    fl.mask_with(loss, td, mask, how)
    used = -loss(td)["loss_objective"].detach()  # ratio 1: the normalised advantage itself
    assert float(used[mask].mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(used[mask].std()) == pytest.approx(1.0, abs=1e-5)
    assert torch.equal(used[~mask], torch.zeros(int((~mask).sum())))
    by_hand = fl.normalised_by_hand(advantage.unsqueeze(-1), mask).squeeze(-1)
    torch.testing.assert_close(used, by_hand, atol=1e-5, rtol=1e-5)


# --- 85, 87: dead agents -------------------------------------------------------------------------


@pytest.mark.parametrize("agents", [1, 2, 3])
@pytest.mark.parametrize("name", LOSSES)
def test_dead_agents(name: str, agents: int) -> None:
    """Case 85: dead agents' entries moved by 1e6: nothing changes; equal to alive only."""
    td, alive = make_data(PAIR, (7, agents), group=True, source="all"), make_mask((7, agents))
    expected = outcome(build(name, PAIR, group=True), cut(td, alive, True))
    moved = td.clone()
    for key, leaf in moved.items(True, True):
        if leaf.dtype.is_floating_point:
            moved[key][~alive] += 1e6
    results = []
    for data in (td, moved):
        loss = build(name, PAIR, group=True)
        fl.mask_with(loss, data, alive, "group1")
        results.append(outcome(loss, data))
    same(*results, tol=0.0)
    same(results[0], expected)


@pytest.mark.parametrize("agents", [1, 2, 3])
def test_dead_agents_of_a_central_critic(agents: int) -> None:
    """Case 85: a central critic reads zeros for a dead agent; its mean is over alive rows."""
    td, alive = make_data(PAIR, (7, agents), group=True), make_mask((7, agents))
    critic = odd.central_critic(agents)
    loss = build(lambda actor, _: cl.ClipPPOLoss(actor, critic), PAIR, group=True)
    data = fl.poison(td, alive, "mixed")
    fl.mask_with(loss, data, alive, "group")
    got = loss(data)["loss_critic"]
    value = critic.module(td["agents", "observation"] * alive.unsqueeze(-1))
    error = nn.functional.smooth_l1_loss(value, td["agents", "value_target"], reduction="none")
    expected = error.squeeze(-1)[alive].mean()
    torch.testing.assert_close(got, expected)
    params = list(critic.parameters())
    grads = [torch.autograd.grad(x, params) for x in (got, expected)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("name", ["ClipPPOLoss", "A2CLoss", "ReinforceLoss", "PolicyLoss"])
def test_per_agent_mask_of_the_environment(name: str) -> None:
    """Case 87: an environment writes a "mask" per agent; agents die at their own step."""
    td = make_data(fl.TRIO, (2, 6, 3), group=True)
    lengths = torch.tensor([[6, 2, 4], [3, 6, 1]])  # the step of death still counts
    mask = torch.arange(6).view(1, 6, 1) < lengths.unsqueeze(1)
    death = (torch.arange(6).view(1, 6, 1) == lengths.unsqueeze(1) - 1).unsqueeze(-1)
    td["next", "agents"].update({"done": death, "terminated": death.clone()})
    data, short = fl.poison(td, mask, "mixed"), td.clone()
    for key in ("advantage", "value_target", "state_value"):
        data.pop(("agents", key))
    critic = fl.networks(fl.TRIO, True)[1]
    targets = oracle.gae_by_hand(td, mask, critic.module, group=True)
    short["agents", "advantage"], short["agents", "value_target"] = targets
    loss = build(name, fl.TRIO, group=True)
    data["agents", "mask"] = mask
    loss.set_keys(agent_mask=("agents", "mask"))
    before = data.clone()
    same(outcome(loss, data), outcome(build(name, fl.TRIO, group=True), cut(short, mask, True)))
    fl.unchanged(data, before)


# --- 88: recurrent networks ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ClipPPOLoss", "PPOLoss", "KLPENPPOLoss", "A2CLoss", "score"])
@pytest.mark.parametrize("kind", ["nan", "mixed"])
def test_recurrent_tails(name: str, kind: str) -> None:
    """Case 88: padded [B, T] through an RNN equals running each sequence alone."""
    td, mask = odd.recurrent_data(), fl.tail_mask(LENGTHS, 5)
    data, loss = fl.poison(td, mask, kind), odd.recurrent(name)
    fl.mask_with(loss, data, mask, "collector")
    out, grads = outcome(loss, data)
    alone = odd.recurrent(name, reduction="sum")
    alone.eval()  # a KL penalty keeps its coefficient
    total: dict[str, Any] = {}
    for b, length in enumerate(LENGTHS):
        each, each_grads = outcome(alone, td[b : b + 1, :length])
        for key, value in {**each, **each_grads}.items():
            if value is not None:
                total[key] = total.get(key, 0.0) + value / sum(LENGTHS)
    for key, value in {**out, **grads}.items():
        if value is not None and (key.startswith("loss") or "network" in key):
            assert value.isfinite().all()
            torch.testing.assert_close(value, total[key], rtol=1e-5, atol=1e-6, msg=key)


def test_recurrent_state_flows_through_masked_steps() -> None:
    """Case 88: a masked step inside a sequence keeps its finite inputs, so the state flows on."""
    td, mask = odd.recurrent_data(), torch.ones(3, 5, dtype=torch.bool)
    mask[0, 2] = mask[1, 0] = False
    plain = odd.recurrent("ClipPPOLoss", reduction="none")(td)
    loss = odd.recurrent("ClipPPOLoss", reduction="none")
    fl.mask_with(loss, td, mask, "collector")
    out = loss(td)
    for key in ("loss_objective", "loss_entropy", "loss_critic"):
        torch.testing.assert_close(out[key], plain[key] * mask, msg=key)
    td["observation"][0, 2] = math.nan
    assert all(v.isfinite().all() for v in loss(td).values())
