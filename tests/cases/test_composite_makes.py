"""Policies of every make: functions, partials, composites of composites, several distributions."""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as tf
from tensordict.nn import (
    CompositeDistribution,
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import Tensor, nn
from torch import distributions as D

import composite_losses as cl
from tests.cases.builders_ab import (
    CORE,
    FORMS,
    HYBRID,
    LOSSES,
    OBS,
    Scene,
    Spec,
    assert_same,
    bare,
    composite_actor,
    geometric,
    objective,
    parameters,
    rollout,
    scene,
    single_actor,
    snapshot,
)
from tests.tolerances import assert_close


class Split(nn.Module):
    """Logits of 3 classes, loc and scale of 2 dims, from an observation (and a gear)."""

    def __init__(self, inputs: int, *, conditioned: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs, 7)
        self.conditioned = conditioned

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        raw = self.layer(obs)
        return raw[..., :3], raw[..., 3:5], tf.softplus(raw[..., 5:]) + 0.3


def as_scene(s: Scene, actor: Any) -> Scene:
    """The scene with another actor over the same net."""
    return Scene(s.net, actor, s.critic, s.td, s.group, s.sample)


def lambda_composite(params: Any, *, keys: list[Any]) -> CompositeDistribution:
    return CompositeDistribution(
        params,
        distribution_map={"dist0": D.Categorical, "dist1": D.Normal},
        name_map={"dist0": keys[0], "dist1": keys[1]},
    )


def lambda_normal(loc: Tensor, scale: Tensor) -> D.Distribution:
    return D.Independent(D.Normal(loc, scale), 1)


@pytest.mark.parametrize("form", CORE)
@pytest.mark.parametrize("make", ["lambda", "partial", "mixed", "sequential"])
@pytest.mark.parametrize("name", ["clip_per_head", "klpen", "reinforce"])
def test_distribution_class_of_another_make(name: str, make: str, form: str) -> None:
    """Case 10: a function, a partial or a plain sequence as the policy: the same losses."""
    s = scene(HYBRID, form)
    s.move()
    expected = s.loss(name).eval()(s.td)
    keys = [s.action_key(0), s.action_key(1)]
    table = {
        "distribution_map": {"dist0": D.Categorical, "dist1": D.Normal},
        "name_map": {"dist0": keys[0], "dist1": keys[1]},
    }
    options: dict[str, dict[str, Any]] = {
        "lambda": {
            "distribution_class": lambda params: lambda_composite(params, keys=keys),
            "distribution_kwargs": {},
        },
        "partial": {
            "distribution_class": functools.partial(CompositeDistribution, **table),
            "distribution_kwargs": {},
        },
        "mixed": {
            "distribution_kwargs": {
                **table,
                "distribution_map": {
                    "dist0": lambda logits: D.Categorical(logits=logits),
                    "dist1": functools.partial(D.Normal, validate_args=False),
                },
            }
        },
        "sequential": {
            "wrapper": lambda module, **kw: ProbabilisticTensorDictSequential(
                module, ProbabilisticTensorDictModule(**kw)
            )
        },
    }
    other = as_scene(s, composite_actor(s.net, s.group, **options[make]))
    loss = other.loss(name).eval()
    out = loss(s.td)
    assert_same(out, expected)
    assert set(out.keys()) == set(loss.out_keys)
    assert_same(loss(s.td.select(*loss.in_keys, strict=False)), out, exact=True)
    if name != "reinforce":
        for i in range(2):
            s.td.pop(s.log_prob_key(i))
        assert loss.log_prob_source(s.td) == {"gear": "params", "move": "params"}
        assert_same(loss(s.td), out)
        sources = cl.resolve_log_probs(other.actor, s.td)[1]
        assert sources == {"gear": "params", "move": "params"}


@pytest.mark.parametrize("form", CORE)
@pytest.mark.parametrize("kind", ["function", "partial"])
def test_single_distribution_made_by_a_function(form: str, kind: str) -> None:
    """Case 10: ``distribution_class=lambda loc, scale: …``, stored and rebuilt."""
    cls = lambda_normal if kind == "function" else functools.partial(lambda_normal)
    s = scene((Spec("action", "independent", 2),), form, actor=single_actor, distribution_class=cls)
    s.move()
    want = -geometric("joint", s.log_ratio(), s.advantage).mean()
    loss = s.loss("clip_joint")
    assert_close(loss(s.td)["loss_objective"], want)
    s.td.pop(s.log_prob_key(0))
    assert loss.log_prob_source(s.td) == {"action": "params"}
    assert_close(loss(s.td)["loss_objective"], want)


def nested_policy(net: nn.Module, group: tuple[str, ...]) -> Any:
    """A composite inside a composite: body = (gear, move)."""
    inner = functools.partial(
        CompositeDistribution, distribution_map={"gear": D.Categorical, "move": D.Normal}
    )
    leaves = [("gear", "logits"), ("move", "loc"), ("move", "scale")]
    module = TensorDictModule(
        net,
        in_keys=[bare((*group, "observation"))],
        out_keys=[(*group, "params", "body", "params", *leaf) for leaf in leaves],
    )
    return ProbabilisticTensorDictSequential(
        module,
        ProbabilisticTensorDictModule(
            in_keys=[bare((*group, "params"))],
            out_keys=[bare((*group, "body"))],
            distribution_class=CompositeDistribution,
            distribution_kwargs={
                "distribution_map": {"body": inner},
                "name_map": {"body": bare((*group, "body"))},
            },
            return_log_prob=True,
            default_interaction_type=InteractionType.RANDOM,
        ),
    )


@pytest.mark.parametrize("form", CORE)
@pytest.mark.parametrize("source", ["stored", "params"])
def test_composite_inside_a_composite(form: str, source: str) -> None:
    """Case 11: nested composites have one head per leaf, stored and rebuilt."""
    shape, agents = FORMS[form]
    group = () if agents is None else ("agents",)
    net = Split(OBS)
    actor = nested_policy(net, group)
    td = rollout(actor, shape, agents, group, torch.float32)
    body = td.get(bare((*group, "body")))
    observation = td.get(bare((*group, "observation")))

    def by_hand() -> Tensor:
        logits, loc, scale = net(observation)
        first = D.Categorical(logits=logits).log_prob(body["gear"])
        return torch.stack([first, D.Normal(loc, scale).log_prob(body["move"]).sum(-1)], -1)

    old = by_hand().detach()
    with torch.no_grad():
        net.layer.weight.add_(0.1 * torch.randn_like(net.layer.weight))
    loss = cl.ClipPPOLoss(actor, ratio="per_head", log_prob_source=source)
    loss.set_keys(advantage=bare((*group, "advantage")))
    assert loss.log_prob_source(td) == {"gear": source, "move": source}
    advantage = td.get(bare((*group, "advantage"))).squeeze(-1)
    out = loss(td)
    assert_close(out["loss_objective"], -geometric("per_head", by_hand() - old, advantage).mean())
    current = loss.log_probs(td)["current"].get((*group, "body", "gear"))
    assert_close(current, by_hand()[..., 0])
    assert_same(loss(td.select(*loss.in_keys, strict=False)), out, exact=True)


class Conditioned(nn.Module):
    """Parameters of a Normal from the observation and the gear that was chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(OBS + 3, 4)

    def forward(self, obs: Tensor, gear: Tensor) -> tuple[Tensor, Tensor]:
        chosen = tf.one_hot(gear, 3).to(obs.dtype)
        return tuple(parameters("normal", self.layer(torch.cat([obs, chosen], -1))).values())


def autoregressive(group: tuple[str, ...]) -> tuple[Any, nn.Linear, Conditioned]:
    """gear from the observation, then move from the observation and the gear."""

    def k(name: str) -> Any:
        return bare((*group, name))

    first, second = nn.Linear(OBS, 3), Conditioned()
    options = {"return_log_prob": True, "default_interaction_type": InteractionType.RANDOM}
    actor = ProbabilisticTensorDictSequential(
        TensorDictModule(first, in_keys=[k("observation")], out_keys=[k("logits")]),
        ProbabilisticTensorDictModule(
            in_keys=[k("logits")],
            out_keys=[k("gear")],
            distribution_class=D.Categorical,
            log_prob_key=k("gear_log_prob"),
            **options,
        ),
        TensorDictModule(
            second, in_keys=[k("observation"), k("gear")], out_keys=[k("loc"), k("scale")]
        ),
        ProbabilisticTensorDictModule(
            in_keys=[k("loc"), k("scale")],
            out_keys=[k("move")],
            distribution_class=D.Normal,
            log_prob_key=k("move_log_prob"),
            **options,
        ),
    )
    return actor, first, second


@pytest.mark.parametrize("form", CORE)
@pytest.mark.parametrize("name", ["clip_per_head", "clip_joint", "klpen", "a2c", "reinforce"])
def test_later_head_is_conditioned_on_the_stored_action(name: str, form: str) -> None:
    """Case 36: of several probabilistic modules, the later reads the earlier's stored action."""
    shape, agents = FORMS[form]
    group = () if agents is None else ("agents",)
    actor, first, second = autoregressive(group)

    def k(key: str) -> Any:
        return bare((*group, key))

    td = rollout(actor, shape, agents, group, torch.float32)
    loss = LOSSES[name](actor, None)
    loss.set_keys(advantage=k("advantage"))
    obs, adv = td.get(k("observation")), td.get(k("advantage")).squeeze(-1)
    old = torch.stack([td.get(k("gear_log_prob")), td.get(k("move_log_prob")).sum(-1)], -1)

    def by_hand() -> Tensor:
        gear = D.Categorical(logits=first(obs)).log_prob(td.get(k("gear")))
        move = D.Normal(*second(obs, td.get(k("gear")))).log_prob(td.get(k("move")))
        return torch.stack([gear, move.sum(-1)], -1)

    assert_close(by_hand(), old)
    # another stored gear: the move's log-prob must follow it
    td.set(k("gear"), (td.get(k("gear")) + 1) % 3)
    before, state = snapshot(td), torch.get_rng_state()
    out = loss(td)
    assert torch.equal(torch.get_rng_state(), state)
    assert snapshot(td) == before
    gap = by_hand() - old
    if name in ("a2c", "reinforce"):
        assert_close(objective(out), -(by_hand().sum(-1) * adv).mean())
    elif name != "klpen":
        want = geometric(name.removeprefix("clip_"), gap, adv)
        assert_close(objective(out), -want.mean())
    assert_close(loss.log_probs(td)["current"].get(k("gear")), by_hand()[..., 0])
    assert loss.log_prob_source(td) == {"gear": "stored", "move": "stored"}
    grads = torch.autograd.grad(objective(out), [first.weight, second.layer.weight])
    assert all(g.abs().sum() > 0 for g in grads)
    assert_same(loss.eval()(td.select(*loss.in_keys, strict=False)), loss.eval()(td), exact=True)
