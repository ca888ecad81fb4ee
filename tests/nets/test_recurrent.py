"""GRU and LSTM: steps, sequences, resets, and TorchRL's recurrent-mode protocol."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torchrl.modules import set_recurrent_mode
from torchrl.objectives.value import GAE

import composite_losses as cl
from composite_losses.errors import ConfigError, ShapeError
from tests.nets import loops
from tests.nets.builders import CELLS, RECURRENT, SETS, SHARING, A, F, H, flat, inputs, make
from tests.tolerances import assert_close

B, T = 3, 6
KIND = pytest.mark.parametrize("kind", RECURRENT)
EVERY = pytest.mark.parametrize("sharing", SHARING)


def _sequence(kind: str) -> tuple[Tensor, Any]:
    """Inputs ``[B, T, A, F]`` and a state to start from."""
    _, state = inputs(kind, B)
    return torch.randn(B, T, A, F), state


def _expected(
    kind: str, net: Any, sharing: str, x: Tensor, state: Any, is_init: Tensor | None = None
) -> tuple[Tensor, list[Tensor]]:
    hidden = None if state is None else flat(state)
    parameters = dict(net.named_parameters())
    return loops.recurrent(CELLS[kind], parameters, SETS[sharing], x, hidden, is_init)


@KIND
@EVERY
@pytest.mark.parametrize("start", ["zeros", "given"])
@pytest.mark.parametrize("resets", ["none", "root", "group"])
def test_sequence_equals_torch_modules(kind: str, sharing: str, start: str, resets: str) -> None:
    """Cases 116, 118: ``is_init`` [B, T, 1] or [B, T, A, 1] zeroes the state *before* its step.

    The oracle cuts the sequence there and runs the pieces apart; a reset at t=0 drops the given
    state, two in a row leave a piece of one step, and one at the last step counts, too.
    """
    net = make(kind, sharing)
    x, state = _sequence(kind)
    state = state if start == "given" else None
    flags, wide = None, None
    if resets == "root":
        flags = torch.zeros(B, T, 1, dtype=torch.bool)
        flags[0, [0, 2]] = flags[1, [3, 4]] = flags[2, T - 1] = True
        wide = flags.expand(B, T, A)
    elif resets == "group":
        flags = torch.rand(B, T, A, 1) < 0.3
        wide = flags.squeeze(-1)
    y, final = net.sequence(x, state, flags)
    expected, finals = _expected(kind, net, sharing, x, state, wide)
    assert_close(y, expected.detach())
    assert len(flat(final)) == len(finals)
    for ours, tensor in zip(flat(final), finals, strict=True):
        assert_close(ours, tensor.detach())


@KIND
@EVERY
@pytest.mark.parametrize("group", [False, True], ids=["root", "group"])
def test_steps_equal_the_sequence(kind: str, sharing: str, group: bool) -> None:
    """Case 116: T chained steps, each with its own ``is_init``, give what one sequence gives."""
    net = make(kind, sharing)
    x, state = _sequence(kind)
    flags = torch.rand(B, T, *([A] if group else []), 1) < 0.4
    y, final = net.sequence(x, state, flags)
    for t in range(T):
        out, state = net(x[:, t], state, flags[:, t])
        assert_close(out, y[:, t].detach())
    for ours, expected in zip(flat(state), flat(final), strict=True):
        assert_close(ours, expected.detach())


@KIND
@EVERY
def test_two_episodes_back_to_back(kind: str, sharing: str) -> None:
    """Case 118: no state leaks over an ``is_init`` step, in values or gradients."""
    net = make(kind, sharing)
    x, _ = _sequence(kind)
    x.requires_grad_(True)
    flags = torch.zeros(B, T, 1, dtype=torch.bool)
    flags[:, 0] = flags[:, 4] = True
    y, _ = net.sequence(x, None, flags)
    assert_close(y[:, :4], net.sequence(x[:, :4])[0].detach())
    assert_close(y[:, 4:], net.sequence(x[:, 4:])[0].detach())
    (grad,) = torch.autograd.grad(y[:, 4:].sum(), x)
    assert (grad[:, :4] == 0).all()
    assert (grad[:, 4:] != 0).all()


@KIND
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("batch", [(), (1,), (2, 1)])
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("layers", [1, 3])
def test_corners(kind: str, share: bool, batch: tuple[int, ...], steps: int, layers: int) -> None:
    """Case 119: one agent, one row, one step, no batch dim: shapes stay, values equal torch's."""
    cls = cl.MultiAgentGRU if kind == "gru" else cl.MultiAgentLSTM
    net = cls(F, H, 1, share_params=share, num_layers=layers)
    x = torch.randn(*batch, steps, 1, F)
    y, final = net.sequence(x)
    assert y.shape == (*batch, steps, 1, H)
    assert all(s.shape == (*batch, 1, layers, H) for s in flat(final))
    assert isinstance(final, Tensor) if kind == "gru" else len(final) == 2
    expected, _ = net.agent(0)(x.reshape(-1, steps, F))
    assert_close(y, expected.reshape(y.shape).detach())
    out, state = net(x[..., 0, :, :])
    assert_close(out, y[..., 0, :, :].detach())
    assert all(s.shape == (*batch, 1, layers, H) for s in flat(state))


