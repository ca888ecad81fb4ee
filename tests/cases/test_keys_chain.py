"""The behaviour log-prob: stored, joint, rebuilt from stored parameters, or a clear error."""

import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch import distributions as D

import composite_losses as cl
from composite_losses.errors import ConfigError, MissingKeyError
from tests.cases.builders_ab import (
    CORE,
    DISCRETE,
    FORMS,
    GEOMETRIES,
    HYBRID,
    JOINT_LOSSES,
    RATIO_LOSSES,
    Net,
    Scene,
    Spec,
    assert_same,
    bare,
    composite_actor,
    geometric,
    gradients,
    objective,
    rollout,
    scene,
    single_actor,
    snapshot,
    total,
)
from tests.tolerances import assert_close

CHAIN = ("clip_joint", "clip_per_head", "klpen")


def drop(td: TensorDict, *keys: Any) -> TensorDict:
    """A copy of the data without some entries."""
    return td.clone().exclude(*keys)


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", CORE)
@pytest.mark.parametrize("written", ["sample_log_prob", "action_log_prob"])
@pytest.mark.parametrize("declared", ["sample_log_prob", "action_log_prob"])
def test_either_name_of_the_log_prob(form: str, written: str, declared: str) -> None:
    """Case 31: actors writing each name work with the defaults, and read what the other wrote."""
    group = () if FORMS[form][1] is None else ("agents",)
    s = scene(
        (Spec("action", "independent", 2),),
        form,
        actor=single_actor,
        log_prob_key=bare((*group, written)),
    )
    old = s.log_probs().detach()
    assert_close(s.td.get(s.key(written)), old[..., 0])
    s.actor = single_actor(s.net, group, log_prob_key=s.key(declared))
    s.move()
    for loss in (s.loss("clip_joint"), s.loss("clip_joint", log_prob_source="stored")):
        assert loss.log_prob_source(s.td) == {"action": "stored"}
        want = -geometric("joint", s.log_probs() - old, s.advantage).mean()
        assert_close(loss(s.td)["loss_objective"], want)
    # a root entry is found too
    s.td.set("sample_log_prob", s.td.get(s.key(written)).clone())
    if s.group:
        s.td["agents"].pop(written)
    assert_close(s.loss("clip_joint", log_prob_source="stored")(s.td)["loss_objective"], want)


@pytest.mark.parametrize("form", CORE)
def test_neither_name_lists_all_candidates(form: str) -> None:
    """Case 31: with neither name the KeyError holds both candidates and the fall-back keys."""
    s = scene((Spec("action", "independent", 2),), form, actor=single_actor)
    s.td = drop(s.td, s.key("action_log_prob"), s.key("loc"))
    loss = s.loss("clip_joint")
    before = snapshot(s.td)
    with pytest.raises(KeyError) as caught:
        loss(s.td)
    message = str(caught.value)
    keys = ["action_log_prob", "sample_log_prob", "loc", "scale", "advantage"]
    for key in [s.key(name) for name in keys]:
        assert repr(key) in message, key
    assert "'sample_log_prob'" in message  # at the root
    assert snapshot(s.td) == before


# --- what is missing ------------------------------------------------------------------------------


