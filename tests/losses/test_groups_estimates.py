"""Groups: agents are never summed, and what an advantage is computed from is checked."""

from typing import Any

import pytest
import torch
import torchrl.objectives.multiagent as theirs
from tensordict import TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import nn
from torch.distributions import Categorical, Normal
from torchrl.modules import MaskedCategorical

import composite_losses as cl
from composite_losses.errors import MissingKeyError, ShapeError
from tests.cases import builders_groups as bg
from tests.cases.builders_groups import SIGNALS, TWO, Spec, make_data
from tests.tolerances import assert_close

ROOT = (4, 5)


def same(one: Any, two: Any) -> None:
    assert list(one.keys()) == list(two.keys())
    for key, value in one.items():
        torch.testing.assert_close(two[key], value, equal_nan=True, rtol=1e-5, atol=1e-6)


def unchanged(td: TensorDict, before: TensorDict) -> None:
    assert set(td.keys(True, True)) == set(before.keys(True, True))
    for key in before.keys(True, True):
        assert torch.equal(td[key], before[key]), key


def flat(td: TensorDict, *names: str) -> TensorDict:
    """The same entries in TensorDicts of the root's batch size."""
    td = td.clone()
    for name in names:
        td[name].batch_size = td["next", name].batch_size = td.batch_size
    return td


# --- agents are never summed ---------------------------------------------------------------------


def team(kind: str, agents: int, make: str = "MAPPOLoss", **options: Any) -> Any:
    spec = Spec(agents, 5, (("action", kind),), make)
    actor, _ = bg.networks("g", spec)
    torch.manual_seed(4)
    net = nn.Sequential(nn.Flatten(-2), nn.Linear(5 * agents, 1))
    critic = TensorDictModule(net, [("g", "observation")], [("g", "state_value")])
    loss = getattr(cl, make)(actor, critic, **options)
    data = make_data({"g": spec}, shared=SIGNALS, estimated=False)
    return cl.GroupLoss({"g": loss}), data


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("agents", [1, 3, 5])
@pytest.mark.parametrize("make", ["MAPPOLoss", "ClipPPOLoss", "A2CLoss"])
@pytest.mark.parametrize("kind", ["normal", "categorical"])
def test_team_value_without_the_agents_in_the_batch_size(
    kind: str, make: str, agents: int, masked: bool
) -> None:
    """One number whether a group's TensorDict tells its agents apart or not."""
    loss, td = team(kind, agents, make, team_value=True)
    if masked:
        td["g", "alive"] = bg.alive_masks({"g": Spec(agents, 5, ())}, ROOT)["g"]
        loss.set_keys("g", agent_mask=("g", "alive"))
    short = flat(td, "g")
    same(loss(td), loss(short))
    for data in (td, short):
        loss.value_estimator(data)
        assert data["g", "advantage"].shape == (*ROOT, agents, 1)
    assert_close(short["g", "advantage"], td["g", "advantage"])
    assert_close(short["g", "value_target"], td["g", "value_target"])
    same(loss(td), loss(short))


def test_in_a_graph() -> None:
    """The checks are no graph breaks, nor is a whole number."""
    loss, td = team("normal", 3, team_value=True)
    short = loss.value_estimator(flat(td, "g"))
    alone, data = without_agents("IPPOLoss")
    data["g", "advantage"] = data["g", "advantage"].long()
    for module, batch in ((loss, short), (alone, data)):
        torch._dynamo.reset()
        compiled = torch.compile(module, backend="eager", fullgraph=True)
        same(compiled(batch), module(batch))


@pytest.mark.parametrize("team_value", [False, True])
@pytest.mark.parametrize("kind", ["normal", "categorical"])
def test_a_short_advantage_does_not_sum_agents(kind: str, team_value: bool) -> None:
    """Nor may a stored advantage [*B, 1] make event dims of the agents."""
    loss, td = team(kind, 3, team_value=team_value)
    short = flat(td, "g")
    for name in ("advantage", "value_target", "state_value"):
        short["g", name] = torch.randn(*ROOT, 1)
    before = short.clone()
    for data in [short] if team_value else [short, short.exclude(("g", "advantage"))]:
        with pytest.raises(ShapeError, match=r"agents.*\[4, 5, 3\].*Independent") as caught:
            loss(data)
        assert "('g', 'advantage')" in str(caught.value)
    unchanged(short, before)


