"""REINFORCE on what was collected: returns, baselines, stored actions; a critic is optional."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, set_interaction_type
from torch import Tensor, nn
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import IndependentNormal, ProbabilisticActor
from torchrl.objectives.utils import ValueEstimators

import composite_losses as cl
from tests.cases.builders_fl import (
    PAIR,
    SIX,
    build,
    make_actor,
    make_critic,
    make_data,
    mask_with,
    networks,
    outcome,
    poison,
    same,
)
from tests.tolerances import assert_close

GAMMA = 0.5
# two trajectories of four steps; the first one ends after its second step
REWARD = [[1.0, 2.0, 3.0, 4.0], [0.0, 8.0, 0.0, 2.0]]
DONE = [[0, 1, 0, 0], [0, 0, 0, 0]]
# R_t = r_t + 0.5 (1 − done_t) R_{t+1}:
#   4 | 3 + 4/2 = 5 | done: 2 | 1 + 2/2 = 2;   2 | 0 + 2/2 = 1 | 8 + 1/2 = 8.5 | 0 + 8.5/2 = 4.25
RETURNS = [[2.0, 2.0, 5.0, 4.0], [4.25, 8.5, 1.0, 2.0]]


class Slope(nn.Module):
    """A unit Normal whose mean is one weight: d log π(a)/dw = (a − w), at w = 0 the action."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        loc = self.weight.expand_as(observation)
        return loc, torch.ones_like(loc)


def slope_actor() -> ProbabilisticActor:
    net = TensorDictModule(Slope(), ["observation"], ["loc", "scale"])
    return ProbabilisticActor(
        net, in_keys=["loc", "scale"], distribution_class=IndependentNormal, return_log_prob=True
    )


def episodes(names: list[str | None] | None = None) -> TensorDict:
    """Actions 0, 0.1, …, 0.7, row by row, and the rewards above."""
    action = (torch.arange(8.0) / 10).reshape(2, 4, 1)
    td = TensorDict({"observation": torch.zeros(2, 4, 1), "action": action}, [2, 4])
    td["next", "reward"] = torch.tensor(REWARD).unsqueeze(-1)
    td["next", "done"] = torch.tensor(DONE, dtype=torch.bool).unsqueeze(-1)
    if names is not None:
        td.names = names
    return td


def weights_of(loss: Any, data: TensorDict) -> Tensor:
    """What each log-prob is multiplied with, ``[*S]``: −loss / log π, by the loss's own rows."""
    loss.reduction = "none"
    action = data["action"].squeeze(-1)
    log_prob = -0.5 * action**2 - 0.5 * torch.log(torch.tensor(2 * torch.pi))
    return -loss(data)["loss_actor"].detach() / log_prob


def gradient(loss: Any, data: TensorDict) -> Tensor:
    """d loss_actor / dw: −mean(weight · action)."""
    loss.zero_grad()
    loss(data)["loss_actor"].backward()
    (parameter,) = loss.parameters()
    return parameter.grad


# --- returns -------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [None, ["batch", "time"], [None, "time"]])
def test_reward_to_go(names: Any) -> None:
    """Within a trajectory, along the last batch dim, cut where ``done``."""
    loss = cl.ReinforceLoss(slope_actor(), gamma=GAMMA)
    assert_close(weights_of(loss, episodes(names)), RETURNS)
    loss.reduction = "mean"
    # −(0·2 + .1·2 + .2·5 + .3·4 + .4·4.25 + .5·8.5 + .6·1 + .7·2)/8 = −10.35/8
    assert_close(gradient(loss, episodes(names)), -10.35 / 8)


