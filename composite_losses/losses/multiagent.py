"""Multi-agent PPO under TorchRL's names: MAPPO and IPPO."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from composite_losses.losses._base import BaseLoss
from composite_losses.losses._clip import CLIP, ClipDoor
from composite_losses.losses._torchrl import MULTI_AGENT_GAE
from composite_losses.losses.ppo import PPO_OPTIONS

MULTI_AGENT_OPTIONS: dict[str, Any] = {
    **CLIP,
    "value_norm": None,
    **PPO_OPTIONS,
    "normalize_advantage": True,
    "normalize_advantage_exclude_dims": (-2,),
}


class ValueNormDoor(ClipDoor):
    """Mixin of a loss of the door whose value term takes a running normaliser."""

    @property
    def value_norm(self) -> nn.Module | None:
        """The running normaliser of the value error, or None."""
        return None if self.value is None else self.value.norm

    @value_norm.setter
    def value_norm(self, norm: nn.Module | None) -> None:
        if self.value is None:
            raise AttributeError("value_norm: this loss has no value term.")
        self.value.norm = norm

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute; ``nn.Module`` would make a submodule of a normaliser, not set it."""
        if name == "value_norm":
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)


class MAPPOLoss(ValueNormDoor, BaseLoss):
    """Multi-agent PPO with a centralised critic, with TorchRL's keywords.

    ``ClipPPOLoss`` with multi-agent defaults: the value estimator is ``MultiAgentGAE``, advantages
    are standardised per agent (dim −2 of ``[*B, A, 1]``).

    Args:
        value_norm: a TorchRL ``ValueNorm``: the value error is taken between normalised values, and
            clipped there. It is updated with the value targets that count, in training mode only.
            The critic's output, and the advantages formed from it, stay in reward units.

    The other keywords are ``ClipPPOLoss``'s.

    Shapes:
        S is ``[*B, A]``, batch and agents. Data: the log-prob of each head ``[*S]``, in nats;
        advantage, value and value target ``[*S, 1]``, in units of return. Losses are 0-dim,
        ``[*S]`` with ``reduction="none"``; metrics are 0-dim.

    Raises:
        ConfigError: an option out of its range, or options that contradict each other; (call,
            ``validate=True``) an action outside its head's support.
        TypeError: an unknown keyword, one given twice, or no policy as actor.
        MissingKeyError: (call) no advantage or no behaviour log-prob is found.
        ShapeError: (call) an entry whose shape does not fit the samples.
        GraphError: (call) a stored log-prob or value requires grad.
        NonFiniteError: (call, ``validate=True``) a log-prob that counts is not finite.

    Source: Yu et al. 2022, "The surprising effectiveness of PPO in cooperative multi-agent games",
    arXiv 2103.01955.
    """

    default_value_estimator = MULTI_AGENT_GAE
    options: ClassVar[dict[str, Any]] = MULTI_AGENT_OPTIONS


class IPPOLoss(ValueNormDoor, BaseLoss):
    """Independent PPO: ``MAPPOLoss`` for a critic per agent.

    The same computation; the difference lies in the critic, which sees one agent's observation.

    Keywords: those of ``MAPPOLoss``.

    Shapes:
        S is ``[*B, A]``, batch and agents. Data: the log-prob of each head ``[*S]``, in nats;
        advantage, value and value target ``[*S, 1]``, in units of return. Losses are 0-dim,
        ``[*S]`` with ``reduction="none"``; metrics are 0-dim.

    Raises:
        ConfigError: an option out of its range, or options that contradict each other; (call,
            ``validate=True``) an action outside its head's support.
        TypeError: an unknown keyword, one given twice, or no policy as actor.
        MissingKeyError: (call) no advantage or no behaviour log-prob is found.
        ShapeError: (call) an entry whose shape does not fit the samples.
        GraphError: (call) a stored log-prob or value requires grad.
        NonFiniteError: (call, ``validate=True``) a log-prob that counts is not finite.

    Source: de Witt et al. 2020, "Is independent learning all you need in the StarCraft multi-agent
    challenge?", arXiv 2011.09533.
    """

    default_value_estimator = MULTI_AGENT_GAE
    options: ClassVar[dict[str, Any]] = MULTI_AGENT_OPTIONS
