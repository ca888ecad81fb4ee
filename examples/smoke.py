"""What a fresh installation must be able to do: run this file in it, from any folder.

    python smoke.py

It needs the package and its run-time dependencies only: a policy with two heads, one training step,
a saved and loaded loss, a multi-agent network and its export.
"""

from __future__ import annotations

import importlib.metadata
import io
import sys
from pathlib import Path

import torch
from tensordict import TensorDict
from tensordict.nn import (
    CompositeDistribution,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import Tensor, nn
from torch.distributions import Categorical, Normal

import composite_losses as cl


class Heads(nn.Linear):
    """From an observation to the parameters of both heads."""

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns loc and scale of ``move``, logits of ``gear``."""
        loc, raw, logits = super().forward(observation).split([2, 2, 3], -1)
        return loc, raw.exp(), logits


def main() -> None:
    """Raises where something does not work."""
    keys = [("params", "move", "loc"), ("params", "move", "scale"), ("params", "gear", "logits")]
    actor = ProbabilisticTensorDictSequential(
        TensorDictModule(Heads(4, 7), ["observation"], keys),
        ProbabilisticTensorDictModule(
            in_keys=["params"],
            out_keys=["move", "gear"],
            distribution_class=CompositeDistribution,
            distribution_kwargs={"distribution_map": {"move": Normal, "gear": Categorical}},
            return_log_prob=True,
        ),
    )
    critic = TensorDictModule(nn.Linear(4, 1), ["observation"], ["state_value"])
    data = TensorDict({"observation": torch.randn(16, 4)}, [16])
    with torch.no_grad():
        actor(data)
    data["advantage"], data["value_target"] = torch.randn(16, 1), torch.randn(16, 1)

    loss = cl.ClipPPOLoss(actor, critic, ratio="per_head", entropy_coeff={"move": 0.0, "gear": 0.1})
    out = loss(data)
    if float(out["max_ratio"]) - 1 > 1e-5:
        raise SystemExit(f"the ratio is not 1 on fresh data: {float(out['max_ratio'])}")
    optimiser = torch.optim.SGD(loss.parameters(), lr=0.1)
    (out["loss_objective"] + out["loss_entropy"] + out["loss_critic"]).backward()
    optimiser.step()
    file = io.BytesIO()
    torch.save(loss.state_dict(), file)
    file.seek(0)
    loss.load_state_dict(torch.load(file, weights_only=True), strict=True)

    net = cl.MultiAgentMLP(4, 2, 3, centralized=False, share_params=False, num_cells=[8])
    x = torch.randn(5, 3, 4)
    program = cl.export.to_program(net, x)
    if cl.export.max_difference(program, net, torch.randn(7, 3, 4)) > 1e-5:
        raise SystemExit("the exported network differs")

    where = Path(cl.__file__).parent
    if not (where / "py.typed").is_file():
        raise SystemExit("py.typed is missing")
    version = importlib.metadata.version("composite_losses")
    if version != cl.__version__:
        raise SystemExit(f"installed as {version}, calls itself {cl.__version__}")
    sys.stdout.write(f"composite_losses {version} works, from {where}\n")


if __name__ == "__main__":
    main()
