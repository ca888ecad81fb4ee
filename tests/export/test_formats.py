"""ONNX and AOTInductor: the artefact is loaded and run, at other batch sizes than the example's."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from composite_losses import export
from composite_losses.errors import ConfigError
from tests.export.actors import POLICIES, inputs, network
from tests.nets.builders import KINDS, flat

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


def session(path: Path) -> Any:
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "sharing"),
    [*((kind, "unshared") for kind in KINDS), ("mlp", "clustered")],
)
def test_onnx_of_every_network(kind: str, sharing: str, tmp_path: Path) -> None:
    """Cases 114, 115: exported with B=1, run by onnxruntime with B=5; a GRU is not an LSTM.

    A recurrent net takes and returns its state; two steps are chained.
    """
    net = network(kind, sharing)
    path = export.to_onnx(net, inputs(kind, 1), tmp_path / "net.onnx")
    run = session(path)
    names = [i.name for i in run.get_inputs()]
    x, *state = inputs(kind, 5)
    carried = [value.numpy() for value in flat(state)]
    assert len(names) == 1 + len(carried) == {"gru": 2, "lstm": 3}.get(kind, 1)
    for row in (x, x.flip(0)):
        out, *carried = run.run(None, dict(zip(names, [row.numpy(), *carried], strict=True)))
        expected = net(row, *state)
        if state:
            expected, *state = expected
        np.testing.assert_allclose(out, expected.detach().numpy(), rtol=1e-4, atol=1e-5)
    for batch in (1, 7):
        assert export.max_difference(path, net, inputs(kind, batch)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["composite", "masked", "lstm"])
def test_onnx_of_policies_has_named_inputs_and_outputs(name: str, tmp_path: Path) -> None:
    """Case 114: flat tensors, named as the keys; every head is an output."""
    policy = POLICIES[name]()
    path = export.to_onnx(policy.actor, policy.inputs(1), tmp_path / "policy.onnx")
    run = session(path)
    td = policy.inputs(5)
    keys = {"_".join(k) if isinstance(k, tuple) else k: k for k in td.keys(True, True)}
    assert {i.name for i in run.get_inputs()} == set(keys)
    expected = policy.expected(td)
    assert [o.name for o in run.get_outputs()] == list(expected)
    found = run.run(None, {n: td[k].numpy() for n, k in keys.items()})
    for ours, (_, eager) in zip(found, expected.items(), strict=True):
        np.testing.assert_allclose(ours, eager.detach().numpy(), rtol=1e-4, atol=1e-5)
    assert export.max_difference(path, policy.actor, policy.inputs(3)) < 1e-5


@pytest.mark.slow
def test_aot_inductor_package(tmp_path: Path) -> None:
    """A composite policy compiled ahead of time gives eager's actions at other batch sizes."""
    policy = POLICIES["composite"]()
    path = export.to_package(policy.actor, policy.inputs(4), tmp_path / "policy.pt2")
    assert path.exists()
    for batch in (2, 7):
        assert export.max_difference(path, policy.actor, policy.inputs(batch)) < 1e-5
    td = policy.inputs(3)
    out = torch._inductor.aoti_load_package(str(path))(td["agents", "observation"])
    assert list(out) == list(policy.expected(td))


def test_a_package_needs_its_suffix(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ends with \.pt2"):
        export.to_package(nn.Linear(2, 2), torch.ones(3, 2), tmp_path / "net.so")


class Shifted(nn.Module):
    """Adds constants to two inputs."""

    def __init__(self, *by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(x + b for b in self.by)


def test_max_difference_is_the_largest_over_outputs_and_elements() -> None:
    """|0.5 − 0.25| over the first output and |2 − 0| over the second: 2; never negative."""
    x = torch.randn(4, 3)
    program = export.to_program(Shifted(0.25, 2.0), x)
    assert export.max_difference(program, Shifted(0.25, 2.0), x) == 0
    assert export.max_difference(program, Shifted(0.5, 0.0), x) == pytest.approx(2, abs=1e-6)
    assert export.max_difference(program, Shifted(2.25, 2.0), x) == pytest.approx(2, abs=1e-6)


@pytest.mark.parametrize("by", [(float("nan"), 0.0), (0.0, float("nan"))])
def test_max_difference_does_not_hide_nan(by: tuple[float, float]) -> None:
    """A NaN is no agreement, in whichever output it is."""
    x = torch.randn(4, 3)
    program = export.to_program(Shifted(*by), x)
    assert np.isnan(export.max_difference(program, Shifted(0.0, 0.0), x))


def test_max_difference_of_other_structures() -> None:
    x = torch.randn(4, 3)
    program = export.to_program(Shifted(0.0, 0.0), x)
    with pytest.raises(ConfigError, match="expected 1 outputs, found 2"):
        export.max_difference(program, Shifted(0.0), x)
    with pytest.raises(ConfigError, match="shape"):
        export.max_difference(export.to_program(nn.Linear(3, 1), x), nn.Linear(3, 2), x)
    with pytest.raises(ConfigError, match="unknown artefact"):
        export.max_difference(Path("net.txt"), Shifted(0.0), x)
