"""Multi-agent recurrent networks: GRU and LSTM with parameters per set, state in and out."""

from __future__ import annotations

import abc
import math
from typing import Any

import torch
from torch import Tensor, nn

from composite_losses.errors import ShapeError
from composite_losses.nets._torchrl import RecurrentModule
from composite_losses.nets.base import Sharing, agent_sets
from composite_losses.nets.products import chosen, products

State = tuple[Tensor, ...]


class MultiAgentRNN(nn.Module, abc.ABC):
    """A recurrent network per agent; abstract.

    Parameters, with ``G`` gates and ``M`` sets: ``weight_ih_l{k} [M, G·H, in]``,
    ``weight_hh_l{k} [M, G·H, H]``, ``bias_ih_l{k}`` and ``bias_hh_l{k} [M, G·H]``, initialised and
    ordered as in ``nn.GRU`` and ``nn.LSTM``.
    """

    is_recurrent = True
    gates: int
    states: int
    module: type[nn.GRU] | type[nn.LSTM]
    _index: Tensor | None

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        n_agents: int,
        *,
        share_params: Sharing,
        num_layers: int = 1,
        device: torch.device | str | None = None,
    ) -> None:
        """Creates and initialises the parameters."""
        super().__init__()
        self.input_size, self.hidden_size = input_size, hidden_size
        self.n_agents, self.num_layers = n_agents, num_layers
        self.share_params = share_params if isinstance(share_params, bool) else tuple(share_params)
        self.sets = agent_sets(share_params, n_agents)
        self.n_sets = max(self.sets) + 1
        identity = self.sets == tuple(range(n_agents))
        index = None if identity or self.n_sets == 1 else torch.tensor(self.sets)
        self.register_buffer("_index", index, persistent=False)
        width = self.gates * hidden_size
        for layer in range(num_layers):
            size = input_size if layer == 0 else hidden_size
            shapes = {
                "weight_ih": (width, size),
                "weight_hh": (width, hidden_size),
                "bias_ih": (width,),
                "bias_hh": (width,),
            }
            for name, shape in shapes.items():
                tensor = torch.empty(self.n_sets, *shape, device=device)
                self.register_parameter(f"{name}_l{layer}", nn.Parameter(tensor))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws new parameters, uniform in ±1/√hidden_size; unshared agents differ again."""
        bound = 1 / math.sqrt(self.hidden_size) if self.hidden_size > 0 else 0.0
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    # --- one step and a sequence ----------------------------------------------------------------

    def forward(self, x: Tensor, hidden: Any = None, is_init: Tensor | None = None) -> Any:
        """Returns (output ``[*B, A, H]``, next hidden state) of one step.

        Args:
            x: inputs ``[*B, A, F]``.
            hidden: state ``[*B, A, num_layers, H]`` (for an LSTM the pair (h, c)); zeros if None.
            is_init: ``[*B, 1]`` or ``[*B, A, 1]``, True where the state is zeroed before the step.

        Raises:
            ShapeError: another number of agents or features.
        """
        y, state = self._scan(x.unsqueeze(-3), hidden, self._flags(x, is_init, None))
        return y.squeeze(-3), self._given(state)

    def sequence(self, x: Tensor, hidden: Any = None, is_init: Tensor | None = None) -> Any:
        """Returns (outputs ``[*B, T, A, H]``, final hidden state) of a sequence.

        Args:
            x: inputs ``[*B, T, A, F]``.
            hidden: state before the first step; zeros if None.
            is_init: ``[*B, T, 1]`` or ``[*B, T, A, 1]``, True where the state is zeroed *before* a
                step, so that resets in mid-sequence equal running the pieces apart.

        Raises:
            ShapeError: another number of agents or features.
        """
        if x.ndim < 3:
            raise ShapeError(
                f"{type(self).__name__}.sequence: expected [*B, T, A, F], found {list(x.shape)}."
            )
        y, state = self._scan(x, hidden, self._flags(x, is_init, x.shape[-3]))
        return y, self._given(state)

    def restarted(self, x: Tensor, stored: Any, is_init: Tensor) -> Any:
        """Returns what ``sequence`` does where a step at ``is_init`` starts from its stored state.

        Args:
            x: inputs ``[*B, T, A, F]``.
            stored: the state before every step, ``[*B, T, A, num_layers, H]``.
            is_init: ``[*B, T, 1]`` or ``[*B, T, A, 1]``.
        """
        given = (stored,) if isinstance(stored, Tensor) else tuple(stored)
        first = tuple(s.select(x.ndim - 3, 0) for s in given)
        y, state = self._scan(x, first, self._flags(x, is_init, x.shape[-3]), given)
        return y, self._given(state)

    def _flags(self, x: Tensor, is_init: Tensor | None, steps: int | None) -> Tensor | None:
        """Returns ``is_init`` as ``[*B, T, A or 1, 1]``, T = 1 for one step."""
        if is_init is None:
            return None
        lead = x.shape[:-2]
        if is_init.shape == (*lead, 1):
            flags = is_init.unsqueeze(-2)
        elif is_init.shape == (*lead, x.shape[-2], 1):
            flags = is_init
        else:
            raise ShapeError(
                f"is_init: expected shape {[*lead, 1]} or {[*lead, x.shape[-2], 1]}, found "
                f"{list(is_init.shape)}."
            )
        return (flags if steps is not None else flags.unsqueeze(-3)).bool()

    def _scan(
        self, x: Tensor, hidden: Any, flags: Tensor | None, stored: State | None = None
    ) -> tuple[Tensor, State]:
        """Returns outputs ``[*B, T, A, H]`` and the final state, ``[*B, A, L, H]`` per tensor."""
        agents = x.shape[-2]
        if x.shape[-1] != self.input_size or (
            self.share_params is not True and agents != self.n_agents
        ):
            raise ShapeError(
                f"{type(self).__name__}: expected {self.n_agents} agents with {self.input_size} "
                f"features, found {agents} with {x.shape[-1]} in {list(x.shape)}."
            )
        batch, steps = x.shape[:-3], x.shape[-3]
        rows = x.reshape(-1, *x.shape[-3:]).movedim(-2, 0)
        state = self._state(hidden, rows, (*batch, agents))
        if flags is not None:
            wide = flags.expand(*batch, steps, agents, 1)
            flags = wide.reshape(-1, steps, agents, 1).movedim(-2, 0)
        restarts = tuple(s.reshape(-1, *s.shape[-4:]).movedim(-3, 0) for s in stored or ())
        finals: list[State] = []
        layer_input = rows
        for layer in range(self.num_layers):
            first = tuple(s[:, :, layer] for s in state)
            again = tuple(s[:, :, :, layer] for s in restarts)
            layer_input, last = self._layer(layer, layer_input, first, flags, again)
            finals.append(last)
        out = layer_input.movedim(0, -2).reshape(*batch, steps, agents, self.hidden_size)
        stacked = tuple(
            torch.stack([final[i] for final in finals], 2)
            .movedim(0, 1)
            .reshape(*batch, agents, self.num_layers, self.hidden_size)
            for i in range(self.states)
        )
        return out, stacked

    def _layer(
        self, layer: int, x: Tensor, state: State, flags: Tensor | None, restarts: State
    ) -> tuple[Tensor, State]:
        """Returns outputs ``[A, N, T, H]`` and the last state of one layer over time."""
        blocks, rows, steps, _ = x.shape
        w_ih, w_hh, b_ih, b_hh = (
            chosen(getattr(self, f"{name}_l{layer}"), self._index)
            for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        # the inputs' gates of all steps in one product
        inputs = products(x.reshape(blocks, -1, x.shape[-1]), w_ih, b_ih)
        inputs = inputs.reshape(blocks, rows, steps, -1)
        outputs = []
        for t in range(steps):
            if flags is not None:
                # chosen, not multiplied by 0: a NaN must not outlive the reset
                new = [r[:, :, t] for r in restarts] or [x.new_zeros(())] * self.states
                state = tuple(
                    torch.where(flags[:, :, t], n, s) for n, s in zip(new, state, strict=True)
                )
            gates = products(state[0], w_hh, b_hh)
            state = self._cell(inputs[:, :, t], gates, state)
            outputs.append(state[0])
        return torch.stack(outputs, 2), state

    @abc.abstractmethod
    def _cell(self, inputs: Tensor, gates: Tensor, state: State) -> State:
        """Returns the next state from the gates of input and state."""

    def _state(self, hidden: Any, rows: Tensor, lead: tuple[int, ...]) -> State:
        """Returns the state as tensors ``[A, N, L, H]``; ``lead`` is ``[*B, A]``."""
        size = (self.num_layers, self.hidden_size)
        if hidden is None:
            shape = (lead[-1], rows.shape[1], *size)
            return tuple(rows.new_zeros(shape) for _ in range(self.states))
        given = (hidden,) if isinstance(hidden, Tensor) else tuple(hidden)
        if len(given) != self.states or any(t.shape != (*lead, *size) for t in given):
            raise ShapeError(
                f"{type(self).__name__}: expected {self.states} hidden tensor(s) "
                f"{[*lead, *size]}, found {[list(t.shape) for t in given]}."
            )
        return tuple(t.reshape(-1, lead[-1], *size).movedim(1, 0) for t in given)

    def _given(self, state: State) -> Any:
        """Returns the state as the caller holds it: one tensor, or the pair."""
        return state[0] if self.states == 1 else state

    # --- views ----------------------------------------------------------------------------------

    def agent(self, position: int) -> nn.RNNBase:
        """Returns agent ``position``'s network as ``nn.GRU``/``nn.LSTM`` that shares its memory.

        In-place writes are seen both ways; gradients do not flow back through the view.
        """
        index = self.sets[position]
        view = self.module(
            self.input_size, self.hidden_size, self.num_layers, batch_first=True, device="meta"
        )
        for name, parameter in self.named_parameters():
            setattr(view, name, nn.Parameter(parameter.data[index]))
        return view

    def as_tensordict_module(
        self, in_key: Any, out_key: Any, hidden_key: Any, is_init_key: Any = "is_init"
    ) -> RecurrentModule:
        """Returns this net as a TensorDict module under TorchRL's recurrent-mode protocol.

        Args:
            in_key: inputs ``[*B, A, F]``.
            out_key: outputs ``[*B, A, H]``.
            hidden_key: the state; for an LSTM a list of two keys.
            is_init_key: where ``InitTracker`` writes resets.
        """
        return RecurrentModule(self, in_key, out_key, hidden_key, is_init_key)

    def extra_repr(self) -> str:
        """Returns sizes, agents and sharing."""
        return (
            f"{self.input_size}, {self.hidden_size}, num_layers={self.num_layers}, "
            f"n_agents={self.n_agents}, share_params={self.share_params}, n_sets={self.n_sets}"
        )


class MultiAgentGRU(MultiAgentRNN):
    """A GRU per agent, equal to ``nn.GRU`` run per agent.

    Args:
        input_size: features of one agent.
        hidden_size: size of the state.
        n_agents: number of agents.
        share_params: True, False, or the set of each agent.
        num_layers: number of layers.
        device: device of the parameters.

    Shapes:
        Inputs ``[*B, A, F]``, outputs ``[*B, A, H]``, state ``[*B, A, num_layers, H]``; A agents,
        F features of each and H the ``hidden_size``.

    Raises:
        ConfigError: a mapping in ``share_params`` that is not one set per agent, numbered from 0.
        ShapeError: (call) another number of features, or of agents unless all share one set.

    Source: Cho et al. 2014, "Learning phrase representations using RNN encoder-decoder for
    statistical machine translation", arXiv 1406.1078.
    """

    gates = 3
    states = 1
    module = nn.GRU

    def _cell(self, inputs: Tensor, gates: Tensor, state: State) -> State:
        """Returns h' = (1 − z) n + z h."""
        input_r, input_z, input_n = inputs.chunk(3, -1)
        hidden_r, hidden_z, hidden_n = gates.chunk(3, -1)
        reset = torch.sigmoid(input_r + hidden_r)
        update = torch.sigmoid(input_z + hidden_z)
        new = torch.tanh(input_n + reset * hidden_n)
        return (new + update * (state[0] - new),)