@pytest.mark.parametrize("form", CORE)
@pytest.mark.parametrize("name", RATIO_LOSSES)
def test_each_ingredient_in_turn(name: str, form: str) -> None:
    """Case 32: the message says head, keys of every step, keys present, and the fix."""
    s = scene(DISCRETE, form)
    lp = [s.log_prob_key(0), s.log_prob_key(1)]
    params = s.key("params")

    def message(td: TensorDict, **options: Any) -> str:
        loss = s.loss(name, **options)
        before, state = snapshot(td), torch.get_rng_state()
        with pytest.raises(MissingKeyError) as caught:
            loss(td)
        assert isinstance(caught.value, KeyError)
        assert snapshot(td) == before
        assert torch.equal(torch.get_rng_state(), state)
        return str(caught.value)

    full = s.loss(name).eval()(s.td)
    klpen = name == "klpen"
    for head in range(2):
        # stored missing, params there: the chain goes on
        less = drop(s.td, lp[head])
        sources = {"a": "stored", "b": "stored"} | {"ab"[head]: "params"}
        assert s.loss(name).log_prob_source(less) == sources
        assert_same(s.loss(name).eval()(less), full)
        if not klpen:
            text = message(less, log_prob_source="stored")
            assert repr(lp[head]) in text
            assert "stored" in text
            # params missing too: the head is named, and everything that was tried
            text = message(drop(s.td, lp[head], params))
            for piece in (
                f"'{'ab'[head]}'",
                repr(lp[head]),
                repr(params),
                "stored",
                "params",
                "return_log_prob",
                "set_keys",
                repr(s.key("observation")),
                repr(lp[1 - head]),
            ):
                assert piece in text, piece
            assert "\\n" not in text
    # forced params, without them
    text = message(drop(s.td, params), log_prob_source="params")
    assert repr(params) in text
    assert "'a'" in text
    if klpen:  # needs the parameters in any case
        assert repr(params) in message(drop(s.td, params))
        inner = drop(s.td, bare((*s.group, "params", "dist1", "logits")))
        assert "'b'" in message(inner)
    if name in JOINT_LOSSES:
        text = message(drop(s.td, *lp, params))
        assert "sample_log_prob" in text
        assert "joint" in text


def test_helpers_raise_the_same_error() -> None:
    """Case 32: ``resolve_log_probs``, ``log_probs`` and ``log_prob_source`` explain it too."""
    s = scene(DISCRETE, "agents2")
    td = drop(s.td, s.log_prob_key(1), s.key("params"))
    loss = s.loss("clip_joint")
    before = snapshot(td)
    for call in (
        lambda: cl.resolve_log_probs(s.actor, td),
        lambda: loss.log_probs(td),
        lambda: loss.log_prob_source(td),
        lambda: cl.diagnose(loss, td),
    ):
        with pytest.raises(MissingKeyError, match="return_log_prob") as caught:
            call()
        assert "'b'" in str(caught.value)
        assert "('agents', 'b_log_prob')" in str(caught.value)
    assert snapshot(td) == before


# --- stored parameters ----------------------------------------------------------------------------


def fixed(s: Scene, *raw: list[float]) -> None:
    """Sets what every head's layer gives, whatever the observation."""
    with torch.no_grad():
        for layer, values in zip(s.net.layers, raw, strict=True):
            layer.weight.zero_()
            layer.bias.copy_(torch.tensor(values))


UNIT = math.log(math.expm1(0.7))  # softplus⁻¹(0.7), and 0.7 + 0.3 = 1


@pytest.mark.parametrize("form", CORE)
@pytest.mark.parametrize("kind", ["normal", "independent"])
@pytest.mark.parametrize("actor", [composite_actor, single_actor])
def test_kl_between_stored_and_current_parameters(form: str, kind: str, actor: Any) -> None:
    """Case 33: stored loc 0, scale 1 against current loc 1, scale 1 → KL = 0.5."""
    s = scene((Spec("move", kind, 1),), form, actor=actor)
    fixed(s, [0.0, UNIT])
    s.td = rollout(s.actor, *FORMS[form], s.group, torch.float32)
    fixed(s, [1.0, UNIT])
    before = snapshot(s.td)
    for _ in range(2):
        loss = s.loss("klpen", critic=False)
        out = loss(s.td)
        assert abs(out["kl"].item() - 0.5) < 1e-6
        # log r = −(a−1)²/2 + a²/2 = a − 1/2
        action = s.td.get(s.action_key(0)).squeeze(-1)
        want = -((action - 0.5).exp() * s.advantage - 0.5).mean()
        assert_close(out["loss_objective"], want)
    assert snapshot(s.td) == before


