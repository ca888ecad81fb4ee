"""torch.compile of the losses over groups: one graph for all groups, equal to eager mode."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import composite_losses as cl
from tests.cases import builders_groups as bg
from tests.cases.builders_groups import SIX, TWO, alive_masks, group_loss, make_data

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:No target network updater:UserWarning"),
    # TensorDict's to_module looks at an option of dynamo that torch 2.13 calls deprecated.
    pytest.mark.filterwarnings(
        "ignore:torch._dynamo.config.inline_inbuilt_nn_modules:FutureWarning"
    ),
]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """No graph of another test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def check(loss: Any, data: list[Any], change: Any = None) -> None:
    """Outputs and gradients of every batch equal eager mode's; there is one graph."""
    eager, counter = copy.deepcopy(loss), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(loss, fullgraph=True, backend=counter)
    for i, td in enumerate(data):
        if i and change is not None:
            change(loss)
            change(eager)
        expected = eager(td)
        found = compiled(td)
        assert list(found.keys()) == list(loss.out_keys)
        for key, value in expected.items():
            torch.testing.assert_close(
                found[key], value, equal_nan=True, msg=lambda m, k=key: f"{k}: {m}"
            )
        judge = bg.gradients(eager, expected)
        for key, grad in bg.gradients(loss, found).items():
            torch.testing.assert_close(grad, judge[key], msg=lambda m, k=key: f"{k}: {m}")
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", ["GroupLoss", "HAPPOLoss"])
def test_one_graph(name: str) -> None:
    """Case 126: groups that differ in everything, batch after batch, coefficients scheduled."""
    specs = SIX if name == "GroupLoss" else TWO
    loss = group_loss(specs, getattr(cl, name), coeff={"prey": 0.5})
    data = [make_data(specs, seed=seed) for seed in range(3)]
    if name == "HAPPOLoss":
        for td in data:
            loss.update_factor(loss.reset_factor(td), "hunter")

    def change(each: Any) -> None:
        each.coeff[1] += 0.25
        each.losses["prey"].entropy_coeff = 0.3
        each.losses["hunter"].clip_epsilon = 0.05

    check(loss, data, change)


def test_masks_and_missing_groups() -> None:
    """Case 126: masks of other contents; a group that is not there is skipped."""
    loss = group_loss({**TWO, "drone": bg.DRONE}, missing="skip")
    data = []
    for seed in range(2):
        td = make_data(TWO, seed=seed)
        for group, mask in alive_masks(TWO, (4, 5), seed).items():
            td[group, "alive"] = mask
            loss.set_keys(group, agent_mask=(group, "alive"))
        data.append(td)
    check(loss, data)
