# %% [markdown]
# # Coming from TorchRL
#
# The class names, keywords, keys and outputs are TorchRL's. A training script with a composite
# policy changes in three lines:
#
# ```diff
# -from torchrl.objectives import ClipPPOLoss
# +from composite_losses import ClipPPOLoss
# -set_composite_lp_aggregate(False).set()      # no longer needed: the switch has no effect
# -log("entropy of gear", out["composite_entropy", "gear_entropy"])
# +log("entropy of gear", out["entropy/gear"])
# ```
#
# Below, the same script with both losses: equal numbers on well-formed data, then the situations in
# which they differ. Everything runs with the versions printed here.

# %%
import warnings
from importlib.metadata import version

import matplotlib.pyplot as plt
import torch
import torchrl.objectives
from tensordict import TensorDict
from tensordict.nn import (
    CompositeDistribution,
    InteractionType,
    TensorDictModule,
    set_composite_lp_aggregate,
)
from torch import nn
from torch.distributions import Categorical
from torchrl.modules import IndependentNormal, ProbabilisticActor, ValueOperator
from torchrl.objectives.value import GAE

import composite_losses

torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)  # rounding stays too small to change a sampled action
plt.rcParams["figure.dpi"] = 80
set_composite_lp_aggregate(False).set()  # for TorchRL's loss
print({name: version(name) for name in ("torch", "tensordict", "torchrl")})

# %% [markdown]
# ## The task
#
# Points on a plane are rewarded for coming near the origin. `move` is a direction (continuous),
# `gear` the size of the step (three choices). Episodes have eight steps.

# %%
B, T = 64, 8
KEYS = [("params", "move", "loc"), ("params", "move", "scale"), ("params", "gear", "logits")]


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        layers = [nn.Linear(3, 32), nn.Tanh(), nn.Dropout(dropout), nn.Linear(32, 7)]
        self.net = nn.Sequential(*layers)

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, ...]:
        loc, raw, gear = self.net(observation).split([2, 2, 3], -1)
        return loc, nn.functional.softplus(raw) + 0.1, gear


def make_networks(dropout: float = 0.0) -> tuple[ProbabilisticActor, ValueOperator]:
    kinds = {"move": IndependentNormal, "gear": Categorical}
    actor = ProbabilisticActor(
        TensorDictModule(Net(dropout), ["observation"], KEYS),
        in_keys=["params"],
        distribution_class=CompositeDistribution,
        distribution_kwargs={"distribution_map": kinds},
        default_interaction_type=InteractionType.RANDOM,
        return_log_prob=True,
    )
    critic = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 1))
    return actor, ValueOperator(critic, in_keys=["observation"])


@torch.no_grad()
def collect(actor: ProbabilisticActor) -> TensorDict:
    """One episode of B points."""
    point, steps = torch.rand(B, 2) * 2 - 1, []
    for t in range(T):
        step = TensorDict({"observation": torch.cat([point, torch.full((B, 1), t / T)], -1)}, [B])
        actor(step)
        # the environment clips its own copy; the stored action stays as it was sampled
        move = step["move"].clamp(-1, 1)
        point = point + 0.1 * (step["gear"].unsqueeze(-1) + 1) * move
        after = torch.cat([point, torch.full((B, 1), (t + 1) / T)], -1)
        done = torch.full((B, 1), t == T - 1)
        step["next"] = {
            "observation": after,
            "reward": -point.norm(dim=-1, keepdim=True),
            "done": done,
            "terminated": torch.zeros_like(done),
        }
        steps.append(step)
    data = torch.stack(steps, 1)
    data.names = [None, "time"]
    return data


# %% [markdown]
# ## The same script, both losses
#
# `objectives` is the module that the loss comes from. Nothing else changes.

# %%
OPTIONS = {"clip_epsilon": 0.2, "entropy_coeff": 0.001, "loss_critic_type": "l2"}


def train(objectives) -> dict[str, list[float]]:
    torch.manual_seed(0)
    actor, critic = make_networks()
    loss = objectives.ClipPPOLoss(actor, critic, **OPTIONS)
    loss.make_value_estimator(gamma=0.95, lmbda=0.9)
    optimiser = torch.optim.Adam(loss.parameters(), lr=1e-2)
    found = {"reward": [], "loss_objective": [], "kl_approx": []}
    for _ in range(30):
        data = collect(actor)
        with torch.no_grad():
            loss.value_estimator(data, params=loss.critic_network_params)
        found["reward"].append(data["next", "reward"].mean().item())
        for rows in torch.randperm(B).split(32):
            out = loss(data[rows])
            optimiser.zero_grad()
            (out["loss_objective"] + out["loss_entropy"] + out["loss_critic"]).backward()
            optimiser.step()
        for name in ("loss_objective", "kl_approx"):
            found[name].append(out[name].item())
    return found


theirs, ours = train(torchrl.objectives), train(composite_losses)
figure, panels = plt.subplots(1, 3, figsize=(12, 3), layout="constrained")
for panel, name in zip(panels, theirs, strict=True):
    panel.plot(theirs[name], linewidth=4, alpha=0.4, label="torchrl.objectives")
    panel.plot(ours[name], linewidth=1, color="black", label="composite_losses")
    panel.set(title=name, xlabel="round")
panels[0].legend()
plt.show()
gap = max(abs(a - b) for name in theirs for a, b in zip(theirs[name], ours[name], strict=True))
print(f"reward {ours['reward'][0]:.3f} -> {ours['reward'][-1]:.3f}; largest difference {gap:.1e}")
assert ours["reward"][-1] > ours["reward"][0] + 0.2
assert gap < 1e-6

