import math

import pytest
import torch
import torch.distributions as D
from torchrl.modules.distributions import TanhNormal

import composite_losses.functional as F
from composite_losses.errors import ShapeError
from tests.reference import functional as oracle
from tests.tolerances import assert_close

F64 = torch.float64
NAN, INF = float("nan"), float("inf")
LOWEST = torch.finfo(F64).min


def f64(*numbers):
    return torch.tensor(numbers, dtype=F64)


def positive(*shape):
    return torch.rand(shape, dtype=F64) * 3 + 0.2


class TestAgainstTorch:
    """torch.distributions is the oracle of every family it has."""

    @pytest.mark.parametrize("dtype", [torch.float32, F64])
    def test_normal(self, dtype):
        loc, scale, value = (positive(4, 3).to(dtype) for _ in range(3))
        p, q = D.Normal(loc, scale), D.Normal(value, scale + 1)
        assert torch.equal(F.normal_log_prob(loc, scale, value), p.log_prob(value))
        assert_close(F.normal_entropy(scale), p.entropy())
        assert_close(F.normal_kl(loc, scale, value, scale + 1), D.kl_divergence(p, q))

    def test_categorical(self):
        logits, other = torch.randn(4, 3, dtype=F64), torch.randn(4, 3, dtype=F64)
        index = torch.tensor([0, 2, 1, 1])
        p, q = D.Categorical(logits=logits), D.Categorical(logits=other)
        assert_close(F.categorical_log_probs(logits), p.logits)
        assert_close(F.categorical_log_prob(logits, index), p.log_prob(index))
        assert_close(F.categorical_entropy(logits), p.entropy())
        assert_close(F.categorical_kl(logits, other), D.kl_divergence(p, q))

    def test_bernoulli(self):
        logits, other = 3 * torch.randn(20, dtype=F64), torch.randn(20, dtype=F64)
        value = (torch.rand(20) > 0.5).to(F64)
        p, q = D.Bernoulli(logits=logits), D.Bernoulli(logits=other)
        assert_close(F.bernoulli_log_prob(logits, value), p.log_prob(value))
        assert_close(F.bernoulli_log_prob(logits, value.bool()), p.log_prob(value))
        assert_close(F.bernoulli_entropy(logits), p.entropy())
        assert_close(F.bernoulli_kl(logits, other), D.kl_divergence(p, q))

    def test_beta(self):
        a, b, c, d = (positive(20) for _ in range(4))
        value = torch.rand(20, dtype=F64) * 0.9 + 0.05
        p, q = D.Beta(a, b), D.Beta(c, d)
        assert_close(F.beta_log_prob(a, b, value), p.log_prob(value))
        assert_close(F.beta_entropy(a, b), p.entropy())
        assert_close(F.beta_kl(a, b, c, d), D.kl_divergence(p, q))

    def test_gamma(self):
        a, b, c, d, value = (positive(20) for _ in range(5))
        p, q = D.Gamma(a, b), D.Gamma(c, d)
        assert_close(F.gamma_log_prob(a, b, value), p.log_prob(value))
        assert_close(F.gamma_entropy(a, b), p.entropy())
        assert_close(F.gamma_kl(a, b, c, d), D.kl_divergence(p, q))

    def test_dirichlet(self):
        a, b = positive(5, 3), positive(5, 3)
        value = torch.softmax(torch.randn(5, 3, dtype=F64), -1)
        p, q = D.Dirichlet(a), D.Dirichlet(b)
        assert_close(F.dirichlet_log_prob(a, value), p.log_prob(value))
        assert_close(F.dirichlet_entropy(a), p.entropy())
        assert_close(F.dirichlet_kl(a, b), D.kl_divergence(p, q))

    def test_of_itself_the_divergence_is_zero(self):
        a, b = positive(6), positive(6)
        zero = torch.zeros(6, dtype=F64)
        for kl in (F.normal_kl, F.beta_kl, F.gamma_kl):
            assert_close(kl(a, b, a, b), zero)
        assert_close(F.bernoulli_kl(a, a), zero)
        assert_close(F.categorical_kl(a, a), 0.0)
        assert_close(F.dirichlet_kl(a, a), 0.0)


