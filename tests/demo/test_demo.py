"""The demo at tiny sizes: it runs, reports, repeats itself, and notices a different objective."""

from dataclasses import replace

import pytest
import torch
from tensordict.nn import composite_lp_aggregate

from composite_losses.demo.__main__ import main, parse
from composite_losses.demo.agreement import DisagreementError, check_agreement, relative_difference
from composite_losses.demo.methods import JOINT, METHODS, PER_HEAD, TORCHRL
from composite_losses.demo.report import mean_return, running_mean, table
from composite_losses.demo.settings import Settings
from composite_losses.demo.training import History, train

TINY = Settings(iterations=2, envs=8, steps=5, cells=8)


@pytest.mark.slow
def test_command_trains_all_methods_and_writes_table_and_picture(tmp_path, capsys):
    picture = tmp_path / "curves.png"
    aggregate = composite_lp_aggregate()
    sizes = ["--quick", "--iterations", "2", "--envs", "8", "--seeds", "0", "1"]
    main([*sizes, "--output", str(picture)])
    printed = capsys.readouterr().out
    header, *lines = printed.strip().splitlines()
    assert "first return" in header
    assert "ms/update" in header
    for name, line in zip(METHODS, lines, strict=False):
        assert line.startswith(name)
        first, last, milliseconds, seconds = map(float, line.removeprefix(name).split())
        # 25 steps × two distances, each below the diagonal of the square of side 2 and a margin
        assert -25 * 2 * 4 < first < 0
        assert -25 * 2 * 4 < last < 0
        assert 0 < milliseconds < 1e3 * seconds
    assert f"'{JOINT}' and '{TORCHRL}' agree" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert composite_lp_aggregate() == aggregate


def test_joint_ratio_agrees_with_torchrl():
    found = check_agreement(3, TINY)
    assert set(found) == {"return", "loss_objective", "loss_entropy", "loss_critic"}
    assert max(found.values()) < 1e-9  # float64


def test_another_objective_is_noticed():
    with pytest.raises(DisagreementError, match=r"per-head.*loss_objective by"):
        check_agreement(3, TINY, found=PER_HEAD)


def test_nan_is_a_disagreement(monkeypatch):
    loss = METHODS[JOINT]

    def broken(actor, critic, settings):
        module = loss(actor, critic, settings)
        module.register_forward_hook(lambda _, __, output: output.apply(lambda x: x * torch.nan))
        return module

    monkeypatch.setitem(METHODS, JOINT, broken)
    with pytest.raises(DisagreementError, match="loss_critic by nan"):
        check_agreement(3, replace(TINY, iterations=1))


@pytest.mark.parametrize("name", METHODS)
def test_a_seed_gives_the_same_run_again(name):
    runs = [train(name, METHODS[name], seed, TINY) for seed in (5, 5, 6)]
    assert runs[0].returns == runs[1].returns != runs[2].returns
    assert runs[0].losses == runs[1].losses != runs[2].losses
    assert len(runs[0].update_seconds) == TINY.iterations * TINY.epochs * TINY.minibatches


def test_options_override_quick():
    assert parse([]) == Settings()
    settings = parse(["--quick", "--envs", "7", "--seeds", "2", "3", "--device", "cuda:0"])
    assert (settings.envs, settings.seeds, settings.device) == (7, (2, 3), "cuda:0")
    assert settings.iterations < Settings().iterations


@pytest.mark.parametrize("wrong", [["--iterations", "0"], ["--output", "no/such/folder/a.png"]])
def test_options_are_refused_before_anything_runs(wrong, capsys):
    with pytest.raises(SystemExit):
        parse(wrong)
    assert wrong[0] in capsys.readouterr().err


def test_table_averages_over_seeds_and_iterations():
    returns = [-50.0, -48.0, -48.0, -48.0, -46.0, -40.0, -30.0]
    runs = [
        History(returns=returns, update_seconds=[0.001, 0.002, 0.9], seconds=2.0),
        History(returns=[r - 2 for r in returns], update_seconds=[0.001, 0.003, 0.9], seconds=3.0),
    ]
    # first five: mean −48 and −50; last five: −212 / 5 = −42.4 and −44.4
    assert mean_return(runs, slice(None, 5)) == pytest.approx(-49.0)
    line = table({"a loss": runs}).splitlines()[1]
    # times: median of 1, 1, 2, 3, 900, 900 ms; 2 s + 3 s
    assert line.split() == ["a", "loss", "-49.00", "-43.40", "2.5", "5.0"]


def test_running_mean_uses_what_there_is_at_the_start():
    values = torch.arange(1.0, 8.0).expand(2, 7).clone()
    expected = [1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0]  # means of 1..n, then of the last five
    assert running_mean(values).tolist() == [expected, expected]


def test_relative_difference_uses_the_largest_value():
    found, expected = torch.tensor([0.5, -4.0]), torch.tensor([0.1, -4.0])
    assert relative_difference(found, expected) == pytest.approx(0.1)  # 0.4 / 4
