"""The value side of a batch: critic, value error, explained variance."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import Tensor

from composite_losses import functional as F
from composite_losses.errors import GraphError, MissingKeyError, ShapeError
from composite_losses.heads.keys import as_key, key_list, listing, path, read, read_tensor
from composite_losses.heads.scratch import Scratch
from composite_losses.heads.shapes import shown
from composite_losses.losses._frame import Frame
from composite_losses.losses._torchrl import Mixin


class ValueSide(Mixin):
    """Mixin of a loss: the value terms."""

    def loss_critic(
        self, tensordict: TensorDictBase
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Returns (coeff · value error ``[*S, 1]``, clip fraction, explained variance), unreduced.

        Args:
            tensordict: data with what the critic reads and the value target; unchanged.

        Raises:
            KeyError: the value target, or with value clipping the old value, is not there.
        """
        td = Scratch(tensordict)
        error, clipped, value, target, _ = self._value_error(tensordict, td, None)
        fraction = None if clipped is None else clipped.to(error.dtype).mean()
        return error, fraction, self._explained(value, target, None)

    def _value_error(
        self, original: TensorDictBase, td: Scratch, frame: Frame | None
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor | None]:
        """Returns (coeff · error, where clipped, value, target), ``[*S, 1]``, and their mask."""
        names, critic, term = self.tensor_keys, self.critic_network, self.value
        if critic is None or term is None:
            raise MissingKeyError(f"{type(self).__name__} has no critic network.")
        if self.separate_losses:
            td = Scratch(td.tensordict().detach())
        target = read_tensor(td, names.value_target)
        if target is None and read(td, names.value_target) is not None:
            raise ShapeError(
                f"value target {names.value_target!r}: expected one value per sample, a tensor "
                "[*S, 1], found a TensorDict. A critic of several values needs a loss of its own "
                "for each."
            )
        if target is None:
            raise MissingKeyError(
                f"the key {names.value_target} was not found in the input tensordict. Keys "
                f"present: {listing(original)}. Fix: run an advantage module (GAE writes "
                "'value_target'), "
                "or name the entry with set_keys(value_target=...)."
            )
        old = None
        if term.clip is not None:
            old = read_tensor(original, names.value)
            fresh = old is None and read(original, names.advantage) is None
            # the estimator has just written the value on the copy: nothing to clip yet
            old = _plain(read_tensor(td, names.value)) if fresh else old
            if old is None:
                raise MissingKeyError(
                    f"clip_value is set to {term.clip}, but the key {names.value} was not found in "
                    "the input tensordict. Make sure that the value_key passed to "
                    f"{self.label} exists in the input tensordict."
                )
            if old.requires_grad:
                raise GraphError(
                    f"tensordict stored {names.value} requires grad. Collect under torch.no_grad()."
                )
        held = self._with(critic, self.critic_network_params)
        with held, self._without_shared_gradients():
            for call in self._critic_calls:
                call(td)
        value = read_tensor(td, names.value)
        # what the data hold under the key is no output
        if value is None or (names.value not in critic.out_keys and not self._writes_value()):
            raise self._not_written()
        if not target.is_floating_point():
            target = target.to(value.dtype)
        mask = None if frame is None else frame.mask
        if self.team_value and frame is not None:
            value, old, mask = _as_team(value, target, old, frame)
        self._check_value_shapes(value, target, old, frame)
        value, target = F.fill(value, mask), F.fill(target, mask)
        old = None if old is None else F.fill(old, mask)
        error, clipped = term(value, target, old, mask)
        return F.fill(error, mask), clipped, value, target, mask

    def _writes_value(self) -> bool:
        """Returns whether the critic declares that it writes the value's key."""
        return as_key(path(self.tensor_keys.value)) in key_list(list(self.critic_network.out_keys))

    def _not_written(self) -> MissingKeyError:
        """Returns the error of a critic that does not write the value's key."""
        key = as_key(path(self.tensor_keys.value))
        written = key_list(list(self.critic_network.out_keys))
        parts = path(key)
        own = f"{parts[0]!r}, " if self._shared_keys and len(parts) > 1 else ""
        name = repr(written[0]) if len(written) == 1 else "..."
        return MissingKeyError(
            f"the key {key!r} was not found in the critic output tensordict: the critic writes "
            f"{', '.join(map(repr, written)) or 'nothing'}. Make sure that the 'value_key' passed "
            f"to {self.label} is accurate: set_keys({own}value={name})."
        )

    def _check_value_shapes(
        self, value: Tensor, target: Tensor, old: Tensor | None, frame: Frame | None
    ) -> None:
        """Raises ShapeError unless value, target and old value are ``[*S, 1]``."""
        names = self.tensor_keys
        expected = value.shape if frame is None else torch.Size((*frame.sample, 1))
        if self.team_value and frame is not None and target.shape == (*frame.root, 1):
            expected = target.shape
        for what, key, tensor in (
            ("critic output", names.value, value),
            ("value target", names.value_target, target),
            ("old value", names.value, old),
        ):
            if tensor is not None and tensor.shape != expected:
                raise ShapeError(
                    f"{what} {key!r}: expected shape {shown(expected)} (one value per sample), "
                    f"found {shown(tensor.shape)}. Nothing is broadcast: give the critic's output "
                    "and the target the advantage's shape [*S, 1]."
                )

    def _explained(self, value: Tensor, target: Tensor, mask: Tensor | None) -> Tensor | None:
        """Returns the explained variance of the value, 0-dim, or None where it is not logged."""
        if not self.log_explained_variance:
            return None
        if mask is not None:
            mask = mask.unsqueeze(-1).expand_as(value)
        return F.explained_variance(value, target, mask)

    def _value_outputs(
        self, original: TensorDictBase, td: Scratch, frame: Frame
    ) -> dict[str, Tensor]:
        """Returns the value loss and its metrics."""
        error, clipped, value, target, mask = self._value_error(original, td, frame)
        rows = None if mask is None else mask.unsqueeze(-1)
        out = {self.value_key: self._reduced(error, rows)}
        if not self.metrics:
            return out
        explained = self._explained(value, target, mask)
        if explained is not None:
            out["explained_variance"] = explained
        if clipped is not None:
            out["value_clip_fraction"] = F.masked_mean(clipped.to(error.dtype), rows)
        return out


def _plain(value: Tensor | None) -> Tensor | None:
    """Returns a value without its graph."""
    return None if value is None else value.detach()


def _as_team(
    value: Tensor, target: Tensor, old: Tensor | None, frame: Frame
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Returns (value, old value, mask) of a team critic, ``[*B, 1]``, in the target's shape.

    A team target counts where any agent counts; per-agent targets see the team's value each.
    """
    root, sample = frame.root, frame.sample
    if target.shape == (*root, 1) and len(sample) > len(root):
        mask = None if frame.mask is None else frame.mask.flatten(len(root)).any(-1)
        return value, old, mask
    extra = (1,) * (len(sample) - len(root))
    if value.shape == (*root, 1):
        value = value.reshape(*root, *extra, 1).expand(*sample, 1)
    if old is not None and old.shape == (*root, 1):
        old = old.reshape(*root, *extra, 1).expand(*sample, 1)
    return value, old, frame.mask
