"""The command line: ``python -m benchmarks losses --quick``."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from benchmarks.case import Case, Settings, run
from benchmarks.measure import CLOCKS
from benchmarks.report import Row, environment, plots, tables, write_csv

BENCHMARKS = {
    "losses": "hand-written, ours and TorchRL's PPO, A2C and REINFORCE",
    "nets": "a loop over agents, ours and TorchRL's multi-agent networks",
    "groups": "one GroupLoss against one TorchRL loss per group",
    "export": "eager, torch.export, AOTInductor and ONNX Runtime",
}


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    out = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = out.add_subparsers(dest="benchmark", required=True)
    for name, text in BENCHMARKS.items():
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--device", default="cpu", help="cpu or cuda")
        command.add_argument("--threads", type=int, default=2, help="torch threads on the CPU")
        command.add_argument(
            "--clock",
            choices=list(CLOCKS),
            default="wall",
            help="cpu: time that the process computes, for a busy machine; with --threads 1",
        )
        command.add_argument("--quick", action="store_true", help="fewer, smaller cases: a minute")
        command.add_argument("--only", default="", help="only cases whose name contains this")
        command.add_argument("--out", type=Path, default=Path("benchmarks/results"))
        command.add_argument("--compile", action="store_true", help="every provider compiled, too")
    return out


def measured(found: Iterable[Case], settings: Settings) -> list[Row]:
    """The rows of all cases, printed as they come."""
    rows: list[Row] = []
    for case in found:
        if settings.only not in case.name:
            continue
        more = run(case, settings)
        print(tables(more), end="\n\n", flush=True)
        rows += more
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a benchmark and writes its results; returns the exit status."""
    options = parser().parse_args(arguments)
    device = torch.device(options.device)
    torch.set_num_threads(options.threads)
    settings = Settings(
        device=device,
        seconds=0.3 if options.quick else 3.0,
        rounds=5 if options.quick else 11,
        compiled=options.compile,
        quick=options.quick,
        only=options.only,
        clock=options.clock,
    )
    about = {**environment(device), "clock": options.clock}
    print(", ".join(f"{name} {value}" for name, value in about.items()), end="\n\n")
    module = importlib.import_module(f"benchmarks.{options.benchmark}")
    rows = measured(module.cases(settings), settings)
    if not rows:
        print(f"no case contains {options.only!r}", file=sys.stderr)
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{options.benchmark}.csv"
    write_csv(path, rows, about)
    for written in [path, *plots(options.out, options.benchmark, rows)]:
        print(written)
    return 0


if __name__ == "__main__":
    sys.exit(main())
