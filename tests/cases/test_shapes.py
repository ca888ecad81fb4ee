"""Shapes: what is squeezed, what is summed, and what raises instead of being broadcast."""

import math

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import nn
from torchrl.modules.distributions import MaskedCategorical

import composite_losses as cl
from composite_losses.errors import ShapeError
from tests.cases.builders_ce import (
    ALL_LOSSES,
    BATCHES,
    GEOMETRIES,
    RATIO_LOSSES,
    WIDTH,
    Linear,
    actor_of,
    clip_loss,
    collect,
    critic_of,
    fresh,
    gradients,
    inputs_of,
    log_prob_keys,
    set_group,
    total_loss,
)

B = WIDTH
AGENTS = [None, 1, 2, 3]
TWO_HEADS = {"move": "tanh", "gear": "categorical"}
LOG_PROBS, ADVANTAGES = (-1.0, -2.0, -3.0), (1.0, 2.0, 3.0)


class Slope(nn.Module):
    """Gives the one parameter ``slope`` in the shape of the observation."""

    def __init__(self):
        super().__init__()
        self.slope = nn.Parameter(torch.ones(()))

    def forward(self, observation):
        return self.slope + observation[..., 0] * 0.0


def slope_case(batch, agents):
    """An actor whose log-prob is slope * action, and data with the log-probs of the case."""
    prefix = () if agents is None else ("agents",)
    key = lambda name: (*prefix, name) if prefix else name  # noqa: E731
    actor = ProbabilisticTensorDictSequential(
        TensorDictModule(Slope(), in_keys=[key("observation")], out_keys=[key("slope")]),
        ProbabilisticTensorDictModule(
            in_keys={"slope": key("slope")},
            out_keys=[key("action")],
            distribution_class=Linear,
            return_log_prob=True,
            default_interaction_type="random",
        ),
    )
    td = collect(actor, inputs_of("normal", batch, agents=agents), prefix=prefix)
    holder = td.get(prefix) if prefix else td
    sample = holder.batch_size
    rows = (B, *(1,) * (len(sample) - 1))
    for name, values in (("action", LOG_PROBS), ("advantage", ADVANTAGES)):
        column = torch.tensor(values).reshape(rows).expand(sample).clone()
        holder.set(name, column.unsqueeze(-1) if name == "advantage" else column)
    holder.set("action_log_prob", holder.get("action").clone())
    return actor, td


# -mean((-1, -2, -3) * (1, 2, 3)) = (1 + 4 + 9) / 3; the outer product's mean is 2 * 2 = 4
RIGHT = 14 / 3


@BATCHES
@pytest.mark.parametrize("name", ["a2c", "reinforce"])
def test_log_probs_times_advantages(name, batch, agents):
    """Case 47: 4.667 for log-probs (-1, -2, -3) and advantages (1, 2, 3), not 4.0."""
    actor, td = slope_case(batch, agents)
    cls, options = ALL_LOSSES[name]
    loss = clip_loss(actor, cls=cls, agents=agents, **options)
    out = loss(td)
    value = out["loss_actor" if name == "reinforce" else "loss_objective"]
    assert value.shape == ()
    assert value.item() == pytest.approx(RIGHT, abs=1e-5)
    value.backward()
    slope = next(p for n, p in loss.named_parameters() if n.endswith("slope"))
    assert slope.grad.item() == pytest.approx(RIGHT, abs=1e-5)


@BATCHES
@pytest.mark.parametrize("name", ["ppo", *GEOMETRIES])
def test_gradient_at_ratio_one(name, batch, agents):
    """Case 47: at ratio 1 a PPO loss is -mean(A) = -2 and has the gradient 4.667 of REINFORCE."""
    actor, td = slope_case(batch, agents)
    cls, options = ALL_LOSSES[name]
    loss = clip_loss(actor, cls=cls, agents=agents, **options)
    value = loss(td)["loss_objective"]
    assert value.item() == pytest.approx(-2.0, abs=1e-6)
    value.backward()
    slope = next(p for n, p in loss.named_parameters() if n.endswith("slope"))
    assert slope.grad.item() == pytest.approx(RIGHT, abs=1e-5)


