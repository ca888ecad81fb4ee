"""What the networks take from TorchRL: its nets, and its recurrent-mode protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torch._C._functorch import is_batchedtensor
from torchrl.data import Composite, Unbounded
from torchrl.envs import TensorDictPrimer
from torchrl.modules import MultiAgentConvNet as TorchRLConvNet
from torchrl.modules import MultiAgentMLP as TorchRLMLP
from torchrl.modules.tensordict_module.rnn import recurrent_mode

from composite_losses.errors import ConfigError, ShapeError


class RecurrentModule(TensorDictModuleBase):
    """A multi-agent recurrent network under TorchRL's recurrent-mode protocol.

    Outside recurrent mode it takes one step and writes the next state under
    ``("next", hidden_key)``. In recurrent mode the last batch dim is time: the stored state of the
    first step starts the sequence and ``is_init`` resets it; the final state is written at the last
    step, zeros before. TorchRL's value estimators call a critic by vmap over root and next data and
    mark both alike; the next data's marked steps start from the state stored there, the one after
    the first step, so under vmap a marked step starts from its stored state.

    Args:
        net: ``MultiAgentGRU`` or ``MultiAgentLSTM``.
        in_key: inputs ``[*B, A, F]``.
        out_key: outputs ``[*B, A, H]``.
        hidden_key: the state ``[*B, A, num_layers, H]``; for an LSTM a list of two keys.
        is_init_key: ``[*B, 1]`` or ``[*B, A, 1]``, as TorchRL's ``InitTracker`` writes it.

    Raises:
        ConfigError: another number of hidden keys than the net has states.
        ShapeError: (call) inputs without a time dim in recurrent mode, or what the net refuses.

    Source: TorchRL's ``torchrl.modules.LSTMModule`` and ``set_recurrent_mode``.
    """

    is_recurrent = True

    def __init__(
        self,
        net: Any,
        in_key: NestedKey,
        out_key: NestedKey,
        hidden_key: NestedKey | Sequence[NestedKey],
        is_init_key: NestedKey = "is_init",
    ) -> None:
        """Keeps the net and its keys."""
        super().__init__()
        single = isinstance(hidden_key, str) or (isinstance(hidden_key, tuple) and net.states == 1)
        hidden = [hidden_key] if single else list(hidden_key)
        if len(hidden) != net.states:
            raise ConfigError(
                f"hidden_key: expected {net.states} key(s) for {type(net).__name__}, found "
                f"{hidden}."
            )
        self.net = net
        self.hidden_keys: list[Any] = hidden
        self.is_init_key = is_init_key
        self.in_keys = [in_key, *hidden, is_init_key]
        self.out_keys = [out_key, *(("next", *_parts(key)) for key in hidden)]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Returns the TensorDict with output and next state."""
        x = tensordict.get(self.in_keys[0])
        flags = tensordict.get(self.is_init_key, None)
        stored = [tensordict.get(key, None) for key in self.hidden_keys]
        known = all(value is not None for value in stored)
        if recurrent_mode():
            y, states = self._over_time(x, flags, stored if known else None)
        else:
            hidden = self._hidden(stored) if known else None
            y, final = self.net(x, hidden, None if known and is_batchedtensor(x) else flags)
            states = [final] if self.net.states == 1 else list(final)
        tensordict.set(self.out_keys[0], y)
        for key, state in zip(self.out_keys[1:], states, strict=True):
            tensordict.set(key, state)
        return tensordict

    def _hidden(self, stored: Sequence[Tensor]) -> Any:
        """Returns the state as the net takes it."""
        return stored[0] if self.net.states == 1 else tuple(stored)

    def _over_time(
        self, x: Tensor, flags: Tensor | None, stored: Sequence[Tensor] | None
    ) -> tuple[Tensor, list[Tensor]]:
        """Returns outputs and states ``[*B, T, …]`` of a sequence."""
        if x.ndim < 3:
            raise ShapeError(
                f"recurrent mode: expected {self.in_keys[0]!r} as [*B, T, A, F], found "
                f"{list(x.shape)}."
            )
        dim = x.ndim - 3
        if stored is not None and flags is not None and is_batchedtensor(x):
            y, final = self.net.restarted(x, self._hidden(stored), flags)
        else:
            hidden = None
            if stored is not None:
                hidden = self._hidden([s.select(dim, 0) for s in stored])
            y, final = self.net.sequence(x, hidden, flags)
        finals = [final] if self.net.states == 1 else list(final)
        states = []
        for state in finals:
            last = state.unsqueeze(dim)
            before = [*last.shape]
            before[dim] = x.shape[dim] - 1
            states.append(torch.cat([last.new_zeros(before), last], dim))
        return y, states

    def make_tensordict_primer(self) -> TensorDictPrimer:
        """Returns the transform that adds the initial state to an environment's reset."""
        net = self.net
        shape = (net.n_agents, net.num_layers, net.hidden_size)
        return StatePrimer(
            {key: Unbounded(shape=shape) for key in self.hidden_keys}, expand_specs=True
        )


class StatePrimer(TensorDictPrimer):
    """A primer whose entries may lie in a group of agents, which has a batch size of its own."""

    def transform_input_spec(self, input_spec: Composite) -> Composite:
        """Returns the specs with the states, their groups shaped as those of the observations."""
        input_spec = super().transform_input_spec(input_spec)
        states = input_spec["full_state_spec"]
        observed = self.parent.full_observation_spec
        groups = [key for key in states.keys(True, False) if isinstance(states[key], Composite)]
        for key in groups:
            if key in observed.keys(True, False):
                states[key].shape = observed[key].shape
        return input_spec


def _parts(key: NestedKey) -> tuple[str, ...]:
    """Returns a key as a tuple."""
    return (key,) if isinstance(key, str) else tuple(key)


__all__ = ["RecurrentModule", "TorchRLConvNet", "TorchRLMLP"]
