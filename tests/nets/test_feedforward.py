"""MLP and ConvNet: who sees what, where the agents lie, lazy sizes, norms and other options."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import composite_losses as cl
from composite_losses.errors import ConfigError, ShapeError
from tests.nets import loops
from tests.nets.builders import FEEDFORWARD, SETS, SHARING, A, C, F, by_agent, inputs, layers, make
from tests.tolerances import assert_close

KIND = pytest.mark.parametrize("kind", FEEDFORWARD)
EVERY = pytest.mark.parametrize("sharing", SHARING)
CENTRALISED = pytest.mark.parametrize("centralized", [False, True], ids=["own", "central"])


@KIND
@EVERY
@CENTRALISED
@pytest.mark.parametrize("agent_id", [False, True], ids=["", "id"])
@pytest.mark.parametrize("lazy", [False, True], ids=["sized", "lazy"])
def test_values_of_every_combination(
    kind: str, sharing: str, centralized: bool, agent_id: bool, lazy: bool
) -> None:
    """Each agent sees its own or all inputs, its one-hot id appended on request.

    Case 111: without an input size the first call, under ``no_grad``, creates parameters whose law
    is that of a net built with the size.
    """
    options = {"centralized": centralized, "agent_id": agent_id}
    net = make(kind, sharing, lazy=lazy, **options)
    (x,) = inputs(kind, 5)
    with torch.no_grad():
        net(x)
    for _ in range(2):
        (y,) = by_agent(kind, net, sharing, (x,), **options)
        assert_close(net(x), y.detach())
        sized = make(kind, sharing, **options)
        assert {n: p.shape for n, p in net.named_parameters()} == {
            n: p.shape for n, p in sized.named_parameters()
        }
        weight = layers(net)[0][0]
        fan_in = weight[0, 0].numel()
        assert 0.8 / fan_in**0.5 < weight.abs().max() <= 1 / fan_in**0.5
        assert repr(net) == repr(sized)
        net.reset_parameters()


@KIND
@EVERY
def test_lazy_net_is_copied_and_optimised(kind: str, sharing: str) -> None:
    """Case 111: deepcopy before the first call works; an optimiser made after it trains the net."""
    net = make(kind, sharing, lazy=True)
    twin = copy.deepcopy(net)
    with pytest.raises(ConfigError, match="input size"):
        net.agent(0)
    (x,) = inputs(kind, 5)
    for each in (net, twin):
        each(x)
    assert not torch.equal(layers(net)[0][0], layers(twin)[0][0])
    before = layers(net)[0][0].detach().clone()
    optimiser = torch.optim.SGD(net.parameters(), lr=1.0)
    net(x).sin().sum().backward()
    optimiser.step()
    assert not torch.equal(layers(net)[0][0], before)


@KIND
def test_centralised_nets_see_every_agent(kind: str) -> None:
    """Case 110: central and shared: one output for all; unshared: own ones, and others count."""
    (x,) = inputs(kind, 5)
    shared = make(kind, "shared", centralized=True)
    y = shared(x)
    assert (y == y[:, :1]).all()
    unshared = make(kind, "unshared", centralized=True)
    y = unshared(x)
    swapped = unshared(x[:, [0, 2, 1]])
    for i in range(A):
        assert not torch.allclose(y[:, i], y[:, i - 1])
        assert not torch.allclose(y[:, i], swapped[:, i])
    own = make(kind, "unshared")
    assert_close(own(x[:, [0, 2, 1]])[:, 0], own(x)[:, 0])


@KIND
@EVERY
@CENTRALISED
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("negative", [True, False])
def test_agent_dim_keeps_its_place(
    kind: str, sharing: str, centralized: bool, place: int, negative: bool
) -> None:
    """Agents along any dim of ``[*B, A, …]``, counted from either side; the output keeps them so.

    Counted from the end, the dim is that of the *input*: -5 of ``[B, A, T, C, H, W]`` is the place
    1, and there the agents of the flattened output lie.
    """
    (x,) = inputs(kind, 4, 2)
    net = make(kind, sharing, centralized=centralized)
    agent_dim = place - x.ndim if negative else place
    moved = make(kind, sharing, centralized=centralized, agent_dim=agent_dim)
    moved.load_state_dict(net.state_dict())
    assert_close(moved(x.movedim(2, place)), net(x).movedim(2, place).detach())


@KIND
def test_a_shared_net_takes_other_numbers_of_agents(kind: str) -> None:
    """Shared and decentralised, each agent is computed alone, so five serve as well as three."""
    net = make(kind, "shared")
    (x,) = inputs(kind, 2, 5)
    x = x.reshape(6, 5, *x.shape[3:])
    assert_close(net(x), loops.feedforward(layers(net), [0] * 5, x).detach())


@KIND
@pytest.mark.parametrize(
    ("sharing", "options"),
    [
        ("unshared", {}),
        ("clustered", {}),
        ("shared", {"centralized": True}),
        ("shared", {"agent_id": True}),
    ],
)
def test_another_number_of_agents_is_an_error(
    kind: str, sharing: str, options: dict[str, bool]
) -> None:
    """The message gives both numbers."""
    net = make(kind, sharing, **options)
    (x,) = inputs(kind, 5)
    with pytest.raises(ShapeError, match=r"=3 agents.*got 2"):
        net(x[:, :2])
    with pytest.raises(ShapeError, match="at least"):
        net(torch.randn(4))


@KIND
def test_several_inputs_are_concatenated(kind: str) -> None:
    """As in TorchRL, several inputs are joined along their last dim."""
    net = make(kind, "unshared")
    (x,) = inputs(kind, 5)
    parts = x.split([1, x.shape[-1] - 1], -1)
    assert_close(net(*parts), net(x).detach())


@KIND
def test_training_compiles_without_graph_breaks(kind: str) -> None:
    """Forward and backward of a central net with dropout (that drops nothing, to compare)."""
    net = make(kind, "clustered", centralized=True, dropout=1e-9)
    (x,) = inputs(kind, 5)
    compiled = torch.compile(net, fullgraph=True, backend="eager")
    gradients = [
        torch.autograd.grad(call(x).sin().sum(), list(net.parameters())) for call in (net, compiled)
    ]
    for eager, ours in zip(*gradients, strict=True):
        assert_close(ours, eager)


NORMS: dict[str, dict[str, tuple[Any, Any]]] = {
    "mlp": {
        "layer": (nn.LayerNorm, {"normalized_shape": 7}),
        "layer, no bias": (nn.LayerNorm, {"normalized_shape": 7, "bias": False, "eps": 0.1}),
        "layer, no weights": (nn.LayerNorm, {"normalized_shape": 7, "elementwise_affine": False}),
        "rms": (nn.RMSNorm, {"normalized_shape": 7}),
        "batch": (nn.BatchNorm1d, {"num_features": 7, "momentum": 0.3}),
        "batch, own statistics": (
            nn.BatchNorm1d,
            {"num_features": 7, "track_running_stats": False},
        ),
    },
    "conv": {
        "layer": (nn.LayerNorm, [{"normalized_shape": [3, 4, 4]}, {"normalized_shape": [4, 2, 2]}]),
        "layer, width": (nn.LayerNorm, [{"normalized_shape": 4}, {"normalized_shape": 2}]),
        "batch": (nn.BatchNorm2d, [{"num_features": 3}, {"num_features": 4}]),
        "group": (
            nn.GroupNorm,
            [{"num_groups": 3, "num_channels": 3}, {"num_groups": 2, "num_channels": 4}],
        ),
    },
}


def _together(norm: str, sharing: str, centralized: bool, training: bool) -> bool:
    """Whether statistics are taken over the rows of several agents of one set."""
    batch = norm.startswith("batch") and (training or "own" in norm)
    return batch and not centralized and sharing != "unshared"


NORM_ROWS = [
    (kind, norm, sharing, centralized, training)
    for kind in FEEDFORWARD
    for norm in NORMS[kind]
    for sharing in SHARING
    for centralized in (False, True)
    for training in (False, True)
    if not _together(norm, sharing, centralized, training)
]


@pytest.mark.parametrize(("kind", "norm", "sharing", "centralized", "training"), NORM_ROWS)
def test_norms_equal_those_of_one_agent(
    kind: str, norm: str, sharing: str, centralized: bool, training: bool
) -> None:
    """A norm acts within an agent, with its set's weights; statistics and their updates per set."""
    norm_class, norm_kwargs = NORMS[kind][norm]
    options = {"centralized": centralized, "norm_class": norm_class, "norm_kwargs": norm_kwargs}
    net = make(kind, sharing, **options).double().train(training)
    with torch.no_grad():
        for tensor in [*net.parameters(), *net.buffers()]:
            if tensor.is_floating_point():
                tensor.add_(torch.rand_like(tensor) * 0.5)
    (x,) = inputs(kind, 5, dtype=torch.float64)
    sets = SETS[sharing]
    views = [copy.deepcopy(net).agent(i) for i in range(A)]
    # a centralised set is computed once, so its statistics move once
    agents = [sets.index(sets[i]) if centralized else i for i in range(A)]
    alone = {i: views[i](x.flatten(1, 2) if centralized else x[:, i]) for i in set(agents)}
    assert_close(net(x), torch.stack([alone[i] for i in agents], 1).detach())
    for i in set(agents):
        expected = dict(views[i].named_buffers())
        for name, buffer in net.agent(i).named_buffers():
            assert_close(buffer, expected[name])


