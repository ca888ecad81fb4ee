"""Dropout: a mask per agent by default, one mask for all on request, none in eval mode."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import composite_losses as cl
from tests.nets.builders import FEEDFORWARD, SHARING, A, inputs, make
from tests.tolerances import assert_close

KIND = pytest.mark.parametrize("kind", FEEDFORWARD)
EVERY = pytest.mark.parametrize("sharing", SHARING)
CENTRALISED = pytest.mark.parametrize("centralized", [False, True], ids=["own", "central"])


def _net(kind: str, sharing: str, centralized: bool, **options: Any) -> Any:
    """One layer of 64 equal, positive activations per agent: zeros are what dropout has drawn."""
    options = {"dropout": 0.5, "activation_class": nn.Identity, **options}
    if kind == "mlp":
        net = cl.MultiAgentMLP(
            4,
            64,
            A,
            centralized=centralized,
            share_params=SHARING[sharing],
            depth=0,
            activate_last_layer=True,
            **options,
        )
    else:
        net = make(kind, sharing, centralized=centralized, num_cells=[4], **options)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(0.25)
    return net


def _masks(net: Any, kind: str) -> Tensor:
    """Which activations ``[B, A, n]`` survive for inputs of ones."""
    out = net(torch.ones_like(inputs(kind, 6)[0]))
    assert out.shape[:2] == (6, A)
    return out != 0


@KIND
@EVERY
@CENTRALISED
def test_masks_differ_between_agents(kind: str, sharing: str, centralized: bool) -> None:
    """Case 106: no flag is needed; every agent, of one set or not, draws its own mask.

    Two independent masks agree in half of their 384 entries (six rows of 64), give or take 0.026.
    """
    torch.manual_seed(1)
    masks = _masks(_net(kind, sharing, centralized), kind)
    assert (masks.float().mean((0, 2)) - 0.5).abs().max() < 0.13
    for i in range(A):
        for j in range(i):
            assert abs((masks[:, i] == masks[:, j]).float().mean() - 0.5) < 0.13
    assert (masks[0] != masks[1]).any()


@KIND
@EVERY
@CENTRALISED
def test_one_mask_for_all_agents(kind: str, sharing: str, centralized: bool) -> None:
    """``dropout_randomness="same"``: agents share the mask of a row, rows do not."""
    masks = _masks(_net(kind, sharing, centralized, dropout_randomness="same"), kind)
    assert (masks == masks[:, :1]).all()
    assert (masks[0] != masks[1]).any()
    assert 0.35 < masks[:, 0].float().mean() < 0.65


@KIND
@EVERY
@CENTRALISED
@pytest.mark.parametrize("randomness", ["different", "same"])
def test_survivors_are_scaled_and_trained(
    kind: str, sharing: str, centralized: bool, randomness: str
) -> None:
    """Case 106: in training mode what survives is doubled (p = 0.5) and receives gradient."""
    net = _net(kind, sharing, centralized, dropout_randomness=randomness)
    x = torch.ones_like(inputs(kind, 6)[0])
    out = net(x)
    whole = net.eval()(x)
    assert (whole > 0).all()
    kept = out != 0
    assert_close(out[kept], 2 * whole[kept])
    out.sum().backward()
    assert all((p.grad != 0).any() for p in net.parameters())
    assert torch.equal(net(x), whole)


@KIND
def test_training_mode_of_a_view_follows_and_does_not_reach_back(kind: str) -> None:
    net = _net(kind, "unshared", False)
    view = net.agent(0)
    assert any(isinstance(m, nn.Dropout) and m.p == 0.5 and m.training for m in view)
    view.eval()
    assert all(m.training for m in net.modules())
    assert not any(m.training for m in net.eval().agent(0).modules())
