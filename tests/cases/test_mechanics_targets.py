"""Modes, target parameters and value estimators of a loss."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torchrl.objectives import ClipPPOLoss as TorchRLClipPPOLoss
from torchrl.objectives import HardUpdate, SoftUpdate
from torchrl.objectives.utils import ValueEstimators
from torchrl.objectives.value import GAE, TD0Estimator

import composite_losses as cl
from tests.cases.builders_fl import (
    CLASSES,
    DOORS,
    KL,
    PAIR,
    build,
    make_data,
    networks,
    outcome,
    same,
    total_loss,
)
from tests.tolerances import assert_close

DELAYED = [
    ("PPOLoss", "actor"),
    ("ClipPPOLoss", "actor"),
    ("ClipPPOLoss-per_head", "actor"),
    ("ClipPPOLoss-leafwise", "actor"),
    ("ClipPPOLoss-mixed", "actor"),
    ("KLPENPPOLoss", "actor"),
    ("PolicyLoss", "actor"),
    ("ReinforceLoss", "value"),
]
quiet = pytest.mark.filterwarnings("ignore:No target network updater:UserWarning")


def data_for(name: str, heads: Any = PAIR, shape: tuple[int, ...] = (6,)) -> TensorDict:
    return make_data(heads, shape, source="all" if name in KL else "stored")


def delayed(name: str, which: str, updater: Any = None, **options: Any) -> tuple[Any, ...]:
    """A loss with target parameters, its online and its target tree, and the updater, if any."""
    loss = build(name, PAIR, **{f"delay_{which}": True})
    updater = None if updater is None else updater(loss, **options)
    net = "actor" if which == "actor" else "critic"
    return (
        loss,
        getattr(loss, f"{net}_network_params"),
        getattr(loss, f"target_{net}_network_params"),
        updater,
    )


def leaves(tree: Any) -> dict[Any, Tensor]:
    return {key: value.detach().clone() for key, value in tree.items(True, True)}


# --- modes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("functional", [True, False], ids=["functional", "modules"])
@pytest.mark.parametrize("name", DOORS)
def test_mode_reaches_the_networks(name: str, functional: bool) -> None:
    """``train()`` and ``eval()`` set the mode of actor and critic; in eval mode dropout is off."""
    actor, critic = networks(PAIR)
    actor[0].module.net.insert(1, nn.Dropout(0.5))
    critic.module.insert(1, nn.Dropout(0.5))
    loss = DOORS[name](actor, critic, functional=functional)
    nets = [actor] if name == "ReinforceLoss-alone" else [actor, critic]
    flags = [module for net in nets for module in net.modules()]
    plain, data = build(name, PAIR, functional=functional).eval(), data_for(name)
    assert loss.eval() is loss
    assert not loss.training and not any(m.training for m in flags)
    for key, value in plain(data).items():
        assert_close(loss(data)[key], value)
    assert loss.train() is loss
    assert loss.training and all(m.training for m in flags)


@pytest.mark.parametrize("functional", [True, False], ids=["functional", "modules"])
@pytest.mark.parametrize("name", ["ClipPPOLoss", "KLPENPPOLoss"])
def test_dropout_in_train_mode_is_said(name: str, functional: bool) -> None:
    """A ratio that dropout spoils is a warning, once; not in eval mode."""
    actor, critic = networks(PAIR)
    actor[0].module.net.insert(1, nn.Dropout(0.5))
    loss, data = DOORS[name](actor, critic, functional=functional), data_for(name)
    loss.eval()(data)
    with pytest.warns(UserWarning, match="dropout"):
        loss.train()(data)
    loss(data)


# --- target parameters ---------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "which"), DELAYED)
def test_soft_update(name: str, which: str) -> None:
    """``SoftUpdate(eps)``: target ← eps · target + (1 − eps) · online; targets do not train."""
    loss, online, target, updater = delayed(name, which, SoftUpdate, eps=0.75)
    for key, value in leaves(online).items():
        assert torch.equal(leaves(target)[key], value)
    assert not {p.data_ptr() for p in loss.parameters()} & {
        t.data_ptr() for t in target.values(True, True)
    }
    optimiser, data = torch.optim.SGD(loss.parameters(), lr=0.5), data_for(name)
    total_loss(loss(data)).backward()
    before = leaves(target)
    optimiser.step()
    assert all(torch.equal(leaves(target)[key], value) for key, value in before.items())
    now = leaves(online)
    assert any(not torch.equal(now[key], value) for key, value in before.items())
    updater.step()
    for key, value in before.items():
        assert_close(leaves(target)[key], 0.75 * value + 0.25 * now[key])
        assert torch.equal(leaves(online)[key], now[key])


@pytest.mark.parametrize(("name", "which"), DELAYED)
def test_hard_update(name: str, which: str) -> None:
    """``HardUpdate``: every n-th step the target becomes the online network."""
    _, online, target, updater = delayed(name, which, HardUpdate, value_network_update_interval=2)
    before = leaves(target)
    with torch.no_grad():
        for parameter in online.values(True, True):
            parameter.add_(0.125)
    moved = leaves(online)
    seen = []
    for _ in range(3):
        updater.step()
        now = leaves(target)
        seen.append(all(torch.equal(now[key], moved[key]) for key in moved))
        assert seen[-1] or all(torch.equal(now[key], before[key]) for key in before)
    assert seen[-1] and not seen[0]


@quiet
@pytest.mark.parametrize("name", ["PPOLoss", "ClipPPOLoss"])
def test_the_clip_is_around_the_delayed_policy(name: str) -> None:
    """Decoupled PPO: the data's weight is prox/behaviour, the ratio that is clipped π/prox.

    Heads by hand: a Normal and a Categorical of the actor's own parameters.
    """
    loss, online, *_ = delayed(name, "actor")
    data = data_for(name)

    def log_prob() -> Tensor:
        with torch.no_grad():
            read = loss.actor_network[0](data.clone())
        move = torch.distributions.Normal(
            read["params", "move", "loc"], read["params", "move", "scale"]
        )
        gear = torch.distributions.Categorical(logits=read["params", "gear", "logits"])
        return move.log_prob(data["action", "move"]).sum(-1) + gear.log_prob(data["action", "gear"])

    with loss.actor_network_params.to_module(loss.actor_network):
        proximal = log_prob()
    with torch.no_grad():
        for i, parameter in enumerate(online.values(True, True)):
            parameter.mul_(1 + 0.4 * (-1) ** i)
    with loss.actor_network_params.to_module(loss.actor_network):
        current = log_prob()
    old = data["action", "move_log_prob"] + data["action", "gear_log_prob"]
    ratio, advantage = (current - proximal).exp(), data["advantage"].squeeze(-1)
    gain = ratio * advantage
    if name == "ClipPPOLoss":
        assert ((ratio < 0.8) | (ratio > 1.2)).any()
        gain = torch.minimum(gain, ratio.clamp(0.8, 1.2) * advantage)
    out = loss(data)
    assert_close(out["loss_objective"].detach(), -((proximal - old).exp() * gain).mean())
    assert_close(out["kl_approx"], (proximal - current).mean())
    assert_close(out["max_ratio"], (current - old).exp().max())


@quiet
def test_the_delayed_critic_values_the_next_state() -> None:
    """TD(0) with a delayed critic: r + γ · target critic(next) · (1 − end) − critic(here)."""
    loss, online, *_ = delayed("ReinforceLoss", "value")
    loss.make_value_estimator(ValueEstimators.TD0, gamma=0.9)
    data = data_for("ReinforceLoss").exclude("advantage", "value_target", "state_value")
    critic = loss.critic_network.module
    with loss.critic_network_params.to_module(loss.critic_network), torch.no_grad():
        after = critic(data["next", "observation"])
    with torch.no_grad():
        for parameter in online.values(True, True):
            parameter.mul_(1.5)
    with loss.critic_network_params.to_module(loss.critic_network), torch.no_grad():
        here = critic(data["observation"])
    goes_on = (~data["next", "terminated"]).float()
    target = data["next", "reward"] + 0.9 * after * goes_on
    given = data.clone().set("advantage", target - here).set("value_target", target)
    for key, value in loss(given).items():
        assert_close(loss(data)[key], value)


@pytest.mark.parametrize("which", ["delay_actor", "delay_value"])
def test_delayed_networks_are_functional(which: str) -> None:
    """Target parameters exist for functional losses only: an error that says so."""
    name = "PPOLoss" if which == "delay_actor" else "ReinforceLoss"
    with pytest.raises(ValueError, match=which):
        build(name, PAIR, functional=False, **{which: True})


def test_no_targets_without_a_delay() -> None:
    """Without a delay nothing is there to update, and the state holds no targets."""
    loss = build("ClipPPOLoss", PAIR)
    assert all("target" not in key for key in loss.state_dict())
    with pytest.raises(RuntimeError, match="target"):
        SoftUpdate(loss, eps=0.9)


# --- value estimators ----------------------------------------------------------------------------


@pytest.mark.parametrize("functional", [True, False], ids=["functional", "modules"])
@pytest.mark.parametrize("heads", [PAIR, "normal"], ids=["composite", "single"])
@pytest.mark.parametrize("kind", TorchRLClipPPOLoss.SUPPORTED_VALUE_ESTIMATORS)
@pytest.mark.parametrize("name", CLASSES)
def test_every_estimator(name: str, kind: Any, heads: Any, functional: bool) -> None:
    """Data without an advantage: the loss of the advantage that TorchRL's estimator gives."""
    data = make_data(heads, (3, 5), source="all")
    data = data.exclude("advantage", "value_target", "state_value")
    theirs = TorchRLClipPPOLoss(*networks(heads))
    theirs.make_value_estimator(kind, gamma=0.8)
    estimated = data.clone()
    theirs.value_estimator(
        estimated,
        params=theirs.critic_network_params.detach(),
        target_params=theirs.target_critic_network_params,
    )
    loss = build(name, heads, functional=functional).eval()
    assert loss.make_value_estimator(kind, gamma=0.8) is loss
    before = data.clone()
    found = outcome(loss, data)
    given = data.clone()
    for key in ("advantage", "value_target"):
        given[key] = estimated[key].detach()
    same(found, outcome(loss, given))
    assert (estimated["advantage"].std() > 0.1) and "advantage" not in set(data.keys())
    for key, value in before.items(True, True):
        assert torch.equal(data[key], value), key


