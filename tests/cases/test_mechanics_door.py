"""What TorchRL's users find at the door: keywords, attributes, keys, outputs."""

import copy
import inspect
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule
from torch import Tensor, nn

import composite_losses as cl
from tests.cases.builders_fl import (
    CLASSES,
    DOORS,
    KL,
    LOSSES,
    PAIR,
    build,
    make_data,
    make_mask,
    networks,
    outcome,
    same,
)
from tests.tolerances import assert_close

CLASS = {name: getattr(cl, name) for name in CLASSES}
TORCHRL = {name: cls for name, cls in CLASS.items() if name != "PolicyLoss"}
PPO = ("PPOLoss", "ClipPPOLoss", "KLPENPPOLoss")
LAYOUTS = {"B": ((6,), False), "BT": ((3, 4), False), "BA": ((4, 2), True)}


def data_for(name: str, heads: Any = PAIR, layout: str = "B") -> TensorDict:
    shape, group = LAYOUTS[layout]
    return make_data(heads, shape, group=group, source="all" if name in KL else "stored")


def clone_outputs(loss: Any, data: TensorDict) -> dict[str, Tensor]:
    return {key: value.detach().clone() for key, value in loss(data).items()}


# --- constructor keywords ------------------------------------------------------------------------


@pytest.mark.parametrize("typo", ["clip_epsilom", "entropy_coefs", "gama", "lmbda", "kwargs"])
@pytest.mark.parametrize("name", CLASS)
def test_unknown_keyword(name: str, typo: str) -> None:
    """A misspelt option is a TypeError; TorchRL's names are listed, so the right one is seen."""
    more = {"surrogate": cl.Clip()} if name == "PolicyLoss" else {}
    with pytest.raises(TypeError, match=typo) as error:
        CLASS[name](*networks(PAIR), **more, **{typo: 0.1})
    if name != "PolicyLoss":
        shown = str(error.value)
        valid = set(inspect.signature(CLASS[name]).parameters)
        assert {"actor_network", "critic_network", "entropy_coeff", "validate", "heads"} <= valid
        assert name in shown
        assert all(option in shown for option in valid)


@pytest.mark.parametrize("name", TORCHRL)
def test_older_spellings(name: str) -> None:
    """``actor=``, ``critic=``, ``entropy_coef``, ``critic_coef`` mean what the new names mean."""
    options: dict[str, Any] = {"entropy_coeff": 0.3, "critic_coeff": 0.2}
    older = {"entropy_coef": 0.3, "critic_coef": 0.2}
    if name == "ReinforceLoss":
        options.pop("critic_coeff"), older.pop("critic_coef")
    (actor, critic), data = networks(PAIR), data_for(name)
    new = TORCHRL[name](actor_network=actor, critic_network=critic, **options).eval()
    plain = TORCHRL[name](*networks(PAIR)).eval()
    actor, critic = networks(PAIR)
    old = TORCHRL[name](actor=actor, critic=critic, **older).eval()
    same(outcome(old, data), outcome(new, data))
    assert_close(old.entropy_coeff, 0.3)
    entropy = plain(data)["entropy"]  # Σ over the heads: the same for both coefficients
    assert_close(old(data)["loss_entropy"].detach(), -0.3 * entropy)
    with pytest.raises(TypeError, match="twice"):
        TORCHRL[name](*networks(PAIR), entropy_coeff=0.1, entropy_coef=0.1)


@pytest.mark.parametrize("name", TORCHRL)
def test_actor_is_required(name: str) -> None:
    """Without an actor, a TypeError as in TorchRL."""
    with pytest.raises(TypeError, match="actor_network"):
        TORCHRL[name]()


