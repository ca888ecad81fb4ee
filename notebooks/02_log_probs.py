# %% [markdown]
# # The behaviour log-prob, and a ratio that is not 1
#
# A PPO ratio needs $\log\mu(a)$: the log-prob of the stored action under the policy that acted. The
# losses look for it along a chain, head by head:
#
# 1. **stored** in the data;
# 2. one **joint** log-prob of all heads, where the joint ratio is enough;
# 3. **params**: the distribution rebuilt from the *stored* parameters;
# 4. an **error** that says what was tried.
#
# The current network is never asked: that ratio would be 1 for ever.
#
# Before the first update every ratio must be 1. The second half breaks this in four usual ways and
# lets `diagnose` name each.

# %%
import warnings

import matplotlib.pyplot as plt
import torch
from tensordict import TensorDict
from tensordict.nn import CompositeDistribution, InteractionType, TensorDictModule
from torch import Tensor, nn
from torchrl.modules import IndependentNormal, MaskedCategorical, ProbabilisticActor

from composite_losses import ClipPPOLoss, diagnose
from composite_losses.errors import MissingKeyError

torch.set_num_threads(1)
torch.manual_seed(0)
plt.rcParams["figure.dpi"] = 80

# %% [markdown]
# A continuous head `move`, and a discrete head `gear` of which some choices are forbidden:
# `allowed` is the action mask. The network has dropout.