class MultiAgentLSTM(MultiAgentRNN):
    """An LSTM per agent, equal to ``nn.LSTM`` run per agent.

    The hidden state is the pair (h, c).

    Args:
        input_size: features of one agent.
        hidden_size: size of the state.
        n_agents: number of agents.
        share_params: True, False, or the set of each agent.
        num_layers: number of layers.
        device: device of the parameters.

    Shapes:
        Inputs ``[*B, A, F]``, outputs ``[*B, A, H]``, h and c ``[*B, A, num_layers, H]``; A agents,
        F features of each and H the ``hidden_size``.

    Raises:
        ConfigError: a mapping in ``share_params`` that is not one set per agent, numbered from 0.
        ShapeError: (call) another number of features, or of agents unless all share one set.

    Source: Hochreiter and Schmidhuber 1997, "Long short-term memory", Neural Computation 9(8).
    """

    gates = 4
    states = 2
    module = nn.LSTM

    def _cell(self, inputs: Tensor, gates: Tensor, state: State) -> State:
        """Returns (h', c')."""
        enter, forget, cell, out = (inputs + gates).chunk(4, -1)
        memory = torch.sigmoid(forget) * state[1] + torch.sigmoid(enter) * torch.tanh(cell)
        return torch.sigmoid(out) * torch.tanh(memory), memory
