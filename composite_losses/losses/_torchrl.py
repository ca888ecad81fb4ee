"""Everything the losses take from TorchRL, in one place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import get_annotations, signature
from typing import Any

from tensordict import TensorDictBase
from tensordict.nn import TensorDictParams
from torch import Tensor, nn
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import distributions as td
from torchrl.modules.tensordict_module.rnn import set_recurrent_mode
from torchrl.objectives import PPOLoss, utils
from torchrl.objectives.common import LossModule as TorchRLLossModule
from torchrl.objectives.utils import ValueEstimators
from torchrl.objectives.value import ValueEstimatorBase

from composite_losses.heads.categorical import CategoricalTerms
from composite_losses.heads.families import NormalTerms, TanhNormalTerms
from composite_losses.heads.registry import FAMILIES, INSTANCES, full_scale
from composite_losses.heads.terms import Terms

# Where TorchRL or TensorDict is 0.11, which BenchMARL asks for, something stands in below.
DISPATCH = getattr(utils, "dispatch_value_estimator", None)
KEEPS_STATE = "preserve_module_state" in signature(TensorDictBase.to_module).parameters
SWAP: dict[str, Any] = {"preserve_module_state": False} if KEEPS_STATE else {}
# what a mixin of a loss derives from; the loss itself supplies LossModule
Mixin: Any = object
AUTO_MASK_KEYS = (("collector", "mask"), "shifted_valid")
ESTIMATORS = tuple(
    getattr(ValueEstimators, name)
    for name in ("TD0", "TD1", "TDLambda", "GAE", "MAGAE", "VTrace")
    if hasattr(ValueEstimators, name)
)
# broadcasts a team's reward over per-agent values
MULTI_AGENT_GAE = getattr(ValueEstimators, "MAGAE", ValueEstimators.GAE)
# A finite substitute for −∞ that is soft enough to leave weight must go through the class itself.
HARD = -1e6


class OlderLossModule(TorchRLLossModule):
    """The ``LossModule`` of TorchRL 0.11 with what later ones brought."""

    loss_mask_key: Any = "auto"
    # where TensorDict 0.11 keeps what select_out_keys(...) started from
    _out_keys: Any = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Gives a class its parents' annotations, without which registering networks warns."""
        super().__init_subclass__(**kwargs)
        found: dict[str, Any] = {}
        for base in reversed(cls.__mro__):
            found |= get_annotations(base)
        cls.__annotations__ = found

    def set_keys(self, **kwargs: Any) -> None:
        """Sets keys; ``None`` restores a default."""
        defaults = self._AcceptedKeys()
        restored = {k for k, v in kwargs.items() if v is None and hasattr(defaults, k)}
        super().set_keys(**{k: v for k, v in kwargs.items() if k not in restored})
        for key in restored:
            setattr(self.tensor_keys, key, getattr(defaults, key))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the state: tensors, without the metadata that TensorDict 0.11 adds to them."""
        found = super().state_dict(*args, **kwargs)
        for name in self._trees():
            for entry in ("__batch_size", "__device"):
                found.pop(f"{kwargs.get('prefix', '')}{name}.{entry}", None)
        return found

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Puts back what TensorDict 0.11 asks for, then loads."""
        for name, tree in self._trees().items():
            state_dict.setdefault(f"{prefix}{name}.__batch_size", tree.batch_size)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _trees(self) -> dict[str, TensorDictParams]:
        """Returns the parameter trees, by name."""
        return {n: m for n, m in self._modules.items() if isinstance(m, TensorDictParams)}


LossModule: Any = (
    TorchRLLossModule if hasattr(TorchRLLossModule, "loss_mask_key") else OlderLossModule
)


class LossMeta(type(LossModule)):  # type: ignore[misc]
    """TorchRL's metaclass, which wraps ``forward`` anew in every class that inherits it.

    The contexts of one wrapper are enough.
    """

    def __init__(cls, name: str, bases: tuple[type, ...], attributes: dict[str, Any]) -> None:
        """Leaves a class that has no ``forward`` of its own its parent's."""
        super().__init__(name, bases, attributes)
        if "forward" not in attributes and any(isinstance(base, LossMeta) for base in bases):
            del cls.forward


def swapped(params: TensorDictParams, network: nn.Module) -> Any:
    """Returns a context in which the network holds the given parameters."""
    return params.to_module(network, **SWAP)


@contextmanager
def loss_context(loss: Any) -> Iterator[None]:
    """Context in which TorchRL runs ``forward``: the loss's exploration type, recurrent mode."""
    with set_exploration_type(loss.deterministic_sampling_mode), set_recurrent_mode(True):
        yield


