"""Everything the losses take from TorchRL, in one place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import distributions as td
from torchrl.modules.tensordict_module.rnn import set_recurrent_mode
from torchrl.objectives.common import LossModule
from torchrl.objectives.utils import ValueEstimators, dispatch_value_estimator
from torchrl.objectives.value import ValueEstimatorBase

from composite_losses.heads.categorical import CategoricalTerms
from composite_losses.heads.families import NormalTerms, TanhNormalTerms
from composite_losses.heads.registry import FAMILIES, INSTANCES, full_scale
from composite_losses.heads.terms import Terms

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


@contextmanager
def loss_context(loss: LossModule) -> Iterator[None]:
    """Context in which TorchRL runs ``forward``: the loss's exploration type, recurrent mode."""
    with set_exploration_type(loss.deterministic_sampling_mode), set_recurrent_mode(True):
        yield


def build_value_estimator(
    loss: Any, value_type: Any, tensor_keys: dict[str, Any], **hyperparams: Any
) -> None:
    """Gives the loss the value estimator that TorchRL builds for it."""
    dispatch_value_estimator(
        loss, value_type, supported=ESTIMATORS, tensor_keys=tensor_keys, **hyperparams
    )


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
    "LossModule",
    "Mixin",
    "ValueEstimatorBase",
    "ValueEstimators",
    "build_value_estimator",
    "loss_context",
]
