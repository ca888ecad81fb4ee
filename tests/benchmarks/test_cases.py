"""The benchmarks' providers compute the same, and what is measured lands in tables and files."""

import csv

import pytest
import torch
from torch import Tensor

from benchmarks import case as cases
from benchmarks import export, groups, losses, nets
from benchmarks.__main__ import main
from benchmarks.case import BOTH, FORWARD, Case, DisagreementError, Provider, Settings
from benchmarks.problems import ONE_TANH, Layout, make_problem
from benchmarks.report import Row, plots, tables

CPU = torch.device("cpu")
ONCE = Settings(seconds=0.0, rounds=1)
PROVIDERS = ["hand-written", "ours", "torchrl"]
MLP = nets.Net("MLP", 3, (4,), (5, 6), outputs=2)
CONV = nets.Net("ConvNet", 2, (3, 30, 30), (4, 4, 4))


def one_parameter(name: str, factor: float, power: float = 1.0) -> Provider:
    """x ↦ factor · w^power · x with w = 1: the power changes the gradient, not the output."""
    w = torch.ones((), requires_grad=True)
    return Provider(
        name,
        lambda x: factor * w**power * x,
        (torch.tensor([1.0, 2.0]),),
        lambda y: {"output": y},
        lambda y: y.sum().backward(),
        [w],
        lambda: [w.grad],
    )


@pytest.mark.parametrize("kind", losses.LOSSES)
def test_losses_agree(kind):
    """Two losses or more and 12 gradients, of two providers with the hand-written one."""
    case = losses.loss_case(kind, kind, losses.three_heads(8, CPU))
    assert [provider.name for provider in case.providers] == PROVIDERS
    assert cases.check_agreement(case) >= 2 * (2 + 12)


def test_losses_with_heads_evaluated_together_agree():
    """Discrete heads of one size, which the hand-written loss stacks."""
    case = losses.loss_case("many", "ClipPPO", losses.many_heads(4, 8, CPU))
    assert cases.check_agreement(case) >= 2 * (3 + 12)


def test_losses_with_a_shared_trunk_agree():
    """Objective, critic loss and four metrics: the entropy of a TanhNormal is estimated."""
    layout = Layout((4, 3), hidden=(5,), trunk=(6,))
    problem = make_problem(ONE_TANH, layout, CPU)
    case = losses.loss_case("shared", "ClipPPO", problem, sampled_entropy=True)
    assert cases.check_agreement(case) >= 2 * 6


@pytest.mark.parametrize("net", [MLP, CONV], ids=lambda net: net.title)
def test_nets_agree(net):
    """The output, and weights and biases of three layers, of two providers with the loop."""
    for variant in nets.variants(net):
        case = nets.net_case(variant, 3, CPU)
        assert [provider.name for provider in case.providers] == ["loop", "ours", "torchrl"]
        assert cases.check_agreement(case) == 2 * (1 + 6), variant.name


def test_groups_agree():
    """The three summed losses and 12 gradients per group, of two providers with TorchRL's."""
    case = groups.group_case(2, 5, CPU)
    assert cases.check_agreement(case) == 2 * (3 + 2 * 12)


def test_exported_policy_agrees():
    """The three heads' actions of a batch size other than the example's."""
    actor = export.policy(CPU)
    eager = export.EagerPolicy(actor, ["move", "say", "gear"])

    def inputs(n: int) -> tuple[Tensor, ...]:
        return (torch.randn(n, export.AGENTS, export.FEATURES),)

    formats = [export.PROGRAM]
    (case,) = export.export_cases("policy", actor, eager, inputs, [3], CPU, formats)
    assert [provider.name for provider in case.providers] == [export.EAGER, export.PROGRAM]
    assert cases.check_agreement(case) == 3


