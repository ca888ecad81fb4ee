"""What a loss over groups refuses; and its copies and outputs where something is shared or chosen.

Nothing is changed by what is refused: neither the loss nor the members that were given.
"""

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import composite_losses as cl
from composite_losses.errors import ConfigError, MissingKeyError
from tests.cases import builders_groups as bg
from tests.cases.builders_groups import TWO, group_loss, make_data, total
from tests.losses.test_keys_checks import NO_KEYS, keys_of

LIKE = bg.Spec(2, 5, (("action", "normal"),), "ClipPPOLoss")


# --- copies --------------------------------------------------------------------------------------


def tied(functional: bool, separate: bool = False, delay: bool = False) -> Any:
    """Two groups with one critic, and one layer in both actors and in the critic."""
    trunk, losses = nn.Linear(5, 6), {}
    top = nn.Linear(6, 1)
    for name in ("left", "right"):
        actor = bg.make_actor(name, LIKE)
        actor[0].module.net.net[0] = trunk
        critic = bg.make_critic(name, LIKE, nn.Sequential(trunk, nn.Tanh(), top))
        losses[name] = cl.ClipPPOLoss(
            actor, critic, functional=functional, separate_losses=separate, delay_actor=delay
        )
    return cl.GroupLoss(losses)


@pytest.mark.parametrize(
    ("how", "options"),
    [
        ("deepcopy", (True,)),
        ("deepcopy", (False,)),
        ("deepcopy", (True, True)),
        ("deepcopy", (True, False, True)),
        ("pickle", (True,)),
        ("pickle", (False,)),
        ("pickle", (True, False, True)),
    ],
)
@pytest.mark.filterwarnings("ignore:No target network updater:UserWarning")
def test_copies_keep_what_groups_share(how: str, options: Any) -> None:
    """As many parameters, equal gradients and equal updates; the original does not move."""
    torch.manual_seed(0)
    loss, td = tied(*options), make_data({"left": LIKE, "right": LIKE})
    loss.losses["right"].entropy_coeff = 0.3
    twin = copy.deepcopy(loss) if how == "deepcopy" else pickle.loads(pickle.dumps(loss))
    # trunk (2), critic's top (2), the two actors' own (2 each)
    assert len(list(twin.parameters())) == len(list(loss.parameters())) == 8
    before = copy.deepcopy(loss.state_dict())
    for each in (twin, loss):
        optimiser = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(2):
            optimiser.zero_grad()
            total(each(td)).backward()
            optimiser.step()
        if each is twin:
            assert all(torch.equal(x, before[key]) for key, x in loss.state_dict().items())
    for (key, p), q in zip(loss.named_parameters(), twin.parameters(), strict=True):
        assert not torch.equal(p, before[key]), key
        assert torch.equal(p, q) and torch.equal(p.grad, q.grad), key
    torch.testing.assert_close(twin(td), loss(td), rtol=0, atol=0)


# --- members -------------------------------------------------------------------------------------


def test_one_loss_for_two_groups_is_refused() -> None:
    """Its keys can point at one group only; the loss is as it was, and can still be used."""
    member = bg.member("hunter", bg.HUNTER)
    before = copy.deepcopy(keys_of(member))
    with pytest.raises(ConfigError, match=r"'prey'.*same loss.*'hunter'.*(copy\.deepcopy|make_)"):
        cl.GroupLoss({"hunter": member, "prey": member})
    with pytest.raises(ConfigError, match="same loss"):
        cl.GroupLoss.from_group_map(["hunter", "prey"], lambda _: member)
    assert keys_of(member) == before
    copies = cl.GroupLoss({"hunter": member, "other": copy.deepcopy(member)})
    assert copies.losses["other"].tensor_keys.advantage == ("other", "advantage")


@pytest.mark.parametrize("cls", [cl.GroupLoss, cl.HAPPOLoss])
def test_a_loss_of_another_group_is_refused(cls: Any) -> None:
    """A loss that has taken a group's keys is that group's; under the same name it may be used
    again, pickled and copied ones likewise."""
    loss, td = group_loss(TWO, cls), make_data(TWO)
    out, member = loss(td), loss.losses["hunter"]
    before = copy.deepcopy(keys_of(member))
    for each in (member, copy.deepcopy(member), pickle.loads(pickle.dumps(member))):
        with pytest.raises(ConfigError, match=r"'zzz'.*'hunter'.*(copy\.deepcopy|make_loss)"):
            cls({"zzz": each})
    assert keys_of(member) == before
    again = cls(dict(loss.losses))
    torch.testing.assert_close(again(td), out, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (cl.GroupLoss, {"coeff": {"fox": 1.0}}),
        (cl.GroupLoss, {"coeff": {"hunter": "much"}}),
        (cl.GroupLoss, {"missing": "no"}),
        (cl.HAPPOLoss, {"order": "no"}),
        (cl.HAPPOLoss, {}),
    ],
)
def test_a_refused_construction_adopts_no_member(cls: Any, options: Any) -> None:
    """The members are as before: usable under another name. HAPPO refuses the second."""
    losses = {name: bg.member(name, bg.HUNTER) for name in ("hunter", "prey")}
    if cls is cl.HAPPOLoss and not options:
        losses["prey"] = bg.member("prey", bg.TREE)
    before = [copy.deepcopy(keys_of(each)) for each in losses.values()]
    with pytest.raises(ConfigError):
        cls(losses, **options)
    assert [keys_of(each) for each in losses.values()] == before
    cl.GroupLoss({"zzz": losses["hunter"]})


