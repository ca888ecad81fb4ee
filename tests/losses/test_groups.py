"""GroupLoss: the sum of a loss per group, its keys, and everything else a loss module does.

Judged against the same losses wired by hand: one per group, keys spelled out, called one by one.
"""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import nn
from torch.distributions import Categorical
from torchrl.objectives import SoftUpdate
from torchrl.objectives.utils import ValueEstimators

import composite_losses as cl
from composite_losses.errors import ConfigError, MissingKeyError
from tests.cases import builders_groups as bg
from tests.cases.builders_groups import SIGNALS, SIX, TWO, by_hand, group_loss, make_data, total
from tests.tolerances import assert_close

ODD = ["keys", "values", "items", "a.0", "a/b", "0", "batch_size", "parameters", "%2E", "A b"]
pytestmark = pytest.mark.filterwarnings("ignore:No target network updater:UserWarning")


def compare(out: Any, separate: dict[str, TensorDict], coeff: dict[str, float]) -> None:
    """Totals are the weighted sums of the separate losses; entries are theirs, unweighted."""
    expected: dict[str, Any] = {}
    for name, each in separate.items():
        for key, value in each.items():
            if key.startswith("loss"):
                expected[key] = expected.get(key, 0.0) + coeff.get(name, 1.0) * value
    for name, each in separate.items():
        expected |= {f"{name}/{key}": value for key, value in each.items()}
    assert list(out.keys()) == list(expected)
    for key, value in expected.items():
        assert out[key].shape == ()
        assert_close(out[key].detach(), value.detach())


# --- the sum -------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimated", [True, False], ids=["stored", "computed"])
@pytest.mark.parametrize("coeff", [None, {"prey": 0.5, "tree": 0.0, "mouse": 3.0}])
def test_sum_of_separate_losses(coeff: Any, estimated: bool) -> None:
    """Cases 22, 94, 95: six groups that share nothing but the call; values and gradients."""
    td = make_data(SIX, estimated=estimated)
    together, separate = group_loss(SIX, coeff=coeff), by_hand(SIX)
    for name, loss in separate.items():
        if not estimated:  # every agent gets the root's ends, written out
            for key in ("done", "terminated"):
                shape = td["next", name].batch_size
                td["next", name, key] = td["next", key].unsqueeze(-2).expand(*shape, 1)
        assert loss.tensor_keys.advantage == (name, "advantage")
    outs = {name: loss(td) for name, loss in separate.items()}
    out = together(td if estimated else make_data(SIX, estimated=False))
    compare(out, outs, coeff or {})
    assert out.batch_size == torch.Size([])
    got = bg.gradients(together, out)
    for name, loss in separate.items():
        weight = (coeff or {}).get(name, 1.0)
        for key, grad in bg.gradients(loss, outs[name]).items():
            assert grad is not None
            assert grad.abs().sum() > 0
            found = got[f"group_{name}.{key}"]
            assert found is not None
            assert_close(found, grad * weight)


def test_outputs_are_what_out_keys_says() -> None:
    """Sums first; metrics have no graph and no name that a trainer would sum."""
    loss = group_loss(SIX)
    out = loss(make_data(SIX))
    assert list(out.keys()) == loss.out_keys
    sums = ["loss_objective", "loss_critic", "loss_entropy", "loss_actor", "loss_value"]
    assert [key for key in loss.out_keys if key.startswith("loss")] == sums
    for key, value in out.items():
        kind = key.split("/")[-1] if "/" in key else key
        assert value.requires_grad == kind.startswith("loss"), key


def test_every_network_runs_once() -> None:
    """One call is one pass through each network, also where the advantage is computed (per time
    step and next step for a critic: the estimator's two passes)."""
    loss, td = group_loss(SIX), make_data(SIX)
    names = [f"{name} {which}" for name in SIX for which in ("actor", "critic")]
    bg.Net.calls.clear()
    loss(td)
    assert bg.Net.calls == dict.fromkeys(names, 1)
    bg.Net.calls.clear()
    loss.value_estimator(td.exclude(*[(name, "state_value") for name in SIX]))
    assert {name for name, n in bg.Net.calls.items() if n} == {n for n in names if "critic" in n}