# %% [markdown]
# The other two lines: entropies by head, and a switch that changes nothing.

# %%
torch.manual_seed(1)
actor, critic = make_networks()
data = collect(actor)
GAE(gamma=0.95, lmbda=0.9, value_network=critic)(data)
rows = data.exclude("next").reshape(-1)  # [N]
old = torchrl.objectives.ClipPPOLoss(actor, critic, **OPTIONS)(rows)
new = composite_losses.ClipPPOLoss(actor, critic, **OPTIONS)(rows)
print({key: value.item() for key, value in new.items() if "/" in key})
for head in ("move", "gear"):
    theirs = old["composite_entropy", f"{head}_entropy"].mean()
    torch.testing.assert_close(new[f"entropy/{head}"], theirs)
for key in ("loss_objective", "loss_critic", "loss_entropy", "entropy", "clip_fraction", "ESS"):
    torch.testing.assert_close(new[key], old[key].mean(), rtol=1e-5, atol=1e-6)
with set_composite_lp_aggregate(True):
    switched = composite_losses.ClipPPOLoss(actor, critic, **OPTIONS)(rows)
for key, value in new.items():
    assert torch.equal(switched[key], value)

# %% [markdown]
# ## What gets better
#
# The same situation for both losses, on data whose every ratio is 1. What is right is known: the
# loss is minus the mean advantage of the rows that count, the KL divergence 0. Where that cannot be
# had, an error should say why.


# %%
def outcome(objectives, data: TensorDict, **options) -> str:
    """The loss and the KL divergence, or what was raised."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = objectives.ClipPPOLoss(actor, critic, **OPTIONS, **options)(data)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:72]}"
    return f"loss {out['loss_objective'].item():.3g}, KL {abs(out['kl_approx'].item()):.2f}"


def changed(key: str, change) -> TensorDict:
    """The data with one entry changed."""
    return rows.clone().set(key, change(rows[key]))


valid = torch.arange(rows.shape[0]) % 4 != 0
padded = changed("observation", lambda x: x.masked_fill(~valid.unsqueeze(-1), float("nan")))
padded["collector", "mask"] = valid
SITUATIONS = {
    "well-formed": (rows, {}),
    "one log-prob was not stored": (rows.exclude("gear_log_prob"), {}),
    "neither were the parameters": (rows.exclude("gear_log_prob", "params"), {}),
    "a log-prob is [N, 1]": (changed("gear_log_prob", lambda x: x.unsqueeze(-1)), {}),
    "an action is [N, 1]": (changed("gear", lambda x: x.unsqueeze(-1)), {}),
    "the advantage is [N]": (changed("advantage", lambda x: x.squeeze(-1)), {}),
    "the padding holds NaN": (padded, {}),
    "a misspelled keyword": (rows, {"clip_epsilom": 0.1}),
}
modules = (composite_losses, torchrl.objectives)
table = {
    name: [outcome(module, given, **options) for module in modules]
    for name, (given, options) in SITUATIONS.items()
}
for name, (here, there) in table.items():
    print(f"{name}\n    here     {here}\n    TorchRL  {there}")

# %%
good = f"loss {-rows['advantage'].mean().item():.3g}, KL 0.00"
of_valid = f"loss {-rows['advantage'][valid].mean().item():.3g}, KL 0.00"
assert table["well-formed"] == [good, good]
for name in ("one log-prob was not stored", "a log-prob is [N, 1]", "an action is [N, 1]"):
    assert table[name][0] == good
assert table["the padding holds NaN"][0] == of_valid
for name, error in {
    "neither were the parameters": "MissingKeyError",
    "the advantage is [N]": "ShapeError",
    "a misspelled keyword": "TypeError",
}.items():
    assert table[name][0].startswith(error)
assert all(here != there for name, (here, there) in table.items() if name != "well-formed")

# %% [markdown]
# For an advantage of [N], TorchRL's loss multiplies every ratio with every advantage. Its number is
# right above because all ratios are 1. Once they differ it is another:

# %%
moved = changed("gear_log_prob", lambda x: x + 0.3 * torch.randn_like(x))
theirs = torchrl.objectives.ClipPPOLoss(actor, critic, **OPTIONS)
flat = moved.clone().set("advantage", moved["advantage"].squeeze(-1))
values = [theirs(each)["loss_objective"].item() for each in (moved, flat)]
print(f"TorchRL, advantage [N, 1]: {values[0]:.3f}; [N]: {values[1]:.3f}")
assert abs(values[0] - values[1]) > 1e-3

# %% [markdown]
# **Dropout.** A functional loss holds the networks' parameters; `loss.eval()` reaches the networks
# as well, so the ratio is 1 on fresh data:

# %%
actor, critic = make_networks(dropout=0.5)
losses = [module.ClipPPOLoss(actor, critic, **OPTIONS) for module in modules]
actor.eval()  # to collect
rows = collect(actor).exclude("next").reshape(-1)
rows["advantage"], rows["value_target"] = torch.randn(2, rows.shape[0], 1)
gaps = []
for loss in losses:
    actor.train()  # as a training loop leaves it
    gaps.append(abs(loss.eval()(rows)["kl_approx"].item()))
print(f"KL on fresh data after loss.eval(): here {gaps[0]:.3f}, TorchRL {gaps[1]:.3f}")
assert gaps[0] < 1e-5 < gaps[1]

# %% [markdown]
# And what is new: `ratio="per_head"` and two more geometries, masks by head, `diagnose`, groups of
# agents, networks that export. The other notebooks show them.