@KIND
def test_shared_nets_take_other_numbers_of_agents(kind: str) -> None:
    net = make(kind, "shared")
    x = torch.randn(B, T, 5, F)
    y, _ = net.sequence(x)
    assert_close(y[:, :, :A], net.sequence(x[:, :, :A])[0].detach())


@KIND
def test_shapes_that_do_not_fit(kind: str) -> None:
    """Nothing is broadcast silently: the message gives what was expected and what was found."""
    net = make(kind, "unshared")
    x, state = inputs(kind, B)
    double = [t[:1] for t in flat(state)]
    cases: list[tuple[tuple[Any, ...], str]] = [
        ((x[:, :2],), r"expected 3 agents with 4 features, found 2 with 4"),
        ((x[..., :3],), r"expected 3 agents with 4 features, found 3 with 3"),
        ((x, double[0] if kind == "gru" else tuple(double)), r"\[3, 3, 2, 5\].*\[1, 3, 2, 5\]"),
        ((x, (*flat(state), flat(state)[0])), "hidden tensor"),
        ((x, None, torch.zeros(B, dtype=torch.bool)), r"is_init: expected shape \[3, 1\] or"),
        ((x, None, torch.zeros(1, 1, dtype=torch.bool)), r"found \[1, 1\]"),
    ]
    for arguments, message in cases:
        with pytest.raises(ShapeError, match=message):
            net(*arguments)
    with pytest.raises(ShapeError, match=r"\[\*B, T, A, F\]"):
        net.sequence(x[0])


def _keys(kind: str, group: bool) -> Any:
    """The hidden keys of a kind, at the root or inside the group."""
    names = ["h"] if kind == "gru" else ["h", "c"]
    keys = [("agents", name) if group else name for name in names]
    return keys if kind == "lstm" else keys[0]


@KIND
@pytest.mark.parametrize("group", [False, True], ids=["root", "group"])
def test_tensordict_module_steps_and_replays(kind: str, group: bool) -> None:
    """Case 116: outside recurrent mode a step writes the next state; inside, the whole sequence.

    Stored data replayed from its first stored state give the outputs that the steps gave, with
    ``is_init`` at the root or in the group, and the last step's next state is the final state.
    """
    net = make(kind, "unshared")
    is_init = ("agents", "is_init") if group else "is_init"
    module = net.as_tensordict_module("x", "y", _keys(kind, group), is_init)
    hidden = [("agents", n) if group else n for n in (["h"] if kind == "gru" else ["h", "c"])]
    assert module.in_keys == ["x", *hidden, is_init]
    next_keys = [("next", "agents", k[-1]) if group else ("next", k) for k in hidden]
    assert module.out_keys == ["y", *next_keys]
    x, state = _sequence(kind)
    flags = torch.rand(B, T, *([A] if group else []), 1) < 0.4
    steps = []
    current = flat(state)
    for t in range(T):
        td = TensorDict({"x": x[:, t], is_init: flags[:, t]}, [B])
        for key, value in zip(hidden, current, strict=True):
            td[key] = value
        module(td)
        current = [td[key] for key in next_keys]
        steps.append(td)
    data = torch.stack(steps, 1)
    stored = data.exclude("y", "next")
    with set_recurrent_mode(True):
        replayed = module(stored.clone())
    assert_close(replayed["y"], data["y"].detach())
    for key in next_keys:
        assert_close(replayed[key][:, -1], data[key][:, -1].detach())
    for key in (*hidden, "x", is_init):
        assert torch.equal(replayed[key], stored[key])


