"""The four ratio geometries, on numbers worked out by hand.

Every head chooses one of two with probability 1/2 each, so a stored log-prob of log(1/2) − log r
makes its ratio r. P(r, A) = min(r A, C(r) A), C clips to [0.8, 1.2] unless a row says otherwise.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    CompositeDistribution,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import Tensor, nn
from torch.distributions import Categorical
from torchrl.objectives import LossModule, SoftUpdate

import composite_losses as cl
from composite_losses.errors import ConfigError, MissingKeyError
from tests.tolerances import assert_close

Ratios = Mapping[str, Sequence[float]]  # head -> its ratio in every row
UP, DOWN = math.exp(0.3), math.exp(-0.3)  # 1.3498588, 0.7408182
GEOMETRIES = ["joint", "per_head", "leafwise", "mixed"]


class Logits(nn.Module):
    """Two logits per head, whatever is observed."""

    def __init__(self, heads: Sequence[str]) -> None:
        super().__init__()
        self.heads = nn.ParameterList([nn.Parameter(torch.zeros(2)) for _ in heads])

    def forward(self, obs: Tensor) -> tuple[Tensor, ...]:
        return tuple(head.expand(*obs.shape[:-1], 2) for head in self.heads)


def make_actor(heads: Sequence[str]) -> ProbabilisticTensorDictSequential:
    return ProbabilisticTensorDictSequential(
        TensorDictModule(Logits(heads), ["obs"], [("params", head, "logits") for head in heads]),
        ProbabilisticTensorDictModule(
            in_keys=["params"],
            out_keys=list(heads),
            distribution_class=CompositeDistribution,
            distribution_kwargs={"distribution_map": dict.fromkeys(heads, Categorical)},
        ),
    )


def logits(loss: LossModule, head: int) -> Tensor:
    """The trained logits of one head."""
    return loss.actor_network_params["module", "0", "module", "heads", str(head)]


def make_data(ratios: Ratios, advantage: Sequence[float] | Mapping[str, Sequence[float]]):
    """Choice 0 everywhere, stored with the log-probs that make these ratios."""
    rows = len(next(iter(ratios.values())))
    data = TensorDict({"obs": torch.zeros(rows, 1)}, [rows])
    for head, values in ratios.items():
        data[head] = torch.zeros(rows, dtype=torch.long)
        data[f"{head}_log_prob"] = math.log(0.5) - torch.tensor(values).log()
    if isinstance(advantage, Mapping):
        columns = {head: torch.tensor(a).unsqueeze(-1) for head, a in advantage.items()}
        data["advantage"] = TensorDict(columns, [rows])
    else:
        data["advantage"] = torch.tensor(advantage).unsqueeze(-1)
    return data


def make_loss(ratios: Ratios, **options: Any) -> LossModule:
    eps = options.pop("eps", 0.2)
    return cl.PolicyLoss(make_actor(list(ratios)), surrogate=cl.Clip(eps, **options))


def objective(ratios: Ratios, advantage: Any, **options: Any) -> Tensor:
    return -make_loss(ratios, **options)(make_data(ratios, advantage))["loss_objective"]


# (ratios of heads a and b, advantage, options of Clip, objective)
NUMBERS = [
    # Log-ratios +0.3 and -0.3: their product is 1, and nothing of it is clipped.
    pytest.param(UP, DOWN, 1.0, {}, 1.0, id="joint"),
    # min(1.3499, 1.2) + min(0.7408, 0.8) = 1.2 + 0.7408
    pytest.param(UP, DOWN, 1.0, {"ratio": "per_head"}, 1.2 + DOWN, id="per_head"),
    # min(1, 1.2 × 0.8)
    pytest.param(UP, DOWN, 1.0, {"ratio": "leafwise"}, 0.96, id="leafwise"),
    # (1 + 1.9408) / 2
    pytest.param(UP, DOWN, 1.0, {"ratio": "mixed"}, (2.2 + DOWN) / 2, id="mixed"),
    # 0.25 × 1 + 0.75 × 1.9408
    pytest.param(
        UP, DOWN, 1.0, {"ratio": "mixed", "mix": 0.25}, 0.25 + 0.75 * (1.2 + DOWN), id="mix"
    ),
    pytest.param(UP, DOWN, 1.0, {"ratio": "mixed", "mix": 1.0}, 1.0, id="mix-all-joint"),
    pytest.param(UP, DOWN, 1.0, {"ratio": "mixed", "mix": 0.0}, 1.2 + DOWN, id="mix-all-per_head"),
    # The same ratios where the advantage is -1:
    pytest.param(UP, DOWN, -1.0, {}, -1.0, id="joint-negative"),
    # min(-1.3499, -1.2) + min(-0.7408, -0.8) = -1.3499 - 0.8
    pytest.param(UP, DOWN, -1.0, {"ratio": "per_head"}, -UP - 0.8, id="per_head-negative"),
    # min(-1, -0.96)
    pytest.param(UP, DOWN, -1.0, {"ratio": "leafwise"}, -1.0, id="leafwise-negative"),
    # (-1 - 2.1499) / 2
    pytest.param(UP, DOWN, -1.0, {"ratio": "mixed"}, (-1.8 - UP) / 2, id="mixed-negative"),
    # Both ratios 1.1: their product 1.21 is clipped, each alone is not.
    pytest.param(1.1, 1.1, 2.0, {}, 2.4, id="joint-product"),  # min(1.21, 1.2) × 2
    pytest.param(1.1, 1.1, 2.0, {"ratio": "per_head"}, 4.4, id="per_head-inside"),  # 2.2 × 2
    pytest.param(1.1, 1.1, 2.0, {"ratio": "leafwise"}, 2.42, id="leafwise-inside"),  # 1.21 × 2
    # A pair (low, high): C clips to [0.9, 1.3].
    pytest.param(1.5, 1.0, 1.0, {"eps": (0.1, 0.3)}, 1.3, id="pair-high"),
    pytest.param(0.5, 1.0, -1.0, {"eps": (0.1, 0.3)}, -0.9, id="pair-low"),  # min(-0.5, -0.9)
    pytest.param(
        1.5,
        0.5,
        1.0,
        {"eps": (0.1, 0.3), "ratio": "per_head"},
        1.8,  # min(1.5, 1.3) + min(0.5, 0.9)
        id="pair-per_head",
    ),
    pytest.param(
        1.5,
        0.8,
        1.0,
        {"eps": (0.1, 0.3), "ratio": "leafwise"},
        1.17,  # min(1.5 × 0.8, 1.3 × 0.9) = min(1.2, 1.17)
        id="pair-leafwise",
    ),
    pytest.param(
        1.5,
        0.8,
        1.0,
        {"eps": (0.1, 0.3), "ratio": "mixed"},
        1.65,  # (min(1.2, 1.2) + min(1.5, 1.3) + min(0.8, 0.9)) / 2 = (1.2 + 2.1) / 2
        id="pair-mixed",
    ),
    # A mapping; b is not named and keeps 0.2.
    pytest.param(
        1.6,
        1.6,
        1.0,
        {"eps": {"a": 0.5}, "ratio": "per_head"},
        2.7,  # min(1.6, 1.5) + min(1.6, 1.2)
        id="mapping-number",
    ),
    pytest.param(
        0.5,
        0.5,
        -1.0,
        {"eps": {"a": (0.1, 0.5)}, "ratio": "per_head"},
        -1.7,  # min(-0.5, -0.9) + min(-0.5, -0.8)
        id="mapping-pair",
    ),
    pytest.param(
        1.6,
        1.6,
        1.0,
        {"eps": {"b": (0.1, 0.5)}, "ratio": "leafwise"},
        1.8,  # min(1.6 × 1.6, 1.2 × 1.5)
        id="mapping-leafwise",
    ),
    pytest.param(
        1.6,
        1.6,
        1.0,
        {"eps": {"a": 0.1, "b": (0.1, 0.5)}, "ratio": "leafwise"},
        1.65,  # 1.1 × 1.5
        id="mapping-of-all",
    ),
    # Dual clip 3: where A < 0 the objective is at least 3 A.
    pytest.param(5.0, 1.0, -1.0, {"dual_clip": 3.0}, -3.0, id="dual"),  # max(-5, -3)
    pytest.param(2.0, 1.0, -1.0, {"dual_clip": 3.0}, -2.0, id="dual-inside"),  # max(-2, -3)
    pytest.param(5.0, 1.0, 1.0, {"dual_clip": 3.0}, 1.2, id="dual-positive"),
    pytest.param(
        5.0,
        2.0,
        -1.0,
        {"dual_clip": 3.0, "ratio": "per_head"},
        -5.0,  # max(-5, -3) + max(-2, -3): per head
        id="dual-per_head",
    ),
    pytest.param(
        5.0, 2.0, -1.0, {"dual_clip": 3.0, "ratio": "leafwise"}, -3.0, id="dual-leafwise"
    ),  # max(-10, -3)
    pytest.param(
        5.0,
        2.0,
        -1.0,
        {"dual_clip": 3.0, "ratio": "mixed"},
        -4.0,  # (-3 - 5) / 2
        id="dual-mixed",
    ),
    # Weights; b is not named and keeps 1.
    pytest.param(
        1.1,
        1.1,
        1.0,
        {"head_weights": {"a": 2.0}, "ratio": "per_head"},
        3.3,  # 2 × 1.1 + 1.1
        id="weights",
    ),
    pytest.param(
        1.1,
        1.1,
        1.0,
        {"head_weights": {"a": 2.0, "b": 0.5}, "ratio": "mixed"},
        1.975,  # (1.2 + 2 × 1.1 + 0.5 × 1.1) / 2 = (1.2 + 2.75) / 2
        id="weights-mixed",
    ),
]


@pytest.mark.parametrize(("a", "b", "advantage", "options", "expected"), NUMBERS)
def test_by_hand(a, b, advantage, options, expected):
    assert_close(objective({"a": [a], "b": [b]}, [advantage], **options), expected)


@pytest.mark.parametrize(("a", "b", "advantage", "options", "expected"), NUMBERS)
def test_the_other_door(a, b, advantage, options, expected):
    """``ClipPPOLoss`` takes the same options, the clip range under TorchRL's name."""
    ratios = {"a": [a], "b": [b]}
    options = {"clip_epsilon" if k == "eps" else k: v for k, v in options.items()}
    loss = cl.ClipPPOLoss(make_actor(["a", "b"]), **options)
    assert_close(-loss(make_data(ratios, [advantage]))["loss_objective"], expected)


