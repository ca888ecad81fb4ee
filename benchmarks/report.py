"""Rows of results: to the terminal, to CSV with the environment, to PNG plots."""

from __future__ import annotations

import csv
import dataclasses
import importlib.metadata
import platform
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import composite_losses

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Row:
    """One provider in one pass of one case.

    Attributes:
        case: what is computed.
        variable: what the series varies, "" for none.
        value: its value.
        provider: who computes.
        mode: ``eager`` or ``compiled``.
        which: ``forward`` or ``forward+backward``.
        ms_20: 20 % quantile of the time of one call in milliseconds; likewise ``ms_50``, ``ms_80``.
        ratio: median of time / the baseline's time in the same round.
        rounds: number of rounds.
        operations: dispatched operations; ``kernels``: those that are not views.
        peak_mib: most memory allocated at once by the call.
        status: ``ok``, a note, or why there are no numbers.
    """

    case: str
    variable: str
    value: int
    provider: str
    mode: str
    which: str
    ms_20: float | None = None
    ms_50: float | None = None
    ms_80: float | None = None
    ratio: float | None = None
    rounds: int = 0
    operations: int | None = None
    kernels: int | None = None
    peak_mib: float | None = None
    status: str = "ok"


def environment(device: torch.device) -> dict[str, str]:
    """What the numbers depend on: versions, processor, threads, commit."""
    versions = {name: importlib.metadata.version(name) for name in ("tensordict", "torchrl")}
    return {
        "composite_losses": composite_losses.__version__,
        "commit": commit(),
        "torch": torch.__version__,
        **versions,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "cpu": processor(),
        "threads": str(torch.get_num_threads()),
    }


def commit() -> str:
    """The checkout's commit, with a + where files differ from it; "unknown" outside of git."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def processor() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def write_csv(path: Path, rows: Iterable[Row], about: dict[str, str]) -> None:
    """Writes one line per row, each with the environment."""
    names = [f.name for f in dataclasses.fields(Row)]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*names, *about])
        writer.writeheader()
        for row in rows:
            writer.writerow({**dataclasses.asdict(row), **about})


HEADER = (
    "provider", "pass", "20 %", "50 %", "80 %  ms", "ratio", "operations", "kernels", "peak MiB", ""
)  # fmt: skip


def tables(rows: Sequence[Row]) -> str:
    """The rows as text, one table per case and mode."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.case, row.variable, row.value, row.mode), []).append(row)
    parts = []
    for (case, variable, value, mode), members in groups.items():
        title = f"{case}, {variable} = {value}" if variable else case
        lines = [HEADER, *(_line(row) for row in sorted(members, key=lambda row: row.which))]
        widths = [max(len(line[i]) for line in lines) for i in range(len(HEADER))]
        text = [_padded(line, widths) for line in lines]
        parts.append("\n".join([f"{title} ({mode})", *text]))
    return "\n\n".join(parts)


def _line(row: Row) -> tuple[str, ...]:
    def shown(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    return (
        row.provider,
        row.which,
        shown(row.ms_20, ".3f"),
        shown(row.ms_50, ".3f"),
        shown(row.ms_80, ".3f"),
        shown(row.ratio, ".2f"),
        shown(row.operations, "d"),
        shown(row.kernels, "d"),
        shown(row.peak_mib, ".2f"),
        "" if row.status == "ok" else row.status,
    )


def _padded(line: Sequence[str], widths: Sequence[int]) -> str:
    """A line in columns: names to the left, numbers to the right."""
    last = len(line) - 1
    cells = [
        text.ljust(width) if i in (0, 1, last) else text.rjust(width)
        for i, (text, width) in enumerate(zip(line, widths, strict=True))
    ]
    return ("  " + "  ".join(cells)).rstrip()


QUANTITIES = {"ms_50": "ms", "operations": "dispatched operations", "peak_mib": "peak MiB"}


def plots(folder: Path, benchmark: str, rows: Sequence[Row]) -> list[Path]:
    """The PNG files written: one per series, time, operations and memory over what it varies."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    series: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.variable and row.ms_50 is not None:
            series.setdefault((row.case, row.variable), []).append(row)
    written = []
    for (case, variable), members in series.items():
        passes = list(dict.fromkeys(row.which for row in members))
        shape = (len(passes), len(QUANTITIES))
        figure, axes = plt.subplots(*shape, figsize=(12, 3.6 * len(passes)), squeeze=False)
        for line, which in zip(axes, passes, strict=True):
            for axis, (name, label) in zip(line, QUANTITIES.items(), strict=True):
                _curves(axis, [row for row in members if row.which == which], name)
                axis.set(xlabel=variable, ylabel=label, title=which, xscale="log", yscale="log")
                axis.grid(alpha=0.3)
                axis.set_visible(bool(axis.lines))
        axes[0][0].legend(fontsize="small")
        figure.suptitle(case)
        figure.tight_layout()
        path = folder / f"{benchmark}_{_slug(case)}_{_slug(variable)}.png"
        figure.savefig(path, dpi=120)
        plt.close(figure)
        written.append(path)
    return written


def _curves(axis: Any, rows: Sequence[Row], name: str) -> None:
    """Draws a quantity for every provider and mode; times with their quantiles."""
    for provider, mode in dict.fromkeys((row.provider, row.mode) for row in rows):
        chosen = [r for r in rows if (r.provider, r.mode) == (provider, mode)]
        points = [(r.value, getattr(r, name)) for r in chosen if getattr(r, name) is not None]
        if not points:
            continue
        label = provider if mode == "eager" else f"{provider}, {mode}"
        style = "o-" if mode == "eager" else "s--"
        (line,) = axis.plot(*zip(*points, strict=True), style, label=label, markersize=3)
        if name == "ms_50":
            low, high = [r.ms_20 for r in chosen], [r.ms_80 for r in chosen]
            axis.fill_between(
                [r.value for r in chosen], low, high, alpha=0.2, color=line.get_color()
            )


def _slug(text: str) -> str:
    return "_".join("".join(c if c.isalnum() else " " for c in text.lower()).split())
