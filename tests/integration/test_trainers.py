"""TorchRL's trainers train our losses with composite actors, log them, stop and resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD
from torchrl.record import CSVLogger
from torchrl.record.loggers.tensorboard import TensorboardLogger

from tests.integration.trainers import (
    CASES,
    FRAMES,
    WARNINGS,
    Record,
    make_loss,
    make_trainer,
    weights,
)
from tests.tolerances import assert_close

pytestmark = [pytest.mark.filterwarnings(text) for text in WARNINGS]
names = pytest.mark.parametrize("name", list(CASES))
# the terms that a trainer must sum, by the loss that is trained
TERMS = {"loss_objective", "loss_critic", "loss_entropy"}
REINFORCE = {"reinforce": {"loss_actor", "loss_value"}, "reinforce-alone": {"loss_actor"}}


def start(name: str, **options: Any) -> tuple[Any, Any]:
    """(loss, trainer) over fresh networks."""
    loss, actor = make_loss(CASES[name])
    return loss, make_trainer(CASES[name], loss, actor, **options)


@names
def test_trains_with_the_same_finite_outputs_at_every_step(name: str) -> None:
    """Trainers average the outputs of every step by key, so the key set must not change.

    The gradient norm is the trainer's own. Every weight that the loss trains must have moved.
    """
    loss, trainer = start(name, batches=3)
    before, record = weights(loss), Record(trainer)
    trainer.train()
    assert len(record.rows) == 3
    for row in record.rows:
        assert set(row) - {"grad_norm", "grad_norm_0"} == set(loss.out_keys)
        assert all(value.ndim == 0 and value.isfinite() for value in row.values()), row
    moved = {key for key, value in weights(loss).items() if not torch.equal(value, before[key])}
    assert moved >= {key for key in before if "network_params" in key}


@names
def test_heads_survive_the_key_that_the_trainers_set(name: str) -> None:
    """``OnPolicyTrainer`` calls ``set_keys(action="action")``; the heads stay, and are all trained.

    A composite policy with actions at the root writes no "action" at all.
    """
    loss, trainer = start(name, batches=1)
    record = Record(trainer)
    trainer.train()
    keys = [("action", k) if CASES[name].nested else k for k in ("move", "gear")]
    assert set(keys) <= set(loss.in_keys)
    assert {"entropy/move", "entropy/gear"} <= set(record.rows[0])


@names
def test_one_step_follows_the_sum_of_the_losses(name: str) -> None:
    """Every output that starts with "loss" is summed: no term is missing, none counted twice.

    With SGD at rate 0.01 and no clipping, weight − 0.01 · gradient of the sum of the terms that
    the loss names is the weight after one step.
    """
    loss, trainer = start(name, batches=1, optimizer=SGD, clip_norm=None)
    terms = REINFORCE.get(name, TERMS)
    assert {key for key in loss.out_keys if key.startswith("loss")} == terms
    expected: list[torch.Tensor] = []
    found: list[torch.Tensor] = []

    def before(batch: Any) -> None:
        if expected:
            return
        out = loss.eval()(batch)  # a penalty adapts in training mode only
        loss.train()
        parameters = list(loss.parameters())
        grads = torch.autograd.grad(sum(out[key] for key in terms), parameters)
        expected.extend(p.detach() - 0.01 * g for p, g in zip(parameters, grads, strict=True))

    def after(batch: Any) -> None:
        if not found:
            found.extend(p.detach().clone() for p in loss.parameters())

    trainer.register_op("process_optim_batch", before)
    trainer.register_op("post_optim_log", after)
    trainer.train()
    assert expected
    for weight, wanted in zip(found, expected, strict=True):
        assert_close(weight, wanted)


@names
def test_csv_logger_gets_every_output_at_every_batch(name: str, tmp_path: Path) -> None:
    """One row (frames, value) a batch and output, equal to what was averaged."""
    loss, trainer = start(name, batches=3, logger=CSVLogger("run", str(tmp_path)))
    record = Record(trainer)
    trainer.train()
    for key in loss.out_keys:
        lines = (tmp_path / "run" / "scalars" / f"{key}.csv").read_text().splitlines()
        rows = [[float(cell) for cell in line.split(",")] for line in lines]
        assert [row[0] for row in rows] == [FRAMES, 2 * FRAMES, 3 * FRAMES]
        assert_close(torch.tensor([row[1] for row in rows]), [float(r[key]) for r in record.rows])


@pytest.mark.parametrize("name", ["ppo", "a2c-nested", "reinforce-alone", "plain"])
def test_tensorboard_logger_gets_every_output(name: str, tmp_path: Path) -> None:
    """TensorBoard takes our names, "/" included, as tags of scalars."""
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    loss, trainer = start(name, batches=2, logger=TensorboardLogger("run", str(tmp_path)))
    record = Record(trainer)
    trainer.train()
    trainer.logger.experiment.flush()
    events = accumulators.EventAccumulator(str(tmp_path / "run")).Reload()
    assert set(loss.out_keys) <= set(events.Tags()["scalars"])
    for key in loss.out_keys:
        found = [(event.step, event.value) for event in events.Scalars(key)]
        assert [step for step, _ in found] == [FRAMES, 2 * FRAMES]
        assert_close(torch.tensor([v for _, v in found]), [float(r[key]) for r in record.rows])


@names
def test_a_checkpoint_resumes_bit_for_bit(name: str, tmp_path: Path) -> None:
    """Two batches, a checkpoint, other networks, two more batches = four batches in one go.

    To the bit, in every entry of the state dict: weights and what a loss adapts (the penalty
    coefficient of "ppo-kl").
    """
    torch.manual_seed(3)
    whole, trainer = start(name, batches=4)
    trainer.train()

    torch.manual_seed(3)
    first, trainer = start(name, batches=2, file=tmp_path / "checkpoint")
    trainer.train()
    half = weights(first)

    torch.manual_seed(4)
    second, trainer = start(name, batches=4)
    assert any(not torch.equal(value, half[key]) for key, value in weights(second).items())
    trainer.load_from_file(tmp_path / "checkpoint")
    for key, value in weights(second).items():
        assert torch.equal(value, half[key]), key
    trainer.train()
    for key, value in weights(whole).items():
        assert torch.equal(weights(second)[key], value), key
    assert any(not torch.equal(value, half[key]) for key, value in weights(second).items())


def test_an_adapted_penalty_is_part_of_the_checkpoint(tmp_path: Path) -> None:
    """β starts at 0.7 and has been halved or doubled when the checkpoint is written."""
    loss, trainer = start("ppo-kl", batches=2, file=tmp_path / "checkpoint")
    trainer.train()
    assert float(loss.beta) != pytest.approx(0.7)
    other, trainer = start("ppo-kl", batches=2)
    trainer.load_from_file(tmp_path / "checkpoint")
    assert torch.equal(other.beta, loss.beta)