@pytest.mark.parametrize("ratio", GEOMETRIES)
def test_rows_are_averaged(ratio):
    """The mean over rows of what each row gives alone."""
    a, b, advantage = [1.5, 0.6, 1.0, 1.05], [0.9, 0.9, 1.3, 1.0], [1.0, -2.0, 0.5, -1.0]
    rows = [
        objective({"a": [x], "b": [y]}, [z], ratio=ratio).item()
        for x, y, z in zip(a, b, advantage, strict=True)
    ]
    assert_close(objective({"a": a, "b": b}, advantage, ratio=ratio), sum(rows) / 4)


@pytest.mark.parametrize("ratio", GEOMETRIES)
@pytest.mark.parametrize(
    ("r", "advantage", "expected"),
    [(1.5, 1.0, 1.2), (1.5, -1.0, -1.5), (0.5, 1.0, 0.5), (0.5, -1.0, -0.8), (1.1, 2.0, 2.2)],
)
def test_one_head_is_the_same_in_all(ratio, r, advantage, expected):
    assert_close(objective({"a": [r]}, [advantage], ratio=ratio), expected)


def test_three_heads_multiply():
    """Log-ratios 0.1, -0.2 and 0.4: the ratio is exp(0.3) = 1.34986, not a mean of anything."""
    ratios = {"a": [math.exp(0.1)], "b": [math.exp(-0.2)], "c": [math.exp(0.4)]}
    out = cl.PPOLoss(make_actor(list(ratios)))(make_data(ratios, [1.0]))
    assert_close(out["loss_objective"], -1.3498588)
    assert_close(out["mean_ratio"], 1.3498588)
    assert_close(out["kl_approx"], -0.3)
    assert_close(out["kl_k3"], 1.3498588 - 1 - 0.3)


