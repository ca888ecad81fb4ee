"""Random policies, options and batches for the property tests.

A ``Problem`` is plain values that hypothesis draws and shrinks; ``worlds.build`` makes it a policy
and data. No formula of a loss stands here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as tf
from hypothesis import strategies as st
from torch import Tensor, nn
from torch import distributions as D
from torchrl.modules import IndependentNormal, MaskedCategorical, TanhNormal

from tests.cases.builders_ab import bare

Path = tuple[str, ...]
F64 = torch.float64
OBS = 3

# --- families -------------------------------------------------------------------------------------


def logits(raw: Tensor) -> dict[str, Tensor]:
    return {"logits": raw}


def positive(*names: str, least: float) -> Callable[[Tensor], dict[str, Tensor]]:
    """Parameters that are all positive, an equal share of the raw output each."""

    def split(raw: Tensor) -> dict[str, Tensor]:
        parts = raw.chunk(len(names), -1)
        return {name: tf.softplus(part) + least for name, part in zip(names, parts, strict=True)}

    return split


def loc_scale(raw: Tensor) -> dict[str, Tensor]:
    loc, scale = raw.chunk(2, -1)
    return {"loc": loc / 2, "scale": tf.softplus(scale) / 2 + 0.2}


@dataclass(frozen=True)
class Kind:
    """A family: its class, its name in the reference, and its parameters from ``width(n)`` numbers.

    ``scalar``: n = 0 is allowed, an action without event dims.
    """

    cls: Any
    reference: str
    parameters: Callable[[Tensor], dict[str, Tensor]]
    width: Callable[[int], int]
    scalar: bool = False


def twice(n: int) -> int:
    return 2 * max(n, 1)


def one_more(n: int) -> int:
    return n + 1


KINDS: dict[str, Kind] = {
    "categorical": Kind(D.Categorical, "categorical", logits, one_more),
    "one_hot": Kind(D.OneHotCategorical, "one_hot", logits, one_more),
    "masked": Kind(MaskedCategorical, "masked", logits, one_more),
    "normal": Kind(D.Normal, "normal", loc_scale, twice, scalar=True),
    "independent": Kind(IndependentNormal, "normal", loc_scale, twice),
    "tanh_normal": Kind(TanhNormal, "tanh_normal", loc_scale, twice),
    "bernoulli": Kind(D.Bernoulli, "bernoulli", logits, lambda n: max(n, 1), scalar=True),
    "beta": Kind(
        D.Beta,
        "beta",
        positive("concentration1", "concentration0", least=0.8),
        twice,
        scalar=True,
    ),
    "gamma": Kind(
        D.Gamma, "gamma", positive("concentration", "rate", least=0.8), twice, scalar=True
    ),
    "dirichlet": Kind(D.Dirichlet, "dirichlet", positive("concentration", least=0.8), one_more),
}


@dataclass(frozen=True)
class Head:
    """One head: the path of its action, its kind, its dims (0: a scalar) or classes less one."""

    path: Path
    kind: str
    n: int


class HeadNet(nn.Module):
    """One linear layer to a head's parameters, from the observation (and an earlier action)."""

    def __init__(self, head: Head, conditioned: bool) -> None:
        super().__init__()
        self.head, self.conditioned = head, conditioned
        self.layer = nn.Linear(OBS, KINDS[head.kind].width(head.n), dtype=F64)

    def params(self, obs: Tensor, *rest: Tensor) -> dict[str, Tensor]:
        """The parameters; ``rest``: the earlier action, the action mask."""
        inputs = list(rest)
        raw = self.layer(obs)
        if self.conditioned:
            before = inputs.pop(0).to(F64).reshape(*obs.shape[:-1], -1)
            raw = raw * (1 + before.sum(-1, keepdim=True).tanh() / 2)
        made = KINDS[self.head.kind].parameters(raw)
        if self.head.n == 0:
            made = {name: value.squeeze(-1) for name, value in made.items()}
        return made | ({"mask": inputs.pop()} if inputs else {})

    def forward(self, obs: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.params(obs, *rest).values())

    def names(self) -> list[str]:
        made = KINDS[self.head.kind].parameters(torch.zeros(4, dtype=F64))
        return [*made, *(["mask"] if self.masked else [])]

    @property
    def masked(self) -> bool:
        return self.head.kind == "masked"


