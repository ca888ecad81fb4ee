"""How a loss is called, and which of its outputs come back."""

from __future__ import annotations

from typing import Any, cast

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import dispatch
from torch import Tensor

from composite_losses.errors import ConfigError
from composite_losses.heads.keys import is_tree
from composite_losses.losses._torchrl import Mixin


class Outputs(Mixin):
    """Mixin of a loss: how it is called, and the choice of its outputs.

    TensorDict's own choice takes a call whose data lack an optional entry for one with keyword
    tensors.
    """

    _selected_out_keys: list[Any] | None

    def forward(self, tensordict: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Returns the losses and metrics of a batch: ``out_keys``; the input is unchanged.

        Args:
            tensordict: the data, of any batch size, with the entries that ``in_keys`` lists.
            *args: instead of a TensorDict, tensors in the order of ``in_keys``; the result is a
                tuple in the order of ``out_keys``.
            **kwargs: tensors by their key, nested keys joined with ``"_"``.

        Raises:
            MissingKeyError: an entry is not there, or a whole group's.
            ShapeError: an entry has a shape that would have to be broadcast.
            GraphError: a stored entry requires grad.
            NonFiniteError, ConfigError: under ``validate=True``, what the stored values show.
        """
        if is_tree(tensordict) and not args and not kwargs:
            return self._outputs(tensordict)
        first = () if tensordict is None else (tensordict,)
        return self._dispatched(*first, *args, **kwargs)

    @dispatch
    def _dispatched(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Returns the outputs of a batch that is given as tensors."""
        return self._outputs(tensordict)

    def _outputs(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Returns the losses and metrics of a batch."""
        raise NotImplementedError

    @property
    def out_keys(self) -> list[Any]:
        """Names of exactly what a call returns."""
        return self._all_out_keys() if self._selected_out_keys is None else self._selected_out_keys

    @out_keys.setter
    def out_keys(self, values: list[Any] | None) -> None:
        self._selected_out_keys = values

    def _all_out_keys(self) -> list[str]:
        """Names of all outputs."""
        raise NotImplementedError

    def select_out_keys(self, *out_keys: str) -> Any:
        """Makes calls return these outputs alone; returns the loss.

        Raises:
            ConfigError: a name that is not among ``out_keys``.
        """
        for key in out_keys:
            if key not in self.out_keys:
                raise ConfigError(
                    f"select_out_keys: unknown output {key!r}; the outputs are "
                    f"{', '.join(map(repr, self.out_keys))}."
                )
        self.out_keys = list(out_keys)
        if only_selected not in self._forward_hooks.values():
            self.register_forward_hook(only_selected)
        return self

    def reset_out_keys(self) -> Any:
        """Makes calls return every output again; returns the loss."""
        self.out_keys = None
        for number, hook in list(self._forward_hooks.items()):
            if hook is only_selected:
                del self._forward_hooks[number]
        return self

    @property
    def out_keys_source(self) -> list[str]:
        """Names of all outputs, selected or not."""
        return list(self._all_out_keys())


def only_selected(loss: Any, _: Any, out: Any) -> Any:
    """Returns the outputs that the loss's user selected; a tuple holds no other ones."""
    return out.select(*loss.out_keys) if isinstance(out, TensorDictBase) else out


def packed(entries: dict[str, Tensor]) -> TensorDict:
    """Returns outputs as a TensorDict of batch size ``[]``, without looking at each again."""
    return cast(TensorDict, TensorDict._new_unsafe(entries, batch_size=torch.Size(())))
