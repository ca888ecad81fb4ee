"""Inference: a policy and the networks, eager and exported, in eval mode without gradients.

The eager policy is what a user calls: the TensorDict module under deterministic exploration. ONNX
Runtime runs on the CPU only, with as many threads as torch. Needs the ``export`` extra, and a C++
compiler for AOTInductor; what is missing or fails is named in the table.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import (
    CompositeDistribution,
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    set_interaction_type,
)
from torch import Tensor, nn

import composite_losses.export as cl_export
from benchmarks.case import Case, Provider, Settings
from benchmarks.nets import MLP, Net
from benchmarks.problems import CLASSES, PARAMETERS, THREE_HEADS, Split
from composite_losses.nets import MultiAgentConvNet, MultiAgentGRU, MultiAgentLSTM, MultiAgentMLP

AGENTS, FEATURES = 4, 16
KEY = ("agents", "observation")
EAGER, PROGRAM, PACKAGE, ONNX = "eager", "torch.export", "AOTInductor", "ONNX Runtime"
OPAQUE = (PROGRAM, PACKAGE, ONNX)
Named = dict[str, Tensor]


class EagerPolicy:
    """A policy's deterministic actions, by calling it on a TensorDict."""

    def __init__(self, actor: nn.Module, names: Sequence[str]) -> None:
        self.actor, self.names = actor, names

    def __call__(self, observation: Tensor) -> Named:
        """The actions by their exported names."""
        td = TensorDict({KEY[0]: {KEY[1]: observation}}, observation.shape[:1])
        with set_interaction_type(InteractionType.DETERMINISTIC):
            self.actor(td)
        return {f"agents_{name}": td["agents", name] for name in self.names}


class OnnxSession:
    """An ONNX file under ONNX Runtime, from torch tensors to torch tensors."""

    def __init__(self, path: Path) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self.session = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )
        self.inputs = [each.name for each in self.session.get_inputs()]

    def __call__(self, *values: Tensor) -> list[Tensor]:
        """The outputs in the order of the graph."""
        feed = {name: x.numpy() for name, x in zip(self.inputs, values, strict=True)}
        return [torch.from_numpy(y) for y in self.session.run(None, feed)]


def policy(device: torch.device) -> ProbabilisticTensorDictSequential:
    """A policy of four agents with unshared networks and three heads."""
    heads = THREE_HEADS
    net = MultiAgentMLP(
        FEATURES,
        sum(head.width for head in heads),
        AGENTS,
        centralized=False,
        share_params=False,
        num_cells=[64, 64],
    )
    keys = [
        ("agents", "params", head.name, name) for head in heads for name in PARAMETERS[head.family]
    ]
    return ProbabilisticTensorDictSequential(
        TensorDictModule(nn.Sequential(net, Split(heads)), [KEY], keys),
        ProbabilisticTensorDictModule(
            in_keys=[("agents", "params")],
            out_keys=[("agents", head.name) for head in heads],
            distribution_class=CompositeDistribution,
            distribution_kwargs={
                "distribution_map": {head.name: CLASSES[head.family] for head in heads},
                "name_map": {head.name: ("agents", head.name) for head in heads},
            },
        ),
    ).to(device)


def networks() -> dict[str, tuple[nn.Module, Callable[[int], tuple[Any, ...]]]]:
    """Networks by name, each with a function from the batch size to its inputs."""

    def options(shared: bool, centralised: bool) -> dict[str, bool]:
        return {"share_params": shared, "centralized": centralised}

    def features(n: int) -> tuple[Tensor, ...]:
        return (torch.randn(n, AGENTS, FEATURES),)

    def images(n: int) -> tuple[Tensor, ...]:
        return (torch.randn(n, AGENTS, 3, 32, 32),)

    def recurrent(pair: bool) -> Callable[[int], tuple[Any, ...]]:
        def inputs(n: int) -> tuple[Any, ...]:
            states = [torch.randn(n, AGENTS, 1, 64) for _ in range(2 if pair else 1)]
            return (torch.randn(n, AGENTS, FEATURES), tuple(states) if pair else states[0])

        return inputs

    found: dict[str, tuple[nn.Module, Callable[[int], tuple[Any, ...]]]] = {}
    for shared in (False, True):
        for centralised in (False, True):
            chosen = options(shared, centralised)
            net: Net = Net("", AGENTS, (), (), shared=shared, centralised=centralised)
            mlp = MultiAgentMLP(FEATURES, 8, AGENTS, num_cells=list(MLP.cells), **chosen)
            conv = MultiAgentConvNet(AGENTS, in_features=3, **chosen)
            found[f"MLP{net.name}"] = (mlp, features)
            found[f"ConvNet{net.name}"] = (conv, images)
    for shared in (False, True):
        sharing = "shared" if shared else "unshared"
        gru = MultiAgentGRU(FEATURES, 64, AGENTS, share_params=shared)
        lstm = MultiAgentLSTM(FEATURES, 64, AGENTS, share_params=shared)
        found[f"GRU, {sharing}"] = (gru, recurrent(False))
        found[f"LSTM, {sharing}"] = (lstm, recurrent(True))
    return found


