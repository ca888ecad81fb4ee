"""A case: providers that compute the same thing, checked against each other, then measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import Function, interleaved, operations, peak_memory
from benchmarks.report import Row

FORWARD, BOTH = "forward", "forward+backward"


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Attributes:
        device: where everything runs.
        seconds: time for one pass of one case, all providers together.
        rounds: at least so many rounds.
        compiled: whether every provider is measured compiled, too.
        quick: whether the cases are few and small.
        only: run cases whose name contains this.
        clock: ``wall``, or ``cpu`` for the process's own time.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    seconds: float = 3.0
    rounds: int = 11
    compiled: bool = False
    quick: bool = False
    only: str = ""
    clock: str = "wall"


@dataclass(frozen=True)
class Provider:
    """One way to compute a case.

    Attributes:
        name: who computes.
        call: the function or module.
        args: its arguments.
        outputs: the named tensors of what it returns: what the providers must agree on.
        backward: runs the backward pass for what it returns, or None where there is none.
        parameters: whose gradients are dropped before each forward + backward.
        gradients: the gradients after a backward pass, comparable between providers.
        opaque: whether it does not go through torch's dispatcher and allocator, so that nothing
            is counted and compiled.
    """

    name: str
    call: Callable[..., Any]
    args: tuple[Any, ...]
    outputs: Callable[[Any], dict[str, Tensor]]
    backward: Callable[[Any], None] | None = None
    parameters: Sequence[Tensor] = ()
    gradients: Callable[[], Sequence[Tensor | None]] = tuple
    opaque: bool = False

    def forward(self) -> Any:
        """The outputs of one call."""
        return self.call(*self.args)

    def release(self) -> None:
        """Drops the gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def both(self) -> None:
        """One forward and backward pass; gradients are fresh."""
        self.release()
        if self.backward is not None:
            self.backward(self.forward())

    def function(self, which: str) -> Function:
        """The function of a pass."""
        return self.forward if which == FORWARD else self.both

    def compiled(self) -> Provider:
        """The same provider, compiled."""
        return dataclasses.replace(self, call=torch.compile(self.call, dynamic=False))


@dataclass(frozen=True)
class Case:
    """Providers of one computation.

    Attributes:
        name: what is computed.
        providers: who computes it; the first is the one that the others must equal.
        variable: what a series of cases varies ("" for none), and ``value`` its value.
        baseline: provider whose time is 1 in the ratios.
        exact: whether the gradients are compared, too.
        tolerance: relative and absolute, of the comparison.
        notes: by provider, what its row should say.
    """

    name: str
    providers: Sequence[Provider]
    variable: str = ""
    value: int = 0
    baseline: str = "ours"
    exact: bool = True
    tolerance: float = 1e-4
    notes: dict[str, str] = field(default_factory=dict)


class DisagreementError(AssertionError):
    """Two providers do not compute the same."""


def check_agreement(case: Case, providers: Sequence[Provider] | None = None) -> int:
    """The number of compared tensors, all equal to those of the case's first provider.

    Outputs are compared where both have one of the name and shape: TorchRL keeps a trailing dim in
    two metrics of data with several batch dims.

    Raises:
        DisagreementError: they differ, or there is nothing to compare.
    """
    reference = case.providers[0]
    expected = _results(case, reference)
    total = 0
    for provider in case.providers[1:] if providers is None else providers:
        found = _results(case, provider)
        common = [k for k in found if k in expected and found[k].shape == expected[k].shape]
        if not any(key.startswith(("loss", "output")) for key in common):
            raise DisagreementError(f"{case.name}: nothing to compare with {provider.name}")
        if case.exact and any(k.startswith("gradient") and k not in common for k in expected):
            raise DisagreementError(f"{case.name}: {provider.name} lacks gradients or their shapes")
        for key in common:
            try:
                torch.testing.assert_close(
                    found[key], expected[key], rtol=case.tolerance, atol=case.tolerance
                )
            except AssertionError as error:
                text = f"{case.name}: {key} of {provider.name} differs: {error}"
                raise DisagreementError(text) from error
        total += len(common)
    return total


def _results(case: Case, provider: Provider) -> dict[str, Tensor]:
    """Outputs and, where they are compared, gradients of a provider."""
    outputs = provider.outputs(provider.forward())
    results = {key: _scalar(value.detach().clone()) for key, value in outputs.items()}
    if case.exact and provider.backward is not None:
        provider.both()
        for i, gradient in enumerate(provider.gradients()):
            if gradient is not None:
                results[f"gradient {i}"] = gradient.detach().clone()
    return results


def _scalar(x: Tensor) -> Tensor:
    """The tensor, 0-dim if it has one element."""
    return x.reshape(()) if x.numel() == 1 else x


def run(case: Case, settings: Settings) -> list[Row]:
    """The rows of a case: every provider, eager and, if asked for, compiled.

    Raises:
        DisagreementError: the providers do not compute the same.
    """
    check_agreement(case)
    rows = _measured(case, case.providers, "eager", settings)
    if settings.compiled:
        torch.compiler.reset()
        working = []
        for provider in case.providers:
            if provider.opaque:
                continue
            compiled = provider.compiled()
            try:
                check_agreement(case, [compiled])
                if compiled.backward is not None:
                    compiled.both()
            except Exception as error:
                rows += _failed(case, provider, error)
                continue
            working.append(compiled)
        rows += _measured(case, working, "compiled", settings)
    return rows


def _passes(case: Case) -> list[str]:
    """The passes that the case's providers have."""
    return [FORWARD, BOTH] if case.providers[0].backward is not None else [FORWARD]


def _failed(case: Case, provider: Provider, error: Exception) -> list[Row]:
    """Rows that say why a provider was not measured compiled."""
    lines = str(error).strip().splitlines()
    status = f"failed: {type(error).__name__}: {lines[0] if lines else ''}"[:160]
    return [_row(case, provider.name, "compiled", which, status=status) for which in _passes(case)]


def _row(case: Case, provider: str, mode: str, which: str, **values: Any) -> Row:
    return Row(case.name, case.variable, case.value, provider, mode, which, **values)


def _peak_mib(provider: Provider, which: str, settings: Settings) -> float:
    """The most memory that one pass has allocated at once; gradients included."""
    provider.release()
    return peak_memory(provider.function(which), settings.device) / 2**20


def _measured(
    case: Case, providers: Sequence[Provider], mode: str, settings: Settings
) -> list[Row]:
    """The rows of all passes of providers that take turns."""
    rows = []
    passes = _passes(case) if providers else []
    for which in passes:
        functions = {provider.name: provider.function(which) for provider in providers}
        times = interleaved(
            functions,
            settings.device,
            seconds=settings.seconds,
            rounds=settings.rounds,
            clock=settings.clock,
        )
        for provider in providers:
            name = provider.name
            counted = mode == "eager" and not provider.opaque
            counter = operations(functions[name]) if counted else None
            peak = which == passes[-1] and not provider.opaque
            found = times[name]
            rows.append(
                _row(
                    case,
                    name,
                    mode,
                    which,
                    ms_20=1e3 * found.quantile(0.2),
                    ms_50=1e3 * found.quantile(0.5),
                    ms_80=1e3 * found.quantile(0.8),
                    ratio=found.ratio(times[case.baseline]) if case.baseline in times else None,
                    rounds=len(found.rounds),
                    operations=None if counter is None else counter.total,
                    kernels=None if counter is None else counter.total - counter.views,
                    peak_mib=_peak_mib(provider, which, settings) if peak else None,
                    status=case.notes.get(name, "ok"),
                )
            )
    return rows
