"""The table and the picture."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from composite_losses.demo.methods import JOINT, PER_HEAD, TORCHRL
from composite_losses.demo.training import History

Histories = Mapping[str, Sequence[History]]
"""Runs by method, one per seed."""

WINDOW = 5
"""Iterations that a figure in the table or a point of a curve is averaged over."""

STYLES: dict[str, dict[str, Any]] = {
    JOINT: {"color": "tab:blue", "linewidth": 4.0, "alpha": 0.45},
    TORCHRL: {"color": "black", "linewidth": 1.5, "linestyle": "--"},
    PER_HEAD: {"color": "tab:orange", "linewidth": 2.0},
}


def mean_return(runs: Sequence[History], part: slice) -> float:
    """The return averaged over seeds and over a part of the iterations."""
    return statistics.fmean(value for run in runs for value in run.returns[part])


def update_time(runs: Sequence[History]) -> float:
    """Median seconds of an update, over all seeds."""
    return statistics.median(value for run in runs for value in run.update_seconds)


def table(histories: Histories) -> str:
    """One line per method: first and last return, time of an update, time of all its runs."""
    lines = [f"{'loss':22}{'first return':>14}{'last return':>13}{'ms/update':>11}{'total s':>9}"]
    for name, runs in histories.items():
        first = mean_return(runs, slice(None, WINDOW))
        last = mean_return(runs, slice(-WINDOW, None))
        seconds = sum(run.seconds for run in runs)
        lines.append(
            f"{name:22}{first:14.2f}{last:13.2f}{1e3 * update_time(runs):11.1f}{seconds:9.1f}"
        )
    lines.append(
        f"Returns: mean over {WINDOW} iterations and all seeds. An update: loss forward, backward, "
        "optimiser step; median."
    )
    return "\n".join(lines)


def running_mean(values: torch.Tensor) -> torch.Tensor:
    """The mean over the last :data:`WINDOW` entries of a series ``[seeds, iterations]``."""
    total = values.cumsum(-1)
    total[:, WINDOW:] -= total[:, :-WINDOW].clone()
    count = torch.arange(1, values.shape[-1] + 1).clamp_max(WINDOW)
    return total / count


def draw(axes: Axes, name: str, runs: Sequence[History]) -> None:
    """Draws a method's learning curve, with the range over seeds if there are several."""
    curves = running_mean(torch.tensor([run.returns for run in runs], dtype=torch.float64))
    steps = range(1, curves.shape[-1] + 1)
    axes.plot(steps, curves.mean(0), label=name, **STYLES[name])
    if len(runs) > 1:
        low, high = curves.amin(0), curves.amax(0)
        axes.fill_between(steps, low, high, color=STYLES[name]["color"], alpha=0.15, linewidth=0)


def write_picture(histories: Histories, path: Path) -> None:
    """Writes the learning curves of all methods to an image file."""
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for name, runs in histories.items():
        draw(axes, name, runs)
    seeds = len(next(iter(histories.values())))
    spread = f" (lines: mean of {seeds} seeds, bands: their range)" if seeds > 1 else ""
    axes.set_title("Two agents that move and speak (VMAS simple_reference)")
    axes.set_xlabel(f"iteration{spread}")
    axes.set_ylabel(f"return per episode (mean of {WINDOW} iterations)")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150)
