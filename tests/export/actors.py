"""Networks and policies to export, with the actions that they must give, computed by hand."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import (
    CompositeDistribution,
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import Tensor, nn
from torch.distributions import Categorical, Normal
from torchrl.data import Bounded
from torchrl.modules import (
    AdditiveGaussianModule,
    MaskedCategorical,
    OneHotCategorical,
    ProbabilisticActor,
    TanhNormal,
)

import composite_losses as cl
from tests.nets import builders
from tests.nets.builders import RECURRENT

A, F = 2, 4
OBSERVATION = ("agents", "observation")
RANDOM = {"default_interaction_type": InteractionType.RANDOM, "return_log_prob": True}


def network(kind: str, sharing: str) -> Any:
    """A small net; a recurrent one of one layer."""
    return builders.make(kind, sharing, **({"num_layers": 1} if kind in RECURRENT else {}))


def inputs(kind: str, *batch: int) -> tuple[Any, ...]:
    """Its arguments."""
    return builders.inputs(kind, *batch, num_layers=1)


@dataclass(frozen=True)
class Policy:
    """A policy, its example inputs for a batch size, and what it must return by name."""

    actor: nn.Module
    inputs: Callable[[int], TensorDict]
    expected: Callable[[TensorDict], dict[str, Tensor]]


class Split(nn.Module):
    """A multi-agent net whose outputs are split into parameters; some made positive."""

    def __init__(self, sizes: list[int], positive: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.net = cl.MultiAgentMLP(
            F, sum(sizes), A, centralized=False, share_params=False, depth=1, num_cells=8
        )
        self.sizes, self.positive = sizes, positive

    def forward(self, observation: Tensor) -> tuple[Tensor, ...]:
        parts = self.net(observation).split(self.sizes, -1)
        return tuple(p.exp() if i in self.positive else p for i, p in enumerate(parts))


def observed(batch: int) -> TensorDict:
    group = TensorDict({"observation": torch.randn(batch, A, F)}, [batch, A])
    return TensorDict({"agents": group}, [batch])


def composite(*, stacked: bool = False) -> Policy:
    """Squashed normal, categorical and one-hot heads in a group, nested keys."""
    net = Split([2, 2, 3, 4], (1,))
    keys = [("move", "loc"), ("move", "scale"), ("gear", "logits"), ("say", "logits")]
    actor: Any = ProbabilisticActor(
        TensorDictModule(net, [OBSERVATION], [("agents", "params", *key) for key in keys]),
        in_keys=[("agents", "params")],
        out_keys=[("agents", "action", name) for name in ("move", "gear", "say")],
        distribution_class=CompositeDistribution,
        distribution_kwargs={
            "distribution_map": {
                "move": TanhNormal,
                "gear": Categorical,
                "say": Categorical if stacked else OneHotCategorical,
            },
            "name_map": {n: ("agents", "action", n) for n in ("move", "gear", "say")},
        },
        **RANDOM,
    )
    if stacked:
        keys = [("agents", "action", name) for name in ("gear", "say")]
        actor = TensorDictSequential(actor, cl.StackHeads(keys, ("agents", "both")))

    def expected(td: TensorDict) -> dict[str, Tensor]:
        loc, _, gear, say = net(td[OBSERVATION])
        best = say.argmax(-1)
        out = {
            "agents_action_move": loc.tanh(),
            "agents_action_gear": gear.argmax(-1),
            "agents_action_say": best if stacked else nn.functional.one_hot(best, 4).bool(),
        }
        if stacked:
            out["agents_both"] = torch.stack([gear.argmax(-1), best], -1)
        return out

    return Policy(actor, observed, expected)


def single(cls: type, names: list[str], sizes: list[int], mode: Callable[..., Tensor]) -> Policy:
    """One distribution at the root."""
    net = Split(sizes, tuple(i for i, n in enumerate(names) if n == "scale"))
    actor = ProbabilisticActor(
        TensorDictModule(net, ["observation"], names),
        in_keys=names,
        distribution_class=cls,
        **RANDOM,
    )
    return Policy(
        actor,
        lambda batch: TensorDict({"observation": torch.randn(batch, A, F)}, [batch]),
        lambda td: {"action": mode(*net(td["observation"]))},
    )


def masked() -> Policy:
    """An action mask is a named input; a forbidden action is never the best."""
    net = Split([5])
    actor = ProbabilisticActor(
        TensorDictModule(net, [OBSERVATION], [("agents", "logits")]),
        in_keys={"logits": ("agents", "logits"), "mask": ("agents", "mask")},
        out_keys=[("agents", "action")],
        distribution_class=MaskedCategorical,
        **RANDOM,
    )

    def inputs(batch: int) -> TensorDict:
        td = observed(batch)
        mask = torch.rand(batch, A, 5) < 0.4
        mask[..., 0] = True
        td["agents", "mask"] = mask
        return td

    def expected(td: TensorDict) -> dict[str, Tensor]:
        (logits,) = net(td[OBSERVATION])
        best = logits.masked_fill(~td["agents", "mask"], -torch.inf).argmax(-1)
        return {"agents_action": best}

    return Policy(actor, inputs, expected)


class Joined(nn.Linear):
    """Reads the observation and an action."""

    def forward(self, observation: Tensor, gear: Tensor) -> Tensor:
        one_hot = nn.functional.one_hot(gear, 3)
        return super().forward(torch.cat([observation, one_hot], -1))


def conditioned() -> Policy:
    """The second head reads the first one's action."""
    first, joined = nn.Linear(F, 3), Joined(F + 3, 2)
    actor = ProbabilisticTensorDictSequential(
        TensorDictModule(first, ["observation"], ["gear_logits"]),
        ProbabilisticTensorDictModule(
            {"logits": "gear_logits"}, ["gear"], distribution_class=Categorical, **RANDOM
        ),
        TensorDictModule(joined, ["observation", "gear"], ["loc"]),
        TensorDictModule(lambda loc: torch.ones_like(loc), ["loc"], ["scale"]),
        ProbabilisticTensorDictModule(
            ["loc", "scale"], ["move"], distribution_class=Normal, **RANDOM
        ),
    )

    def expected(td: TensorDict) -> dict[str, Tensor]:
        gear = first(td["observation"]).argmax(-1)
        return {"gear": gear, "move": joined(td["observation"], gear)}

    return Policy(
        actor, lambda batch: TensorDict({"observation": torch.randn(batch, F)}, [batch]), expected
    )


