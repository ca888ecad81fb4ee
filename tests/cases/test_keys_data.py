"""What a loss does to its data: it reads what ``in_keys`` lists, and writes nothing."""

import functools
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import CompositeDistribution, InteractionType
from torch import Tensor
from torch import distributions as D
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import TanhNormal
from torchrl.objectives import SoftUpdate

import composite_losses as cl
from tests.cases.builders_ab import (
    ALL_KINDS,
    CORE,
    DISCRETE,
    FEW,
    HYBRID,
    LOSSES,
    RATIO_LOSSES,
    Scene,
    Spec,
    assert_same,
    bare,
    composite_actor,
    geometric,
    gradients,
    objective,
    scene,
    single_actor,
    snapshot,
    total,
)
from tests.tolerances import assert_close


def without(s: Scene, *names: Any) -> TensorDict:
    return s.td.clone().exclude(*[s.key(n) if isinstance(n, str) else n for n in names])


def bare_rollout(s: Scene) -> TensorDict:
    """Data as a collector gives them: no advantage, no value."""
    next_value = bare(("next", *s.group, "state_value"))
    return without(s, "advantage", "value_target", "state_value", next_value)


def variants(s: Scene, name: str) -> dict[str, tuple[Any, TensorDict]]:
    """(loss, data) for every path that a call can take through the data."""
    lp = [s.log_prob_key(i) for i in range(len(s.net.specs))]
    door = name != "native"
    ratio = name in RATIO_LOSSES
    bonus = {} if name == "reinforce" else {"entropy_bonus": False} if door else {"entropy": None}
    clip = {"clip_value": 0.2} if door else {"value": cl.ValueTerm("l2", clip=0.2)}
    joint = without(s, *lp)
    joint.set(s.key("sample_log_prob"), s.stored().sum(-1))
    valid = torch.rand(s.sample) < 0.7
    valid.view(-1)[0] = True
    with_mask = s.td.clone().set(s.key("valid"), valid)
    with_mask.set(s.key("on"), torch.rand(s.sample) < 0.5)
    masked = s.loss(name)
    masked.set_keys(agent_mask=s.key("valid"), head_active={s.net.specs[0].path[-1]: s.key("on")})
    auto = s.td.clone().set("shifted_valid", valid)
    out = {
        "plain": (s.loss(name), s.td),
        "no bonus": (s.loss(name, **bonus), s.td),
        "no critic": (s.loss(name, critic=False), without(s, "value_target", "state_value")),
        "value clip": (s.loss(name, **clip), s.td),
        "no advantage": (s.loss(name), bare_rollout(s)),
        "masked": (masked, with_mask),
        "auto mask": (s.loss(name), auto),
        "not functional": (s.loss(name, functional=False), s.td),
        "unreduced": (s.loss(name, reduction="none"), s.td),
        "locked": (s.loss(name), s.td.clone().lock_()),
    }
    if ratio:
        out["stored"] = (s.loss(name, log_prob_source="stored"), s.td)
        out["params"] = (s.loss(name, log_prob_source="params"), s.td)
        out["fall-back"] = (s.loss(name), without(s, *lp))
        delayed = s.loss(name, delay_actor=True)
        SoftUpdate(delayed, eps=0.5)
        out["delayed"] = (delayed, s.td)
    if name in ("ppo", "clip_joint", "native"):
        out["joint"] = (s.loss(name), joint)
    return out


@pytest.mark.parametrize("form", FEW)
@pytest.mark.parametrize("name", LOSSES)
def test_input_and_random_state_are_unchanged(name: str, form: str) -> None:
    """Case 34: keys, values (to the bit), storage, locks and RNG state are as before every call."""
    s = scene(ALL_KINDS, form)
    s.move()
    for what, (loss, td) in variants(s, name).items():
        before, state = snapshot(td), torch.get_rng_state()
        out = loss(td)
        total(out).backward()
        assert snapshot(td) == before, what
        assert torch.equal(torch.get_rng_state(), state), what
        assert set(out.keys()) == set(loss.out_keys), what
        # two calls, one value (klpen's beta adapts in training mode)
        loss.eval()
        assert_same(loss(td), loss(td), exact=True)


@pytest.mark.parametrize("form", FEW)
@pytest.mark.parametrize("name", LOSSES)
def test_in_keys_are_complete(name: str, form: str) -> None:
    """Case 34: loss(td.select(*loss.in_keys, strict=False)) equals loss(td), on every path."""
    s = scene(HYBRID, form)
    s.move()
    s.td.set("decoy", torch.randn(s.td.batch_size))
    for what, (loss, td) in variants(s, name).items():
        loss.eval()
        keys = loss.in_keys
        assert len(keys) == len(set(keys)), what
        selected = td.select(*keys, strict=False)
        assert "decoy" not in selected.keys()  # noqa: SIM118
        assert_same(loss(selected), loss(td), exact=True)


