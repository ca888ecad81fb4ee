"""Log-probs of composite actions and the ratios made of them."""

import math

import pytest
import torch
from tensordict import TensorDict
from torch import distributions as D

import composite_losses as cl
from composite_losses.errors import MissingKeyError, ShapeError
from tests.cases.builders_ab import (
    ALL_KINDS,
    CORE,
    DISCRETE,
    FEW,
    FORMS,
    GEOMETRIES,
    HYBRID,
    JOINT_LOSSES,
    LOSSES,
    RATIO_LOSSES,
    Net,
    Spec,
    assert_same,
    composite_actor,
    geometric,
    gradients,
    objective,
    scene,
    snapshot,
    total,
)
from tests.tolerances import assert_close

FRESH = 1e-6  # |log-ratio| on fresh float32 data


@pytest.mark.parametrize("form", FEW)
@pytest.mark.parametrize("name", RATIO_LOSSES)
def test_fresh_rollout_has_ratio_one(name: str, form: str) -> None:
    """Case 1: two Categorical heads, fresh rollout: the ratio is exactly 1, the KL 0."""
    s = scene(DISCRETE, form)
    out = s.loss(name)(s.td)
    for key in ("kl_approx", "kl_k3", "clip_fraction", "kl_approx/a", "kl_approx/b"):
        assert abs(out[key].item()) <= FRESH, key
    for key in ("max_ratio", "mean_ratio", "ESS"):
        assert abs(out[key].item() - 1.0) <= FRESH, key
    heads = 2 if name == "clip_per_head" else 1.5 if name == "clip_mixed" else 1
    assert_close(objective(out), -heads * s.advantage.mean())


@pytest.mark.parametrize("form", FEW)
@pytest.mark.parametrize("name", LOSSES)
def test_stray_singleton_of_a_stored_action(name: str, form: str) -> None:
    """Case 1: heads unsqueezed to [B, 1] give the same loss, gradients and metrics."""
    s = scene(DISCRETE, form)
    s.move()
    loss = s.loss(name).eval()
    expected = loss(s.td)
    for which in ((0,), (1,), (0, 1)):
        other = s.td.clone()
        for i in which:
            other.set(s.action_key(i), s.td.get(s.action_key(i)).unsqueeze(-1))
        before = snapshot(other)
        out = loss(other)
        assert_same(out, expected)
        got, want = gradients(total(out), s.net), gradients(total(expected), s.net)
        for g, w in zip(got, want, strict=True):
            assert_close(g, w)
        assert snapshot(other) == before


def wrong_actions(action: torch.Tensor) -> dict[str, torch.Tensor]:
    """Actions whose shape would broadcast against their distribution."""
    return {
        "two singletons": action[..., None, None],
        "leading singleton": action.unsqueeze(0),
        "first row": action[:1],
        "doubled": torch.stack([action, action], -1),
    }


@pytest.mark.parametrize("form", ["flat", "time", "agents2", "A==B", "A==B==T"])
@pytest.mark.parametrize("name", ["ppo", "a2c", "reinforce"])
def test_other_action_shapes_are_errors_that_name_the_head(name: str, form: str) -> None:
    """Case 1: anything but a trailing singleton raises and names head ``a``; nothing broadcasts."""
    s = scene(DISCRETE, form)
    loss = s.loss(name)
    for what, action in wrong_actions(s.td.get(s.action_key(0))).items():
        # the shapes are wrong for the batch, so they are kept out of TensorDict's own check
        td = TensorDict(dict(s.td.items()), batch_size=[])
        if s.group:
            td["agents"] = TensorDict(dict(s.td["agents"].items()), batch_size=[])
        td.set(s.action_key(0), action)
        before = snapshot(td)
        with pytest.raises(ShapeError) as caught:
            loss(td)
        assert "'a'" in str(caught.value), what
        assert str(list(action.shape)) in str(caught.value), what
        assert snapshot(td) == before


@pytest.mark.parametrize("dims", [1, 3])
def test_continuous_action_without_its_event_dim_is_an_error(dims: int) -> None:
    """Case 1: a Normal head of F dims given [B] raises, also for B == F."""
    s = scene((Spec("gear", "cat", 3), Spec("move", "normal", dims)), "A==B")
    s.td.set(s.action_key(1), s.td.get(s.action_key(1))[..., 0])
    for name in ("ppo", "a2c", "reinforce"):
        with pytest.raises(ShapeError, match="move"):
            s.loss(name)(s.td)


