"""Networks: a loop over agents, ours and TorchRL's, with equal weights.

The loop is what is written without a library: one ``nn.Sequential`` per agent, called in turn and
stacked; where parameters are shared, one ``nn.Sequential`` for all.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchrl.modules import MultiAgentConvNet, MultiAgentMLP

from benchmarks.case import Case, Provider, Settings
from composite_losses.nets import from_torchrl


class AgentLoop(nn.Module):
    """One network per agent, or one for all.

    Args:
        nets: the networks: as many as agents, or one.
        n_agents: number of agents.
        centralised: whether every network sees the inputs of all agents.
        event_ndim: dims of one agent's input; images have 3.
    """

    def __init__(
        self, nets: Sequence[nn.Module], n_agents: int, centralised: bool, event_ndim: int
    ) -> None:
        super().__init__()
        self.nets = nn.ModuleList(nets)
        self.n_agents = n_agents
        self.centralised = centralised
        self.agent_dim = -1 - event_ndim

    def forward(self, x: Tensor) -> Tensor:
        """Outputs ``[B, A, out]`` of inputs ``[B, A, …]``."""
        shared = len(self.nets) == 1
        if self.centralised:
            x = x.flatten(1, 2)
            if shared:
                return self.nets[0](x).unsqueeze(1).expand(-1, self.n_agents, -1)
            return torch.stack([net(x) for net in self.nets], 1)
        if shared:
            return self.nets[0](x.flatten(0, 1)).unflatten(0, x.shape[:2])
        return torch.stack([net(x[:, i]) for i, net in enumerate(self.nets)], 1)


@dataclass(frozen=True)
class Net:
    """Options of a multi-agent network.

    Attributes:
        title: its name.
        n_agents: number of agents.
        event: shape of one agent's input: ``(features,)`` or ``(channels, height, width)``.
        cells: cells (channels) of the layers; the last one's are the outputs of a ConvNet.
        outputs: outputs of an MLP.
        shared: whether the agents share parameters.
        centralised: whether every agent sees all inputs.
    """

    title: str
    n_agents: int
    event: tuple[int, ...]
    cells: tuple[int, ...]
    outputs: int = 8
    shared: bool = False
    centralised: bool = False

    def theirs(self, device: torch.device) -> nn.Module:
        """TorchRL's network."""
        options = {
            "centralized": self.centralised,
            "share_params": self.shared,
            "num_cells": list(self.cells),
            "device": device,
        }
        if len(self.event) == 1:
            return MultiAgentMLP(self.event[0], self.outputs, self.n_agents, **options)
        return MultiAgentConvNet(self.n_agents, in_features=self.event[0], **options)

    @property
    def name(self) -> str:
        """Title, sharing and what an agent sees."""
        sharing = "shared" if self.shared else "unshared"
        return f"{self.title}, {sharing}" + (", centralised" if self.centralised else "")


def net_case(net: Net, rows: int, device: torch.device, variable: str = "", value: int = 0) -> Case:
    """The case of one network on so many rows (a batch of this size)."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        theirs = net.theirs(device)
        x = torch.randn(rows, net.n_agents, *net.event).to(device)
    ours = from_torchrl(theirs)
    single = [ours.agent(i) for i in range(1 if net.shared else net.n_agents)]
    loop = AgentLoop(
        [copy.deepcopy(each) for each in single], net.n_agents, net.centralised, len(net.event)
    )
    cotangent = torch.ones_like(ours(x))

    def provider(name: str, module: nn.Module) -> Provider:
        return Provider(
            name,
            module,
            (x,),
            lambda y: {"output": y},
            lambda y: y.backward(cotangent),
            list(module.parameters()),
            lambda: gradients(name, module),
        )

    providers = [provider("loop", loop), provider("ours", ours), provider("torchrl", theirs)]
    title = net.name if variable else f"{net.name}, {rows} rows"
    return Case(title, providers, variable, value)


def gradients(provider: str, module: nn.Module) -> list[Tensor]:
    """The gradients layer by layer, ``[sets, …]``, as shares of the layer's largest."""
    if isinstance(module, AgentLoop):
        each = [[p.grad for p in net.parameters()] for net in module.nets]
        found = [torch.stack(tensors) for tensors in zip(*each, strict=True)]
    elif provider == "torchrl":
        params = module.params
        slots = sorted(params.keys(), key=int)
        leaves = [params[slot, name] for slot in slots for name in ("weight", "bias")]
        found = [leaf.grad for leaf in leaves]
        if module.share_params:
            found = [gradient.unsqueeze(0) for gradient in found]
    else:
        found = [p.grad for p in module.parameters()]
    return [gradient / gradient.abs().max() for gradient in found]


MLP = Net("MLP, 4 agents, 2×64 cells", 4, (16,), (64, 64))
WIDE = Net("MLP, 3 agents, 2×256 cells", 3, (16,), (256, 256))
CONV = Net("ConvNet, 3 agents, 3×32×32", 3, (3, 32, 32), (32, 32, 32))


def variants(net: Net) -> list[Net]:
    """Unshared and shared, decentralised and centralised."""
    return [
        Net(net.title, net.n_agents, net.event, net.cells, net.outputs, shared, centralised)
        for shared in (False, True)
        for centralised in (False, True)
    ]


def cases(settings: Settings) -> Iterator[Case]:
    """All cases, one at a time."""
    quick, device = settings.quick, settings.device
    sizes = {MLP: (64, 1024) if quick else (64, 1024, 6000), WIDE: (64, 1024, 6000)}
    sizes[CONV] = (16,) if quick else (64, 1024)
    if quick:
        sizes[WIDE] = (64,)
    for net, rows in sizes.items():
        for variant in variants(net):
            for n in rows:
                yield net_case(variant, n, device)
    rows = 256
    for n in (1, 4, 16, 64) if quick else (1, 2, 4, 8, 16, 32, 64):
        net = Net(f"MLP, 2×64 cells, {rows} rows", n, MLP.event, MLP.cells)
        yield net_case(net, rows, device, "agents", n)
    for n in (64, 2048) if quick else (64, 256, 1024, 4096, 16384, 65536):
        yield net_case(MLP, n, device, "rows", n)