@pytest.mark.parametrize("name", CLASSES)
def test_estimators_as_classes_and_objects(name: str) -> None:
    """``make_value_estimator`` also takes classes and objects; keys set later reach it."""
    data = data_for(name, PAIR, (3, 5)).exclude("advantage", "value_target", "state_value")
    first, second, third = (build(name, PAIR).eval() for _ in range(3))
    first.make_value_estimator(ValueEstimators.GAE, gamma=0.7, lmbda=0.6)
    second.make_value_estimator(GAE, gamma=0.7, lmbda=0.6, value_network=second.critic_network)
    third.make_value_estimator(
        GAE(gamma=0.7, lmbda=0.6, value_network=third.critic_network, differentiable=False)
    )
    expected = outcome(first, data)
    same(outcome(second, data), expected)
    same(outcome(third, data), expected)
    first.set_keys(reward="bonus", advantage="gae")
    data["next", "bonus"] = data["next"].pop("reward")
    same(outcome(first, data), expected)


def test_estimator_gradients() -> None:
    """An advantage computed inside carries no gradient to the critic."""
    data = data_for("A2CLoss", PAIR, (3, 5)).exclude("advantage", "value_target", "state_value")
    loss = build("A2CLoss", PAIR)
    loss.make_value_estimator(ValueEstimators.TD0, gamma=0.9)
    loss(data)["loss_objective"].backward()
    assert all(
        p.grad is None or not p.grad.any() for p in loss.critic_network_params.values(True, True)
    )
    assert isinstance(loss.value_estimator, TD0Estimator)


def test_critic_only_losses_need_no_estimator() -> None:
    """With an advantage in the data none is built."""
    loss = cl.ClipPPOLoss(*networks(PAIR))
    loss(data_for("ClipPPOLoss"))
    assert loss._value_estimator is None
