"""Setting keys, calling with keywords, and the value estimator that shares the keys."""

import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

import composite_losses as cl
from composite_losses.errors import ConfigError
from tests.cases.builders_ab import (
    CORE,
    DISCRETE,
    FEW,
    FORMS,
    HYBRID,
    JOINT_LOSSES,
    LOSSES,
    OBS,
    RATIO_LOSSES,
    Net,
    Scene,
    Spec,
    assert_same,
    bare,
    composite_actor,
    geometric,
    objective,
    rollout,
    scene,
    single_actor,
    snapshot,
)
from tests.tolerances import assert_close

TRIO = (Spec("a", "cat", 3), Spec("b", "cat", 5), Spec("c", "normal", 2))


# --- set_keys -------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", CORE)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 0, 2), (2, 1, 0)])
def test_lists_in_any_order(form: str, order: tuple[int, ...]) -> None:
    """Case 10: action and log-prob lists, permuted alike, belong together, head by head."""
    s = scene(TRIO, form)
    s.move()
    want = -geometric("per_head", s.log_ratio(), s.advantage).mean()
    for name in ("clip_per_head", "klpen", "a2c"):
        expected = s.loss(name).eval()(s.td)
        if name == "clip_per_head":
            assert_close(expected["loss_objective"], want)
        loss = s.loss(name).eval()
        actions = [s.action_key(i) for i in order]
        loss.set_keys(action=actions)
        assert_same(loss(s.td), expected, exact=True)
        loss.set_keys(sample_log_prob=[s.log_prob_key(i) for i in order])
        assert_same(loss(s.td), expected, exact=True)
        # names of the user's own, paired by position with the action list
        td = s.td.clone()
        for i in range(3):
            td.set(f"mine{i}", td.pop(s.log_prob_key(i)))
        other = s.loss(name, **({} if name == "a2c" else {"log_prob_source": "stored"})).eval()
        other.set_keys(action=actions, sample_log_prob=[f"mine{i}" for i in order])
        if name != "klpen":
            assert_same(other(td), expected, exact=True)
        if name != "a2c":
            assert {"mine0", "mine1", "mine2"} <= set(other.in_keys)
            assert other.log_prob_source(td) == dict.fromkeys("abc", "stored")


@pytest.mark.parametrize("form", CORE)
def test_keys_of_a_single_head(form: str) -> None:
    """Case 10: one key renames the single head's action and log-prob, composite or not."""
    for make in (composite_actor, single_actor):
        s = scene((Spec("action", "normal", 2),), form, actor=make)
        s.move()
        expected = s.loss("clip_joint")(s.td)
        assert_close(
            expected["loss_objective"], -geometric("joint", s.log_ratio(), s.advantage).mean()
        )
        td = s.td.clone()
        td.set(s.key("played"), td.pop(s.action_key(0)))
        td.set("lp", td.pop(s.log_prob_key(0)))
        for form_of in (lambda k: k, lambda k: [k]):
            loss = s.loss("clip_joint", log_prob_source="stored")
            loss.set_keys(action=form_of(s.key("played")), sample_log_prob=form_of("lp"))
            assert_same(loss(td), expected, exact=True)
            # None restores the default
            with pytest.raises(KeyError):
                loss(s.td)
            loss.set_keys(action=None, sample_log_prob=None)
            assert_same(loss(s.td), expected, exact=True)


@pytest.mark.parametrize("form", CORE)
@pytest.mark.parametrize("specs", [DISCRETE, HYBRID, (Spec("only", "cat", 3),)])
def test_what_trainers_send(form: str, specs: tuple[Spec, ...]) -> None:
    """Case 11: ``set_keys(action="action")`` on a composite actor keeps the discovered heads."""
    inside = [Spec(("action", *spec.path), spec.kind, spec.n) for spec in specs]
    s = scene(inside, form)
    s.move()
    expected = s.loss("clip_per_head")(s.td)
    want = -geometric("per_head", s.log_ratio(), s.advantage).mean()
    assert_close(expected["loss_objective"], want)
    loss = s.loss("clip_per_head")
    loss.set_keys(reward=s.key("reward"), done=s.key("done"), action=s.key("action"))
    assert_same(loss(s.td), expected, exact=True)
    assert {s.action_key(i) for i in range(len(specs))} <= set(loss.in_keys)
    if len(specs) == 1:
        return
    for key in ("action", s.key("action"), s.key("elsewhere"), s.action_key(0)):
        loss.set_keys(action=key)
        assert set(loss.log_prob_source(s.td)) == {spec.path[-1] for spec in specs}
        assert_same(loss(s.td), expected, exact=True)


