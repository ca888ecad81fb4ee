"""Weights from and to TorchRL's nets: equal outputs both ways."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrl.modules import MLP, MultiAgentConvNet, MultiAgentMLP, NoisyLinear

import composite_losses as cl
from composite_losses.errors import ConfigError
from composite_losses.nets import from_torchrl, to_torchrl
from tests.nets.builders import FEEDFORWARD, SHARING, A, F, inputs, make

SHARED = pytest.mark.parametrize("share", [True, False], ids=["shared", "unshared"])
CENTRALISED = pytest.mark.parametrize("centralized", [False, True], ids=["own", "central"])

LAYER = nn.LayerNorm
MLPS: dict[str, dict[str, Any]] = {
    "plain": {"depth": 2, "num_cells": 7},
    "linear": {"depth": 0},
    "relu, sizes": {"num_cells": [6, 5], "activation_class": nn.ReLU, "bias_last_layer": False},
    "activation arguments": {
        "num_cells": [6, 5],
        "activation_class": nn.LeakyReLU,
        "activation_kwargs": [{"negative_slope": 0.5}, {"negative_slope": 2.0}],
    },
    "norms of two sizes": {
        "num_cells": [6, 5],
        "norm_class": LAYER,
        "norm_kwargs": [{"normalized_shape": 6, "eps": 0.1}, {"normalized_shape": 5}],
    },
    "norm without weights": {
        "num_cells": [6],
        "norm_class": LAYER,
        "norm_kwargs": {"normalized_shape": 6, "elementwise_affine": False},
    },
    "norm without bias": {
        "num_cells": [6],
        "norm_class": LAYER,
        "norm_kwargs": {"normalized_shape": 6, "bias": False},
    },
    "dropout, activated": {"num_cells": [6], "dropout": 0.5, "activate_last_layer": True},
}
CONVS: dict[str, dict[str, Any]] = {
    "plain": {"num_cells": [3, 4], "kernel_sizes": 3, "strides": 1},
    "pairs": {
        "num_cells": [3, 4],
        "kernel_sizes": [(3, 2), 2],
        "strides": [(2, 1), 1],
        "paddings": [1, (0, 1)],
        "activation_class": nn.ELU,
        "activation_kwargs": [{"alpha": 0.3}, {"alpha": 2.0}],
    },
    "norm": {
        "num_cells": [4, 6],
        "kernel_sizes": 3,
        "strides": 1,
        "norm_class": nn.GroupNorm,
        "norm_kwargs": [
            {"num_groups": 2, "num_channels": 4, "eps": 0.1},
            {"num_groups": 3, "num_channels": 6},
        ],
    },
}
OPTIONS = [("mlp", name) for name in MLPS] + [("conv", name) for name in CONVS]


def theirs(kind: str, share: bool, centralized: bool, *, agents: int = A, **options: Any) -> Any:
    options = {"centralized": centralized, "share_params": share, **options}
    if kind == "mlp":
        return MultiAgentMLP(F, 2, agents, **options)
    return MultiAgentConvNet(agents, in_features=2, **options)


def scattered(net: Any) -> Any:
    """The net with every parameter moved, so that none is equal by initialisation."""
    tensors = net.params.values(True, True) if hasattr(net, "params") else net.parameters()
    with torch.no_grad():
        for tensor in tensors:
            tensor.add_(torch.rand_like(tensor) * 0.3)
    return net


def same(net: nn.Module, other: nn.Module, x: Tensor) -> None:
    torch.testing.assert_close(net.eval()(x), other.eval()(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kind", "name"), OPTIONS)
@SHARED
@CENTRALISED
def test_from_torchrl_and_back(kind: str, name: str, share: bool, centralized: bool) -> None:
    """Outputs agree to 1e-5 in both directions, whatever the options; modes are kept."""
    options = (MLPS if kind == "mlp" else CONVS)[name]
    given = scattered(theirs(kind, share, centralized, **options))
    (x,) = inputs(kind, 5)
    net = from_torchrl(given)
    assert type(net) is (cl.MultiAgentMLP if kind == "mlp" else cl.MultiAgentConvNet)
    assert net.training
    same(net, given, x)
    back = to_torchrl(scattered(net))
    assert type(back) is type(given)
    same(back, net, x)
    assert {k: v.shape for k, v in back.params.items(True, True)} == {
        k: v.shape for k, v in given.params.items(True, True)
    }
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(1)
    assert not torch.allclose(back(x), net(x), atol=1e-3)  # weights are copied, not shared


@pytest.mark.parametrize("kind", FEEDFORWARD)
@CENTRALISED
def test_a_clustered_net_becomes_an_unshared_one(kind: str, centralized: bool) -> None:
    net = make(kind, "clustered", centralized=centralized)
    back = to_torchrl(net)
    assert back.share_params is False
    same(back, net, inputs(kind, 5)[0])


@pytest.mark.parametrize("kind", FEEDFORWARD)
@SHARED
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_agent_lazy_size_and_dtype(kind: str, share: bool, dtype: torch.dtype) -> None:
    """One agent is not a special case; a lazy TorchRL net converts after its first call."""
    options = {"num_cells": [6], "norm_class": nn.LayerNorm}
    (x,) = inputs(kind, 5, dtype=dtype)
    x = x[:, :1]
    if kind == "mlp":
        options["norm_kwargs"] = {"normalized_shape": 6}
        given: Any = MultiAgentMLP(None, 2, 1, centralized=False, share_params=share, **options)
    else:
        options["norm_kwargs"] = {"normalized_shape": 1}
        given = MultiAgentConvNet(1, False, share, **options)
    given = given.to(dtype)
    with pytest.raises(ConfigError, match="call it once"):
        from_torchrl(given)
    given(x)
    net = from_torchrl(given)
    assert {p.dtype for p in net.parameters()} == {dtype}
    same(net, given, x)
    same(to_torchrl(net), given, x)


@SHARED
def test_batch_statistics_are_converted(share: bool) -> None:
    options = {"num_cells": [6], "norm_class": nn.BatchNorm1d, "norm_kwargs": {"num_features": 6}}
    given = theirs("mlp", False, True, **options)
    for _ in range(3):
        given(torch.randn(20, A, F))
    net = from_torchrl(given)
    x = torch.randn(5, A, F)
    same(net, given, x)
    same(to_torchrl(net), given, x)


@pytest.mark.parametrize("sharing", SHARING)
def test_a_convnet_without_its_last_bias(sharing: str) -> None:
    """TorchRL's ConvNet always has one: it is zero."""
    net = make("conv", sharing, bias_last_layer=False)
    same(to_torchrl(net), net, inputs("conv", 5)[0])