@pytest.mark.parametrize(("factor", "power"), [(1.01, 1.0), (1.0, 2.0)], ids=["output", "gradient"])
def test_disagreement_is_an_error(factor, power):
    """A wrong output or a wrong gradient stops the benchmark before anything is timed."""
    right, wrong = one_parameter("ours", 1.0), one_parameter("wrong", factor, power)
    assert cases.check_agreement(Case("same", [right, right])) == 2
    with pytest.raises(DisagreementError, match="of wrong differs"):
        cases.run(Case("different", [right, wrong]), ONCE)


def test_nothing_in_common_is_an_error():
    """Providers whose outputs have no name in common have not been compared."""
    right = one_parameter("ours", 1.0)
    other = Provider("other", lambda: torch.ones(2), (), lambda y: {"elsewhere": y})
    with pytest.raises(DisagreementError, match="nothing to compare with other"):
        cases.check_agreement(Case("strangers", [right, other]))


def test_rows_of_a_case():
    """Per provider a forward and a full pass; operations in both, memory in the full one."""
    case = losses.loss_case("three heads", "ClipPPO", losses.three_heads(8, CPU))
    rows = cases.run(case, ONCE)
    assert [(r.which, r.provider) for r in rows] == [
        (which, name) for which in (FORWARD, BOTH) for name in PROVIDERS
    ]
    for forward, both in zip(rows[:3], rows[3:], strict=True):
        assert 0 < forward.kernels < forward.operations < both.operations
        assert forward.peak_mib is None
        assert both.peak_mib > 0
    assert rows[1].ratio == rows[4].ratio == 1.0


def test_what_does_not_compile_is_a_row(monkeypatch):
    """A provider that fails to compile says why; the others are measured."""

    def compile_(function, **options):
        if function is not bad.call:
            return function

        def broken(*arguments):
            raise RuntimeError("no graph")

        return broken

    monkeypatch.setattr(torch, "compile", compile_)
    good, bad = one_parameter("ours", 1.0), one_parameter("bad", 1.0)
    rows = cases.run(Case("case", [good, bad]), Settings(seconds=0.0, rounds=1, compiled=True))
    compiled = {(r.provider, r.which): r for r in rows if r.mode == "compiled"}
    assert len(compiled) == 4
    assert compiled["bad", BOTH].status == "failed: RuntimeError: no graph"
    assert compiled["bad", BOTH].ms_50 is None
    assert compiled["ours", BOTH].ms_50 > 0
    assert "no graph" in tables(rows)


def test_command_line(tmp_path, capsys):
    """The CSV has a line per row, with the numbers and the versions they depend on."""
    arguments = ["losses", "--quick", "--threads", "1", "--only", "A2C", "--out", str(tmp_path)]
    assert main(arguments) == 0
    with (tmp_path / "losses.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 6
    for line in lines:
        assert line["case"] == "A2C, three heads, B=64"
        assert int(line["operations"]) > int(line["kernels"]) > 0
        assert line["torch"] == torch.__version__
        assert all(line[name] for name in ("commit", "torchrl", "tensordict", "cpu", "threads"))
    assert "hand-written" in capsys.readouterr().out


def test_no_such_case(tmp_path):
    """A filter that leaves nothing is an error, and no file is written."""
    assert (
        main(
            [
                "export",
                "--only",
                "no such",
                "--quick",
                "--threads",
                "1",
                "--out",
                str(tmp_path / "new"),
            ]
        )
        == 1
    )
    assert not (tmp_path / "new").exists()


def test_plots(tmp_path):
    """One file per series; a case outside of a series has none."""
    rows = [
        Row("heads", "heads", n, name, "eager", which, 1.0 * n, 2.0 * n, 3.0 * n, 1.0, 3, 10 * n)
        for n in (1, 2, 4)
        for name in ("ours", "torchrl")
        for which in (FORWARD, BOTH)
    ]
    alone = Row("alone", "", 0, "ours", "eager", FORWARD, 1.0, 1.0, 1.0)
    (path,) = plots(tmp_path, "losses", [*rows, alone])
    assert path == tmp_path / "losses_heads_heads.png"
    assert path.read_bytes()[:4] == b"\x89PNG"