@pytest.mark.parametrize("form", FEW)
def test_in_keys_list_nothing_else(form: str) -> None:
    """Case 34: no log-prob for A2C, no reward without a critic, only what a forced source reads."""
    s = scene(HYBRID, form)
    lp = {s.log_prob_key(0), s.log_prob_key(1)}
    params, obs, adv = s.key("params"), s.key("observation"), s.key("advantage")
    reward, done = bare(("next", *s.group, "reward")), bare(("next", *s.group, "done"))
    actions = {s.action_key(0), s.action_key(1)}
    target = s.key("value_target")
    for name in LOSSES:
        keys = set(s.loss(name).in_keys)
        assert {obs, adv, target, reward, done, *actions} <= keys
        if name in RATIO_LOSSES:
            assert {*lp, params} <= keys
        else:
            assert not keys & {*lp, "sample_log_prob"}
        lone = set(s.loss(name, critic=False).in_keys)
        assert not lone & {target, s.key("state_value")}
        assert ({reward, done} <= lone) == (name == "reinforce")
    stored = set(s.loss("ppo", log_prob_source="stored").in_keys)
    assert lp <= stored
    rebuilt = set(s.loss("ppo", log_prob_source="params").in_keys)
    assert params in rebuilt
    assert not rebuilt & {*lp, s.key("sample_log_prob"), "sample_log_prob"}
    heads = set(s.loss("clip_per_head").in_keys)
    assert not heads & {s.key("sample_log_prob"), "sample_log_prob"}
    masked = s.loss("ppo")
    masked.loss_mask_key = "valid"
    masked.set_keys(agent_mask=s.key("alive"), head_active={"move": s.key("on")})
    assert {"valid", s.key("alive"), s.key("on")} <= set(masked.in_keys)
    masked.set_keys(agent_mask=None, head_active=None)
    masked.loss_mask_key = None
    assert not set(masked.in_keys) & {"valid", s.key("alive"), s.key("on"), "shifted_valid"}


@pytest.mark.parametrize("form", ["flat", "agents2"])
def test_parameters_that_no_call_reads_are_no_in_keys(form: str) -> None:
    """Case 34: stored parameters are in_keys only where the behaviour or a KL reads them."""
    s = scene(HYBRID, form)
    for loss in (s.loss("a2c"), s.loss("reinforce"), s.loss("ppo", log_prob_source="stored")):
        assert s.key("params") not in loss.in_keys


@pytest.mark.parametrize("form", ["time", "agents2"])
@pytest.mark.parametrize("name", ["clip_joint", "reinforce"])
def test_in_keys_with_stored_values_and_no_advantage(name: str, form: str) -> None:
    """Case 34: a rollout that holds values of both steps: the selection gives the same losses."""
    s = scene(HYBRID, form)
    td = without(s, "advantage", "value_target")
    loss = s.loss(name)
    expected = loss(td)
    assert_same(loss(td.select(*loss.in_keys, strict=False)), expected, exact=True)


@pytest.mark.parametrize("form", ["time", "agents2"])
@pytest.mark.parametrize("name", ["clip_joint", "reinforce"])
def test_value_of_one_step_only_and_no_advantage(name: str, form: str) -> None:
    """Case 34: an absent advantage is computed also where only the first step's value is stored."""
    s = scene(HYBRID, form)
    expected = s.loss(name)(bare_rollout(s))
    td = bare_rollout(s).set(s.key("state_value"), s.td.get(s.key("state_value")))
    assert_same(s.loss(name)(td), expected)


# --- stored actions are scored --------------------------------------------------------------------


@pytest.mark.parametrize("form", CORE)
@pytest.mark.parametrize("name", ["reinforce", "a2c"])
def test_stored_action_is_scored(name: str, form: str) -> None:
    """Case 36: −log π(a_stored)·adv, the same at every call and mode; RNG and actions untouched."""
    for specs, make in ((ALL_KINDS, composite_actor), (HYBRID[1:], single_actor)):
        s = scene(specs, form, actor=make)
        s.move()
        loss = s.loss(name, critic=False)
        before, state = snapshot(s.td), torch.get_rng_state()
        want = -(s.log_probs().sum(-1) * s.advantage).mean()
        for kind in (ExplorationType.RANDOM, ExplorationType.DETERMINISTIC, None):
            with set_exploration_type(kind):
                out = loss(s.td)
            assert_close(objective(out), want)
            got, by_hand = gradients(objective(out), s.net), gradients(want, s.net)
            for g, w in zip(got, by_hand, strict=True):
                torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)
        assert torch.equal(torch.get_rng_state(), state)
        assert snapshot(s.td) == before


