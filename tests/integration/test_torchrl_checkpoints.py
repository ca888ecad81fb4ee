"""A checkpoint of a TorchRL loss loads into ours: strict, and with equal losses afterwards.

Our coefficients are buffers of the parts (``value.coeff``), TorchRL's of the loss
(``critic_coeff``). What only TorchRL's constructor knows (the target KL of ``KLPENPPOLoss``, an
entropy mapping) is not in its checkpoint, and stays what our constructor was given.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torchrl.objectives
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.modules.value_norm import PercentileValueNorm, PopArtValueNorm, RunningValueNorm

import composite_losses as cl
from tests.cases.builders_fl import Heads, make_data, networks
from tests.tolerances import assert_close

# two of the losses have target parameters, and nothing here updates them
pytestmark = pytest.mark.filterwarnings("ignore:No target network updater:UserWarning")


@dataclass(frozen=True)
class Case:
    """A loss by name, the options of both, and the coefficients that training has changed.

    ``structure``: options that decide which entries there are; ``theirs``: those of TorchRL's only,
    ``ours``: those of ours only; ``tuned``: attribute → value that only the checkpoint knows.
    """

    name: str
    tuned: dict[str, float] = field(default_factory=dict)
    structure: dict[str, Any] = field(default_factory=dict)
    theirs: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)
    heads: Heads = "normal"
    group: bool = False
    estimator: bool = False


BOTH = {"entropy_coeff": 0.03, "critic_coeff": 0.7}
CLIP = {**BOTH, "clip_epsilon": 0.11}
PAIR = {**BOTH, "clip_epsilon_low": 0.11, "clip_epsilon_high": 0.33}
NORMS = {"popart": PopArtValueNorm, "running": RunningValueNorm}
TWO = {"x": "categorical", "y": "categorical"}
BY_HEAD = {("action", "x_entropy"): 0.02, ("action", "y_entropy"): 0.05}

CASES = {
    "PPOLoss": Case("PPOLoss", BOTH),
    "PPOLoss, value clipping": Case("PPOLoss", {**BOTH, "clip_value": 0.2}, {"clip_value": 0.9}),
    "PPOLoss, no entropy bonus": Case("PPOLoss", BOTH, {"entropy_bonus": False}),
    "PPOLoss, no value term": Case("PPOLoss", {"entropy_coeff": 0.03}, {"critic_coeff": 0.0}),
    "PPOLoss, importance cap": Case(
        "PPOLoss", {**BOTH, "max_importance_ratio": 1.05}, {"max_importance_ratio": 3.0}
    ),
    "PPOLoss, delayed actor": Case("PPOLoss", BOTH, {"delay_actor": True}),
    "PPOLoss, separate losses": Case("PPOLoss", BOTH, {"separate_losses": True}),
    "PPOLoss, not functional": Case("PPOLoss", BOTH, {"functional": False}),
    "PPOLoss, entropy was off": Case("PPOLoss", BOTH, ours={"entropy_coeff": 0.0}),
    "PPOLoss, entropy by head": Case(
        "PPOLoss", {"critic_coeff": 0.7}, {"entropy_coeff": BY_HEAD}, heads=TWO
    ),
    "PPOLoss, two heads": Case("PPOLoss", BOTH, heads=TWO),
    "PPOLoss, value estimator": Case("PPOLoss", BOTH, estimator=True),
    "ClipPPOLoss": Case("ClipPPOLoss", CLIP),
    "ClipPPOLoss, two heads": Case("ClipPPOLoss", CLIP, heads=TWO),
    "ClipPPOLoss, pair": Case("ClipPPOLoss", PAIR, {"clip_epsilon": (0.2, 0.2)}),
    "ClipPPOLoss, clips the value": Case(
        "ClipPPOLoss", {**CLIP, "clip_value": 0.4}, {"clip_value": True}
    ),
    "KLPENPPOLoss": Case(
        "KLPENPPOLoss", {**BOTH, "beta": 0.4}, {"dtarg": 0.02, "increment": 3.0, "decrement": 0.3}
    ),
    "A2CLoss": Case("A2CLoss", BOTH),
    "A2CLoss, value clipping": Case("A2CLoss", {**BOTH, "clip_value": 0.2}, {"clip_value": 0.9}),
    "A2CLoss, no value term": Case("A2CLoss", {"entropy_coeff": 0.03}, {"critic_coeff": None}),
    "A2CLoss, not functional": Case("A2CLoss", BOTH, {"functional": False}),
    "ReinforceLoss": Case("ReinforceLoss"),
    "ReinforceLoss, value clipping": Case(
        "ReinforceLoss", {"clip_value": 0.2}, {"clip_value": 0.9}
    ),
    "ReinforceLoss, delayed value": Case("ReinforceLoss", {}, {"delay_value": True}),
    "ReinforceLoss, value estimator": Case("ReinforceLoss", estimator=True),
    "MAPPOLoss": Case("MAPPOLoss", CLIP, group=True),
    "IPPOLoss": Case("IPPOLoss", CLIP, group=True),
    "MAPPOLoss, pair": Case("MAPPOLoss", PAIR, {"clip_epsilon": (0.2, 0.2)}, group=True),
    "MAPPOLoss, value estimator": Case("MAPPOLoss", CLIP, group=True, estimator=True),
}


def built(case: Case, cls: Any, options: dict[str, Any]) -> Any:
    """A loss over networks of the same shape, reading the data's keys."""
    loss = cls(*networks(case.heads, case.group), **options)
    if case.group:
        names = ("advantage", "value_target", "reward", "done", "terminated")
        loss.set_keys(value=("agents", "state_value"), **{n: ("agents", n) for n in names})
    if case.estimator:
        loss.make_value_estimator(gamma=0.9)
    return loss


