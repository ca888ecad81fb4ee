# %% [markdown]
# # Groups of agents: one loss for hunters and prey
#
# VMAS `simple_tag`: three slow hunters ("adversary") chase one fast runner ("agent") between two
# obstacles. The groups differ in the number of agents, in what they see and in their reward. Each
# has its own actor, critic and loss; a `GroupLoss` makes one call and one backward pass of them.

# %%
import matplotlib.pyplot as plt
import torch

from composite_losses.demo.groups import TASKS, collect, make_actor, make_loss, make_policy
from composite_losses.demo.training import minibatches, update

torch.set_num_threads(1)
torch.manual_seed(0)
plt.rcParams["figure.dpi"] = 80

# %% [markdown]
# ## Environment, networks, loss
#
# A step in which a hunter touches the runner is a catch: it gives each hunter 10 and costs the
# runner 10. Catches are rare at first, so the hunters also learn from coming closer (`shaping`);
# what is counted below is catches only. Environment, networks and settings are those of
# `python -m composite_losses.demo.groups`.

# %%
task = TASKS["vmas_tag"]
settings = task.settings
env = task.make_env(0, settings)
print({group: len(agents) for group, agents in env.group_map.items()})
print(task.shaping.__doc__.splitlines()[0])

actors = {group: make_actor(env, group, settings) for group in env.group_map}
policy, loss = make_policy(env, actors), make_loss(env, actors, settings)
print({group: type(member).__name__ for group, member in loss.losses.items()})

# %% [markdown]
# `make_loss` is `GroupLoss.from_group_map(env.group_map, member)`, where `member(group)` returns
# the group's `MAPPOLoss` or `IPPOLoss`. The keys follow from the group's name: `("adversary",
# "advantage")` and so on. The `done` of this environment stands at the root and is expanded over
# each group's agents. Nothing is wired by hand:

# %%
for group, member in loss.losses.items():
    keys = member.tensor_keys
    print(group, keys.advantage, keys.reward, keys.value)
    assert keys.advantage == (group, "advantage")

# %% [markdown]
# ## Training
#
# One collector policy, one estimator call, one loss call, one optimiser for all groups.


# %%
def catches(data) -> float:
    """Steps with a catch, per episode."""
    return (data["next", "agent", "reward"] < -5).float().sum(1).mean().item()


optimiser = torch.optim.Adam(loss.parameters(), lr=settings.learning_rate)
found = {f"{group}/{name}": [] for group in env.group_map for name in ("kl_approx", "entropy")}
found["catches"] = []
for _ in range(settings.iterations):
    data = collect(env, settings, policy)
    found["catches"].append(catches(data))
    task.shaping(data)
    loss.value_estimator(data)  # every group's advantage and value target
    for batch in minibatches(data.exclude("next").reshape(-1), settings):
        out = update(loss, optimiser, batch)  # loss, backward, step
    for name in found.keys() & set(loss.out_keys):
        found[name].append(out[name].item())

# %% [markdown]
# The output holds the sums, and everything of every group under its name. The sum is the sum:

# %%
print([name for name in loss.out_keys if "/" not in name])
print([name for name in loss.out_keys if name.startswith("agent/")])
parts = [out[f"{group}/loss_objective"] for group in env.group_map]
torch.testing.assert_close(out["loss_objective"], sum(parts))

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.2), layout="constrained")
left.plot(found["catches"])
left.set(title="catches per episode, both groups learning", xlabel="round")
for group in env.group_map:
    right.plot(found[f"{group}/entropy"], label=group)
right.set(title="entropy of the policies, nats", xlabel="round")
right.legend()
plt.show()

# %% [markdown]
# ## What each group has learned
#
# When both sides learn, the curve says little about either. So all pairings, trained or not, on new
# environments:

# %%
untrained = {group: make_actor(env, group, settings) for group in env.group_map}
sides = {"untrained": untrained, "trained": actors}
table = torch.zeros(2, 2)
for i, hunters in enumerate(sides.values()):
    for j, runner in enumerate(sides.values()):
        both = {"adversary": hunters["adversary"], "agent": runner["agent"]}
        pair = make_policy(env, both)
        runs = [collect(task.make_env(seed, settings), settings, pair) for seed in (100, 101, 102)]
        table[i, j] = sum(map(catches, runs)) / len(runs)
print(f"{'catches per episode':22}" + "".join(f"{name + ' runner':>18}" for name in sides))
for name, row in zip(sides, table.tolist(), strict=True):
    print(f"{name + ' hunters':22}" + "".join(f"{value:18.2f}" for value in row))
assert (table[1] > 4 * table[0]).all()

# %% [markdown]
# Against either runner the trained hunters catch several times as often. The runner, which learns
# from being caught only, has gained much less in so short a time.

# %% [markdown]
# ## A chase
#
# The episode of most catches, seen from above; dots every five steps, the start is hollow. The
# obstacles are drawn at their places.

# %%
data = collect(task.make_env(100, settings), settings, policy)
most = (data["next", "agent", "reward"] < -5).sum((1, 2, 3)).argmax()
figure, panel = plt.subplots(figsize=(4.5, 4.5), layout="constrained")
for group, color in (("adversary", "tab:red"), ("agent", "tab:green")):
    path = data[group, "observation"][most, ..., 2:4].numpy()  # [T, A, 2]; before it: the velocity
    for agent in range(path.shape[1]):
        x, y = path[:, agent].T
        panel.plot(x, y, color=color, label=group if agent == 0 else None)
        panel.plot(x[::5], y[::5], ".", color=color)
        panel.plot(x[0], y[0], "o", color=color, fillstyle="none")
own, *rest = data["agent", "observation"][most, 0, 0][2:8].split(2)
for relative in rest:
    panel.add_patch(plt.Circle(tuple((own + relative).tolist()), 0.2, color="lightgrey"))
panel.set(aspect="equal", title=f"environment {most.item()}")
panel.legend()
plt.show()

# %% [markdown]
# ## A frozen group, weights, missing groups
#
# * Freeze a group: `loss.losses["agent"].requires_grad_(False)`, or leave its parameters out of the
#   optimiser. The other learns on.
# * `GroupLoss(losses, coeff={"agent": 0.5})` weighs the groups in the sums.
# * `missing="skip"` lets a batch lack a group: its losses are 0 there, its metrics NaN.

# %%
before = {name: p.detach().clone() for name, p in loss.named_parameters()}
optimiser = torch.optim.Adam(loss.losses["adversary"].parameters(), lr=1e-2)
loss.zero_grad()
out = loss(batch)
sum(value for name, value in out.items() if name.startswith("loss")).backward()
optimiser.step()
moved = {name.split(".")[0] for name, p in loss.named_parameters() if (p != before[name]).any()}
print(moved)
assert moved == {"group_adversary"}
