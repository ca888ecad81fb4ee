"""Batched products against a loop over agents, both judged by the truth in float64."""

import copy

import pytest
import torch
from torch import Tensor

from tests.nets.builders import CELLS, KINDS, RECURRENT, SETS, SHARING, A, F, H, event, flat, make


def _error(outputs: list[Tensor], truth: list[Tensor]) -> float:
    """Root mean square difference from the truth."""
    total = sum(float((o.double() - t).square().sum()) for o, t in zip(outputs, truth, strict=True))
    return (total / sum(t.numel() for t in truth)) ** 0.5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("centralized", [False, True], ids=["own", "central"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@torch.no_grad()
def test_error_is_that_of_a_loop_over_agents(
    kind: str, sharing: str, centralized: bool, dtype: torch.dtype
) -> None:
    """The batched net's error is at most 1.25 times that of torch.nn's layers run per agent.

    Parameters and inputs are rounded to the dtype first, so the truth is the same for both.
    """
    batch = 256
    x = torch.randn(batch, A, *event(kind)).to(dtype)
    if kind in RECURRENT:
        net = make(kind, sharing).to(dtype)
        steps = x.unflatten(0, (64, 4))
        fused = flat(net.sequence(steps))
        results = []
        for cast in (dtype, torch.float64):
            outputs = []
            for agent, index in enumerate(SETS[sharing]):
                view = CELLS[kind](F, H, 2, batch_first=True, dtype=cast)
                view.load_state_dict({n: p[index].to(cast) for n, p in net.named_parameters()})
                y, last = view(steps[:, :, agent].to(cast))
                outputs.append([y, *(s.transpose(0, 1) for s in flat(last))])
            y, *states = zip(*outputs, strict=True)
            results.append([torch.stack(y, 2), *(torch.stack(s, 1) for s in states)])
    else:
        net = make(kind, sharing, centralized=centralized).to(dtype)
        fused = [net(x)]
        results = []
        for cast in (dtype, torch.float64):
            one = copy.deepcopy(net).to(cast)
            seen = [x.flatten(1, 2) if centralized else x[:, i] for i in range(A)]
            rows = [one.agent(i)(s.to(cast)) for i, s in enumerate(seen)]
            results.append([torch.stack(rows, 1)])
    loop, truth = results
    naive = _error(loop, truth)
    assert naive > 0
    assert _error(fused, truth) <= 1.25 * naive
