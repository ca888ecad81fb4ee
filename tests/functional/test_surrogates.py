import math

import pytest
import torch

from composite_losses.errors import ShapeError
from composite_losses.functional import clipped, leafwise, mixed, per_head, score, unclipped
from tests.reference import functional as oracle
from tests.tolerances import assert_close

F64 = torch.float64
NAN, INF = float("nan"), float("inf")
EXTREMES = [-1000.0, -200.0, -90.0, 0.0, 90.0, 200.0, 1000.0]


def logs(*ratios):
    return torch.tensor(ratios, dtype=F64).log().requires_grad_()


def f64(*numbers):
    return torch.tensor(numbers, dtype=F64)


def torchrl_clipped(log_ratio, advantage, low, high):
    """What ClipPPOLoss of torchrl 0.14 computes, in its own order."""
    gain1 = log_ratio.exp() * advantage
    bounds = (-torch.tensor(low)).log1p(), torch.tensor(high).log1p()
    gain2 = log_ratio.clamp(*bounds).exp() * advantage
    return torch.stack([gain1, gain2], -1).min(dim=-1).values


class TestScore:
    def test_value_and_gradient(self):
        log_prob = f64(-1.0, -2.0).requires_grad_()
        objective = score(log_prob, f64(3.0, -4.0))
        assert_close(objective, [-3.0, 8.0])
        objective.sum().backward()
        assert_close(log_prob.grad, [3.0, -4.0])

    def test_rejects_different_shapes(self):
        with pytest.raises(ShapeError, match=r"log_prob \[3\], advantage \[3, 1\]"):
            score(torch.zeros(3), torch.zeros(3, 1))


class TestUnclipped:
    def test_value_and_gradient(self):
        log_ratio = logs(1.5, 0.5)
        objective = unclipped(log_ratio, f64(2.0, -4.0))
        assert_close(objective, [3.0, -2.0])
        objective.sum().backward()
        assert_close(log_ratio.grad, [3.0, -2.0])  # d r / d log r = r

    def test_correction_multiplies(self):
        correction = logs(2.0, 0.5).detach()
        assert_close(unclipped(logs(1.5, 0.5), f64(2.0, -4.0), correction), [6.0, -1.0])

    def test_rejects_different_shapes(self):
        with pytest.raises(ShapeError, match=r"advantage \[3, 1\]"):
            unclipped(torch.zeros(3), torch.zeros(3, 1))
        with pytest.raises(ShapeError, match="log_correction"):
            unclipped(torch.zeros(3), torch.zeros(3), torch.zeros(1))


