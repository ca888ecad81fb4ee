import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composite_losses.errors import ConfigError, ShapeError
from composite_losses.functional import baseline, reward_to_go
from tests.reference import functional as oracle
from tests.tolerances import assert_close

F64 = torch.float64
NAN, INF = float("nan"), float("inf")


def flags(bits):
    return torch.tensor(list(bits), dtype=torch.bool)


class TestRewardToGo:
    def test_closed_form(self):
        # gamma 1/2, the first trajectory ends at the third step:
        # 3; 2 + 3/2; 1 + 3.5/2; then 5 and 4 + 5/2.
        reward = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], dtype=F64)
        actual = reward_to_go(reward, flags([0, 0, 1, 0, 0]), 0.5)
        assert_close(actual, [2.75, 3.5, 3.0, 6.5, 5.0])

    @given(
        st.lists(
            st.tuples(st.floats(-9, 9), st.booleans(), st.booleans()), min_size=1, max_size=12
        ),
        st.sampled_from([0.0, 0.9, 1.0]),
    )
    def test_equals_the_loop(self, steps, gamma):
        rewards, dones, valid = zip(*steps, strict=True)
        actual = reward_to_go(
            torch.tensor(rewards, dtype=F64), flags(dones), gamma, mask=flags(valid)
        )
        assert_close(actual, oracle.reward_to_go(rewards, dones, gamma, valid))

    @pytest.mark.parametrize("poison", [NAN, INF, -INF])
    def test_padding_cuts_the_return(self, poison):
        reward = torch.tensor([1.0, 2.0, poison, 4.0], dtype=F64, requires_grad=True)
        actual = reward_to_go(reward, flags([0, 0, 0, 0]), 0.5, mask=flags([1, 1, 0, 1]))
        assert_close(actual, [2.0, 2.0, 0.0, 4.0])  # 1 + 2/2; 2; padding; 4
        actual.sum().backward()
        assert_close(reward.grad, [1.0, 1.5, 0.0, 1.0])  # r_1 counts in R_0 by 1/2 and in R_1

    @pytest.mark.parametrize("dim", [0, 1, -2, -1])
    def test_any_time_dim(self, dim):
        reward, done = torch.randn(4, 5, 3, dtype=F64), torch.rand(4, 5, 3) > 0.7
        actual = reward_to_go(reward, done, 0.9, dim=dim)
        rows = actual.movedim(dim, -1).reshape(-1, actual.shape[dim])
        reward, done = reward.movedim(dim, -1).flatten(0, 1), done.movedim(dim, -1).flatten(0, 1)
        for row, r, d in zip(rows, reward, done, strict=True):
            assert_close(row, oracle.reward_to_go(r.tolist(), d.tolist(), 0.9, [True] * len(r)))

    def test_mask_without_the_last_dim(self):
        reward, mask = torch.randn(2, 4, 1, dtype=F64), flags([1, 1, 1, 0]).expand(2, 4)
        done = torch.zeros(2, 4, 1, dtype=torch.bool)
        actual = reward_to_go(reward, done, 0.9, dim=-2, mask=mask)
        assert_close(actual[:, :3], reward_to_go(reward[:, :3], done[:, :3], 0.9, dim=-2))

    def test_nothing_valid(self):
        reward = torch.full((3,), NAN, requires_grad=True)
        actual = reward_to_go(reward, flags([0, 0, 0]), 0.9, mask=flags([0, 0, 0]))
        actual.sum().backward()
        assert torch.equal(actual, torch.zeros(3))
        assert torch.equal(reward.grad, torch.zeros(3))

    def test_tensor_gamma(self):
        actual = reward_to_go(torch.ones(3, dtype=F64), flags([0, 0, 0]), torch.tensor(0.5))
        assert_close(actual, [1.75, 1.5, 1.0])

    def test_rejects_different_shapes(self):
        with pytest.raises(ShapeError, match=r"reward \[3\], done \[3, 1\]"):
            reward_to_go(torch.ones(3), torch.zeros(3, 1, dtype=torch.bool), 0.9)


class TestBaseline:
    RETURNS = torch.tensor([[1.0, 2.0], [3.0, 6.0], [8.0, 7.0]], dtype=F64)

    @pytest.mark.parametrize(
        ("kind", "expected"),
        [
            ("none", [[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]),
            ("mean", [[4.5, 4.5], [4.5, 4.5], [4.5, 4.5]]),  # 27 / 6
            ("leave_one_out", [[5.5, 6.5], [4.5, 4.5], [2.0, 4.0]]),  # (3 + 8) / 2, ...
        ],
    )
    def test_kinds(self, kind, expected):
        assert_close(baseline(self.RETURNS, kind), expected)

    @pytest.mark.parametrize("poison", [0.0, NAN, INF])
    @pytest.mark.parametrize(
        ("kind", "expected"),
        [
            ("none", [[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]),
            ("mean", [[14 / 3] * 2] * 3),  # (3 + 8 + 3) / 3 with returns 3, 8 and 3
            # First step: 3 and 8 are valid. Second step: only the first trajectory is.
            ("leave_one_out", [[5.5, 0.0], [8.0, 3.0], [3.0, 3.0]]),
        ],
    )
    def test_masked_returns_leave_no_trace(self, kind, expected, poison):
        mask = torch.tensor([[False, True], [True, False], [True, False]])
        returns = torch.tensor([[poison, 3.0], [3.0, poison], [8.0, poison]], dtype=F64)
        assert_close(baseline(returns, kind, mask), expected)

    def test_equals_the_loop(self):
        returns, mask = torch.randn(4, 6, dtype=F64), torch.rand(4, 6) > 0.4
        expected = oracle.leave_one_out(returns.tolist(), mask.tolist())
        assert_close(baseline(returns, "leave_one_out", mask), expected)
        transposed = baseline(returns.T, "leave_one_out", mask.T, dim=0, batch_dim=1)
        assert_close(transposed.T, expected)
        agents = torch.stack([returns, 2 * returns], 2)
        separate = baseline(agents, "leave_one_out", mask, dim=1)
        assert_close(separate[..., 1], 2 * torch.tensor(expected, dtype=F64))

    @pytest.mark.parametrize("shape", [(1, 3), (3,)])
    def test_no_other_trajectory_is_zero(self, shape):
        returns = torch.randn(shape)
        assert torch.equal(baseline(returns, "leave_one_out"), torch.zeros(shape))

    @pytest.mark.parametrize("kind", ["none", "mean", "leave_one_out"])
    def test_nothing_valid_is_zero(self, kind):
        returns, mask = torch.full((2, 3), NAN), torch.zeros(2, 3, dtype=torch.bool)
        assert torch.equal(baseline(returns, kind, mask), torch.zeros(2, 3))

    def test_rejects_an_unknown_kind(self):
        with pytest.raises(ConfigError, match="'median'"):
            baseline(self.RETURNS, "median")

    def test_rejects_a_mask_of_another_shape(self):
        with pytest.raises(ShapeError):
            baseline(self.RETURNS, "mean", torch.ones(2, 3, dtype=torch.bool))