# --- clip_fraction --------------------------------------------------------------------------------


def test_clip_fraction_of_the_joint_ratio():
    """Products 0.7, 0.9, 1.1 and 1.3: the first and the last lie outside [0.8, 1.2]."""
    ratios = {"a": [0.7, 0.9, 1.1, 1.3], "b": [1.0] * 4}
    out = make_loss(ratios)(make_data(ratios, [1.0] * 4))
    assert_close(out["clip_fraction"], 0.5)
    assert_close(out["clip_fraction/a"], 0.5)
    assert_close(out["clip_fraction/b"], 0.0)
    opposite = {"a": [UP], "b": [DOWN]}
    assert_close(make_loss(opposite)(make_data(opposite, [1.0]))["clip_fraction"], 0.0)


def test_clip_fraction_of_pairs():
    """Per head: 3 of 6 pairs (row, head) lie outside their bounds: a [0.5, 1.5], b [0.8, 1.2]."""
    ratios = {"a": [1.4, 1.6, 1.0], "b": [1.4, 0.7, 1.0]}
    loss = make_loss(ratios, ratio="per_head", eps={"a": 0.5})
    out = loss(make_data(ratios, [1.0] * 3))
    assert_close(out["clip_fraction"], 3 / 6)
    assert_close(out["clip_fraction/a"], 1 / 3)
    assert_close(out["clip_fraction/b"], 2 / 3)