@pytest.mark.parametrize("team_value", [False, True])
def test_agents_without_an_observation_of_their_own(team_value: bool) -> None:
    """Agents that act on one entry of the root: known by ``team_value`` only."""

    class Split(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).unflatten(-1, (3, 4))

    actor = policy(Split(5, 12), Categorical, ["logits"], "state")
    critic = TensorDictModule(nn.Linear(5, 1), ["state"], [("g", "state_value")])
    td = TensorDict({"state": torch.randn(6, 5), "g": TensorDict({}, [6])}, [6])
    with torch.no_grad():
        actor(td)
    td["g", "advantage"], td["g", "value_target"] = torch.randn(2, 6, 1)
    loss = cl.GroupLoss({"g": cl.MAPPOLoss(actor, critic, team_value=team_value)})
    if not team_value:  # three actions of one agent, for all that is known
        assert loss(td)["g/mean_ratio"] == pytest.approx(1.0)
        return
    with pytest.raises(ShapeError, match="agents"):
        loss(td)


def policy(net: nn.Module, cls: Any, names: list[str], entry: Any) -> Any:
    keys = {name: ("g", name) for name in names}
    dist = ProbabilisticTensorDictModule(
        keys, [("g", "action")], distribution_class=cls, return_log_prob=True,
        log_prob_key=("g", "action_log_prob"),
    )  # fmt: skip
    module = TensorDictModule(net, [entry], list(keys.values()))
    return ProbabilisticTensorDictSequential(module, dist)


class LocScale(nn.Linear):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loc = super().forward(x)
        return loc, torch.ones_like(loc)


@pytest.mark.parametrize("n", [3, 4])
@pytest.mark.parametrize("agents", [None, 3])
def test_event_dims_are_summed(agents: int | None, n: int) -> None:
    """A Normal that is not Independent, in a group with and without agents, of equal sizes too."""
    shape = (n, n) if agents is None else (n, n, agents)
    actor = policy(LocScale(n, n), Normal, ["loc", "scale"], ("g", "observation"))
    group = TensorDict({"observation": torch.randn(*shape, n)}, shape)
    td = TensorDict({"g": group}, [n, n])
    with torch.no_grad():
        actor(td)
    td["g", "action_log_prob"] = td["g", "action_log_prob"] + 0.1 * torch.randn(*shape, n)
    td["g", "advantage"] = torch.randn(*shape, 1)
    loss = cl.GroupLoss({"g": cl.ClipPPOLoss(actor, reduction="sum")})
    now = Normal(td["g", "loc"], td["g", "scale"]).log_prob(td["g", "action"])
    expected = (now - td["g", "action_log_prob"]).sum(-1).exp()
    assert_close(loss(td)["g/mean_ratio"], expected.mean())


def test_masks_of_actions_are_no_agents() -> None:
    """Several masked choices of one agent, whose mask [*B, K, n] looks like an input of agents."""
    keys = {"logits": ("g", "logits"), "mask": ("g", "action_mask")}
    net = TensorDictModule(
        nn.Sequential(nn.Linear(5, 12), nn.Unflatten(-1, (3, 4))),
        [("g", "observation")],
        [keys["logits"]],
    )
    dist = ProbabilisticTensorDictModule(
        keys, [("g", "action")], distribution_class=MaskedCategorical, return_log_prob=True,
        log_prob_key=("g", "action_log_prob"),
    )  # fmt: skip
    entries = {"observation": torch.randn(6, 5), "action_mask": torch.rand(6, 3, 4) < 0.9}
    td = TensorDict({"g": TensorDict(entries, [6])}, [6])
    td["g", "action_mask"][..., 0] = True
    actor = ProbabilisticTensorDictSequential(net, dist)
    with torch.no_grad():
        actor(td)
    td["g", "advantage"] = torch.randn(6, 1)
    assert cl.GroupLoss({"g": cl.ClipPPOLoss(actor)})(td)["g/max_ratio"] == pytest.approx(1.0)


# --- whose statistics ----------------------------------------------------------------------------


def without_agents(make: str) -> tuple[Any, TensorDict]:
    torch.manual_seed(0)
    actor = policy(nn.Linear(5, 4), Categorical, ["logits"], ("g", "observation"))
    critic = TensorDictModule(nn.Linear(5, 1), [("g", "observation")], [("g", "state_value")])
    group = TensorDict({"observation": torch.randn(8, 2, 5)}, [8, 2])
    td = TensorDict({"g": group}, [8, 2])
    with torch.no_grad():
        actor(td)
    td["g", "action_log_prob"] = td["g", "action_log_prob"] + 0.3 * torch.randn(8, 2)
    td["g", "advantage"], td["g", "value_target"] = torch.randn(2, 8, 2, 1)
    return cl.GroupLoss({"g": getattr(cl, make)(actor, critic)}), td


