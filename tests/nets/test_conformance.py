"""One table that drives what every network promises, whatever its kind and sharing."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import composite_losses as cl
from composite_losses import nets
from composite_losses.errors import ConfigError
from tests.nets.builders import (
    FEEDFORWARD,
    KINDS,
    RECURRENT,
    SETS,
    SHARING,
    A,
    by_agent,
    flat,
    inputs,
    make,
)
from tests.tolerances import assert_close

EVERY = pytest.mark.parametrize("sharing", SHARING)
KIND = pytest.mark.parametrize("kind", KINDS)


def test_every_public_network_has_a_row() -> None:
    """A network that the table does not build would be untested."""
    built = {type(make(kind, "shared")) for kind in KINDS}
    public = {getattr(nets, name) for name in nets.__all__ if name.startswith("MultiAgent")}
    assert built == public
    assert all(getattr(cl, kind.__name__) is kind for kind in public)


@KIND
@EVERY
def test_outputs_equal_a_loop_over_agents(kind: str, sharing: str) -> None:
    """The batched products equal torch.nn's layers, run agent by agent."""
    net = make(kind, sharing)
    arguments = inputs(kind, 5)
    expected = by_agent(kind, net, sharing, arguments)
    for ours, loop in zip(flat(net(*arguments)), expected, strict=True):
        assert_close(ours, loop)


@pytest.mark.parametrize("kind", FEEDFORWARD)
@EVERY
def test_gradients_equal_a_loop_over_agents(kind: str, sharing: str) -> None:
    net = make(kind, sharing)
    (x,) = inputs(kind, 5)
    gradients = [
        torch.autograd.grad(y.sin().sum(), list(net.parameters()))
        for y in (net(x), *by_agent(kind, net, sharing, (x,)))
    ]
    for ours, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", RECURRENT)
@EVERY
def test_recurrent_gradients_equal_torch_modules(kind: str, sharing: str) -> None:
    """Backward through a step equals the sum over agents of the views' own gradients."""
    net = make(kind, sharing)
    x, state = inputs(kind, 5)
    y, _ = net(x, state)
    y.sin().sum().backward()
    expected = {n: torch.zeros_like(p) for n, p in net.named_parameters()}
    for agent in range(A):
        view = net.agent(agent)
        hidden = [s[:, agent].transpose(0, 1).contiguous() for s in flat(state)]
        out, _ = view(x[:, agent, None], hidden[0] if kind == "gru" else tuple(hidden))
        out.sin().sum().backward()
        for name, parameter in view.named_parameters():
            expected[name][SETS[sharing][agent]] += parameter.grad
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-5)


@KIND
@EVERY
@pytest.mark.parametrize("batch", [(), (1,), (4,), (2, 3)])
def test_any_batch_shape(kind: str, sharing: str, batch: tuple[int, ...]) -> None:
    """Case 119: no batch dim, one row, several dims: rows are computed apart from each other."""
    net = make(kind, sharing)
    arguments = inputs(kind, *batch)
    rows = torch.utils._pytree.tree_map(lambda t: t.reshape(-1, *t.shape[len(batch) :]), arguments)
    for ours, expected in zip(flat(net(*arguments)), flat(net(*rows)), strict=True):
        assert ours.shape[: len(batch) + 1] == (*batch, A)
        assert_close(ours, expected.reshape(ours.shape))


@KIND
@EVERY
def test_agents_differ_after_construction_and_after_every_reset(kind: str, sharing: str) -> None:
    """Case 105: with own parameters agents differ, from each other and from before the reset."""
    net = make(kind, sharing)
    for _ in range(3):
        weights = [p.detach().flatten(1) for p in net.parameters()]
        n_sets = {"shared": 1, "unshared": A, "clustered": 2}[sharing]
        assert {len(w) for w in weights} == {n_sets}
        for i in range(n_sets):
            for j in range(i):
                assert all((w[i] - w[j]).abs().max() > 0.01 for w in weights)
        before = [w.clone() for w in weights]
        net.reset_parameters()
        for old, parameter in zip(before, net.parameters(), strict=True):
            assert ((parameter.detach().flatten(1) - old).abs().amax(1) > 0.01).all()