class TestClosedForms:
    def test_normal(self):
        # log N(1; 0, 2) = -1/8 - log 2 - log(2 pi) / 2
        half_log = 0.5 * math.log(2 * math.pi)
        assert_close(F.normal_log_prob(f64(0), f64(2), f64(1)), [-0.125 - math.log(2) - half_log])
        assert_close(F.normal_entropy(f64(2)), [0.5 + half_log + math.log(2)])
        # (1/4 + 1/4 - 1 - log 1/4) / 2
        expected = (-0.5 + math.log(4)) / 2
        assert_close(F.normal_kl(f64(0), f64(1), f64(1), f64(2)), [expected])

    def test_categorical(self):
        logits = f64(math.log(1), math.log(2), math.log(1))  # 1/4, 1/2, 1/4
        assert_close(F.categorical_log_prob(logits, torch.tensor(1)), -math.log(2))
        assert_close(F.categorical_entropy(logits), 1.5 * math.log(2))
        # uniform q: log 3 - H
        expected = math.log(3) - 1.5 * math.log(2)
        assert_close(F.categorical_kl(logits, torch.zeros(3, dtype=F64)), expected)

    def test_bernoulli(self):
        logit = f64(math.log(3))  # p = 3/4
        assert_close(F.bernoulli_log_prob(logit, f64(1)), [math.log(0.75)])
        assert_close(F.bernoulli_log_prob(logit, f64(0)), [math.log(0.25)])
        entropy = -0.75 * math.log(0.75) - 0.25 * math.log(0.25)
        assert_close(F.bernoulli_entropy(logit), [entropy])
        assert_close(F.bernoulli_kl(logit, f64(0)), [math.log(2) - entropy])

    def test_beta_two_one_is_the_triangle(self):
        # density 2 x; H = -int 2x log 2x = 1/2 - log 2; KL to uniform = -H
        assert_close(F.beta_log_prob(f64(2), f64(1), f64(0.25)), [math.log(0.5)])
        assert_close(F.beta_log_prob(f64(1), f64(2), f64(0.25)), [math.log(1.5)])
        assert_close(F.beta_entropy(f64(2), f64(1)), [0.5 - math.log(2)])
        assert_close(F.beta_kl(f64(2), f64(1), f64(1), f64(1)), [math.log(2) - 0.5])

    def test_gamma_one_is_exponential(self):
        # density 2 exp(-2 x); H = 1 - log 2; KL to rate 1: log 2 + 1/2 - 1
        assert_close(F.gamma_log_prob(f64(1), f64(2), f64(3)), [math.log(2) - 6])
        assert_close(F.gamma_entropy(f64(1), f64(2)), [1 - math.log(2)])
        assert_close(F.gamma_kl(f64(1), f64(2), f64(1), f64(1)), [math.log(2) - 0.5])

    def test_dirichlet_ones_is_uniform(self):
        # density Gamma(3) = 2 on the simplex of three
        ones, value = torch.ones(3, dtype=F64), f64(0.2, 0.3, 0.5)
        assert_close(F.dirichlet_log_prob(ones, value), math.log(2))
        assert_close(F.dirichlet_entropy(ones), -math.log(2))

    def test_dirichlet_of_two_is_beta(self):
        a, b, c, d = (positive() for _ in range(4))
        p, q = torch.stack([a, b]), torch.stack([c, d])
        value = f64(0.3, 0.7)
        assert_close(F.dirichlet_log_prob(p, value), F.beta_log_prob(a, b, value[0]))
        assert_close(F.dirichlet_entropy(p), F.beta_entropy(a, b))
        assert_close(F.dirichlet_kl(p, q), F.beta_kl(a, b, c, d))