@BATCHES
@pytest.mark.parametrize("name", ALL_LOSSES)
def test_flat_advantage_raises(name, batch, agents):
    """Case 47: an advantage without its last dim raises in every loss, nothing is broadcast."""
    actor, td = fresh("normal", batch, agents=agents)
    cls, options = ALL_LOSSES[name]
    loss = clip_loss(actor, cls=cls, agents=agents, **options)
    holder = td if agents is None else td["agents"]
    holder["advantage"] = holder["advantage"].squeeze(-1)
    before = td.clone()
    with pytest.raises(ShapeError, match="advantage"):
        loss(td)
    assert (td == before).all()


@BATCHES
@pytest.mark.parametrize("wrong", ["flat", "two", "row"])
def test_value_shapes_raise(wrong, batch, agents):
    """Case 47: the value target's last dim is 1, too; [B], [B, 2] and [1, B] raise."""
    actor, td = fresh("normal", batch, agents=agents)
    loss = clip_loss(actor, agents=agents, critic=True)
    assert loss(td)["loss_critic"].isfinite()
    holder = td if agents is None else td["agents"]
    right = holder["value_target"]
    root = td.copy()
    if wrong == "row":
        root.batch_size = []
        if agents is not None:
            root["agents"].batch_size = []
        holder = root if agents is None else root["agents"]
        holder["value_target"] = right.reshape(1, -1)
    else:
        holder = root if agents is None else root["agents"]
        holder["value_target"] = (
            right.squeeze(-1) if wrong == "flat" else torch.cat([right, right], -1)
        )
    with pytest.raises(ShapeError, match="value_target"):
        loss(root)


@pytest.mark.parametrize("agents", AGENTS)
def test_flat_critic_output_raises(agents):
    """Case 47: a critic that gives [B] instead of [B, 1] is an error that names its key."""
    actor, td = fresh("normal", (B,), agents=agents)
    prefix = () if agents is None else ("agents",)
    key = lambda name: (*prefix, name) if prefix else name  # noqa: E731
    critic = TensorDictModule(
        nn.Sequential(nn.Linear(WIDTH, 1), nn.Flatten(-2)),
        in_keys=[key("observation")],
        out_keys=[key("state_value")],
    )
    loss = cl.ClipPPOLoss(actor, critic)
    if agents is not None:
        set_group(loss)
    with pytest.raises(ShapeError, match="state_value"):
        loss(td)


def same_outputs(one, two):
    assert set(one.keys()) == set(two.keys())
    for key, value in one.items():
        torch.testing.assert_close(value, two[key], rtol=1e-5, atol=1e-6, equal_nan=True, msg=key)


@BATCHES
@pytest.mark.parametrize("kinds", ["tanh", "categorical", TWO_HEADS], ids=str)
@pytest.mark.parametrize("name", RATIO_LOSSES)
def test_trailing_singleton_is_squeezed(name, kinds, batch, agents):
    """Case 48: log-probs stored as [B, 1] give the same loss as [B]; nothing is clipped."""
    actor, td = fresh(kinds, batch, agents=agents)
    cls, options = RATIO_LOSSES[name]
    loss = clip_loss(actor, cls=cls, agents=agents, **options).eval()
    plain = loss(td)
    wide = td.clone()
    for key in log_prob_keys(kinds, agents):
        wide[key] = td[key].unsqueeze(-1)
    stored = loss(wide)
    same_outputs(plain, stored)
    assert stored["clip_fraction"] == 0
    assert stored["max_ratio"].item() == pytest.approx(1.0, abs=1e-5)
    expected = -(td if agents is None else td["agents"])["advantage"].mean()
    heads = 1 if isinstance(kinds, str) else {"per_head": 2, "mixed": 1.5}.get(name, 1)
    torch.testing.assert_close(stored["loss_objective"], heads * expected, rtol=1e-4, atol=1e-5)


@BATCHES
@pytest.mark.parametrize("trailing", [False, True])
@pytest.mark.parametrize("move", ["tanh", "normal"])
def test_joint_log_prob(move, trailing, batch, agents):
    """Case 48: so with one joint log-prob, [*S] or [*S, 1], and event dims of a head are summed."""
    kinds = {"move": move, "gear": "categorical"}
    actor, td = fresh(kinds, batch, agents=agents)
    loss = clip_loss(actor, agents=agents)
    plain = loss(td)
    keys = log_prob_keys(kinds, agents)
    sample = (td if agents is None else td["agents"]).batch_size
    joint = sum(td[key].reshape(*sample, -1).sum(-1) for key in keys)
    holder = td.exclude(*keys)
    key = "sample_log_prob" if agents is None else ("agents", "sample_log_prob")
    holder[key] = joint.unsqueeze(-1) if trailing else joint
    out = loss(holder)
    assert set(loss.log_prob_source(holder).values()) == {"joint"}
    assert out["clip_fraction"] == 0
    torch.testing.assert_close(out["loss_objective"], plain["loss_objective"])


