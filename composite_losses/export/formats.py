"""torch.export, ONNX and AOTInductor of a network or a policy."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from composite_losses.errors import ConfigError
from composite_losses.export.wrapper import evaluating, prepared


def to_program(
    module_or_actor: nn.Module,
    example: Any,
    *,
    dynamic_batch: bool = True,
    strict: bool = True,
) -> ExportedProgram:
    """Returns the exported program of a network, TensorDict module or policy, in eval mode.

    A policy exports as its deterministic actions: every head is a named output, and so is the next
    state of a recurrent policy. No distribution object is in the graph. Inputs are named by their
    keys joined with "_" (``agents_observation``).

    Args:
        module_or_actor: what to export.
        example: a tensor, a tuple of tensors (states nested), or for TensorDict modules a
            TensorDict or a mapping of argument names.
        dynamic_batch: whether dim 0 of every input is dynamic; a size of 1 in the example is fine.
        strict: whether TorchDynamo traces the module.

    Raises:
        MissingKeyError: an input that the module reads is not in the example.
        ConfigError: an example of another kind, or keys that give no argument names.

    Source: ``torch.export.export``.
    """
    function, arguments = prepared(module_or_actor, example)
    shapes = None
    if dynamic_batch:
        # sizes 0 and 1 would be baked into the graph
        arguments = pytree.tree_map_only(Tensor, _doubled, arguments)
        batch = Dim("batch")
        shapes = pytree.tree_map_only(Tensor, lambda x: {0: batch} if x.ndim else None, arguments)
    with evaluating(function):
        return torch.export.export(function, arguments, dynamic_shapes=shapes, strict=strict)


def _doubled(x: Tensor) -> Tensor:
    """Returns a tensor of batch size 1 twice along dim 0."""
    return torch.cat([x, x]) if x.ndim and x.shape[0] == 1 else x


def to_onnx(
    module_or_actor: nn.Module, example: Any, path: str | Path, *, dynamic_batch: bool = True
) -> Path:
    """Returns the path of an ONNX file with the network or policy; needs the ``export`` extra.

    Args:
        module_or_actor: what to export.
        example: as for ``to_program``.
        path: where to write.
        dynamic_batch: whether dim 0 of every input is dynamic.

    Raises:
        ConfigError: the exporter returned nothing, or as ``to_program``.
        MissingKeyError: as ``to_program``.

    Source: ``torch.onnx.export``.
    """
    program = to_program(module_or_actor, example, dynamic_batch=dynamic_batch)
    target = Path(path)
    with _quiet():
        onnx_program = torch.onnx.export(
            program, (), dynamo=True, verbose=False, output_names=output_names(program)
        )
    if onnx_program is None:
        raise ConfigError("to_onnx: the exporter returned nothing.")
    onnx_program.save(str(target))
    return target


@contextmanager
def _quiet() -> Iterator[None]:
    """Context in which torch's exporters do not warn of what they use and torch deprecates."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
        warnings.filterwarnings("ignore", message="`torch.jit", category=DeprecationWarning)
        yield


def output_names(program: ExportedProgram) -> list[str] | None:
    """Returns the names of a program's outputs; None where it has none."""
    spec = program.call_spec.out_spec
    names = None if spec is None or spec.type is not dict else spec.context
    return None if names is None else list(names)


def to_package(
    module_or_actor: nn.Module, example: Any, path: str | Path, *, dynamic_batch: bool = True
) -> Path:
    """Returns the path of an AOTInductor package (``.pt2``) with the network or policy.

    Needs a C++ compiler. Load it with ``torch._inductor.aoti_load_package``, in Python or C++.

    Args:
        module_or_actor: what to export.
        example: as for ``to_program``.
        path: where to write; must end with ``.pt2``.
        dynamic_batch: whether dim 0 of every input is dynamic.

    Raises:
        ConfigError: the path ends otherwise, or as ``to_program``.
        MissingKeyError: as ``to_program``.

    Source: ``torch._inductor.aoti_compile_and_package``.
    """
    target = Path(path)
    if target.suffix != ".pt2":
        raise ConfigError(f"to_package: expected a path that ends with .pt2, found {target}.")
    program = to_program(module_or_actor, example, dynamic_batch=dynamic_batch)
    with _quiet():
        torch._inductor.aoti_compile_and_package(program, package_path=str(target))
    return target


def max_difference(artifact: Any, module: nn.Module, example: Any) -> float:
    """Returns the largest absolute difference between an exported artefact and the module.

    In the units of the outputs, over all of them, whatever their shape.

    Args:
        artifact: an ``ExportedProgram``, or the path of an ONNX file or an AOTInductor package.
        module: the network or policy it was made from.
        example: inputs, of any batch size.

    Raises:
        ConfigError: an artefact of another kind, or outputs of another number or shape.

    Source: definition.
    """
    function, arguments = prepared(module, example)
    with evaluating(function):
        expected = pytree.tree_leaves(function(*arguments))
    found = _run(artifact, arguments)
    if len(found) != len(expected):
        raise ConfigError(
            f"max_difference: expected {len(expected)} outputs, found {len(found)} in the artefact."
        )
    worst = 0.0
    for a, b in zip(found, expected, strict=True):
        if a.shape != b.shape:
            raise ConfigError(
                f"max_difference: expected shape {list(b.shape)}, found {list(a.shape)}."
            )
        if a.numel():
            difference = float((a.double() - b.double()).abs().max())
            # a NaN is the largest difference of all
            worst = difference if math.isnan(difference) else max(worst, difference)
        if math.isnan(worst):
            break
    return worst


def _run(artifact: Any, arguments: tuple[Any, ...]) -> list[Tensor]:
    """Returns the outputs of an artefact."""
    if isinstance(artifact, ExportedProgram):
        with torch.no_grad():
            return pytree.tree_leaves(artifact.module()(*arguments))
    path = Path(artifact)
    if path.suffix == ".onnx":
        return _run_onnx(path, pytree.tree_leaves(arguments))
    if path.suffix == ".pt2":
        with torch.no_grad():
            return pytree.tree_leaves(torch._inductor.aoti_load_package(str(path))(*arguments))
    raise ConfigError(f"max_difference: unknown artefact {artifact!r}.")


def _run_onnx(path: Path, values: list[Tensor]) -> list[Tensor]:
    """Returns the outputs of an ONNX file under onnxruntime."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [i.name for i in session.get_inputs()]
    feed: Mapping[str, Any] = {n: v.numpy() for n, v in zip(names, values, strict=True)}
    return [torch.as_tensor(out) for out in session.run(None, feed)]
