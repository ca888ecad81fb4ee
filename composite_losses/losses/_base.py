"""The one forward template: read, run the actor, ratio, surrogate, entropy, value, reduce, write.

Every loss is this template with other parts; none overrides ``forward``.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor, nn

from composite_losses import functional as F
from composite_losses.errors import ConfigError
from composite_losses.heads import ActorProgram, Scratch, Terms
from composite_losses.heads.blocks import Block, per_block
from composite_losses.heads.chain import check_source
from composite_losses.losses import _frame, _metrics
from composite_losses.losses._advantage import AdvantageSide
from composite_losses.losses._inspect import Inspection
from composite_losses.losses._keys import AcceptedKeys, Keys
from composite_losses.losses._networks import Networks, draws_random
from composite_losses.losses._options import plain, scalar
from composite_losses.losses._outputs import packed
from composite_losses.losses._policy import PolicySide
from composite_losses.losses._torchrl import LossMeta, LossModule, ValueEstimators
from composite_losses.losses._value import ValueSide
from composite_losses.losses.parts import EntropyTerm, ValueTerm
from composite_losses.losses.samples import Samples
from composite_losses.losses.surrogates import Surrogate


class BaseLoss(
    Networks,
    Keys,
    AdvantageSide,
    PolicySide,
    ValueSide,
    Inspection,
    LossModule,
    metaclass=LossMeta,
):
    """The forward template over parts; abstract."""

    _AcceptedKeys = AcceptedKeys
    default_keys = AcceptedKeys
    default_value_estimator = ValueEstimators.GAE
    # the word this loss goes by in TorchRL's messages
    label: ClassVar[str] = "PPO"
    objective_key: ClassVar[str] = "loss_objective"
    value_key: ClassVar[str] = "loss_critic"
    # whether the metric stands before the loss among the outputs, as in TorchRL's A2C
    entropy_first: ClassVar[bool] = False

    def __init__(
        self,
        actor_network: nn.Module | None,
        critic_network: nn.Module | None = None,
        *,
        surrogate: Surrogate,
        value: ValueTerm | None = None,
        entropy: EntropyTerm | None = None,
        advantage: nn.Module | None = None,
        entropy_bonus: bool = True,
        functional: bool = True,
        separate_losses: bool = False,
        delay_actor: bool = False,
        delay_value: bool = False,
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
        """Registers networks and parts; see the concrete losses for the arguments."""
        if max_importance_ratio is not None and not float(max_importance_ratio) > 0:
            raise ConfigError(f"max_importance_ratio must be > 0, got {max_importance_ratio}.")
        if not isinstance(actor_network, nn.Module):
            raise TypeError(
                "Missing positional arguments actor_network or critic_network: expected a policy "
                f"module, found {type(actor_network).__name__}."
            )
        reduction = "mean" if reduction is None else reduction
        if reduction not in ("none", "mean", "sum"):
            raise ConfigError(f"reduction: expected 'none', 'mean' or 'sum', found {reduction!r}.")
        check_source(log_prob_source)
        self._functional = functional
        super().__init__()
        self.separate_losses = separate_losses
        self.delay_actor, self.delay_value = delay_actor, delay_value
        self.reduction = reduction
        self.source = log_prob_source
        self.validate = validate
        self._columns = None if heads is None else plain(heads)
        self._user_keys = {}
        self._shared_keys = {}
        self._selected_in_keys = None
        self._selected_out_keys: list[Any] | None = None
        self._register_networks(actor_network, critic_network)
        self._program = ActorProgram(actor_network)
        self._random_modules = [m for m in actor_network.modules() if draws_random(m)]
        self._warned_random = False
        self._adopt_actor_keys()
        self._compile_plan()
        self.surrogate = surrogate
        self.value = value if critic_network is not None else None
        self.entropy = EntropyTerm(0.0) if entropy is None else entropy
        self.entropy_bonus = entropy_bonus and entropy is not None
        self.advantage = advantage
        self.sync_counts = sync_counts
        self.metrics = metrics
        self.team_value = team_value
        self.log_explained_variance = log_explained_variance
        cap = (
            None
            if max_importance_ratio is None
            else scalar("max_importance_ratio", max_importance_ratio).clone()
        )
        self.register_buffer("max_importance_ratio", cap)
        self._recurrent = _frame.is_recurrent(self.actor_network) or _frame.is_recurrent(
            self.critic_network
        )
        self._bind()
        first = next(iter(self.parameters()), None)
        where = device if device is not None else (None if first is None else first.device)
        if where is not None:
            for part in (self.surrogate, self.value, self.entropy):
                if part is not None:
                    part.to(where)
            if cap is not None:
                self.max_importance_ratio = cap.to(where)

    def __getattr__(self, name: str) -> Any:
        """Returns parts and networks at once: a call looks up a dozen of them."""
        modules = self.__dict__.get("_modules")
        if modules is not None and name in modules and not name.startswith("target_"):
            return modules[name]
        return super().__getattr__(name)

    def _bind(self) -> None:
        """Resolves the parts' options by head, once the heads are known."""
        if self._program.settled:
            self.surrogate.bind(self._plan)
            self.entropy.bind(self._plan)

    # --- the template ---------------------------------------------------------------------------

    def _outputs(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Returns the losses and metrics of a batch."""
        self._settle(tensordict)
        self._warn_random()
        td = Scratch(tensordict)
        advantage = self._stored_advantage(td)
        frame = self._frame(td, advantage)
        if advantage is None:
            self._share_signals(td, frame)
        self._neutralise(td, frame, advantage is None)
        fresh_target = None
        if advantage is None:
            advantage, fresh_target = self._computed_advantage(td, frame)
            if advantage.shape[:-1] != frame.sample:
                frame = self._frame(tensordict, advantage)
        proximal = td.fork() if self.delay_actor else None
        found = self._run_actor(td)
        samples, parts = self._samples(
            tensordict, td, frame, found, advantage, proximal, fresh_target
        )
        out = self._policy_outputs(samples, parts)
        if self.value is not None:
            out |= self._value_outputs(tensordict, td, frame)
        return packed({key: out[key] for key in self._all_out_keys()})

    def _settle(self, td: TensorDictBase) -> None:
        """Finds the heads of an actor that only a run reveals, at the first call."""
        if self._program.settled:
            return
        with torch.no_grad(), self._with(self.actor_network, self.actor_network_params):
            self._program.run(Scratch(td))
        self._compile_plan()
        self._bind()

    def _warn_random(self) -> None:
        """Warns once where dropout makes the current log-prob differ from the stored one."""
        if (
            self._random_modules
            and self.surrogate.uses_ratio
            and not self._warned_random
            and not torch.compiler.is_compiling()
            and any(m.training for m in self._random_modules)
        ):
            self._warned_random = True
            warnings.warn(
                f"{type(self).__name__}: the actor draws random numbers in train mode (dropout), "
                "so the ratio is not 1 on fresh data. Call loss.eval() (it reaches the networks) "
                "or "
                "remove the dropout.",
                UserWarning,
                stacklevel=2,
            )

    # --- 4 to 7 objective, entropy, reduce, write -----------------------------------------------

    def _policy_outputs(self, samples: Samples, parts: list[Block]) -> dict[str, Tensor]:
        """Returns the policy losses and metrics."""
        surrogate, term = self.surrogate, self.entropy
        objective = surrogate(samples)
        out = {self.objective_key: self._reduced(-objective, samples.row_mask)}
        if self.metrics or self.entropy_bonus:
            entropy = self._entropies(parts, samples, term)
            total = entropy if entropy.shape[-1] == 1 else entropy.sum(-1, keepdim=True)
            if self.entropy_bonus:
                loss = term(entropy, total)
                out["loss_entropy"] = self._reduced(loss, samples.row_mask)
            if self.metrics:
                out |= _metrics.collected(samples, surrogate, entropy, total, self._labels)
        return out | surrogate.reports(samples)

    def _entropies(self, parts: list[Block], samples: Samples, term: EntropyTerm) -> Tensor:
        """Returns the heads' entropies in nats, ``[*S, H]``; without a graph where only logged."""
        n = samples.log_prob.ndim - 1
        only_logged = not self.entropy_bonus or term.off

        def entropy(terms: Terms) -> Tensor:
            try:
                return terms.entropy(term.samples)
            except NotImplementedError:
                if not only_logged:
                    raise
                return samples.log_prob.new_full(terms.batch_shape, float("nan"))

        if not only_logged:
            return F.fill(per_block(parts, entropy, n), samples.valid_heads)
        with torch.no_grad():
            return F.fill(per_block(parts, entropy, n), samples.valid_heads)

    def _reduced(self, loss: Tensor, mask: Tensor | None) -> Tensor:
        """Returns a loss ``[*S, 1]`` reduced over the rows that count."""
        how, count = self.reduction, None
        if self.sync_counts and how == "mean":
            count = _metrics.all_reduced_count(loss, mask)
        out = F.reduce(loss, mask, how, count=count)
        if self.sync_counts and how == "sum":
            out = out * _metrics.ranks()  # averaged gradients are the whole batch's
        return out.squeeze(-1) if how == "none" else out

    def _all_out_keys(self) -> list[str]:
        """Names of all outputs, losses first."""
        keys = [self.objective_key]
        value, surrogate, labels = self.value, self.surrogate, self._labels
        if value is not None:
            keys.append(self.value_key)
        if self.metrics and self.entropy_first:
            keys.append("entropy")
        if self.entropy_bonus:
            keys.append("loss_entropy")
        keys += surrogate.report_keys
        if not self.metrics:
            return keys
        keys += [] if self.entropy_first else ["entropy"]
        keys += labels.entropies
        if surrogate.uses_ratio:
            keys += _metrics.RATIO_METRICS
            keys += labels.ratios
        if value is not None:
            if self.log_explained_variance:
                keys.append("explained_variance")
            if value.clip is not None:
                keys.append("value_clip_fraction")
        return keys

    def _own_in_keys(self) -> list[NestedKey]:
        """Keys of the behaviour log-prob: stored, joint, parameters."""
        keys: list[NestedKey] = []
        if self.surrogate.uses_ratio:
            if self.source != "params":
                keys += [key for head in self._plan.heads for key in head.log_probs]
                keys += [] if self.surrogate.uses_heads else self._plan.joint
            if self.source != "stored":
                keys += self._program.parameter_keys
        if self.surrogate.uses_kl:
            keys += self._program.parameter_keys
        return keys

    def reset(self) -> None:
        """Resets what a surrogate adapts."""
        reset = getattr(self.surrogate, "reset", None)
        if callable(reset):
            reset()