def test_dropout_randomness_is_kept() -> None:
    net = make("mlp", "unshared", dropout=0.5, dropout_randomness="same")
    given = to_torchrl(net)
    assert given.vmap_randomness == "same"
    assert from_torchrl(given).dropout_randomness == "same"


@pytest.mark.parametrize(
    ("convert", "net", "message"),
    [
        (from_torchrl, lambda: nn.Linear(2, 2), "no counterpart for Linear"),
        (from_torchrl, lambda: MLP(2, 2), "no counterpart for MLP"),
        (
            from_torchrl,
            lambda: theirs("mlp", True, False, depth=1, layer_class=NoisyLinear),
            "no counterpart for the layer",
        ),
        (
            from_torchrl,
            lambda: theirs("mlp", False, False, depth=1, activation_class=nn.PReLU),
            "without a counterpart",
        ),
        (
            from_torchrl,
            lambda: theirs("mlp", True, False, depth=1, single_bias_last_layer=True),
            "no counterpart for the layer",
        ),
        (
            from_torchrl,
            lambda: theirs("conv", True, False, aggregator_class=nn.Flatten, aggregator_kwargs={}),
            "no counterpart for the layer Flatten",
        ),
        (to_torchrl, lambda: make("mlp", "shared", agent_id=True), "agent_id"),
        (to_torchrl, lambda: make("conv", "shared", agent_dim=1), "agent_dim"),
        (to_torchrl, lambda: make("conv", "shared", dropout=0.5), "dropout"),
        (to_torchrl, lambda: make("mlp", "shared", lazy=True), "input size"),
    ],
)
def test_what_has_no_counterpart_is_an_error(convert: Any, net: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        convert(net())
