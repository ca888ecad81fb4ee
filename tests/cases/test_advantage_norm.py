"""Advantage standardisation: one row, constants, statistics per agent, masks."""

import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

import composite_losses as cl
from composite_losses.errors import ConfigError
from tests.cases import actors_fl as odd
from tests.cases import builders_fl as fl
from tests.cases.builders_fl import PAIR, build, cut, make_data, make_mask, outcome, same
from tests.cases.oracles_fl import gae_by_hand

DOORS = [cl.PPOLoss, cl.ClipPPOLoss, cl.KLPENPPOLoss]
SURROGATES = {"clip": cl.Clip, "ratio": cl.Ratio, "penalty": cl.KLPenalty}


def used_advantage(
    advantage: Tensor,
    mask: Tensor | None = None,
    *,
    group: bool = False,
    cls: Any = None,
    **options: Any,
) -> Tensor:
    """The advantage ``[*S]`` as the loss used it: minus the objective of ratio 1, unreduced."""
    shape = advantage.shape
    zero = torch.zeros(shape, dtype=advantage.dtype)
    one = zero + 1
    td = odd.echo_data(zero, one, log_ratio=zero, advantage=advantage, target=zero)
    td.update({"loc": zero.unsqueeze(-1), "scale": one.unsqueeze(-1)})
    prefix: tuple[str, ...] = ()
    if group:
        td, prefix = TensorDict({"agents": td}, shape[:-1]), ("agents",)
    actor, _ = odd.Echo.networks(*prefix)
    if cls is None:
        norm = cl.AdvantageNorm(**options)
        loss: Any = cl.PolicyLoss(actor, surrogate=cl.Ratio(), advantage=norm, reduction="none")
    else:
        loss = cls(actor, normalize_advantage=True, reduction="none", **options)
    loss.set_keys(advantage=(*prefix, "advantage"))
    if mask is not None:
        td[(*prefix, "alive")] = mask
        loss.set_keys(agent_mask=(*prefix, "alive"))
    out = loss(td)
    assert all(v.isfinite().all() for v in out.values())
    return -out["loss_objective"].detach()


# --- 89: too few values --------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [None, *DOORS])
@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_one_row(shape: tuple[int, ...], cls: Any) -> None:
    """Case 89: B = 1: one value has no spread: 0, finite."""
    assert torch.equal(used_advantage(torch.full(shape, 5.0), cls=cls), torch.zeros(shape))


@pytest.mark.parametrize("agents", [1, 2, 3])
@pytest.mark.parametrize("how", ["exclude", "negative", "per_agent", "door"])
def test_one_row_per_agent(how: str, agents: int) -> None:
    """Case 89: B = 1 with the agent dim excluded: each agent has one value: 0 for all of them."""
    advantage = torch.tensor([[5.0, -3.0, 100.0]])[:, :agents]
    options: dict[str, Any] = {
        "exclude": {"exclude_dims": (1,)},
        "negative": {"exclude_dims": (-2,)},
        "per_agent": {"per_agent": True},
        "door": {"cls": cl.ClipPPOLoss, "normalize_advantage_exclude_dims": (1,)},
    }[how]
    assert torch.equal(used_advantage(advantage, group=True, **options), torch.zeros(1, agents))


@pytest.mark.parametrize("per_agent", [False, True])
def test_one_valid_row(per_agent: bool) -> None:
    """Case 89: one valid row (per excluded group): finite and 0, with gradients."""
    td = make_data(PAIR, (4, 3), group=True, source="all")
    mask = torch.zeros(4, 3, dtype=torch.bool)
    mask[[0, 2, 3], [0, 1, 2]] = True  # one row per agent
    mask &= torch.tensor([True, per_agent, per_agent])
    loss = build("ratio", PAIR, group=True, advantage=cl.AdvantageNorm(per_agent=per_agent))
    data = fl.poison(td, mask, "mixed")
    fl.mask_with(loss, data, mask, "group")
    out, grads = outcome(loss, data)
    assert float(out["loss_objective"]) == 0.0
    assert all(g is None or g.isfinite().all() for g in grads.values())