def test_terms_that_are_left_out() -> None:
    """``entropy_bonus=False`` and ``critic_coeff=0`` remove a term, from ``out_keys`` too."""
    data = data_for("ClipPPOLoss")
    both = {"loss_objective", "loss_critic", "loss_entropy"}
    for options, gone in (
        ({"entropy_bonus": False}, {"loss_entropy"}),
        ({"critic_coeff": 0.0}, {"loss_critic"}),
        ({"critic_coeff": 0.0, "entropy_bonus": False}, {"loss_critic", "loss_entropy"}),
    ):
        loss = build("ClipPPOLoss", PAIR, **options)
        out = loss(data)
        assert {key for key in loss.out_keys if key.startswith("loss")} == both - gone
        assert list(out.keys()) == loss.out_keys


# --- coefficients --------------------------------------------------------------------------------

# loss -> (attribute, options it needs, value to set)
SETTABLE: dict[str, list[tuple[str, dict[str, Any], float]]] = {
    "PPOLoss": [("entropy_coeff", {}, 0.3), ("critic_coeff", {}, 0.2)],
    "ClipPPOLoss": [
        ("clip_epsilon", {}, 0.04), ("entropy_coeff", {}, 0.3), ("critic_coeff", {}, 0.2),
        ("clip_value", {"clip_value": 0.2}, 0.05),
    ],
    "ClipPPOLoss-per_head": [("clip_epsilon_low", {}, 0.01), ("clip_epsilon_high", {}, 0.02)],
    "ClipPPOLoss-leafwise": [("clip_epsilon", {}, 0.04)],
    "ClipPPOLoss-mixed": [("clip_epsilon", {}, 0.04)],
    "KLPENPPOLoss": [("beta", {}, 4.0), ("entropy_coeff", {}, 0.3)],
    "A2CLoss": [
        ("entropy_coeff", {}, 0.3), ("critic_coeff", {}, 0.2),
        ("clip_value", {"clip_value": 9}, 0.1),
    ],
    "ReinforceLoss": [("entropy_coeff", {}, 0.3), ("clip_value", {"clip_value": 9}, 0.1)],
}  # fmt: skip
SET = [(n, *row) for n, rows in SETTABLE.items() for row in rows]


@pytest.mark.parametrize(
    "form", [float, torch.tensor, lambda v: torch.tensor([v])], ids=["float", "0-dim", "1-element"]
)
@pytest.mark.parametrize(("name", "attribute", "options", "value"), SET)
def test_setter_acts_like_the_constructor(
    name: str, attribute: str, options: dict[str, Any], value: float, form: Any
) -> None:
    """A float, a 0-dim or one-element tensor written later equals the option given at the start.

    It is written into the part's buffer, so state_dict and references see it.
    """
    key = "clip_epsilon" if attribute.startswith("clip_epsilon") else attribute
    given: Any = value
    if attribute == "clip_epsilon_low":
        given = (value, 0.3)
    elif attribute == "clip_epsilon_high":
        given = (0.1, value)
    wanted = build(name, PAIR, **{**options, key: given}).eval()
    loss = build(name, PAIR, **options).eval()
    data = data_for(name)
    before = clone_outputs(loss, data)
    buffer = getattr(loss, attribute)
    setattr(loss, attribute, form(value))
    assert getattr(loss, attribute) is buffer
    assert buffer.shape == () and buffer.dtype == torch.float32
    assert_close(buffer, value)
    same(outcome(loss, data), outcome(wanted, data))
    after = clone_outputs(loss, data)
    assert any(after[key] != before[key] for key in after if key.startswith("loss"))
    for key, state in wanted.state_dict().items():
        assert torch.equal(loss.state_dict()[key], state), key
    assert any(state.data_ptr() == buffer.data_ptr() for state in loss.state_dict().values())


