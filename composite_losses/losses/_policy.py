"""The policy side of a batch: from the data to the samples that the surrogate sees."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from torch import Tensor

from composite_losses import functional as F
from composite_losses.errors import MissingKeyError, ShapeError
from composite_losses.heads import Behaviour, Scratch, Terms, find
from composite_losses.heads.blocks import Block, blocks, divergences, log_probs
from composite_losses.heads.chain import stored_action
from composite_losses.heads.keys import path, read, read_tensor
from composite_losses.heads.plan import Head
from composite_losses.heads.shapes import fit_action, per_sample, shown
from composite_losses.heads.terms import in_float32
from composite_losses.losses._checks import check_actions, check_behaviour, check_policy
from composite_losses.losses._frame import Frame, mask_for
from composite_losses.losses._torchrl import Mixin, loss_context
from composite_losses.losses.samples import Samples, valid_heads


class PolicySide(Mixin):
    """Mixin of a loss: from the data to the tensors of the policy terms."""

    def _run_actor(self, td: Scratch, params: Any = None) -> list[Terms]:
        """Returns the terms of every head, in the plan's order; one network pass."""
        params = self.actor_network_params if params is None else params
        with self._with(self.actor_network, params):
            found = self._program.run(td)
        missing = [head for head in self._plan.heads if head.slot not in found]
        if missing:
            raise MissingKeyError(
                f"head {missing[0].name!r}: the actor's distribution has no {missing[0].slot!r}; "
                f"it has {', '.join(map(repr, found))}."
            )
        return [found[head.slot] for head in self._plan.heads]

    def _actions(self, td: TensorDictBase, terms: list[Terms]) -> list[Tensor]:
        """Returns the stored actions in the shapes that their distributions expect."""
        # the key as the user knows it: the set one where it holds the heads'
        known = self.tensor_keys.action
        known = None if isinstance(known, list) else known
        return [
            fit_action(
                stored_action(td, head, known), term.batch_shape, term.event_shape, key=head.action
            )
            for head, term in zip(self._plan.heads, terms, strict=True)
        ]

    def _samples(
        self,
        original: TensorDictBase,
        td: Scratch,
        frame: Frame,
        terms: list[Terms],
        advantage: Tensor | TensorDictBase,
        proximal: Scratch | None,
        fresh_target: Tensor | None,
    ) -> tuple[Samples, list[Block]]:
        """Returns the tensors that the surrogate sees, and the heads in blocks."""
        surrogate = self.surrogate
        active = self._active(frame, terms)
        actions = self._actions(original, terms)
        if self.validate:
            check_actions(self._plan, frame, terms, actions, active)
        n = len(frame.sample)
        if n == frame.root_ndim and any(len(term.batch_shape) > n for term in terms):
            self._refuse_agents(original, frame, terms)
        parts = blocks(terms, n)
        parameters = self._blended_parameters(original, td, frame, active)
        behaviour = None
        if surrogate.uses_ratio:
            behaviour = find(
                self._program,
                self._plan,
                original,
                source=self.source,
                joint_ok=not surrogate.uses_heads,
                parameters=parameters,
            )
        mask = frame.mask if active is None else F.combine_masks(frame.mask, active.any(-1))
        log_prob, old = self._aligned(frame, parts, behaviour, actions, active, mask)
        if self.validate:
            check_policy(self._plan, frame, log_prob, active)
            check_behaviour(self._plan, frame, behaviour, old, active, mask)
        scaled = self._advantages(advantage, frame, mask, fresh_target)
        factor = self._factor(original, frame, mask)
        if factor is not None:
            scaled = scaled * factor
        samples = Samples(
            log_prob=log_prob,
            advantage=scaled,
            mask=mask,
            active=active,
            cap=self.max_importance_ratio,
            joint_only=behaviour is not None and behaviour.joint is not None,
        )
        prox_terms = None
        if old is not None:
            prox = old
            if proximal is not None:
                prox_terms, prox = self._proximal(proximal, frame, actions, active, mask, samples)
            now = log_prob.sum(-1, keepdim=True) if samples.joint_only else log_prob
            # masked entries are 0 on both sides
            samples.log_ratio = now - prox
            if proximal is not None:
                samples.correction = prox - old
        if surrogate.uses_kl:
            samples.kl = self._kl(original, parameters, prox_terms, parts, frame, samples)
        return samples, parts

    def _refuse_agents(self, td: TensorDictBase, frame: Frame, terms: list[Terms]) -> None:
        """Raises ShapeError where the dims that a short advantage leaves over are agents."""
        key, n = self.tensor_keys.advantage, len(frame.sample)
        for head, term in zip(self._plan.heads, terms, strict=True):
            batch = term.batch_shape
            if len(batch) == n or not (self.team_value or self._sees_agents(td, head, batch, n)):
                continue
            raise ShapeError(
                f"advantage {key!r}: there are samples {shown(frame.sample)}, but head "
                f"{head.name!r} has agents, log-probs {shown(batch)}; agents are never summed. "
                f"Give the group's TensorDict the batch size {shown(batch[: n + 1])} and the "
                f"advantage the shape {shown((*batch[: n + 1], 1))}. If these dims are one "
                "action's, make its distribution Independent."
            )

    def _sees_agents(self, td: TensorDictBase, head: Head, batch: torch.Size, n: int) -> bool:
        """Returns whether the actor's input, beside the action, has rows for dim ``n`` of it."""
        group, *rest = path(head.action)
        if not rest:
            return False
        parameters = self._program.parameter_keys
        for key in self._program.input_keys:
            parts = path(key)
            if len(parts) < 2 or parts[0] != group or key in parameters:
                continue
            value = read_tensor(td, key)
            if value is not None and value.ndim > n + 1 and value.shape[: n + 1] == batch[: n + 1]:
                return True
        return False

    def _blended_parameters(
        self,
        original: TensorDictBase,
        td: Scratch,
        frame: Frame,
        active: Tensor | None,
    ) -> TensorDictBase | None:
        """Returns the stored parameters, the current ones in rows that do not count."""
        if frame.mask is None and active is None:
            return None
        stored = TensorDict({}, batch_size=original.batch_size)
        for key in self._program.parameter_keys:
            value, now = read(original, key), read(td, key)
            if is_tensor_collection(value):
                value = value.copy()  # type: ignore[attr-defined]
            if value is not None:
                stored.set(key, value if frame.mask is None else _blend(value, now, frame))
        if active is None:
            return stored
        for position, head in enumerate(self._plan.heads):
            narrow = replace(frame, mask=F.combine_masks(frame.mask, active[..., position]))
            for key in self._program.keys_of(head.slot):
                value, now = read(stored, key), read(td, key)
                if value is not None:
                    stored.set(key, _blend(value, now, narrow))
        return stored

    def _active(self, frame: Frame, terms: list[Terms]) -> Tensor | None:
        """Returns ``[*S, H]``, True where a head counts, or None where all do."""
        n = len(frame.sample)
        masks: list[Tensor | None] = []
        for position, term in enumerate(terms):
            playable = term.playable
            if playable is not None and playable.ndim > n:
                playable = playable.flatten(n).all(-1)
            masks.append(F.combine_masks(frame.head_active.get(position), playable))
        if all(mask is None for mask in masks):
            return None
        some = next(mask for mask in masks if mask is not None)
        return torch.stack([torch.ones_like(some) if m is None else m for m in masks], -1)

    def _aligned(
        self,
        frame: Frame,
        parts: list[Block],
        behaviour: Behaviour | None,
        actions: list[Tensor],
        active: Tensor | None,
        mask: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns current ``[*S, H]`` and behaviour log-prob (``[*S, 1]`` if joint), masked 0."""
        n = len(frame.sample)
        heads = {i: h for p in parts for i, h in zip(p.positions, p.heads, strict=True)}
        stored: list[Tensor | None] = []
        for i, head in enumerate(self._plan.heads):
            value = None if behaviour is None else behaviour.stored[i]
            key = head.action if behaviour is None else behaviour.keys[i]
            stored.append(
                per_sample(
                    heads[i].batch_shape,
                    None if value is None else in_float32(value),
                    frame.sample,
                    head=head.name,
                    key=key,
                    advantage_key=self.tensor_keys.advantage,
                )
            )
        valid = valid_heads(mask, active, (*frame.sample, len(stored)))
        log_prob = F.fill(log_probs(parts, actions, valid, n), valid)
        if behaviour is None:
            return log_prob, None
        if behaviour.joint is not None:
            return log_prob, F.fill(self._joint_column(behaviour, frame), mask)
        self._rebuild(behaviour, stored, actions, valid, n)
        old = torch.stack([x for x in stored if x is not None], -1)
        return log_prob, F.fill(old, valid)

    def _rebuild(
        self,
        behaviour: Behaviour,
        stored: list[Tensor | None],
        actions: list[Tensor],
        valid: Tensor | None,
        n: int,
    ) -> None:
        """Fills in the log-probs of heads whose distribution was rebuilt from stored parameters."""
        missing = [i for i, terms in enumerate(behaviour.rebuilt) if terms is not None]
        if not missing:
            return
        terms = [t for t in behaviour.rebuilt if t is not None]
        chosen = [
            fit_action(actions[i], t.batch_shape, t.event_shape, key=self._plan.heads[i].action)
            for i, t in zip(missing, terms, strict=True)
        ]
        rows = None if valid is None else torch.stack([valid[..., i] for i in missing], -1)
        with torch.no_grad():
            values = log_probs(blocks(terms, n), chosen, rows, n).unbind(-1)
        for i, value in zip(missing, values, strict=True):
            stored[i] = value

    def _joint_column(self, behaviour: Behaviour, frame: Frame) -> Tensor:
        """Returns the stored joint log-prob as ``[*S, 1]``.

        Raises:
            ShapeError: it has another shape than ``[*S]`` or ``[*S, 1]``.
        """
        joint = in_float32(cast(Tensor, behaviour.joint))
        if joint.shape == frame.sample:
            joint = joint.unsqueeze(-1)
        if joint.shape != (*frame.sample, 1):
            raise ShapeError(
                f"joint log-prob {behaviour.joint_key!r}: expected shape {shown(frame.sample)} "
                f"(the advantage {self.tensor_keys.advantage!r} without its last dim), found "
                f"{shown(joint.shape)}."
            )
        return joint

    def _proximal(
        self,
        td: Scratch,
        frame: Frame,
        actions: list[Tensor],
        active: Tensor | None,
        mask: Tensor | None,
        samples: Samples,
    ) -> tuple[list[Terms], Tensor]:
        """Returns terms and log-prob of the proximal policy, which holds the target parameters."""
        with torch.no_grad():
            terms = self._run_actor(td, self.target_actor_network_params)
            parts = blocks(terms, len(frame.sample))
            log_prob, _ = self._aligned(frame, parts, None, actions, active, mask)
        return terms, log_prob.sum(-1, keepdim=True) if samples.joint_only else log_prob

    def _kl(
        self,
        original: TensorDictBase,
        parameters: TensorDictBase | None,
        proximal: list[Terms] | None,
        parts: list[Block],
        frame: Frame,
        samples: Samples,
    ) -> Tensor:
        """Returns Σ KL(old ‖ new) over the heads, ``[*S, 1]``."""
        old = proximal
        if old is None:
            found = find(
                self._program, self._plan, original, source="params", parameters=parameters
            )
            old = [term for term in found.rebuilt if term is not None]
        n = len(frame.sample)
        count = getattr(self.surrogate, "samples", None) or self.entropy.samples
        each = divergences(parts, old, count, n)
        return F.fill(each, samples.valid_heads).sum(-1, keepdim=True)

    def _advantages(
        self,
        advantage: Tensor | TensorDictBase,
        frame: Frame,
        mask: Tensor | None,
        fresh_target: Tensor | None,
    ) -> Tensor:
        """Returns the advantage, normalised and 0 where masked: ``[*S, 1]``, or ``[*S, H]``."""
        if isinstance(advantage, Tensor):
            return self._normalised(advantage, frame, mask, fresh_target)
        columns: list[Tensor | None] = [None] * len(self._plan.heads)
        for key, value in advantage.items(include_nested=True, leaves_only=True):
            position = self._plan.index(key)
            if position is not None:
                columns[position] = self._normalised(value, frame, mask, fresh_target)
        missing = [h.name for h, c in zip(self._plan.heads, columns, strict=True) if c is None]
        if missing:
            raise MissingKeyError(
                f"advantage {self.tensor_keys.advantage!r}: no entry for head "
                f"{', '.join(map(repr, missing))}."
            )
        return torch.cat([c for c in columns if c is not None], -1)

    def _factor(self, td: TensorDictBase, frame: Frame, mask: Tensor | None) -> Tensor | None:
        """Returns what multiplies the advantage, ``[*S, 1]``, without gradient, or None.

        Raises:
            ShapeError: it has another shape than ``[*S, 1]`` or ``[*B, 1]``.
        """
        key = self.tensor_keys.factor
        factor = None if key is None else read_tensor(td, key)
        if factor is None:
            return None
        factor, root = factor.detach(), frame.root
        if factor.shape == (*root, 1) and frame.sample != root:
            extra = (1,) * (len(frame.sample) - len(root))
            factor = factor.reshape(*root, *extra, 1).expand(*frame.sample, 1)
        if factor.shape != (*frame.sample, 1):
            raise ShapeError(
                f"factor {key!r}: expected shape {shown((*root, 1))} or "
                f"{shown((*frame.sample, 1))}, found {shown(factor.shape)}."
            )
        return F.fill(factor, mask)

    def _behaviour_log_ratio(self, tensordict: TensorDictBase) -> Tensor:
        """Returns log(π/π_behaviour) of the stored actions, ``[*S]``, 0 where masked."""
        self._settle(tensordict)
        with torch.no_grad(), loss_context(self):
            td = Scratch(tensordict)
            frame = self._frame(td, self._stored_advantage(td))
            self._neutralise(td, frame, for_advantage=False)
            zeros = torch.zeros((*frame.sample, 1), device=tensordict.device)
            found = self._run_actor(td)
            samples, _ = self._samples(tensordict, td, frame, found, zeros, None, None)
            samples.cap = None
            return samples.behaviour_log_ratio.squeeze(-1)

    def _normalised(
        self,
        advantage: Tensor,
        frame: Frame,
        mask: Tensor | None,
        fresh_target: Tensor | None,
    ) -> Tensor:
        """Returns one advantage entry, ``[*S, 1]``."""
        if not advantage.is_floating_point():
            advantage = advantage.to(torch.get_default_dtype())
        advantage = F.fill(advantage, mask)
        if self.advantage is not None:
            if fresh_target is not None and frame.mask is not None and self.training:
                # exempt from the rule against boolean indexing: a normaliser sees valid rows only
                rows = frame.mask
                if fresh_target.ndim <= rows.ndim:  # a team's
                    rows = rows.flatten(fresh_target.ndim - 1).any(-1)
                fresh_target = fresh_target[rows]
            advantage = self.advantage(
                advantage,
                mask,
                root_ndim=frame.root_ndim,
                fresh_target=fresh_target,
                in_group=len(path(self.tensor_keys.advantage)) > 1 or bool(self._shared_keys),
            )
        return advantage


def _blend(stored: Any, now: Any, frame: Frame) -> Any:
    """Returns stored parameters, with the current ones (detached) in rows that do not count."""
    if is_tensor_collection(stored):
        if not is_tensor_collection(now):
            return stored
        out = stored.empty()
        for key, value in stored.items():
            out.set(key, _blend(value, now.get(key, None), frame))
        return out
    if not (isinstance(stored, Tensor) and isinstance(now, Tensor)) or stored.shape != now.shape:
        return stored
    mask = mask_for(stored, frame)
    return stored if mask is None else torch.where(mask, stored, now.detach().to(stored.dtype))
