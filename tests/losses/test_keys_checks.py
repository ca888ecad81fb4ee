"""What a loss refuses as a key, and which outputs it gives where some are selected."""

import copy
import pickle
from typing import Any

import pytest
import torch

from composite_losses.errors import ConfigError
from tests.cases import builders_groups as bg
from tests.cases.builders_fl import CLASSES, PAIR, build, make_data

SINGLE = ("advantage", "value_target", "value", "reward", "done", "terminated", "agent_mask")
NO_KEYS = [3, 0.5, (), ("a", 3), ["a", None], {"a": "b"}, torch.zeros(1), b"a"]


def keys_of(loss: Any) -> Any:
    """Everything that a key changes: names, plan, what the estimator got."""
    estimator = loss._value_estimator
    return (
        vars(loss.tensor_keys),
        loss.in_keys,
        loss._plan,
        loss._user_keys,
        loss._shared_keys,
        None if estimator is None else vars(estimator.tensor_keys),
    )


def loss_with_estimator() -> Any:
    loss = build("ClipPPOLoss", PAIR)
    loss.make_value_estimator(gamma=0.9)
    loss.set_keys(reward="pay", sample_log_prob=["first", "second"])
    return loss


@pytest.mark.parametrize("name", [*SINGLE, "factor", "action", "sample_log_prob"])
def test_what_is_no_key_is_refused(name: str) -> None:
    """The message says which key, what was expected and what was found; nothing is changed, also
    of the keys that were given along with it."""
    loss = loss_with_estimator()
    before = copy.deepcopy(keys_of(loss))
    for value in NO_KEYS:
        with pytest.raises(ConfigError, match=rf"set_keys\({name}=\.\.\.\): expected .*found"):
            loss.set_keys(**{"advantage": "gae", "terminated": "end", name: value})
        assert keys_of(loss) == before


@pytest.mark.parametrize(
    "value", [3, "move", ["move"], {"move": 3}, {"move": ()}, {"tail": "on"}], ids=repr
)
def test_what_is_no_mapping_of_masks_is_refused(value: Any) -> None:
    """``head_active``: head → key, of heads that there are."""
    loss = loss_with_estimator()
    before = copy.deepcopy(keys_of(loss))
    with pytest.raises(ConfigError, match=r"set_keys\(head_active=\.\.\.\): "):
        loss.set_keys(advantage="gae", head_active=value)
    assert keys_of(loss) == before


def test_a_value_that_the_critic_does_not_write() -> None:
    """The estimator refuses it: the loss keeps its keys, the estimator likewise."""
    loss = loss_with_estimator()
    before = copy.deepcopy(keys_of(loss))
    with pytest.raises(KeyError, match="not found in value network out_keys"):
        loss.set_keys(advantage="gae", action=["a", "b"], value="other")
    assert keys_of(loss) == before


@pytest.mark.parametrize("key", ["a", ("a", "b"), ("a", ("b",)), ["a", "b"], None], ids=repr)
def test_what_is_a_key_is_taken(key: Any) -> None:
    """Strings, tuples, nested tuples, a configuration's lists; None is the default."""
    loss = loss_with_estimator()
    loss.set_keys(advantage=key)
    assert loss.tensor_keys.advantage == ("advantage" if key is None else key)
    flat = {None: "advantage", "a": "a"}.get(key if not isinstance(key, list) else "", ("a", "b"))
    flat = ("a",) if key == ("a",) else flat
    assert flat in loss.in_keys


# --- selected outputs ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", CLASSES)
def test_selected_outputs(name: str) -> None:
    """``select_out_keys``: a TensorDict call gives these outputs alone, in their order, and
    ``reset_out_keys`` all again; copies keep the choice."""
    source = "all" if name == "KLPENPPOLoss" else "stored"
    loss, data = build(name, PAIR).eval(), make_data(PAIR, (6,), source=source)
    everything, full = loss.out_keys, loss(data)
    objective = next(key for key in everything if key.startswith("loss"))
    for chosen in (["entropy", objective], [objective]):
        assert loss.select_out_keys(*chosen) is loss
        for each in (loss, copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
            out = each(data)
            assert list(out.keys()) == each.out_keys == chosen
            for key in chosen:
                torch.testing.assert_close(out[key], full[key], rtol=0, atol=0)
    assert loss.out_keys_source == everything
    assert list(loss.reset_out_keys()(data).keys()) == loss.out_keys == everything


@pytest.mark.parametrize("chosen", [["nothing"], ["loss_objective", "nothing"]])
def test_unknown_output(chosen: list[str]) -> None:
    loss = build("ClipPPOLoss", PAIR)
    everything = loss.out_keys
    with pytest.raises(ValueError, match="nothing"):
        loss.select_out_keys(*chosen)
    assert loss.out_keys == everything
    assert list(loss(make_data(PAIR, (6,))).keys()) == everything


def test_selected_outputs_of_a_group() -> None:
    """A member's choice: the whole says and gives what the member gives."""
    loss, td = bg.group_loss(bg.TWO, missing="skip"), bg.make_data(bg.TWO)
    full = loss(td)
    loss.losses["prey"].select_out_keys("loss_objective", "entropy")
    for data in (td, td.exclude("prey", ("next", "prey"))):
        out = loss(data)
        assert list(out.keys()) == loss.out_keys
        assert [k for k in out.keys() if k.startswith("prey")] == [  # noqa: SIM118
            "prey/loss_objective",
            "prey/entropy",
        ]
        torch.testing.assert_close(out["loss_critic"], full["hunter/loss_critic"])
