"""GroupLoss under DDP: two ranks learn what one process learns, whatever a group lacks on one."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import composite_losses as cl
from tests.cases.builders_groups import (
    SIX,
    STONE,
    TWO,
    Spec,
    alive_masks,
    make_data,
    member,
    total,
)
from tests.distributed.launch import RANKS, on_ranks

pytestmark = pytest.mark.slow
ROWS = 3  # of each rank, times 5 steps
SPECS: dict[str, dict[str, Spec]] = {
    "two": TWO,
    "six": SIX,
    "penalty": {"stone": STONE, "prey": TWO["prey"]},
}
SITUATIONS = ("all", "uneven", "empty", "inactive", "weighted", "shared")
JOBS = [("two", situation) for situation in SITUATIONS]
JOBS += [("six", situation) for situation in ("all", "uneven", "empty")]
# the groups that each rank's data lack
SKIPPED: dict[tuple[str, str], tuple[tuple[str, ...], ...]] = {
    ("two", "skipped"): ((), ("hunter",)),
    ("two", "skipped apart"): (("prey",), ("hunter",)),
    ("two", "skipped value clip"): ((), ("hunter",)),
    ("two", "skipped per agent"): ((), ("hunter",)),
    ("two", "skipped shared"): ((), ("hunter",)),
    ("penalty", "skipped"): ((), ("stone",)),
    ("six", "skipped"): (("drone", "mouse", "stone"), ("hunter", "tree")),
}


def make_loss(specs: dict[str, Spec], situation: str) -> Any:
    """Members without per-batch statistics, which no rank can know of the others."""
    losses = {}
    for name, spec in specs.items():
        options: dict[str, Any] = {"functional": False, "sync_counts": True}
        if spec.make in ("MAPPOLoss", "IPPOLoss"):
            options["normalize_advantage"] = False
        if name == "hunter" and situation == "skipped value clip":
            options["clip_value"] = 0.2
        if name == "hunter" and situation == "skipped per agent":
            options["normalize_advantage"] = True  # one rank has all of its rows
        losses[name] = member(name, spec, **options)
    if situation.endswith("shared"):  # one layer in both critics
        nets = [loss.critic_network.module.net for loss in losses.values()]
        nets[1][2] = nets[0][2]
    coeff = {"hunter": 0.25, "prey": 3.0} if situation == "weighted" else None
    missing = "skip" if situation.startswith("skipped") else "error"
    return cl.GroupLoss(losses, coeff=coeff, missing=missing).eval()  # no penalty adapts


def problem(job: tuple[str, str]) -> tuple[Any, list[TensorDict]]:
    """The loss and each rank's share of the rows, the same in every process."""
    specs, situation = SPECS[job[0]], job[1]
    loss, data = make_loss(specs, situation), make_data(specs, (RANKS * ROWS, 5))
    if situation in ("uneven", "empty"):
        for name, mask in alive_masks(specs, (RANKS * ROWS, 5)).items():
            mask[0, :4] = False
            if situation == "empty" and name in ("hunter", "tree"):
                mask[ROWS:] = False  # nobody of this group lives on the second rank
            data[name, "alive"] = mask
            loss.set_keys(name, agent_mask=(name, "alive"))
    if situation == "inactive":
        acts = torch.ones(RANKS * ROWS, 5, TWO["hunter"].agents, dtype=torch.bool)
        acts[ROWS:] = False  # "gear" acts nowhere on the second rank
        data["hunter", "acts"] = acts
        loss.set_keys("hunter", head_active={"gear": ("hunter", "acts")})
    shares, absent = list(data.split(ROWS)), SKIPPED.get(job, ((), ()))
    return loss, [without(share, names) for share, names in zip(shares, absent, strict=True)]


def without(data: TensorDict, names: Any) -> TensorDict:
    return data.exclude(*names, *(("next", name) for name in names))


def whole(job: tuple[str, str]) -> tuple[Any, dict[str, Tensor]]:
    """The loss of all rows in one process, and the gradient of every parameter."""
    loss, shares = problem(job)
    if job in SKIPPED:  # a group's rows are those of the ranks that have it
        for name, each in loss.losses.items():
            others = [other for other in loss.losses if other != name]
            total(each(torch.cat([without(s, others) for s in shares if name in s]))).backward()
    else:
        total(loss(torch.cat(shares))).backward()
    return loss, {name: p.grad for name, p in loss.named_parameters()}


