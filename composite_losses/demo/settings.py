"""What the demo trains, and the keys of the entries it uses."""

from dataclasses import dataclass
from pathlib import Path

import torch

GROUP = "agents"
N_AGENTS = 2
N_OBSERVATIONS = 21
HEADS = {"move_x": 3, "move_y": 3, "say": 10}
"""Action heads of an agent, in the environment's order, with their number of choices."""

HEAD_KEYS = [(GROUP, head) for head in HEADS]
OBSERVATION = (GROUP, "observation")
ACTION = (GROUP, "action")
REWARD = (GROUP, "reward")
ESTIMATES = {
    "advantage": (GROUP, "advantage"),
    "value_target": (GROUP, "value_target"),
    "value": (GROUP, "state_value"),
}
"""Entries that the losses share with the advantage estimator, as ``set_keys`` takes them."""


@dataclass(frozen=True)
class Settings:
    """All that a run of the demo depends on.

    Args:
        seeds: one run of every method for each.
        iterations: collect-and-update rounds of a run.
        envs: environments stepped side by side.
        steps: length of an episode; one round collects one episode of every environment.
        epochs: passes over a round's data.
        minibatches: updates in one pass.
        learning_rate: of Adam.
        gamma: discount per step.
        lmbda: decay of the generalised advantage estimate.
        clip_epsilon: half width of the interval that ratios are clipped to.
        entropy_coeff: weight of the entropy bonus.
        cells: width of the two hidden layers of actor and critic.
        dtype: of the networks and all that is computed with them.
        device: where environments and networks live.
        output: the picture that is written.
    """

    seeds: tuple[int, ...] = (0,)
    iterations: int = 80
    envs: int = 400
    steps: int = 25
    epochs: int = 4
    minibatches: int = 4
    learning_rate: float = 7e-4
    gamma: float = 0.95
    lmbda: float = 0.9
    clip_epsilon: float = 0.2
    entropy_coeff: float = 1e-3
    cells: int = 64
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    output: Path = Path("demo.png")