@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_parameters_start_as_torch_starts_them(kind: str) -> None:
    """Case 105: uniform in ±1/√hidden_size per set, biases and both weights alike."""
    net = (cl.MultiAgentGRU if kind == "gru" else cl.MultiAgentLSTM)(7, 16, 30, share_params=False)
    theirs = (nn.GRU if kind == "gru" else nn.LSTM)(7, 16)
    for name, parameter in net.named_parameters():
        assert parameter.shape[1:] == getattr(theirs, name).shape
        spread = parameter.detach().flatten(1)
        assert spread.abs().max() <= 0.25
        assert (spread.std() / (0.25 / 3**0.5) - 1).abs() < 0.05
        assert spread.abs().amax(1).min() > 0.2


@KIND
@EVERY
def test_printed_net_says_agents_and_sharing(kind: str, sharing: str) -> None:
    """Case 108: a reader of the printout sees how many agents there are and what they share."""
    text = repr(make(kind, sharing))
    assert f"n_agents={A}" in text
    assert f"share_params={SHARING[sharing]}" in text


@KIND
@EVERY
def test_agent_views_share_memory_and_pass_no_gradient(kind: str, sharing: str) -> None:
    """Case 108, 101: ``agent(i)`` is torch's own module on the same memory, gradients apart."""
    net = make(kind, sharing)
    views = [net.agent(i) for i in range(A)]
    expected = {"gru": nn.GRU, "lstm": nn.LSTM}.get(kind, nn.Sequential)
    assert {type(view) for view in views} == {expected}
    pointers = [[p.data_ptr() for p in view.parameters()] for view in views]
    for i in range(A):
        for j in range(A):
            same = SETS[sharing][i] == SETS[sharing][j]
            assert set(pointers[i]).isdisjoint(pointers[j]) is not same
            assert (pointers[i] == pointers[j]) is same
    x = inputs(kind, 5)[0]
    y = views[1](x[:, 1, None] if kind in RECURRENT else x[:, 1])
    flat(y)[0].sum().backward()
    assert all(p.grad is None for p in net.parameters())
    with torch.no_grad():
        for parameter in views[1].parameters():
            parameter.mul_(2)
        first = next(net.parameters())
        assert torch.equal(first[SETS[sharing][1]], next(views[1].parameters()))
        first.fill_(0.5)
    assert (next(views[1].parameters()) == 0.5).all()


@pytest.mark.parametrize("position", [3, -4])
@pytest.mark.parametrize("kind", FEEDFORWARD)
def test_a_view_of_an_agent_that_is_not_there(kind: str, position: int) -> None:
    with pytest.raises(ConfigError, match=rf"0 to 2, found {position}"):
        make(kind, "unshared").agent(position)


@pytest.mark.parametrize(
    ("kind", "lazy"), [*((kind, False) for kind in KINDS), ("mlp", True), ("conv", True)]
)
@EVERY
def test_state_dict_round_trip(kind: str, sharing: str, lazy: bool) -> None:
    """Case 107: a strict load into a fresh net, and into a lazy one never called, restores it."""
    net, arguments = make(kind, sharing), inputs(kind, 5)
    buffer = io.BytesIO()
    torch.save(net.state_dict(), buffer)
    buffer.seek(0)
    other = make(kind, sharing, lazy=lazy)
    other.load_state_dict(torch.load(buffer), strict=True)
    for ours, expected in zip(flat(other(*arguments)), flat(net(*arguments)), strict=True):
        assert_close(ours, expected)
    assert repr(other) == repr(net)
    again = make(kind, sharing, lazy=lazy)
    again.load_state_dict(net.state_dict())
    again.reset_parameters()  # a net that has only been loaded knows its fan-in
    assert all(p.abs().max() > 0 for p in again.parameters())
    assert set(net.state_dict()) == {name for name, _ in net.named_parameters()}


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda net: pickle.loads(pickle.dumps(net)),
}


@KIND
@EVERY
@pytest.mark.parametrize("how", COPIES)
def test_copies_are_equal_and_independent(kind: str, sharing: str, how: str) -> None:
    net, arguments = make(kind, sharing), inputs(kind, 5)
    other = COPIES[how](net)
    expected = [out.clone() for out in flat(net(*arguments))]
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(1)
    for ours, before in zip(flat(other(*arguments)), expected, strict=True):
        assert_close(ours, before)


