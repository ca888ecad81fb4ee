"""TorchRL's further keywords: our nets can stand where a client builds TorchRL's."""

from typing import Any

import pytest
import torch
import torchrl.modules
from torch import nn
from torchrl.modules.models.utils import SquashDims

import composite_losses as cl
from composite_losses.errors import ConfigError, ShapeError
from composite_losses.nets import to_torchrl
from tests.nets.builders import SHARING, A, C, F, inputs, make
from tests.tolerances import assert_close

EVERY = pytest.mark.parametrize("sharing", SHARING)
CENTRALISED = pytest.mark.parametrize("centralized", [False, True], ids=["own", "central"])

# as a configuration file gives them: every option named, None where there is nothing to say
MLP = {
    "num_cells": [7, 6],
    "layer_class": nn.Linear,
    "activation_class": nn.ReLU,
    "activation_kwargs": None,
    "norm_class": None,
    "norm_kwargs": None,
}
CNN = {
    "num_cells": [3, 4],
    "kernel_sizes": [3, 2],
    "strides": 1,
    "paddings": [1, 0],
    "activation_class": nn.Tanh,
    "activation_kwargs": None,
    "norm_class": None,
    "norm_kwargs": None,
}


def _sizes(net: nn.Module) -> list[tuple[int, ...]]:
    """Shapes of the parameters, without a set dim of size 1."""
    return sorted(p.shape[1:] if p.shape[0] == 1 else p.shape for p in net.parameters())


@pytest.mark.parametrize("share_params", [True, False])
@pytest.mark.parametrize("centralised", [True, False])
def test_a_client_builds_ours_as_it_builds_torchrls(share_params: bool, centralised: bool) -> None:
    """The calls of a benchmark's CNN model: images to features, whose number it works out itself.

    It reads layer sizes off ``_empty_net``, and joins the features with others for the MLP.
    """
    options = {"n_agents": A, "centralised": centralised, "share_params": share_params}
    (images,) = inputs("conv", 5)
    found = []
    for library in (torchrl.modules, cl):
        cnn = library.MultiAgentConvNet(in_features=C, device="cpu", **options, **CNN)
        single = cnn._empty_net
        width, height = images.shape[-2:]
        sizes = zip(single.kernel_sizes, single.paddings, single.strides, strict=True)
        for kernel, padding, stride in sizes:
            width, height = ((n + 2 * padding - kernel) // stride + 1 for n in (width, height))
        features = single.out_features * width * height
        mlp = library.MultiAgentMLP(
            n_agent_inputs=features, n_agent_outputs=2, device="cpu", **options, **MLP
        )
        assert mlp(cnn(images)).shape == (5, A, 2)
        found.append((features, _sizes(cnn), _sizes(mlp)))
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["mlp", "conv"])
def test_vmap_randomness_is_dropout_randomness(kind: str) -> None:
    """TorchRL's word for it; ``"error"``, which has nothing to raise here, leaves ours alone."""
    for word in ("different", "same"):
        assert make(kind, "unshared", vmap_randomness=word).dropout_randomness == word
        net = make(kind, "unshared", vmap_randomness="error", dropout_randomness=word)
        assert net.dropout_randomness == word
    assert make(kind, "unshared").dropout_randomness == "different"
    with pytest.raises(ConfigError, match=r"vmap_randomness.*'none'"):
        make(kind, "unshared", vmap_randomness="none")


@pytest.mark.parametrize("kind", ["mlp", "conv"])
def test_use_td_params_changes_nothing(kind: str) -> None:
    names = [
        list(make(kind, "unshared", use_td_params=flag).state_dict()) for flag in (True, False)
    ]
    assert names[0] == names[1]


