"""StackedLinear and StackedConv2d: M layers of torch.nn in one product, equal in value and law."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from composite_losses.nets import StackedConv2d, StackedLinear
from tests.tolerances import assert_close


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("index", [None, [2, 0, 0, 1]])
def test_linear_equals_one_linear_per_set(bias: bool, index: list[int] | None) -> None:
    """Row block k is multiplied by the weight of its set, as ``F.linear`` does it."""
    layer = StackedLinear(3, 4, 5, bias)
    sets = index or [0, 1, 2]
    x = torch.randn(len(sets), 6, 4)
    expected = [
        F.linear(row, layer.weight[s], layer.bias[s] if layer.bias is not None else None)
        for row, s in zip(x, sets, strict=True)
    ]
    out = layer(x, None if index is None else torch.tensor(index))
    assert_close(out, torch.stack(expected))
    assert (layer.bias is None) is (not bias)


@pytest.mark.parametrize("shape", [(4,), (6, 4), (2, 6, 4), (2, 3, 6, 4)])
def test_linear_with_one_set_takes_any_layout(shape: tuple[int, ...]) -> None:
    layer = StackedLinear(1, 4, 5)
    x = torch.randn(shape)
    assert_close(layer(x), F.linear(x, layer.weight[0], layer.bias[0]))


@pytest.mark.parametrize("index", [None, [2, 0, 0, 1]])
def test_convolution_equals_one_conv2d_per_set(index: list[int] | None) -> None:
    """Channel block k is convolved with its set's kernels; stride and padding may be pairs."""
    layer = StackedConv2d(3, 2, 4, (3, 2), stride=(1, 2), padding=1)
    sets = index or [0, 1, 2]
    x = torch.randn(5, len(sets), 2, 6, 7)
    expected = [
        F.conv2d(x[:, k], layer.weight[s], layer.bias[s], (1, 2), 1) for k, s in enumerate(sets)
    ]
    out = layer(x.flatten(1, 2), None if index is None else torch.tensor(index))
    assert_close(out, torch.cat(expected, 1))


def test_fan_out_equals_the_same_input_for_every_set() -> None:
    """One product for all sets that read one input equals the batched one on its copies."""
    linear, conv = StackedLinear(3, 4, 5), StackedConv2d(3, 2, 4, 3)
    x, images = torch.randn(6, 4), torch.randn(5, 2, 6, 6)
    assert_close(linear.fan_out(x), linear(x.expand(3, 6, 4)))
    assert_close(conv.fan_out(images), conv(images.repeat(1, 3, 1, 1)))


LAYERS = {
    "linear": (lambda: StackedLinear(40, 30, 50), lambda: nn.Linear(30, 50), 30),
    "conv": (lambda: StackedConv2d(40, 3, 40, 4), lambda: nn.Conv2d(3, 40, 4), 48),
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("again", [False, True], ids=["built", "reset"])
def test_each_set_starts_as_torch_starts_one_layer(kind: str, again: bool) -> None:
    """Case 105: per set, weights and biases follow torch's law, fan-in not inflated by the sets.

    Both laws are uniform in ±1/√fan_in. Deciles of 40 stacked sets and of 40 layers of torch.nn
    differ by sampling noise only: its standard deviation is at most 0.005 of the bound for the
    (at least 40 000) weights, and 0.03 for the (at least 1 600) biases.
    """
    build, single, fan_in = LAYERS[kind]
    stacked = build()
    if again:
        with torch.no_grad():
            for parameter in stacked.parameters():
                parameter.fill_(7.0)
        stacked.reset_parameters()
    bound = 1 / math.sqrt(fan_in)
    theirs = [single() for _ in range(40)]
    deciles = torch.linspace(0, 1, 11)
    for name, tolerance in (("weight", 0.02), ("bias", 0.12)):
        ours = getattr(stacked, name).detach()
        ones = torch.stack([getattr(layer, name).detach() for layer in theirs])
        assert ours.shape == ones.shape
        quantiles = [(t.flatten() / bound).quantile(deciles) for t in (ours, ones)]
        assert (quantiles[0] - quantiles[1]).abs().max() < tolerance
        assert ours.abs().max() <= bound
        # every set on its own, not the sets together: std of a uniform is bound/√3
        spread = ours.flatten(1).std(1) / (bound / math.sqrt(3))
        assert (spread - 1).abs().max() < (0.1 if name == "weight" else 0.45)
    distances = torch.cdist(stacked.weight.flatten(1), stacked.weight.flatten(1))
    assert distances[~torch.eye(40, dtype=torch.bool)].min() > 0.1


@pytest.mark.parametrize("kind", LAYERS)
def test_single_is_an_ordinary_layer_on_the_same_memory(kind: str) -> None:
    build, single, _ = LAYERS[kind]
    stacked, reference = build(), single()
    view = stacked.single(7)
    assert type(view) is type(reference)
    assert {n: p.shape for n, p in view.named_parameters()} == {
        n: p.shape for n, p in reference.named_parameters()
    }
    with torch.no_grad():
        view.weight.fill_(3.0)
        stacked.bias[7].fill_(2.0)
    assert (stacked.weight[7] == 3).all()
    assert not (stacked.weight[6] == 3).any()
    assert (view.bias == 2).all()


def test_dtype_and_device_of_the_parameters() -> None:
    for layer in (
        StackedLinear(2, 3, 4, dtype=torch.float64, device="meta"),
        StackedConv2d(2, 3, 4, 2, dtype=torch.float64, device="meta"),
    ):
        assert {(p.dtype, p.device.type) for p in layer.parameters()} == {(torch.float64, "meta")}