@pytest.mark.parametrize("form", CORE)
@pytest.mark.parametrize("action", [0, 1])
def test_rebuilt_from_stored_logits(form: str, action: int) -> None:
    """Case 33: logits (log .7, log .3): action 0 → −0.35667, 1 → −1.20397, for any current net."""
    s = scene((Spec("gear", "cat", 2), Spec("move", "normal", 2)), form)
    logits = s.td.get(bare((*s.group, "params", "dist0", "logits")))
    logits.copy_(torch.tensor([0.7, 0.3]).log().expand_as(logits))
    s.td.get(s.action_key(0)).fill_(action)
    s.td = drop(s.td, s.log_prob_key(0))
    before = snapshot(s.td)
    want = torch.tensor([0.7, 0.3]).log()[action]
    assert abs(want.item() - (-0.35667, -1.20397)[action]) < 1e-5
    for scale in (0.0, 1.0, 10.0):
        s.move(scale)
        loss = s.loss("clip_joint")
        behaviour = loss.log_probs(s.td)["behaviour"]
        found, sources = cl.resolve_log_probs(s.actor, s.td)
        assert sources == loss.log_prob_source(s.td) == {"gear": "params", "move": "stored"}
        for td in (behaviour, found):
            assert_close(td.get(s.action_key(0)), want.expand(s.sample))
            assert torch.equal(td.get(s.action_key(1)), s.td.get(s.log_prob_key(1)))
        loss(s.td)
    assert snapshot(s.td) == before


@pytest.mark.parametrize("form", CORE)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_current_actor_never_invents_the_behaviour(form: str, geometry: str) -> None:
    """Case 35: moved weights, nothing stored → error; with stored parameters the hand value."""
    s = scene(HYBRID, form)
    old = s.log_probs().detach()
    s.move(0.3)
    td = drop(s.td, s.log_prob_key(0), s.log_prob_key(1))
    loss = s.loss(f"clip_{geometry}", critic=False)
    out = loss(td)
    assert loss.log_prob_source(td) == {"gear": "params", "move": "params"}
    gap = s.log_probs() - old
    assert (out["mean_ratio"] - 1).abs() > 1e-3
    assert_close(out["mean_ratio"], gap.sum(-1).exp().mean())
    want = -geometric(geometry, gap, s.advantage).mean()
    assert_close(out["loss_objective"], want)
    for g, w in zip(gradients(total(out), s.net), gradients(total(loss(s.td)), s.net), strict=True):
        assert_close(g, w)
    with pytest.raises(MissingKeyError):
        loss(drop(td, s.key("params")))


class Running(nn.Module):
    """An observation normaliser with running statistics, before a policy."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, obs: Tensor) -> tuple[Tensor, ...]:
        self.calls += 1
        return self.net(obs - self.mean)

    def names(self) -> list[list[str]]:
        return self.net.names()

    @property
    def specs(self) -> list[Spec]:
        return self.net.specs


@pytest.mark.parametrize("form", CORE)
def test_running_statistics_that_moved_after_the_rollout(form: str) -> None:
    """Case 45: with stored parameters the behaviour log-prob is the rollout's, to 1e-6."""
    s = scene(HYBRID, form)
    running = Running(s.net)
    s.actor = composite_actor(running, s.group)
    s.td = rollout(s.actor, *FORMS[form], s.group, torch.float32)
    old = s.log_probs().detach()
    running.mean += 0.5
    calls = running.calls.item()
    found, sources = cl.resolve_log_probs(s.actor, s.td, source="params")
    assert sources == {"gear": "params", "move": "params"}
    assert running.calls.item() == calls  # no network ran
    total_move = found.get(s.action_key(1)).sum(-1)
    for value, want in ((found.get(s.action_key(0)), old[..., 0]), (total_move, old[..., 1])):
        torch.testing.assert_close(value, want, rtol=0.0, atol=1e-6)
    # and the current one sees the new statistics
    outs = [s.loss("ppo", log_prob_source=kind)(s.td) for kind in ("stored", "params")]
    shifted = s.td.clone()
    shifted.set(s.key("observation"), s.obs - 0.5)
    current = torch.stack(
        [
            D.Categorical(**s.net.params(s.obs - 0.5)[0]).log_prob(s.td.get(s.action_key(0))),
            D.Normal(**s.net.params(s.obs - 0.5)[1]).log_prob(s.td.get(s.action_key(1))).sum(-1),
        ],
        -1,
    )
    want = (current - old).sum(-1).exp().mean()
    assert (want - 1).abs() > 1e-3
    for out in outs:
        assert_close(out["mean_ratio"], want)