def test_one_backward_trains_all_groups() -> None:
    """An optimiser over ``loss.parameters()`` moves the networks that were given."""
    nets = {name: bg.networks(name, spec) for name, spec in TWO.items()}
    loss = cl.GroupLoss({name: cl.MAPPOLoss(*nets[name]) for name in TWO})
    before = [p.clone() for pair in nets.values() for net in pair for p in net.parameters()]
    optimiser = torch.optim.SGD(loss.parameters(), lr=1.0)
    total(loss(make_data(TWO))).backward()
    optimiser.step()
    after = [p for pair in nets.values() for net in pair for p in net.parameters()]
    assert len(before) == len(list(loss.parameters()))
    assert all(not torch.equal(x, y) for x, y in zip(before, after, strict=True))


def test_from_group_map() -> None:
    """An environment's group_map, or just names; options reach the constructor."""
    made: list[str] = []

    def make(name: str) -> Any:
        made.append(name)
        return bg.member(name, TWO[name])

    for groups in ({"hunter": ["h_0"], "prey": ["p_0"]}, ["hunter", "prey"]):
        loss = cl.GroupLoss.from_group_map(groups, make, coeff={"prey": 2.0}, missing="skip")
        assert type(loss) is cl.GroupLoss
        assert loss.coeff.tolist() == [1.0, 2.0]
        assert loss.missing == "skip"
    assert made == ["hunter", "prey"] * 2
    td = make_data(TWO)
    compare(loss(td), {n: x(td) for n, x in by_hand(TWO).items()}, {"prey": 2.0})


def test_coefficients_are_a_buffer() -> None:
    """They live in the state_dict and can be scheduled in place."""
    loss, td = group_loss(TWO, coeff={"hunter": 1.0}), make_data(TWO)
    first = loss(td)
    loss.coeff[1] = 0.0
    out = loss(td)
    assert_close(out["loss_critic"].detach(), first["hunter/loss_critic"].detach())
    assert "coeff" in loss.state_dict()


# --- construction --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("losses", "options", "text"),
    [
        ({}, {}, "at least one group"),
        ({"loss": "hunter"}, {}, "does not start with 'loss'"),
        ({"losses": "hunter"}, {}, "does not start with 'loss'"),
        ({1: "hunter"}, {}, "expected a string"),
        ({"hunter": "none"}, {}, "reduction='none'"),
        ({"hunter": "module"}, {}, "expected a loss of this library, found Linear"),
        ({"hunter": "hunter"}, {"coeff": {"hunt": 1.0}}, "unknown group 'hunt'"),
        ({"hunter": "hunter"}, {"coeff": {"hunter": "much"}}, "must be a float"),
        ({"hunter": "hunter"}, {"missing": "ignore"}, "'error' or 'skip'"),
    ],
)
def test_what_cannot_be_summed_is_refused(losses: Any, options: Any, text: str) -> None:
    """A name that starts with "loss" would be summed twice by trainers."""
    made = {
        "hunter": lambda: bg.member("hunter", bg.HUNTER),
        "none": lambda: bg.member("hunter", bg.HUNTER, reduction="none"),
        "module": lambda: nn.Linear(1, 1),
    }
    with pytest.raises(ConfigError, match=text):
        cl.GroupLoss({name: made[what]() for name, what in losses.items()}, **options)


@pytest.mark.parametrize("name", ODD)
def test_any_name(name: str) -> None:
    """Names that are methods of dicts and modules, and names with dots."""
    specs = {name: bg.HUNTER, "prey": bg.PREY}
    td, loss = make_data(specs), group_loss(specs)
    out = loss(td)
    assert list(loss.losses) == [name, "prey"]
    compare(out, {n: x(td) for n, x in by_hand(specs).items()}, {})
    again = pickle.loads(pickle.dumps(loss))
    for p in again.parameters():
        p.data.zero_()
    again.load_state_dict(loss.state_dict())
    torch.testing.assert_close(again(td), out)
    loss.set_keys(name, advantage=(name, "other"))
    assert loss.losses[name].tensor_keys.advantage == (name, "other")