def test_shared_batch_norm_takes_its_statistics_from_all_agents() -> None:
    norm = {"norm_class": nn.BatchNorm1d, "norm_kwargs": {"num_features": 7}}
    net = make("mlp", "shared", **norm)
    (x,) = inputs("mlp", 5)
    view = copy.deepcopy(net).agent(0)
    assert_close(net(x), view(x.flatten(0, 1)).unflatten(0, (5, A)).detach())


@KIND
def test_clustered_batch_norm_cannot_update_its_statistics(kind: str) -> None:
    """In training mode it says so, rather than update a copy; in eval mode it works (see above)."""
    norm_class, norm_kwargs = NORMS[kind]["batch"]
    net = make(kind, "clustered", norm_class=norm_class, norm_kwargs=norm_kwargs)
    with pytest.raises(ConfigError, match="cannot be updated together"):
        net(*inputs(kind, 5))


@pytest.mark.parametrize("sharing", SHARING)
def test_norms_are_reset(sharing: str) -> None:
    norm_class, norm_kwargs = NORMS["mlp"]["batch"]
    net = make("mlp", sharing, norm_class=norm_class, norm_kwargs=norm_kwargs)
    fresh = {n: t.clone() for n, t in net.state_dict().items() if "weight" not in n or t.ndim < 3}
    with torch.no_grad():
        for tensor in net.state_dict().values():
            tensor.add_(1)
    net.reset_parameters()
    norms = [m for m in net.modules() if type(m).__name__ == "StackedNorm"]
    assert norms
    for name, module in net.named_modules():
        if module in norms:
            for key, tensor in module.state_dict().items():
                assert torch.equal(tensor, fresh[f"{name}.{key}"])


