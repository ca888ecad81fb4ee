"""Unusual networks and their data: echoes, recurrent, conditioned, opaque, with other inputs."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from torch import Tensor, nn
from torch import distributions as d
from torchrl.modules import GRUModule, IndependentNormal

from tests.cases.builders_fl import LOSSES, make_critic, make_data, networks


class Echo(nn.Module):
    """Returns its inputs, with a parameter that changes nothing but receives gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.zero = nn.Parameter(torch.zeros(()))

    def forward(self, *x: Tensor) -> Any:
        out = tuple(v + self.zero for v in x)
        return out if len(out) > 1 else out[0]

    @staticmethod
    def networks(*prefix: str) -> tuple[nn.Module, nn.Module]:
        """A Normal policy whose parameters, and a critic whose value, stand in the data."""

        def at(name: str) -> Any:
            return (*prefix, name) if prefix else name

        loc, scale = at("loc"), at("scale")
        net = TensorDictModule(Echo(), [at("in_loc"), at("in_scale")], [loc, scale])
        dist = ProbabilisticTensorDictModule(
            {"loc": loc, "scale": scale},
            [at("action")],
            distribution_class=IndependentNormal,
            return_log_prob=True,
            log_prob_key=at("action_log_prob"),
        )
        critic = TensorDictModule(Echo(), [at("in_value")], [at("state_value")])
        return ProbabilisticTensorDictSequential(net, dist), critic


def echo_data(
    loc: Tensor, scale: Tensor, *, log_ratio: Tensor, advantage: Tensor, target: Tensor,
    value: Tensor | None = None,
) -> TensorDict:  # fmt: skip
    """Data ``[*S]`` with the given parameters, log-ratios, advantages, targets and values."""
    action = loc + 0.3
    log_prob = d.Normal(loc, scale).log_prob(action)
    columns = {
        "in_loc": loc, "in_scale": scale, "action": action, "advantage": advantage,
        "value_target": target, "in_value": torch.zeros_like(loc) if value is None else value,
    }  # fmt: skip
    td = TensorDict({k: v.unsqueeze(-1).clone() for k, v in columns.items()}, loc.shape)
    return td.set("action_log_prob", log_prob - log_ratio)


# --- recurrent -----------------------------------------------------------------------------------


def recurrent(name: str, **options: Any) -> Any:
    """A loss whose actor and critic share a GRU's output."""
    torch.manual_seed(3)
    actor, _ = networks("normal")
    memory = GRUModule(input_size=4, hidden_size=4, in_keys=["observation", "h", "is_init"],
                       out_keys=["embedding", ("next", "h")])  # fmt: skip
    actor[0].in_keys = ["embedding"]
    critic = TensorDictModule(nn.Linear(4, 1), ["embedding"], ["state_value"])
    policy = type(actor)(memory, *actor)
    return LOSSES[name](policy, TensorDictSequential(memory, critic), **options)


def recurrent_data() -> TensorDict:
    """Three sequences of five steps, one of them with a new episode inside."""
    td = make_data("normal", (3, 5), source="all").exclude("next")
    td["is_init"] = torch.zeros(3, 5, 1, dtype=torch.bool)
    td["is_init"][:, 0] = True
    td["is_init"][2, 2] = True
    td["h"] = torch.zeros(3, 5, 1, 4)
    return td


# --- other inputs than one observation -----------------------------------------------------------


def head(params: list[str], action: str, cls: Any, **kwargs: Any) -> ProbabilisticTensorDictModule:
    return ProbabilisticTensorDictModule(
        params, [action], distribution_class=cls, distribution_kwargs=kwargs, return_log_prob=True,
        log_prob_key=f"{action}_log_prob",
    )  # fmt: skip


class Joined(nn.Linear):
    """A linear layer on all its inputs, tensors or TensorDicts, side by side."""

    def forward(self, *x: Any) -> Tensor:
        flat = [t for v in x for t in ([v] if isinstance(v, Tensor) else v.values(True, True))]
        return super().forward(torch.cat(flat, -1))


class Opaque(TensorDictModuleBase):
    """A policy that shows nothing but ``get_dist``."""

    in_keys: ClassVar = ["observation"]
    out_keys: ClassVar = ["action"]

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 2)

    def get_dist(self, td: TensorDictBase) -> d.Distribution:
        return d.Independent(d.Normal(self.net(td["observation"]), 1.0), 1)


def central_critic(agents: int) -> TensorDictModule:
    """One value per agent from the observations of all."""

    class Central(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.flatten(-2)).unsqueeze(-1)

    net = Central(4 * agents, agents)
    return TensorDictModule(net, [("agents", "observation")], [("agents", "state_value")])


def conditioned() -> tuple[nn.Module, nn.Module]:
    """The second head's network reads the first head's stored action."""
    return ProbabilisticTensorDictSequential(
        TensorDictModule(nn.Linear(4, 2), ["observation"], ["loc"]),
        head(["loc"], "move", IndependentNormal, scale=1.0),
        TensorDictModule(Joined(6, 3), ["observation", "move"], ["logits"]),
        head(["logits"], "gear", d.Categorical),
        return_composite=True,
    ), make_critic()


def normal_on(module: nn.Module, *keys: str, critic: nn.Module) -> tuple[nn.Module, nn.Module]:
    net = TensorDictModule(module, list(keys), ["loc"])
    dist = head(["loc"], "action", IndependentNormal, scale=1.0)
    value = TensorDictModule(critic, list(keys), ["state_value"])
    return ProbabilisticTensorDictSequential(net, dist), value


def scale_in_data() -> tuple[nn.Module, nn.Module]:
    """The distribution's scale stands in the data; no network writes it."""
    net = TensorDictModule(nn.Linear(4, 2), ["observation"], ["loc"])
    dist = head(["loc", "scale"], "action", IndependentNormal)
    return ProbabilisticTensorDictSequential(net, dist), make_critic()


def action_value() -> tuple[nn.Module, nn.Module]:
    actor, _ = normal_on(nn.Linear(4, 2), "observation", critic=nn.Identity())
    return actor, TensorDictModule(Joined(6, 1), ["observation", "action"], ["state_value"])


ODD: dict[str, Callable[[], tuple[nn.Module, nn.Module]]] = {
    "conditioned": conditioned,
    "embedding": lambda: normal_on(nn.Embedding(5, 2), "token", critic=nn.Embedding(5, 1)),
    "nested_observation": lambda: normal_on(Joined(4, 2), "parts", critic=Joined(4, 1)),
    "opaque": lambda: (Opaque(), make_critic()),
    "action_value": action_value,
    "scale_in_data": scale_in_data,
}


def odd_data() -> TensorDict:
    """Data ``[8]`` for all of them."""
    parts = TensorDict({"a": torch.randn(8, 1), "b": torch.randn(8, 3)}, [8])
    td = TensorDict({k: torch.randn(8, 1) for k in ("advantage", "value_target")}, [8])
    td.update({"observation": torch.randn(8, 4), "token": torch.randint(5, (8,)), "parts": parts})
    td.update(
        {"action": torch.randn(8, 2), "move": torch.randn(8, 2), "scale": torch.rand(8, 2) + 0.5}
    )
    td["gear"] = torch.randint(3, (8,))
    td.update({f"{k}_log_prob": -2 - torch.rand(8) for k in ("action", "move", "gear")})
    return td
