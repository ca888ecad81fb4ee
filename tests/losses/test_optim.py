"""Parameter groups: separate options for actors, critics and groups, each parameter once."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from tensordict.nn import TensorDictModule
from torch import nn

import composite_losses as cl
from composite_losses.errors import ConfigError
from tests.cases import builders_groups as bg
from tests.cases.builders_fl import PAIR, build

TWO = bg.TWO


def group_loss(**options: Any) -> Any:
    return cl.GroupLoss({name: bg.member(name, spec, **options) for name, spec in TWO.items()})


def by_name(found: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    assert len({each["name"] for each in found}) == len(found)
    return {each["name"]: each for each in found}


def ids(parameters: Any) -> set[int]:
    return {id(p) for p in parameters}


@pytest.mark.parametrize("functional", [True, False])
def test_actor_and_critic(functional: bool) -> None:
    loss = build("ClipPPOLoss", PAIR, functional=functional)
    found = by_name(cl.param_groups(loss, actor=3e-4, critic={"lr": 1e-3, "eps": 1e-5}))
    assert list(found) == ["actor", "critic"]
    assert found["actor"]["lr"] == 3e-4
    assert (found["critic"]["lr"], found["critic"]["eps"]) == (1e-3, 1e-5)
    listed = [p for each in found.values() for p in each["params"]]
    assert len(listed) == len(ids(listed))
    assert ids(listed) == ids(loss.parameters())
    optimiser = torch.optim.Adam(found.values())
    assert [each["lr"] for each in optimiser.param_groups] == [3e-4, 1e-3]


def test_nothing_said_leaves_the_optimisers_default() -> None:
    found = cl.param_groups(build("ClipPPOLoss", PAIR), critic=1e-3)
    optimiser = torch.optim.SGD(found, lr=0.5)
    assert [each["lr"] for each in optimiser.param_groups] == [0.5, 1e-3]


def test_a_loss_without_a_critic_has_one_group() -> None:
    assert [each["name"] for each in cl.param_groups(build("ReinforceLoss-alone", PAIR))] == [
        "actor"
    ]


def test_groups_of_agents() -> None:
    """Options of a group stand in place of the common ones, for the network that they name."""
    loss = group_loss()
    first, second = TWO
    found = by_name(cl.param_groups(loss, actor=1e-3, critic=2e-3, groups={first: {"actor": 5e-4}}))
    rates = {name: each["lr"] for name, each in found.items()}
    assert rates == {
        f"{first}/actor": 5e-4,
        f"{second}/actor": 1e-3,
        f"{first}/critic": 2e-3,
        f"{second}/critic": 2e-3,
    }
    assert ids(p for each in found.values() for p in each["params"]) == ids(loss.parameters())


def test_shared_and_frozen_parameters() -> None:
    """A shared one belongs to the actor, a frozen one to nobody."""
    loss = build("ClipPPOLoss", PAIR, functional=False)
    trunk = next(m for m in loss.actor_network.modules() if isinstance(m, nn.Linear))
    critic = TensorDictModule(
        nn.Sequential(trunk, nn.Tanh(), nn.Linear(trunk.out_features, 1)),
        ["observation"],
        ["state_value"],
    )
    shared = cl.ClipPPOLoss(loss.actor_network, critic, functional=False)
    critic.module[2].bias.requires_grad_(False)
    found = by_name(cl.param_groups(shared))
    assert ids(trunk.parameters()) <= ids(found["actor"]["params"])
    assert ids(found["critic"]["params"]) == {id(critic.module[2].weight)}


def test_options_of_a_configuration_can_be_saved(tmp_path: Any) -> None:
    """Lists of OmegaConf become tuples, in the optimiser's state too."""
    loss = build("ClipPPOLoss", PAIR)
    options: Mapping[str, Any] = OmegaConf.create(
        {"actor": {"lr": 1e-3, "betas": [0.9, 0.99]}, "critic": 1e-2}
    )
    optimiser = torch.optim.Adam(cl.param_groups(loss, **options))
    assert optimiser.param_groups[0]["betas"] == (0.9, 0.99)
    torch.save(optimiser.state_dict(), tmp_path / "optimiser.pt")
    state = torch.load(tmp_path / "optimiser.pt", weights_only=True)
    assert state["param_groups"][0]["betas"] == (0.9, 0.99)


@pytest.mark.parametrize(
    ("groups", "found"),
    [({"nobody": {"actor": 1.0}}, "nobody"), ({next(iter(TWO)): {"policy": 1.0}}, "policy")],
)
def test_what_the_loss_does_not_have(groups: Any, found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        cl.param_groups(group_loss(), groups=groups)
    with pytest.raises(ConfigError, match="none"):
        cl.param_groups(build("ClipPPOLoss", PAIR), groups={"anybody": {}})


def test_a_clip_range_in_words() -> None:
    """What ``${oc.env:EPS}`` gives is a string: said so, not taken for a pair."""
    with pytest.raises(ConfigError, match=r"float or a scalar tensor, got '?0\.2"):
        build("ClipPPOLoss", PAIR, clip_epsilon="0.2")
