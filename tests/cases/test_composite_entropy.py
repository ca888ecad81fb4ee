"""Entropies, coefficients and activity of the heads of a composite action."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import composite_losses as cl
from composite_losses.errors import CompositeLossError, MissingKeyError
from tests.cases.builders_ab import (
    ALL_KINDS,
    CORE,
    FEW,
    GEOMETRIES,
    HYBRID,
    LOSSES,
    Net,
    Scene,
    Spec,
    assert_same,
    composite_actor,
    geometric,
    gradients,
    objective,
    scene,
    single_actor,
    total,
)
from tests.tolerances import assert_close

UNIT_NORMAL = 0.5 * math.log(2 * math.pi * math.e)  # 1.41894 nats per dim
BONUS = ("ppo", "clip_joint", "clip_per_head", "klpen", "a2c", "native")


def make_uniform(s: Scene) -> None:
    """Uniform logits, unit scales: raw 0 for logits and loc, softplus⁻¹(0.7) for scale."""
    with torch.no_grad():
        for spec, layer in zip(s.net.specs, s.net.layers, strict=True):
            layer.weight.zero_()
            layer.bias.zero_()
            if spec.kind in ("normal", "independent"):
                layer.bias[spec.n :] = math.log(math.expm1(0.7))


@pytest.mark.parametrize("form", CORE)
@pytest.mark.parametrize("kind", ["normal", "independent"])
def test_entropy_is_the_sum_over_heads_and_event_dims(form: str, kind: str) -> None:
    """Case 3: Categorical uniform(4) + unit Normal, 2 dims: 1.3863 + 2·1.4189 = 4.2242."""
    s = scene((Spec("gear", "cat", 4), Spec("move", kind, 2)), form)
    make_uniform(s)
    for name in BONUS:
        options = {"entropy": cl.EntropyTerm(0.5)} if name == "native" else {"entropy_coeff": 0.5}
        out = s.loss(name, **options)(s.td)
        assert abs(out["entropy"].item() - 4.2242) < 1e-4
        assert abs(out["entropy/gear"].item() - 1.3863) < 1e-4
        assert abs(out["entropy/move"].item() - 2 * 1.4189) < 2e-4
        assert abs(out["loss_entropy"].item() + 0.5 * 4.2242) < 1e-4
        assert out["loss_entropy"].shape == out["entropy"].shape == ()


@pytest.mark.parametrize("form", FEW)
@pytest.mark.parametrize("name", BONUS)
def test_entropy_gradient_reaches_every_head(form: str, name: str) -> None:
    """Case 3: the gradient of the bonus reaches both heads and equals the one by hand."""
    s = scene(HYBRID, form)
    s.move()
    out = s.loss(name)(s.td)
    expected = -0.01 * s.entropies().sum(-1).mean()
    assert_close(out["loss_entropy"], expected)
    got, want = gradients(out["loss_entropy"], s.net), gradients(expected, s.net)
    for g, w in zip(got, want, strict=True):
        assert_close(g, w)
    for layer in s.net.layers:
        (bias,) = torch.autograd.grad(out["loss_entropy"], [layer.bias], retain_graph=True)
        assert bias.abs().sum() > 0
    assert not out["entropy"].requires_grad


@pytest.mark.parametrize("form", CORE)
def test_entropy_of_every_kind_of_head(form: str) -> None:
    """Case 3: ``entropy/<head>`` equals torch.distributions' entropy, event dims summed."""
    s = scene(ALL_KINDS, form)
    out = s.loss("a2c")(s.td)
    for i, spec in enumerate(ALL_KINDS):
        assert_close(out[f"entropy/{spec.key}"], s.entropies()[..., i].mean())
    assert_close(out["entropy"], s.entropies().sum(-1).mean())


def native(coeff: Any) -> dict[str, Any]:
    return {"entropy": cl.EntropyTerm(coeff)}


def door(coeff: Any) -> dict[str, Any]:
    return {"entropy_coeff": coeff}


@pytest.mark.parametrize("form", CORE)
@pytest.mark.parametrize(
    ("name", "option"),
    [("native", native), *((n, door) for n in ("ppo", "clip_per_head", "klpen", "a2c"))],
)
def test_coefficient_per_head(form: str, name: str, option: Callable[[Any], dict]) -> None:
    """Case 15: {a: 1, b: 0} → loss_entropy = −mean H_a exactly, no gradient to head b."""
    s = scene((Spec("a", "cat", 3), Spec("b", "normal", 2)), form)
    s.move()
    out = s.loss(name, **option({"a": 1.0, "b": 0.0}))(s.td)
    assert_close(out["loss_entropy"], -s.entropies()[..., 0].mean())
    assert_close(out["entropy/a"], s.entropies()[..., 0].mean())
    assert_close(out["entropy/b"], s.entropies()[..., 1].mean())
    grads = torch.autograd.grad(
        out["loss_entropy"], list(s.net.layers[1].parameters()), allow_unused=True
    )
    assert all(g is None or not g.any() for g in grads)
    mixed = s.loss(name, **option({"b": 0.25, "a": 2.0}))(s.td)
    want = -(2.0 * s.entropies()[..., 0] + 0.25 * s.entropies()[..., 1]).mean()
    assert_close(mixed["loss_entropy"], want)


