"""The value side of a batch: critic, value error, explained variance."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import Tensor

from composite_losses import functional as F
from composite_losses.errors import GraphError, MissingKeyError, ShapeError
from composite_losses.heads.keys import listing, read_tensor
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
        td = tensordict.copy()
        error, clipped, value, target = self._value_error(tensordict, td, None)
        fraction = None if clipped is None else clipped.to(error.dtype).mean()
        return error, fraction, self._explained(value, target, None)

    def _value_error(
        self, original: TensorDictBase, td: TensorDictBase, frame: Frame | None
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Returns (coeff · error, where clipped, value, target), ``[*S, 1]`` each, masked rows 0."""
        names, critic, term = self.tensor_keys, self.critic_network, self.value
        if critic is None or term is None:
            raise MissingKeyError(f"{type(self).__name__} has no critic network.")
        if self.separate_losses:
            td = td.detach()
        target = read_tensor(td, names.value_target)
        if target is None:
            raise MissingKeyError(
                f"the key {names.value_target} was not found in the input tensordict. Keys present: "
                f"{listing(original)}. Fix: run an advantage module (GAE writes 'value_target'), or "
                "name the entry with set_keys(value_target=...)."
            )
        old = None
        if term.clip is not None:
            old = read_tensor(original, names.value)
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
        with self._with(critic, self.critic_network_params):
            out = critic(td)
        value = read_tensor(out, names.value)
        if value is None:
            raise MissingKeyError(
                f"the key {names.value} was not found in the critic output tensordict. Make sure "
                f"that the 'value_key' passed to {self.label} is accurate: set_keys(value=...)."
            )
        self._check_value_shapes(value, target, old, frame)
        mask = None if frame is None else frame.mask
        value, target = F.fill(value, mask), F.fill(target, mask)
        old = None if old is None else F.fill(old, mask)
        error, clipped = term(value, target, old)
        return F.fill(error, mask), clipped, value, target

    def _check_value_shapes(
        self, value: Tensor, target: Tensor, old: Tensor | None, frame: Frame | None
    ) -> None:
        """Raises ShapeError unless value, target and old value are ``[*S, 1]``."""
        names = self.tensor_keys
        expected = value.shape if frame is None else torch.Size((*frame.sample, 1))
        entries = [
            (f"critic output {names.value!r}", value),
            (f"value target {names.value_target!r}", target),
        ]
        if old is not None:
            entries.append((f"old value {names.value!r}", old))
        for what, tensor in entries:
            if tensor.shape != expected:
                raise ShapeError(
                    f"{what}: expected shape {shown(expected)} (one value per sample), found "
                    f"{shown(tensor.shape)}. Nothing is broadcast: give the critic's output and the "
                    "target the advantage's shape [*S, 1]."
                )

    def _explained(self, value: Tensor, target: Tensor, mask: Tensor | None) -> Tensor | None:
        """Returns the explained variance of the value, 0-dim, or None where it is not logged."""
        if not self.log_explained_variance:
            return None
        if mask is not None:
            mask = mask.unsqueeze(-1).expand_as(value)
        return F.explained_variance(value.detach(), target.detach(), mask)

    def _value_outputs(
        self, original: TensorDictBase, td: TensorDictBase, frame: Frame
    ) -> dict[str, Tensor]:
        """Returns the value loss and its metrics."""
        error, clipped, value, target = self._value_error(original, td, frame)
        out = {self.value_key: self._reduced(error.squeeze(-1), frame.mask)}
        if not self.metrics:
            return out
        explained = self._explained(value, target, frame.mask)
        if explained is not None:
            out["explained_variance"] = explained
        if clipped is not None:
            fraction = clipped.squeeze(-1).to(error.dtype)
            out["value_clip_fraction"] = F.masked_mean(fraction, frame.mask)
        return out
