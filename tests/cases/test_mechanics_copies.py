"""Copies and pickles of a loss: what shared memory in the original shares it in the copy."""

import copy
import pickle
from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

import composite_losses as cl
from tests.cases.builders_fl import PAIR, make_data, networks, outcome, same, total_loss

pytestmark = pytest.mark.filterwarnings("ignore:No target network updater:UserWarning")
MODES = pytest.mark.parametrize("functional", [True, False], ids=["functional", "modules"])


def trunk_loss(**options: Any) -> tuple[Any, Any, Any]:
    """A loss whose actor and critic share a layer and a BatchNorm; actor and critic."""
    actor, _ = networks(PAIR)
    trunk = nn.Sequential(actor[0].module.net[0], nn.BatchNorm1d(6))
    actor[0].module.net[0] = trunk
    value = nn.Sequential(trunk, nn.Tanh(), nn.Linear(6, 1))
    critic = TensorDictModule(value, ["observation"], ["state_value"])
    return cl.ClipPPOLoss(actor, critic, **options), actor, critic


def trees(loss: Any) -> list[str]:
    return [name for name in loss._modules if name.endswith("_params")]


def places(loss: Any) -> list[tuple[str, int]]:
    """For every entry of parameters and buffers, the first entry with the same memory."""
    entries: list[tuple[str, Tensor]] = [*loss.named_parameters(), *loss.named_buffers()]
    for name in trees(loss):
        entries += [(f"{name} {key}", x) for key, x in loss._modules[name].items(True, True)]
    for net in (loss.actor_network, loss.critic_network):
        entries += [*net.named_parameters(), *net.named_buffers()]
    first: dict[int, int] = {}
    return [(name, first.setdefault(x.data_ptr(), i)) for i, (name, x) in enumerate(entries)]


def frozen_trunk() -> Any:
    loss, actor, _ = trunk_loss()
    for p in actor[0].module.net[0].parameters():
        p.requires_grad_(False)
    return loss


def one_memory() -> Any:
    """Actor and critic with two parameters over the same numbers."""
    actor, _ = networks(PAIR)
    first = actor[0].module.net[0]
    second = copy.deepcopy(first)
    second.weight = nn.Parameter(first.weight.data)
    value = nn.Sequential(second, nn.Tanh(), nn.Linear(6, 1))
    return cl.ClipPPOLoss(actor, TensorDictModule(value, ["observation"], ["state_value"]))


MAKES = {
    "functional": lambda: trunk_loss()[0],
    "modules": lambda: trunk_loss(functional=False)[0],
    "targets": lambda: trunk_loss(delay_actor=True)[0],
    "separate": lambda: trunk_loss(separate_losses=True)[0],
    "separate modules": lambda: trunk_loss(separate_losses=True, functional=False)[0],
    "frozen": frozen_trunk,
    "one memory": one_memory,
}


def pickled(loss: Any) -> Any:
    return pickle.loads(pickle.dumps(loss))


@pytest.mark.parametrize("way", [copy.deepcopy, pickled])
@pytest.mark.parametrize("how", MAKES)
def test_a_shared_trunk_stays_shared(how: str, way: Any) -> None:
    """As many parameters, shared where they were, also between networks and parameter trees;
    losses and gradients are equal; training the copy gives what training the original gives, and
    leaves the original as it was."""
    loss, data = MAKES[how](), make_data(PAIR, (6,))
    twin = way(way(loss))
    assert len(list(twin.parameters())) == len(list(loss.parameters()))
    assert places(twin) == places(loss)
    assert [(n, p.requires_grad) for n, p in twin.named_parameters()] == [
        (n, p.requires_grad) for n, p in loss.named_parameters()
    ]
    own = {x.data_ptr() for x in (*loss.parameters(), *loss.buffers())}
    assert own.isdisjoint(x.data_ptr() for x in (*twin.parameters(), *twin.buffers()))
    assert list(twin.state_dict()) == list(loss.state_dict())
    for name in trees(loss):
        first, second = loss._modules[name], twin._modules[name]
        kinds = [(key, type(x), hasattr(x, "_is_buffer")) for key, x in first.items(True, True)]
        assert kinds == [
            (key, type(x), hasattr(x, "_is_buffer")) for key, x in second.items(True, True)
        ]
        assert (first.is_locked, first.no_convert) == (second.is_locked, second.no_convert)

    before = copy.deepcopy(loss.state_dict())
    for each in (twin, loss):
        if each is loss:
            assert all(torch.equal(x, before[key]) for key, x in loss.state_dict().items())
        optimiser = torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.1)
        for _ in range(2):
            optimiser.zero_grad()
            total_loss(each(data)).backward()
            optimiser.step()
    changed = [k for k, x in loss.state_dict().items() if not torch.equal(x, before[k])]
    assert changed
    for key, value in twin.state_dict().items():
        assert torch.equal(value, loss.state_dict()[key]), key
    same(outcome(twin, data), outcome(loss, data))


@MODES
def test_networks_copied_along_are_the_copys(functional: bool) -> None:
    """Loss and actor in one container: a step on the copied loss moves the copied actor."""
    loss, actor, critic = trunk_loss(functional=functional)
    twin, policy, value = copy.deepcopy([loss, actor, critic])
    assert twin.actor_network is policy
    held = {id(p) for p in twin.parameters()}
    assert held == {id(p) for net in (policy, value) for p in net.parameters()}
    assert held.isdisjoint(map(id, loss.parameters()))


def test_a_copy_needs_no_swap() -> None:
    """The copied networks hold the copied trees' tensors, as the original's do."""
    twin = copy.deepcopy(cl.ClipPPOLoss(*networks(PAIR)))
    for name in ("actor_network", "critic_network"):
        params = getattr(twin, f"{name}_params")
        assert twin._held[name].params is params and twin._held[name].same


def test_a_buffer_with_a_graph_is_copied_without() -> None:
    """A tensor that is no leaf cannot be deep-copied by torch; its values can."""
    loss, actor, _ = trunk_loss()
    norm = actor[0].module.net[0][1]
    graph = norm.running_mean + norm.weight.sum() * 0 + 2.0
    key = next(k for k in loss.actor_network_params.keys(True, True) if k[-1] == "running_mean")
    loss.actor_network_params._param_td.set(key, graph)
    twin = copy.deepcopy(loss)
    found = twin.actor_network_params.get(key)
    assert torch.equal(found, graph) and found.grad_fn is None
