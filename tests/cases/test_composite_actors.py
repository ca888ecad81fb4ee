"""Every way to build a policy with several heads, and what must not matter about it."""

import json
import os
import subprocess
import sys
import warnings

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    TensorDictModule,
    TensorDictSequential,
    set_composite_lp_aggregate,
)
from torch import nn
from torchrl.envs.utils import ExplorationType, set_exploration_type

import composite_losses as cl
from composite_losses.errors import CompositeLossError
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
    composite_actor,
    geometric,
    gradients,
    objective,
    rollout,
    scene,
    single_actor,
    snapshot,
    total,
)
from tests.tolerances import assert_close

FLAGS = (True, False, None)


# --- the aggregate switch -------------------------------------------------------------------------


@pytest.mark.parametrize("form", FEW)
@pytest.mark.parametrize("name", LOSSES)
def test_aggregate_switch_changes_nothing(name: str, form: str) -> None:
    """Case 8: flag True, False, unset at construction and call: identical loss, gradient, keys."""
    s = scene(HYBRID, form)
    s.move()
    results = []
    for build in FLAGS:
        with set_composite_lp_aggregate(build):
            s.actor = composite_actor(s.net, s.group)
            loss = s.loss(name).eval()
        for call in FLAGS:
            with set_composite_lp_aggregate(call):
                out = loss(s.td)
                results.append(
                    (out, gradients(total(out), s.net), loss.out_keys, loss.in_keys, build, call)
                )
                assert list(loss.log_prob_source(s.td).values()) == ["stored", "stored"]
                parts, _ = cl.resolve_log_probs(s.actor, s.td)
                assert_close(parts.get(s.action_key(0)), s.stored()[..., 0])
    first = results[0]
    for out, grads, out_keys, in_keys, *flags in results[1:]:
        assert_same(out, first[0], exact=True)
        assert all(torch.equal(g, w) for g, w in zip(grads, first[1], strict=True)), flags
        assert out_keys == first[2], flags
        if flags[0] == first[4]:
            assert in_keys == first[3], flags
    # and it is the right value
    if name == "clip_joint":
        want = -geometric("joint", s.log_ratio(), s.advantage).mean()
        assert_close(first[0]["loss_objective"], want)


@pytest.mark.parametrize("form", CORE)
@pytest.mark.parametrize("name", JOINT_LOSSES)
def test_data_collected_with_the_switch_on(name: str, form: str) -> None:
    """Case 8: an aggregating actor stores one joint log-prob; same loss as the per-head data."""
    s = scene(HYBRID, form)
    with set_composite_lp_aggregate(True):
        torch.manual_seed(3)
        actor = composite_actor(s.net, s.group)
        joint = rollout(actor, *FORMS[form], s.group, torch.float32)
    torch.manual_seed(3)
    s.td = rollout(s.actor, *FORMS[form], s.group, torch.float32)
    assert torch.equal(joint.get(s.action_key(0)), s.td.get(s.action_key(0)))
    for i in range(2):  # tensordict may store both forms
        if joint.get(s.log_prob_key(i), None) is not None:
            joint.pop(s.log_prob_key(i))
    s.move()
    loss = s.loss(name)
    expected = loss(s.td)
    for flag in FLAGS:
        with set_composite_lp_aggregate(flag):
            out = loss(joint)
        assert_same(out, expected, skip=HEAD_METRICS)


HEAD_METRICS = tuple(f"{m}/{h}" for m in ("kl_approx", "clip_fraction") for h in ("gear", "move"))


@pytest.mark.parametrize("form", ["flat", "agents3", "A==B"])
def test_switch_and_a_single_distribution(form: str) -> None:
    """Case 8: an actor without a composite declares another key under the switch; same result."""
    s = scene((Spec("action", "independent", 2),), form, actor=single_actor)
    s.move()
    results = []
    for build in FLAGS:
        with set_composite_lp_aggregate(build):
            s.actor = single_actor(s.net, s.group)
            loss = s.loss("clip_joint")
            results += [loss(s.td)]
        results += [loss(s.td)]
    for out in results:
        assert_same(out, results[0], exact=True)
    want = -geometric("joint", s.log_ratio(), s.advantage).mean()
    assert_close(results[0]["loss_objective"], want)