class TestClipped:
    @pytest.mark.parametrize(
        ("ratio", "advantage", "objective", "slope"),
        [
            # eps (0.2, 0.3); slope d objective / d log r = r A where it moves
            (1.1, 2.0, 2.2, 2.2),
            (1.5, 2.0, 2.6, 0.0),  # 1.3 * 2
            (0.5, 2.0, 1.0, 1.0),
            (1.5, -2.0, -3.0, -3.0),
            (0.5, -2.0, -1.6, 0.0),  # 0.8 * -2
            (0.9, -2.0, -1.8, -1.8),
            (1.5, 0.0, 0.0, 0.0),
        ],
    )
    def test_closed_form(self, ratio, advantage, objective, slope):
        log_ratio = logs(ratio)
        actual = clipped(log_ratio, f64(advantage), 0.2, 0.3)
        assert_close(actual, [objective])
        actual.sum().backward()
        assert_close(log_ratio.grad, [slope])

    @pytest.mark.parametrize(
        ("ratio", "advantage", "objective", "slope"),
        [
            (5.0, -2.0, -6.0, 0.0),  # max(-10, 3 * -2)
            (2.0, -2.0, -4.0, -4.0),
            (5.0, 2.0, 2.4, 0.0),  # A > 0: max(2.4, 6) would be wrong
            (0.5, 2.0, 1.0, 1.0),
            (5.0, 0.0, 0.0, 0.0),
        ],
    )
    @pytest.mark.parametrize("dual", [3.0, torch.tensor(3.0)])
    def test_dual_clip(self, ratio, advantage, objective, slope, dual):
        log_ratio = logs(ratio)
        actual = clipped(log_ratio, f64(advantage), 0.2, 0.2, dual_clip=dual)
        assert_close(actual, [objective])
        actual.sum().backward()
        assert_close(log_ratio.grad, [slope])

    @pytest.mark.parametrize("dual", [None, 1.5])
    def test_equals_the_loop(self, dual):
        log_ratio, advantage = torch.randn(50, dtype=F64), torch.randn(50, dtype=F64)
        pairs = zip(log_ratio.exp().tolist(), advantage.tolist(), strict=True)
        expected = [oracle.clipped(r, a, 0.1, 0.4, dual) for r, a in pairs]
        assert_close(clipped(log_ratio, advantage, 0.1, 0.4, dual_clip=dual), expected)

    def test_correction_acts_after_clipping(self):
        log_ratio, advantage = torch.randn(50, dtype=F64), torch.randn(50, dtype=F64)
        correction = torch.randn(50, dtype=F64)
        triples = zip(
            *(x.tolist() for x in (log_ratio.exp(), correction.exp(), advantage)), strict=True
        )
        expected = [oracle.corrected_clipped(r, c, a, 0.1, 0.4) for r, c, a in triples]
        assert_close(clipped(log_ratio, advantage, 0.1, 0.4, log_correction=correction), expected)

    @pytest.mark.parametrize("as_tensor", [False, True])
    def test_same_bits_as_torchrl(self, as_tensor):
        advantage = torch.randn(1000)
        ours = (0.3 * torch.randn(1000)).requires_grad_()
        theirs = ours.detach().clone().requires_grad_()
        eps = (torch.tensor(0.2), torch.tensor(0.3)) if as_tensor else (0.2, 0.3)
        objective = clipped(ours, advantage, *eps)
        expected = torchrl_clipped(theirs, advantage, 0.2, 0.3)
        assert torch.equal(objective, expected)
        objective.sum().backward()
        expected.sum().backward()
        assert torch.equal(ours.grad, theirs.grad)

    @pytest.mark.parametrize("dtype", [torch.float32, F64])
    @pytest.mark.parametrize("advantage", [-2.0, 0.0, 2.0])
    @pytest.mark.parametrize("correction", [None, -1000.0, 200.0, 1000.0])
    @pytest.mark.parametrize("dual", [None, 3.0])
    def test_extreme_ratios(self, dtype, advantage, correction, dual):
        log_ratio = torch.tensor(EXTREMES, dtype=dtype, requires_grad=True)
        log_correction = None if correction is None else torch.full((7,), correction, dtype=dtype)
        objective = clipped(
            log_ratio,
            torch.full((7,), advantage, dtype=dtype),
            0.2,
            0.2,
            dual_clip=dual,
            log_correction=log_correction,
        )
        objective.sum().backward()
        assert objective.isfinite().all()
        assert log_ratio.grad.isfinite().all()

    def test_extreme_ratios_take_the_clipped_branch(self):
        log_ratio = torch.tensor([200.0, -200.0], requires_grad=True)
        objective = clipped(log_ratio, torch.tensor([1.0, -1.0]), 0.2, 0.2)
        assert_close(objective, [1.2, -0.8])
        objective.sum().backward()
        assert torch.equal(log_ratio.grad, torch.zeros(2))

    def test_no_upper_bound(self):
        assert_close(clipped(logs(50.0), f64(2.0), 0.2, INF), [100.0])
        assert clipped(f64(1000.0), f64(0.0), 0.2, INF).item() == 0

    def test_rejects_different_shapes(self):
        with pytest.raises(ShapeError, match=r"log_ratio \[3\], advantage \[3, 1\]"):
            clipped(torch.zeros(3), torch.zeros(3, 1), 0.2, 0.2)
        with pytest.raises(ShapeError, match="log_correction"):
            clipped(torch.zeros(3), torch.zeros(3), 0.2, 0.2, log_correction=torch.zeros(1))


