"""Losses and their parts from a Hydra configuration, and the example that trains from one.

Hydra hands lists and mappings over as ``ListConfig`` and ``DictConfig`` unless it is told to
convert them; YAML has no tuples.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import OmegaConf
from tensordict import TensorDict, TensorDictBase
from torch import nn
from torchrl.objectives.value import GAE

import composite_losses as cl
from examples.steering import Steering, make_actor, make_critic
from examples.train import as_keys, make_loss, train
from tests.cases import builders_fl
from tests.integration.trainers import WARNINGS
from tests.tolerances import assert_close

pytestmark = [pytest.mark.filterwarnings(text) for text in WARNINGS]
ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "examples" / "config"
Networks = tuple[nn.Module, nn.Module]


def data(actor: nn.Module, critic: nn.Module) -> TensorDictBase:
    """Two episodes' worth of the example's task, with advantages."""
    with torch.no_grad():
        td = Steering(2).rollout(6, actor)
        GAE(gamma=0.99, lmbda=0.95, value_network=critic)(td)
        for key in ("move_log_prob", "gear_log_prob"):
            td[key] += 0.4 * torch.randn_like(td[key])  # some ratios are clipped
    return td


def from_yaml(text: str, *networks: nn.Module, **options: Any) -> Any:
    return instantiate(OmegaConf.create(text), *networks, **options)


def native(surrogate: cl.Ratio | cl.Clip, **parts: Any) -> Callable[..., nn.Module]:
    return lambda actor, critic: cl.PolicyLoss(actor, critic, surrogate=surrogate, **parts)


def door(cls: Any, **options: Any) -> Callable[..., nn.Module]:
    return lambda actor, critic: cls(actor, critic, **options)


PAIR = {"move": 0.1, "gear": (0.1, 0.3)}
ENTROPY = {"move": 0.1, "gear": 0.2}
CASES: dict[str, tuple[str, Callable[..., nn.Module]]] = {
    "ppo": ("_target_: composite_losses.PPOLoss", door(cl.PPOLoss)),
    "clip": ("_target_: composite_losses.ClipPPOLoss", door(cl.ClipPPOLoss)),
    "kl": ("{_target_: composite_losses.KLPENPPOLoss, beta: 2}", door(cl.KLPENPPOLoss, beta=2.0)),
    "a2c": (
        "{_target_: composite_losses.A2CLoss, critic_coeff: 0.5}",
        door(cl.A2CLoss, critic_coeff=0.5),
    ),
    "reinforce": ("_target_: composite_losses.ReinforceLoss", door(cl.ReinforceLoss)),
    "mappo": (
        "{_target_: composite_losses.MAPPOLoss, normalize_advantage_exclude_dims: []}",
        door(cl.MAPPOLoss, normalize_advantage_exclude_dims=()),
    ),
    "pair": (
        "{_target_: composite_losses.ClipPPOLoss, clip_epsilon: [0.1, 0.3]}",
        door(cl.ClipPPOLoss, clip_epsilon=(0.1, 0.3)),
    ),
    "pair by head": (
        "{_target_: composite_losses.ClipPPOLoss, ratio: per_head, "
        "clip_epsilon: {move: 0.1, gear: [0.1, 0.3]}}",
        door(cl.ClipPPOLoss, ratio="per_head", clip_epsilon=PAIR),
    ),
    "entropy by head": (
        "{_target_: composite_losses.ClipPPOLoss, entropy_coeff: {move: 0.1, gear: 0.2}}",
        door(cl.ClipPPOLoss, entropy_coeff=ENTROPY),
    ),
    "weights": (
        "{_target_: composite_losses.ClipPPOLoss, ratio: mixed, mix: 0.3, head_weights: {gear: 2}}",
        door(cl.ClipPPOLoss, ratio="mixed", mix=0.3, head_weights={"gear": 2.0}),
    ),
    "excluded dims": (
        "{_target_: composite_losses.ClipPPOLoss, normalize_advantage: true, "
        "normalize_advantage_exclude_dims: [0]}",
        door(cl.ClipPPOLoss, normalize_advantage=True, normalize_advantage_exclude_dims=(0,)),
    ),
    "native": (
        """
        _target_: composite_losses.PolicyLoss
        surrogate: {_target_: composite_losses.Clip, eps: [0.1, 0.3], dual_clip: 3}
        value: {_target_: composite_losses.ValueTerm, kind: l2, coeff: 0.5, clip: 0.3}
        entropy: {_target_: composite_losses.EntropyTerm, coeff: {move: 0.1, gear: 0.2}}
        advantage: {_target_: composite_losses.AdvantageNorm, exclude_dims: [0]}
        """,
        lambda actor, critic: cl.PolicyLoss(
            actor,
            critic,
            surrogate=cl.Clip((0.1, 0.3), dual_clip=3.0),
            value=cl.ValueTerm("l2", coeff=0.5, clip=0.3),
            entropy=cl.EntropyTerm(ENTROPY),
            advantage=cl.AdvantageNorm(exclude_dims=(0,)),
        ),
    ),
    "native, by head": (
        """
        _target_: composite_losses.PolicyLoss
        surrogate:
          _target_: composite_losses.Clip
          eps: {move: 0.1, gear: [0.1, 0.3]}
          ratio: per_head
          head_weights: {gear: 2}
        """,
        native(cl.Clip(PAIR, ratio="per_head", head_weights={"gear": 2.0})),
    ),
    "native, parts left out": (
        """
        _target_: composite_losses.PolicyLoss
        surrogate: {_target_: composite_losses.Ratio}
        value: null
        entropy: null
        """,
        native(cl.Ratio(), value=None, entropy=None),
    ),
}
CONVERT = ("none", "partial", "object", "all")


@pytest.fixture
def networks() -> Networks:
    return make_actor(), make_critic()


@pytest.mark.parametrize("convert", CONVERT)
@pytest.mark.parametrize("name", list(CASES))
def test_a_configured_loss_equals_a_constructed_one(
    name: str, convert: str, networks: Networks
) -> None:
    """However Hydra hands lists and mappings over; and it trains the networks it was given."""
    text, make = CASES[name]
    actor, critic = networks
    loss = from_yaml(text, actor_network=actor, critic_network=critic, _convert_=convert)
    expected, td = make(actor, critic), data(actor, critic)
    assert type(loss) is type(expected)
    out, wanted = loss(td), expected(td)
    assert set(out.keys()) == set(wanted.keys())
    for key, value in wanted.items():
        assert_close(out[key], value)
    given = {parameter.data_ptr() for parameter in actor.parameters()}
    assert given <= {parameter.data_ptr() for parameter in loss.parameters()}


@pytest.mark.parametrize("name", list(CASES))
def test_nothing_of_the_configuration_stays_in_the_loss(name: str, networks: Networks) -> None:
    """A pickled loss can be read where OmegaConf is not installed."""
    actor, critic = networks
    loss = from_yaml(CASES[name][0], actor_network=actor, critic_network=critic)
    assert b"omegaconf" not in pickle.dumps(loss)


@pytest.mark.parametrize("convert", CONVERT)
def test_columns_of_a_stacked_entry(convert: str) -> None:
    """``heads`` maps a head to [key, column]; the key may be nested, as a list."""
    text = """
        _target_: composite_losses.A2CLoss
        heads: {x: [[agents, action], 0], y: [[agents, action], 1]}
    """
    actor = builders_fl.make_actor({"x": "categorical", "y": "categorical"}, size=3)
    loss = from_yaml(text, actor_network=actor, _convert_=convert)
    columns = {"x": (("agents", "action"), 0), "y": (("agents", "action"), 1)}
    expected = cl.A2CLoss(actor, heads=columns)
    td = TensorDict({"observation": torch.randn(5, 3), "advantage": torch.randn(5, 1)}, [5])
    td["agents"] = TensorDict({"action": torch.randint(3, (5, 2))}, [5])
    assert ("agents", "action") in loss.in_keys
    assert_close(loss(td)["loss_objective"], expected(td)["loss_objective"])
    assert b"omegaconf" not in pickle.dumps(loss)


@pytest.mark.parametrize("convert", CONVERT)
@pytest.mark.parametrize(
    ("text", "shape", "alike"),
    [
        (
            "{_target_: composite_losses.MultiAgentMLP, n_agent_inputs: 3, n_agent_outputs: 2, "
            "n_agents: 3, centralized: true, share_params: [0, 0, 1], num_cells: [4, 5]}",
            (2, 3, 3),
            (0, 1),
        ),
        (
            "{_target_: composite_losses.MultiAgentConvNet, n_agents: 3, centralized: false, "
            "share_params: [0, 1, 1], in_features: 3, num_cells: [4, 5], "
            "kernel_sizes: [[3, 3], 2]}",
            (2, 3, 3, 6, 6),
            (1, 2),
        ),
        (
            "{_target_: composite_losses.MultiAgentGRU, input_size: 3, hidden_size: 4, "
            "n_agents: 3, share_params: [0, 0, 1]}",
            (2, 3, 3),
            (0, 1),
        ),
    ],
    ids=["mlp", "conv", "gru"],
)
def test_networks(text: str, shape: tuple[int, ...], alike: tuple[int, int], convert: str) -> None:
    """Lists of parameter sets, cells and kernels: agents of one set agree, the others differ."""
    out = from_yaml(text, _convert_=convert)(torch.ones(shape))
    out = out[0] if isinstance(out, tuple) else out
    one, other = (out.select(1, agent) for agent in alike)
    assert_close(one, other)
    assert not torch.allclose(out[:, 0], out[:, 2])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{_target_: composite_losses.ClipPPOLoss, clip_epsilom: 0.1}", "clip_epsilon"),
        ("{_target_: composite_losses.ClipPPOLoss, clip_epsilon: [0.1, 0.2, 0.3]}", "length 2"),
        ("{_target_: composite_losses.ClipPPOLoss, clip_epsilon: {move: 0.1}}", "per_head"),
        (
            "{_target_: composite_losses.ClipPPOLoss, clip_epsilon: [0.1, 0.2], clip_value: true}",
            "clip_value=True cannot infer",
        ),
        ("{_target_: composite_losses.ClipPPOLoss, entropy_coeff: {move: 0.1}}", "gear"),
    ],
)
def test_errors_say_what_is_wrong(text: str, message: str, networks: Networks) -> None:
    """The library's own message reaches the user of a configuration."""
    with pytest.raises(InstantiationException, match=message):
        from_yaml(text, actor_network=networks[0], critic_network=networks[1])