def trained(case: Case, **more: Any) -> Any:
    """TorchRL's loss, all weights and the tuned coefficients changed after construction."""
    cls = getattr(torchrl.objectives, case.name)
    loss = built(case, cls, {**case.structure, **case.theirs, **more})
    with torch.no_grad():
        for value in loss.state_dict().values():
            if isinstance(value, Tensor) and value.ndim:
                value.add_(0.05 * torch.randn_like(value))
        for name, number in case.tuned.items():
            getattr(loss, name).fill_(number)
    return loss


def fresh(case: Case, **more: Any) -> Any:
    """Our loss with the same structure, at its own initial values."""
    return built(case, getattr(cl, case.name), {**case.structure, **case.ours, **more})


def data(case: Case) -> TensorDictBase:
    shape = (5, 3) if case.group else (7,)
    return make_data(case.heads, shape, group=case.group, source="all")


def losses(out: TensorDictBase) -> Iterator[tuple[str, Tensor]]:
    return ((key, value) for key, value in out.items() if key.startswith("loss"))


@pytest.mark.parametrize("name", list(CASES))
def test_a_checkpoint_loads_strict_and_gives_equal_losses(name: str) -> None:
    """Through a file, read with ``weights_only``: every entry of theirs has a place in ours."""
    case, file = CASES[name], io.BytesIO()
    theirs, ours, td = trained(case), fresh(case), data(case)
    torch.save(theirs.state_dict(), file)
    file.seek(0)
    result = ours.load_state_dict(torch.load(file, weights_only=True), strict=True)
    assert not result.missing_keys
    assert not result.unexpected_keys
    for attribute, number in case.tuned.items():
        assert_close(getattr(ours, attribute), number)
    expected = dict(losses(theirs(td.clone())))
    found = dict(losses(ours(td)))
    assert set(found) == set(expected)
    for key, value in expected.items():
        assert_close(found[key], value)


@pytest.mark.parametrize("name", list(CASES))
def test_both_losses_agree_before_anything_is_loaded(name: str) -> None:
    """The check above compares like with like: built alike, both give the same losses."""
    case = CASES[name]
    cls = getattr(torchrl.objectives, case.name)
    theirs = built(case, cls, {**case.structure, **case.theirs})
    ours = built(case, getattr(cl, case.name), case.structure)
    td = data(case)
    expected = dict(losses(theirs(td.clone())))
    for key, value in losses(ours(td)):
        assert_close(value, expected[key])


@pytest.mark.parametrize("kind", list(NORMS))
def test_a_value_normaliser_is_loaded(kind: str) -> None:
    """Its statistics stand under ``value_norm`` there, under the value term here."""
    case = Case("MAPPOLoss", CLIP, group=True)
    theirs = trained(case, value_norm=NORMS[kind](shape=1))
    theirs.value_norm.update(torch.randn(50, 1) * 4 + 3)
    ours = fresh(case, value_norm=NORMS[kind](shape=1))
    ours.load_state_dict(theirs.state_dict(), strict=True)
    expected = theirs.value_norm.state_dict()
    assert expected
    for key, value in ours.value_norm.state_dict().items():
        assert torch.equal(value, expected[key])


