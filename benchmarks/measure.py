"""Time, dispatched operations and peak memory of functions without arguments."""

from __future__ import annotations

import gc
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

Function = Callable[[], Any]
# The wall clock, and for a machine that others use, too, the time that this process computes.
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
# Seconds that one timed block should last: long against the clock's own cost.
BLOCK = 0.004


@dataclass(frozen=True)
class Times:
    """Seconds per call, one entry per round."""

    rounds: tuple[float, ...]

    def quantile(self, q: float) -> float:
        """The q-quantile in seconds, interpolated."""
        ordered = sorted(self.rounds)
        position = q * (len(ordered) - 1)
        low = int(position)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (position - low) * (ordered[high] - ordered[low])

    def ratio(self, baseline: Times) -> float:
        """The median over the rounds of this time / the baseline's in the same round."""
        pairs = zip(self.rounds, baseline.rounds, strict=True)
        return statistics.median(mine / other for mine, other in pairs)


@contextmanager
def _without_gc() -> Iterator[None]:
    """Context in which the garbage collector does not interrupt."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _block(function: Function, calls: int, device: torch.device, clock: Function) -> float:
    """Seconds per call of a block of calls: by the clock on the CPU, by events on a GPU."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        start.record()
        for _ in range(calls):
            function()
        end.record()
        torch.cuda.synchronize(device)
        return start.elapsed_time(end) / 1000 / calls
    begin = clock()
    for _ in range(calls):
        function()
    return (clock() - begin) / calls


def interleaved(
    functions: Mapping[str, Function],
    device: torch.device,
    *,
    seconds: float,
    rounds: int,
    clock: str = "wall",
) -> dict[str, Times]:
    """The times of functions that take turns: A B C A B C …

    Args:
        functions: what to time, by name.
        device: where it runs.
        seconds: rounds go on until this much time has passed.
        rounds: at least so many rounds.
        clock: which of ``CLOCKS``.
    """
    calls = {}
    ticks = CLOCKS[clock]
    for name, function in functions.items():
        function()
        once = min(_block(function, 1, device, ticks) for _ in range(3))
        calls[name] = max(1, round(BLOCK / max(once, 1e-7)))
    found: dict[str, list[float]] = {name: [] for name in functions}
    begin = time.perf_counter()
    done = 0
    with _without_gc():
        while done < rounds or time.perf_counter() - begin < seconds:
            for name, function in functions.items():
                found[name].append(_block(function, calls[name], device, ticks))
            done += 1
    return {name: Times(tuple(values)) for name, values in found.items()}


class Operations(TorchDispatchMode):
    """Counts what reaches the dispatcher below autograd, in forward and backward, exactly.

    Attributes:
        names: how often each operation ran.
        views: how many of them only made a view, so that a GPU would launch nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.views = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Counts one operation and runs it."""
        self.names[str(func)] += 1
        aliases = [r.alias_info for r in func._schema.returns]
        self.views += any(a is not None and not a.is_write for a in aliases)
        return func(*args, **(kwargs or {}))

    @property
    def total(self) -> int:
        """The number of operations."""
        return self.names.total()


def operations(function: Function) -> Operations:
    """The operations of one call, after one call that fills caches."""
    function()
    with Operations() as counter:
        function()
    return counter


def peak_memory(function: Function, device: torch.device) -> int:
    """The most bytes allocated at once during a call, less what was there before.

    On the CPU the running sum of the allocator's events that the profiler records, which sees
    compiled code and the backward pass, too (not scratch memory inside BLAS and oneDNN). On a GPU
    ``torch.cuda.max_memory_allocated``. Call the function once before, so that caches are filled.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        function()
    events = [
        (event.start_ns(), event.nbytes())
        for event in recorded.profiler.kineto_results.events()
        if event.name() == "[memory]" and event.device_type() == DeviceType.CPU
    ]
    total = peak = 0
    for _, size in sorted(events, key=lambda event: event[0]):
        total += size
        peak = max(peak, total)
    return peak
