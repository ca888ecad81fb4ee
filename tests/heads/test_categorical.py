"""The two layouts of a categorical head, few classes and many, against torch in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, kl_divergence

from composite_losses.heads.categorical import SHORT, CategoricalTerms
from composite_losses.heads.families import NormalTerms
from tests.tolerances import assert_close

F64 = torch.float64
sizes = pytest.mark.parametrize("classes", [2, SHORT - 1, SHORT, SHORT + 5])
batches = pytest.mark.parametrize("batch", [(), (4,), (2, 3)], ids=str)


def logits(batch: tuple[int, ...], classes: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((*batch, classes), dtype=F64, generator=generator)


def gradients(value: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    weights = torch.arange(1.0, value.numel() + 1, dtype=F64).reshape(value.shape)
    return torch.autograd.grad((value * weights).sum(), leaves, retain_graph=True)


@sizes
@batches
def test_values_and_gradients(classes: int, batch: tuple[int, ...]) -> None:
    x, y = logits(batch, classes).requires_grad_(), logits(batch, classes, 1).requires_grad_()
    terms, other = CategoricalTerms(x), CategoricalTerms(y)
    dist, peer = Categorical(logits=x), Categorical(logits=y)
    action = dist.sample()
    pairs = [
        (terms.log_prob(action), dist.log_prob(action), (x,)),
        (terms.entropy(), dist.entropy(), (x,)),
        (terms.kl(other), kl_divergence(dist, peer), (x, y)),
    ]
    for found, expected, leaves in pairs:
        assert_close(found, expected)
        for one, two in zip(gradients(found, *leaves), gradients(expected, *leaves), strict=True):
            assert_close(one, two)
    assert torch.equal(terms.mode(), dist.mode)


@sizes
@batches
def test_several_actions_of_one_policy(classes: int, batch: tuple[int, ...]) -> None:
    dist = Categorical(logits=logits(batch, classes))
    actions = dist.sample(torch.Size((7,)))
    assert_close(CategoricalTerms(dist.logits).log_prob(actions), dist.log_prob(actions))


@sizes
@batches
def test_forbidden_classes(classes: int, batch: tuple[int, ...]) -> None:
    """As if they were not there, in value and gradient, one-hot actions too."""
    x = logits(batch, classes).requires_grad_()
    allowed = torch.ones((*batch, classes), dtype=torch.bool)
    allowed[..., 0] = False
    short = Categorical(logits=x[..., 1:])
    action = short.sample()
    for one_hot in (False, True):
        terms = CategoricalTerms(x, allowed, one_hot=one_hot)
        stored: Any = action + 1
        if one_hot:
            stored = torch.nn.functional.one_hot(stored, classes)
        pairs = [
            (terms.log_prob(stored), short.log_prob(action)),
            (terms.entropy(), short.entropy()),
        ]
        for found, expected in pairs:
            assert_close(found, expected)
            assert_close(gradients(found, x)[0], gradients(expected, x)[0])
        mode = terms.mode().argmax(-1) if one_hot else terms.mode()
        assert torch.equal(mode, short.mode + 1)


@pytest.mark.parametrize("classes", [(3, 5), (3, SHORT + 2), (SHORT, SHORT + 1)], ids=str)
def test_heads_of_different_size_together(classes: tuple[int, int]) -> None:
    """The narrower one is padded: its values are those it has alone."""
    heads = [CategoricalTerms(logits((4,), n, n)) for n in classes]
    together = heads[0].stacked(heads, 1)
    action = torch.stack([head.mode() for head in heads], 1)
    for i, head in enumerate(heads):
        assert_close(together.log_prob(action)[:, i], head.log_prob(action[:, i]))
        assert_close(together.entropy()[:, i], head.entropy())


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)], ids=str)
@pytest.mark.parametrize("dim", [0, 1])
def test_masked_heads_together(order: tuple[int, ...], dim: int) -> None:
    """One with a mask, one of more classes without: values, KL and what is allowed stay its own."""
    masked = torch.tensor([[True, False, True]] * 3 + [[True, True, False]])
    made = [
        (
            CategoricalTerms(logits((4,), 3, 1), masked),
            CategoricalTerms(logits((4,), 3, 4), masked),
        ),
        (CategoricalTerms(logits((4,), 5, 2)), CategoricalTerms(logits((4,), 5, 5))),
        (CategoricalTerms(logits((4,), 4, 3)), CategoricalTerms(logits((4,), 4, 6))),
    ]
    heads, others = ([made[i][side] for i in order] for side in (0, 1))
    together, peer = heads[0].stacked(heads, dim), others[0].stacked(others, dim)
    assert together.batch_shape == ((3, 4) if dim == 0 else (4, 3))
    action = torch.stack([head.mode() for head in heads], dim)
    found = {
        "log_prob": together.log_prob(action),
        "entropy": together.entropy(),
        "kl": together.kl(peer),
        "mode": together.mode(),
        "allowed": together.contains(torch.full_like(action, 2)),
    }
    for i, (head, other) in enumerate(zip(heads, others, strict=True)):
        expected = {
            "log_prob": head.log_prob(action.select(dim, i)),
            "entropy": head.entropy(),
            "kl": head.kl(other),
            "mode": head.mode(),
            "allowed": head.contains(torch.full((4,), 2)),
        }
        for name, value in expected.items():
            assert_close(found[name].select(dim, i), value)


def test_only_heads_of_one_kind_are_stacked() -> None:
    """Batch, dtype and whether the log-probs are normalised must agree; classes need not."""
    one = CategoricalTerms(logits((4,), 3))
    assert one.kind(1) == CategoricalTerms(logits((4,), 7)).kind(1)
    others = [
        CategoricalTerms(logits((5,), 3)),
        CategoricalTerms(logits((4,), 3).float()),
        CategoricalTerms(logits((4,), 3), normalised=True),
    ]
    assert all(one.kind(1) != other.kind(1) for other in others)
    assert one.kind(2) is None
    with pytest.raises(TypeError, match="two categorical policies"):
        one.kl(NormalTerms(torch.zeros(4), torch.ones(4)))