@pytest.mark.parametrize("form", CORE)
def test_renamed_actions_of_several_heads(form: str) -> None:
    """Case 11: a list of other action keys is read; the heads are named after it."""
    s = scene(HYBRID, form)
    s.move()
    expected = s.loss("clip_per_head")(s.td)
    td = s.td.clone()
    names = [s.key("shift"), bare((*s.group, "arm", "x"))]
    for i, key in enumerate(names):
        td.set(key, td.pop(s.action_key(i)))
    loss = s.loss("clip_per_head")
    loss.set_keys(action=names)
    out = loss(td)
    for key in ("loss_objective", "loss_entropy", "kl_approx", "clip_fraction"):
        assert_close(out[key], expected[key])
    assert_close(out["entropy/shift"], expected["entropy/gear"])
    assert_close(out["entropy/x"], expected["entropy/move"])
    assert set(names) <= set(loss.in_keys)
    assert s.action_key(0) not in loss.in_keys


@pytest.mark.parametrize("form", CORE)
@pytest.mark.parametrize("name", JOINT_LOSSES)
def test_one_log_prob_key_means_a_joint_log_prob(name: str, form: str) -> None:
    """Case 7: one key for several heads is a joint log-prob, read from the key that was set."""
    s = scene(HYBRID, form)
    td = s.td.exclude(s.log_prob_key(0), s.log_prob_key(1))
    td.set("sample_log_prob", torch.full(s.sample, -99.0))  # not the one that was set
    td.set("mine", s.stored().sum(-1) - 0.1)
    for value in ("mine", ["mine"]):
        loss = s.loss(name, critic=False)
        loss.set_keys(sample_log_prob=value)
        assert "mine" in loss.in_keys
        assert loss.log_prob_source(td) == {"gear": "joint", "move": "joint"}
        assert_close(loss(td)["mean_ratio"], math.exp(0.1))


def test_lists_of_another_length_change_nothing() -> None:
    """Case 10: a list that does not match the heads is an error; the loss stays as it was."""
    s = scene(TRIO)
    s.move()
    loss = s.loss("clip_per_head")
    loss.set_keys(action=["c", "a", "b"])
    expected, keys = loss(s.td), loss.in_keys
    for wrong in (
        {"action": ["a", "b"]},
        {"action": ["a", "b", "c", "d"]},
        {"sample_log_prob": ["a_log_prob", "b_log_prob"]},
        {"advantage": "elsewhere", "action": ["a"] * 4},
    ):
        with pytest.raises(ConfigError, match="3"):
            loss.set_keys(**wrong)
        assert loss.in_keys == keys
        assert_same(loss(s.td), expected, exact=True)
    with pytest.raises(ValueError, match="elbow"):
        loss.set_keys(elbow="a")
    assert_same(loss(s.td), expected, exact=True)


def test_setting_other_keys_keeps_the_lists() -> None:
    """Case 41: a later set_keys of other names keeps action and log-prob lists."""
    s = scene(HYBRID, "agents2")
    td = s.td.clone()
    for i in range(2):
        td.set(f"lp{i}", td.pop(s.log_prob_key(i)) - 0.5 * (i + 1))
    loss = s.loss("ppo", critic=False, log_prob_source="stored")
    loss.set_keys(sample_log_prob=["lp0", "lp1"])
    first = loss(td)
    td.set("other", td["agents", "advantage"] * 2.0)
    loss.set_keys(advantage="other")
    assert_close(loss(td)["loss_objective"], first["loss_objective"] * 2.0)


# --- two losses -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES)
def test_keys_of_two_losses_do_not_mix(name: str) -> None:
    """Case 41: set and forward interleaved on two losses; neither changes the other."""
    s, other = scene(DISCRETE), scene(HYBRID, "agents2")
    first, second = LOSSES[name](s.actor, s.critic), LOSSES[name](other.actor, other.critic)
    first.eval()
    second.eval()
    expected = first(s.td)
    keys, out_keys = first.in_keys, first.out_keys
    second.set_keys(**other.keys(), agent_mask=None)
    assert_same(first(s.td), expected, exact=True)
    there = second(other.td)
    td = s.td.clone()
    td["mine"], td["played"] = td.pop("advantage"), td.pop("a")
    td["goal"] = td.pop("value_target")
    first.set_keys(advantage="mine", action=["played", "b"], value_target="goal")
    moved = first(td)
    assert_close(objective(moved), objective(expected))
    assert_same(second(other.td), there, exact=True)
    assert second.tensor_keys.advantage == ("agents", "advantage")
    third = LOSSES[name](s.actor, s.critic)
    assert third.in_keys == keys
    assert third.out_keys == out_keys
    assert third.tensor_keys.advantage == "advantage"
    assert_same(third.eval()(s.td), expected, exact=True)
    second.set_keys(sample_log_prob=[other.log_prob_key(1), other.log_prob_key(0)][::-1])
    second.loss_mask_key = "nothing"
    assert_same(third(s.td), expected, exact=True)