@pytest.mark.parametrize("kinds", ["tanh", "categorical", "normal", TWO_HEADS], ids=str)
@pytest.mark.parametrize("agents", AGENTS)
@pytest.mark.parametrize("wrong", ["front", "square", "twice"])
def test_other_stored_shapes_raise(wrong, agents, kinds):
    """Case 48: [1, B], [B, B] and [B, 1, 1] raise, with the key and both shapes, also if A == B."""
    actor, td = fresh(kinds, (B,), agents=agents)
    loss = clip_loss(actor, agents=agents)
    keys = log_prob_keys(kinds, agents)
    right = td[keys[-1]]
    value = {
        "front": right.unsqueeze(0),
        "square": right.unsqueeze(-1).expand(*right.shape, B),
        "twice": right[..., None, None],
    }[wrong]
    bad = td.exclude(keys[-1])
    bad.batch_size = []
    if agents is not None:
        bad["agents"].batch_size = []
    bad[keys[-1]] = value
    with pytest.raises(ShapeError) as caught:
        loss(bad)
    text = str(caught.value)
    name = keys[-1] if isinstance(keys[-1], str) else keys[-1][-1]
    assert name in text
    assert str(list(value.shape)) in text
    assert str(list(right.shape)) in text


@pytest.mark.parametrize("agents", AGENTS)
@pytest.mark.parametrize("kind", ["normal", "beta", "bernoulli", "gamma"])
def test_event_dims_are_summed_if_both_have_them(kind, agents):
    """Case 48: [*S, F] on both sides is summed over F; [*S] against [*S, F] is an error."""
    actor, td = fresh(kind, (B,), agents=agents)
    loss = clip_loss(actor, agents=agents)
    key = log_prob_keys(kind, agents)[0]
    right = td[key]
    holder = td if agents is None else td["agents"]
    assert right.shape == (*holder.batch_size, WIDTH)
    shift = torch.arange(right.numel()).reshape(right.shape) / 1000
    td[key] = right - shift
    ratio = shift.sum(-1).exp()  # r = exp(sum of the differences)
    advantage = holder["advantage"].squeeze(-1)
    clipped = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    out = loss(td)
    torch.testing.assert_close(out["loss_objective"], -clipped.mean(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out["max_ratio"], ratio.max(), rtol=1e-4, atol=1e-5)
    td[key] = right.sum(-1)
    with pytest.raises(ShapeError, match="action_log_prob"):
        loss(td)


@BATCHES
@pytest.mark.parametrize("kind", ["categorical", "masked"])
@pytest.mark.parametrize("name", ALL_LOSSES)
def test_action_with_trailing_singleton(name, kind, batch, agents):
    """Case 48: an action [*S, 1] of a discrete head is squeezed."""
    actor, td = fresh(kind, batch, agents=agents)
    cls, options = ALL_LOSSES[name]
    loss = clip_loss(actor, cls=cls, agents=agents, **options).eval()
    plain = loss(td)
    key = "action" if agents is None else ("agents", "action")
    td[key] = td[key].unsqueeze(-1)
    same_outputs(plain, loss(td))


@pytest.mark.parametrize("kind", ["categorical", "one_hot", "tanh", "normal", "dirichlet"])
@pytest.mark.parametrize("wrong", ["less", "front", "more"])
@pytest.mark.parametrize("agents", [None, 1, 3])
def test_other_action_shapes_raise(wrong, kind, agents):
    """Case 48: an action that lacks a dim, or has another one, is never broadcast."""
    actor, td = fresh(kind, (B,), agents=agents)
    loss = clip_loss(actor, agents=agents)
    key = "action" if agents is None else ("agents", "action")
    right = td[key]
    td.batch_size = []
    if agents is not None:
        td["agents"].batch_size = []
    td[key] = {
        "less": right[..., 0],
        "front": right.unsqueeze(0),
        "more": right.unsqueeze(-1).expand(*right.shape, B),
    }[wrong]
    with pytest.raises(ShapeError, match="action"):
        loss(td)


@pytest.mark.parametrize("kinds", ["categorical", "normal", TWO_HEADS], ids=str)
@pytest.mark.parametrize("agents", [1, 2, 3])
@pytest.mark.parametrize("name", ["joint", "per_head", "klpen", "a2c", "reinforce"])
def test_multi_agent_advantage(name, agents, kinds):
    """Case 50: of [B, 1], [B, A], [A, B, 1] and [B, A, 1] only the last passes, also if A == B."""
    actor, td = fresh(kinds, (B,), agents=agents)
    cls, options = ALL_LOSSES[name]
    loss = clip_loss(actor, cls=cls, agents=agents, **options)
    td["elsewhere"] = td["agents", "advantage"]
    loss.set_keys(advantage="elsewhere")
    right = td["elsewhere"]
    assert right.shape == (B, agents, 1)
    assert total_loss(loss(td)).isfinite()
    bad = {"one": right[:, 0], "flat": right[..., 0], "root": right.mean(1)}
    if agents != B:  # equal sizes cannot be told apart
        bad["swapped"] = right.transpose(0, 1)
    for label, value in bad.items():
        data = td.exclude("elsewhere")
        data.batch_size = [] if label == "swapped" else [B]
        data["elsewhere"] = value
        with pytest.raises(ShapeError) as caught:
            loss(data)
        assert "elsewhere" in str(caught.value), label
        if loss.surrogate.uses_ratio:
            assert log_prob_keys(kinds, agents)[0][-1] in str(caught.value), label


@pytest.mark.parametrize("agents", [1, 2, 3])
def test_team_value_needs_to_be_asked_for(agents):
    """Case 50: a value or target [B, 1] for advantages [B, A, 1] raises, also for one agent."""
    actor, td = fresh("normal", (B,), agents=agents)
    loss = clip_loss(actor, agents=agents, critic=True)
    team = critic_of()
    td["observation"] = td["agents", "observation"][:, 0]
    for change in ("target", "critic"):
        data = td.clone()
        if change == "critic":
            loss = set_group(cl.ClipPPOLoss(actor, team))
            loss.set_keys(value="state_value")
        else:
            data["team_target"] = data["agents", "value_target"][:, 0]
            loss.set_keys(value_target="team_target")
        with pytest.raises(ShapeError, match=r"state_value|team_target"):
            loss(data)


@pytest.mark.parametrize("agents", [1, 2, 3])
@pytest.mark.parametrize("kinds", ["categorical", "normal", "masked", TWO_HEADS], ids=str)
@pytest.mark.parametrize("name", ALL_LOSSES)
def test_agents_are_rows(name, kinds, agents):
    """Case 52: for A = 1, 2, 3 losses and metrics equal those of the B*A rows without a group."""
    torch.manual_seed(agents)
    actor, td = fresh(kinds, (B,), agents=agents)
    cls, options = ALL_LOSSES[name]
    loss = clip_loss(actor, cls=cls, agents=agents, critic=True, **options).eval()
    flat = td["agents"].reshape(-1)
    flat_actor = actor_of(kinds)
    flat_actor.load_state_dict(actor.state_dict())
    flat_loss = cls(flat_actor, critic_of(), **options).eval()
    with torch.no_grad():
        for to, source in zip(flat_loss.parameters(), loss.parameters(), strict=True):
            source.add_(0.05 * torch.randn_like(source))  # so that ratios are not 1
            to.copy_(source)
    one, two = loss(td), flat_loss(flat)
    same_outputs(one, two)
    if loss.surrogate.uses_ratio:
        assert one["max_ratio"] > 1.0
    for (name_one, grad_one), (name_two, grad_two) in zip(
        gradients(loss, one).items(), gradients(flat_loss, two).items(), strict=True
    ):
        torch.testing.assert_close(
            grad_one, grad_two, rtol=1e-4, atol=1e-6, msg=name_one + name_two
        )


@pytest.mark.parametrize("agents", [1, 2, 3])
@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_agents_are_kept(reduction, agents):
    """Case 52: reduction "none" keeps the agents, one included: losses are [B, A]."""
    actor, td = fresh("normal", (B,), agents=agents)
    out = clip_loss(actor, agents=agents, critic=True, reduction=reduction)(td)
    shape = (B, agents) if reduction == "none" else ()
    for key in ("loss_objective", "loss_critic", "loss_entropy"):
        assert out[key].shape == shape
    advantage = td["agents", "advantage"].squeeze(-1)
    expected = -advantage if reduction == "none" else -advantage.sum()
    torch.testing.assert_close(out["loss_objective"], expected, rtol=1e-4, atol=1e-5)


def masked_actor(where):
    net = nn.Linear(5, 5)
    in_keys = {"logits": "logits"}
    kwargs = {}
    if where == "kwargs":
        kwargs = {"mask": torch.tensor([[True, False, True, True, False]])}
    else:
        in_keys["mask"] = "action_mask"
    return ProbabilisticTensorDictSequential(
        TensorDictModule(net, in_keys=["observation"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(
            in_keys=in_keys,
            out_keys=["action"],
            distribution_class=MaskedCategorical,
            distribution_kwargs=kwargs,
            return_log_prob=False,
        ),
    )


ROOTS = [(), (2,), (2, 3), (2, 3, 4)]


@pytest.mark.parametrize(
    ("where", "root"),
    [("data", ()), *(("kwargs", root) for root in ROOTS), *(("expanded", root) for root in ROOTS)],
)
def test_broadcast_action_mask(root, where):
    """Case 55: logits [2, 3, 4, 5], mask [1, 5], actions [2, 3, 4]: masked log-softmax."""
    actor = masked_actor(where)
    mask = torch.tensor([[True, False, True, True, False]])
    td = TensorDict(observation=torch.randn(2, 3, 4, 5), advantage=torch.randn(2, 3, 4, 1))
    td["action"] = torch.tensor([0, 2, 3])[torch.randint(3, (2, 3, 4))]
    if where == "data":
        td["action_mask"] = mask
    elif where == "expanded":
        td["action_mask"] = mask.expand(2, 3, 4, 5)
    td.batch_size = root
    with torch.no_grad():
        logits = actor[0](td.copy())["logits"]
    masked = logits.masked_fill(~mask, -math.inf)
    expected = masked.log_softmax(-1).gather(-1, td["action"].unsqueeze(-1)).squeeze(-1)
    td["action_log_prob"] = expected
    loss = cl.ClipPPOLoss(actor)
    current = loss.log_probs(td)["current", "action"]
    assert current.shape == (2, 3, 4)
    torch.testing.assert_close(current, expected, rtol=1e-6, atol=1e-6)
    out = loss(td)
    assert out["max_ratio"].item() == pytest.approx(1.0, abs=1e-5)
    # −Σ p log p over the three allowed classes
    p = masked.softmax(-1)[..., [0, 2, 3]]
    torch.testing.assert_close(out["entropy"], -(p * p.log()).sum(-1).mean())
    for gradient in gradients(loss, out).values():
        assert gradient.isfinite().all()


@BATCHES
def test_scalar_batch_and_stand_alone_log_probs(batch, agents):
    """Case 48: without an advantage nothing is summed: entries keep the batch shape."""
    kinds = {"move": "normal", "gear": "categorical"}
    actor, td = fresh(kinds, batch, agents=agents)
    loss = clip_loss(actor, agents=agents)
    data = td.exclude("advantage", ("agents", "advantage"))
    prefix = () if agents is None else ("agents",)
    sample = (td if agents is None else td["agents"]).batch_size
    resolved, sources = cl.resolve_log_probs(actor, data)
    both = loss.log_probs(data)
    assert sources == {"move": "stored", "gear": "stored"}
    for head, shape in (("move", (*sample, WIDTH)), ("gear", sample)):
        key = (*prefix, head)
        assert resolved[key].shape == shape
        assert both[("current", *key)].shape == shape
        assert both[("behaviour", *key)].shape == shape
        torch.testing.assert_close(both[("current", *key)], resolved[key])


@pytest.mark.parametrize("name", ALL_LOSSES)
@pytest.mark.parametrize("kinds", ["normal", "categorical", "masked", TWO_HEADS], ids=str)
def test_one_sample_without_batch(name, kinds):
    """Case 52: batch dims may be (): one sample equals a batch of that one sample."""
    actor, td = fresh(kinds, (1,))
    cls, options = ALL_LOSSES[name]
    loss = clip_loss(actor, cls=cls, critic=True, **options).eval()
    same_outputs(loss(td), loss(td[0]))