def _mlp(**options: Any) -> cl.MultiAgentMLP:
    return cl.MultiAgentMLP(F, 2, A, **{"centralized": False, "share_params": False, **options})


def _conv(**options: Any) -> cl.MultiAgentConvNet:
    return cl.MultiAgentConvNet(A, False, False, in_features=C, **options)


def _structure(net: Any) -> list[str]:
    return [type(m).__name__ for m in net.blocks]


def test_options_of_the_perceptron() -> None:
    """TorchRL's arguments mean what they mean there."""
    assert _structure(_mlp()) == ["StackedLinear"]
    assert len(_structure(_mlp(depth=2))) == 5
    net = _mlp(
        num_cells=[6, 5],
        activation_class=nn.LeakyReLU,
        activation_kwargs=[{"negative_slope": 0.1}, {"negative_slope": 0.2}, {}],
        activate_last_layer=True,
        bias_last_layer=False,
        dropout=0.25,
        norm_class=nn.LayerNorm,
        norm_kwargs=[{"normalized_shape": 6}, {"normalized_shape": 5}, {"normalized_shape": 2}],
    )
    stage = ["StackedLinear", "AgentDropout", "StackedNorm", "LeakyReLU"]
    assert _structure(net) == stage * 3
    assert [m.negative_slope for m in net.blocks if isinstance(m, nn.LeakyReLU)] == [0.1, 0.2, 0.01]
    assert [(w.shape[1], b is not None) for w, b in layers(net)] == [(6, 1), (5, 1), (2, 0)]


