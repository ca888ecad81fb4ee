"""Executes the notebooks and writes them, with outputs and plots, to a folder.

    python notebooks/run.py                   # all, to build/notebooks
    python notebooks/run.py 01 04 --to /tmp   # those whose name starts like this

The sources are Python files with cells (``# %%``), so they hold no outputs; editors and
Jupyter (through jupytext) open them as notebooks.
"""

import argparse
import time
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
SOURCES = sorted(HERE.glob("[0-9][0-9]_*.py"))
SECONDS = 300  # limit for a cell on a busy machine; idle, a whole notebook takes less than 90
FIRST = """\
import warnings
warnings.simplefilter("error")
# said by torch and torchrl when they are imported or export, whatever is done with them
warnings.filterwarnings("ignore", r"Creating \\w+ which inherits from WeightUpdaterBase")
warnings.filterwarnings("ignore", module=r"torch\\.|onnx|ipykernel|jupyter|zmq")
"""


def executed(source: Path, folder: Path) -> nbformat.NotebookNode:
    """Returns the notebook after it ran in a fresh kernel; warnings are errors there.

    Args:
        source: the Python file.
        folder: where the kernel works and may write.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised.
    """
    notebook = jupytext.read(source)
    first = nbformat.v4.new_code_cell(FIRST)
    notebook.cells.insert(0, first)
    client = NotebookClient(
        notebook,
        timeout=SECONDS,
        startup_timeout=SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute()
    notebook.cells.remove(first)
    return notebook


def main() -> None:
    """Executes what the command line names."""
    parser = argparse.ArgumentParser(description="Executes the notebooks.")
    parser.add_argument("names", nargs="*", help="how their names start; default: all")
    parser.add_argument("--to", type=Path, default=Path("build/notebooks"), help="folder")
    options = parser.parse_args()
    options.to.mkdir(parents=True, exist_ok=True)
    for source in SOURCES:
        if options.names and not source.name.startswith(tuple(options.names)):
            continue
        start = time.perf_counter()
        notebook = executed(source, options.to)
        target = options.to / f"{source.stem}.ipynb"
        nbformat.write(notebook, target)
        print(f"{target}: {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