# %%
class Net(nn.Module):
    """Parameters of both heads; the action mask passes through."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(4, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 7)]
        self.net = nn.Sequential(*layers)

    def forward(self, observation: Tensor, allowed: Tensor) -> tuple[Tensor, ...]:
        loc, raw, logits = self.net(observation).split([2, 2, 3], -1)
        return loc, nn.functional.softplus(raw) + 0.1, logits, allowed


keys = [("move", "loc"), ("move", "scale"), ("gear", "logits"), ("gear", "mask")]
kinds = {"move": IndependentNormal, "gear": MaskedCategorical}
actor = ProbabilisticActor(
    TensorDictModule(Net(), ["observation", "allowed"], [("params", *key) for key in keys]),
    in_keys=["params"],
    distribution_class=CompositeDistribution,
    distribution_kwargs={"distribution_map": kinds},
    default_interaction_type=InteractionType.RANDOM,
    return_log_prob=True,
)
loss = ClipPPOLoss(actor)
loss.eval()  # reaches the actor: no dropout

B = 256
data = TensorDict({"observation": torch.randn(B, 4), "allowed": torch.rand(B, 3) < 0.6}, [B])
data["allowed"][:, 0] = True
with torch.no_grad():
    actor(data)
data["advantage"] = torch.randn(B, 1)

# %% [markdown]
# ## The chain
#
# Everything is stored. Then one log-prob goes, then both in favour of their sum, then all.

# %%
print(loss.log_prob_source(data))
partial = data.exclude("gear_log_prob")
print(loss.log_prob_source(partial))
joint = data.exclude("gear_log_prob", "move_log_prob", "params")
joint["sample_log_prob"] = data["gear_log_prob"] + data["move_log_prob"]
print(loss.log_prob_source(joint))
bare = data.exclude("gear_log_prob", "move_log_prob")
print(loss.log_prob_source(bare))

assert loss.log_prob_source(partial) == {"move": "stored", "gear": "params"}
assert set(loss.log_prob_source(joint).values()) == {"joint"}
assert set(loss.log_prob_source(bare).values()) == {"params"}
for each in (partial, joint, bare):  # it does not matter which: the loss is the same
    torch.testing.assert_close(loss(each)["loss_objective"], loss(data)["loss_objective"])

# %% [markdown]
# It stays the same after an update, when the current network would give another answer:

# %%
before = {name: p.detach().clone() for name, p in loss.named_parameters()}
optimiser = torch.optim.SGD(loss.parameters(), lr=0.5)
loss(data)["loss_objective"].backward()
optimiser.step()
ratio = [loss(each)["max_ratio"].item() for each in (data, partial, joint, bare)]
print("largest ratio after an update:", [round(value, 3) for value in ratio])
assert min(ratio) > 1.01
assert max(ratio) - min(ratio) < 1e-4
with torch.no_grad():
    for name, p in loss.named_parameters():
        p.copy_(before[name])

# %% [markdown]
# With nothing left, the error names the head, what was tried, what is there, and the fix:

# %%
try:
    loss(bare.exclude("params"))
except MissingKeyError as error:
    message = str(error)
    print(message)
assert "'move'" in message
assert "return_log_prob=True" in message

# %% [markdown]
# ## A ratio that is not 1
#
# On fresh data there is nothing to say:

# %%
reports = {"fresh data": diagnose(loss, data)}
print(reports["fresh data"])
assert not reports["fresh data"].reasons
assert max(reports["fresh data"].max_abs_log_ratio.values()) < 1e-5

# %% [markdown]
# **Dropout.** The network that scores is in train mode, and is not the one that acted. The loss
# warns once, too; `loss.eval()` reaches the networks.

# %%
loss.train()
reports["dropout"] = diagnose(loss, data)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    loss(data)
loss.eval()
print(*reports["dropout"].reasons, sep="\n")
assert "Dropout" in reports["dropout"].reasons[0]
assert any("loss.eval()" in str(each.message) for each in said)

# %% [markdown]
# **Clipped actions.** The environment takes actions in [−1, 1], and the clipped ones were written
# back over the sampled ones. Their log-prob is another number.

# %%
clipped = data.clone()
clipped["move"].clamp_(-1, 1)
reports["clipped"] = diagnose(loss, clipped)
print(*reports["clipped"].reasons, sep="\n")
assert "clipped after it was sampled" in " ".join(reports["clipped"].reasons)
assert reports["clipped"].max_abs_log_ratio["gear"] < 1e-5  # only `move` is concerned

# %% [markdown]
# **The action mask of another step.** Each row holds the mask of the row after it, as when masks
# are read after the environment's step. It forbids actions that were taken.

# %%
late = data.clone()
late["allowed"] = late["allowed"].roll(-1, 0)
reports["mask of the next step"] = diagnose(loss, late)
print(*reports["mask of the next step"].reasons, sep="\n")
assert "its action mask forbids" in reports["mask of the next step"].reasons[0]

# %% [markdown]
# **A dropped action mask.** Everything is allowed now: no stored action is forbidden, yet each has
# become less likely than it was. The cause shows in the stored parameters: they hold the mask that
# the policy acted with, next to logits that have not changed. Without stored parameters only the
# log-probs differ, as they also would had the weights moved; then both are named.

# %%
dropped = data.clone()
dropped["allowed"] = torch.ones_like(dropped["allowed"])
reports["dropped mask"] = diagnose(loss, dropped)
print(*reports["dropped mask"].reasons, sep="\n")
(reason,) = reports["dropped mask"].reasons
assert "head 'gear': the action mask in the data is not the one" in reason
assert "('params', 'gear', 'mask')" in reason
assert reports["dropped mask"].max_abs_log_ratio["move"] < 1e-5
assert reports["dropped mask"].max_abs_log_ratio["gear"] > 0.1
(reason,) = diagnose(loss, dropped.exclude("params")).reasons
print(reason)
assert "weights have moved" in reason and "action mask" in reason

# %% [markdown]
# ## What it costs
#
# The log-ratios of all rows before any update, by head. The titles say how many of the joint ratios
# are outside the interval for ε = 0.2 (dashed): they count as moved too far, though no weight has
# moved.

# %%
cases = {"dropout": data, "clipped": clipped, "dropped mask": dropped}
figure, panels = plt.subplots(1, len(cases), figsize=(12, 3), layout="constrained")
wasted = {}
for panel, (name, case) in zip(panels, cases.items(), strict=True):
    loss.train(name == "dropout")
    now = loss.log_probs(case)
    loss.eval()
    gaps = {head: (now["current", head] - now["behaviour", head]).detach() for head in kinds}
    for head, gap in gaps.items():
        panel.hist(gap.numpy(), bins=60, range=(-1.5, 1.5), alpha=0.6, label=head)
    ratio = sum(gaps.values()).exp()
    wasted[name] = ((ratio - 1).abs() > 0.2).float().mean().item()
    for bound in (0.8, 1.2):
        panel.axvline(torch.tensor(bound).log(), color="black", linestyle="--", linewidth=0.8)
    panel.set(title=f"{name}: {wasted[name]:.0%} outside", xlabel="log-ratio", yscale="log")
panels[0].legend()
plt.show()
assert min(wasted.values()) > 0.05

# %% [markdown]
# Call `diagnose(loss, data)` once, on the first batch of a new set-up, before the first update. In
# long runs, `validate=True` in a loss checks finite log-probs and allowed actions at every call.