def processed() -> Policy:
    """What follows the policy runs as well: exploration (silent) and a change of units."""
    base = single(TanhNormal, ["loc", "scale"], [2, 2], lambda loc, _: loc.tanh())
    noise = AdditiveGaussianModule(Bounded(-1.0, 1.0, (2,)), sigma_init=1.0, sigma_end=1.0)
    scaled = TensorDictModule(lambda action: 10 * action, ["action"], ["torque"])
    actor = TensorDictSequential(base.actor, noise, scaled)

    def expected(td: TensorDict) -> dict[str, Tensor]:
        action = base.expected(td)["action"]
        return {"action": action, "torque": 10 * action}

    return Policy(actor, base.inputs, expected)


def recurrent(kind: str) -> Policy:
    """A recurrent policy: its state is an input and, as ``next_…``, an output."""
    cls = cl.MultiAgentGRU if kind == "gru" else cl.MultiAgentLSTM
    net, head = cls(F, 5, A, share_params=False), nn.Linear(5, 3)
    keys = ["h"] if kind == "gru" else ["h", "c"]
    actor = ProbabilisticTensorDictSequential(
        net.as_tensordict_module(OBSERVATION, "features", keys[0] if kind == "gru" else keys),
        TensorDictModule(head, ["features"], ["logits"]),
        ProbabilisticTensorDictModule(
            {"logits": "logits"}, [("agents", "action")], distribution_class=Categorical, **RANDOM
        ),
    )

    def inputs(batch: int) -> TensorDict:
        td = observed(batch)
        for key in keys:
            td[key] = torch.randn(batch, A, 1, 5)
        td["is_init"] = torch.arange(batch).unsqueeze(-1) % 2 == 0
        return td

    def expected(td: TensorDict) -> dict[str, Tensor]:
        state = tuple(td[key] for key in keys)
        given = state[0] if kind == "gru" else state
        features, after = net(td[OBSERVATION], given, td["is_init"])
        states = [after] if kind == "gru" else list(after)
        return {
            "agents_action": head(features).argmax(-1),
            **{f"next_{key}": value for key, value in zip(keys, states, strict=True)},
        }

    return Policy(actor, inputs, expected)


POLICIES: dict[str, Callable[[], Policy]] = {
    "composite": composite,
    "stacked heads": lambda: composite(stacked=True),
    "tanh normal": lambda: single(
        TanhNormal, ["loc", "scale"], [2, 2], lambda loc, scale: loc.tanh()
    ),
    "normal": lambda: single(Normal, ["loc", "scale"], [2, 2], lambda loc, scale: loc),
    "categorical": lambda: single(Categorical, ["logits"], [3], lambda logits: logits.argmax(-1)),
    "masked": masked,
    "conditioned": conditioned,
    "processed": processed,
    "gru": lambda: recurrent("gru"),
    "lstm": lambda: recurrent("lstm"),
}