# --- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0.5, [0.5, 1.0], "hunter", torch.ones(2)], ids=repr)
def test_coefficients_that_are_no_mapping(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"coeff: expected a mapping .*found"):
        group_loss(TWO, coeff=value)


@pytest.mark.parametrize("cls", [cl.GroupLoss, cl.HAPPOLoss])
def test_losses_that_are_no_mapping(cls: Any) -> None:
    member = bg.member("hunter", bg.HUNTER)
    for given in ([member], (member,), member, None, "hunter"):
        with pytest.raises(ConfigError, match=r"losses: expected a mapping .*found"):
            cls(given)
    with pytest.raises(ConfigError, match=r"group_map: expected .*found 'hunter'"):
        cls.from_group_map("hunter", lambda _: member)  # not a group per letter


def test_options_are_checked_when_they_are_set() -> None:
    """``missing`` and HAPPO's ``order``; what was there stays."""
    loss = group_loss(TWO, cl.HAPPOLoss, missing="skip", order="fixed")
    with pytest.raises(ConfigError, match="missing: expected 'error' or 'skip', found 'nonsense'"):
        loss.missing = "nonsense"
    with pytest.raises(ConfigError, match=r"order: expected one of .*, found 'nonsense'"):
        loss.order = "nonsense"
    assert (loss.missing, loss.order) == ("skip", "fixed")
    td = make_data({"prey": bg.PREY})
    assert loss(td)["hunter/loss_objective"] == 0
    loss.missing = "error"
    with pytest.raises(MissingKeyError, match="'hunter'"):
        loss(td)


# --- keys ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["reward", "advantage", "factor", "action"])
def test_what_is_no_key_is_refused(name: str) -> None:
    """For one group and for all; no group's keys are changed, nor what its estimator reads."""
    loss = group_loss(TWO).make_value_estimator(gamma=0.9)
    before = [copy.deepcopy(keys_of(each)) for each in loss.losses.values()]
    for group, value in itertools.product([(), ("prey",)], NO_KEYS):
        who = "prey" if group else "hunter"
        with pytest.raises(ConfigError, match=rf"group '{who}': set_keys\({name}=.*found"):
            loss.set_keys(*group, **{"done": "end", name: value})
        assert [keys_of(each) for each in loss.losses.values()] == before


def test_keys_that_only_some_groups_take() -> None:
    """Two action keys fit the hunter's two heads and not the prey's one: neither is changed."""
    loss = group_loss(TWO).make_value_estimator(gamma=0.9)
    before = [copy.deepcopy(keys_of(each)) for each in loss.losses.values()]
    with pytest.raises(ConfigError, match="group 'prey': "):
        loss.set_keys(action=["move", "gear"], reward="pay")
    with pytest.raises(ValueError, match="nonsense"):
        loss.set_keys(reward="pay", nonsense="a")
    assert [keys_of(each) for each in loss.losses.values()] == before


# --- selected outputs ----------------------------------------------------------------------------


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("chosen", [["loss_objective", "prey/entropy"], ["loss_critic"]])
def test_selected_outputs(chosen: list[str], missing: bool) -> None:
    """TensorDict and keyword calls give the chosen outputs alone; a reset gives all again."""
    loss, td = group_loss(TWO, missing="skip"), make_data(TWO)
    td = td.exclude("prey", ("next", "prey")) if missing else td
    everything, full = loss.out_keys, loss(td)
    assert loss.select_out_keys(*chosen) is loss
    for each in (loss, copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        out = each(td)
        assert list(out.keys()) == each.out_keys == chosen
        for key in chosen:
            torch.testing.assert_close(out[key], full[key], equal_nan=True, rtol=0, atol=0)
    if not missing:
        entries = {"_".join(key): td[key] for key in loss.in_keys if key in td.keys(True, True)}
        found = loss(**entries)
        for key, value in zip(chosen, found if len(chosen) > 1 else [found], strict=True):
            torch.testing.assert_close(value, full[key])
    assert loss.out_keys_source == everything
    assert list(loss.reset_out_keys()(td).keys()) == loss.out_keys == everything
    with pytest.raises(ConfigError, match="prey/nothing"):
        loss.select_out_keys("loss_objective", "prey/nothing")
