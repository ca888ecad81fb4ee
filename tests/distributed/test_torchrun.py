"""The example for ``torchrun`` trains, on one rank and on two."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_example_learns(ranks: int) -> None:
    """Every rank steps its own environments and ends with the same weights (the script checks).

    Reward per step is minus the distance to the origin: about −0.8 for an untrained policy. One
    that learns comes within 0.5 in 160 updates.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "-m", "examples.distributed"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.fullmatch(
        r"(\d+) rank\(s\): reward per step (\S+) before, (\S+) after\n", done.stdout
    )
    assert found, done.stdout
    assert int(found[1]) == ranks
    assert float(found[2]) < -0.65
    assert float(found[3]) > -0.5
