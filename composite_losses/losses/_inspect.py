"""What the data say about the policy: log-probs and where they come from."""

from __future__ import annotations

from tensordict import TensorDict, TensorDictBase

from composite_losses import functional as F
from composite_losses.heads import Scratch, find
from composite_losses.heads.blocks import neutralised
from composite_losses.heads.chain import as_tensordict
from composite_losses.losses._torchrl import Mixin, loss_context


class Inspection(Mixin):
    """Mixin of a loss: read-only views of what a call would use."""

    def log_probs(self, tensordict: TensorDictBase) -> TensorDict:
        """Returns ``{"current": …, "behaviour": …}``: log-probs of the stored actions, in nats.

        Both parts are nested like the action keys, in the distributions' batch shapes; nothing is
        summed, and rows that do not count hold 0. The behaviour part is detached; a joint log-prob
        stands under ``"sample_log_prob"``.
        """
        self._settle(tensordict)
        with loss_context(self):
            td = Scratch(tensordict)
            frame = self._frame(td, self._stored_advantage(td))
            self._neutralise(td, frame, for_advantage=False)
            terms = self._run_actor(td)
            behaviour = find(
                self._program, self._plan, tensordict, source=self.source, joint_ok=True
            )
            active = self._active(frame, terms)
            actions = self._actions(tensordict, terms)
            current = TensorDict({}, batch_size=tensordict.batch_size)
            for i, (head, term) in enumerate(zip(self._plan.heads, terms, strict=True)):
                mask = frame.mask
                if active is not None:
                    mask = F.combine_masks(mask, active[..., i])
                action = actions[i] if mask is None else neutralised(actions[i], mask, term)
                value = F.fill(term.log_prob(action), mask)
                current.set(head.slot if head.column is not None else head.action, value)
                stored = behaviour.stored[i]
                if stored is not None and stored.shape == (*value.shape, 1):
                    behaviour.stored[i] = stored.squeeze(-1)
            old = as_tensordict(behaviour, self._plan, tensordict)
        return TensorDict({"current": current, "behaviour": old}, batch_size=tensordict.batch_size)

    def log_prob_source(self, tensordict: TensorDictBase) -> dict[str, str]:
        """Returns head name → ``"stored"``, ``"joint"`` or ``"params"``: where a call finds it."""
        self._settle(tensordict)
        return find(
            self._program,
            self._plan,
            tensordict,
            source=self.source,
            joint_ok=not self.surrogate.uses_heads,
        ).sources