@KIND
def test_a_state_that_is_not_stored_starts_at_zero(kind: str) -> None:
    net = make(kind, "shared")
    module = net.as_tensordict_module("x", "y", _keys(kind, False))
    td = TensorDict({"x": torch.randn(B, A, F)}, [B])
    assert_close(module(td)["y"], net(td["x"])[0].detach())


@KIND
def test_a_wrong_number_of_hidden_keys(kind: str) -> None:
    with pytest.raises(ConfigError, match="hidden_key: expected"):
        make(kind, "shared").as_tensordict_module("x", "y", ["a", "b", "c"])


@KIND
def test_a_sequence_compiles_without_graph_breaks(kind: str) -> None:
    """Resets included, in recurrent mode as the losses call it."""
    net = make(kind, "unshared")
    module = net.as_tensordict_module("x", "y", _keys(kind, False))
    x, state = _sequence(kind)
    td = TensorDict({"x": x, "is_init": torch.rand(B, T, 1) < 0.3}, [B, T])
    for key, value in zip("hc", flat(state), strict=False):
        td[key] = value.unsqueeze(1).expand(B, T, A, 2, H)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    with set_recurrent_mode(True):
        assert_close(compiled(td.clone())["y"], module(td.clone())["y"].detach())


@KIND
@pytest.mark.parametrize("sharing", ["shared", "unshared"])
@pytest.mark.parametrize("mode", [True, False], ids=["recurrent", "steps"])
def test_recurrent_critic_in_gae(kind: str, sharing: str, mode: bool) -> None:
    """Case 102: GAE's default call (vmapped over the critic) and its shifted one agree.

    In recurrent mode, as losses call it, and outside of it, where every step starts from its
    stored state. GAE marks the next data wherever the root is marked (here at the first step and,
    after an end, in mid-sequence): they start from the state stored there, not from zero.
    """
    net = make(kind, sharing)
    critic = TensorDictSequential(
        net.as_tensordict_module("x", "features", _keys(kind, False)),
        TensorDictModule(
            nn.Sequential(nn.Flatten(-2), nn.Linear(A * H, 1)), ["features"], ["state_value"]
        ),
    )
    x, following = torch.randn(2, B, T, A, F)
    following[:, :-1] = torch.where(torch.arange(1, T)[:, None, None] == 3, 0, x[:, 1:])
    false = torch.zeros(B, T, 1, dtype=torch.bool)
    end, begin = false.clone(), false.clone()
    end[:, 2] = begin[:, [0, 3]] = True
    td = TensorDict({"x": x, "is_init": begin}, [B, T], names=[None, "time"])
    td["next"] = {"x": following, "is_init": false, "done": end, "terminated": end}
    td["next", "reward"] = torch.randn(B, T, 1)
    names = ["h"] if kind == "gru" else ["h", "c"]
    stored = torch.zeros(2, len(names), B, T, A, 2, H)  # before and after each step
    for t in range(T):
        if t not in (0, 3):
            stored[0, :, :, t] = stored[1, :, :, t - 1]
        before = tuple(stored[0, :, :, t])
        _, state = net(x[:, t], before[0] if kind == "gru" else before)
        stored[1, :, :, t] = torch.stack(flat(state)).detach()
    for i, name in enumerate(names):
        td[name], td["next", name] = stored[:, i]
    found = []
    for shifted in (False, True):
        estimator = GAE(gamma=0.9, lmbda=0.8, value_network=critic, shifted=shifted)
        with set_recurrent_mode(mode):
            found.append(estimator(td.clone())["advantage"])
    assert found[0].shape == (B, T, 1)
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
    deltas = found[0][:, -1] - td["next", "reward"][:, -1]
    assert deltas.std() > 1e-3  # the critic's values matter
