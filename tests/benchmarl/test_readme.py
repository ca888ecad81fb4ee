"""The README's lines for BenchMARL do what it says of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from benchmarl.algorithms import MappoConfig, mappo

import composite_losses as cl
from tests.benchmarl.experiments import configured, experiment

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
SECTION = README.partition("\n## In BenchMARL\n")[2].partition("\n## ")[0]


def test_the_two_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They put this library's loss where BenchMARL builds its own."""
    # what the lines set is put back after the test
    monkeypatch.setattr(mappo, "ClipPPOLoss", None)
    (lines,) = re.findall(r"^```text\n(.*?)^```", SECTION, re.DOTALL | re.MULTILINE)
    assert len(lines.splitlines()) == 2
    exec(lines, {})
    run, _ = experiment(tmp_path, configured(MappoConfig))
    assert [type(loss) for loss in run.losses.values()] == [cl.ClipPPOLoss]
    run.close()


def test_options_that_benchmarl_does_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A partial of the loss goes in place of the class."""
    (option,) = re.findall(r"`functools\.(partial\(.*?\))`", SECTION)
    names = "from functools import partial\nimport composite_losses"
    scope: dict[str, object] = {}
    exec(f"{names}\nloss = {option}", scope)
    monkeypatch.setattr(mappo, "ClipPPOLoss", scope["loss"])
    run, _ = experiment(tmp_path, configured(MappoConfig))
    (loss,) = run.losses.values()
    assert float(loss.surrogate.dual_clip) == 3.0
    run.close()
