"""Side by side with TorchRL and plain PyTorch: losses, nets, groups, export.

Usage::

    python -m benchmarks losses [--device cpu|cuda] [--compile] [--quick]

Every case gives the same inputs and weights to all providers and checks that they agree before
anything is timed. Runs are interleaved, so a ratio compares blocks that ran next to each other.
"""

import os

# The profiler, which counts memory, says on stderr when it starts; torch reads this when it loads.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")
