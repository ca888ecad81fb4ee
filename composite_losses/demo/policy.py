"""The networks: an actor with three action heads, shared by the agents, and a central critic."""

import torch
from tensordict.nn import (
    CompositeDistribution,
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import Tensor, nn
from torch.distributions import Categorical

from composite_losses import MultiAgentMLP, StackHeads
from composite_losses.demo.settings import (
    ACTION,
    ESTIMATES,
    GROUP,
    HEAD_KEYS,
    HEADS,
    N_AGENTS,
    N_OBSERVATIONS,
    OBSERVATION,
    Settings,
)

LOGITS = (GROUP, "logits")
PARAMS = (GROUP, "params")


class SplitHeads(nn.Module):
    """Cuts one network output ``[..., sum of choices]`` into the logits of every head."""

    def forward(self, logits: Tensor) -> tuple[Tensor, ...]:
        """Returns one tensor ``[..., choices]`` per head."""
        return torch.split(logits, list(HEADS.values()), dim=-1)


class Cast(nn.Module):
    """Converts the environment's observations, float32, to the networks' dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, observation: Tensor) -> Tensor:
        """Returns the same values, without a copy if nothing changes."""
        return observation.to(self.dtype)


def multi_agent_net(n_outputs: int, *, central: bool, settings: Settings) -> nn.Module:
    """A network ``[*B, A, observations] -> [*B, A, n_outputs]`` that the agents share.

    Args:
        n_outputs: per agent.
        central: whether the network sees the observations of all agents.
        settings: its width, dtype and device.
    """
    net = MultiAgentMLP(
        n_agent_inputs=N_OBSERVATIONS,
        n_agent_outputs=n_outputs,
        n_agents=N_AGENTS,
        centralized=central,
        share_params=True,
        depth=2,
        num_cells=settings.cells,
        activation_class=nn.ReLU,
        device=settings.device,
    )
    return nn.Sequential(Cast(settings.dtype), net.to(settings.dtype))


def make_actor(settings: Settings) -> ProbabilisticTensorDictSequential:
    """The actor: observations in, one action and one log-prob ``[*B, A]`` per head out."""
    net = multi_agent_net(sum(HEADS.values()), central=False, settings=settings)
    return ProbabilisticTensorDictSequential(
        TensorDictModule(net, in_keys=[OBSERVATION], out_keys=[LOGITS]),
        TensorDictModule(
            SplitHeads(), in_keys=[LOGITS], out_keys=[(*PARAMS, head, "logits") for head in HEADS]
        ),
        ProbabilisticTensorDictModule(
            in_keys=[PARAMS],
            out_keys=HEAD_KEYS,
            distribution_class=CompositeDistribution,
            distribution_kwargs={
                "distribution_map": dict.fromkeys(HEADS, Categorical),
                "name_map": {head: (GROUP, head) for head in HEADS},
            },
            default_interaction_type=InteractionType.RANDOM,
            return_log_prob=True,
        ),
    )


def make_policy(actor: ProbabilisticTensorDictSequential) -> TensorDictSequential:
    """The actor with its heads stacked into the one entry that the environment reads."""
    return TensorDictSequential(actor, StackHeads(HEAD_KEYS, ACTION))


def make_critic(settings: Settings) -> TensorDictModule:
    """The critic: the observations of all agents in, one value per agent ``[*B, A, 1]`` out."""
    net = multi_agent_net(1, central=True, settings=settings)
    return TensorDictModule(net, in_keys=[OBSERVATION], out_keys=[ESTIMATES["value"]])
