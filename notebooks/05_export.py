# %% [markdown]
# # Fused networks, and policies that leave Python
#
# `MultiAgentMLP` and its siblings compute all agents with batched matrix products: no `vmap`, no
# swapped parameters. So they are ordinary modules, and export as they are. Below: the same network
# as TorchRL's with the same weights, its speed, and a composite policy as an ONNX file and as an
# AOTInductor package, both run without TensorDict.

# %%
import json
import logging
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import matplotlib.pyplot as plt
import numpy
import torch
import torchrl.modules
from tensordict import TensorDict
from tensordict.nn import CompositeDistribution, InteractionType, TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torchrl.envs import set_exploration_type
from torchrl.modules import ProbabilisticActor, TanhNormal

from composite_losses import MultiAgentMLP, export
from composite_losses.nets import from_torchrl

torch.set_num_threads(1)
torch.manual_seed(0)
plt.rcParams["figure.dpi"] = 80
logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it misses torchvision, not needed here
OBS, A = 12, 6

# %% [markdown]
# ## The same network, fused
#
# `from_torchrl` takes the weights of a TorchRL network over; the outputs are equal. Unshared
# weights, each agent its own.

# %%
options = {"n_agents": A, "centralised": False, "share_params": False, "num_cells": [64, 64]}
theirs = torchrl.modules.MultiAgentMLP(OBS, 4, **options)
ours = from_torchrl(theirs)
x = torch.randn(32, A, OBS)
torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)
print(ours)

# %% [markdown]
# An agent's part is an ordinary `nn.Sequential` whose parameters share memory with the network.

# %%
single = ours.agent(2)
torch.testing.assert_close(single(x[:, 2]), ours(x)[:, 2], rtol=1e-5, atol=1e-5)
print(single)


# %%
def milliseconds(nets: dict[str, nn.Module], x: torch.Tensor, runs: int = 60) -> dict[str, float]:
    """Of a forward and a backward pass; in turn, and the best, to leave other programs out."""
    times = {name: [] for name in nets}
    for _ in range(runs):
        for name, net in nets.items():
            start = time.perf_counter()
            net(x).square().mean().backward()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: min(each) for name, each in times.items()}


batches = (1, 32, 512)
nets = {"TorchRL": theirs, "fused": ours}
found = [milliseconds(nets, torch.randn(b, A, OBS)) for b in batches]
spent = {name: [each[name] for each in found] for name in nets}
figure, panel = plt.subplots(figsize=(6, 3), layout="constrained")
for i, (name, values) in enumerate(spent.items()):
    panel.bar([k + 0.35 * i for k in range(len(batches))], values, width=0.35, label=name)
panel.set_xticks([k + 0.175 for k in range(len(batches))], [f"batch {b}" for b in batches])
panel.set(yscale="log", ylabel="ms", title=f"forward and backward, {A} agents, one CPU core")
panel.legend()
plt.show()
print({name: [round(value, 2) for value in values] for name, values in spent.items()})
assert spent["fused"][0] < spent["TorchRL"][0]

# %% [markdown]
# ## A composite policy
#
# Each of the agents moves (two continuous actions) and picks a gear.


# %%
class Split(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        loc, raw, gear = x.split([2, 2, 3], -1)
        return loc, nn.functional.softplus(raw) + 1e-3, gear


net = nn.Sequential(
    MultiAgentMLP(OBS, 7, A, centralized=False, share_params=False, num_cells=[64, 64]), Split()
)
keys = [("move", "loc"), ("move", "scale"), ("gear", "logits")]
actor = ProbabilisticActor(
    TensorDictModule(net, [("agents", "observation")], [("agents", "params", *k) for k in keys]),
    in_keys=[("agents", "params")],
    out_keys=[("agents", "move"), ("agents", "gear")],
    distribution_class=CompositeDistribution,
    distribution_kwargs={
        "distribution_map": {"move": TanhNormal, "gear": Categorical},
        "name_map": {name: ("agents", name) for name in ("move", "gear")},
    },
    default_interaction_type=InteractionType.RANDOM,
    return_log_prob=True,
)
agents = TensorDict({"observation": torch.randn(4, A, OBS)}, [4, A])
example = TensorDict({"agents": agents}, [4])

# %% [markdown]
# Three artefacts. The policy exports as its deterministic actions, heads by name; inputs are named
# as TensorDict's dispatch names them. The batch size stays dynamic: the check uses another one.

# %%
scratch = TemporaryDirectory()
folder = Path(scratch.name)
other = TensorDict({"agents": TensorDict({"observation": torch.randn(7, A, OBS)}, [7, A])}, [7])
artefacts = {
    "program": export.to_program(actor, example),
    "onnx": export.to_onnx(actor, example, folder / "policy.onnx"),
    "package": export.to_package(actor, example, folder / "policy.pt2"),
}
for name, artefact in artefacts.items():
    difference = export.max_difference(artefact, actor, other)
    print(f"{name:8} largest difference at another batch size: {difference:.1e}")
    assert difference < 1e-5

# %% [markdown]
# There is no distribution and no TensorDict in the graph, only tensor operations:

# %%
graph = artefacts["program"].graph
print(sorted({str(node.target) for node in graph.nodes if node.op == "call_function"}))

# %% [markdown]
# ## Without TensorDict
#
# Two other processes load the files. The first needs `onnxruntime` and `numpy`, not even torch; the
# second needs torch alone (or C++: `torch::inductor::AOTIModelPackageLoader`).

# %%
torch.save(other["agents", "observation"], folder / "x.pt")
onnx_script = """
import json, sys
import numpy, onnxruntime
session = onnxruntime.InferenceSession("policy.onnx", providers=["CPUExecutionProvider"])
x = numpy.load("x.npy")
names = [out.name for out in session.get_outputs()]
found = session.run(None, {session.get_inputs()[0].name: x})
assert not {"torch", "tensordict", "composite_losses"} & set(sys.modules)
print(json.dumps({name: value.tolist() for name, value in zip(names, found)}))
"""
package_script = """
import json, sys
import torch
policy = torch._inductor.aoti_load_package("policy.pt2")
with torch.no_grad():
    found = policy(torch.load("x.pt"))
assert not {"tensordict", "torchrl", "composite_losses"} & set(sys.modules)
print(json.dumps({name: value.tolist() for name, value in found.items()}))
"""


def run(script: str) -> dict[str, torch.Tensor]:
    """What a fresh Python process finds."""
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    found = json.loads(done.stdout.splitlines()[-1])
    return {name: torch.tensor(value) for name, value in found.items()}


numpy.save(folder / "x.npy", other["agents", "observation"].numpy())
outside = {"onnx": run(onnx_script), "package": run(package_script)}
with torch.no_grad(), set_exploration_type("deterministic"):
    expected = actor(other.clone())
for name, found in outside.items():
    print(name, {head: list(value.shape) for head, value in found.items()})
    assert set(found) == {"agents_move", "agents_gear"}
    torch.testing.assert_close(
        found["agents_move"], expected["agents", "move"], rtol=1e-4, atol=1e-5
    )
    assert torch.equal(found["agents_gear"], expected["agents", "gear"])
scratch.cleanup()