@pytest.mark.parametrize("attribute", ["dtarg", "increment", "decrement"])
def test_setters_of_the_adaptation(attribute: str) -> None:
    """``dtarg``, ``increment``, ``decrement`` decide about the next beta."""
    data = data_for("KLPENPPOLoss")
    for value in (0.4, torch.tensor(0.4)):
        loss = build("KLPENPPOLoss", PAIR)
        kl = float(loss.eval()(data)["kl"])
        setattr(loss, attribute, value)
        assert_close(getattr(loss, attribute), 0.4)
        loss.train()(data)
        target = 0.4 if attribute == "dtarg" else 0.01
        factor = 1.0
        if kl > 1.5 * target:
            factor = 0.4 if attribute == "increment" else 2.0
        elif kl < target / 1.5:
            factor = 0.4 if attribute == "decrement" else 0.5
        assert_close(loss.beta, factor)
        loss.reset()
        assert_close(loss.beta, 1.0)


def test_entropy_coefficient_by_head() -> None:
    """A mapping, set after construction, names every head; a missing one is a KeyError."""
    data = data_for("PPOLoss")
    given = {"move": 0.5, ("action", "gear"): -0.25}
    loss = build("PPOLoss", PAIR)
    loss.entropy_coeff = given
    out, wanted = loss(data), build("PPOLoss", PAIR, entropy_coeff=given)(data)
    assert_close(out["loss_entropy"].detach(), wanted["loss_entropy"].detach())
    expected = -(0.5 * out["entropy/move"] - 0.25 * out["entropy/gear"])
    assert_close(out["loss_entropy"].detach(), expected)
    with pytest.raises(KeyError, match="gear"):
        loss.entropy_coeff = {"move": 0.5}
    loss.entropy_coeff = 0.1
    assert_close(loss(data)["loss_entropy"].detach(), -0.1 * out["entropy"])


def test_attributes_that_are_not_there() -> None:
    """The other kind of clip range, a term that was left out: an AttributeError that says so."""
    symmetric, pair = (
        build("ClipPPOLoss", PAIR),
        build("ClipPPOLoss", PAIR, clip_epsilon=(0.1, 0.2)),
    )
    with pytest.raises(AttributeError, match="symmetric"):
        symmetric.clip_epsilon_low = 0.1
    with pytest.raises(AttributeError, match="clip_epsilon_low"):
        pair.clip_epsilon = 0.1
    bare = cl.PPOLoss(networks(PAIR)[0])
    assert bare.critic_coeff is None and bare.clip_value is None
    with pytest.raises(AttributeError, match="critic_coeff"):
        bare.critic_coeff = 0.1


# --- keys ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads", [PAIR, "normal"], ids=["composite", "single"])
@pytest.mark.parametrize("name", LOSSES)
def test_keys_in_and_out(name: str, heads: Any, layout: str, masked: bool) -> None:
    """``in_keys`` are all that is read, and what a call returns is ``out_keys``, in that order."""
    shape, group = LAYOUTS[layout]
    loss, data = build(name, heads, group=group).eval(), data_for(name, heads, layout)
    if masked:
        key = ("agents", "alive") if group else "alive"
        loss.set_keys(agent_mask=key)
        data[key] = make_mask(shape)
    data["noise"] = torch.full((*data.batch_size, 3), float("nan"))
    before = data.clone()
    expected, selected = loss(data), data.select(*loss.in_keys, strict=False)
    assert "noise" not in set(selected.keys())
    assert list(expected.keys()) == loss.out_keys
    for key, value in loss(selected).items():
        assert torch.equal(value, expected[key]), key
    # nothing in in_keys is made up: with an advantage in the data, what is missing is not needed
    assert loss.in_keys == list(dict.fromkeys(loss.in_keys))
    for key, value in before.exclude("noise").items(True, True):
        assert torch.equal(data[key], value), key


