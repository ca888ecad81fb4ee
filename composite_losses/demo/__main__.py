"""The command: ``python -m composite_losses.demo``."""

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from composite_losses.demo.agreement import check_agreement
from composite_losses.demo.methods import JOINT, METHODS, TORCHRL
from composite_losses.demo.report import table, write_picture
from composite_losses.demo.settings import Settings
from composite_losses.demo.training import History, train

QUICK = {"iterations": 10, "envs": 100}


def positive(text: str) -> int:
    """The positive integer that a text stands for."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {value}")
    return value


def parse(arguments: Sequence[str] | None = None) -> Settings:
    """The settings that command-line arguments ask for."""
    default = Settings()
    parser = argparse.ArgumentParser(
        prog="python -m composite_losses.demo",
        description="Trains a policy that moves and speaks with our losses and with TorchRL's, on "
        "the same seeds; prints the result and draws the learning curves.",
    )
    add = parser.add_argument
    add("--seeds", type=int, nargs="+", metavar="SEED", help="default: 0")
    add("--iterations", type=positive, help=f"default: {default.iterations}")
    add("--envs", type=positive, help=f"environments, default: {default.envs}")
    add("--device", help=f"default: {default.device}")
    add("--output", type=Path, help=f"picture to write, default: {default.output}")
    add(
        "--quick",
        action="store_true",
        help="a few seconds: {iterations} iterations of {envs} environments, unless given".format(
            **QUICK
        ),
    )
    options = {k: v for k, v in vars(parser.parse_args(arguments)).items() if v is not None}
    if options.pop("quick"):
        options = {**QUICK, **options}
    if "seeds" in options:
        options["seeds"] = tuple(options["seeds"])
    settings = replace(default, **options)
    if not settings.output.parent.is_dir():
        parser.error(f"--output: there is no folder {settings.output.parent}")
    return settings


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the demo.

    Raises:
        DisagreementError: our joint ratio and TorchRL's loss gave different results.
    """
    settings = parse(arguments)
    # The networks are small: a second thread gains little, and loses much where cores are shared.
    torch.set_num_threads(1)
    start = time.perf_counter()
    agreement = [max(check_agreement(seed, settings).values()) for seed in settings.seeds]
    histories: dict[str, list[History]] = {name: [] for name in METHODS}
    for seed in settings.seeds:
        for name, make_loss in METHODS.items():
            histories[name].append(train(name, make_loss, seed, settings))
    write_picture(histories, settings.output)
    print(f"\n{table(histories)}\n")
    print(
        f"On the same seeds and minibatches, '{JOINT}' and '{TORCHRL}' agree over the first "
        f"iterations: the largest relative difference of a loss or return is {max(agreement):.0e} "
        "(float64)."
    )
    print(f"Learning curves: {settings.output}. Total time: {time.perf_counter() - start:.0f} s.")


if __name__ == "__main__":
    main()