def test_time_is_found_by_name() -> None:
    """A dim named "time" is the one along which rewards add up, wherever it stands."""
    data = episodes().permute(1, 0)
    loss = cl.ReinforceLoss(slope_actor(), gamma=GAMMA)
    data.names = ["time", "batch"]
    assert_close(weights_of(loss, data), torch.tensor(RETURNS).T)
    data.names = [None, None]
    # without the name the last dim is time: R = r + 0.5 r', cut in row 1 (done) of the first column
    expected = [[1 + 0 / 2, 0.0], [2.0, 8.0], [3 + 0 / 2, 0.0], [4 + 2 / 2, 2.0]]
    assert_close(weights_of(loss, data), expected)


@pytest.mark.parametrize(
    ("gamma", "first"), [(0.0, 1.0), (1.0, 3.0), (0.25, 1.5), (torch.tensor(0.25), 1.5)]
)
def test_discount(gamma: Any, first: float) -> None:
    """The first return is 1 + gamma · 2; gamma is in [0, 1], anything else a ValueError."""
    loss = cl.ReinforceLoss(slope_actor(), gamma=gamma)
    assert_close(weights_of(loss, episodes())[0, 0], first)


def test_default_discount() -> None:
    """0.99 per step."""
    assert_close(weights_of(cl.ReinforceLoss(slope_actor()), episodes())[0, 0], 1 + 0.99 * 2)


@pytest.mark.parametrize("shape", [(), (5,)])
def test_one_trajectory_and_one_step(shape: tuple[int, ...]) -> None:
    """``[T]`` is one trajectory; with batch size [] a step's return is its reward."""
    reward = torch.arange(1.0, 6.0)[: shape[0] if shape else 1].reshape(*shape, 1)
    data = TensorDict(
        {"observation": torch.zeros(*shape, 1), "action": torch.full((*shape, 1), 0.5)}, shape
    )
    data["next", "reward"] = reward
    data["next", "done"] = torch.zeros(*shape, 1, dtype=torch.bool)
    found = weights_of(cl.ReinforceLoss(slope_actor(), gamma=1.0), data)
    # sums from each step on: 15, 14, 12, 9, 5
    assert_close(found, [15.0, 14.0, 12.0, 9.0, 5.0] if shape else 1.0)


def test_trajectories_side_by_side() -> None:
    """Two batch dims before time: every line is its own trajectory."""
    data = torch.stack([episodes(), episodes().flip(0)], 0)
    found = weights_of(cl.ReinforceLoss(slope_actor(), gamma=GAMMA), data)
    assert_close(found, [RETURNS, RETURNS[::-1]])


# --- baselines -----------------------------------------------------------------------------------

BASELINES = {
    "none": RETURNS,
    # mean of all: (2 + 2 + 5 + 4 + 4.25 + 8.5 + 1 + 2)/8 = 28.75/8 = 3.59375
    "mean": [[r - 3.59375 for r in row] for row in RETURNS],
    # of two trajectories, the other one's return at the same step
    "leave_one_out": [[-2.25, -6.5, 4.0, 2.0], [2.25, 6.5, -4.0, -2.0]],
}


@pytest.mark.parametrize("baseline", BASELINES)
def test_baseline(baseline: str) -> None:
    """What is subtracted: nothing, the mean over batch and time, the others' mean per step."""
    loss = cl.ReinforceLoss(slope_actor(), gamma=GAMMA, baseline=baseline)
    assert_close(weights_of(loss, episodes()), BASELINES[baseline])


def test_leave_one_out_of_three() -> None:
    """The mean of the *other* two: returns 1, 2, 6 → 1 − 4, 2 − 3.5, 6 − 1.5 at every step."""
    data = TensorDict({"observation": torch.zeros(3, 2, 1)}, [3, 2])
    data["action"] = torch.full((3, 2, 1), 0.5)
    data["next", "reward"] = torch.tensor([[1.0, 1], [2, 2], [6, 6]]).unsqueeze(-1)
    data["next", "done"] = torch.ones(3, 2, 1, dtype=torch.bool)
    found = weights_of(cl.ReinforceLoss(slope_actor(), baseline="leave_one_out"), data)
    assert_close(found, [[-3.0, -3.0], [-1.5, -1.5], [4.5, 4.5]])