class TestForbiddenEntries:
    LOGITS = f64(0.3, -1.0, 0.5, 2.0)
    ALLOWED = torch.tensor([True, False, True, False])

    @pytest.mark.parametrize("garbage", [0.0, NAN, INF, -INF, 1e300])
    def test_by_mask(self, garbage):
        logits = torch.where(self.ALLOWED, self.LOGITS, garbage).requires_grad_()
        log_probs = F.categorical_log_probs(logits, self.ALLOWED)
        for index in (0, 2):
            expected = oracle.categorical_log_prob(logits.tolist(), index, self.ALLOWED.tolist())
            assert_close(log_probs[index], expected)
        assert log_probs[1].item() == log_probs[3].item() == LOWEST
        log_probs[0].backward()
        p2 = math.exp(log_probs[2].item())
        assert_close(logits.grad, [p2, 0.0, -p2, 0.0])  # d log p_0 = (1 - p_0, -p_2)

    def test_by_minus_infinity(self):
        logits = torch.where(self.ALLOWED, self.LOGITS, -INF).requires_grad_()
        log_probs = F.categorical_log_probs(logits)
        assert torch.equal(log_probs, F.categorical_log_probs(self.LOGITS, self.ALLOWED))
        log_probs.clamp_min(-10).sum().backward()
        assert logits.grad.isfinite().all()
        assert logits.grad[1].item() == logits.grad[3].item() == 0

    def test_chosen_though_forbidden(self):
        logits = self.LOGITS.clone().requires_grad_()
        log_prob = F.categorical_log_prob(logits, torch.tensor(1), self.ALLOWED)
        log_prob.backward()
        assert log_prob.item() == LOWEST
        assert_close(logits.grad, [0.0] * 4)

    def test_entropy_of_two_among_four(self):
        logits = torch.zeros(4, dtype=F64, requires_grad=True)
        entropy = F.categorical_entropy(logits, self.ALLOWED)
        assert_close(entropy, math.log(2))
        entropy.backward()
        assert_close(logits.grad, [0.0] * 4)

    def test_entropy_gradient(self):
        # dH / dlogit_j = -p_j (log p_j + H)
        logits = self.LOGITS.clone().requires_grad_()
        F.categorical_entropy(logits, self.ALLOWED).backward()
        log_p = torch.log_softmax(self.LOGITS[self.ALLOWED], 0)
        entropy = -(log_p.exp() * log_p).sum()
        expected = torch.zeros(4, dtype=F64)
        expected[self.ALLOWED] = -log_p.exp() * (log_p + entropy)
        assert_close(logits.grad, expected)

    def test_divergence_over_allowed_entries(self):
        other = f64(1.0, 5.0, -1.0, NAN).requires_grad_()
        logits = self.LOGITS.clone().requires_grad_()
        kl = F.categorical_kl(logits, other, self.ALLOWED, self.ALLOWED)
        p, q = (D.Categorical(logits=x[self.ALLOWED]) for x in (logits, other))
        assert_close(kl, D.kl_divergence(p, q))
        kl.backward()
        for x in (logits, other):
            assert x.grad.isfinite().all() and x.grad[1].item() == x.grad[3].item() == 0

    def test_divergence_from_what_is_forbidden_is_huge_and_finite(self):
        logits = self.LOGITS.clone().requires_grad_()
        kl = F.categorical_kl(logits, logits, None, self.ALLOWED)
        kl.backward()
        assert kl.isfinite() and kl > 1e300
        assert logits.grad.isfinite().all()

    @pytest.mark.parametrize("dtype", [torch.float32, F64])
    @pytest.mark.parametrize("logit", [0.0, -INF, NAN])
    def test_nothing_allowed(self, logit, dtype):
        # A NaN logit is forbidden by the mask only: without a mask it must show, see below.
        allowed = None if logit == -INF else torch.zeros(2, 3, dtype=torch.bool)
        logits = torch.full((2, 3), logit, dtype=dtype, requires_grad=True)
        log_probs = F.categorical_log_probs(logits, allowed)
        assert (log_probs == torch.finfo(dtype).min).all()
        entropy = F.categorical_entropy(logits, allowed)
        kl = F.categorical_kl(logits, logits, allowed, allowed)
        index = torch.zeros(2, dtype=torch.long)
        log_prob = F.categorical_log_prob(logits, index, allowed)
        assert torch.equal(entropy, torch.zeros(2, dtype=dtype))
        assert torch.equal(kl, torch.zeros(2, dtype=dtype))
        (entropy + kl + log_prob * 1e-300).sum().backward()
        assert torch.equal(logits.grad, torch.zeros(2, 3, dtype=dtype))

    def test_nan_logits_show(self):
        assert F.categorical_log_probs(f64(0.0, NAN, 1.0)).isnan().all()
        assert F.categorical_entropy(f64(0.0, NAN, 1.0)).isnan()

    def test_rejects_other_shapes(self):
        logits = torch.zeros(2, 3)
        with pytest.raises(ShapeError, match="allowed"):
            F.categorical_log_probs(logits, torch.ones(3, dtype=torch.bool))
        with pytest.raises(ShapeError, match="index"):
            F.categorical_log_prob(logits, torch.zeros(2, 1, dtype=torch.long))
        with pytest.raises(ShapeError, match="logits_q"):
            F.categorical_kl(logits, torch.zeros(3))