@pytest.mark.parametrize("form", CORE)
@pytest.mark.parametrize(
    ("geometry", "loss_at_plus", "loss_at_minus", "fraction"),
    [
        # r = e^0.3 · e^-0.3 = 1
        ("joint", -1.0, 1.0, 0.0),
        # e^0.3 = 1.34986 → 1.2 at A = 1, kept at A = −1; e^-0.3 = 0.74082 kept, → 0.8 at A = −1
        ("per_head", -(1.2 + math.exp(-0.3)), math.exp(0.3) + 0.8, 1.0),
        # 1.2 · 0.8 = 0.96: min(1, 0.96) at A = 1, min(−1, −0.96) at A = −1
        ("leafwise", -0.96, 1.0, 1.0),
        ("mixed", -(1.0 + 1.2 + math.exp(-0.3)) / 2, (1.0 + math.exp(0.3) + 0.8) / 2, 0.0),
    ],
)
def test_opposite_log_ratios(
    form: str, geometry: str, loss_at_plus: float, loss_at_minus: float, fraction: float
) -> None:
    """Case 2: log-ratios +0.3 and −0.3, eps 0.2, adv 1: the joint loss is −1.0, nothing clipped."""
    s = scene(HYBRID, form)
    s.set_log_ratio(0.3, -0.3)
    loss = s.loss(f"clip_{geometry}", critic=False)
    s.td.set(s.key("advantage"), torch.ones_like(s.td.get(s.key("advantage"))))
    out = loss(s.td)
    assert_close(out["loss_objective"], loss_at_plus)
    assert_close(out["clip_fraction"], fraction)
    assert_close(out["mean_ratio"], 1.0)
    assert_close(out["clip_fraction/gear"], 1.0)
    assert_close(out["clip_fraction/move"], 1.0)
    s.td.set(s.key("advantage"), -torch.ones_like(s.td.get(s.key("advantage"))))
    assert_close(loss(s.td)["loss_objective"], loss_at_minus)


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("form", CORE)
def test_geometries_by_hand(form: str, geometry: str) -> None:
    """Case 2: loss and gradients of every geometry for moved weights, worked out by hand."""
    s = scene(ALL_KINDS, form)
    s.move(0.2)
    out = s.loss(f"clip_{geometry}", critic=False)(s.td)
    expected = -geometric(geometry, s.log_ratio(), s.advantage).mean()
    assert_close(out["loss_objective"], expected)
    got, want = gradients(out["loss_objective"], s.net), gradients(expected, s.net)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", ["agents1", "agents2", "agents3", "A==B", "flat", "time"])
@pytest.mark.parametrize("name", ["ppo", "clip_joint", "clip_per_head", "a2c", "reinforce"])
def test_stacked_univariate_beside_multivariate(name: str, form: str) -> None:
    """Case 4: Dirichlet(3), stacked Beta (4,) and Normal (2,) on [B, A] equal the sum by hand."""
    s = scene(
        (Spec("share", "dirichlet", 3), Spec("gain", "beta", 4), Spec("move", "normal", 2)), form
    )
    assert s.td.get(s.log_prob_key(0)).shape == s.sample  # [B, A]
    assert s.td.get(s.log_prob_key(1)).shape == (*s.sample, 4)  # [B, A, F]
    s.move()
    out = s.loss(name, critic=False)(s.td)
    if name in ("a2c", "reinforce"):
        expected = -(s.log_probs().sum(-1) * s.advantage).mean()
    elif name == "ppo":
        expected = -(s.log_ratio().sum(-1).exp() * s.advantage).mean()
    else:
        expected = -geometric(name.removeprefix("clip_"), s.log_ratio(), s.advantage).mean()
    assert_close(objective(out), expected)
    parts = s.loss("ppo").log_probs(s.td)
    assert parts["behaviour"].get(s.action_key(1)).requires_grad is False