def test_clip_fraction_of_active_pairs():
    """As above, b inactive in the first row: 2 of 5 pairs; of b alone 1 of 2."""
    ratios = {"a": [1.4, 1.6, 1.0], "b": [1.4, 0.7, 1.0]}
    loss = make_loss(ratios, ratio="per_head", eps={"a": 0.5})
    loss.set_keys(head_active={"b": "on"})
    data = make_data(ratios, [1.0] * 3)
    data["on"] = torch.tensor([False, True, True])
    out = loss(data)
    assert_close(out["clip_fraction"], 2 / 5)
    assert_close(out["clip_fraction/b"], 1 / 2)


# --- inactive heads -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        # b (ratio 1.5) counts as the factor 1: min(1.1, 1.2)
        ("joint", 1.1),
        ("leafwise", 1.1),
        # b contributes nothing, not 1 × A
        ("per_head", 1.1),
        ("mixed", 1.1),
    ],
)
def test_an_inactive_head(ratio, expected):
    loss = make_loss({"a": [1.1], "b": [1.5]}, ratio=ratio)
    loss.set_keys(head_active={"b": "on"})
    data = make_data({"a": [1.1], "b": [1.5]}, [1.0])
    data["on"] = torch.tensor([False])
    out = loss(data)
    assert_close(-out["loss_objective"], expected)
    assert_close(out["entropy"], math.log(2))  # of a alone
    assert_close(out["loss_entropy"], -0.01 * math.log(2))
    (out["loss_objective"] + out["loss_entropy"]).backward()
    assert torch.equal(logits(loss, 1).grad, torch.zeros(2))


# --- an advantage per head ------------------------------------------------------------------------


def test_an_advantage_per_head():
    """P(1.5, 1) + P(1.5, -2) = 1.2 - 3."""
    ratios = {"a": [1.5], "b": [1.5]}
    actual = objective(ratios, {"a": [1.0], "b": [-2.0]}, ratio="per_head")
    assert_close(actual, -1.8)


def test_advantages_and_weights_per_head():
    """3 × P(1.1, 2) + P(0.5, -1) = 3 × 2.2 - 0.8, whatever the order of the entries."""
    ratios = {"a": [1.1], "b": [0.5]}
    options = {"ratio": "per_head", "head_weights": {"a": 3.0}}
    assert_close(objective(ratios, {"b": [-1.0], "a": [2.0]}, **options), 5.8)


def test_equal_advantages_per_head_are_one():
    ratios = {"a": [1.5, 0.6], "b": [0.7, 1.1]}
    each = objective(ratios, {"a": [1.0, -2.0], "b": [1.0, -2.0]}, ratio="per_head")
    assert torch.equal(each, objective(ratios, [1.0, -2.0], ratio="per_head"))


@pytest.mark.parametrize("ratio", ["joint", "leafwise", "mixed"])
def test_an_advantage_per_head_needs_per_head(ratio):
    with pytest.raises(ConfigError, match="per_head"):
        objective({"a": [1.0], "b": [1.0]}, {"a": [1.0], "b": [1.0]}, ratio=ratio)


def test_a_missing_advantage_is_named():
    with pytest.raises(MissingKeyError, match="'b'"):
        objective({"a": [1.0], "b": [1.0]}, {"a": [1.0]}, ratio="per_head")


# --- a proximal policy, and caps ------------------------------------------------------------------