def work(rank: int, jobs: list[tuple[str, str]]) -> dict[str, dict[str, Tensor]]:
    """Job → parameter → gradient after backward through DDP."""
    found = {}
    for job in jobs:
        loss, shares = problem(job)
        wrapped = DistributedDataParallel(loss).eval()
        for _ in range(2):  # an error about unused parameters comes with the second call
            wrapped.zero_grad(set_to_none=True)
            total(wrapped(shares[rank])).backward()
        found["-".join(job)] = {name: p.grad for name, p in loss.named_parameters()}
    return found


@pytest.fixture(scope="module")
def gradients(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of each rank, in all situations in which every rank has every group."""
    return on_ranks(work, tmp_path_factory.mktemp("groups"), JOBS)


@pytest.fixture(scope="module")
def skipped(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of each rank, where some have no entry of a group."""
    return on_ranks(work, tmp_path_factory.mktemp("skipped"), list(SKIPPED), seconds=15)


def check(job: tuple[str, str], ranks: Any) -> None:
    loss, expected = whole(job)
    first, second = (each["-".join(job)] for each in ranks)
    assert list(first) == [name for name, _ in loss.named_parameters()]
    for name, value in expected.items():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], value, rtol=1e-6, atol=1e-6)
    for name in loss.losses:
        trained = [v for k, v in expected.items() if k.startswith(f"group_{name}.")]
        assert any(value.abs().max() > 1e-3 for value in trained), name


@pytest.mark.parametrize("job", JOBS, ids="-".join)
def test_gradients_of_the_whole_batch(job: tuple[str, str], gradients: Any) -> None:
    """Case 127: two gloo ranks give the gradient of one process with all rows, to 1e-6.

    With groups that differ in everything, with another number of valid agents on every rank and in
    every group (each group's mean is over its own agents of all ranks), with a group that is dead
    on one rank, a head that acts nowhere on one, group weights, and a layer that two groups share.
    """
    check(job, gradients)


@pytest.mark.parametrize("job", SKIPPED, ids="-".join)
def test_a_group_that_one_rank_did_not_meet(job: tuple[str, str], skipped: Any) -> None:
    """Cases 96, 127: with ``missing="skip"`` a rank whose data lack a group still takes part.

    The group's mean is then over the rows of the ranks that have it.
    """
    check(job, skipped)


def test_counts_are_those_of_all_ranks_only_when_asked(tmp_path: Any) -> None:
    """Without ``sync_counts`` every rank divides by its own count: the mean of two means.

    6 of 8 rows count on the first rank, 2 of 8 on the second; values 1 and 5. All rows:
    (6 · 1 + 2 · 5) / 8 = 2; the mean of the ranks' means: (1 + 5) / 2 = 3.
    """
    first, second = on_ranks(mean_of_ranks, tmp_path)
    assert first == second
    assert first == pytest.approx({True: 2.0, False: 3.0}, abs=1e-6)


def mean_of_ranks(rank: int) -> dict[bool, float]:
    """``sync_counts`` → mean over the ranks of a loss that is −advantage at ratio 1."""
    found = {}
    for sync in (True, False):
        loss = member("prey", TWO["prey"], functional=False, sync_counts=sync, entropy_coeff=0.0,
                      normalize_advantage=False)  # fmt: skip
        data = make_data({"prey": TWO["prey"]}, (2, 2))
        loss.set_keys(advantage=("prey", "advantage"), value_target=("prey", "value_target"),
                      value=("prey", "state_value"), agent_mask=("prey", "alive"))  # fmt: skip
        alive = torch.arange(8) < (6 if rank == 0 else 2)
        data["prey", "alive"] = alive.view(2, 2, 2)
        data["prey", "advantage"] = torch.full((2, 2, 2, 1), -1.0 if rank == 0 else -5.0)
        current = loss.log_probs(data)["current", "prey", "action"].detach()
        data["prey", "action_log_prob"] = current
        value = loss(data)["loss_objective"].detach()
        torch.distributed.all_reduce(value)
        found[sync] = value.item() / RANKS
    return found