# --- keyword calls --------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["flat", "agents1", "agents2"])
@pytest.mark.parametrize("name", LOSSES)
def test_keyword_call_returns_out_keys_in_order(name: str, form: str) -> None:
    """Case 43: a keyword call's tuple follows ``loss.out_keys``; nested names join with "_"."""
    s = scene(HYBRID, form)
    s.move()
    loss = s.loss(name).eval()
    expected = loss(s.td)
    assert set(expected.keys()) == set(loss.out_keys)
    given = {}
    for key in loss.in_keys:
        value = s.td.get(key, None)
        if isinstance(value, Tensor):
            given[key if isinstance(key, str) else "_".join(key)] = value
    if name == "klpen":
        given["_".join((*s.group, "params"))] = s.td.get(s.key("params"))
    out = loss(**given)
    assert len(out) == len(loss.out_keys)
    for key, value in zip(loss.out_keys, out, strict=True):
        assert_close(value, expected[key])


@pytest.mark.parametrize("name", ["clip_per_head", "a2c", "reinforce"])
def test_single_head_keyword_call(name: str) -> None:
    """Case 43: the same without a composite: observation, action, log-prob as keywords."""
    s = scene((Spec("action", "independent", 2),), actor=single_actor)
    loss = s.loss(name)
    expected = loss(s.td)
    given = {k: s.td[k] for k in ("observation", "action", "advantage", "value_target")}
    if name in RATIO_LOSSES:
        given["action_log_prob"] = s.td["action_log_prob"]
    for key, value in zip(loss.out_keys, loss(**given), strict=True):
        assert torch.equal(value, expected[key]), key


# --- value keys and the value estimator -----------------------------------------------------------


def by_hand(s: Scene, td: TensorDict, critic: nn.Module, gamma: float, lmbda: float) -> Tensor:
    """GAE along the last root dim, step by step, ``[*S]``."""
    nxt = td.get(("next", *s.group))
    with torch.no_grad():
        value = critic(s.obs).squeeze(-1)
        after = critic(nxt["observation"]).squeeze(-1)
    reward, done = nxt["reward"].squeeze(-1), nxt["done"].squeeze(-1).float()
    stop = nxt["terminated"].squeeze(-1).float()
    delta = reward + gamma * after * (1 - stop) - value
    time = td.batch_dims - 1
    steps, carry = [], torch.zeros_like(delta.select(time, 0))
    for t in reversed(range(delta.shape[time])):
        carry = delta.select(time, t) + gamma * lmbda * (1 - done.select(time, t)) * carry
        steps.append(carry)
    return torch.stack(steps[::-1], time)


def with_value_key(form: str, key: Any) -> tuple[Scene, TensorDict]:
    """A scene whose critic writes ``key``, with two ends of trajectories and no advantage."""
    s = scene(HYBRID, form)
    s.critic = TensorDictModule(nn.Linear(OBS, 1), in_keys=[s.key("observation")], out_keys=[key])
    stale = [s.key("state_value"), s.key("advantage"), s.key("value_target")]
    td = s.td.exclude(*stale, bare(("next", *s.group, "state_value")))
    nxt = td.get(("next", *s.group))
    nxt["done"].view(-1)[1::4] = True
    nxt["terminated"].view(-1)[1::8] = True
    return s, td