# --- keys ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [(), ("done", "terminated"), SIGNALS])
@pytest.mark.parametrize("estimated", [True, False])
def test_in_keys_are_all_that_is_read(shared: Any, estimated: bool) -> None:
    """What ``in_keys`` lists is enough, whether the signals stand in the groups or at the root."""
    # eval: KLPENPPOLoss adapts its beta in training mode
    loss, td = group_loss(SIX).eval(), make_data(SIX, shared=shared, estimated=estimated)
    td["more"], td["hunter", "more"] = torch.randn(4, 5), torch.randn(4, 5, 3)
    before = td.clone()
    small = td.select(*loss.in_keys, strict=False)
    assert "more" not in small
    assert ("hunter", "more") not in small.keys(True)
    assert len(set(loss.in_keys)) == len(loss.in_keys)
    torch.testing.assert_close(loss(small), loss(td), rtol=0, atol=0)
    assert set(td.keys(True, True)) == set(before.keys(True, True))
    assert (td == before).all()


def test_only_defaults_are_changed() -> None:
    """A key that a member has been given stays; the others move into the group."""
    member = bg.member("hunter", bg.HUNTER)
    member.set_keys(advantage=("team", "adv"), reward="reward_of_all")
    loss = cl.GroupLoss({"hunter": member})
    keys = loss.losses["hunter"].tensor_keys
    assert (keys.advantage, keys.reward) == (("team", "adv"), "reward_of_all")
    assert (keys.value, keys.done) == (("hunter", "state_value"), ("hunter", "done"))
    assert ("next", "reward") not in loss.in_keys  # a reward that was named has no stand-in
    assert ("next", "done") in loss.in_keys


def test_set_keys_of_one_group() -> None:
    """Case 41: other groups' keys, and the class's, stay what they are."""
    loss, other = group_loss(TWO), group_loss(TWO)
    td = make_data(TWO)
    out = loss(td)
    td["prey", "adv"] = 2 - td["prey", "advantage"]
    loss.set_keys("prey", advantage=("prey", "adv"))
    changed = loss(td)
    assert not torch.equal(changed["prey/loss_objective"], out["prey/loss_objective"])
    assert torch.equal(changed["hunter/loss_objective"], out["hunter/loss_objective"])
    torch.testing.assert_close(other(td), out)
    loss.set_keys("prey", advantage=None)  # None: the group's default, not the root's
    torch.testing.assert_close(loss(td), out)
    with pytest.raises(MissingKeyError, match="'fox': not known; the groups are 'hunter', 'prey'"):
        loss.set_keys("fox", advantage="a")
    with pytest.raises(ValueError, match="nonsense"):
        loss.set_keys("prey", nonsense="a")


def test_set_keys_of_all_groups() -> None:
    """Plain names are set inside every group; a trainer's bare action key renames nothing, though
    the prey's action has another name."""
    td, losses = make_data(TWO), {name: bg.member(name, spec) for name, spec in TWO.items()}
    actor, critic = bg.networks("prey", TWO["prey"])
    step = ProbabilisticTensorDictModule(
        {"logits": ("prey", "params", "action", "logits")},
        [("prey", "step")],
        distribution_class=Categorical,
        return_log_prob=True,
        log_prob_key=("prey", "step_log_prob"),
    )
    losses["prey"] = cl.IPPOLoss(ProbabilisticTensorDictSequential(actor[0], step), critic)
    td["prey"].rename_key_("action", "step").rename_key_("action_log_prob", "step_log_prob")
    loss = cl.GroupLoss(losses)
    out = loss(td)
    loss.set_keys(action="action", advantage="adv")
    for name in TWO:
        td[name].rename_key_("advantage", "adv")
        assert loss.losses[name].tensor_keys.advantage == (name, "adv")
    torch.testing.assert_close(loss(td), out)