@pytest.mark.parametrize("value", [0.0, 0.1, -5.0, 1234.567, 1e6])
@pytest.mark.parametrize("cls", [None, *DOORS])
@pytest.mark.parametrize("shape", [(2,), (1000,), (7, 5)])
def test_constant(shape: tuple[int, ...], cls: Any, value: float) -> None:
    """Case 89: constant advantages (std 0) give 0, however large they are."""
    got = used_advantage(torch.full(shape, value), cls=cls)
    torch.testing.assert_close(got, torch.zeros(shape), atol=1e-4, rtol=0)


def test_constant_per_agent() -> None:
    """Case 89: one agent constant, the other not: 0 beside standardised values."""
    advantage = torch.stack([torch.full((4,), 7.0), torch.tensor([1.0, -1.0, 1.0, -1.0])], -1)
    got = used_advantage(advantage, group=True, per_agent=True)
    half = math.sqrt(3) / 2  # ±√((n − 1)/n), n = 4
    expected = torch.tensor([[0.0, half], [0.0, -half], [0.0, half], [0.0, -half]])
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("scale", [1e-9, 1e-7, 1e-3])
def test_floor_of_the_std(scale: float) -> None:
    """Case 89: (A − mean) / max(std, 1e-6): ±s has std s√2."""
    got = used_advantage(torch.tensor([scale, -scale], dtype=torch.float64))
    expected = scale / max(scale * math.sqrt(2), 1e-6)
    torch.testing.assert_close(got, torch.tensor([expected, -expected], dtype=torch.float64))


def test_all_masked() -> None:
    """Case 89: no valid row at all, or none of one agent: 0, and the others as usual."""
    advantage = torch.tensor([[1.0, 9.0], [-1.0, 8.0]])
    nothing = torch.zeros(2, 2, dtype=torch.bool)
    assert torch.equal(used_advantage(advantage, nothing, group=True), torch.zeros(2, 2))
    mask = torch.tensor([True, False]).expand(2, 2)
    got = used_advantage(advantage, mask, group=True, per_agent=True)
    torch.testing.assert_close(got, torch.tensor([[0.5**0.5, 0.0], [-(0.5**0.5), 0.0]]))


# --- 91: per agent -------------------------------------------------------------------------------


def two_scales(n: int) -> Tensor:
    """Agent 0 with advantages ±1, agent 1 with ±100, ``[n, 2]``."""
    sign = torch.tensor([1.0, -1.0]).repeat(n // 2)
    return torch.stack([sign, 100 * sign], -1)


@pytest.mark.parametrize("n", [2, 4, 100])
@pytest.mark.parametrize(
    "options",
    [{"per_agent": True}, {"exclude_dims": (1,)}, {"exclude_dims": (-2,)},
     {"per_agent": True, "exclude_dims": (-2,)},
     {"cls": cl.ClipPPOLoss, "normalize_advantage_exclude_dims": (1,)},
     {"cls": cl.PPOLoss, "normalize_advantage_exclude_dims": (-2,)},
     {"cls": cl.KLPENPPOLoss, "normalize_advantage_exclude_dims": (-2,)}],
)  # fmt: skip
def test_two_scales(n: int, options: dict[str, Any]) -> None:
    """Case 91: ±1 and ±100 both become ±√((n − 1)/n); positive and negative dims agree."""
    got = used_advantage(two_scales(n), group=True, **options)
    sign = two_scales(n)[:, :1].expand(n, 2)
    torch.testing.assert_close(got, sign * math.sqrt((n - 1) / n))


@pytest.mark.parametrize("cls", [None, *DOORS])
def test_pooled(cls: Any) -> None:
    """Case 91: pooled statistics leave ±0.014 for agent 0."""
    got = used_advantage(two_scales(1000), group=True, cls=cls)
    assert float(got[0, 0]) == pytest.approx(0.014, abs=5e-4)
    # std of 1000 × ±1 and 1000 × ±100: √(1000 · 10001 / 1999)
    expected = two_scales(1000) / math.sqrt(1000 * 10001 / 1999)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("kind", ["nan", "mixed"])
def test_two_scales_with_a_mask(kind: str) -> None:
    """Case 91: with dead agents: n counts each agent's valid rows, here 2 and 6."""
    advantage, mask = two_scales(6), torch.ones(6, 2, dtype=torch.bool)
    mask[2:, 0] = False
    dirty = advantage.clone()
    dirty[~mask] = fl.garbage(torch.Size([4]), torch.float32, kind)
    got = used_advantage(dirty, mask, group=True, per_agent=True)
    sign = two_scales(6)[:, 0]
    torch.testing.assert_close(got[:2, 0], sign[:2] * math.sqrt(1 / 2))
    torch.testing.assert_close(got[:, 1], sign * math.sqrt(5 / 6))
    assert torch.equal(got[2:, 0], torch.zeros(4))


SHAPES: list[tuple[tuple[int, ...], bool]] = [
    ((9,), False), ((4, 5), False), ((6, 1), True), ((6, 2), True), ((6, 3), True),
    ((2, 4, 3), True),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "group"), SHAPES)