def test_baseline_of_masked_rows() -> None:
    """A masked step leaves its trajectory's return, the mean, and the others' mean.

    Row 0 counts to its second step, row 1 to its third. Without the padding the returns are
    [2, 2] and [0 + 8/2 = 4, 8 + 0 = 8, 0]; their mean is 16/5 = 3.2.
    """
    expected = {
        "none": [[2.0, 2.0, 0.0, 0.0], [4.0, 8.0, 0.0, 0.0]],
        "mean": [[-1.2, -1.2, 0.0, 0.0], [0.8, 4.8, -3.2, 0.0]],
        "leave_one_out": [[-2.0, -6.0, 0.0, 0.0], [2.0, 6.0, 0.0, 0.0]],
    }
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]], dtype=torch.bool)
    for how in ("collector", "root"):
        for baseline, weights in expected.items():
            loss = cl.ReinforceLoss(slope_actor(), gamma=GAMMA, baseline=baseline)
            data = poison(episodes(), mask, "mixed")
            mask_with(loss, data, mask, how)
            rows = torch.tensor(weights)
            loss.reduction = "none"
            log_prob = -0.5 * episodes()["action"].squeeze(-1) ** 2 - 0.918938533
            assert_close(loss(data)["loss_actor"].detach(), -rows * log_prob)
            loss.reduction = "mean"
            # −Σ weight · action / 5, actions 0, .1 | .4, .5, .6
            actions = episodes()["action"].squeeze(-1)
            assert_close(gradient(loss, data), -(rows * actions).sum() / 5)


def test_the_return_is_a_constant() -> None:
    """No gradient reaches a reward."""
    data = episodes()
    data["next", "reward"].requires_grad_()
    cl.ReinforceLoss(slope_actor(), baseline="mean")(data)["loss_actor"].backward()
    assert data["next", "reward"].grad is None


# --- stored actions ------------------------------------------------------------------------------

MODES = [ExplorationType.RANDOM, ExplorationType.DETERMINISTIC, ExplorationType.MODE]


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("heads", [PAIR, "normal", "categorical", SIX], ids=["2", "n", "c", "6"])
@pytest.mark.parametrize("name", ["ReinforceLoss", "ReinforceLoss-alone"])
def test_nothing_is_resampled(name: str, heads: Any, mode: Any) -> None:
    """Case 36: stored actions are scored whatever the exploration type; the random state stays."""
    data = make_data(heads, (3, 4))
    if name == "ReinforceLoss-alone":
        del data["advantage"]
    loss = build(name, heads)
    before, state = data.clone(), torch.get_rng_state()
    first = loss(data)
    with set_exploration_type(mode):
        second = loss(data)
    assert torch.equal(torch.get_rng_state(), state)
    for key, value in first.items():
        assert torch.equal(value, second[key]), key
    assert set(data.keys(True, True)) == set(before.keys(True, True))
    for key, value in before.items(True, True):
        assert torch.equal(data[key], value), key


@pytest.mark.parametrize("heads", [PAIR, "normal"], ids=["composite", "single"])
@pytest.mark.parametrize("layout", [((5,), False), ((2, 3), False), ((4, 2), True)])
def test_score_of_the_stored_action(heads: Any, layout: Any) -> None:
    """−mean(Σ log π_h(a_h) · A), heads scored by torch's distributions; no stored log-prob read."""
    shape, group = layout
    data = make_data(heads, shape, group=group, source="params")
    loss = build("ReinforceLoss-alone", heads, group=group)
    actor = networks(heads, group)[0]
    key = (lambda *k: ("agents", *k)) if group else (lambda *k: k if len(k) > 1 else k[0])
    with torch.no_grad():
        read = actor[0](data.clone())
    prefix = () if heads == "normal" else ("params", "move")
    action = key("action") if heads == "normal" else key("action", "move")
    move = torch.distributions.Normal(read[key(*prefix, "loc")], read[key(*prefix, "scale")])
    score = move.log_prob(data[action]).sum(-1)
    if heads != "normal":
        gear = torch.distributions.Categorical(logits=read[key("params", "gear", "logits")])
        score = score + gear.log_prob(data[key("action", "gear")])
    expected = -(score * data[key("advantage")].squeeze(-1)).mean()
    assert_close(loss(data)["loss_actor"].detach(), expected)