@pytest.mark.parametrize("logit", [-1000.0, -80.0, 80.0, 1000.0])
def test_bernoulli_with_large_logits(logit):
    x = torch.tensor([logit], requires_grad=True)
    right, wrong = torch.tensor([float(logit > 0)]), torch.tensor([float(logit < 0)])
    # log p of the likely outcome -> 0, of the other -|x|
    assert_close(F.bernoulli_log_prob(x, right), [0.0])
    assert_close(F.bernoulli_log_prob(x, wrong), [-abs(logit)])
    assert_close(F.bernoulli_entropy(x), [0.0])
    assert_close(F.bernoulli_kl(x, x.detach()), [0.0])
    assert_close(F.bernoulli_kl(x, -x.detach()), [abs(logit)])
    total = F.bernoulli_log_prob(x, right) + F.bernoulli_entropy(x) + F.bernoulli_kl(x, -x.detach())
    total.sum().backward()
    assert x.grad.isfinite().all()


def test_bernoulli_entropy_has_no_cancellation():
    # p = e^-30 / (1 + e^-30): H = p (30 + 1) + O(p^2); 1 - p rounds to 1 in float32.
    p = math.exp(-30)
    actual = F.bernoulli_entropy(torch.tensor([30.0, -30.0])).tolist()
    assert actual == pytest.approx([31 * p, 31 * p], rel=1e-5)


