"""Cases on critics with memory, and on where a trajectory ends, in a loss over groups."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.modules.tensordict_module.rnn import set_recurrent_mode

import composite_losses as cl
from tests.cases import builders_groups as bg
from tests.cases import oracles_fl as oracle
from tests.cases.builders_groups import Spec, group_loss, make_data
from tests.tolerances import assert_close

SPEC = Spec(2, 5, (("action", "normal"),))


def memory_critic(kind: str) -> TensorDictSequential:
    """A recurrent critic with weights of its own for each of two agents."""
    net = getattr(cl, kind)(5, 4, 2, share_params=False)
    states: Any = ("g", "h") if kind == "MultiAgentGRU" else [("g", "h"), ("g", "c")]
    memory = net.as_tensordict_module(("g", "observation"), ("g", "embedding"), states)
    value = TensorDictModule(nn.Linear(4, 1), [("g", "embedding")], [("g", "state_value")])
    return TensorDictSequential(memory, value)


def collected(critic: TensorDictSequential, episodes: int) -> tuple[TensorDict, list[Any]]:
    """``episodes`` episodes of three steps in a row; the values of every step and of the next,
    found by running the critic step by step."""
    T = 3 * episodes
    td = make_data({"g": SPEC}, (4, T), estimated=False)
    obs = torch.randn(4, T + 1, 2, 5)
    first = torch.arange(T).remainder(3).eq(0)
    td["is_init"] = first.view(1, T, 1).expand(4, T, 1).clone()
    td["next", "is_init"] = torch.zeros(4, T, 1, dtype=torch.bool)
    for key in ("done", "terminated"):
        td["next", key] = torch.arange(T).remainder(3).eq(2).view(1, T, 1).expand(4, T, 1).clone()
    td["next", "terminated"][:2] = False  # truncated: what comes next has a value
    td["g", "observation"] = obs[:, :-1].clone()
    td["next", "g", "observation"] = obs[:, 1:].clone()
    td["next", "g", "observation"][:, 2::3] = torch.randn(4, episodes, 2, 5)
    states = critic[0].hidden_keys
    for holder in (td, td["next"]):
        for key in states:
            holder[key] = torch.zeros(4, T, 2, 1, 4)
    values = []
    with torch.no_grad():
        for t in range(T):
            step = td[:, t].exclude("next")
            if not first[t]:
                for key in states:
                    step[key] = td["next", key][:, t - 1]
            for key in states:
                td[key][:, t] = step[key]
            critic(step)
            for key in states:
                td["next", key][:, t] = step["next", key]
            after = TensorDict({"is_init": td["next", "is_init"][:, t]}, [4])
            after["g"] = TensorDict({"observation": td["next", "g", "observation"][:, t]}, [4])
            for key in states:
                after[key] = step["next", key]
            values.append((step["g", "state_value"], critic(after)["g", "state_value"]))
    return td, values


@pytest.mark.parametrize("mode", [True, False], ids=["recurrent", "steps"])
@pytest.mark.parametrize("episodes", [1, 2])
@pytest.mark.parametrize("kind", ["MultiAgentGRU", "MultiAgentLSTM"])
def test_critic_with_memory(kind: str, episodes: int, mode: bool) -> None:
    """Case 102: the default estimator (one vmapped call over now and next) gives the advantages
    of the critic run step by step, from the loss and from its estimator, in any mode."""
    critic = memory_critic(kind)
    td, values = collected(critic, episodes)

    def value(x: torch.Tensor) -> torch.Tensor:
        which = 0 if torch.equal(x, td["g", "observation"]) else 1
        return torch.stack([pair[which] for pair in values], 1)

    after = td["next", "g"].clone()
    for key in ("done", "terminated"):
        after[key] = td["next", key].unsqueeze(-2).expand(*td.shape, 2, 1)
    named = TensorDict({"agents": td["g"], "next": {"agents": after}}, td.shape)
    everyone = torch.ones(*td.shape, 2, dtype=torch.bool)
    advantage, target = oracle.gae_by_hand(named, everyone, value, group=True)
    loss = cl.GroupLoss({"g": cl.MAPPOLoss(bg.networks("g", SPEC)[0], critic)})
    with set_recurrent_mode(mode):
        written = loss.value_estimator(td.clone())
    torch.testing.assert_close(written["g", "advantage"], advantage, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(written["g", "value_target"], target, rtol=1e-5, atol=1e-5)
    out, again = loss(td), loss(written)
    for key, expected in again.items():
        torch.testing.assert_close(out[key], expected, rtol=1e-4, atol=1e-5)
    with set_recurrent_mode(True):
        assert_close(critic(td.clone())["g", "state_value"].detach(), value(td["g", "observation"]))


@pytest.mark.parametrize("at_root", [True, False])
def test_truncation_is_not_continued(at_root: bool) -> None:
    """Case 104: two trajectories in a row, V = 1 and V = 100, r = 0, γ = 1: at the truncated step
    the value of its own next state counts: advantage 0, not 99; the same as apart."""
    spec = Spec(2, 1, (("action", "normal"),))
    signals = ("reward", "done", "terminated") if at_root else ()
    td = make_data({"g": spec}, (1, 6), shared=signals, estimated=False)
    first = (torch.arange(6) < 3).view(1, 6, 1, 1)
    for holder in (td, td["next"]):
        holder["g", "observation"] = torch.where(first, 1.0, 100.0).expand(1, 6, 2, 1).clone()
    place = td["next"] if at_root else td["next", "g"]
    place["reward"] = torch.zeros_like(place["reward"])
    place["terminated"] = torch.zeros_like(place["terminated"])
    place["done"] = torch.zeros_like(place["done"])
    place["done"][:, 2] = place["done"][:, 5] = True
    critic = TensorDictModule(nn.Identity(), [("g", "observation")], [("g", "state_value")])
    loss = cl.GroupLoss({"g": cl.IPPOLoss(bg.networks("g", spec)[0], critic)})
    loss.make_value_estimator(gamma=1.0, lmbda=1.0)
    together = loss.value_estimator(td.clone())
    assert_close(together["g", "advantage"], torch.zeros(1, 6, 2, 1))
    apart = torch.cat([loss.value_estimator(td[:, i : i + 3].clone()) for i in (0, 3)], 1)
    assert_close(together["g", "value_target"], apart["g", "value_target"])


def test_every_group_has_its_own_end() -> None:
    """One group's trajectory ends while the other's goes on: each to its own entry."""
    specs = {"left": SPEC, "right": SPEC}
    td = make_data(specs, shared=(), estimated=False)
    td["next", "left", "done"][:] = True
    td["next", "right", "done"][:] = False
    written = group_loss(specs).value_estimator(td.clone())
    for name in specs:
        named = TensorDict({"agents": td[name], "next": {"agents": td["next", name]}}, [4, 5])
        critic = bg.networks(name, SPEC)[1].module
        everyone = torch.ones(4, 5, 2, dtype=torch.bool)
        expected, _ = oracle.gae_by_hand(named, everyone, critic, group=True)
        assert_close(written[name, "advantage"], expected)