def test_options_of_the_convnet() -> None:
    assert _structure(_conv()) == ["StackedConv2d", "ELU"] * 3
    net = _conv(
        num_cells=[4, 6],
        kernel_sizes=[(3, 2), 2],
        strides=[1, (1, 2)],
        paddings=1,
        activation_class=nn.ReLU,
        norm_class=nn.BatchNorm2d,
        norm_kwargs=[{"num_features": 4}, {"num_features": 6}],
        dropout=0.5,
        bias_last_layer=False,
    )
    assert _structure(net) == ["StackedConv2d", "ReLU", "StackedNorm", "AgentDropout"] * 2
    assert [tuple(w.shape[1:]) for w, _ in layers(net)] == [(4, 2, 3, 2), (6, 4, 2, 2)]
    assert layers(net)[1][1] is None
    assert net(torch.randn(5, A, C, 7, 7)).shape == (5, A, 6 * 8 * 5)
    assert len(layers(_conv(depth=2, num_cells=4, kernel_sizes=2, strides=1))) == 2


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: cl.MultiAgentMLP(F, 2, A, share_params=True), TypeError, "centralized"),
        (lambda: cl.MultiAgentMLP(F, 2, A, centralized=True), TypeError, "share_params"),
        (lambda: _mlp(share_params=[0, 1]), ConfigError, "3, found 2"),
        (lambda: _mlp(share_params=[0, 2, 0]), ConfigError, r"without a gap, found \[0, 2, 0\]"),
        (lambda: _mlp(dropout_randomness="error"), ConfigError, "'error'"),
        (lambda: _mlp(dropout=1.5, depth=1), ConfigError, r"\[0, 1\], found 1.5"),
        (lambda: _mlp(depth=1, num_cells=[3, 3]), ConfigError, "expected 2.*found 1"),
        (lambda: _mlp(depth=2, activation_kwargs=[{}]), ConfigError, "activation_kwargs"),
        (lambda: _mlp(depth=1, activation_class=nn.PReLU), ConfigError, "PReLU has parameters"),
        (
            lambda: _mlp(depth=1, norm_class=nn.InstanceNorm1d, norm_kwargs={"num_features": 32}),
            ConfigError,
            "InstanceNorm1d cannot be stacked",
        ),
        (
            lambda: _mlp(
                depth=1,
                norm_class=nn.BatchNorm1d,
                norm_kwargs={"num_features": 32, "momentum": None},
            ),
            ConfigError,
            "momentum",
        ),
        (lambda: _conv(num_cells=[3], strides=[1, 2]), ConfigError, "one length"),
        (
            lambda: cl.MultiAgentMLP(F, 2, 0, centralized=True, share_params=True),
            ConfigError,
            "n_agents",
        ),
    ],
)
def test_options_that_cannot_be(build: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build()


def test_both_spellings_of_centralised() -> None:
    assert cl.MultiAgentMLP(F, 2, A, centralised=True, share_params=True).centralized
    assert not cl.MultiAgentConvNet(A, centralised=False, share_params=True).centralized


@pytest.mark.parametrize(
    "options",
    [
        {"activation_class": nn.PReLU},
        {"norm_class": nn.LayerNorm, "norm_kwargs": {"normalized_shape": 32}},
    ],
    ids=["activation", "norm"],
)
def test_parameters_beside_the_layers_are_trained_and_viewed(options: dict[str, Any]) -> None:
    """A shared activation's or norm's weights learn in the net; the view only shares memory."""
    net = _mlp(share_params=True, depth=1, **options)
    view = net.agent(0)
    view(torch.randn(5, F)).sin().sum().backward()
    assert all(p.grad is None for p in net.parameters())
    net(torch.randn(5, A, F)).sin().sum().backward()
    assert all((p.grad != 0).any() for p in net.parameters())
    assert [p.data_ptr() for p in view.parameters()] == [p.data_ptr() for p in net.parameters()]
