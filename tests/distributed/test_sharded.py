"""FSDP2: networks whose parameters are sharded over two gloo ranks train in our losses."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from tests.cases.builders_fl import PAIR, build, make_data, total_loss
from tests.distributed.launch import RANKS, on_ranks

pytestmark = pytest.mark.slow
ROWS = 4
LOSSES = ["ClipPPOLoss", "ClipPPOLoss-per_head", "KLPENPPOLoss", "A2CLoss", "ReinforceLoss"]


def problem(name: str) -> tuple[Any, Any]:
    """The loss and the whole batch; three rows of the first rank do not count."""
    loss = build(name, PAIR, functional=False, sync_counts=True).eval()
    data = make_data(PAIR, (RANKS * ROWS,), source="all" if name == "KLPENPPOLoss" else "stored")
    data["counts"] = torch.arange(RANKS * ROWS) >= ROWS - 1
    loss.set_keys(agent_mask="counts")
    return loss, data


def step(loss: Any, data: Any) -> dict[str, Tensor]:
    """Parameter → value after one step of SGD."""
    optimiser = torch.optim.SGD(loss.parameters(), lr=0.1)
    total_loss(loss(data)).backward()
    optimiser.step()
    return {name: getattr(p, "full_tensor", lambda p=p: p)() for name, p in loss.named_parameters()}


def work(rank: int) -> dict[str, dict[str, Tensor]]:
    """Loss → parameter → value after one step on sharded networks; each rank holds a part."""
    mesh = init_device_mesh("cpu", (RANKS,))
    found = {}
    for name in LOSSES:
        loss, data = problem(name)
        for net in [m for m in loss.modules() if isinstance(m, nn.Sequential)]:
            fully_shard(net, mesh=mesh)
        sharded = [m for m in loss.modules() if isinstance(m, FSDPModule)]
        if len(sharded) != 2:
            raise AssertionError(f"expected the actor's and the critic's network, found {sharded}")
        whole = sum(p.numel() for p in loss.parameters())
        here = sum(p.to_local().numel() for p in loss.parameters())
        if not 0 < here < whole:
            raise AssertionError(f"{here} of {whole} numbers are on this rank")
        found[name] = step(loss, data[rank * ROWS : (rank + 1) * ROWS])
    return found


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return on_ranks(work, tmp_path_factory.mktemp("fsdp"))


@pytest.mark.parametrize("name", LOSSES)
def test_one_step_equals_that_of_one_process(name: str, weights: Any) -> None:
    """With ``functional=False`` the loss calls the networks themselves, so FSDP's hooks run.

    One step of SGD on two ranks, uneven masks included, ends where one process with all rows ends.
    """
    loss, data = problem(name)
    before = {key: p.detach().clone() for key, p in loss.named_parameters()}
    expected = step(loss, data)
    for key, value in expected.items():
        for each in weights:
            torch.testing.assert_close(each[name][key], value, rtol=1e-6, atol=1e-6)
    assert any((expected[key] - before[key]).abs().max() > 1e-4 for key in before)