@pytest.mark.parametrize("form", ["flat", "time", "agents1", "agents3", "A==B", "A==B==T"])
@pytest.mark.parametrize("key", [("agents", "v"), "v", ("deep", "er", "v")])
@pytest.mark.parametrize("name", ["clip_joint", "a2c", "reinforce", "native"])
def test_value_key_of_the_critic(name: str, key: Any, form: str) -> None:
    """Case 40: a critic writing ("agents", "v") runs, and the default estimator uses it."""
    s, td = with_value_key(form, key)
    if s.group and key != ("agents", "v"):
        key = ("agents", "v")
        s.critic.out_keys = [key]
    loss = LOSSES[name](s.actor, s.critic)
    loss.set_keys(**s.keys() | {"value": key})
    before = snapshot(td)
    out = loss(td)
    assert snapshot(td) == before
    advantage = by_hand(s, td, s.critic.module, 0.99, 0.95)
    full = td.clone().set(s.key("advantage"), advantage.unsqueeze(-1))
    with torch.no_grad():
        value = s.critic.module(s.obs)
    full.set(s.key("value_target"), advantage.unsqueeze(-1) + value)
    other = LOSSES[name](s.actor, s.critic)
    other.set_keys(**s.keys() | {"value": key})
    expected = other(full)
    for k in ("loss_critic", "loss_value", "loss_objective", "loss_actor"):
        if k in expected.keys():  # noqa: SIM118
            torch.testing.assert_close(out[k], expected[k], rtol=1e-4, atol=1e-5)
    if name == "a2c":
        want = -(s.log_probs().sum(-1) * advantage).mean()
        torch.testing.assert_close(out["loss_objective"], want, rtol=1e-4, atol=1e-5)
    assert key in loss.in_keys
    assert "state_value" not in loss.in_keys


@pytest.mark.parametrize("form", FEW)
@pytest.mark.parametrize("name", LOSSES)
def test_advantage_in_the_data_builds_no_estimator(name: str, form: str) -> None:
    """Case 44: with an advantage no estimator is created, and the advantage is not touched."""
    s = scene(HYBRID, form)
    loss = s.loss(name)
    before = snapshot(s.td)
    loss(s.td)
    assert loss._value_estimator is None
    assert snapshot(s.td) == before
    other = s.td.clone()  # what an advantage would be computed from
    other.get(("next", *s.group, "reward")).mul_(100.0)
    assert_same(loss.eval()(other), loss.eval()(s.td), exact=True)


@pytest.mark.parametrize("form", FEW)
@pytest.mark.parametrize(("gamma", "lmbda"), [(0.5, 0.3), (0.9, 1.0), (0.0, 0.0)])
def test_the_users_discount_is_kept(form: str, gamma: float, lmbda: float) -> None:
    """Case 44: ``make_value_estimator(gamma, lmbda)`` decides, before and after ``set_keys``."""
    key = ("agents", "v") if FORMS[form][1] is not None else "v"
    s, td = with_value_key(form, key)
    advantage = by_hand(s, td, s.critic.module, gamma, lmbda)
    want = -(s.log_probs().sum(-1) * advantage).mean()
    for early in (True, False):
        loss = cl.A2CLoss(s.actor, s.critic)
        loss.set_keys(**(s.keys() if early else {}) | {"value": key})
        loss.make_value_estimator(gamma=gamma, lmbda=lmbda)
        loss.set_keys(**s.keys() | {"value": key})
        out = loss(td)["loss_objective"]
        torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)


def test_data_without_an_advantage_and_without_a_critic() -> None:
    """Case 44: nothing to compute an advantage with: a KeyError that names it."""
    s = scene(DISCRETE)
    td = s.td.exclude("advantage")
    for name in LOSSES:
        if name == "reinforce":
            continue
        with pytest.raises(KeyError, match="'advantage'"):
            s.loss(name, critic=False)(td)
    with pytest.raises(KeyError, match="reward"):
        s.loss("reinforce", critic=False)(td.exclude("next"))


def test_groups_of_one_rollout() -> None:
    """Case 41: one loss per group on one TensorDict; each reads its own group only."""
    td = TensorDict({}, [6])
    scenes = {}
    for group, specs, agents in (("red", DISCRETE, 2), ("blue", HYBRID, 3)):
        net = Net(specs)
        actor = composite_actor(net, (group,))
        critic = TensorDictModule(
            nn.Linear(OBS, 1), in_keys=[(group, "observation")], out_keys=[(group, "state_value")]
        )
        td.update(rollout(actor, (6,), agents, (group,), torch.float32))
        scenes[group] = Scene(net, actor, critic, td, (group,), (6, agents))
    for group, s in scenes.items():
        loss = s.loss("clip_joint")
        assert all(key[0] == group for key in loss.in_keys if key[0] in scenes)
        alone = loss(td.select(*loss.in_keys, strict=False))
        assert_same(loss(td), alone, exact=True)
        want = -geometric("joint", s.log_ratio(), s.advantage).mean()
        assert_close(alone["loss_objective"], want)