@pytest.mark.parametrize("agents", [1, 2, 3])
@pytest.mark.parametrize("name", LOSSES)
def test_root_without_batch_size(name: str, agents: int) -> None:
    """Case 6: root batch size [], group batch [A]: reduction="none" gives per-agent entries [A]."""
    net = Net(HYBRID)
    actor = composite_actor(net, ("agents",))
    group = TensorDict({"observation": torch.randn(agents, 4)}, [agents])
    td = TensorDict({"done": torch.zeros(5, 1, dtype=torch.bool), "agents": group}, [])
    with torch.no_grad():
        actor(td)
    td["agents", "advantage"] = torch.randn(agents, 1)
    loss = LOSSES[name](actor, None, reduction="none")
    loss.set_keys(advantage=("agents", "advantage"))
    out = loss(td)
    assert out.batch_size == ()
    assert objective(out).shape == (agents,)
    if "loss_entropy" in loss.out_keys:
        assert out["loss_entropy"].shape == (agents,)
    params = net.params(td["agents", "observation"])
    lp = D.Categorical(**params[0]).log_prob(td["agents", "gear"])
    lp = lp + D.Normal(**params[1]).log_prob(td["agents", "move"]).sum(-1)
    adv = td["agents", "advantage"].squeeze(-1)
    scale = {"clip_per_head": 2.0, "clip_mixed": 1.5}.get(name, 1.0)
    assert_close(objective(out), -lp * adv if name in ("a2c", "reinforce") else -scale * adv)


def test_root_without_batch_size_and_a_deeper_group() -> None:
    """Case 6: root batch size [], group batch [3, 2]: entries [3, 2]."""
    net = Net(HYBRID)
    actor = composite_actor(net, ("agents",))
    group = TensorDict({"observation": torch.randn(3, 2, 4)}, [3, 2])
    td = TensorDict({"agents": group}, [])
    with torch.no_grad():
        actor(td)
    td["agents", "advantage"] = torch.randn(3, 2, 1)
    loss = cl.PPOLoss(actor, reduction="none")
    loss.set_keys(advantage=("agents", "advantage"))
    assert loss(td)["loss_objective"].shape == (3, 2)


@pytest.mark.parametrize("form", CORE)
@pytest.mark.parametrize("name", JOINT_LOSSES)
@pytest.mark.parametrize("place", ["set", "beside", "root", "singleton"])
def test_joint_log_prob_equals_the_per_head_form(name: str, form: str, place: str) -> None:
    """Case 7: loss(joint tensor) == loss(per-head TD) to 1e-6, also for A == B."""
    s = scene(HYBRID, form)
    s.move()
    loss = s.loss(name)
    expected = loss(s.td)
    td = s.td.clone()
    joint = s.stored().sum(-1)
    for i in range(2):
        td.pop(s.log_prob_key(i))
    if place == "set":
        td.set(s.key("summed"), joint)
        loss.set_keys(sample_log_prob=s.key("summed"))
    elif place == "beside":
        td.set(s.key("sample_log_prob"), joint)
    elif place == "root":
        td.set("sample_log_prob", joint)
    else:
        td.set(s.key("sample_log_prob"), joint.unsqueeze(-1))
    assert loss.log_prob_source(td) == {"gear": "joint", "move": "joint"}
    out = loss(td)
    for key in ("loss_objective", "loss_critic", "loss_entropy", "kl_approx", "ESS", "max_ratio"):
        torch.testing.assert_close(out[key], expected[key], rtol=0.0, atol=1e-6)
    got, want = gradients(total(out), s.net), gradients(total(expected), s.net)
    for g, w in zip(got, want, strict=True):
        assert_close(g, w)
    # what only a joint log-prob cannot tell
    assert set(out.keys()) == set(loss.out_keys) == set(expected.keys())
    for key in ("kl_approx/gear", "kl_approx/move", "clip_fraction/gear", "clip_fraction/move"):
        assert out[key].isnan(), key
    assert_close(out["entropy/gear"], expected["entropy/gear"])


@pytest.mark.parametrize("form", ["agents2", "agents3", "A==B", "A==B==T", "time"])
def test_joint_log_prob_of_another_shape_is_an_error(form: str) -> None:
    """Case 7: a joint tensor with the agents summed away: an error with key and both shapes."""
    s = scene(HYBRID, form)
    loss = s.loss("clip_joint")
    joint = s.stored().sum(-1).sum(-1)
    for i in range(2):
        s.td.pop(s.log_prob_key(i))
    td = TensorDict(dict(s.td.items()), batch_size=s.td.batch_size[:1])
    td.set("sample_log_prob", joint)
    loss.set_keys(sample_log_prob="sample_log_prob")
    with pytest.raises(ShapeError) as caught:
        loss(td)
    for piece in ("sample_log_prob", str(list(s.sample)), str(list(joint.shape))):
        assert piece in str(caught.value)


