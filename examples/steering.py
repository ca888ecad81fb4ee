"""The task of the examples: a tiny environment with a composite action, and networks for it."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import CompositeDistribution, InteractionType, TensorDictModule
from torch import Tensor, nn
from torch.distributions import Categorical
from torchrl.data import Bounded, Composite, Unbounded
from torchrl.data import Categorical as CategoricalSpec
from torchrl.envs import EnvBase
from torchrl.modules import ProbabilisticActor, TanhNormal, ValueOperator

LENGTH = 8  # steps of an episode
HEADS = {"move": TanhNormal, "gear": Categorical}


def layout(nested: bool) -> dict[str, Any]:
    """Returns head → action key: at the root, or under "action"."""
    return {name: ("action", name) if nested else name for name in HEADS}


class Steering(EnvBase):
    """Points on a plane are rewarded for coming near the origin.

    ``move`` is a step ``[n, 2]``, ``gear`` its size, a choice of three. The start is drawn from
    torch's generator, whose state a checkpoint can hold.
    """

    def __init__(self, n: int = 4, *, nested: bool = False) -> None:
        """Declares ``n`` points, each with its own episode."""
        super().__init__(batch_size=torch.Size([n]))
        self.names = layout(nested)
        self.observation_spec = Composite(observation=Unbounded((n, 3)), shape=(n,))
        heads = Composite(
            move=Bounded(-1.0, 1.0, (n, 2)),
            gear=CategoricalSpec(3, shape=(n,), dtype=torch.long),
            shape=(n,),
        )
        self.action_spec = Composite(action=heads, shape=(n,)) if nested else heads
        self.reward_spec = Unbounded((n, 1))

    def _set_seed(self, seed: int | None) -> None:
        """Nothing of its own to seed."""

    def _reset(self, tensordict: TensorDictBase | None, **kwargs: Any) -> TensorDict:
        start = torch.rand(*self.batch_size, 2) * 2 - 1
        observation = torch.cat([start, torch.zeros(*self.batch_size, 1)], -1)
        done = torch.zeros(*self.batch_size, 1, dtype=torch.bool)
        return TensorDict(
            {"observation": observation, "done": done, "terminated": done.clone()}, self.batch_size
        )

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        move, gear = (tensordict[key] for key in self.names.values())
        point, time = tensordict["observation"].split([2, 1], -1)
        point = point + 0.1 * (gear.unsqueeze(-1) + 1) * move
        time = time + 1 / LENGTH
        return TensorDict(
            {
                "observation": torch.cat([point, time], -1),
                "reward": -point.norm(dim=-1, keepdim=True),
                "done": time > 1 - 0.5 / LENGTH,
                "terminated": torch.zeros_like(time, dtype=torch.bool),
            },
            self.batch_size,
        )


class Heads(nn.Module):
    """From the observation to loc and scale of ``move`` and the logits of ``gear``."""

    def __init__(self) -> None:
        """Makes the network."""
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 7))

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns ``[*B, 2]``, ``[*B, 2]`` and ``[*B, 3]``."""
        loc, raw, logits = self.net(observation).split([2, 2, 3], -1)
        return loc, nn.functional.softplus(raw) + 1e-2, logits


def make_actor(*, nested: bool = False) -> ProbabilisticActor:
    """Returns a composite policy that stores its log-probs and its parameters."""
    keys = [("params", "move", "loc"), ("params", "move", "scale"), ("params", "gear", "logits")]
    names = layout(nested)
    return ProbabilisticActor(
        TensorDictModule(Heads(), ["observation"], keys),
        in_keys=["params"],
        out_keys=list(names.values()),
        distribution_class=CompositeDistribution,
        distribution_kwargs={"distribution_map": HEADS, "name_map": names},
        default_interaction_type=InteractionType.RANDOM,
        return_log_prob=True,
    )


def make_critic() -> ValueOperator:
    """Returns a critic: one value per observation."""
    return ValueOperator(
        nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1)), in_keys=["observation"]
    )
