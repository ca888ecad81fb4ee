"""An actor exports as its deterministic policy, every head a named output."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.modules import ProbabilisticActor, ValueOperator

import composite_losses as cl
from composite_losses import export
from composite_losses.errors import ConfigError, MissingKeyError
from tests.export.actors import POLICIES, A, F, Policy, composite, observed
from tests.tolerances import assert_close


def arguments(program: Any) -> list[str]:
    """The names of a program's inputs, in order."""
    return list(program.graph_signature.user_inputs)


def deterministic(policy: Policy, strict: bool) -> None:
    """Checks a policy's program: names, values at other batch sizes, its graph.

    Inputs are named as TensorDict's dispatch names them, the graph holds tensor operators only and
    draws no random number, and the random state is untouched.
    """
    example = policy.inputs(5)
    keys = {key: example[key].clone() for key in example.keys(True, True)}
    state = torch.get_rng_state()
    program = export.to_program(policy.actor, example, strict=strict)
    assert torch.equal(torch.get_rng_state(), state)
    assert set(example.keys(True, True)) == set(keys)
    assert all(torch.equal(example[key], value) for key, value in keys.items())
    wanted = {"_".join(k) if isinstance(k, tuple) else k: k for k in keys}
    assert set(arguments(program)) == set(wanted)
    module = program.module()
    for batch in (1, 7):
        td = policy.inputs(batch)
        values = [td[wanted[argument]] for argument in arguments(program)]
        out = module(*values)
        with torch.no_grad():
            expected = policy.expected(td)
        assert list(out) == list(expected)
        for key, value in expected.items():
            assert out[key].shape == value.shape
            assert_close(out[key].to(value.dtype), value)
        again = module(*values)
        assert all(torch.equal(out[key], again[key]) for key in out)
        assert export.max_difference(program, policy.actor, td) < 1e-6
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    allowed = ("aten.", "<built-in function getitem>", "_operator.", "sym_")
    assert all(target.startswith(allowed) for target in targets), targets
    assert not any("rand" in t or "normal" in t or "multinomial" in t for t in targets)


STRICT = ["composite", "stacked heads", "masked", "conditioned", "processed", "lstm"]
LOOSE = ["composite", "tanh normal", "normal", "categorical", "conditioned", "gru", "lstm"]


@pytest.mark.parametrize("name", STRICT)
def test_deterministic_actions_by_name_strict(name: str) -> None:
    """Case 113: all heads, squashing included, at another batch size; twice gives the same."""
    deterministic(POLICIES[name](), True)


@pytest.mark.parametrize("name", LOOSE)
def test_deterministic_actions_by_name(name: str) -> None:
    """Case 113: the same without TorchDynamo."""
    deterministic(POLICIES[name](), False)


def test_examples_in_every_form() -> None:
    """A TensorDict, a mapping of argument names, a tensor or a tuple."""
    policy = composite()
    td = observed(5)
    x = td["agents", "observation"]
    expected = policy.expected(td)["agents_action_move"].detach()
    for example in (td, {"agents_observation": x}, x, (x,)):
        program = export.to_program(policy.actor, example, strict=False)
        assert_close(program.module()(x)["agents_action_move"], expected)


def test_tensordict_modules_and_critics() -> None:
    """A module that is no policy exports with its out_keys as names."""
    net = cl.MultiAgentMLP(F, 1, A, centralized=True, share_params=False, depth=1)
    module = TensorDictModule(net, [("agents", "observation")], [("agents", "state_value")])
    program = export.to_program(module, observed(5))
    td = observed(3)
    out = program.module()(td["agents", "observation"])
    assert list(out) == ["agents_state_value"]
    assert_close(out["agents_state_value"], net(td["agents", "observation"]).detach())
    critic = ValueOperator(nn.Linear(F, 1), in_keys=["observation"])
    program = export.to_program(critic, torch.randn(5, F))
    assert list(program.module()(torch.randn(3, F))) == ["state_value"]


def _named(in_keys: list[Any], out_keys: list[Any]) -> TensorDictModule:
    return TensorDictModule(lambda *x: x if len(x) > 1 else x[0], in_keys, out_keys)


def _actor(key: Any) -> Any:
    return ProbabilisticActor(
        TensorDictModule(nn.Linear(F, 3), [key], ["logits"]),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
    )


@pytest.mark.parametrize(
    ("module", "example", "error", "message"),
    [
        (_actor("x"), {"y": torch.ones(2, F)}, MissingKeyError, r"no input 'x'.*Present: 'y'"),
        (
            _actor(("agents", "x")),
            TensorDict({"x": torch.ones(2, F)}, [2]),
            MissingKeyError,
            r"\('agents', 'x'\).*'agents_x'.*Present: 'x'",
        ),
        (_actor("a.b"), torch.ones(2, F), ConfigError, "not a valid argument name"),
        (_actor("lambda"), torch.ones(2, F), ConfigError, "not a valid argument name"),
        (_actor("self"), torch.ones(2, F), ConfigError, "not a valid argument name"),
        (
            _named(["a_b", ("a", "b")], ["x", "y"]),
            (torch.ones(2), torch.ones(2)),
            ConfigError,
            "same argument name",
        ),
        (
            _named(["x", "y"], ["a_b", ("a", "b")]),
            (torch.ones(2), torch.ones(2)),
            ConfigError,
            "same name",
        ),
        (nn.Linear(2, 2), {"x": torch.ones(2, 2)}, ConfigError, "expected a tensor or a tuple"),
    ],
)
def test_what_cannot_be_named(
    module: Any, example: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        export.to_program(module, example)