@pytest.mark.parametrize("make", ["MAPPOLoss", "IPPOLoss"])
def test_a_group_without_agents_has_one_statistic(make: str) -> None:
    """Time is no agent: flattening changes nothing, one trajectory is not all zeros."""
    loss, td = without_agents(make)
    same(loss(td), loss(td.reshape(-1)))
    by_hand, _ = without_agents(make)
    by_hand.losses["g"].advantage = None
    standard = td.clone()
    raw = td["g", "advantage"]
    standard["g", "advantage"] = (raw - raw.mean()) / raw.std()
    same(by_hand(standard), loss(td))
    assert loss(td[:1])["loss_objective"].abs() > 1e-3
    elsewhere = td.clone()
    elsewhere["adv"] = elsewhere["g"].pop("advantage")
    loss.set_keys("g", advantage="adv")
    same(by_hand(standard), loss(elsewhere))


@pytest.mark.parametrize("make", ["MAPPOLoss", "IPPOLoss"])
def test_torchrls_layout(make: str) -> None:
    """At the root, without groups, the last batch dim is the agents', as in TorchRL."""
    _, td = without_agents(make)
    torch.manual_seed(0)
    net = TensorDictModule(nn.Linear(5, 4), ["observation"], ["logits"])
    dist = ProbabilisticTensorDictModule(
        ["logits"], ["action"], distribution_class=Categorical, return_log_prob=True
    )
    actor = ProbabilisticTensorDictSequential(net, dist)
    critic = TensorDictModule(nn.Linear(5, 1), ["observation"], ["state_value"])
    ours, judge = (getattr(m, make)(actor, critic) for m in (cl, theirs))
    found, expected = ours(td["g"]), judge(td["g"])
    for key in ("loss_objective", "loss_critic", "loss_entropy"):
        assert_close(found[key].detach(), expected[key].detach())


def test_agents_are_the_dims_beyond_the_root() -> None:
    """With agents there is one statistic for each of them, however the root is shaped."""
    spec = {"g": Spec(3, 5, (("action", "categorical"),))}
    td = make_data(spec)
    loss, plain = bg.group_loss(spec), bg.group_loss(spec)
    plain.losses["g"].advantage = None
    raw = td["g", "advantage"]
    standard = td.clone()
    standard["g", "advantage"] = (raw - raw.mean((0, 1))) / raw.std((0, 1))
    same(plain(standard), loss(td))
    same(plain(standard), loss(td.reshape(-1)))
    one = loss(td[0, 0])  # a root without dims: one entry per agent
    assert float(one["loss_objective"].detach()) == 0.0


def test_at_the_root_the_last_dim_is_the_agents() -> None:
    """TorchRL's layout keeps TorchRL's rule: dim -2 has its own statistics."""
    raw = torch.randn(8, 2, 1)
    norm = cl.AdvantageNorm(exclude_dims=(-2,), pool_all=True)
    assert_close(norm(raw, None, root_ndim=2), (raw - raw.mean(0)) / raw.std(0))
    found = norm(raw, None, root_ndim=2, in_group=True)
    assert_close(found, (raw - raw.mean()) / raw.std())


# --- what the critic writes ----------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"team_value": True}])
def test_a_critic_that_writes_elsewhere(options: Any) -> None:
    """The same error at every call, and once the key is named all is well."""
    spec = Spec(3, 5, (("action", "normal"),))
    actor, critic = bg.networks("g", spec)
    if options:
        critic.module = nn.Sequential(nn.Flatten(-2), nn.Linear(15, 1))
    critic = TensorDictModule(critic.module, [("g", "observation")], ["state_value"])
    loss = cl.GroupLoss({"g": cl.MAPPOLoss(actor, critic, **options)})
    td = make_data({"g": spec}, shared=SIGNALS, estimated=False)
    before = td.clone()
    for call in (loss, loss.value_estimator, loss, loss.value_estimator):
        with pytest.raises(MissingKeyError, match=r"value='state_value'") as caught:
            call(td)
        assert "('g', 'state_value')" in str(caught.value)
        assert loss.losses["g"]._value_estimator is None
    unchanged(td, before)
    stored = td.clone()
    for name in ("advantage", "value_target", "state_value"):
        stored["g", name] = torch.randn(*ROOT, 3, 1)
    with pytest.raises(MissingKeyError, match=r"value='state_value'"):
        loss(stored)  # the stored value is not the critic's
    loss.set_keys("g", value="state_value")
    loss.value_estimator(td)
    assert loss(td)["loss_critic"].isfinite()