@KIND
@EVERY
def test_dtype_and_device_moves(kind: str, sharing: str) -> None:
    """``.to`` moves everything the forward reads: parameters and agent-to-set maps."""
    net = make(kind, sharing)
    arguments = inputs(kind, 5)
    double = torch.utils._pytree.tree_map(lambda t: t.double(), arguments)
    expected = flat(net(*arguments))
    for ours, single in zip(flat(net.double()(*double)), expected, strict=True):
        assert ours.dtype == torch.float64
        assert_close(ours.float(), single)
    net.to("meta")
    assert {t.device.type for t in [*net.parameters(), *net.buffers()]} == {"meta"}
    out = flat(net(*torch.utils._pytree.tree_map(lambda t: t.to("meta"), double)))
    assert {t.device.type for t in out} == {"meta"}


@KIND
@EVERY
def test_an_optimiser_step_trains_every_parameter(kind: str, sharing: str) -> None:
    """Ordinary parameters: an optimiser made of ``net.parameters()`` moves each of them."""
    net, arguments = make(kind, sharing), inputs(kind, 5)
    assert all(isinstance(p, nn.Parameter) and p.is_leaf for p in net.parameters())
    before = [p.detach().clone() for p in net.parameters()]
    optimiser = torch.optim.SGD(net.parameters(), lr=1.0)
    sum(out.sin().sum() for out in flat(net(*arguments))).backward()
    optimiser.step()
    for old, new in zip(before, net.parameters(), strict=True):
        assert ((new - old).flatten(1).abs().amax(1) > 0).all()


class Operations(TorchDispatchMode):
    """Counts the operators that a call dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@KIND
@pytest.mark.parametrize("sharing", ["shared", "unshared"])
def test_no_loop_over_agents(kind: str, sharing: str) -> None:
    """The number of operators does not grow with the agents: products are batched."""
    counts = []
    for agents in (2, 20):
        share = SHARING[sharing]
        if kind in RECURRENT:
            cls = cl.MultiAgentGRU if kind == "gru" else cl.MultiAgentLSTM
            net, x = cls(4, 5, agents, share_params=share), torch.randn(6, agents, 4)
        elif kind == "mlp":
            net = cl.MultiAgentMLP(4, 2, agents, centralized=False, share_params=share, depth=2)
            x = torch.randn(6, agents, 4)
        else:
            net = cl.MultiAgentConvNet(agents, False, share, in_features=2, kernel_sizes=2)
            x = torch.randn(6, agents, 2, 16, 16)
        with Operations() as mode:
            net(x)
        counts.append(mode.count)
    assert counts[0] == counts[1]


@KIND
def test_extra_entries_stay_as_they_are(kind: str) -> None:
    """Case 73: masks and other entries beside the observation are neither read nor written."""
    net = make(kind, "unshared")
    x, *state = inputs(kind, 4)
    td = TensorDict({"agents": TensorDict({"observation": x}, [4, A])}, [4])
    td["agents", "action_mask"] = torch.rand(4, A, 3) > 0.5
    td["mask"] = torch.rand(4) > 0.5
    observation, out = ("agents", "observation"), ("agents", "out")
    if kind in RECURRENT:
        keys = [("agents", f"h{i}") for i in range(len(flat(state)))]
        for key, value in zip(keys, flat(state), strict=True):
            td[key] = value
        module = net.as_tensordict_module(observation, out, keys if kind == "lstm" else keys[0])
    else:
        module = TensorDictModule(net, in_keys=[observation], out_keys=[out])
    before = {key: td[key].clone() for key in td.keys(True, True)}
    module(td)
    assert set(td.keys(True, True)) - set(before) >= {out}
    for key, value in before.items():
        assert torch.equal(td[key], value)


def _group(kind: str) -> dict[str, Tensor]:
    return dict(make(kind, "unshared").named_parameters())


@KIND
def test_two_groups_share_no_memory(kind: str) -> None:
    """Case 101: nets built alike for two groups have their own parameters."""
    first, second = _group(kind), _group(kind)
    assert {p.data_ptr() for p in first.values()}.isdisjoint(p.data_ptr() for p in second.values())
    assert all(not torch.equal(first[name], second[name]) for name in first)


def test_distributed_data_parallel(tmp_path: Any) -> None:
    """Parameters are ordinary ones: DDP wraps the net, and its backward fills their gradients."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        for kind in KINDS:
            net, arguments = make(kind, "clustered"), inputs(kind, 5)
            wrapped = nn.parallel.DistributedDataParallel(copy.deepcopy(net))
            for module in (net, wrapped):
                sum(out.sin().sum() for out in flat(module(*arguments))).backward()
            for ours, expected in zip(wrapped.parameters(), net.parameters(), strict=True):
                assert_close(ours.grad, expected.grad)
    finally:
        dist.destroy_process_group()