class TestPerHead:
    def test_closed_form(self):
        # A = 1, eps 0.2: 1.5 -> 1.2 (held), 0.5 stays; A = -1: -1.5, -0.8 (held)
        log_ratio = torch.stack([logs(1.5, 0.5), logs(1.5, 0.5)]).detach().requires_grad_()
        objective = per_head(log_ratio, f64(1.0, -1.0), 0.2, 0.2)
        assert_close(objective, [1.7, -2.3])
        objective.sum().backward()
        assert_close(log_ratio.grad, [[0.0, 0.5], [-1.5, 0.0]])

    @pytest.mark.parametrize("own_advantage", [False, True])
    def test_equals_the_loop(self, own_advantage):
        log_ratio, active = torch.randn(20, 3, dtype=F64), torch.rand(20, 3) > 0.3
        advantage = torch.randn((20, 3) if own_advantage else (20,), dtype=F64)
        low, high, weights = f64(0.1, 0.2, 0.3), f64(0.3, 0.2, 0.1), f64(1.0, 0.5, 2.0)
        options = low.tolist(), high.tolist(), weights.tolist()
        expected = [
            oracle.per_head(r, a if own_advantage else [a] * 3, *options, ok)
            for r, a, ok in zip(
                log_ratio.exp().tolist(), advantage.tolist(), active.tolist(), strict=True
            )
        ]
        actual = per_head(log_ratio, advantage, low, high, weights=weights, active=active)
        assert_close(actual, expected)

    def test_gradient_at_one_equals_the_joint(self):
        separate, together = (torch.zeros(4, 3, dtype=F64, requires_grad=True) for _ in range(2))
        advantage = torch.randn(4, dtype=F64)
        per_head(separate, advantage, 0.2, 0.2).sum().backward()
        clipped(together.sum(-1), advantage, 0.2, 0.2).sum().backward()
        assert_close(separate.grad, together.grad)

    @pytest.mark.parametrize("poison", [0.0, NAN, INF, -INF])
    def test_inactive_heads_contribute_nothing(self, poison):
        active = torch.tensor([[True, False], [False, False]])
        log_ratio = torch.where(active, f64(math.log(1.1)), poison).requires_grad_()
        advantage = torch.where(active, f64(2.0), poison)
        correction = torch.where(active, f64(0.0), poison)
        objective = per_head(
            log_ratio, advantage, 0.2, 0.2, active=active, dual_clip=3.0, log_correction=correction
        )
        assert_close(objective, [2.2, 0.0])
        objective.sum().backward()
        assert_close(log_ratio.grad, [[2.2, 0.0], [0.0, 0.0]])

    def test_dual_clip_acts_on_each_head(self):
        log_ratio = logs(5.0, 2.0).detach().expand(1, 2)
        assert_close(per_head(log_ratio, f64(-2.0), 0.2, 0.2, dual_clip=3.0), [-10.0])  # -6 - 4

    def test_correction_acts_on_each_head(self):
        log_ratio, correction = logs(1.5, 0.9).detach()[None], logs(2.0, 3.0).detach()[None]
        actual = per_head(log_ratio, f64(1.0), 0.2, 0.2, log_correction=correction)
        assert_close(actual, [5.1])  # 1.2 * 2 + 0.9 * 3

    @pytest.mark.parametrize("advantage", [(3,), (3, 1), (2, 3), (1,)])
    def test_rejects_other_advantages(self, advantage):
        with pytest.raises(ShapeError):
            per_head(
                torch.zeros(3, 2) if advantage == (3, 1) else torch.zeros(4, 2),
                torch.zeros(advantage),
                0.2,
                0.2,
            )

    @pytest.mark.parametrize(
        "options",
        [
            {"weights": torch.ones(3)},
            {"active": torch.ones(3, dtype=torch.bool)},
            {"log_correction": torch.zeros(3)},
        ],
    )
    def test_rejects_other_options(self, options):
        with pytest.raises(ShapeError):
            per_head(torch.zeros(3, 2), torch.zeros(3), 0.2, 0.2, **options)