@pytest.mark.parametrize("what", ["pooled", "per_agent", "dim0", "last"])
@pytest.mark.parametrize("part", SURROGATES)
def test_against_loops(part: str, what: str, shape: tuple[int, ...], group: bool) -> None:
    """Case 91: with an active mask, loss and gradients equal advantages standardised by hand."""
    td, mask = make_data(PAIR, shape, group=group, source="all"), make_mask(shape)
    n = len(shape)
    agents = (n - 1,) if group else ()
    norm, keep = {
        "pooled": (cl.AdvantageNorm(), ()),
        "per_agent": (cl.AdvantageNorm(per_agent=True), agents),
        "dim0": (cl.AdvantageNorm(exclude_dims=(0,)), (0,)),
        "last": (cl.AdvantageNorm(exclude_dims=(-2,)), (n - 1,)),
    }[what]
    key = ("agents", "advantage") if group else "advantage"
    by_hand = td.clone()
    by_hand[key] = fl.normalised_by_hand(td[key], mask, keep)

    def loss(**kw: Any) -> Any:
        return build(lambda a, c: cl.PolicyLoss(a, c, surrogate=SURROGATES[part](), **kw), PAIR,
                     group=group)  # fmt: skip

    ours = loss(advantage=norm)
    data = fl.poison(td, mask, "mixed")
    fl.mask_with(ours, data, mask, "group1" if group else "root1")
    same(outcome(ours, data), outcome(loss(), cut(by_hand, mask, group)), tol=2e-5)


def test_agents_of_one_size() -> None:
    """Case 91: equal sizes (B = T = A = 3) do not change which dim is the agents'."""
    advantage = torch.randn(3, 3, 3)
    mask = make_mask((3, 3, 3))
    got = used_advantage(advantage, mask, group=True, per_agent=True)
    by_hand = fl.normalised_by_hand(advantage.unsqueeze(-1), mask, (2,)).squeeze(-1)
    torch.testing.assert_close(got, by_hand, atol=1e-5, rtol=1e-5)


def test_per_agent_without_agents() -> None:
    """Case 91: outside a group there is no agent dim: per_agent pools over batch and time."""
    advantage = torch.randn(4, 5)
    got = used_advantage(advantage, per_agent=True)
    torch.testing.assert_close(got, used_advantage(advantage))


def test_balanced_gradients() -> None:
    """Case 91: one agent's rewards × 100: the same loss per agent, another one pooled."""
    td = make_data(PAIR, (8, 2), group=True)
    scaled = td.clone()
    scaled["agents", "advantage"][:, 1] *= 100
    results = {}
    for per_agent in (True, False):
        losses = [build("joint", PAIR, group=True, advantage=cl.AdvantageNorm(per_agent=per_agent))
                  for _ in range(2)]  # fmt: skip
        results[per_agent] = [
            outcome(x, data) for x, data in zip(losses, (td, scaled), strict=True)
        ]
    same(*results[True])
    with pytest.raises(AssertionError):
        same(*results[False])