@pytest.mark.parametrize("name", ["clip_per_head", "clip_leafwise", "clip_mixed"])
def test_joint_log_prob_does_not_serve_ratios_per_head(name: str) -> None:
    """Case 7: where ratios per head are needed, a joint log-prob is no use: params or error."""
    s = scene(HYBRID, "agents2")
    s.move()
    loss = s.loss(name)
    expected = loss(s.td)
    s.td.set(s.key("sample_log_prob"), s.stored().sum(-1) + 1.0)
    for i in range(2):
        s.td.pop(s.log_prob_key(i))
    assert loss.log_prob_source(s.td) == {"gear": "params", "move": "params"}
    assert_same(loss(s.td), expected)
    s.td["agents"].pop("params")
    with pytest.raises(MissingKeyError, match="gear"):
        loss(s.td)


@pytest.mark.parametrize("form", FORMS)
def test_mixed_action_layouts(form: str) -> None:
    """Case 19: Categorical [B], OneHotCategorical [B, n], Normal [B, 2] in one policy."""
    specs = (Spec("cat", "cat", 3), Spec("one", "onehot", 4), Spec("move", "normal", 2))
    s = scene(specs, form)
    loss = s.loss("clip_joint")
    fresh = loss(s.td)
    assert abs(fresh["kl_k3"].item()) <= FRESH
    assert abs(fresh["max_ratio"].item() - 1.0) <= FRESH
    s.move()
    out = loss(s.td)
    assert_close(out["loss_objective"], -geometric("joint", s.log_ratio(), s.advantage).mean())
    for i, name in enumerate(("cat", "one", "move")):
        assert_close(out[f"kl_approx/{name}"], -s.log_ratio()[..., i].mean())
    s.td.set(s.action_key(0), s.td.get(s.action_key(0)).unsqueeze(-1))
    assert_same(loss(s.td), out)
    s.td.set(s.log_prob_key(1), s.td.get(s.log_prob_key(1)).unsqueeze(-1))
    assert_same(loss(s.td), out)


@pytest.mark.parametrize("form", FORMS)
def test_ratio_is_the_exponential_of_the_summed_log_ratio(form: str) -> None:
    """Case 23: head log-ratios (0.1, −0.2, 0.4) → ratio exp(0.3) = 1.34986."""
    s = scene((Spec("a", "cat", 3), Spec("b", "cat", 2), Spec("c", "normal", 2)), form)
    s.set_log_ratio(0.1, -0.2, 0.4)
    s.td.set(s.key("advantage"), torch.ones_like(s.td.get(s.key("advantage"))))
    out = s.loss("ppo", critic=False)(s.td)
    for key in ("mean_ratio", "max_ratio"):
        assert abs(out[key].item() - 1.34986) < 5e-6
    assert abs(out["loss_objective"].item() + 1.34986) < 5e-6
    assert_close(out["kl_approx"], -0.3)
    for name, value in zip("abc", (0.1, -0.2, 0.4), strict=True):
        torch.testing.assert_close(out[f"kl_approx/{name}"].item(), -value, rtol=0, atol=1e-6)
    # clipped jointly: 1.2 where A = 1
    assert_close(s.loss("clip_joint", critic=False)(s.td)["loss_objective"], -1.2)


@pytest.mark.parametrize("form", CORE)
@pytest.mark.parametrize("kind", ["cat", "normal", "onehot"])
def test_one_head_is_no_special_case(form: str, kind: str) -> None:
    """Case 2: a composite of one head: all geometries agree, and equal the joint value by hand."""
    s = scene((Spec("only", kind, 3),), form)
    s.move()
    outs = [s.loss(f"clip_{g}")(s.td) for g in GEOMETRIES]
    for out in outs[1:]:
        assert_same(out, outs[0])
    assert not [k for k in outs[0].keys() if "/" in k]  # noqa: SIM118
    expected = -geometric("joint", s.log_ratio(), s.advantage).mean()
    assert_close(outs[0]["loss_objective"], expected)


@pytest.mark.parametrize("form", ["flat", "agents3", "A==B"])
def test_advantage_per_head(form: str) -> None:
    """Case 2: a TensorDict of advantages per head is Σ P(r_h, A_h), with per_head only."""
    s = scene(HYBRID, form)
    s.move()
    adv = torch.randn(*s.sample, 2)
    s.td.set(
        s.key("advantage"),
        TensorDict({"move": adv[..., 1:], "gear": adv[..., :1]}, batch_size=s.sample),
    )
    ratio = s.log_ratio().exp()
    clipped = torch.minimum(ratio * adv, ratio.clamp(0.8, 1.2) * adv)
    out = s.loss("clip_per_head", critic=False)(s.td)
    assert_close(out["loss_objective"], -clipped.sum(-1).mean())
    with pytest.raises(ValueError, match="per_head"):
        s.loss("clip_joint", critic=False)(s.td)