class TestTanhNormal:
    @pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (-2.0, 0.5), (0.0, 10.0)])
    @pytest.mark.parametrize("as_tensor", [False, True])
    def test_log_prob_equals_torchrl(self, low, high, as_tensor):
        bounds = (f64(low, low), f64(high, high))
        loc, scale = torch.randn(30, 2, dtype=F64), positive(30, 2)
        # Always tensors for torchrl: it turns floats into float32, which costs it eight digits.
        reference = TanhNormal(loc, scale, low=bounds[0], high=bounds[1], event_dims=0)
        bounds = bounds if as_tensor else (low, high)
        inner = low + (high - low) * torch.rand(28, 2, dtype=F64)
        value = torch.cat([inner, torch.full((1, 2), low), torch.full((1, 2), high)]).to(F64)
        actual = F.tanh_normal_log_prob(loc, scale, *bounds, value)
        torch.testing.assert_close(actual, reference.log_prob(value), rtol=1e-12, atol=1e-12)

    def test_log_prob_closed_form(self):
        # y = tanh(1/2) = x: log N(1/2; 0, 1) - log(1 - y^2) - log((3 - -1) / 2)
        y = math.tanh(0.5)
        expected = math.log(oracle.normal_density(0.5, 0, 1)) - math.log(1 - y * y) - math.log(2)
        actual = F.tanh_normal_log_prob(f64(0), f64(1), -1.0, 3.0, f64(1 + 2 * y))
        assert_close(actual, [expected])

    def test_density_integrates_to_one(self):
        def density(value):
            x = torch.tensor(value, dtype=F64)
            return F.tanh_normal_log_prob(f64(0.3)[0], f64(0.6)[0], -2.0, 1.0, x).exp().item()

        assert abs(oracle.integral(density, -2.0, 1.0, steps=400) - 1) < 1e-6

    @pytest.mark.parametrize("dtype", [torch.float32, F64])
    @pytest.mark.parametrize("value", [-2.0, 1.0])
    def test_finite_at_a_bound(self, value, dtype):
        parameters = [torch.tensor([x], dtype=dtype, requires_grad=True) for x in (0.3, 0.5, value)]
        loc, scale, action = parameters
        log_prob = F.tanh_normal_log_prob(loc, scale, -2.0, 1.0, action)
        log_prob.sum().backward()
        assert log_prob.isfinite().all()
        assert all(p.grad.isfinite().all() for p in parameters)

    @pytest.mark.parametrize(
        ("scale", "expected"), [(1.0, 0.66980), (0.5, 0.49997), (0.1, -0.89360)]
    )
    def test_entropy_known_values(self, scale, expected):
        actual = F.tanh_normal_entropy(f64(0), f64(scale), -1.0, 1.0).item()
        assert abs(actual - expected) < 1e-5

    @pytest.mark.parametrize("loc", [0.0, -0.4, 1.0, 3.0, 10.0])
    @pytest.mark.parametrize("scale", [0.001, 0.05, 0.5, 1.0, 2.0, 5.0, 30.0])
    def test_entropy_equals_the_integral(self, loc, scale):
        expected = oracle.tanh_normal_entropy(loc, scale, -1.0, 1.0)
        actual = F.tanh_normal_entropy(f64(loc), f64(scale), -1.0, 1.0).item()
        assert abs(actual - expected) < 2e-6

    def test_entropy_gradient(self):
        # Central differences of the integral.
        loc, scale, step = 0.7, 0.9, 1e-3
        x = [f64(loc).requires_grad_(), f64(scale).requires_grad_()]
        F.tanh_normal_entropy(*x, -1.0, 1.0).sum().backward()
        up, down = (oracle.tanh_normal_entropy(loc + d, scale, -1, 1) for d in (step, -step))
        assert abs(x[0].grad.item() - (up - down) / (2 * step)) < 1e-4
        up, down = (oracle.tanh_normal_entropy(loc, scale + d, -1, 1) for d in (step, -step))
        assert abs(x[1].grad.item() - (up - down) / (2 * step)) < 1e-4

    @pytest.mark.parametrize("bounds", [(-3.0, 1.0), (f64(-3.0), f64(1.0))])
    def test_entropy_grows_with_the_width(self, bounds):
        narrow = F.tanh_normal_entropy(f64(0.4), f64(0.8), -1.0, 1.0)
        wide = F.tanh_normal_entropy(f64(0.4), f64(0.8), *bounds)
        assert_close(wide - narrow, [math.log(2)])  # width 4 instead of 2

    def test_entropy_broadcasts_and_keeps_float32(self):
        entropy = F.tanh_normal_entropy(torch.zeros(4, 1), torch.ones(3), -1.0, 1.0)
        assert entropy.shape == (4, 3) and entropy.dtype == torch.float32
        assert ((entropy - 0.66980).abs() < 1e-5).all()

    @pytest.mark.parametrize("scale", [1e-6, 1e6])
    @pytest.mark.parametrize("loc", [0.0, 1e4])
    def test_entropy_is_finite(self, loc, scale):
        x = [torch.tensor([loc], requires_grad=True), torch.tensor([scale], requires_grad=True)]
        entropy = F.tanh_normal_entropy(*x, -1.0, 1.0)
        entropy.sum().backward()
        assert entropy.isfinite().all() and all(p.grad.isfinite().all() for p in x)


class TestBoundedLogProbs:
    """As log_softmax where an entry is allowed; what weighs nothing is finite."""

    LOGITS = f64(0.3, -INF, 2.0, -1.0)
    ALLOWED = torch.tensor([True, True, True, False])

    def test_unnormalised_logits_are_what_is_expected(self):
        logits = torch.randn(3, 4, dtype=F64)
        assert_close(F.bounded_log_probs(logits), logits.log_softmax(-1))

    def test_normalised_ones_are_kept(self):
        log_probs = torch.randn(3, 4, dtype=F64).log_softmax(-1)
        assert torch.equal(F.bounded_log_probs(log_probs, normalised=True), log_probs)

    def test_forbidden_entries(self):
        found = F.bounded_log_probs(self.LOGITS, self.ALLOWED)
        assert_close(found[[0, 2]], f64(0.3, 2.0).log_softmax(-1))
        floor = -math.sqrt(torch.finfo(F64).max)
        torch.testing.assert_close(found[[1, 3]], f64(floor, floor))
        assert torch.equal(found.exp()[[1, 3]], f64(0, 0))

    @pytest.mark.parametrize("dim", [0, 1, -1])
    def test_along_a_dim(self, dim):
        logits = torch.randn(4, 5, dtype=F64)
        assert_close(F.bounded_log_probs(logits, dim=dim), logits.log_softmax(dim))
