"""The policy side of a batch: from the data to the samples that the surrogate sees."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, is_tensor_collection
from torch import Tensor

from composite_losses import functional as F
from composite_losses.errors import MissingKeyError, ShapeError
from composite_losses.heads import Behaviour, Terms, find
from composite_losses.heads.chain import detached, stored_action
from composite_losses.heads.keys import read, read_tensor
from composite_losses.heads.shapes import fit_action, per_sample, shown, sum_event
from composite_losses.heads.terms import in_float32
from composite_losses.losses._checks import check_actions, check_behaviour, check_policy
from composite_losses.losses._frame import Frame, mask_for
from composite_losses.losses._torchrl import Mixin, loss_context
from composite_losses.losses.samples import Samples


class PolicySide(Mixin):
    """Mixin of a loss: from the data to the tensors of the policy terms."""

    def _run_actor(self, td: TensorDictBase, params: Any = None) -> list[Terms]:
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

    def _actions(
        self,
        td: TensorDictBase,
        frame: Frame,
        terms: list[Terms],
        active: Tensor | None,
    ) -> list[Tensor]:
        """Returns the stored actions as their distributions expect them, safe where masked."""
        actions = []
        for position, (head, term) in enumerate(zip(self._plan.heads, terms, strict=True)):
            action = self._stored_action(td, position)
            action = fit_action(action, term.batch_shape, term.event_shape, key=head.action)
            mask = frame.mask
            if active is not None:
                mask = F.combine_masks(mask, active[..., position])
            if mask is not None:
                wide = mask.reshape(mask.shape + (1,) * (action.ndim - mask.ndim))
                neutral = torch.as_tensor(term.neutral(), device=action.device)
                action = torch.where(wide, action, neutral.to(action.dtype))
            actions.append(action)
        return actions

    def _stored_action(self, td: TensorDictBase, position: int) -> Tensor:
        """Returns the stored action of a head."""
        head = self._plan.heads[position]
        action = read_tensor(td, head.action)
        if action is not None and action.requires_grad:
            detached(self._shown_action(head.action), action)
        return stored_action(td, head)

    def _shown_action(self, key: NestedKey) -> NestedKey:
        """Returns the action key as the user knows it: the set one where it holds the head's."""
        shown_key = self.tensor_keys.action
        return key if isinstance(shown_key, list) else shown_key

    def _samples(
        self,
        original: TensorDictBase,
        td: TensorDictBase,
        frame: Frame,
        terms: list[Terms],
        advantage: Tensor | TensorDictBase,
        proximal: TensorDictBase | None,
        fresh_target: Tensor | None,
    ) -> tuple[Samples, list[Terms]]:
        """Returns the tensors that the surrogate sees."""
        active = self._active(frame, terms)
        actions = self._actions(original, frame, terms, active)
        if self.validate:
            check_actions(self._plan, frame, terms, actions, active)
        current = [t.log_prob(a) for t, a in zip(terms, actions, strict=True)]
        parameters = self._blended_parameters(original, td, frame, active)
        behaviour = None
        if self.surrogate.uses_ratio:
            behaviour = find(
                self._program,
                self._plan,
                original,
                source=self.source,
                joint_ok=not self.surrogate.uses_heads,
                parameters=parameters,
            )
        mask = frame.mask if active is None else F.combine_masks(frame.mask, active.any(-1))
        log_prob, old = self._aligned(frame, current, behaviour, actions, active, mask)
        if self.validate:
            check_policy(self._plan, frame, current, active)
            check_behaviour(self._plan, frame, behaviour, old, active, mask)
        scaled = self._advantages(advantage, frame, mask, fresh_target)
        factor = self._factor(original, frame, mask)
        if factor is not None:
            scaled = scaled * (factor if scaled.ndim == factor.ndim else factor.unsqueeze(-1))
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
            valid = mask if samples.joint_only else samples.valid_heads
            now = log_prob.sum(-1) if samples.joint_only else log_prob
            samples.log_ratio = F.log_ratio(now, prox, valid)
            if proximal is not None:
                samples.correction = F.log_ratio(prox, old, valid)
        if self.surrogate.uses_kl:
            samples.kl = self._kl(original, parameters, prox_terms, terms, frame, samples)
        return samples, terms

    def _blended_parameters(
        self,
        original: TensorDictBase,
        td: TensorDictBase,
        frame: Frame,
        active: Tensor | None,
    ) -> TensorDictBase | None:
        """Returns the stored parameters, the current ones in rows that do not count."""
        if frame.mask is None and active is None:
            return None
        stored = TensorDict({}, batch_size=original.batch_size)
        for key in self._program.parameter_keys:
            value, now = read(original, key), read(td, key)
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
        current: list[Tensor],
        behaviour: Behaviour | None,
        actions: list[Tensor],
        active: Tensor | None,
        mask: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns current ``[*S, H]`` and behaviour log-prob (``[*S]`` if joint), masked 0."""
        names = self.tensor_keys
        now, old = [], []
        for i, head in enumerate(self._plan.heads):
            stored = None if behaviour is None else behaviour.stored[i]
            if behaviour is not None and behaviour.rebuilt[i] is not None:
                with torch.no_grad():
                    stored = behaviour.rebuilt[i].log_prob(actions[i])  # type: ignore[union-attr]
            key = head.action if behaviour is None else behaviour.keys[i]
            if stored is not None:
                stored = in_float32(stored)
            a, b = per_sample(
                current[i],
                stored,
                frame.sample,
                head=head.name,
                key=key,
                advantage_key=names.advantage,
            )
            now.append(a)
            if b is not None:
                old.append(b)
        log_prob = torch.stack(now, -1)
        valid = Samples(log_prob, log_prob, mask=mask, active=active).valid_heads
        log_prob = F.fill(log_prob, valid)
        if behaviour is None:
            return log_prob, None
        if behaviour.joint is not None:
            joint = in_float32(behaviour.joint)
            if joint.shape == (*frame.sample, 1):
                joint = joint.squeeze(-1)
            if joint.shape != frame.sample:
                raise ShapeError(
                    f"joint log-prob {behaviour.joint_key!r}: expected shape {shown(frame.sample)} "
                    f"(the advantage {names.advantage!r} without its last dim), found "
                    f"{shown(behaviour.joint.shape)}."
                )
            return log_prob, F.fill(joint, mask)
        return log_prob, F.fill(torch.stack(old, -1), valid)

    def _proximal(
        self,
        td: TensorDictBase,
        frame: Frame,
        actions: list[Tensor],
        active: Tensor | None,
        mask: Tensor | None,
        samples: Samples,
    ) -> tuple[list[Terms], Tensor]:
        """Returns terms and log-prob of the proximal policy, which holds the target parameters."""
        with torch.no_grad():
            terms = self._run_actor(td, self.target_actor_network_params)
            current = [t.log_prob(a) for t, a in zip(terms, actions, strict=True)]
            log_prob, _ = self._aligned(frame, current, None, actions, active, mask)
        return terms, log_prob.sum(-1) if samples.joint_only else log_prob

    def _kl(
        self,
        original: TensorDictBase,
        parameters: TensorDictBase | None,
        proximal: list[Terms] | None,
        terms: list[Terms],
        frame: Frame,
        samples: Samples,
    ) -> Tensor:
        """Returns Σ KL(old ‖ new) over the heads, ``[*S]``."""
        old = proximal
        if old is None:
            found = find(
                self._program, self._plan, original, source="params", parameters=parameters
            )
            old = [term for term in found.rebuilt if term is not None]
        n = len(frame.sample)
        count = getattr(self.surrogate, "samples", None) or self.entropy.samples
        each = [sum_event(p.kl(q, count), n) for p, q in zip(old, terms, strict=True)]
        return F.fill(torch.stack(each, -1), samples.valid_heads).sum(-1)

    def _advantages(
        self,
        advantage: Tensor | TensorDictBase,
        frame: Frame,
        mask: Tensor | None,
        fresh_target: Tensor | None,
    ) -> Tensor:
        """Returns the advantage, normalised and 0 where masked: ``[*S]``, or ``[*S, H]``."""
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
        return torch.stack([c for c in columns if c is not None], -1)

    def _factor(self, td: TensorDictBase, frame: Frame, mask: Tensor | None) -> Tensor | None:
        """Returns what multiplies the advantage, ``[*S]``, without gradient, or None.

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
        return F.fill(factor.squeeze(-1), mask)

    def _behaviour_log_ratio(self, tensordict: TensorDictBase) -> Tensor:
        """Returns log(π/π_behaviour) of the stored actions, ``[*S]``, 0 where masked."""
        self._settle(tensordict)
        with torch.no_grad(), loss_context(self):
            td = tensordict.copy()
            frame = self._frame(td, self._stored_advantage(td))
            self._neutralise(td, frame, for_advantage=False)
            zeros = torch.zeros((*frame.sample, 1), device=td.device)
            found = self._run_actor(td)
            samples, _ = self._samples(tensordict, td, frame, found, zeros, None, None)
            samples.cap = None
            return samples.behaviour_log_ratio

    def _normalised(
        self,
        advantage: Tensor,
        frame: Frame,
        mask: Tensor | None,
        fresh_target: Tensor | None,
    ) -> Tensor:
        """Returns one advantage entry as ``[*S]``."""
        advantage = F.fill(advantage, mask)
        if self.advantage is not None:
            if fresh_target is not None and frame.mask is not None and self.training:
                # exempt from the rule against boolean indexing: a normaliser sees valid rows only
                fresh_target = fresh_target[frame.mask]
            advantage = self.advantage(
                advantage, mask, root_ndim=frame.root_ndim, fresh_target=fresh_target
            )
        return advantage.squeeze(-1)


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