def test_actor_that_cannot_sample() -> None:
    """Case 37: an actor whose sampling raises still has a loss."""

    class NoSample(IndependentNormal):
        def sample(self, *args: Any) -> Tensor:
            raise AssertionError("sampled")

        rsample = sample

    net = TensorDictModule(Slope(), ["observation"], ["loc", "scale"])
    actor = ProbabilisticActor(net, in_keys=["loc", "scale"], distribution_class=NoSample)
    with (
        pytest.raises(AssertionError, match="sampled"),
        set_interaction_type(ExplorationType.RANDOM),
    ):
        actor(episodes())
    assert cl.ReinforceLoss(actor)(episodes())["loss_actor"].isfinite()


# --- critic, keys, groups ------------------------------------------------------------------------


def test_outputs() -> None:
    """``loss_actor``; ``loss_value`` with a critic; ``loss_entropy`` with a coefficient."""
    data = make_data(PAIR, (3, 4))
    for critic in (None, make_critic()):
        for coefficient in (None, 0.1, {"move": 0.1, "gear": 0.2}):
            loss = cl.ReinforceLoss(make_actor(PAIR), critic, entropy_coeff=coefficient)
            expected = {"loss_actor"}
            expected |= {"loss_value"} if critic is not None else set()
            expected |= {"loss_entropy"} if coefficient is not None else set()
            out = loss(data)
            assert {key for key in loss.out_keys if key.startswith("loss")} == expected
            assert list(out.keys()) == loss.out_keys
            if coefficient == 0.1:
                assert_close(out["loss_entropy"].detach(), -0.1 * out["entropy"])
            if isinstance(coefficient, dict):
                each = 0.1 * out["entropy/move"] + 0.2 * out["entropy/gear"]
                assert_close(out["loss_entropy"].detach(), -each)


@pytest.mark.parametrize("baseline", ["none", "mean", "leave_one_out"])
def test_a_stored_advantage_wins(baseline: str) -> None:
    """With an ``advantage`` entry neither rewards nor baseline are read."""
    data = episodes()
    data["advantage"] = torch.arange(8.0).reshape(2, 4, 1)
    del data["next"]
    loss = cl.ReinforceLoss(slope_actor(), baseline=baseline)
    # −mean(A · action) = −(Σ k · k/10)/8 = −14/8
    assert_close(gradient(loss, data), -14.0 / 8)


def test_with_a_critic_the_estimator_serves() -> None:
    """A critic and no advantage: TorchRL's estimator; REINFORCE's own returns are not used."""
    loss = build("ReinforceLoss", PAIR, baseline="mean", gamma=0.1)
    loss.make_value_estimator(ValueEstimators.TD0, gamma=0.9)
    data = make_data(PAIR, (3, 4)).exclude("advantage", "value_target", "state_value")
    critic = networks(PAIR)[1].module
    with torch.no_grad():
        here, after = critic(data["observation"]), critic(data["next", "observation"])
    target = data["next", "reward"] + 0.9 * after * (~data["next", "terminated"]).float()
    given = data.clone().set("advantage", target - here).set("value_target", target)
    same(outcome(loss, data), outcome(loss, given))