def test_value_of_the_stored_action_not_of_the_best() -> None:
    """Case 36: a uniform policy of 4 actions and return 2: loss = 2·log 4 whatever was chosen."""
    s = scene((Spec("gear", "cat", 4),))
    with torch.no_grad():
        for p in s.net.parameters():
            p.zero_()
        s.net.layers[0].bias[2] = 5.0  # the best action, which was not taken
    s.td["gear"].fill_(0)
    s.td["advantage"].fill_(2.0)
    want = 2.0 * torch.tensor([0.0, 0.0, 5.0, 0.0]).logsumexp(0)
    assert_close(s.loss("reinforce", critic=False)(s.td)["loss_actor"], want)


class Refuses:
    """A distribution that must not be sampled."""

    def sample(self, *args: Any) -> Tensor:
        raise RuntimeError("sampled")

    def rsample(self, *args: Any) -> Tensor:
        raise RuntimeError("sampled")


class RefusesNormal(Refuses, D.Normal):
    pass


class RefusesCategorical(Refuses, D.Categorical):
    pass


@pytest.mark.parametrize("form", FEW)
@pytest.mark.parametrize("name", LOSSES)
def test_actor_whose_sample_raises(name: str, form: str) -> None:
    """Case 37: an actor whose sample raises, or whose forward does: the loss works all the same."""
    s = scene(HYBRID, form)
    s.move()
    expected = s.loss(name).eval()(s.td)
    keys = [s.action_key(0), s.action_key(1)]

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("sampled")

    table = {
        "distribution_map": {"dist0": RefusesCategorical, "dist1": RefusesNormal},
        "name_map": {"dist0": keys[0], "dist1": keys[1]},
    }
    static = composite_actor(s.net, s.group, distribution_kwargs=table)
    dynamic = composite_actor(
        s.net,
        s.group,
        distribution_class=functools.partial(CompositeDistribution, **table),
        distribution_kwargs={},
    )
    blocked = composite_actor(s.net, s.group)
    blocked.forward = refuse
    blocked.module[-1].forward = refuse
    with pytest.raises(RuntimeError, match="sampled"):
        static(s.td.clone())
    less = s.td.clone().exclude(s.log_prob_key(0), s.log_prob_key(1))
    for actor in (static, dynamic, blocked):
        s.actor = actor
        for functional in (True, False):
            loss = s.loss(name, functional=functional).eval()
            with set_exploration_type(ExplorationType.RANDOM):
                assert_same(loss(s.td), expected)
                if name in RATIO_LOSSES:
                    assert_same(loss(less), expected)
        loss.log_probs(s.td)
        cl.resolve_log_probs(actor, less)
        cl.diagnose(loss, s.td)
    s.td = s.td.exclude(s.key("advantage"), s.key("value_target"))
    assert objective(s.loss(name)(s.td)).isfinite()


class NoEntropy(D.Normal):
    """A distribution whose entropy has no formula."""

    def entropy(self) -> Tensor:
        raise NotImplementedError


@pytest.mark.parametrize("cls", [TanhNormal, NoEntropy])
def test_entropy_without_a_closed_form(cls: Any) -> None:
    """Case 36: only an estimated entropy may draw; log-probs never do; a seed fixes the value."""
    s = scene(HYBRID)
    s.actor = composite_actor(
        s.net,
        distribution_kwargs={
            "distribution_map": {"dist0": D.Categorical, "dist1": cls},
            "name_map": {"dist0": "gear", "dist1": "move"},
        },
        default_interaction_type=InteractionType.RANDOM,
    )
    loc, scale = s.net.params(s.obs)[1].values()
    if cls is TanhNormal:  # independent: one log-prob per sample
        s.td["move"] = s.td["move"].tanh() * 0.9
        s.td["move_log_prob"] = s.td["move_log_prob"].sum(-1)
        pre = s.td["move"].atanh()
        by_hand = D.Normal(loc, scale).log_prob(pre) - (1 - s.td["move"].square()).log()
        by_hand = by_hand.sum(-1)
    else:
        by_hand = D.Normal(loc, scale).log_prob(s.td["move"])
    for name in ("ppo", "a2c", "reinforce"):
        options = {} if name == "reinforce" else {"samples_mc_entropy": 4, "entropy_coeff": 1.0}
        loss = s.loss(name, **options)
        before, state = snapshot(s.td), torch.get_rng_state()
        first = loss(s.td)
        torch.set_rng_state(state)
        assert_same(loss(s.td), first, exact=True)
        state = torch.get_rng_state()
        parts = loss.log_probs(s.td)
        assert torch.equal(torch.get_rng_state(), state)
        assert snapshot(s.td) == before
        torch.testing.assert_close(parts["current", "move"], by_hand, rtol=1e-4, atol=1e-4)
    if cls is NoEntropy:
        many = s.loss("a2c", samples_mc_entropy=4000, entropy_coeff=1.0)(s.td)
        want = D.Normal(loc, scale).entropy().sum(-1).mean()
        assert abs(many["entropy/move"].item() - want.item()) < 0.05


