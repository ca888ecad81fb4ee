"""Scratch data: what was written last is what is read, and the user's batch stays as it is."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from composite_losses.heads import Scratch

KEYS: list[Any] = ["a", ("a", "b"), ("a", "c"), ("a", "b", "d"), ("e", "f"), ("e", "h", "i")]


def tensor(value: float) -> Tensor:
    return torch.full((2,), value)


def batch() -> TensorDict:
    """With a tensor and a nested entry of its own."""
    nested = TensorDict({"b": tensor(1.0), "old": tensor(2.0)}, [2])
    return TensorDict({"a": nested, "g": tensor(3.0)}, [2])


def read(td: Any, key: Any) -> Any:
    """What a plain TensorDict holds, None where it holds nothing."""
    node = td
    for part in (key,) if isinstance(key, str) else key:
        if not isinstance(node, TensorDict):
            return None
        node = node.get(part, None)
    return node


def same(found: Any, expected: Any) -> None:
    if isinstance(expected, TensorDict):
        assert set(found.keys(True, True)) == set(expected.keys(True, True))
        assert (found == expected).all()
    elif expected is None:
        assert found is None
    else:
        assert torch.equal(found, expected)


def written(order: tuple[int, ...]) -> list[tuple[Any, Any]]:
    """Entries under the keys in that order; a key above others holds a TensorDict."""
    out = []
    for i, k in enumerate(order):
        value: Any = tensor(10.0 + i)
        if KEYS[k] in ("a", ("a", "b")):
            value = TensorDict({"d": value, "n": value + 0.5}, [2])
        out.append((KEYS[k], value))
    return out


@pytest.mark.parametrize(
    "order", [(0,), (1, 2), (2, 4), (0, 2), (2, 0), (1, 3), (0, 1, 3), (1, 0), (5,), (5, 4)]
)
@pytest.mark.parametrize("look", [None, "get", "children"])
def test_reads_like_a_tensordict_that_was_written(order: tuple[int, ...], look: str | None) -> None:
    """Nodes over entries and entries over nodes, in either order, also with reads in between."""
    original = batch()
    kept, expected = original.clone(), original.clone()
    data = Scratch(original)
    for key, value in written(order):
        data.set(key, value)
        expected.set(key, value.clone())
        if look is not None:
            getattr(data, look)("a")
    for key in [*KEYS, "g", ("g", "x"), "nothing", ("a", "old"), ("a", "b", "n")]:
        same(data.get(key), read(expected, key))
    for key in ("a", ("a", "b"), "e", "g", "nothing"):
        node = read(expected, key)
        found = data.children(key)
        if not isinstance(node, TensorDict) or node.is_empty():
            assert found is None
            continue
        assert set(found) == set(node.keys())
        for name, value in found.items():
            same(value, node.get(name))
    same(data.tensordict(), expected)
    same(original, kept)


def test_siblings_are_read_without_a_copy() -> None:
    """Parameters of many heads under one node: the hot path makes no TensorDict of them."""
    original = batch()
    data = Scratch(original)
    data.lay([(("p", "x", "logits"), tensor(5.0)), (("p", "y", "loc"), tensor(6.0))])
    assert list(data.children(("p", "x")) or {}) == ["logits"]
    assert list(data.children(("p", "y")) or {}) == ["loc"]
    assert data._td is original


def test_a_fork_is_written_apart() -> None:
    data = Scratch(batch())
    data.set(("a", "c"), tensor(5.0))
    twin = data.fork()
    twin.set(("a", "c"), tensor(6.0))
    twin.set("h", tensor(7.0))
    assert torch.equal(data.get(("a", "c")), tensor(5.0))
    assert data.get("h") is None
    assert set(twin.children("a") or {}) == {"b", "c", "old"}


def test_drop_hides_an_entry() -> None:
    original = batch()
    data = Scratch(original)
    data.set(("a", "c"), tensor(5.0))
    data.drop(("a", "c"))
    data.drop("g")
    assert data.get(("a", "c")) is None
    assert data.get("g") is None
    assert original.get("g", None) is not None