@pytest.mark.parametrize("name", CLASSES)
def test_keyword_tensors(name: str) -> None:
    """``dispatch``: called with tensors by name, a loss returns a tuple in ``out_keys``' order."""
    loss, data = build(name, "normal").eval(), data_for(name, "normal")
    expected = loss(data)
    given = {key: data[key] for key in loss.in_keys if isinstance(key, str) and key in data}
    found = loss(**given)
    assert isinstance(found, tuple) and len(found) == len(loss.out_keys)
    for key, value in zip(loss.out_keys, found, strict=True):
        assert torch.equal(value, expected[key]), key
    chosen = [key for key in loss.out_keys if key.startswith("loss")]
    loss.select_out_keys(*chosen)
    for key, value in zip(chosen, loss(**given), strict=True):
        assert torch.equal(value, expected[key]), key


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CLASSES)
def test_one_action_key_keeps_the_heads(name: str, layout: str) -> None:
    """``set_keys(action="action")``, as trainers send it, renames no head of a composite actor."""
    group = LAYOUTS[layout][1]
    data, loss = data_for(name, PAIR, layout), build(name, PAIR, group=group).eval()
    expected = outcome(loss, data)
    loss.set_keys(action="action")
    same(outcome(loss, data), expected)
    loss.set_keys(action=("agents", "action") if group else "action", advantage="elsewhere")
    data["elsewhere"] = 2 * data[("agents", "advantage") if group else "advantage"]
    doubled = outcome(loss, data)[0]
    objective = "loss_actor" if name == "ReinforceLoss" else "loss_objective"
    if name not in KL:
        assert_close(doubled[objective], 2 * expected[0][objective])
    with pytest.raises(ValueError, match="not_a_key"):
        loss.set_keys(not_a_key="x")


# --- separate losses -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", CLASSES)
def test_separate_losses(name: str) -> None:
    """``separate_losses``: what actor and critic share learns from the policy only."""
    data = data_for(name)
    value_key = "loss_value" if name == "ReinforceLoss" else "loss_critic"
    for separate in (False, True):
        actor, _ = networks(PAIR)
        trunk = actor[0].module.net[0]
        own = nn.Linear(6, 1)
        critic = TensorDictModule(
            nn.Sequential(trunk, nn.Tanh(), own), ["observation"], ["state_value"]
        )
        loss = CLASSES[name](actor, critic, separate_losses=separate)
        loss(data)[value_key].backward()
        shared = trunk.weight.grad
        assert (shared is not None and bool(shared.any())) == (not separate)
        assert own.weight.grad.any()
        loss.zero_grad(set_to_none=True)
        out = loss(data)
        out["loss_actor" if name == "ReinforceLoss" else "loss_objective"].backward()
        assert trunk.weight.grad.any()


@pytest.mark.parametrize("functional", [True, False], ids=["functional", "modules"])
@pytest.mark.parametrize("name", CLASSES)
def test_separate_losses_with_a_hidden_entry(name: str, functional: bool) -> None:
    """``separate_losses``: nor does the value's gradient pass an entry that the actor writes."""
    data = data_for(name)
    value_key = "loss_value" if name == "ReinforceLoss" else "loss_critic"
    for separate in (False, True):
        whole, _ = networks(PAIR)
        parameters = whole[0].module
        trunk = TensorDictModule(parameters.net[0], ["observation"], ["hidden"])
        parameters.net[0] = nn.Identity()
        top = TensorDictModule(parameters, ["hidden"], whole[0].out_keys)
        actor = ProbabilisticTensorDictSequential(trunk, top, whole[1])
        critic = TensorDictModule(nn.Linear(6, 1), ["hidden"], ["state_value"])
        options = {"separate_losses": separate, "functional": functional}
        CLASSES[name](actor, critic, **options)(data)[value_key].backward()
        shared = trunk.module.weight.grad
        assert (shared is not None and bool(shared.any())) == (not separate)
        assert critic.module.weight.grad.any()


def test_doors_share_no_state() -> None:
    """Options, keys and coefficients of two losses of one class are their own."""
    first, second = build("ClipPPOLoss", PAIR), build("ClipPPOLoss", PAIR)
    kept = copy.deepcopy(second.state_dict())
    first.clip_epsilon, first.entropy_coeff = 0.01, 0.5
    first.set_keys(advantage="other")
    assert second.tensor_keys.advantage == "advantage"
    for key, value in second.state_dict().items():
        assert torch.equal(value, kept[key]), key
    assert set(DOORS) > set(TORCHRL)