def delayed(surrogate: cl.Clip, behaviour: float, **options: Any) -> tuple[LossModule, TensorDict]:
    """Two heads: proximal probability 1/2, current 3/4, stored ``behaviour``; advantage 1."""
    loss = cl.PolicyLoss(make_actor(["a", "b"]), surrogate=surrogate, delay_actor=True, **options)
    SoftUpdate(loss, eps=0.5)
    with torch.no_grad():
        for head in (0, 1):
            logits(loss, head).copy_(torch.tensor([math.log(3.0), 0.0]))
    data = make_data({"a": [1.0], "b": [1.0]}, [1.0])
    for head in ("a", "b"):
        data[f"{head}_log_prob"] = torch.tensor([math.log(behaviour)])
    return loss, data


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        # π/π_prox = 1.5 and π_prox/π_behaviour = 2 per head; products 2.25 and 4.
        ("joint", 4.8),  # min(2.25 × 4, 1.2 × 4)
        ("per_head", 4.8),  # 2 × min(1.5 × 2, 1.2 × 2)
        ("leafwise", 5.76),  # min(2.25 × 4, 1.44 × 4)
        ("mixed", 4.8),  # (4.8 + 4.8) / 2
    ],
)
def test_delay_actor(ratio, expected):
    """The trust region is around the proximal policy, the weight is the behaviour policy's."""
    loss, data = delayed(cl.Clip(ratio=ratio), 0.25)
    out = loss(data)
    assert_close(-out["loss_objective"], expected)
    assert_close(out["kl_approx"], -2 * math.log(1.5))  # to the proximal policy
    assert_close(out["max_ratio"], 9.0)  # (0.75 / 0.25)² to the behaviour policy
    assert_close(out["clip_fraction"], 1.0)


def test_delay_actor_is_the_ratio_where_nothing_is_clipped():
    """3/4 over 1/4 per head: (0.75 / 0.25)² = 9, whatever the proximal policy is."""
    loss, data = delayed(cl.Ratio(), 0.25)
    assert_close(-loss(data)["loss_objective"], 9.0)


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        # Ratio 5, capped to 2 by lifting the behaviour probability by 5 / 2: min(2, 1.2 × 2 / 5).
        (1.0, 0.48),
        (-1.0, -2.0),  # min(-2, -0.48)
    ],
)
def test_cap(advantage, expected):
    loss = cl.PolicyLoss(make_actor(["a"]), surrogate=cl.Clip(), max_importance_ratio=2.0)
    out = loss(make_data({"a": [5.0]}, [advantage]))
    assert_close(-out["loss_objective"], expected)
    assert_close(out["max_ratio"], 2.0)


def test_cap_of_the_unclipped_ratio():
    """Rows 5 and 0.5, cap 2: the mean of 2 and 0.5; a capped row's gradient has the cap's size."""
    loss = cl.PolicyLoss(make_actor(["a"]), surrogate=cl.Ratio(), max_importance_ratio=2.0)
    out = loss(make_data({"a": [5.0, 0.5]}, [1.0, 1.0]))
    assert_close(-out["loss_objective"], 1.25)
    out["loss_objective"].backward()
    # ∇ log(1/2) is ±1/2 per row: -(2 + 0.5) / 2 × 1/2
    assert_close(logits(loss, 0).grad, [-0.625, 0.625])


def test_cap_of_a_product():
    """Ratios 3 and 2, cap 4: 6 becomes 4, the clipped 1.2 becomes 1.2 × 4 / 6."""
    loss = cl.PolicyLoss(make_actor(["a", "b"]), surrogate=cl.Clip(), max_importance_ratio=4.0)
    out = loss(make_data({"a": [3.0], "b": [2.0]}, [1.0]))
    assert_close(-out["loss_objective"], 0.8)
    assert_close(out["mean_ratio"], 4.0)


def test_cap_and_delay():
    """π/π_prox = 2.25, π_prox/π_behaviour = 4, cap 3: corrected by 3 / 2.25, 1.2 × 3 / 2.25."""
    loss, data = delayed(cl.Clip(), 0.25, max_importance_ratio=3.0)
    assert_close(-loss(data)["loss_objective"], 1.6)


@pytest.mark.parametrize("ratio", GEOMETRIES)
def test_caps_of_one_head_are_the_same_in_all(ratio):
    loss = cl.PolicyLoss(
        make_actor(["a"]), surrogate=cl.Clip(ratio=ratio), max_importance_ratio=2.0
    )
    assert_close(-loss(make_data({"a": [5.0]}, [1.0]))["loss_objective"], 0.48)