@pytest.mark.parametrize("shared", [(), ("reward",), ("done",), ("reward", "done")])
@pytest.mark.parametrize("baseline", ["none", "mean", "leave_one_out"])
def test_groups(baseline: str, shared: tuple[str, ...]) -> None:
    """``[B, T, A]``: every agent has returns of its own; a root entry expands over the agents."""
    data = make_data(PAIR, (2, 4, 3), group=True)
    del data["agents", "advantage"]
    reward, done = data["next", "agents", "reward"], data["next", "agents", "done"]
    loss = build("ReinforceLoss-alone", PAIR, group=True, gamma=GAMMA, baseline=baseline)
    for name in shared:
        data["next", name] = data["next", "agents", name][:, :, 0]
        data["next", "agents"].pop(name)
        loss.set_keys(**{name: name})
        expanded = data["next", name].unsqueeze(2).expand(2, 4, 3, 1)
        reward, done = (expanded, done) if name == "reward" else (reward, expanded)
    returns = torch.zeros(2, 4, 3)
    for b in range(2):
        for a in range(3):
            total = 0.0
            for t in reversed(range(4)):
                total = float(reward[b, t, a]) + (0 if done[b, t, a] else GAMMA * total)
                returns[b, t, a] = total
    if baseline == "mean":
        returns = returns - returns.mean()
    elif baseline == "leave_one_out":
        returns = returns - returns.flip(0)  # two trajectories: the other one
    given = data.clone()
    given["agents", "advantage"] = returns.unsqueeze(-1)
    same(outcome(loss, data), outcome(loss, given))


@pytest.mark.parametrize("heads", [PAIR, "normal"], ids=["composite", "single"])
@pytest.mark.parametrize("baseline", ["none", "mean"])
def test_padding_equals_shorter_trajectories(baseline: str, heads: Any) -> None:
    """Tail padding, whatever it holds, gives the loss of the valid rows with their own returns."""
    data = make_data(heads, (3, 5)).exclude("advantage")
    data["next", "done"] = torch.zeros(3, 5, 1, dtype=torch.bool)
    mask = torch.arange(5) < torch.tensor([[5], [2], [3]])
    loss, short = (build("ReinforceLoss-alone", heads, baseline=baseline) for _ in range(2))
    padded = poison(data, mask, "mixed")
    mask_with(loss, padded, mask, "collector")
    flat = data[mask]
    flat["next", "done"][torch.tensor([4, 6, 9])] = True  # the last step of each trajectory
    same(outcome(loss, padded), outcome(short, flat))


# --- errors --------------------------------------------------------------------------------------


def test_missing_reward_or_done() -> None:
    """Neither advantage nor critic nor rewards: a KeyError that names both."""
    loss = cl.ReinforceLoss(slope_actor())
    for name in ("reward", "done"):
        data = episodes()
        del data["next", name]
        with pytest.raises(KeyError, match=name) as error:
            loss(data)
        assert "advantage" in str(error.value) and "observation" in str(error.value)


@pytest.mark.parametrize("options", [{"baseline": "median"}, {"gamma": 1.5}, {"gamma": -0.1}])
def test_options_out_of_range(options: dict[str, Any]) -> None:
    """An unknown baseline or a discount outside [0, 1] is a ValueError that names the option."""
    with pytest.raises(ValueError, match=next(iter(options))):
        cl.ReinforceLoss(slope_actor(), **options)


def test_leave_one_out_needs_others() -> None:
    """One trajectory has no others: an error, not a baseline from other steps."""
    loss = cl.ReinforceLoss(slope_actor(), baseline="leave_one_out")
    with pytest.raises(ValueError, match="leave_one_out"):
        loss(episodes()[0])


@pytest.mark.parametrize("shape", [(2, 4, 2), (2, 4, 4)])
def test_reward_of_another_shape(shape: tuple[int, ...]) -> None:
    """Nothing is broadcast: a ShapeError names the entry and both shapes."""
    data = episodes()
    data["next", "reward"] = torch.ones(shape)
    with pytest.raises(ValueError, match="reward"):
        cl.ReinforceLoss(slope_actor())(data)