SCRIPT = """
import json, torch
from tensordict.nn import composite_lp_aggregate, set_composite_lp_aggregate
from tests.cases.builders_ab import HYBRID, composite_actor, scene
torch.set_num_threads(1)
torch.manual_seed(0)
with set_composite_lp_aggregate(False):
    s = scene(HYBRID, "A==B")
s.move()
s.actor = composite_actor(s.net, s.group)
out = s.loss("clip_per_head")(s.td)
print(json.dumps([composite_lp_aggregate(), {k: v.item() for k, v in out.items()}]))
"""


def test_aggregate_environment_variable_changes_nothing() -> None:
    """Case 8: COMPOSITE_LP_AGGREGATE=1 at import: the same keys and values."""
    env = {**os.environ, "COMPOSITE_LP_AGGREGATE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    flag, values = json.loads(done.stdout.splitlines()[-1])
    assert flag is True
    torch.manual_seed(0)
    s = scene(HYBRID, "A==B")
    s.move()
    out = s.loss("clip_per_head")(s.td)
    assert_same(TensorDict({k: torch.tensor(v) for k, v in values.items()}), out)


# --- keys of the log-probs and of the actions -----------------------------------------------------


@pytest.mark.parametrize("form", CORE)
@pytest.mark.parametrize("name", ["ppo", "clip_per_head", "klpen", "native"])
def test_explicit_log_prob_keys(name: str, form: str) -> None:
    """Case 10: one log-prob key per head: all are in_keys, and a renamed key works."""
    s = scene(HYBRID, form)
    names = [s.key("lp_gear"), "lp_move"]
    s.actor = composite_actor(s.net, s.group, log_prob_keys=names)
    s.move()
    expected = s.loss(name).eval()(s.td)
    for i, key in enumerate(names):
        s.td.set(key, s.td.pop(s.log_prob_key(i)))
    loss = s.loss(name, log_prob_source="stored").eval()
    assert set(names) <= set(loss.in_keys)
    assert loss.log_prob_source(s.td) == {"gear": "stored", "move": "stored"}
    assert_same(loss(s.td), expected, exact=True)
    s.td.set("other", s.td.pop(names[0]))
    with pytest.raises(KeyError, match="gear"):
        loss(s.td)
    loss.set_keys(sample_log_prob=["other", "lp_move"])
    assert "other" in loss.in_keys
    assert_same(loss(s.td), expected, exact=True)


def test_declared_log_prob_keys_follow_the_out_keys() -> None:
    """Case 10: log_prob_keys pair with out_keys, whatever the order of the distribution map."""
    s = scene(HYBRID)  # the map's order: gear, move
    s.actor = composite_actor(s.net, out_keys=["move", "gear"], log_prob_keys=["first", "second"])
    s.move()
    want = -geometric("per_head", s.log_ratio(), s.advantage).mean()
    s.td.rename_key_("move_log_prob", "first")
    s.td.rename_key_("gear_log_prob", "second")
    out = s.loss("clip_per_head", log_prob_source="stored")(s.td)
    assert_close(out["loss_objective"], want)


@pytest.mark.parametrize("agents", [None, 1, 2, 3])
def test_names_of_distributions_are_not_action_keys(agents: int | None) -> None:
    """Case 11: ("arm", "grip") mapped to ("action", "arm"), ("action", "grip"): the loss runs."""
    form = "flat" if agents is None else f"agents{agents}"
    specs = (Spec(("action", "arm"), "normal", 2), Spec(("action", "grip"), "cat", 2))
    s = scene(specs, form)
    s.move()
    out = s.loss("clip_per_head")(s.td)
    assert_close(out["loss_objective"], -geometric("per_head", s.log_ratio(), s.advantage).mean())
    assert {"entropy/arm", "entropy/grip"} <= set(out.keys())


def test_missing_action_names_its_key_and_what_is_there() -> None:
    """Case 11: without the map the KeyError names ("action", "arm") and lists the keys present."""
    s = scene((Spec(("action", "arm"), "normal", 2), Spec(("action", "grip"), "cat", 2)))
    unmapped = Net((Spec("arm", "normal", 2), Spec("grip", "cat", 2)))
    actor = composite_actor(unmapped)
    td = rollout(actor, (6,), None, (), torch.float32)
    assert "arm" in td.keys()  # noqa: SIM118
    native = cl.ClipPPOLoss(actor)
    native.set_keys(action=[("action", "arm"), ("action", "grip")])
    for loss in (s.loss("clip_joint"), s.loss("a2c"), s.loss("reinforce"), native):
        before = snapshot(td)
        with pytest.raises(KeyError) as caught:
            loss(td)
        message = str(caught.value)
        assert "('action', 'arm')" in message
        assert "arm_log_prob" in message or "'arm'" in message  # what is present
        assert "'observation'" in message
        assert snapshot(td) == before


@pytest.mark.parametrize("name", LOSSES)
def test_keyword_call_with_flat_heads(name: str) -> None:
    """Case 12: keyword tensors for two flat heads give the TensorDict call's result."""
    s = scene(DISCRETE)
    loss = s.loss(name).eval()
    expected = loss(s.td)
    names = ["observation", "a", "b", "advantage", "value_target"]
    if name in RATIO_LOSSES:
        names += ["a_log_prob", "b_log_prob"]
    flat = {k: s.td[k] for k in names}
    if name == "klpen":
        flat["params"] = s.td["params"]
    out = loss(**flat)
    assert isinstance(out, tuple)
    assert len(out) == len(loss.out_keys)
    for key, value in zip(loss.out_keys, out, strict=True):
        assert torch.equal(value, expected[key]), key


# --- modes, layouts, groups -----------------------------------------------------------------------


@pytest.mark.parametrize("form", FEW)
@pytest.mark.parametrize("name", LOSSES)
def test_deterministic_exploration(name: str, form: str) -> None:
    """Case 16: under deterministic exploration no warning, and the value it has under random."""
    s = scene(HYBRID, form)
    s.move()
    loss = s.loss(name).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results = []
        for kind in (ExplorationType.RANDOM, ExplorationType.DETERMINISTIC, ExplorationType.MODE):
            with set_exploration_type(kind):
                results.append(loss(s.td))
                loss.log_probs(s.td)
                cl.diagnose(loss, s.td)
    assert_same(results[1], results[0], exact=True)
    assert_same(results[2], results[0], exact=True)


def multi_discrete(form: str) -> tuple[Scene, list[str]]:
    """Three heads of 3, 5 and 2 choices, and the stacked entry the environment reads."""
    s = scene((Spec("x", "cat", 3), Spec("y", "cat", 5), Spec("say", "cat", 2)), form)
    names = ["x", "y", "say"]
    keys = [s.key(name) for name in names]
    cl.StackHeads(keys, s.key("action"))(s.td)
    return s, names


def test_multi_discrete_recipe() -> None:
    """Case 17: nvec [3, 5, 2], A = 4: the joint log-prob [B, 4] sums three Categoricals."""
    s, names = multi_discrete("agents4")
    stacked = s.td["agents", "action"]
    assert stacked.shape == (6, 4, 3)
    assert all(torch.equal(stacked[..., i], s.td["agents", n]) for i, n in enumerate(names))
    s.move()
    loss = s.loss("ppo", critic=False, reduction="none")
    current = loss.log_probs(s.td)["current"]
    joint = sum(current["agents", name] for name in names)
    assert joint.shape == (6, 4)
    by_hand = [
        p["logits"].log_softmax(-1).gather(-1, s.td["agents", n].unsqueeze(-1)).squeeze(-1)
        for n, p in zip(names, s.net.params(s.obs), strict=True)
    ]
    assert_close(joint, sum(by_hand))
    ratio = (sum(by_hand) - s.stored().sum(-1)).exp()
    assert_close(loss(s.td)["loss_objective"], -ratio * s.advantage)


@pytest.mark.parametrize("form", FEW)
@pytest.mark.parametrize("name", LOSSES)
def test_heads_read_the_columns_of_a_stacked_entry(name: str, form: str) -> None:
    """Case 17: data with only the stacked entry, read by ``heads``, give the per-head result."""
    s, names = multi_discrete(form)
    s.move()
    expected = s.loss(name).eval()(s.td)
    stacked = s.td.clone()
    for n in names:
        stacked.pop(s.key(n))
    # the columns in another order: the mapping decides, not the position of the head
    order = [2, 0, 1]
    stacked.set(s.key("action"), stacked.get(s.key("action"))[..., order])
    heads = {n: (s.key("action"), order.index(i)) for i, n in enumerate(names)}
    loss = s.loss(name, heads=heads).eval()
    loss.set_keys(action=s.key("action"))  # as trainers do
    before = snapshot(stacked)
    assert_same(loss(stacked), expected, exact=True)
    assert snapshot(stacked) == before
    assert s.key("action") in loss.in_keys
    assert s.key("x") not in loss.in_keys
    assert_same(loss(stacked.select(*loss.in_keys, strict=False)), expected, exact=True)
    part = s.loss(name, heads={k: heads[k] for k in ("x", "y")}).eval()
    stacked.set(s.key("say"), s.td.get(s.key("say")))
    assert_same(part(stacked), expected, exact=True)
    if name in JOINT_LOSSES:
        for i in range(3):
            stacked.pop(s.log_prob_key(i))
        stacked.set(s.key("sample_log_prob"), s.stored().sum(-1))
        out = loss(stacked)
        assert set(loss.log_prob_source(stacked).values()) == {"joint"}
        assert_close(objective(out), objective(expected))


def test_stacked_entry_errors() -> None:
    """Case 17: an unknown head, a missing column, heads of unlike shapes: errors that say so."""
    s, _ = multi_discrete("agents2")
    with pytest.raises(CompositeLossError, match="elbow"):
        s.loss("ppo", heads={"elbow": (s.key("action"), 0)})
    with pytest.raises(CompositeLossError, match="'say'"):
        s.loss("ppo", heads={"say": (s.key("action"), 3)})(s.td)
    with pytest.raises(CompositeLossError, match="'z'"):
        cl.StackHeads(["z"], "action")(s.td)
    td = TensorDict({"x": torch.zeros(6), "y": torch.zeros(6, 2)}, [6])
    with pytest.raises(CompositeLossError, match=r"\[6, 2\]"):
        cl.StackHeads(["x", "y"], "action")(td)


def test_policy_that_stacks_its_heads_is_an_actor() -> None:
    """Case 17: a policy that ends in StackHeads, as a collector runs it, works in a loss."""
    s, _ = multi_discrete("agents3")
    expected = s.loss("clip_per_head")(s.td)
    keys = [s.key(n) for n in ("x", "y", "say")]
    policy = TensorDictSequential(s.actor, cl.StackHeads(keys, s.key("action")))
    td = policy(s.td.select(("agents", "observation")))
    assert td["agents", "action"].shape == (6, 3, 3)
    s.actor = policy
    assert_same(s.loss("clip_per_head")(s.td), expected, exact=True)


def test_groups_with_different_kinds_of_action() -> None:
    """Case 22: one discrete group, one continuous + discrete: one training step each."""
    torch.manual_seed(1)
    groups: dict[str, tuple[tuple[Spec, ...], int]] = {
        "talkers": ((Spec("say", "cat", 5),), 3),
        "walkers": ((Spec("move", "normal", 2), Spec("gear", "cat", 3)), 2),
    }
    td = TensorDict({}, [6])
    parts: dict[str, Scene] = {}
    for group, (specs, agents) in groups.items():
        net = Net(specs)
        actor = composite_actor(net, (group,))
        critic = TensorDictModule(
            nn.Linear(OBS, 1), in_keys=[(group, "observation")], out_keys=[(group, "state_value")]
        )
        td.update(rollout(actor, (6,), agents, (group,), torch.float32))
        parts[group] = Scene(net, actor, critic, td, (group,), (6, agents))
    losses = {g: p.loss("clip_per_head") for g, p in parts.items()}
    for group, loss in losses.items():
        p = parts[group]
        other = parts["walkers" if group == "talkers" else "talkers"]
        untouched = [q.clone() for q in other.net.parameters()]
        own = [q.clone() for q in p.net.parameters()]
        before = snapshot(td)
        optimiser = torch.optim.SGD(loss.parameters(), 0.1)
        out = loss(td)
        want = -geometric("per_head", p.log_ratio(), p.advantage).mean()
        assert_close(out["loss_objective"], want)
        total(out).backward()
        optimiser.step()
        assert snapshot(td) == before
        assert all(
            torch.equal(a, b) for a, b in zip(untouched, other.net.parameters(), strict=True)
        )
        assert all(not torch.equal(a, b) for a, b in zip(own, p.net.parameters(), strict=True))
        assert loss(td)["kl_k3"] > 0
