"""Every network exports with ``torch.export``, strict and not, for any batch size."""

from typing import Any

import pytest
import torch
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from composite_losses import export
from tests.export.actors import inputs, network
from tests.nets.builders import FEEDFORWARD, KINDS, RECURRENT, SHARING, flat, make
from tests.tolerances import assert_close

EVERY = pytest.mark.parametrize("sharing", SHARING)
STRICT = pytest.mark.parametrize("strict", [True, False], ids=["strict", "loose"])
DYNAMIC = {0: Dim("batch")}


def plain(net: Any, arguments: tuple[Any, ...], strict: bool) -> ExportedProgram:
    """What a user who does not know our module ``export`` writes."""
    shapes = pytree.tree_map_only(torch.Tensor, lambda _: DYNAMIC, arguments)
    return torch.export.export(net, arguments, dynamic_shapes=shapes, strict=strict)


def check(program: ExportedProgram, net: Any, kind: str) -> None:
    """The program equals the net at other batch sizes, and holds no functorch operator."""
    module = program.module()
    for batch in (1, 7):
        arguments = inputs(kind, batch)
        found, expected = flat(module(*arguments)), flat(net(*arguments))
        assert len(found) == len(expected) == {"gru": 2, "lstm": 3}.get(kind, 1)
        for ours, eager in zip(found, expected, strict=True):
            assert_close(ours, eager.detach())
    targets = [str(node.target) for node in program.graph.nodes]
    assert any("aten" in target for target in targets)
    assert not [t for t in targets if "functorch" in t or "vmap" in t or "batch_dim" in t]
    assert all(name in dict(net.named_parameters()) for name in program.graph_signature.parameters)


@pytest.mark.parametrize("kind", FEEDFORWARD)
@EVERY
@pytest.mark.parametrize("centralized", [False, True], ids=["own", "central"])
@STRICT
def test_feedforward_nets(kind: str, sharing: str, centralized: bool, strict: bool) -> None:
    """Case 112: kind × sharing × centralised × strict, example batch 5, checked at 1 and 7."""
    net = make(kind, sharing, centralized=centralized)
    check(plain(net, inputs(kind, 5), strict), net, kind)


@pytest.mark.parametrize("kind", RECURRENT)
@EVERY
@STRICT
def test_recurrent_steps(kind: str, sharing: str, strict: bool) -> None:
    """Case 112, 115: one step with its state as input and output."""
    net = network(kind, sharing)
    check(plain(net, inputs(kind, 5), strict), net, kind)


OPTIONS: dict[str, dict[str, Any]] = {
    "ids": {"agent_id": True, "centralized": True},
    "norm": {"norm_class": torch.nn.LayerNorm, "norm_kwargs": {"normalized_shape": 7}},
    "dropout": {"dropout": 0.5},
    "lazy": {"lazy": True, "centralized": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str) -> None:
    """Norms, ids, dropout (in eval mode) and a net that was lazy once export as well."""
    net = make("mlp", "clustered", **OPTIONS[name]).eval()
    net(*inputs("mlp", 2))
    check(plain(net, inputs("mlp", 5), True), net, "mlp")


@pytest.mark.parametrize(
    ("kind", "strict"), [*((kind, False) for kind in KINDS), ("mlp", True), ("lstm", True)]
)
def test_to_program_from_one_row(kind: str, strict: bool) -> None:
    """Case 115: exported with B=1, run with any B; parameters are not baked in as constants."""
    net = network(kind, "unshared")
    program = export.to_program(net, inputs(kind, 1), strict=strict)
    check(program, net, kind)
    assert program.graph_signature.parameters


@pytest.mark.parametrize("kind", RECURRENT)
def test_two_steps_chained(kind: str) -> None:
    """Case 115: the state of the first step fed to the second gives what eager gives."""
    net = network(kind, "unshared")
    module = export.to_program(net, inputs(kind, 1), strict=False).module()
    x, state = inputs(kind, 5)
    after = state
    for row in (x, x.flip(0)):
        out, state = module(row, state)
        expected, after = net(row, after)
        assert_close(out, expected.detach())
    for ours, eager in zip(flat(state), flat(after), strict=True):
        assert_close(ours, eager.detach())


def test_a_sequence_with_resets() -> None:
    """``is_init`` is an input like any other."""
    net = network("gru", "unshared")
    x, state = inputs("gru", 4)
    flags = torch.tensor([True, False, True, False]).unsqueeze(-1)
    program = export.to_program(net, (x, state, flags))
    assert_close(program.module()(x, state, ~flags)[0], net(x, state, ~flags)[0].detach())


def test_fixed_batch() -> None:
    """``dynamic_batch=False`` exports nets without a batch dim and refuses other sizes."""
    net = make("mlp", "shared")
    (x,) = inputs("mlp")
    program = export.to_program(net, x, dynamic_batch=False)
    assert_close(program.module()(x), net(x).detach())
    fixed = export.to_program(net, *inputs("mlp", 5), dynamic_batch=False)
    with pytest.raises((RuntimeError, AssertionError), match="5"):
        fixed.module()(*inputs("mlp", 7))


def test_modes_are_kept_and_the_program_is_in_eval_mode() -> None:
    net = make("mlp", "unshared", dropout=0.5)
    net.blocks[2].eval()
    before = [m.training for m in net.modules()]
    program = export.to_program(net, inputs("mlp", 5))
    assert [m.training for m in net.modules()] == before
    (x,) = inputs("mlp", 3)
    assert_close(program.module()(x), net.eval()(x).detach())