def test_keyword_tensors() -> None:
    """Entries as keyword arguments; the result is a tuple in the order of ``out_keys``."""
    loss, td = group_loss(TWO), make_data(TWO)
    entries = {"_".join(key): td[key] for key in loss.in_keys if key in td.keys(True, True)}
    found = dict(zip(loss.out_keys, loss(**entries), strict=True))
    for key, value in loss(td).items():
        assert_close(found[key].detach(), value.detach())


# --- a group that is not there -------------------------------------------------------------------


@pytest.mark.parametrize("estimated", [True, False])
def test_missing_group(estimated: bool) -> None:
    """Case 96: an error that names the group, or losses 0 and metrics NaN under the same keys."""
    td = make_data(TWO, estimated=estimated)
    less = td.exclude("prey", ("next", "prey"))
    strict, loose = group_loss(TWO), group_loss(TWO, missing="skip")
    for call in (strict, strict.value_estimator):
        with pytest.raises(MissingKeyError, match=r"group 'prey'.*missing='skip'"):
            call(less)
    out, full = loose(less), loose(td)
    assert list(out.keys()) == list(full.keys()) == loose.out_keys
    for key, value in out.items():
        if key.startswith("prey/loss"):
            assert value == 0
        elif key.startswith("prey/"):
            assert value.isnan()
        elif key.startswith("hunter/"):
            torch.testing.assert_close(value, full[key])
        else:
            torch.testing.assert_close(value, full[f"hunter/{key}"])
    grads = bg.gradients(loose, out)
    assert all((grad is None) == name.startswith("group_prey") for name, grad in grads.items())
    loose.value_estimator(less)
    assert ("hunter", "advantage") in less.keys(True)
    assert "prey" not in less
    nothing = loose(TensorDict({}, [4, 5]))
    total(nothing).backward()
    assert total(nothing) == 0


def test_a_root_entry_that_several_groups_read_is_no_groups_own() -> None:
    """With a state at the root that both critics read, a group can still be missing."""
    losses = {}
    for name, spec in TWO.items():
        actor, _ = bg.networks(name, spec)
        central = nn.Sequential(nn.Linear(7, spec.agents), nn.Unflatten(-1, (spec.agents, 1)))
        critic = TensorDictModule(central, ["state"], [(name, "state_value")])
        losses[name] = cl.MAPPOLoss(actor, critic)
    loss, td = cl.GroupLoss(losses, missing="skip"), make_data(TWO)
    td["state"] = torch.randn(4, 5, 7)
    out = loss(td.exclude("prey"))
    assert out["prey/loss_critic"] == 0
    assert_close(out["loss_critic"].detach(), loss(td)["hunter/loss_critic"].detach())


def test_a_group_without_one_entry_is_not_missing() -> None:
    """A hole in the data is an error under "skip" as well."""
    loss, td = group_loss(TWO, missing="skip"), make_data(TWO)
    with pytest.raises(MissingKeyError, match="'prey', 'action'"):
        loss(td.exclude(("prey", "action")))


# --- mechanics -----------------------------------------------------------------------------------