@pytest.mark.parametrize(
    ("name", "option"),
    [("native", native), *((n, door) for n in ("ppo", "clip_joint", "klpen", "a2c", "reinforce"))],
)
def test_coefficients_of_unknown_and_missing_heads(
    name: str, option: Callable[[Any], dict]
) -> None:
    """Case 15: an unknown head is an error; a head that is not named is a KeyError that says so."""
    s = scene((Spec("a", "cat", 3), Spec("b", "normal", 2)))
    with pytest.raises(CompositeLossError, match="elbow"):
        s.loss(name, **option({"a": 1.0, "b": 0.0, "elbow": 0.1}))
    with pytest.raises(KeyError, match="'b'") as caught:
        s.loss(name, **option({"a": 1.0}))
    assert "b" in str(caught.value)
    assert "\\n" not in str(caught.value)


@pytest.mark.parametrize("form", ["flat", "time", "agents1", "agents3", "A==B"])
@pytest.mark.parametrize("names", ["head", "action", "log_prob", "entropy"])
def test_coefficient_keys_of_nested_heads(form: str, names: str) -> None:
    """Case 15: ("l","x") and ("r","x") stay distinct, under every form of key."""
    s = scene((Spec(("l", "x"), "cat", 3), Spec(("r", "x"), "cat", 4)), form)
    s.move()
    prefix = f"{s.group[0]}/" if s.group else ""
    heads = [f"{prefix}l/x", f"{prefix}r/x"]
    keys: list[Any] = {
        "head": heads,
        "action": [s.action_key(0), s.action_key(1)],
        "log_prob": [s.log_prob_key(0), s.log_prob_key(1)],
        "entropy": [(*s.action_key(i)[:-1], "x_entropy") for i in range(2)],
    }[names]
    out = s.loss("clip_joint", entropy_coeff={keys[0]: 1.0, keys[1]: 0.5})(s.td)
    first, second = s.entropies().unbind(-1)
    assert_close(out["loss_entropy"], -(first + 0.5 * second).mean())
    assert_close(out[f"entropy/{heads[0]}"], first.mean())
    assert_close(out[f"entropy/{heads[1]}"], second.mean())
    ratio = s.log_ratio()
    assert_close(out[f"kl_approx/{heads[0]}"], -ratio[..., 0].mean())
    assert_close(out[f"kl_approx/{heads[1]}"], -ratio[..., 1].mean())


def test_names_are_paths_only_where_they_must_be() -> None:
    """Case 15: head names: the last element where it is unique, else the path joined by "/"."""
    specs = (Spec(("l", "x"), "cat", 3), Spec(("r", "x"), "cat", 4), Spec(("r", "y"), "cat", 2))
    s = scene(specs)
    loss = s.loss("clip_per_head", entropy_coeff={"l/x": 1.0, "r/x": 2.0, "y": 3.0})
    assert set(loss.log_prob_source(s.td)) == {"l/x", "r/x", "y"}
    want = -(s.entropies() * torch.tensor([1.0, 2.0, 3.0])).sum(-1).mean()
    assert_close(loss(s.td)["loss_entropy"], want)
    # the ambiguous last element is no name
    with pytest.raises(CompositeLossError):
        s.loss("ppo", entropy_coeff={"x": 1.0, "y": 3.0})


# what an inactive head may hold
def spoil(s: Scene) -> None:
    s.td.set(s.log_prob_key(1), torch.full_like(s.td.get(s.log_prob_key(1)), float("nan")))
    s.td.set(s.action_key(1), torch.full_like(s.td.get(s.action_key(1)), float("nan")))


