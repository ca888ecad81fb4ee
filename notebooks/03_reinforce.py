# %% [markdown]
# # REINFORCE on the trajectory that was collected
#
# The policy gradient of a trajectory is $\sum_t \nabla\log\pi(a_t)\, G_t$: the actions $a_t$ *that
# earned* the returns $G_t$. `ReinforceLoss` scores the stored actions and never samples. Below:
# what a fresh sample in place of $a_t$ does, and what the leave-one-out baseline saves.

# %%
import matplotlib.pyplot as plt
import torch
from tensordict import TensorDict
from tensordict.nn import CompositeDistribution, InteractionType, TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torchrl.modules import ProbabilisticActor

from composite_losses import ReinforceLoss

torch.set_num_threads(1)
plt.rcParams["figure.dpi"] = 80
GAMMA, T, SEEDS = 0.95, 8, range(5)

# %% [markdown]
# A ring of five cells. Head `go` moves left, stays or moves right; head `dig` digs or not. There is
# a treasure in cell 0: digging there earns 1, digging elsewhere costs 0.2. Moving costs 0.05, and
# every step pays a wage of 1, which no action changes (and which makes the gradient noisy).

# %%
CELLS, SIZES = 5, {"go": 3, "dig": 2}


class Net(nn.Linear):
    """Logits of both heads: a table, as the observation is one-hot."""

    def __init__(self) -> None:
        super().__init__(CELLS, sum(SIZES.values()), bias=False)
        nn.init.zeros_(self.weight)

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return super().forward(observation).split(list(SIZES.values()), -1)


def make_actor() -> ProbabilisticActor:
    keys = [("params", head, "logits") for head in SIZES]
    return ProbabilisticActor(
        TensorDictModule(Net(), ["observation"], keys),
        in_keys=["params"],
        distribution_class=CompositeDistribution,
        distribution_kwargs={"distribution_map": dict.fromkeys(SIZES, Categorical)},
        default_interaction_type=InteractionType.RANDOM,
    )


@torch.no_grad()
def collect(actor: ProbabilisticActor, n: int) -> TensorDict:
    """n trajectories of T steps: observation, go, dig, reward, done."""
    cell, steps = torch.randint(CELLS, (n,)), []
    for t in range(T):
        observation = nn.functional.one_hot(cell, CELLS).float()
        step = actor(TensorDict({"observation": observation}, [n]))
        dug = torch.where(cell == 0, 1.0, -0.2) * step["dig"]
        reward = 1 + dug - 0.05 * (step["go"] != 1)
        step["next"] = {
            "reward": reward.unsqueeze(-1),
            "done": torch.full((n, 1), t == T - 1),
        }
        cell = (cell + step["go"] - 1) % CELLS
        steps.append(step.exclude("params"))
    data = torch.stack(steps, 1)
    data.names = ["trajectory", "time"]
    return data


torch.manual_seed(0)
actor = make_actor()
data = collect(actor, 64)
reinforce = ReinforceLoss(actor, gamma=GAMMA, baseline="none")

# %% [markdown]
# The loss is minus the mean over all steps of $\log\pi(a_t)\,G_t$, summed over the heads. By hand:

# %%
reward, weights = data["next", "reward"].squeeze(-1), GAMMA ** torch.arange(T)
to_go = torch.stack([(reward[:, t:] * weights[: T - t]).sum(-1) for t in range(T)], -1)
logits = dict(zip(SIZES, actor.module[0].module(data["observation"]), strict=True))
scored = sum(Categorical(logits=logits[head]).log_prob(data[head]) for head in SIZES)
state = torch.get_rng_state()
torch.testing.assert_close(reinforce(data)["loss_actor"], -(scored * to_go).mean())
assert torch.equal(state, torch.get_rng_state())  # no random number was drawn

# %% [markdown]
# ## Why resampling is wrong
#
# Score a *new* sample $a'_t \sim \pi$ with the old return. Given the state, $a'_t$ and $G_t$ are
# independent, so the expectation is $\mathbb{E}[G_t]\,\mathbb{E}[\nabla\log\pi(a'_t)] = 0$: pure
# noise. The loss still has a plausible value, and nothing crashes.


# %%
def resampled(data: TensorDict, actor: ProbabilisticActor) -> TensorDict:
    """The same returns, other actions: the fault."""
    with torch.no_grad():
        new = actor(data.select("observation"))
    return data.clone().update(new.select(*SIZES))


