"""Actors of every supported kind over one small network, for the tests of heads.

Each writes a categorical "gear" of three and a two-dim normal "move", under keys of its own.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    CompositeDistribution,
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from torch import Tensor, nn
from torch import distributions as D
from torchrl.modules import ProbabilisticActor

OBS = 4
RANDOM = {"return_log_prob": True, "default_interaction_type": InteractionType.RANDOM}
LEAVES = [("gear", "logits"), ("move", "loc"), ("move", "scale")]
KINDS = {"gear": D.Categorical, "move": D.Normal}


class Net(nn.Module):
    """logits, loc and scale; counts how often it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(OBS, 7)
        self.calls = 0

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.calls += 1
        logits, loc, scale = self.layer(observation).split([3, 2, 2], -1)
        return logits, loc, scale.exp()


class Later(nn.Module):
    """loc and scale from the observation and the gear that was chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(OBS + 3, 4)

    def forward(self, observation: Tensor, gear: Tensor) -> tuple[Tensor, Tensor]:
        chosen = nn.functional.one_hot(gear, 3).to(observation.dtype)
        loc, scale = self.layer(torch.cat([observation, chosen], -1)).chunk(2, -1)
        return loc, scale.exp()


def composite(net: nn.Module, *, prefix: Any = (), out_keys: Any = None, **kwargs: Any) -> Any:
    """A composite actor whose parameters lie under "params"."""
    module = TensorDictModule(net, ["observation"], [("params", *prefix, *leaf) for leaf in LEAVES])
    cls = kwargs.pop("cls", CompositeDistribution)
    options = kwargs.pop("options", {"distribution_map": KINDS})
    extra = {"out_keys": out_keys} if out_keys is not None else {}
    return ProbabilisticActor(
        module,
        in_keys=["params"],
        distribution_class=cls,
        distribution_kwargs=options,
        **RANDOM,
        **extra,
        **kwargs,
    )


def head(in_keys: list[Any], action: Any, cls: Any, **kwargs: Any) -> ProbabilisticTensorDictModule:
    return ProbabilisticTensorDictModule(
        in_keys=in_keys, out_keys=[action], distribution_class=cls, **RANDOM, **kwargs
    )


def flat(net: nn.Module) -> Any:
    return composite(net)


def mapped(net: nn.Module) -> Any:
    names = {"gear": ("action", "g"), "move": ("action", "m")}
    return composite(
        net, out_keys=list(names.values()), options={"distribution_map": KINDS, "name_map": names}
    )


def declared(net: nn.Module) -> Any:
    return composite(net, out_keys=["move", "gear"], log_prob_keys=["lp_move", ("lp", "gear")])


def keyed(net: nn.Module) -> Any:
    """Nested keys of the distribution map itself."""
    kinds = {("arm", "gear"): D.Categorical, ("arm", "move"): D.Normal}
    return composite(net, prefix=("arm",), options={"distribution_map": kinds})


def nested(net: nn.Module) -> Any:
    """A composite inside a composite inside a composite."""
    inner = functools.partial(CompositeDistribution, distribution_map=KINDS)
    outer = functools.partial(CompositeDistribution, distribution_map={"hand": inner})
    prefix = ("body", "params", "hand", "params")
    return composite(net, prefix=prefix, options={"distribution_map": {"body": outer}})


def partial(net: nn.Module) -> Any:
    return composite(
        net, cls=functools.partial(CompositeDistribution, distribution_map=KINDS), options={}
    )


def several(net: nn.Module) -> Any:
    """Two probabilistic modules; the second's network reads the first's action."""
    later = Later()
    first = TensorDictModule(lambda observation: net(observation)[0], ["observation"], ["logits"])
    return ProbabilisticTensorDictSequential(
        first,
        head(["logits"], "gear", D.Categorical, log_prob_key="gear_log_prob"),
        TensorDictModule(later, ["observation", "gear"], ["loc", "scale"]),
        head(["loc", "scale"], "move", D.Normal, log_prob_key="move_log_prob"),
    )


def separate(net: nn.Module) -> Any:
    """Two probabilistic modules side by side, in a sequence inside a sequence."""
    module = TensorDictModule(net, ["observation"], ["logits", "loc", "scale"])
    inner = ProbabilisticTensorDictSequential(
        module, head(["logits"], "gear", D.Categorical, log_prob_key="gear_log_prob")
    )
    return ProbabilisticTensorDictSequential(
        TensorDictSequential(inner),
        head(["loc", "scale"], "move", D.Normal, log_prob_key="move_log_prob"),
    )


def make_composite(params: TensorDictBase) -> CompositeDistribution:
    return CompositeDistribution(params, distribution_map=KINDS)


def lazy(net: nn.Module) -> Any:
    """A function makes the composite: only a call shows its heads."""
    return composite(net, out_keys=["gear", "move"], cls=make_composite, options={})


def make_nested(params: TensorDictBase) -> CompositeDistribution:
    inner = functools.partial(CompositeDistribution, distribution_map=KINDS)
    return CompositeDistribution(params, distribution_map={"hand": inner})


def hidden(net: nn.Module) -> Any:
    """A function makes a composite inside a composite, under one declared key."""
    prefix = ("hand", "params")
    return composite(net, prefix=prefix, out_keys=["hand"], cls=make_nested, options={})


class Opaque(TensorDictModuleBase):
    """A policy that only has ``get_dist``."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.in_keys, self.out_keys = ["observation"], ["gear", "move"]

    def get_dist(self, td: TensorDictBase) -> CompositeDistribution:
        logits, loc, scale = self.net(td["observation"])
        params = TensorDict(
            {"gear": {"logits": logits}, "move": {"loc": loc, "scale": scale}}, td.batch_size
        )
        return make_composite(params)


