"""Groups that learn together on real environments: VMAS and PettingZoo's MPE."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import composite_losses as cl
from composite_losses.demo import groups as demo
from composite_losses.demo.groups import TASKS, GroupHistory, Task, gain, train
from composite_losses.demo.training import minibatches, update

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:No target network updater:UserWarning"),
]


def task(name: str, **settings: Any) -> Task:
    return replace(TASKS[name], settings=replace(TASKS[name].settings, **settings))


@pytest.fixture(params=list(TASKS))
def small(request: pytest.FixtureRequest) -> tuple[Any, Any, Any, Any]:
    """Environment, settings, actors and loss of a small run."""
    settings = task(request.param, envs=4, steps=6).settings
    env = TASKS[request.param].make_env(0, settings)
    actors = {group: demo.make_actor(env, group, settings) for group in env.group_map}
    return env, settings, actors, demo.make_loss(env, actors, settings)


def test_what_an_environment_writes_is_what_the_loss_reads(small: Any) -> None:
    """Cases 50, 87, 92, 94: rewards by group, ends at the root (VMAS) or by group (PettingZoo), no
    key set: ratios are 1 on fresh data, every group has its estimates, and all of them learn."""
    env, settings, actors, loss = small
    data = demo.collect(env, settings, demo.make_policy(env, actors))
    loss.value_estimator(data)
    batch = data.shape
    for group, agents in env.group_map.items():
        for key in ("advantage", "value_target"):
            assert data[group, key].shape == (*batch, len(agents), 1)
        assert isinstance(loss.losses[group], cl.MAPPOLoss if len(agents) > 1 else cl.IPPOLoss)
    before = [p.clone() for p in loss.parameters()]
    optimiser = torch.optim.Adam(loss.parameters(), lr=1e-2)
    first = next(minibatches(data.exclude("next").reshape(-1), settings))
    out = update(loss, optimiser, first)
    assert list(out.keys()) == loss.out_keys
    for group in env.group_map:
        assert abs(out[f"{group}/kl_approx"]) < 1e-5
        assert out[f"{group}/clip_fraction"] == 0
    assert all(value.isfinite() for value in out.values())
    assert all(not torch.equal(p, q) for p, q in zip(loss.parameters(), before, strict=True))


def test_a_leader_that_moves_and_speaks() -> None:
    """Cases 17, 22: groups with composite heads, three for the leader and two for the others, in
    one loss; each head has its entropy, and the environment gets them stacked."""
    settings = task("vmas_talk", envs=4, steps=5).settings
    env = demo.vmas_talk(0, settings)
    actors = {group: demo.make_actor(env, group, settings) for group in env.group_map}
    data = demo.collect(env, settings, demo.make_policy(env, actors))
    assert data["lead_adversary", "action"].shape == (4, 5, 1, 3)
    assert data["adversary", "action"].shape == (4, 5, 3, 2)
    for i, head in enumerate(demo.HEADS):
        stacked = data["lead_adversary", "action"][..., i]
        assert torch.equal(stacked, data["lead_adversary", head])
    assert data["lead_adversary", "say"].max() == 3  # 0 … 3: says something
    loss = demo.make_loss(env, actors, settings)
    loss.value_estimator(data)
    names = set(loss(data).keys())
    assert {f"lead_adversary/entropy/{head}" for head in demo.HEADS} <= names
    assert {"adversary/entropy/move_y", "agent/clip_fraction/move_x"} <= names
    assert "adversary/entropy/say" not in names


def test_agents_have_weights_of_their_own() -> None:
    """Case 101: every agent of a group acts by its own policy."""
    settings = task("vmas_tag", envs=4, steps=2).settings
    env = demo.vmas_tag(0, settings)
    actor = demo.make_actor(env, "adversary", settings)
    one = torch.randn(5, 1, 16).expand(5, 3, 16)
    td = TensorDict({"adversary": TensorDict({"observation": one}, [5, 3])}, [5])
    with torch.no_grad():
        logits = actor[0](td)["adversary", "logits"]
    assert not torch.allclose(logits[..., 0, :], logits[..., 1, :])
    assert not torch.allclose(logits[..., 1, :], logits[..., 2, :])


def test_environments_leave_the_threads_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ``SerialEnv`` that is closed raises their number, up to that of TorchRL's import."""
    monkeypatch.setattr("torchrl._THREAD_POOL_INIT", 8)
    threads = torch.get_num_threads()
    env = demo.pettingzoo_tag(0, task("pettingzoo_tag", envs=2, steps=2).settings)
    env.reset()
    env.close()
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("name", "settings"),
    [("vmas_tag", {"iterations": 10, "envs": 40}), ("pettingzoo_tag", {})],
)
@pytest.mark.timeout(900)  # about a minute of one core, more where cores are shared
def test_hunters_learn_to_catch(name: str, settings: Any) -> None:
    """MAPPO (three hunters) beside IPPO (a runner), unshared actors: over three seeds the hunters'
    return is more than that of random actions by at least three standard errors."""
    runs = [train(name, task(name, **settings), seed) for seed in (0, 1, 2)]
    found = gain(runs, "adversary")
    assert found.errors >= 3, found


def test_both_policies_are_measured_on_as_many_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random first, then two iterations, then the learned policy; nothing learns from the rest."""
    policies = []

    def collect(env: Any, settings: Any, policy: Any) -> Any:
        policies.append(policy)
        return original(env, settings, policy)

    original = demo.collect
    monkeypatch.setattr(demo, "collect", collect)
    small = replace(task("vmas_tag", iterations=2, envs=2, steps=3), rounds=4)
    history = train("", small, 0)
    assert [policy is None for policy in policies] == [True] * 4 + [False] * (2 + 4)
    assert [len(values) for values in history.returns.values()] == [2, 2]


def test_gain_by_hand() -> None:
    """Learned 8 and 12, random 1 and 3: 10 − 2 = 8; variances 8 and 2 over two seeds:
    √(10/2) = 2.236; 3.58 errors. What was collected to learn from does not count."""
    runs = [
        GroupHistory({"g": [0.0, 70.0]}, random={"g": 1.0}, learned={"g": 8.0}),
        GroupHistory({"g": [0.0, -5.0]}, random={"g": 3.0}, learned={"g": 12.0}),
    ]
    found = gain(runs, "g")
    assert (found.learned, found.random) == (10.0, 2.0)
    assert found.error == pytest.approx(5**0.5)
    assert found.errors == pytest.approx(8 / 5**0.5)


def test_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    demo.main(["vmas_tag", "--seeds", "0", "1", "--iterations", "1", "--envs", "2"])
    lines = capsys.readouterr().out.strip().splitlines()
    assert [line.split()[0] for line in lines] == ["group", "adversary", "agent", "vmas_tag:"]
    for arguments in (["nowhere"], ["vmas_tag", "--seeds", "0"]):
        with pytest.raises(SystemExit):
            demo.main(arguments)