def test_keys_of_a_configuration() -> None:
    """A nested key is a list in YAML; ``set_keys`` gets it as a tuple."""
    config = OmegaConf.create({"advantage": ["agents", "advantage"], "value": "v"})
    assert as_keys(config) == {"advantage": ("agents", "advantage"), "value": "v"}


def configured(*overrides: str) -> Any:
    with initialize_config_dir(str(CONFIG), version_base="1.3"):
        return compose("train", overrides=list(overrides))


LOSSES = sorted(path.stem for path in (CONFIG / "loss").glob("*.yaml"))
TRAINERS = {"a2c": "a2c", "reinforce": "reinforce"}


@pytest.mark.parametrize("loss", LOSSES)
def test_the_example_trains_and_logs(
    loss: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every configured loss with the trainer it names: two batches, one log row each."""
    monkeypatch.chdir(tmp_path)
    config = configured(
        f"loss={loss}",
        f"trainer={TRAINERS.get(loss, 'ppo')}",
        "environment.n=4",
        "collector.frames_per_batch=64",
        "trainer.total_frames=128",
        "replay_buffer.batch_size=32",
    )
    before, after = train(config)
    assert before < 0
    assert before != after
    keys = make_loss(config)[0].out_keys
    for key in keys:
        assert len((tmp_path / "log" / "scalars" / f"{key}.csv").read_text().splitlines()) == 2


@pytest.mark.slow
def test_the_example_learns_from_the_command_line(tmp_path: Path) -> None:
    """The reward per step, at most 0, at least halves its distance to 0 (in fact −0.9 → −0.1)."""
    command = [sys.executable, "-W", "ignore", "-m", "examples.train", f"hydra.run.dir={tmp_path}"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr
    line = (tmp_path / "train.log").read_text().strip().splitlines()[-1]
    before, after = (float(part.split()[-2]) for part in line.split(",")[-2:])
    assert after > before / 2, line