# --- problems -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """Everything that was drawn.

    Attributes:
        make: how the actor is made: "single", composite by "map", "tree" or "nested", or "sequence"
            (one probabilistic module per head, later ones conditioned on the first action).
        root: batch size of the root; agents: number of agents in the group, or None.
        source: where the behaviour log-prob is: "stored", "params", "joint", or "some" stored.
        mask: how rows are masked, or None; active: heads that have a mask of their own.
        spare: whether some rows' action masks forbid every action.
        garbage: what rows and heads that do not count hold.
    """

    loss: str
    heads: tuple[Head, ...]
    make: str
    root: tuple[int, ...]
    agents: int | None
    source: str
    forced: bool
    mask: str | None
    active: tuple[int, ...]
    spare: bool
    garbage: str
    critic: bool
    seed: int
    options: Mapping[str, Any]

    @property
    def group(self) -> Path:
        return () if self.agents is None else ("agents",)

    @property
    def sample(self) -> tuple[int, ...]:
        return self.root if self.agents is None else (*self.root, self.agents)

    def key(self, *path: str) -> Any:
        return bare((*self.group, *path))

    def action(self, i: int) -> Any:
        return self.key(*self.heads[i].path)

    def names(self) -> list[str]:
        """The last element of the action key, or the whole path where that is ambiguous."""
        last = [head.path[-1] for head in self.heads]
        return [
            h.path[-1] if last.count(h.path[-1]) == 1 else "/".join((*self.group, *h.path))
            for h in self.heads
        ]

    def parameters(self, i: int) -> Path:
        """Path of the entry that holds the parameters of a head."""
        path = self.heads[i].path
        if self.make == "single":
            return self.group
        if self.make == "sequence":
            return (*self.group, f"p{i}")
        if self.make == "map":
            return (*self.group, "params", f"d{i}")
        if self.make == "tree":
            return (*self.group, "params", *self.group, *path)
        inner = [part for name in path[:-1] for part in (name, "params")]
        return (*self.group, "params", *inner, path[-1])


@st.composite
def heads(draw: st.DrawFn, most: int = 3) -> tuple[Head, ...]:
    """Up to three heads at depth 1 to 3; leaf names often coincide."""
    names = st.lists(st.sampled_from("abx"), min_size=1, max_size=3).map(tuple)
    paths: list[Path] = []
    for path in draw(st.lists(names, min_size=1, max_size=most, unique=True)):
        if all(path[: len(p)] != p and p[: len(path)] != path for p in paths):
            paths.append(path)
    made = []
    for path in paths:
        kind = draw(st.sampled_from(sorted(KINDS)))
        made.append(Head(path, kind, draw(st.integers(0 if KINDS[kind].scalar else 1, 3))))
    return tuple(made)


# Coefficients are kept in float32: numbers that it holds exactly.
EPS = st.sampled_from([0.25, 0.0625, (0.125, 0.375), (0.5, 0.0625)])
WEIGHTS = [0.5, 1.0, 2.0]


def by_head(heads: int, values: Any, *, full: bool) -> Any:
    """A mapping position → value, of all heads or of some."""
    if full:
        return st.lists(values, min_size=heads, max_size=heads).map(lambda v: dict(enumerate(v)))
    return st.dictionaries(st.integers(0, heads - 1), values)


@st.composite
def options(draw: st.DrawFn, loss: str, n: int) -> dict[str, Any]:
    """The options that the loss takes; mappings by position of the head."""
    made: dict[str, Any] = {
        "entropy": draw(
            st.sampled_from([0.0, 0.25]) | by_head(n, st.just(0.5) | st.just(0.0), full=True)
        ),
        "kind": draw(st.sampled_from(["l1", "l2", "smooth_l1"])),
        "value_clip": draw(st.sampled_from([None, 0.25])),
        "coeff": 1.0 if loss == "reinforce" else draw(st.sampled_from([0.5, 1.0])),
        "norm": None,
        "spelling": draw(st.sampled_from(["name", "action", "log_prob", "entropy"])),
    }
    if loss in ("policy", "clip", "ppo", "klpen"):
        made["norm"] = draw(
            st.sampled_from([None, "all", *(["agent"] if loss == "policy" else [])])
        )
    if loss in ("policy", "clip"):
        ratio = draw(st.sampled_from(["joint", "per_head", "leafwise", "mixed"]))
        mapping = ratio in ("per_head", "leafwise") and draw(st.booleans())
        weighted = ratio in ("per_head", "mixed") and draw(st.booleans())
        made |= {
            "ratio": ratio,
            "eps": draw(by_head(n, EPS, full=False) if mapping else EPS),
            "mix": draw(st.sampled_from([0.0, 0.25, 0.5, 1.0])),
            "dual_clip": draw(st.sampled_from([None, 1.125, 2.0])),
            "head_weights": draw(by_head(n, st.sampled_from(WEIGHTS), full=False))
            if weighted
            else None,
        }
    if loss == "klpen":
        made["beta"] = draw(st.sampled_from([0.5, 1.0]))
    return made


LOSSES = ["policy", "clip", "ppo", "klpen", "a2c", "reinforce"]


@st.composite
def problems(draw: st.DrawFn, loss: str | None = None, *, rows: bool = False) -> Problem:
    """A problem; ``rows``: with a first batch dim along which rows can be moved."""
    loss = draw(st.sampled_from(LOSSES)) if loss is None else loss
    drawn = draw(heads())
    size = st.integers(1, 3)
    root = draw(st.lists(size, min_size=int(rows), max_size=2).map(tuple))
    agents = draw(st.none() | size)
    made = draw(options(loss, len(drawn)))
    several = len(drawn) > 1
    makes = ["map", "tree", "nested", "sequence", *([] if several else ["single"])]
    sources = ["stored", "params", *(["some"] if several else [])]
    joint_ok = several and made.get("ratio", "joint") == "joint"
    sources += ["joint"] if joint_ok else []
    masks = ["agent", "agent1", "key", "shifted", "collector"]
    masks += [] if agents is None else ["root"]
    return Problem(
        loss=loss,
        heads=drawn,
        make=draw(st.sampled_from(makes)),
        root=root,
        agents=agents,
        source=draw(st.sampled_from(sources)),
        forced=draw(st.booleans()),
        mask=draw(st.none() | st.sampled_from(masks)),
        active=tuple(sorted(draw(st.sets(st.integers(0, len(drawn) - 1))))),
        spare=draw(st.booleans()),
        garbage=draw(st.sampled_from(["nan", "inf", "-inf", "huge", "mixed"])),
        critic=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
        options=made,
    )