@pytest.mark.parametrize("form", FEW)
@pytest.mark.parametrize("name", [n for n in LOSSES if n != "native"])
@pytest.mark.parametrize("spoiled", [False, True])
def test_head_that_is_never_active(name: str, form: str, spoiled: bool) -> None:
    """Case 25: head b inactive on all rows → loss and grads equal those of a model without b."""
    s = scene((Spec("a", "cat", 3), Spec("b", "normal", 2)), form)
    s.td.set(s.key("on"), torch.zeros(*s.sample, 1, dtype=torch.bool))
    s.move()
    alone = Net(s.net.specs[:1])
    alone.layers[0].load_state_dict(s.net.layers[0].state_dict())
    reference = LOSSES[name](composite_actor(alone, s.group), s.critic)
    reference.set_keys(**s.keys())
    expected = reference(s.td)
    loss = s.loss(name)
    loss.set_keys(head_active={"b": s.key("on")})
    if spoiled:
        spoil(s)
    out = loss(s.td)
    for key in expected.keys():  # noqa: SIM118
        torch.testing.assert_close(out[key], expected[key], msg=lambda m, k=key: f"{k}: {m}")
    want = gradients(total(expected), alone)
    got = gradients(total(out), s.net)
    for g, w in zip(got[:2], want, strict=True):
        assert_close(g, w)
    for g in got[2:]:
        assert torch.equal(g, torch.zeros_like(g))
    assert out["entropy/b"] == 0.0
    for key in ("kl_approx/b", "clip_fraction/b"):
        assert key not in out.keys() or out[key] == 0.0  # noqa: SIM118


@pytest.mark.parametrize("form", CORE)
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("singleton", [False, True])
def test_head_that_is_active_in_some_rows(form: str, geometry: str, singleton: bool) -> None:
    """Case 25: an inactive head is factor 1 in joint and leafwise, 0 in per_head and entropy."""
    s = scene((Spec("a", "cat", 3), Spec("b", "normal", 2)), form)
    s.move(0.3)
    on = torch.arange(math.prod(s.sample)).reshape(s.sample) % 3 != 0
    s.td.set(s.key("on"), on.unsqueeze(-1) if singleton else on)
    loss = s.loss(f"clip_{geometry}", critic=False, entropy_coeff=1.0)
    loss.set_keys(head_active={"b": s.key("on")})
    out = loss(s.td)

    active = torch.stack([torch.ones_like(on), on], -1)
    ratio = s.log_ratio() * active
    if geometry in ("joint", "leafwise"):
        want = geometric(geometry, ratio, s.advantage)
    else:
        r, adv = ratio.exp(), s.advantage.unsqueeze(-1)
        each = torch.minimum(r * adv, r.clamp(0.8, 1.2) * adv) * active
        want = each.sum(-1)
        if geometry == "mixed":
            want = 0.5 * want + 0.5 * geometric("joint", ratio, s.advantage)
    assert_close(out["loss_objective"], -want.mean())
    entropy = s.entropies() * active
    assert_close(out["loss_entropy"], -entropy.sum(-1).mean())
    assert_close(out["entropy"], entropy.sum(-1).mean())
    # its own metrics: over the rows where it acts
    count = on.sum().clamp_min(1)
    assert_close(out["entropy/b"], entropy[..., 1].sum() / count)
    assert_close(out["kl_approx/b"], -ratio[..., 1].sum() / count)
    clipped = ((ratio[..., 1].exp() - 1).abs() > 0.2) & on
    assert_close(out["clip_fraction/b"], clipped.sum() / count)
    got = gradients(out["loss_objective"], s.net)
    for g, w in zip(got, gradients(-want.mean(), s.net), strict=True):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("form", ["flat", "agents3", "A==B"])
@pytest.mark.parametrize("name", [n for n in LOSSES if n != "native"])
def test_row_without_an_active_head(form: str, name: str) -> None:
    """Case 25: a row with no active head is masked for the policy terms, not for the value term."""
    s = scene(HYBRID, form)
    s.move()
    on = torch.ones(s.sample, dtype=torch.bool)
    on[0] = False
    s.td.set(s.key("on"), on)
    loss = s.loss(name).eval()  # klpen's beta stays
    critic_before = loss(s.td)["loss_value" if name == "reinforce" else "loss_critic"]
    full = s.loss(name, reduction="none")(s.td)
    loss.set_keys(head_active={"gear": s.key("on"), "move": s.key("on")})
    out = loss(s.td)
    assert_close(objective(out), objective(full)[on].mean())
    if "loss_entropy" in out.keys():  # noqa: SIM118
        assert_close(out["loss_entropy"], full["loss_entropy"][on].mean())
    assert_close(out["loss_value" if name == "reinforce" else "loss_critic"], critic_before)


def test_unknown_head_in_head_active_is_an_error_and_changes_nothing() -> None:
    """Case 25: ``set_keys(head_active={"elbow": …})`` names the heads; the loss works as before."""
    s = scene(HYBRID)
    loss = s.loss("ppo")
    expected = loss(s.td)
    with pytest.raises(ValueError, match="elbow"):
        loss.set_keys(head_active={"elbow": "on"})
    assert_same(loss(s.td), expected, exact=True)
    loss.set_keys(head_active={"gear": "on"})
    with pytest.raises(MissingKeyError, match="'on'"):
        loss(s.td)