def build_value_estimator(
    loss: Any, value_type: Any, tensor_keys: dict[str, Any], **hyperparams: Any
) -> None:
    """Gives the loss the value estimator that TorchRL builds for it."""
    if DISPATCH is not None:
        DISPATCH(loss, value_type, supported=ESTIMATORS, tensor_keys=tensor_keys, **hyperparams)
        return
    if isinstance(value_type, str):
        value_type = {x.name.lower(): x for x in ESTIMATORS}.get(value_type.lower(), value_type)
    # the method asks of the loss what ours have: networks, keys, a gamma or none
    PPOLoss.make_value_estimator(loss, value_type, **hyperparams)
    loss._value_estimator.set_keys(**tensor_keys)


def _independent_normal(
    loc: Tensor,
    scale: Any,
    *,
    upscale: float = 5.0,
    tanh_loc: bool = False,
    event_dim: int = 1,
    validate_args: bool | None = None,
) -> Terms:
    """Builds the terms of ``IndependentNormal`` (its constructor leaves ``tanh_loc`` unused)."""
    return NormalTerms(loc, full_scale(loc, scale), event_ndim=event_dim)


def _tanh_normal(
    loc: Tensor,
    scale: Any,
    upscale: Any = 5.0,
    low: Any = -1.0,
    high: Any = 1.0,
    event_dims: int | None = None,
    tanh_loc: bool = False,
    safe_tanh: bool = True,
) -> Terms | None:
    """Builds the terms of ``TanhNormal``; the unsafe inverse goes through the class."""
    if not isinstance(loc, Tensor) or not safe_tanh:
        return None
    if tanh_loc:
        loc = (loc / upscale).tanh() * upscale + (high - low) / 2 + low
    dims = min(1, loc.ndim) if event_dims is None else event_dims
    return TanhNormalTerms(loc, full_scale(loc, scale), low, high, event_ndim=dims)


def _one_hot(
    logits: Tensor | None = None,
    *,
    grad_method: Any = None,
    validate_args: bool | None = None,
) -> Terms | None:
    """Builds the terms of ``OneHotCategorical``, whose single-class case squeezes its parameter."""
    if logits is None or logits.shape[-1] == 1:
        return None
    return CategoricalTerms(logits, one_hot=True)


def _masked(
    logits: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    neg_inf: float = float("-inf"),
    padding_value: int | None = None,
    use_cross_entropy: bool = True,
    padding_side: str = "left",
) -> Terms | None:
    """Builds the terms of ``MaskedCategorical`` with a boolean mask; sparse masks use the class."""
    if logits is None or mask is None or mask.dtype.is_floating_point or mask.dtype.itemsize > 1:
        return None
    return CategoricalTerms(logits, mask.bool()) if neg_inf <= HARD else None


def _masked_one_hot(
    logits: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    neg_inf: float = float("-inf"),
    padding_value: int | None = None,
    grad_method: Any = None,
) -> Terms | None:
    """Builds the terms of ``MaskedOneHotCategorical`` with a boolean mask."""
    if logits is None or mask is None or mask.dtype.is_floating_point or mask.dtype.itemsize > 1:
        return None
    return CategoricalTerms(logits, mask.bool(), one_hot=True) if neg_inf <= HARD else None


def _from_masked(dist: Any, *, one_hot: bool) -> Terms | None:
    """Returns the terms of a masked distribution object, whose logits are already masked."""
    if dist._sparse_mask or dist.neg_inf > HARD:
        return None
    return CategoricalTerms(dist.logits, dist._mask, one_hot=one_hot)


def _from_tanh_normal(dist: Any) -> Terms | None:
    """Returns the terms of a ``TanhNormal`` object."""
    if type(dist._t).__name__ == "TanhTransform":
        return None
    return TanhNormalTerms(dist.loc, dist.scale, dist.low, dist.high, event_ndim=dist._event_dims)


FAMILIES.update(
    {
        td.IndependentNormal: _independent_normal,
        td.TanhNormal: _tanh_normal,
        td.OneHotCategorical: _one_hot,
        td.MaskedCategorical: _masked,
        td.MaskedOneHotCategorical: _masked_one_hot,
    }
)
INSTANCES.update(
    {
        td.IndependentNormal: lambda x: NormalTerms(
            x.base_dist.loc, x.base_dist.scale, event_ndim=x._event_dim
        ),
        td.TanhNormal: _from_tanh_normal,
        td.OneHotCategorical: lambda x: CategoricalTerms(x.logits, one_hot=True),
        td.MaskedCategorical: lambda x: _from_masked(x, one_hot=False),
        td.MaskedOneHotCategorical: lambda x: _from_masked(x, one_hot=True),
    }
)

__all__ = [
    "AUTO_MASK_KEYS",
    "ESTIMATORS",
    "MULTI_AGENT_GAE",
    "ExplorationType",
    "LossMeta",
    "LossModule",
    "Mixin",
    "ValueEstimatorBase",
    "ValueEstimators",
    "build_value_estimator",
    "loss_context",
    "swapped",
]
