"""MAPPO and IPPO of BenchMARL with one head per choice of a multi-discrete action."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from benchmarl.algorithms import Ippo, IppoConfig, Mappo, MappoConfig
from tensordict.nn import CompositeDistribution, TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torch.distributions import Categorical
from torchrl.data import Composite, MultiCategorical, Unbounded
from torchrl.modules import ProbabilisticActor

from composite_losses import StackHeads


class Split(nn.Module):
    """Cuts one network output ``[..., sum of choices]`` into the logits of every head."""

    def __init__(self, choices: list[int]) -> None:
        super().__init__()
        self.choices = choices

    def forward(self, logits: Tensor) -> tuple[Tensor, ...]:
        return torch.split(logits, self.choices, dim=-1)


class MultiHead:
    """Mixin of an algorithm: the policy's heads, and their actions as the environment reads them.

    BenchMARL asks for one entry ``(group, "action")``; the heads stand beside it in the data, as
    ``(group, "head_0")`` and so on.
    """

    def _choices(self: Any, group: str) -> list[int]:
        """How many values each of the action's columns can take, the same for all agents."""
        spec = self.action_spec[group, "action"]
        if not isinstance(spec, MultiCategorical) or (spec.nvec != spec.nvec[:1]).any():
            raise ValueError(f"{group}: the same MultiCategorical for every agent, not {spec}")
        return spec.nvec[0].tolist()

    def _get_policy_for_loss(self: Any, group: str, model_config: Any, continuous: bool) -> Any:
        choices, agents = self._choices(group), len(self.group_map[group])
        heads = [f"head_{i}" for i in range(len(choices))]
        logits = Unbounded((agents, sum(choices)), device=self.device)
        net = model_config.get_model(
            input_spec=Composite({group: self.observation_spec[group].clone().to(self.device)}),
            output_spec=Composite({group: Composite({"logits": logits}, shape=(agents,))}),
            agent_group=group,
            input_has_agent_dim=True,
            n_agents=agents,
            centralised=False,
            share_params=self.experiment_config.share_policy_params,
            device=self.device,
            action_spec=self.action_spec,
        )
        split = TensorDictModule(
            Split(choices),
            in_keys=[(group, "logits")],
            out_keys=[(group, "params", head, "logits") for head in heads],
        )
        return ProbabilisticActor(
            TensorDictSequential(net, split),
            in_keys=[(group, "params")],
            out_keys=[(group, head) for head in heads],
            distribution_class=CompositeDistribution,
            distribution_kwargs={
                "distribution_map": dict.fromkeys(heads, Categorical),
                "name_map": {head: (group, head) for head in heads},
            },
            return_log_prob=True,
        )

    def _get_policy_for_collection(
        self: Any, policy_for_loss: Any, group: str, continuous: bool
    ) -> Any:
        heads = [(group, f"head_{i}") for i in range(len(self._choices(group)))]
        return TensorDictSequential(policy_for_loss, StackHeads(heads, (group, "action")))


class MultiHeadMappo(MultiHead, Mappo):
    """MAPPO with several heads."""


class MultiHeadIppo(MultiHead, Ippo):
    """IPPO with several heads."""


@dataclass
class MultiHeadMappoConfig(MappoConfig):
    """MAPPO's options; ``entropy_coef`` may be a mapping by head."""

    @staticmethod
    def associated_class() -> type[MultiHeadMappo]:
        return MultiHeadMappo

    @classmethod
    def get_from_yaml(cls, path: str | None = None) -> MultiHeadMappoConfig:
        return cls(**vars(MappoConfig.get_from_yaml(path)))


@dataclass
class MultiHeadIppoConfig(IppoConfig):
    """IPPO's options; ``entropy_coef`` may be a mapping by head."""

    @staticmethod
    def associated_class() -> type[MultiHeadIppo]:
        return MultiHeadIppo

    @classmethod
    def get_from_yaml(cls, path: str | None = None) -> MultiHeadIppoConfig:
        return cls(**vars(IppoConfig.get_from_yaml(path)))