@dataclass(frozen=True)
class Kind:
    """An actor and what it declares.

    ``gear``, ``move``: action keys; ``log_probs``: the first key tried for each; ``parameters``:
    the entries of distribution parameters; ``settled``: whether no run is needed to know the heads.
    """

    make: Callable[[nn.Module], Any]
    gear: Any = "gear"
    move: Any = "move"
    log_probs: tuple[Any, Any] = ("gear_log_prob", "move_log_prob")
    parameters: tuple[Any, ...] = ("params",)
    settled: bool = True


ACTORS: dict[str, Kind] = {
    "flat": Kind(flat),
    "mapped": Kind(
        mapped,
        ("action", "g"),
        ("action", "m"),
        (("action", "g_log_prob"), ("action", "m_log_prob")),
    ),
    "declared": Kind(declared, log_probs=(("lp", "gear"), "lp_move")),
    "keyed": Kind(
        keyed,
        ("arm", "gear"),
        ("arm", "move"),
        (("arm", "gear_log_prob"), ("arm", "move_log_prob")),
    ),
    "nested": Kind(
        nested,
        ("body", "hand", "gear"),
        ("body", "hand", "move"),
        (("body", "hand", "gear_log_prob"), ("body", "hand", "move_log_prob")),
    ),
    "partial": Kind(partial),
    "several": Kind(several, parameters=("logits", "loc", "scale")),
    "separate": Kind(separate, parameters=("logits", "loc", "scale")),
    "lazy": Kind(lazy, settled=False),
    "hidden": Kind(
        hidden,
        ("hand", "gear"),
        ("hand", "move"),
        (("hand", "gear_log_prob"), ("hand", "move_log_prob")),
        settled=False,
    ),
    "opaque": Kind(Opaque, parameters=(), settled=False),
}


def data(*batch: int) -> TensorDict:
    return TensorDict({"observation": torch.randn(*batch, OBS)}, batch)


def collected(actor: Any, *batch: int) -> TensorDict:
    """A rollout of one step: actions, log-probs and parameters."""
    with torch.no_grad():
        return actor(data(*batch))