def flat(value: Any) -> Named:
    """Outputs by position."""
    leaves = torch.utils._pytree.tree_leaves(value)
    return {f"output {i}": leaf for i, leaf in enumerate(leaves)}


def artefacts(
    module: nn.Module, inputs: tuple[Any, ...], folder: Path, formats: Sequence[str]
) -> dict[str, Callable[..., Any] | Exception]:
    """What the module exports to, by format; the exception where it does not."""

    def program() -> Callable[..., Any]:
        return cl_export.to_program(module, inputs).module()

    def package() -> Callable[..., Any]:
        path = cl_export.to_package(module, inputs, folder / "package.pt2")
        return torch._inductor.aoti_load_package(str(path))

    def onnx() -> Callable[..., Any]:
        session = OnnxSession(cl_export.to_onnx(module, inputs, folder / "net.onnx"))
        return lambda *values: session(*torch.utils._pytree.tree_leaves(values))

    makers = {PROGRAM: program, PACKAGE: package, ONNX: onnx}
    found: dict[str, Callable[..., Any] | Exception] = {}
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in formats:
            try:
                found[name] = makers[name]()
            except Exception as error:
                found[name] = error
    return found


def export_cases(
    title: str,
    module: nn.Module,
    eager: Callable[..., Any],
    inputs: Callable[[int], tuple[Any, ...]],
    sizes: Sequence[int],
    device: torch.device,
    formats: Sequence[str],
) -> Iterator[Case]:
    """The cases of one module, exported once to every format, for several batch sizes."""
    module.eval()
    move = torch.utils._pytree.tree_map
    with tempfile.TemporaryDirectory() as folder:
        example = move(lambda x: x.to(device), inputs(4))
        found = artefacts(module, example, Path(folder), formats)
        calls = {k: v for k, v in found.items() if not isinstance(v, Exception)}
        for name, error in found.items():
            if isinstance(error, Exception):
                print(f"{title}: {name} failed: {type(error).__name__}: {error}"[:300])
        for size in sizes:
            values = move(lambda x: x.to(device), inputs(size))
            providers = [
                Provider(name, torch.no_grad()(call), values, flat, opaque=name in OPAQUE)
                for name, call in {EAGER: eager, **calls}.items()
            ]
            yield Case(title, providers, "batch size", size, baseline=EAGER)


def cases(settings: Settings) -> Iterator[Case]:
    """All cases, one at a time."""
    quick, device = settings.quick, settings.device
    sizes = (1, 64) if quick else (1, 64, 1024)
    formats = OPAQUE if device.type == "cpu" else (PROGRAM, PACKAGE)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        actor, found = policy(device), networks()
    names = [head.name for head in THREE_HEADS]
    title = "policy, unshared MLP, three heads"
    chosen: dict[str, Any] = {title: (actor, lambda n: (torch.randn(n, AGENTS, FEATURES),))}
    chosen |= {k: v for k, v in found.items() if not quick or k == "MLP, unshared"}
    for title, (module, inputs) in chosen.items():
        if settings.only not in title:
            continue
        module = module.to(device)
        eager = EagerPolicy(actor, names) if module is actor else module
        yield from export_cases(title, module, eager, inputs, sizes, device, formats)