# --- errors leave the data alone ------------------------------------------------------------------


def broken(s: Scene) -> dict[str, tuple[dict[str, Any], TensorDict, type[Exception]]]:
    """Data (and options) that every ratio loss must refuse."""
    flat = s.td.clone().set(s.key("advantage"), s.advantage)
    wide = s.td.clone().set(s.key("advantage"), s.advantage.unsqueeze(-1).repeat_interleave(2, -1))
    target = s.td.clone().set(s.key("value_target"), s.advantage)
    support = s.td.clone()
    support.get(s.action_key(0)).add_(100)
    infinite = s.td.clone()
    infinite.get(s.log_prob_key(1)).view(-1)[0] = -torch.inf
    action = s.td.clone()
    action.set(s.action_key(0), action.get(s.action_key(0))[..., None, None])
    stored = s.td.clone()
    stored.set(s.log_prob_key(0), stored.get(s.log_prob_key(0))[..., None, None])
    return {
        "no action": ({}, without(s, s.action_key(0)), KeyError),
        "no observation": ({}, without(s, "observation"), KeyError),
        "no target": ({}, without(s, "value_target"), KeyError),
        "flat advantage": ({}, flat, ValueError),
        "wide advantage": ({}, wide, ValueError),
        "flat target": ({}, target, ValueError),
        "action shape": ({}, action, ValueError),
        "stored shape": ({}, stored, ValueError),
        "outside the support": ({"validate": True}, support, ValueError),
        "infinite": ({"validate": True}, infinite, ValueError),
        "no log-prob": (
            {},
            without(s, s.log_prob_key(0), s.log_prob_key(1), "params"),
            KeyError,
        ),
    }


@pytest.mark.parametrize("form", ["flat", "agents1", "A==B"])
@pytest.mark.parametrize("name", RATIO_LOSSES)
def test_errors_leave_data_and_loss_unchanged(name: str, form: str) -> None:
    """Case 34: whatever is raised, the data stay bitwise the same; the loss works on good data."""
    s = scene(DISCRETE, form)
    for what, (options, td, error) in broken(s).items():
        loss = s.loss(name, **options).eval()
        good = loss(s.td)
        before, state = snapshot(td), torch.get_rng_state()
        with pytest.raises(error):
            loss(td)
        assert snapshot(td) == before, what
        assert torch.equal(torch.get_rng_state(), state), what
        assert_same(loss(s.td), good, exact=True)


@pytest.mark.parametrize("form", CORE)
def test_fresh_data_diagnosis(form: str) -> None:
    """Case 34: ``diagnose`` leaves the data alone, needs no advantage, and finds nothing wrong."""
    s = scene(ALL_KINDS, form)
    td = without(s, "advantage", "value_target", "next")
    for name in ("clip_joint", "clip_per_head"):
        loss = s.loss(name)
        before, state = snapshot(td), torch.get_rng_state()
        report = cl.diagnose(loss, td)
        assert snapshot(td) == before
        assert torch.equal(torch.get_rng_state(), state)
        assert set(report.sources.values()) == {"stored"}
        assert list(report.max_abs_log_ratio) == [spec.key for spec in ALL_KINDS]
        assert max(report.max_abs_log_ratio.values()) < 1e-5
        assert report.reasons == []
        assert report.masked_fraction == 0.0
        assert all(f"{spec.key}" in str(report) for spec in ALL_KINDS)
    s.move(0.3)
    report = cl.diagnose(loss, td)
    want = s.log_ratio().abs().flatten(0, -2).amax(0)
    for i, spec in enumerate(ALL_KINDS):
        assert abs(report.max_abs_log_ratio[spec.key] - want[i].item()) < 1e-4
    assert report.reasons


@pytest.mark.parametrize("form", ["flat", "agents2"])
def test_old_value_and_joint_are_read_not_written(form: str) -> None:
    """Case 34: value clipping reads the stored value; the critic's output stays off the data."""
    s = scene(HYBRID, form)
    with torch.no_grad():
        value = s.critic.module(s.obs).squeeze(-1)
    old = s.td.get(s.key("state_value")).squeeze(-1)
    target = s.td.get(s.key("value_target")).squeeze(-1)
    clipped = old + (value - old).clamp(-0.2, 0.2)
    want = torch.maximum((value - target).square(), (clipped - target).square()).mean()
    out = s.loss("clip_joint", loss_critic_type="l2", clip_value=0.2)(s.td)
    assert_close(out["loss_critic"], want)
    assert_close(out["value_clip_fraction"], ((value - old).abs() > 0.2).float().mean())
    want = -geometric("joint", s.log_ratio(), s.advantage).mean()
    assert_close(out["loss_objective"], want)