@pytest.mark.parametrize("name", ["PPOLoss", "A2CLoss"])
def test_an_advantage_normaliser_is_loaded(name: str) -> None:
    """Its percentiles stand under ``advantage_norm`` there, under the advantage part here."""
    case = Case(name, BOTH)
    theirs = trained(case, advantage_norm=PercentileValueNorm(shape=1))
    theirs.advantage_norm.update(torch.randn(50, 1) * 4 + 3)
    ours = fresh(case, advantage_norm=PercentileValueNorm(shape=1))
    ours.load_state_dict(theirs.state_dict(), strict=True)
    expected = theirs.advantage_norm.state_dict()
    assert expected
    for key, value in ours.advantage_norm.state_dict().items():
        assert torch.equal(value, expected[key])


def test_what_has_no_place_is_still_an_error() -> None:
    """Strict means strict: a value clip cannot load into a loss that does not clip the value."""
    theirs = trained(CASES["PPOLoss, value clipping"])
    with pytest.raises(RuntimeError, match="clip"):
        fresh(CASES["PPOLoss"]).load_state_dict(theirs.state_dict(), strict=True)


@pytest.mark.parametrize(
    ("stored", "target"),
    [("ClipPPOLoss", "ClipPPOLoss, pair"), ("ClipPPOLoss, pair", "ClipPPOLoss")],
)
def test_a_symmetric_clip_range_is_not_a_pair(stored: str, target: str) -> None:
    """As between TorchRL's own losses, which hold the two under different names."""
    theirs = trained(CASES[stored])
    with pytest.raises(RuntimeError, match=r"clip_epsilon|eps"):
        fresh(CASES[target]).load_state_dict(theirs.state_dict(), strict=True)


def test_a_part_of_a_larger_module_loads_too() -> None:
    """A prefix before the keys, as in a checkpoint of a module that holds the loss."""
    case = CASES["ClipPPOLoss"]
    theirs, ours = (torch.nn.ModuleDict({"loss": make(case)}) for make in (trained, fresh))
    ours.load_state_dict(theirs.state_dict(), strict=True)
    assert_close(ours["loss"].clip_epsilon, 0.11)


@pytest.mark.parametrize("name", ["ClipPPOLoss", "KLPENPPOLoss", "MAPPOLoss"])
def test_our_own_checkpoints_are_not_mistaken(name: str) -> None:
    """A checkpoint of ours loads as before, under our own keys, and its input is not changed."""
    case = CASES[name]
    first, second = fresh(case), fresh(case)
    for attribute, number in case.tuned.items():
        setattr(first, attribute, number)
    state = first.state_dict()
    keys = list(state)
    second.load_state_dict(state, strict=True)
    assert list(state) == keys
    for attribute, number in case.tuned.items():
        assert_close(getattr(second, attribute), number)


@pytest.mark.parametrize("name", ["ClipPPOLoss", "KLPENPPOLoss", "A2CLoss"])
@pytest.mark.parametrize("lost", ["entropy_coeff", "critic_coeff", "networks only"])
def test_what_a_checkpoint_lacks_is_an_error(name: str, lost: str) -> None:
    """Strict means strict: coefficients that TorchRL stores are missing, and named by our keys."""
    state = trained(CASES[name]).state_dict()
    kept = {
        key: value
        for key, value in state.items()
        if (key.startswith(("actor", "critic_network")) if " " in lost else key != lost)
    }
    missing = "entropy.coeff" if " " in lost else lost.replace("critic", "value").replace("_", ".")
    with pytest.raises(RuntimeError, match=f"Missing key.*{missing}"):
        fresh(CASES[name]).load_state_dict(kept, strict=True)


def test_statistics_that_a_checkpoint_lacks_are_an_error() -> None:
    """A loss with a value normaliser needs its statistics."""
    theirs = trained(CASES["MAPPOLoss"])
    data = CASES["MAPPOLoss"]
    ours = fresh(replace(data, ours={**data.ours, "value_norm": PopArtValueNorm(shape=1)}))
    with pytest.raises(RuntimeError, match=r"Missing key.*value\.norm\."):
        ours.load_state_dict(theirs.state_dict(), strict=True)