def test_advantages_per_head() -> None:
    """Case 91: a TensorDict of advantages: every head's is standardised on its own."""
    td, mask = make_data(PAIR, (9,)), make_mask((9,))
    heads = {"move": torch.randn(9, 1), "gear": 100 * torch.randn(9, 1)}
    raw = td.clone().set("advantage", TensorDict({"action": TensorDict(heads, [9])}, [9]))
    by_hand = {k: fl.normalised_by_hand(v, mask) for k, v in heads.items()}
    td["advantage"] = TensorDict({"action": TensorDict(by_hand, [9])}, [9])
    loss = build("per_head", PAIR, advantage=cl.AdvantageNorm())
    data = fl.poison(raw, mask, "mixed")
    fl.mask_with(loss, data, mask, "root")
    same(outcome(loss, data), outcome(build("per_head", PAIR), td[mask]))


def test_rows_without_a_playable_action() -> None:
    """Case 91: a row whose action mask is all False is no part of the statistics."""
    td, playable = make_data("masked", (8,)), make_mask((8,))
    dead = td.clone()
    dead["action_mask"][~playable] = False
    dead["advantage"][~playable] = 1e30
    by_hand = td.clone()
    by_hand["advantage"] = fl.normalised_by_hand(td["advantage"], playable)
    loss = build("joint", "masked", advantage=cl.AdvantageNorm())
    got, expected = loss(dead), build("joint", "masked")(by_hand[playable])
    for key in ("loss_objective", "loss_entropy", "kl_approx"):
        torch.testing.assert_close(got[key], expected[key], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["PPOLoss", "ClipPPOLoss", "KLPENPPOLoss"])
def test_standardised_inside(name: str) -> None:
    """Case 91: an advantage that the loss computes is standardised over the valid rows, too."""
    mask = fl.tail_mask([5, 2, 4], 5)
    td = make_data(PAIR, (3, 5), source="all").exclude("state_value")
    data = fl.poison(td.exclude("advantage", "value_target"), mask, "mixed")
    loss, plain = build(name, PAIR, normalize_advantage=True), build(name, PAIR)
    fl.mask_with(loss, data, mask, "collector")
    values, target = gae_by_hand(td, mask, fl.networks(PAIR)[1].module)
    td["advantage"], td["value_target"] = fl.normalised_by_hand(values, mask), target
    same(outcome(loss, data), outcome(plain, td[mask]), tol=2e-5)


def test_attributes_and_errors() -> None:
    """Case 91: the options can be read back; a dim that is not there is an error."""
    loss = build(
        "ClipPPOLoss", PAIR, normalize_advantage=True, normalize_advantage_exclude_dims=(-2,)
    )
    assert loss.normalize_advantage and loss.normalize_advantage_exclude_dims == (-2,)
    assert not build("ClipPPOLoss", PAIR).normalize_advantage
    td = make_data(PAIR, (4,))
    with pytest.raises(ConfigError, match="5"):
        build("joint", PAIR, advantage=cl.AdvantageNorm(exclude_dims=(5,)))(td)


def test_not_standardised_by_default() -> None:
    """Case 91: without the option the stored advantage is used as it is, and never written."""
    td = make_data(PAIR, (6,))
    td["action", "move_log_prob"], td["action", "gear_log_prob"] = (
        build("joint", PAIR).log_probs(td)["current", "action", k].detach() for k in PAIR
    )
    before = td.clone()
    for options in ({}, {"normalize_advantage": True}):
        loss = build("ClipPPOLoss", PAIR, reduction="none", **options)
        used = -loss(td)["loss_objective"].detach()
        plain = td["advantage"].squeeze(-1)
        expected = (plain - plain.mean()) / plain.std() if options else plain
        torch.testing.assert_close(used, expected)
        fl.unchanged(td, before)
