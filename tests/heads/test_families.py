"""Log-prob, entropy and KL of every family against the distribution itself, in float64."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributions as D
from torchrl.modules import distributions as R

import composite_losses  # noqa: F401  registers TorchRL's families
from composite_losses.heads.registry import from_distribution, from_parameters
from composite_losses.heads.terms import DistributionTerms

F64 = torch.float64
TOLERANCE = {"rtol": 1e-9, "atol": 1e-9}
N = 3
LOW, HIGH = torch.tensor([-2.0, -1.0, -0.5], dtype=F64), torch.tensor([3.0, 1.0, 0.5], dtype=F64)


def real(shape):
    return torch.randn(shape, dtype=F64)


def positive(shape):
    return torch.rand(shape, dtype=F64) * 2 + 0.6


def simplex(shape):
    return positive(shape) / 3  # not normalised on purpose


def probability(shape):
    return torch.rand(shape, dtype=F64) * 0.8 + 0.1


def independent_normal(loc, scale):
    return D.Independent(D.Normal(loc, scale), 1)


def independent_beta(a, b):
    return D.Independent(D.Beta(a, b), 1)


def mixture(logits, loc, scale):
    return D.MixtureSameFamily(D.Categorical(logits=logits), D.Normal(loc, scale))


def multivariate(loc, scale):
    return D.MultivariateNormal(loc, scale_tril=torch.diag_embed(scale))


class NoEntropyCategorical(D.Categorical):
    def entropy(self):
        raise NotImplementedError


class ShiftedCategorical(D.Categorical):
    def log_prob(self, value):
        return super().log_prob(value) - 1.0


class ShiftedOneHot(R.OneHotCategorical):
    def log_prob(self, value):
        return super().log_prob(value) - 1.0


class ShiftedMasked(R.MaskedCategorical):
    def log_prob(self, value):
        return super().log_prob(value) - 1.0


class ShiftedNormal(D.Normal):
    def log_prob(self, value):
        return super().log_prob(value) - 1.0


class ShiftedTanh(R.TanhNormal):
    def log_prob(self, value):
        return super().log_prob(value) - 1.0


class OtherEntropy(D.Beta):
    def entropy(self):
        return super().entropy() + 1.0


@dataclass(frozen=True)
class Spec:
    """A distribution, the domain of each parameter, and what is known about it."""

    cls: Callable[..., Any]
    domains: dict[str, Callable[..., Any]]
    kwargs: dict[str, Any] = field(default_factory=dict)
    family: bool = True  # evaluated by formula
    entropy: bool = True  # the class has a closed form
    kl: bool = True  # torch has a closed form


LOGITS = {"logits": real}
NORMAL = {"loc": real, "scale": positive}
CONCENTRATIONS = {"concentration1": positive, "concentration0": positive}
BOUNDS = {"low": -2.0, "high": 3.0}
SPECS = {
    "categorical": Spec(D.Categorical, LOGITS),
    "categorical_probs": Spec(D.Categorical, {"probs": simplex}),
    "torch_one_hot": Spec(D.OneHotCategorical, LOGITS),
    "torch_one_hot_probs": Spec(D.OneHotCategorical, {"probs": simplex}),
    "one_hot": Spec(R.OneHotCategorical, LOGITS),
    "bernoulli": Spec(D.Bernoulli, LOGITS),
    "bernoulli_probs": Spec(D.Bernoulli, {"probs": probability}),
    "beta": Spec(D.Beta, CONCENTRATIONS),
    "gamma": Spec(D.Gamma, {"concentration": positive, "rate": positive}),
    "dirichlet": Spec(D.Dirichlet, {"concentration": positive}),
    "normal": Spec(D.Normal, NORMAL),
    "independent": Spec(independent_normal, NORMAL),
    "independent_beta": Spec(independent_beta, {"a": positive, "b": positive}),
    "independent_normal": Spec(R.IndependentNormal, NORMAL),
    "independent_normal_0": Spec(R.IndependentNormal, NORMAL, {"event_dim": 0}),
    "tanh": Spec(R.TanhNormal, NORMAL, entropy=False, kl=False),
    "tanh_floats": Spec(R.TanhNormal, NORMAL, BOUNDS, entropy=False, kl=False),
    "tanh_ints": Spec(R.TanhNormal, NORMAL, {"low": 0, "high": 2}, entropy=False, kl=False),
    "tanh_tensors": Spec(R.TanhNormal, NORMAL, {"low": LOW, "high": HIGH}, entropy=False, kl=False),
    "tanh_loc": Spec(
        R.TanhNormal, NORMAL, {"tanh_loc": True, "upscale": 2.0, **BOUNDS}, entropy=False, kl=False
    ),
    "tanh_events": Spec(R.TanhNormal, NORMAL, {"event_dims": 0}, entropy=False, kl=False),
    "tanh_unsafe": Spec(
        R.TanhNormal, NORMAL, {"safe_tanh": False}, family=False, entropy=False, kl=False
    ),
    "kumaraswamy": Spec(D.Kumaraswamy, CONCENTRATIONS, family=False, kl=False),
    "truncated": Spec(R.TruncatedNormal, NORMAL, BOUNDS, family=False, kl=False),
    "mixture": Spec(mixture, {"logits": real, **NORMAL}, family=False, entropy=False, kl=False),
    "laplace": Spec(D.Laplace, NORMAL, family=False),
    "log_normal": Spec(D.LogNormal, NORMAL, family=False),
    "student": Spec(D.StudentT, {"df": positive, **NORMAL}, family=False, kl=False),
    "multivariate": Spec(multivariate, NORMAL, family=False),
    "poisson": Spec(D.Poisson, {"rate": positive}, family=False, entropy=False),
    "binomial": Spec(D.Binomial, LOGITS, {"total_count": 4}, family=False),
    "ordinal": Spec(R.Ordinal, {"scores": real}, family=False),
    "sub_categorical": Spec(ShiftedCategorical, LOGITS, family=False),
    "sub_one_hot": Spec(ShiftedOneHot, LOGITS, family=False),
    "sub_normal": Spec(ShiftedNormal, NORMAL, family=False),
    "sub_tanh": Spec(ShiftedTanh, NORMAL, family=False, entropy=False, kl=False),
    "sub_beta": Spec(OtherEntropy, CONCENTRATIONS, family=False),
}
BATCHES = [(), (2,), (N, N), (2, N, 4)]
names = functools.partial(pytest.mark.parametrize, "name")
batches = pytest.mark.parametrize("batch", BATCHES, ids=str)
ways = pytest.mark.parametrize("way", ["object", "parameters"])
FORMULAS = [name for name, spec in SPECS.items() if spec.family]


def drawn(spec, batch):
    """Random parameters that require grad."""
    shape = (*batch, N)
    return {name: domain(shape).requires_grad_() for name, domain in spec.domains.items()}


def built(spec, parameters):
    """The distribution; bounds in float64, because TorchRL keeps float bounds in float32."""
    kwargs = dict(spec.kwargs)
    for name in {"low", "high"} & set(kwargs):
        kwargs[name] = torch.as_tensor(kwargs[name], dtype=F64)
    return spec.cls(**parameters, **kwargs)


def terms_of(spec, parameters, way):
    if way == "object":
        return from_distribution(built(spec, parameters))
    known = from_parameters(spec.cls, {**parameters, **spec.kwargs})
    return from_distribution(built(spec, parameters)) if known is None else known


def assert_equal(found, expected, parameters):
    """Values and the gradients of a weighted sum, to 1e-9."""
    assert found.dtype == F64
    torch.testing.assert_close(found, expected, **TOLERANCE)
    weights = torch.randn(expected.shape, dtype=F64)
    if not expected.requires_grad:
        assert not found.requires_grad or not (found * weights).sum().isnan()
        return
    options = {"allow_unused": True, "materialize_grads": True, "retain_graph": True}
    leaves = list(parameters.values())
    one = torch.autograd.grad((found * weights).sum(), leaves, **options)
    two = torch.autograd.grad((expected * weights).sum(), leaves, **options)
    for name, a, b in zip(parameters, one, two, strict=True):
        torch.testing.assert_close(a, b, **TOLERANCE, msg=lambda m, n=name: f"gradient of {n}: {m}")


@ways
@batches
@names(SPECS)
def test_log_prob(name, batch, way):
    spec = SPECS[name]
    parameters = drawn(spec, batch)
    dist, terms = built(spec, parameters), terms_of(spec, parameters, way)
    action = dist.sample()
    assert terms.batch_shape == dist.log_prob(action).shape
    assert terms.batch_shape + terms.event_shape == action.shape
    assert_equal(terms.log_prob(action), dist.log_prob(action), parameters)


@ways
@names(SPECS)
def test_whether_a_formula_is_used(name, way):
    """Known classes are evaluated by formula, subclasses with methods of their own never are."""
    spec = SPECS[name]
    terms = terms_of(spec, drawn(spec, (2,)), way)
    assert isinstance(terms, DistributionTerms) != spec.family
    if not spec.family:
        assert from_parameters(spec.cls, {**drawn(spec, (2,)), **spec.kwargs}) is None


@ways
@batches
@names([name for name, spec in SPECS.items() if spec.entropy])
def test_entropy(name, batch, way):
    spec = SPECS[name]
    parameters = drawn(spec, batch)
    dist, terms = built(spec, parameters), terms_of(spec, parameters, way)
    state = torch.get_rng_state()
    entropy = terms.entropy()
    assert torch.equal(state, torch.get_rng_state())
    assert_equal(entropy, dist.entropy(), parameters)


@ways
@batches
@names([name for name, spec in SPECS.items() if spec.kl])
def test_kl(name, batch, way):
    spec = SPECS[name]
    p, q = drawn(spec, batch), drawn(spec, batch)
    expected = D.kl_divergence(built(spec, p), built(spec, q))
    state = torch.get_rng_state()
    found = terms_of(spec, p, way).kl(terms_of(spec, q, way))
    assert torch.equal(state, torch.get_rng_state())
    assert_equal(found, expected, {**p, **{f"{k}_q": v for k, v in q.items()}})


TANH = ["tanh", "tanh_floats", "tanh_ints", "tanh_tensors", "tanh_loc", "tanh_events"]


def base_normal(dist):
    """The Normal before the squashing."""
    return D.Normal(dist.loc, dist.scale)


@ways
@batches
@names(TANH)
def test_tanh_kl_is_that_of_the_normals(name, batch, way):
    """A bijection leaves the KL unchanged."""
    spec = SPECS[name]
    p, q = drawn(spec, batch), drawn(spec, batch)
    expected = D.kl_divergence(base_normal(built(spec, p)), base_normal(built(spec, q)))
    if name != "tanh_events":
        expected = expected.sum(-1)
    found = terms_of(spec, p, way).kl(terms_of(spec, q, way))
    assert_equal(found, expected, {**p, **{f"{k}_q": v for k, v in q.items()}})


@ways
@names(TANH)
def test_tanh_entropy_against_quadrature(name, way):
    """H = H(X) + E[log |dy/dx|], the mean by the trapezoidal rule over ±12 standard deviations."""
    spec = SPECS[name]
    parameters = drawn(spec, (4,))
    dist, terms = built(spec, parameters), terms_of(spec, parameters, way)
    base = base_normal(dist)
    z = torch.linspace(-12, 12, 4001, dtype=F64).reshape(-1, 1, 1)
    weight = (-z.square() / 2).exp() / math.sqrt(2 * math.pi) * (24 / 4000)
    x = base.loc + base.scale * z
    half = (torch.as_tensor(dist.high, dtype=F64) - torch.as_tensor(dist.low, dtype=F64)) / 2
    slope = 2 * (math.log(2) - x - torch.nn.functional.softplus(-2 * x)) + half.log()
    expected = base.entropy() + (weight * slope).sum(0)
    if name != "tanh_events":
        expected = expected.sum(-1)
    found = terms.entropy()
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-6)
    leaves = list(parameters.values())
    one = torch.autograd.grad(found.sum(), leaves)
    two = torch.autograd.grad(expected.sum(), leaves)
    for a, b in zip(one, two, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


@names(["mixture", "sub_tanh"])
def test_entropy_without_closed_form(name):
    """The mean of −log p over the samples only: one value per sample of the batch."""
    spec = SPECS[name]
    parameters = drawn(spec, (2,))
    dist, terms = built(spec, parameters), terms_of(spec, parameters, "object")
    found = terms.entropy(20_000)
    expected = -dist.log_prob(dist.sample((20_000,))).mean(0)
    assert found.shape == (2,)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.06)


@names(["kumaraswamy", "truncated", "mixture", "student", "sub_tanh"])
def test_kl_without_closed_form(name):
    """KL(p ‖ q) = E_p[log p − log q] over the samples, one value per sample of the batch."""
    spec = SPECS[name]
    p, q = drawn(spec, (2,)), drawn(spec, (2,))
    one, two = built(spec, p), built(spec, q)
    found = terms_of(spec, p, "object").kl(terms_of(spec, q, "object"), 40_000)
    sample = one.sample((40_000,))
    gap = one.log_prob(sample) - two.log_prob(sample)
    assert found.shape == gap.shape[1:]
    error = (4 * gap.std(0) / 200).detach()  # four standard errors each
    assert ((found - gap.mean(0)).abs() <= 2 * error).all()


@ways
@pytest.mark.parametrize(
    ("loc", "scale"),
    [((4, N), ()), ((4, N), (N,)), ((4, 1), (1, N)), ((4, N), "number"), ((4, N), "callable")],
)
@pytest.mark.parametrize("cls", [D.Normal, R.IndependentNormal, R.TanhNormal])
def test_parameters_that_broadcast(cls, loc, scale, way):
    """A scale shared by rows, by features, or given as a number or a function of loc."""
    parameters = {"loc": real(loc).requires_grad_()}
    fixed = {"number": 0.7, "callable": torch.ones_like}.get(scale)
    if fixed is None:
        parameters["scale"] = positive(scale).requires_grad_()
    elif cls is D.Normal and scale == "callable":
        fixed = 0.3
    spec = Spec(cls, {}, {} if fixed is None else {"scale": fixed})
    if cls is not D.Normal and loc == (4, 1):
        parameters["loc"] = real((4, N)).requires_grad_()
    dist, terms = built(spec, parameters), terms_of(spec, parameters, way)
    action = dist.sample()
    assert_equal(terms.log_prob(action), dist.log_prob(action), parameters)
    if cls is not R.TanhNormal:
        assert_equal(terms.entropy(), dist.entropy(), parameters)
    other = built(spec, {k: v.detach() * 0.5 for k, v in parameters.items()})
    base = [base_normal(d) if cls is R.TanhNormal else d for d in (dist, other)]
    expected = D.kl_divergence(*base)
    expected = expected.sum(-1) if cls is R.TanhNormal else expected
    assert_equal(terms.kl(from_distribution(other)), expected, parameters)


MASKED = {"masked": R.MaskedCategorical, "masked_one_hot": R.MaskedOneHotCategorical}
SHAPES = [((), ()), ((4,), (4,)), ((4,), (1,)), ((4,), ()), ((2, N, 4), (2, N, 4))]
SHAPES += [((2, N, 4), (1,)), ((2, N, 4), ()), ((2, N, 4), (N, 1))]


def masked_case(shape, mask_shape, dtype=F64):
    logits = torch.randn(*shape, 5, dtype=dtype).requires_grad_()
    mask = torch.rand(*mask_shape, 5) < 0.6
    mask[..., 2] = True
    wide = mask.expand(logits.shape)
    expected = logits.to(F64).masked_fill(~wide, -math.inf).log_softmax(-1)
    index = wide.float().flatten(0, -2).multinomial(1) if shape else wide.float().multinomial(1)
    return logits, mask, wide, expected, index.reshape(shape)


@ways
@pytest.mark.parametrize(("shape", "mask_shape"), SHAPES, ids=str)
@pytest.mark.parametrize("name", MASKED)
def test_masked(name, shape, mask_shape, way):
    """Log-prob, entropy and KL are those of the masked softmax, also where the mask broadcasts."""
    logits, mask, wide, log_probs, index = masked_case(shape, mask_shape)
    spec = Spec(MASKED[name], {}, {"mask": mask if name == "masked" else wide})
    parameters = {"logits": logits}
    terms = terms_of(spec, parameters, way)
    action = index if name == "masked" else torch.nn.functional.one_hot(index, 5)
    expected = log_probs.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    assert terms.batch_shape == shape
    assert_equal(terms.log_prob(action), expected, parameters)
    safe = log_probs.masked_fill(~wide, 0.0)
    assert_equal(terms.entropy(), -(safe.exp() * safe * wide).sum(-1), parameters)
    other = torch.randn_like(logits)
    second = terms_of(spec, {"logits": other}, way)
    q = other.masked_fill(~wide, -math.inf).log_softmax(-1).masked_fill(~wide, 0.0)
    assert_equal(terms.kl(second), (safe.exp() * wide * (safe - q)).sum(-1), parameters)
    assert terms.contains(action).all()
    forbidden = (~wide).float().argmax(-1)
    bad = forbidden if name == "masked" else torch.nn.functional.one_hot(forbidden, 5)
    assert torch.equal(terms.contains(bad), wide.all(-1) & wide[..., 0])


@ways
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["masked", "categorical"])
def test_half_precision_logits(name, dtype, way):
    """No NaN and no overflow in the entropy and its gradient, whatever the dtype of the logits."""
    logits, mask, wide, log_probs, index = masked_case((2, N, 4), (1,), dtype)
    if name == "categorical":
        spec, log_probs = Spec(D.Categorical, {}), logits.to(F64).log_softmax(-1)
        wide = torch.ones_like(wide)
    else:
        spec = Spec(R.MaskedCategorical, {}, {"mask": mask})
    terms = terms_of(spec, {"logits": logits}, way)
    expected = log_probs.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    found = terms.log_prob(index)
    torch.testing.assert_close(found.to(F64), expected, rtol=2e-2, atol=2e-2)
    entropy = terms.entropy()
    safe = log_probs.masked_fill(~wide, 0.0)
    reference = -(safe.exp() * safe * wide).sum(-1)
    torch.testing.assert_close(entropy.to(F64), reference, rtol=3e-2, atol=3e-2)
    (gradient,) = torch.autograd.grad((entropy + found).sum(), logits)
    assert gradient.isfinite().all()
    assert (gradient[~wide] == 0).all()


def sub_masked(logits):
    mask = torch.tensor([True, False, True])
    return ShiftedMasked(logits=logits, mask=mask)


def test_subclass_of_masked():
    """A subclass of MaskedCategorical keeps its own log-prob."""
    logits = real((2, N))
    action = torch.tensor([0, 2])
    terms = from_distribution(sub_masked(logits))
    torch.testing.assert_close(terms.log_prob(action), sub_masked(logits).log_prob(action))
    mask = torch.tensor([True, False, True])
    assert from_parameters(ShiftedMasked, {"logits": logits, "mask": mask}) is None


@ways
@names([name for name in SPECS if name not in ("student",)])
def test_samples_lie_in_the_support(name, way):
    """What a distribution samples is inside; what it cannot sample is not."""
    spec = SPECS[name]
    parameters = drawn(spec, (50,))
    dist, terms = built(spec, parameters), terms_of(spec, parameters, way)
    inside = terms.contains(dist.sample())
    assert inside.all()
    assert inside.flatten().shape[0] % 50 == 0


OUTSIDE = {
    "categorical": 3,
    "categorical_probs": -1,
    "bernoulli": 0.5,
    "beta": 1.2,
    "gamma": -0.1,
    "dirichlet": 0.7,
    "normal": math.nan,
    "independent": math.nan,
    "tanh": 1.5,
    "tanh_floats": -2.5,
    "tanh_ints": -0.1,
    "tanh_unsafe": 1.5,
    "sub_tanh": -1.5,
    "kumaraswamy": 1.2,
    "truncated": 3.5,
    "torch_one_hot": 1,
    "one_hot": 0,
    "log_normal": -1.0,
    "mixture": math.nan,
    "sub_normal": math.nan,
    "sub_categorical": 3,
}


@ways
@names(OUTSIDE)
def test_what_lies_outside(name, way):
    spec = SPECS[name]
    parameters = drawn(spec, (4,))
    dist, terms = built(spec, parameters), terms_of(spec, parameters, way)
    action = torch.full_like(dist.sample(), OUTSIDE[name])
    assert not terms.contains(action).any()


@ways
@names(SPECS)
def test_neutral_action(name, way):
    """What rows that do not count are scored on: finite, with finite gradients."""
    spec = SPECS[name]
    parameters = drawn(spec, (4,))
    terms = terms_of(spec, parameters, way)
    dtype = built(spec, parameters).sample().dtype
    neutral = torch.as_tensor(terms.neutral()).to(dtype)
    action = neutral.expand(terms.batch_shape + terms.event_shape)
    found = terms.log_prob(action)
    assert found.isfinite().all()
    for gradient in torch.autograd.grad(found.sum(), list(parameters.values())):
        assert gradient.isfinite().all()


def test_sampled_entropy_of_a_discrete_head_has_its_gradient():
    """Without a closed form and without rsample: the gradient of H = −Σ p log p, estimated."""
    logits = torch.tensor([[0.5, -0.5, 0.2]], dtype=F64, requires_grad=True)
    dist = NoEntropyCategorical(logits=logits)
    found = from_distribution(dist).entropy(40_000)
    p = logits.softmax(-1)
    exact = -(p * p.log()).sum(-1)
    torch.testing.assert_close(found, exact, rtol=0, atol=0.02)
    (one,) = torch.autograd.grad(found.sum(), logits)
    (two,) = torch.autograd.grad(exact.sum(), logits)
    torch.testing.assert_close(one, two, rtol=0, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@names(["tanh", "tanh_floats", "tanh_tensors"])
def test_tanh_at_its_bounds(name, dtype):
    """Exactly at low and high: finite, and what the class itself stored."""
    spec = SPECS[name]
    kwargs = {k: v.to(dtype) if isinstance(v, torch.Tensor) else v for k, v in spec.kwargs.items()}
    parameters = {k: v.detach().to(dtype).requires_grad_() for k, v in drawn(spec, (2,)).items()}
    dist = spec.cls(**parameters, **kwargs)
    terms = from_parameters(spec.cls, {**parameters, **kwargs})
    for bound in (dist.low, dist.high):
        action = torch.zeros(2, N, dtype=dtype) + bound.to(dtype)
        found = terms.log_prob(action)
        assert found.isfinite().all()
        torch.testing.assert_close(found, dist.log_prob(action), rtol=1e-5, atol=1e-5)
        gradients = torch.autograd.grad(found.sum(), list(parameters.values()), retain_graph=True)
        assert all(g.isfinite().all() for g in gradients)
