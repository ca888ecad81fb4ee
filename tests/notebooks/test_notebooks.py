"""The notebooks run from top to bottom, assert what they claim, show plots and hold no outputs."""

import ast
import os
import re
from pathlib import Path

import jupytext
import nbformat
import pytest
from nbclient.exceptions import CellExecutionError

from notebooks.run import SECONDS, SOURCES, executed

CPU_SECONDS = 90  # unlike the time on the clock, the same on a busy machine

named = pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)


def cells(notebook: nbformat.NotebookNode, kind: str) -> list[str]:
    return [cell.source for cell in notebook.cells if cell.cell_type == kind]


@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS)
@named
def test_runs_and_shows_a_plot(source: Path, tmp_path: Path) -> None:
    """In a fresh kernel, in an empty folder, with warnings as errors; the claims are assertions."""
    before = os.times()
    notebook = executed(source, tmp_path)
    after = os.times()  # of ended child processes: the kernel and what it started
    spent = after.children_user - before.children_user
    spent += after.children_system - before.children_system
    assert 1 < spent < CPU_SECONDS
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", [])]
    assert not [out for out in outputs if out.output_type == "error"]
    assert any("image/png" in out.get("data", {}) for out in outputs)
    nbformat.validate(notebook)


def test_there_are_as_many_as_their_numbers_say() -> None:
    assert [path.name[:2] for path in SOURCES] == [f"0{i}" for i in range(1, len(SOURCES) + 1)]
    assert len(SOURCES) == 6


@named
def test_text_and_claims(source: Path) -> None:
    """Each starts with a title and asserts more than one thing; no cell is hidden from the reader.

    The sources are Python files, so outputs cannot be stored in them.
    """
    notebook = jupytext.read(source)
    text, code = cells(notebook, "markdown"), cells(notebook, "code")
    assert text[0].startswith("# ")
    assert len(text) >= 5
    nodes = [node for each in code for node in ast.walk(ast.parse(each))]
    claims = sum(isinstance(node, ast.Assert) for node in nodes)
    claims += sum(len(re.findall(r"assert_close\(", each)) for each in code)
    assert claims >= 4
    assert not any("outputs" in cell and cell.outputs for cell in notebook.cells)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("assert 1 + 1 == 3", "AssertionError"),
        ("import warnings; warnings.warn('careful')", "UserWarning"),
        ("import composite_losses; composite_losses.nothing", "AttributeError"),
    ],
    ids=["claim", "warning", "name"],
)
def test_the_check_itself_finds_faults(code: str, error: str, tmp_path: Path) -> None:
    source = tmp_path / "09_wrong.py"
    source.write_text(f"# %% [markdown]\n# # Title\n\n# %%\n{code}\n", encoding="utf-8")
    with pytest.raises(CellExecutionError, match=error):
        executed(source, tmp_path)