def gradient(loss: ReinforceLoss, data: TensorDict) -> torch.Tensor:
    parameters = list(loss.parameters())
    found = torch.autograd.grad(loss(data)["loss_actor"], parameters)
    return -torch.cat([each.flatten() for each in found])


batches = [collect(actor, 32) for _ in range(250)]
stored = torch.stack([gradient(reinforce, batch) for batch in batches])
fresh = torch.stack([gradient(reinforce, resampled(batch, actor)) for batch in batches])

dig_here = 3 + 1  # the weight from cell 0 to "dig"; rows of the table are go (3), dig (2)
position = dig_here * CELLS
figure, panel = plt.subplots(figsize=(6, 3.2), layout="constrained")
for values, name in ((stored, "stored actions"), (fresh, "resampled actions")):
    panel.hist(values[:, position].numpy(), bins=30, alpha=0.6, label=name)
panel.axvline(0, color="black", linewidth=0.8)
panel.set(title="gradient of the weight for digging on the treasure", ylabel="batches of 32")
panel.legend()
plt.show()


# %% [markdown]
# For every weight, the mean over 250 batches in its standard errors; the root mean square over the
# weights is 1 if there is nothing but noise.


# %%
def errors(values: torch.Tensor) -> float:
    of_each = values.mean(0) / (values.std(0) / len(values) ** 0.5)
    return of_each.square().mean().sqrt().item()


print(f"stored actions {errors(stored):.1f}, resampled actions {errors(fresh):.1f}")
assert errors(stored) > 3
assert errors(fresh) < 2


# %%
def train(seed: int, *, resample: bool = False, baseline: str = "none") -> list[float]:
    """Reward per step, without the wage, of every round."""
    torch.manual_seed(seed)
    actor = make_actor()
    loss = ReinforceLoss(actor, gamma=GAMMA, baseline=baseline)
    optimiser = torch.optim.Adam(loss.parameters(), lr=0.1)
    found = []
    for _ in range(40):
        data = collect(actor, 16)
        found.append(data["next", "reward"].mean().item() - 1)
        optimiser.zero_grad()
        loss(resampled(data, actor) if resample else data)["loss_actor"].backward()
        optimiser.step()
    return found


METHODS = {
    "stored actions": {},
    "resampled actions": {"resample": True},
    "leave one out": {"baseline": "leave_one_out"},
}
curves = {
    name: torch.tensor([train(seed, **options) for seed in SEEDS])
    for name, options in METHODS.items()
}
figure, panel = plt.subplots(figsize=(6, 3.2), layout="constrained")
for name, each in curves.items():
    (line,) = panel.plot(each.mean(0).numpy(), label=name)
    for curve in each.numpy():
        panel.plot(curve, color=line.get_color(), alpha=0.2, linewidth=0.8)
panel.set(
    title="five seeds and their mean", xlabel="round", ylabel="reward per step, less the wage"
)
panel.legend()
plt.show()

# %%
last = {name: each[:, -5:].mean(-1) for name, each in curves.items()}
for name, each in last.items():
    print(f"{name:18} {each.mean():6.3f} ± {each.std() / len(each) ** 0.5:.3f}")
assert last["stored actions"].mean() > last["resampled actions"].mean() + 0.15
assert last["leave one out"].mean() > last["stored actions"].mean() + 0.05

# %% [markdown]
# ## The leave-one-out baseline
#
# `baseline="leave_one_out"` subtracts the mean return of the *other* trajectories at the same step.
# It does not depend on the row's own action, so the gradient stays unbiased, and what all
# trajectories share (here the wage) is gone. `"mean"` is one number for all steps, and the row's
# own return is in it.

# %%
variance = {}
for baseline in ("none", "mean", "leave_one_out"):
    loss = ReinforceLoss(actor, gamma=GAMMA, baseline=baseline)
    found = torch.stack([gradient(loss, batch) for batch in batches])
    variance[baseline] = found.var(0).sum().item()
    print(f"{baseline:14} variance of the gradient {variance[baseline]:.4f}")
assert variance["leave_one_out"] < variance["mean"] < variance["none"]
print(f"leave-one-out saves a factor of {variance['none'] / variance['leave_one_out']:.0f}")
assert variance["none"] > 5 * variance["leave_one_out"]

# %% [markdown]
# A factor in the variance is a factor in the number of trajectories: with the baseline, that many
# times fewer give the same precision.