@pytest.mark.parametrize("ratio", GEOMETRIES)
def test_a_cap_that_nothing_reaches_changes_nothing(ratio):
    ratios, advantage = {"a": [1.5, 0.6], "b": [0.7, 1.1]}, [1.0, -2.0]
    capped = cl.PolicyLoss(
        make_actor(["a", "b"]), surrogate=cl.Clip(ratio=ratio), max_importance_ratio=10.0
    )
    expected = objective(ratios, advantage, ratio=ratio)
    assert_close(-capped(make_data(ratios, advantage))["loss_objective"], expected)


# --- gradients ------------------------------------------------------------------------------------


def gradients(ratios: Ratios, advantage: Sequence[float], surrogate: nn.Module) -> list[Tensor]:
    loss = cl.PolicyLoss(make_actor(list(ratios)), surrogate=surrogate, entropy=None)
    loss(make_data(ratios, advantage))["loss_objective"].backward()
    return [logits(loss, head).grad for head in range(len(ratios))]


@pytest.mark.parametrize("ratio", GEOMETRIES)
def test_at_ratio_one_all_have_the_gradient_of_the_joint_one(ratio):
    """-A ∇ log π, averaged: ∇ log(1/2) = (1/2, -1/2); advantages 3 and -1 have the mean 1."""
    ones = {"a": [1.0, 1.0], "b": [1.0, 1.0]}
    for gradient in gradients(ones, [3.0, -1.0], cl.Clip(ratio=ratio)):
        assert_close(gradient, [-0.5, 0.5])


@pytest.mark.parametrize("ratio", ["per_head", "leafwise", "mixed"])
def test_at_ratio_one_of_a_network(ratio):
    """The same for heads that share a network, on random data."""
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 5))
    split = TensorDictModule(
        lambda x: x.split([2, 3], -1), ["hidden"], [("params", h, "logits") for h in "ab"]
    )
    actor = ProbabilisticTensorDictSequential(
        TensorDictModule(net, ["obs"], ["hidden"]),
        split,
        ProbabilisticTensorDictModule(
            in_keys=["params"],
            out_keys=["a", "b"],
            distribution_class=CompositeDistribution,
            distribution_kwargs={"distribution_map": dict.fromkeys("ab", Categorical)},
            return_log_prob=True,
        ),
    )
    data = TensorDict({"obs": torch.randn(16, 3), "advantage": torch.randn(16, 1)}, [16])
    with torch.no_grad():
        actor(data)
    results = []
    for geometry in ("joint", ratio):
        loss = cl.PolicyLoss(actor, surrogate=cl.Clip(ratio=geometry), functional=False)
        net.zero_grad()
        loss(data)["loss_objective"].backward()
        results.append([parameter.grad.clone() for parameter in net.parameters()])
    for joint, other in zip(*results, strict=True):
        assert joint.any()
        assert_close(other, joint)


@pytest.mark.parametrize(
    ("ratio", "expected_a", "expected_b"),
    [
        # Ratios 1.5 and 0.5, A = 1, ∇ log(1/2) = (1/2, -1/2). The product 0.75 is the smaller one:
        ("joint", 0.375, 0.375),  # 0.75 / 2
        ("leafwise", 0.375, 0.375),  # 0.75 against 1.2 × 0.8
        # a is beyond its bound, where A = 1 drives it; b is below its own, and may return.
        ("per_head", 0.0, 0.25),  # 0.5 / 2
        ("mixed", 0.1875, 0.3125),  # the mean of the first and the third
    ],
)
def test_who_is_clipped_receives_nothing(ratio, expected_a, expected_b):
    a, b = gradients({"a": [1.5], "b": [0.5]}, [1.0], cl.Clip(ratio=ratio))
    assert_close(-a, [expected_a, -expected_a])
    assert_close(-b, [expected_b, -expected_b])


# --- overflow -------------------------------------------------------------------------------------


def far(log_ratio: float, advantage: float, heads: str = "ab") -> TensorDict:
    data = make_data({head: [1.0] for head in heads}, [advantage])
    data["a_log_prob"] = data["a_log_prob"] - log_ratio
    return data


@pytest.mark.parametrize("surrogate", [*GEOMETRIES, "ratio"])
@pytest.mark.parametrize("log_ratio", [200.0, -200.0, 1e4, -1e4])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_far_ratios_are_never_nan(surrogate, log_ratio, advantage):
    part = cl.Ratio() if surrogate == "ratio" else cl.Clip(ratio=surrogate)
    loss = cl.PolicyLoss(make_actor("ab"), surrogate=part)
    out = loss(far(log_ratio, advantage))
    out["loss_objective"].backward()
    for head in (0, 1):
        assert logits(loss, head).grad.isfinite().all()
    assert all(value.isfinite() for value in out.values())