@EVERY
@pytest.mark.parametrize("lazy", [False, True], ids=["sized", "lazy"])
def test_layer_kwargs(sharing: str, lazy: bool) -> None:
    """A bias for no layer or for some, and a dtype; empty and None change nothing."""
    x = torch.randn(5, A, F, dtype=torch.float64)
    net = make("mlp", sharing, lazy=lazy, layer_kwargs={"bias": False, "dtype": torch.float64})
    assert net(x).dtype == torch.float64
    assert (net(0 * x) == 0).all()
    some = [{"bias": False}, {}, {"bias": True}]
    net = make("mlp", sharing, lazy=lazy, layer_kwargs=some, bias_last_layer=False).double()
    net(x)
    assert [name for name, _ in net.named_parameters() if name.endswith("bias")] == [
        "blocks.2.bias",
        "blocks.4.bias",
    ]
    plain = list(make("mlp", sharing).state_dict())
    for nothing in ({}, None, [{}, {}, {}]):
        assert list(make("mlp", sharing, layer_kwargs=nothing).state_dict()) == plain


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("mlp", {"layer_class": nn.Bilinear}, r"expected nn\.Linear, found.*Bilinear"),
        ("mlp", {"layer_kwargs": {"std_init": 0.1}}, r"'bias' and 'dtype'.*std_init"),
        ("mlp", {"layer_kwargs": [{}]}, "layer_kwargs: expected one dict or 3, found 1"),
        (
            "conv",
            {"aggregator_class": nn.PReLU},
            "PReLU has parameters",
        ),
    ],
)
def test_what_is_not_supported_is_named(kind: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(kind, "unshared", **options)


@EVERY
@CENTRALISED
def test_images_kept_and_images_averaged(sharing: str, centralized: bool) -> None:
    """Without an aggregator channels and space stay; a pooling ends in one number per channel."""
    (x,) = inputs("conv", 4, 3)
    options: dict[str, Any] = {"centralized": centralized}
    flat = make("conv", sharing, **options)
    pooled = {"aggregator_class": nn.AdaptiveAvgPool2d, "aggregator_kwargs": {"output_size": 1}}
    for extra, expected in (
        ({"aggregator_class": None}, flat(x).unflatten(-1, (4, 2, 2))),
        ({"aggregator_class": SquashDims, "aggregator_kwargs": {"ndims_in": 3}}, flat(x)),
        ({"aggregator_class": nn.Flatten, "aggregator_kwargs": {}}, flat(x)),
        (pooled, flat(x).unflatten(-1, (4, 4)).mean(-1)[..., None, None]),
        ({**pooled, "squeeze_output": True}, flat(x).unflatten(-1, (4, 4)).mean(-1)),
    ):
        net = make("conv", sharing, **options, **extra)
        net.load_state_dict(flat.state_dict())
        assert_close(net(x), expected.detach())
        moved = make("conv", sharing, agent_dim=0, **options, **extra)
        moved.load_state_dict(flat.state_dict())
        assert_close(moved(x.movedim(2, 0)), expected.detach().movedim(2, 0))
        seen = x.flatten(2, 3) if centralized else x[:, :, 1]
        single = net.agent(1)(seen.flatten(0, 1)).unflatten(0, (4, 3))
        assert_close(single, expected[:, :, 1].detach())


def test_more_than_one_pixel_is_not_squeezed() -> None:
    net = make("conv", "shared", aggregator_class=None, squeeze_output=True)
    with pytest.raises(ShapeError, match=r"squeeze_output.*found \[2, 2\]"):
        net(*inputs("conv", 5))


def test_a_shared_aggregator_learns_and_starts_anew() -> None:
    """Its weights are the net's: trained, saved, and drawn again by ``reset_parameters``."""
    kwargs = {"in_features": 2, "out_features": 3}
    net = make("conv", "shared", aggregator_class=nn.Linear, aggregator_kwargs=kwargs)
    out = net(*inputs("conv", 5))
    assert out.shape == (5, A, 4, 2, 3)
    out.sin().sum().backward()
    assert (net.aggregator.weight.grad != 0).any()
    before = net.state_dict()["aggregator.weight"].clone()
    net.reset_parameters()
    assert (net.aggregator.weight != before).all()


def test_another_end_has_no_counterpart_in_torchrl() -> None:
    assert to_torchrl(make("conv", "shared")) is not None
    with pytest.raises(ConfigError, match="flattened at the end"):
        to_torchrl(make("conv", "shared", aggregator_class=None))
