"""What the parts remember of their coefficients, and when it holds no longer."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from composite_losses import EntropyTerm
from tests.tolerances import assert_close


def replaced(term: EntropyTerm, value: float) -> None:
    term.coeff = torch.tensor(value)


def filled(term: EntropyTerm, value: float) -> None:
    term.coeff.fill_(value)


def loaded(term: EntropyTerm, value: float) -> None:
    term.load_state_dict({"coeff": torch.tensor(value)})


def moved(term: EntropyTerm, value: float) -> None:
    term.write(value)
    term.to(torch.float64)


def written(term: EntropyTerm, value: float) -> None:
    term.write(value)


WAYS = [written, filled, replaced, loaded, moved]


@pytest.mark.parametrize(
    "make", [lambda t: t, copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))]
)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("start", [0.0, 0.3])
@pytest.mark.parametrize("value", [0.0, 0.5])
def test_a_new_coefficient_acts(
    start: float,
    value: float,
    way: Callable[[EntropyTerm, float], None],
    make: Callable[[EntropyTerm], EntropyTerm],
) -> None:
    """Whoever sets it: the loss is −coeff·H with its gradient, and only 0 may count as off."""
    term = make(EntropyTerm(start))
    assert term.off == (start == 0)
    way(term, value)
    total = torch.tensor([[1.5], [2.0]], dtype=term.coeff.dtype, requires_grad=True)
    loss: Tensor = term(total, total)
    loss.sum().backward()
    assert_close(loss.detach(), [[-value * 1.5], [-value * 2.0]])
    assert_close(total.grad, [[-value], [-value]])
    assert not (term.off and value)
    if way in (written, loaded, moved):
        assert term.off == (value == 0)
