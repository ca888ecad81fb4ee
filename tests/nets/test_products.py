"""Linear products of several sets: as few operations as torch's layers, evenly over the threads."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from composite_losses.nets import products
from tests.nets.builders import SHARING, inputs, make
from tests.tolerances import assert_close


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads, and sizes that already pay when they are small."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(products, "CUT_WORK", 1)
    monkeypatch.setattr(products, "CUT_ROWS", 2)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """One layer per set, in turn."""
    biases = [None] * len(weight) if bias is None else bias
    return torch.stack([F.linear(*each) for each in zip(x, weight, biases, strict=True)])


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(("blocks", "rows"), [(3, 8), (5, 4), (4, 8), (3, 7), (3, 2)])
def test_cut_products_are_those_of_every_set(
    blocks: int, rows: int, bias: bool, two_threads: None
) -> None:
    """Cut or not, values and gradients are those of one linear layer per set."""
    x = torch.randn(blocks, rows, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(blocks, 5, 4, dtype=torch.float64, requires_grad=True)
    offset = torch.randn(blocks, 5, dtype=torch.float64, requires_grad=True) if bias else None
    leaves = [x, weight, *([] if offset is None else [offset])]
    found = [f(x, weight, offset) for f in (products.products, _linear)]
    assert_close(found[0], found[1].detach())
    gradients = [torch.autograd.grad(y.sin().sum(), leaves) for y in found]
    for ours, expected in zip(*gradients, strict=True):
        assert_close(ours, expected)


@pytest.mark.parametrize(
    ("blocks", "rows", "threads", "parts"),
    [
        (3, 8, 2, 2),  # 6 products on 2 threads
        (5, 8, 2, 2),
        (9, 8, 4, 4),  # 36 on 4
        (6, 8, 4, 2),  # 12 on 4
        (4, 8, 2, 1),  # even as they are
        (3, 7, 2, 1),  # rows do not halve
        (3, 2, 2, 1),  # parts of one row
        (3, 8, 4, 1),  # fewer than threads: the products themselves are threaded
        (3, 8, 1, 1),
    ],
)
def test_parts_by_sizes(
    blocks: int,
    rows: int,
    threads: int,
    parts: int,
    two_threads: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A multiple of the threads, where the rows divide and suffice."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert products.even_parts(torch.empty(blocks, rows, 4), 5) == parts


def test_small_products_and_other_devices_are_not_cut(
    two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert products.even_parts(torch.empty(3, 8, 4, device="meta"), 5) == 1
    monkeypatch.setattr(products, "CUT_WORK", 8 * 4 * 5)
    assert products.even_parts(torch.empty(3, 8, 4), 5) == 2
    monkeypatch.setattr(products, "CUT_WORK", 8 * 4 * 5 + 1)
    assert products.even_parts(torch.empty(3, 8, 4), 5) == 1


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "lax"])
def test_export_keeps_the_batch_dynamic_where_eager_products_are_cut(
    strict: bool, two_threads: None
) -> None:
    """Sizes are symbols in an export, so it takes the uncut product, right for odd sizes too."""
    net = make("mlp", "unshared").eval()
    sizes = ({0: torch.export.Dim("batch", min=2)},)
    program = torch.export.export(net, inputs("mlp", 8), dynamic_shapes=sizes, strict=strict)
    for batch in (8, 6, 7):
        (x,) = inputs("mlp", batch)
        assert_close(program.module()(x), net(x).detach())


class Kernels(TorchDispatchMode):
    """Counts the operations that compute, views and detached aliases left out."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if all(r.alias_info is None or r.alias_info.is_write for r in func._schema.returns):
            self.names[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def _kernels(call: Callable[[], Tensor]) -> Counter[str]:
    """What one forward and backward pass computes."""
    with Kernels() as counter:
        y = call()
        y.backward(torch.ones_like(y))
    return counter.names


def test_a_shared_net_computes_what_a_plain_one_computes() -> None:
    """One set costs no operation that the agent's own ``nn.Sequential`` has not got."""
    net = make("mlp", "shared")
    (x,) = inputs("mlp", 6)
    view = net.agent(0)
    assert _kernels(lambda: net(x)) == _kernels(lambda: view(x))


@pytest.mark.parametrize("shape", [(6, 4), (2, 6, 4)])
def test_one_set_computes_what_one_layer_computes(shape: tuple[int, ...]) -> None:
    """Recurrent nets ``[A, N, in]`` too: the set dim adds views, no gradients to fill and copy."""
    x, layer = torch.randn(shape), nn.Linear(4, 5)
    weight, bias = torch.randn(1, 5, 4, requires_grad=True), torch.randn(1, 5, requires_grad=True)
    assert _kernels(lambda: products.products(x, weight, bias)) == _kernels(lambda: layer(x))


def test_an_unshared_net_has_one_product_per_layer_whatever_the_agents() -> None:
    """Three layers and two activations: 5 kernels forward, however many sets."""
    for sharing in ("unshared", "clustered"):
        net, (x,) = make("mlp", sharing), inputs("mlp", 6)
        with torch.no_grad(), Kernels() as counter:
            net(x)
        assert counter.names["baddbmm"] == 3
        assert counter.names["tanh"] == 2
        picked = 0 if SHARING[sharing] is False else 6  # a weight and a bias per layer
        assert counter.names["index_select"] == picked
        assert counter.names.total() == 5 + picked