def test_frozen_group_stays_bitwise() -> None:
    """Cases 94, 95: the frozen group's weights stay, the other's move; no weight is in both."""
    loss, td = group_loss(TWO), make_data(TWO)
    places = [{p.data_ptr() for p in loss.losses[name].parameters()} for name in TWO]
    assert places[0].isdisjoint(places[1])  # case 101
    for p in loss.losses["prey"].parameters():
        p.requires_grad_(False)
    before = copy.deepcopy(loss.state_dict())
    optimiser = torch.optim.Adam(loss.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(3):
        optimiser.zero_grad()
        total(loss(td)).backward()
        optimiser.step()
    for name, p in loss.named_parameters():
        moved = not torch.equal(before[name], p)
        assert moved == name.startswith("group_hunter"), name


@pytest.mark.parametrize("functional", [True, False])
def test_shared_parameters_are_there_once(functional: bool) -> None:
    """Two groups with one policy: each parameter once, its gradient the sum of both groups'."""
    spec = bg.Spec(2, 5, (("action", "normal"),), "ClipPPOLoss")
    trunk = bg.Heads("trunk", 5, dict(spec.heads))
    losses, specs = {}, {"left": spec, "right": spec}
    for name in specs:
        actor = bg.make_actor(name, spec)
        actor[0].module = trunk
        losses[name] = cl.ClipPPOLoss(actor, bg.make_critic(name, spec), functional=functional)
    td = make_data(specs)
    loss = cl.GroupLoss(losses)
    params = list(loss.parameters())
    assert len({id(p) for p in params}) == len(params)
    held = [*trunk.parameters()]
    assert sum(p.numel() for p in params) == sum(p.numel() for p in held) + 2 * (5 * 6 + 6 + 7)
    got = torch.autograd.grad(total(loss(td)), held)
    each = [torch.autograd.grad(total(member(td)), held) for member in loss.losses.values()]
    for g, x, y in zip(got, *each, strict=True):
        assert_close(g, x + y)
    torch.optim.SGD(loss.parameters(), lr=0.1)  # warns (an error here) where one is there twice


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
def test_copies_are_independent(how: str) -> None:
    """Same numbers, other weights."""
    loss, td = group_loss(SIX, coeff={"prey": 0.5}).eval(), make_data(SIX)
    if how == "deepcopy":
        twin = copy.deepcopy(loss)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(loss))
    else:
        file = io.BytesIO()
        torch.save(loss, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    out = loss(td)
    torch.testing.assert_close(twin(td), out)
    for p in twin.parameters():
        p.data.add_(1.0)
    twin.set_keys("prey", advantage=("prey", "none"))
    torch.testing.assert_close(loss(td), out)


def test_state_goes_round() -> None:
    """A strict load into a loss with other weights gives the same numbers; keys are unique."""
    loss, td = group_loss(SIX, coeff={"prey": 0.5}).eval(), make_data(SIX)
    other = group_loss(SIX, coeff={"tree": 2.0}).eval()
    for p in other.parameters():
        p.data.add_(0.3)
    assert not torch.allclose(other(td)["loss_objective"], loss(td)["loss_objective"])
    other.load_state_dict(loss.state_dict(), strict=True)
    torch.testing.assert_close(other(td), loss(td))


def test_target_updaters_take_the_member() -> None:
    """SoftUpdate(g.losses[name]): targets move by 1 − eps towards that group's weights only."""
    losses = {name: bg.member(name, TWO[name], delay_actor=True) for name in TWO}
    loss = cl.GroupLoss(losses)
    updaters = {name: SoftUpdate(loss.losses[name], eps=0.9) for name in TWO}
    targets = {
        name: list(loss.losses[name].target_actor_network_params.values(True, True)) for name in TWO
    }
    for p in loss.parameters():
        p.data.add_(1.0)
    before = {name: [t.clone() for t in each] for name, each in targets.items()}
    updaters["prey"].step()
    for name, step in (("hunter", 0.0), ("prey", 0.1)):
        for t, b in zip(targets[name], before[name], strict=True):
            assert_close(t.detach(), b + step)


@pytest.mark.parametrize("functional", [True, False])
def test_modes_reach_the_networks(functional: bool) -> None:
    """``eval()`` reaches dropout inside every group's networks."""
    losses = {}
    for name, spec in TWO.items():
        actor = bg.make_actor(name, spec, nn.Dropout(0.5))
        losses[name] = cl.ClipPPOLoss(actor, bg.make_critic(name, spec), functional=functional)
    loss, td = cl.GroupLoss(losses).eval(), make_data(TWO)
    assert torch.equal(loss(td)["loss_objective"], loss(td)["loss_objective"])
    loss.train()
    with pytest.warns(UserWarning, match="dropout"):
        first = loss(td)
    for name in TWO:
        key = f"{name}/loss_objective"
        assert not torch.equal(first[key], loss(td)[key])


def test_runs_on_the_meta_device_and_back_in_double() -> None:
    """Coefficients and parameters move; nothing waits for values."""
    loss, td = group_loss(SIX, coeff={"prey": 0.5}), make_data(SIX)
    out = copy.deepcopy(loss).to("meta")(td.to("meta"))
    assert all(value.is_meta for value in out.values())
    double = td.apply(lambda x: x.double() if x.dtype.is_floating_point else x)
    for key, value in loss.double()(double).items():
        assert value.dtype == torch.float64, key


@pytest.mark.parametrize(
    "kind", [None, ValueEstimators.GAE, ValueEstimators.TD0, ValueEstimators.TDLambda]
)
def test_value_estimator_of_all_groups(kind: Any) -> None:
    """One call writes what the members' own estimators compute; the loss of it is the same."""
    td = make_data(SIX, estimated=False)
    loss = group_loss(SIX).eval()
    assert loss.make_value_estimator(kind, gamma=0.9) is loss
    out = loss(td)
    written = td.clone()
    assert loss.value_estimator(written) is written
    for name, spec in SIX.items():
        for key in ("advantage", "value_target"):
            assert written[name, key].shape == (4, 5, spec.agents, 1)
            assert not written[name, key].requires_grad
    torch.testing.assert_close(loss(written), out)
    again = loss.make_value_estimator(kind, gamma=0.1).value_estimator(td.clone())
    for name in SIX:  # its options reach every group's
        assert not torch.allclose(again[name, "advantage"], written[name, "advantage"])


def test_value_estimator_takes_parameters() -> None:
    """``params`` and ``target_params`` by group name, as TorchRL's estimators take them."""
    td = make_data(TWO, estimated=False)
    loss = group_loss(TWO)
    plain, moved = loss.value_estimator(td.clone()), td.clone()
    other = loss.losses["prey"].critic_network_params.detach().clone()
    other.apply_(lambda x: x.add_(1.0))
    loss.value_estimator(moved, params={"prey": other})
    assert torch.equal(moved["hunter", "advantage"], plain["hunter", "advantage"])
    assert not torch.allclose(moved["prey", "advantage"], plain["prey", "advantage"])


def test_groups_without_critics() -> None:
    """A member without a critic has no estimator and no value loss; the other one has."""
    actor, _ = bg.networks("prey", bg.PREY)
    loss = cl.GroupLoss(
        {"hunter": bg.member("hunter", bg.HUNTER), "prey": cl.ReinforceLoss(actor)}
    ).make_value_estimator(gamma=0.9)
    td = make_data(TWO, estimated=False)
    out = loss(td)
    assert list(out.keys()) == loss.out_keys
    assert_close(out["loss_critic"].detach(), out["hunter/loss_critic"].detach())
    loss.value_estimator(td)
    assert ("prey", "advantage") not in td.keys(True)


def test_losses_cannot_be_replaced() -> None:
    """``losses`` shows the members; it is not where they are kept."""
    loss = group_loss(TWO)
    with pytest.raises(TypeError):
        loss.losses["prey"] = bg.member("prey", bg.PREY)
    assert loss.losses["prey"] is loss.losses["prey"]


def test_mask_key_of_all_groups() -> None:
    """``loss_mask_key`` set on the whole reaches every group."""
    loss, td = group_loss(TWO), make_data(TWO)
    assert loss.loss_mask_key == "auto"
    td["valid"] = torch.rand(4, 5) < 0.5
    full = loss(td)
    loss.loss_mask_key = "valid"
    out = loss(td)
    rows = td["valid"]
    for name in TWO:
        assert loss.losses[name].loss_mask_key == "valid"
        expected = by_hand({name: TWO[name]})[name](td[rows])
        assert_close(out[f"{name}/loss_critic"].detach(), expected["loss_critic"].detach())
    assert not torch.allclose(out["loss_critic"], full["loss_critic"])