@pytest.mark.parametrize(
    ("ratio", "log_ratio", "advantage", "expected"),
    [
        ("joint", 200.0, 1.0, 1.2),
        ("joint", -200.0, -1.0, -0.8),
        ("per_head", 200.0, 1.0, 2.2),  # 1.2 + 1
        ("per_head", -200.0, -1.0, -1.8),
        ("leafwise", 200.0, 1.0, 1.2),
        ("leafwise", -200.0, -1.0, -0.8),
        ("mixed", 200.0, 1.0, 1.7),  # (1.2 + 2.2) / 2
    ],
)
def test_where_the_clipped_branch_is_chosen_far_ratios_are_its_bounds(
    ratio, log_ratio, advantage, expected
):
    loss = cl.PolicyLoss(make_actor("ab"), surrogate=cl.Clip(ratio=ratio))
    out = loss(far(log_ratio, advantage))
    assert_close(-out["loss_objective"], expected)
    out["loss_objective"].backward()
    assert torch.equal(logits(loss, 0).grad, torch.zeros(2))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 80.0), (torch.float64, 700.0)])
def test_the_largest_ratio(dtype, bound):
    """Beyond its bound a log-ratio counts as the bound, without gradient; up to it, as itself."""
    for log_ratio, counted in ((bound - 1, bound - 1), (bound + 50, bound)):
        loss = cl.PolicyLoss(make_actor("a"), surrogate=cl.Ratio(), entropy=None).to(dtype)
        data = far(log_ratio, 1e-30, "a").to(dtype)
        data["a_log_prob"] = torch.tensor([math.log(0.5)], dtype=dtype) - log_ratio
        objective = -loss(data)["loss_objective"]
        assert_close(objective.log() + 30 * math.log(10), torch.tensor(counted, dtype=dtype))
        objective.backward()
        assert bool(logits(loss, 0).grad.any()) == (log_ratio < bound)


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ratio": "product"}, "ratio"),
        ({"ratio": "mixed", "mix": 1.5}, "mix"),
        ({"ratio": "mixed", "mix": -0.1}, "mix"),
        ({"dual_clip": 1.0}, "dual_clip"),
        ({"eps": -0.1}, "epsilon|eps"),
        ({"eps": (0.1, 0.2, 0.3)}, "pair"),
        ({"eps": (-0.1, 0.2)}, "epsilon|eps"),
        ({"eps": {"a": 0.1}}, "per_head"),
        ({"eps": {"a": 0.1}, "ratio": "mixed"}, "per_head"),
        ({"eps": {"a": -0.1}, "ratio": "per_head"}, "epsilon|eps"),
        ({"head_weights": {"a": 1.0}}, "per_head"),
        ({"head_weights": {"a": 1.0}, "ratio": "leafwise"}, "per_head"),
    ],
)
def test_clip_checks_its_options(options, message):
    with pytest.raises(ConfigError, match=message):
        cl.Clip(**options)


@pytest.mark.parametrize("option", ["eps", "head_weights"])
def test_an_unknown_head_is_named(option):
    with pytest.raises(ConfigError, match="'wrong'"):
        objective({"a": [1.0], "b": [1.0]}, [1.0], ratio="per_head", **{option: {"wrong": 0.5}})


def test_coefficients_are_buffers():
    """They are saved, move with the loss, and act when they are written."""
    ratios = {"a": [1.5], "b": [1.0]}
    loss = make_loss(ratios, eps=(0.1, 0.2), dual_clip=3.0)
    state = loss.state_dict()
    assert {"surrogate.eps_low", "surrogate.eps_high", "surrogate.dual_clip"} <= state.keys()
    data = make_data(ratios, [1.0])
    assert_close(-loss(data)["loss_objective"], 1.2)
    loss.surrogate.eps_high.fill_(0.4)
    assert_close(-loss(data)["loss_objective"], 1.4)
    loss.load_state_dict(state)
    other = make_loss(ratios, eps=(0.5, 0.5), dual_clip=2.0)
    other.load_state_dict({**state, "surrogate.eps_high": torch.tensor(0.3)})
    assert_close(-other(data)["loss_objective"], 1.3)
    assert loss.double().surrogate.eps_high.dtype == torch.float64
