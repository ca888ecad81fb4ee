"""The native door: a loss composed of parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import NestedKey
from torch import nn

from composite_losses.losses._base import BaseLoss
from composite_losses.losses.parts import EntropyTerm, ValueTerm
from composite_losses.losses.surrogates import Surrogate


class Default:
    """What a constructor argument is that was left out."""

    def __repr__(self) -> str:
        """Returns how the signature shows it."""
        return "<default>"


DEFAULT: Any = Default()


class PolicyLoss(BaseLoss):
    """A policy-gradient loss composed of parts, for any number of action heads.

    Outputs ``loss_objective``, ``loss_critic`` (with a critic), ``loss_entropy``, and metrics.

    Args:
        actor_network: a policy with TensorDict's probabilistic interface.
        critic_network: a value module; optional.
        surrogate: ``Clip``, ``Ratio``, ``Score`` or ``KLPenalty``.
        value: the value term; ``ValueTerm()`` where there is a critic; None leaves it out.
        entropy: the entropy term; ``EntropyTerm()``; None leaves it out.
        advantage: ``AdvantageNorm(...)`` or None.
        functional: whether the loss holds the networks' parameters as TensorDictParams.
        separate_losses: whether parameters shared by actor and critic learn from the policy only.
        delay_actor: whether the trust region is around the target parameters (decoupled PPO).
        max_importance_ratio: largest ratio to the behaviour policy, > 0, dimensionless.
        reduction: ``"mean"``, ``"sum"`` or ``"none"`` (losses ``[*S]``).
        log_prob_source: ``"auto"``, ``"stored"`` or ``"params"``; kept as ``source``.
        validate: whether stored values are checked; waits for the device.
        heads: head name → (key, column), where the data hold the heads stacked in one entry.
        sync_counts: whether masked means count the valid rows of all ranks.
        metrics: whether metrics are computed.
        team_value: whether the critic gives one value ``[*B, 1]`` for all agents of the group.
        log_explained_variance: whether ``explained_variance`` is one of them.
        device: device of the coefficients; the parameters' by default.

    Shapes:
        Data: the log-prob of each head ``[*S]``, in nats; advantage, value and value target
        ``[*S, 1]``, in units of return. Losses are 0-dim, ``[*S]`` with ``reduction="none"``;
        metrics are 0-dim.

    Raises:
        ConfigError: an option out of its range, or options that contradict each other; (call,
            ``validate=True``) an action outside its head's support.
        TypeError: an unknown keyword, or no policy as actor.
        MissingKeyError: (call) no advantage, or no behaviour log-prob where the surrogate reads it.
        ShapeError: (call) an entry whose shape does not fit the samples.
        GraphError: (call) a stored log-prob or value requires grad.
        NonFiniteError: (call, ``validate=True``) a log-prob that counts is not finite.

    Source: the surrogate's, see ``Clip``, ``Ratio``, ``Score`` and ``KLPenalty``; ``delay_actor``:
    Hilton, Cobbe and Schulman 2021, "Batch size-invariance for policy optimization", arXiv
    2110.00641.

    Example:
        >>> loss = PolicyLoss(
        ...     actor,
        ...     critic,
        ...     surrogate=Clip(0.2, ratio="per_head"),
        ...     value=ValueTerm("l2"),
        ...     entropy=EntropyTerm({"move": 0.01, "gear": 0.05}),
        ... )
    """

    def __init__(
        self,
        actor_network: nn.Module,
        critic_network: nn.Module | None = None,
        *,
        surrogate: Surrogate,
        value: ValueTerm | None = DEFAULT,
        entropy: EntropyTerm | None = DEFAULT,
        advantage: nn.Module | None = None,
        functional: bool = True,
        separate_losses: bool = False,
        delay_actor: bool = False,
        max_importance_ratio: float | None = None,
        reduction: str | None = None,
        log_prob_source: str = "auto",
        validate: bool = False,
        heads: Mapping[str, tuple[NestedKey, int]] | None = None,
        sync_counts: bool = False,
        metrics: bool = True,
        team_value: bool = False,
        log_explained_variance: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        """Composes the loss."""
        super().__init__(
            actor_network,
            critic_network,
            surrogate=surrogate,
            value=ValueTerm() if value is DEFAULT else value,
            entropy=EntropyTerm() if entropy is DEFAULT else entropy,
            advantage=advantage,
            functional=functional,
            separate_losses=separate_losses,
            delay_actor=delay_actor,
            max_importance_ratio=max_importance_ratio,
            reduction=reduction,
            log_prob_source=log_prob_source,
            validate=validate,
            heads=heads,
            sync_counts=sync_counts,
            metrics=metrics,
            team_value=team_value,
            log_explained_variance=log_explained_variance,
            device=device,
        )