def test_bonus_includes_the_continuous_head() -> None:
    """Case 26: a hybrid policy's bonus is the discrete plus the continuous entropy."""
    s = scene(HYBRID)
    out = s.loss("clip_joint", entropy_coeff=1.0)(s.td)
    params = s.net.params(s.obs)
    p = params[0]["logits"].softmax(-1)
    discrete = -(p * p.log()).sum(-1).mean()
    continuous = (UNIT_NORMAL + params[1]["scale"].log()).sum(-1).mean()
    assert_close(out["loss_entropy"], -(discrete + continuous))
    assert_close(out["entropy/gear"], discrete)
    assert_close(out["entropy/move"], continuous)


@pytest.mark.parametrize("dims", [1, 2, 5])
@pytest.mark.parametrize("kind", ["normal", "independent"])
@pytest.mark.parametrize("form", ["flat", "time", "agents2", "A==B"])
def test_unit_normal_entropy(dims: int, kind: str, form: str) -> None:
    """Case 28: entropy of a D-dim unit Normal = 1.4189·D for D in 1, 2, 5, composite or not."""
    for actor in (composite_actor, single_actor):
        s = scene((Spec("move", kind, dims),), form, actor=actor)
        make_uniform(s)
        out = s.loss("clip_joint", entropy_coeff=1.0)(s.td)
        assert abs(out["entropy"].item() - 1.4189 * dims) < 1e-4 * dims
        assert abs(out["loss_entropy"].item() + 1.4189 * dims) < 1e-4 * dims


@pytest.mark.parametrize("form", FEW)
@pytest.mark.parametrize("name", LOSSES)
def test_unreduced_losses_have_the_shape_of_the_batch(name: str, form: str) -> None:
    """Case 29: reduction="none", D = 3: every returned loss term has the batch's shape."""
    three = (Spec("move", "normal", 3), Spec("turn", "independent", 3), Spec("gain", "beta", 3))
    scenes = [scene(three, form), scene(three[:1], form, actor=single_actor)]
    for s in scenes:
        s.move()
        out = s.loss(name, reduction="none")(s.td)
        losses = [k for k in out.keys() if k.startswith("loss")]  # noqa: SIM118
        assert len(losses) == (2 if name == "reinforce" else 3)
        for key in losses:
            assert out[key].shape == s.sample, key
        for key in set(out.keys()) - set(losses):
            assert out[key].shape == (), key
        assert out.batch_size == ()
        if name in ("ppo", "clip_joint"):
            ratio = s.log_ratio().sum(-1).exp()
            want = ratio * s.advantage
            if name == "clip_joint":
                want = geometric("joint", s.log_ratio(), s.advantage)
            assert_close(out["loss_objective"], -want)
            assert_close(out["loss_entropy"], -0.01 * s.entropies().sum(-1))


@pytest.mark.parametrize("form", ["flat", "agents3", "A==B"])
def test_kl_is_reduced_over_event_dims(form: str) -> None:
    """Case 29: KL(old ‖ new) of a 3-dim Normal is the sum over its dims, per sample."""
    s = scene((Spec("gear", "cat", 3), Spec("move", "normal", 3)), form)
    old = s.net.params(s.obs)
    old = [{k: v.detach() for k, v in p.items()} for p in old]
    s.move()
    new = s.net.params(s.obs)
    p, q = old[0]["logits"].log_softmax(-1), new[0]["logits"].log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1)
    a, b = old[1], new[1]
    kl = kl + (
        (b["scale"] / a["scale"]).log()
        + (a["scale"].square() + (a["loc"] - b["loc"]).square()) / (2 * b["scale"].square())
        - 0.5
    ).sum(-1)
    out = s.loss("klpen", critic=False, reduction="none", beta=2.0)(s.td)
    ratio = s.log_ratio().sum(-1).exp()
    assert_close(out["loss_objective"], -(ratio * s.advantage - 2.0 * kl))
    assert_close(out["kl"], kl.mean())
    assert_close(out["beta"], 2.0)


def test_one_td_of_advantages_keeps_nested_heads_apart() -> None:
    """Case 15: advantages per head, nested like the actions, reach the right head."""
    s = scene((Spec(("l", "x"), "cat", 3), Spec(("r", "x"), "cat", 4)))
    s.move()
    adv = torch.randn(6, 2)
    entries = {"l": {"x": adv[:, :1]}, "r": {"x": adv[:, 1:]}}
    s.td["advantage"] = TensorDict(entries, batch_size=[6])
    r = s.log_ratio().exp()
    want = torch.minimum(r * adv, r.clamp(0.8, 1.2) * adv).sum(-1).mean()
    assert_close(s.loss("clip_per_head", critic=False)(s.td)["loss_objective"], -want)