class TestLeafwise:
    def test_closed_form(self):
        # 1.5 * 0.9 = 1.35, clamped first 1.2 * 0.9 = 1.08
        log_ratio = logs(1.5, 0.9).detach().expand(2, 2).clone().requires_grad_()
        objective = leafwise(log_ratio, f64(1.0, -1.0), 0.2, 0.2)
        assert_close(objective, [1.08, -1.35])
        objective.sum().backward()
        assert_close(log_ratio.grad, [[0.0, 1.08], [-1.35, -1.35]])

    def test_equals_the_loop(self):
        log_ratio, advantage = torch.randn(20, 3, dtype=F64), torch.randn(20, dtype=F64)
        low, high = f64(0.1, 0.2, 0.3), f64(0.3, 0.2, 0.1)
        expected = [
            oracle.leafwise(r, a, low.tolist(), high.tolist())
            for r, a in zip(log_ratio.exp().tolist(), advantage.tolist(), strict=True)
        ]
        assert_close(leafwise(log_ratio, advantage, low, high), expected)

    def test_dual_clip_and_correction(self):
        log_ratio = logs(1.5, 0.9).detach().expand(2, 2)
        correction = logs(2.0, 4.0).detach()
        actual = leafwise(
            log_ratio, f64(1.0, -1.0), 0.2, 0.2, dual_clip=3.0, log_correction=correction
        )
        assert_close(actual, [2.16, -3.0])  # 1.08 * 2; max(-1.35 * 4, -3)

    @pytest.mark.parametrize("advantage", [-2.0, 0.0, 2.0])
    def test_extreme_ratios(self, advantage):
        log_ratio = torch.tensor(EXTREMES).expand(7, 7).clone()
        log_ratio = torch.stack([log_ratio, log_ratio.T], -1).requires_grad_()
        objective = leafwise(log_ratio, torch.full((7, 7), advantage), 0.2, 0.2)
        objective.sum().backward()
        assert objective.isfinite().all()
        assert log_ratio.grad.isfinite().all()

    def test_rejects_other_shapes(self):
        with pytest.raises(ShapeError):
            leafwise(torch.zeros(3, 2), torch.zeros(3, 2), 0.2, 0.2)
        with pytest.raises(ShapeError):
            leafwise(torch.zeros(3, 2), torch.zeros(3), 0.2, 0.2, log_correction=torch.zeros(3, 2))


class TestMixed:
    ARGUMENTS = (0.2, 0.3)

    @pytest.mark.parametrize("mix", [0.0, 0.25, 1.0, torch.tensor(0.25, dtype=F64)])
    def test_is_the_weighted_mean(self, mix):
        log_ratio, advantage = torch.randn(20, 3, dtype=F64), torch.randn(20, dtype=F64)
        correction, weights = torch.randn(20, 3, dtype=F64), f64(1.0, 0.5, 2.0)
        actual = mixed(
            log_ratio,
            advantage,
            *self.ARGUMENTS,
            mix=mix,
            weights=weights,
            dual_clip=3.0,
            log_correction=correction,
        )
        joint = clipped(
            log_ratio.sum(-1),
            advantage,
            *self.ARGUMENTS,
            dual_clip=3.0,
            log_correction=correction.sum(-1),
        )
        separate = per_head(
            log_ratio,
            advantage,
            *self.ARGUMENTS,
            weights=weights,
            dual_clip=3.0,
            log_correction=correction,
        )
        assert_close(actual, mix * joint + (1 - mix) * separate)

    def test_closed_form(self):
        # joint 1.5 * 0.9 = 1.35 -> 1.2; per head 1.2 + 0.9; half of each
        log_ratio = logs(1.5, 0.9)
        objective = mixed(log_ratio[None], f64(1.0), 0.2, 0.2)
        assert_close(objective, [1.65])
        objective.sum().backward()
        assert_close(log_ratio.grad, [0.0, 0.45])

    @pytest.mark.parametrize("poison", [0.0, NAN, INF, -INF])
    def test_inactive_heads(self, poison):
        # One head left: joint and per-head agree. None left: joint factor 1, per-head 0.
        active = torch.tensor([[True, False], [False, False]])
        log_ratio = torch.where(active, f64(math.log(1.1)), poison).requires_grad_()
        correction = torch.where(active, f64(math.log(2.0)), poison)
        objective = mixed(
            log_ratio, f64(2.0, 2.0), 0.2, 0.2, active=active, log_correction=correction
        )
        assert_close(objective, [4.4, 1.0])  # 1.1 * 2 * 2; (1 * 2 + 0) / 2
        objective.sum().backward()
        assert_close(log_ratio.grad, [[4.4, 0.0], [0.0, 0.0]])

    @pytest.mark.parametrize("name", ["eps_low", "eps_high", "mix"])
    def test_rejects_an_option_per_head(self, name):
        options = {"eps_low": 0.2, "eps_high": 0.2, name: torch.full((2,), 0.2)}
        with pytest.raises(ShapeError, match=f"{name} must be 0-dim"):
            mixed(torch.zeros(2, 2), torch.zeros(2), **options)

    def test_rejects_other_shapes(self):
        with pytest.raises(ShapeError):
            mixed(torch.zeros(3, 2), torch.zeros(3, 2), 0.2, 0.2)
        with pytest.raises(ShapeError):
            mixed(torch.zeros(3, 2), torch.zeros(3), 0.2, 0.2, log_correction=torch.zeros(3))