# --- what an advantage is computed from ----------------------------------------------------------


@pytest.mark.parametrize("name", SIGNALS)
@pytest.mark.parametrize("shape", [(4, 5), (4, 5, 3, 1), (4, 5, 2), (4, 5, 1, 1)])
def test_a_root_entry_of_another_shape(name: str, shape: tuple[int, ...]) -> None:
    """It is named with what was found and expected, and nothing is written."""
    loss, td = bg.group_loss(TWO), make_data(TWO, shared=SIGNALS, estimated=False)
    td["next"].set(name, torch.zeros(shape, dtype=td["next", name].dtype))
    before = td.clone()
    for group, member in loss.losses.items():
        if shape == (*ROOT, TWO[group].agents, 1):
            continue  # one for each of its agents
        with pytest.raises(ShapeError) as caught:
            member._estimated(td)
        for part in (f"('next', '{name}')", str(list(shape)), "[4, 5, 1]", f"set_keys({name}="):
            assert part in str(caught.value)
    with pytest.raises(ShapeError, match=name):
        loss(td)
    unchanged(td, before)


@pytest.mark.parametrize("name", SIGNALS)
def test_a_groups_entry_of_another_shape(name: str) -> None:
    loss, td = bg.group_loss(TWO), make_data(TWO, shared=(), estimated=False)
    td["next", "hunter", name] = td["next", "hunter", name].squeeze(-1)
    with pytest.raises(ShapeError) as caught:
        loss(td)
    for part in (f"('next', 'hunter', '{name}')", "[4, 5, 3]", "[4, 5, 3, 1]"):
        assert part in str(caught.value)


@pytest.mark.parametrize("name", ["reward", "done"])
def test_keys_present_are_the_users(name: str) -> None:
    loss = bg.group_loss(TWO)
    td = make_data(TWO, shared=SIGNALS, estimated=False)
    del td["next", name]
    for call in (loss, loss.value_estimator, loss.losses["hunter"]._estimated):
        with pytest.raises(MissingKeyError) as caught:
            call(td)
        text = str(caught.value)
        assert f"('next', 'hunter', '{name}'): not found" in text
        present = text.split("Keys present: ")[1].split(". Fix")[0]
        assert present == ", ".join(map(repr, sorted(td.keys(True, True), key=as_tuple)))


def as_tuple(key: Any) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else key


def test_keys_present_without_a_critic() -> None:
    spec = {"g": Spec(3, 5, (("action", "normal"),))}
    loss = cl.GroupLoss({"g": cl.ClipPPOLoss(bg.networks("g", spec["g"])[0])})
    td = make_data(spec, shared=SIGNALS, estimated=False)
    with pytest.raises(MissingKeyError, match="without a critic") as caught:
        loss(td)
    assert "('next', 'g', 'reward')" not in str(caught.value)


@pytest.mark.parametrize("where", [(), ("next",)])
def test_an_observation_that_the_critic_misses(where: tuple[str, ...]) -> None:
    loss = bg.group_loss(TWO)
    td = make_data(TWO, estimated=False)
    key = (*where, "hunter", "observation")
    del td[key]
    before = td.clone()
    for call in (loss, loss.value_estimator):
        with pytest.raises(MissingKeyError, match="observation") as caught:
            call(td)
        assert repr(key) in str(caught.value)
    unchanged(td, before)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool])
@pytest.mark.parametrize("make", ["MAPPOLoss", "ClipPPOLoss", "A2CLoss"])
def test_whole_numbers(make: str, dtype: torch.dtype) -> None:
    """Advantages and targets of another dtype count as numbers."""
    spec = {"g": Spec(3, 5, (("action", "normal"),), make)}
    loss, td = bg.group_loss(spec), make_data(spec)
    for name in ("advantage", "value_target"):
        whole = td.clone()
        whole["g", name] = td["g", name].to(dtype)
        number = whole.clone()
        number["g", name] = whole["g", name].float()
        same(loss(number), loss(whole))
        one, two = (bg.gradients(loss, loss(x)) for x in (number, whole))
        assert all(torch.equal(one[k], two[k]) for k in one)