# --- sources --------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", CORE)
@pytest.mark.parametrize("name", ["clip_joint", "clip_leafwise"])
def test_sources_are_exclusive(name: str, form: str) -> None:
    """Case 32: "stored" and "params" force one kind; beside a stored head no joint is used."""
    s = scene(HYBRID, form)
    s.move()
    geometry = name.removeprefix("clip_")
    want = -geometric(geometry, s.log_ratio(), s.advantage).mean()
    misleading = s.td.clone()
    for i in range(2):
        misleading.set(s.log_prob_key(i), misleading.get(s.log_prob_key(i)) - 1.0)
    loss = s.loss(name, log_prob_source="params")
    assert loss.source == "params"
    assert loss.log_prob_source(misleading) == {"gear": "params", "move": "params"}
    assert_close(loss(misleading)["loss_objective"], want)
    loss = s.loss(name, log_prob_source="stored")
    assert loss.source == "stored"
    wrong = s.td.clone()
    wrong.get(bare((*s.group, "params", "dist0", "logits"))).mul_(3.0)
    assert_close(loss(wrong)["loss_objective"], want)
    auto = s.loss(name)
    assert auto.source == "auto"
    assert_close(auto(wrong)["loss_objective"], want)
    # one head stored, a joint log-prob too: the other head is rebuilt
    td = drop(s.td, s.log_prob_key(1))
    td.set(s.key("sample_log_prob"), torch.full(s.sample, 3.0))
    assert auto.log_prob_source(td) == {"gear": "stored", "move": "params"}
    assert_close(auto(td)["loss_objective"], want)
    with pytest.raises(ConfigError, match="elsewhere"):
        s.loss(name, log_prob_source="elsewhere")


@pytest.mark.parametrize("form", CORE)
def test_log_probs_by_head(form: str) -> None:
    """Case 32: ``log_probs``: current with graph, behaviour without, nested like the actions."""
    s = scene((Spec(("arm", "move"), "normal", 2), Spec(("arm", "grip"), "cat", 2)), form)
    td = drop(s.td, s.key("advantage"), s.log_prob_key(1))
    s.move()
    before, state = snapshot(td), torch.get_rng_state()
    for name in ("ppo", "clip_per_head", "a2c", "reinforce"):
        parts = s.loss(name).log_probs(td)
        assert set(parts.keys()) == {"current", "behaviour"}
        for i, want in enumerate(s.log_prob_entries()):
            current = parts["current"].get(s.action_key(i))
            behaviour = parts["behaviour"].get(s.action_key(i))
            assert_close(current, want)
            assert current.requires_grad
            assert not behaviour.requires_grad
            assert_close(behaviour, s.td.get(s.log_prob_key(i)))
    assert snapshot(td) == before
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("form", CORE)
def test_stand_alone_resolution(form: str) -> None:
    """Case 32: ``resolve_log_probs`` with keys given as one key, a list, and a forced source."""
    s = scene(HYBRID, form)
    s.move()
    td = s.td.clone()
    td.set("first", td.get(s.log_prob_key(0)) - 1.0)
    td.set(s.key("second"), td.get(s.log_prob_key(1)) - 2.0)
    found, sources = cl.resolve_log_probs(
        s.actor, td, log_prob_keys=["first", s.key("second")], source="stored"
    )
    assert sources == {"gear": "stored", "move": "stored"}
    assert_close(found.get(s.action_key(0)), s.td.get(s.log_prob_key(0)) - 1.0)
    assert_close(found.get(s.action_key(1)), s.td.get(s.log_prob_key(1)) - 2.0)
    found, sources = cl.resolve_log_probs(s.actor, td, source="params")
    assert sources == {"gear": "params", "move": "params"}
    assert_close(found.get(s.action_key(1)), s.td.get(s.log_prob_key(1)))
    less = drop(td, s.log_prob_key(0), s.log_prob_key(1))
    less.set("together", s.stored().sum(-1))
    sources = cl.resolve_log_probs(s.actor, less, log_prob_keys="together")[1]
    assert sources == {"gear": "joint", "move": "joint"}
    with pytest.raises(ConfigError):
        cl.resolve_log_probs(s.actor, td, source="elsewhere")
    assert objective(s.loss("ppo")(s.td)).isfinite()
