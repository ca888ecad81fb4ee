"""Options of the parts: numbers, clip ranges and head names, validated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from composite_losses.errors import ConfigError
from composite_losses.heads import HeadPlan


def plain(value: Any) -> Any:
    """Returns a configuration's mappings and lists, of any kind, as dicts and tuples."""
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(plain(each) for each in value)
    return value


def scalar(name: str, value: Any) -> Tensor:
    """Returns a number or a one-element tensor as a 0-dim tensor.

    Raises:
        ValueError: anything else, booleans included.
    """
    is_number = isinstance(value, (Real, Tensor)) and not isinstance(value, bool)
    if not is_number or (isinstance(value, Tensor) and value.numel() != 1):
        raise ConfigError(f"{name} must be a float or a scalar tensor, got {value}.")
    return torch.as_tensor(
        value, dtype=None if isinstance(value, Tensor) else torch.float32
    ).reshape(())


def head_position(plan: HeadPlan, key: Any, what: str) -> int:
    """Returns the position of the head that ``key`` names.

    Raises:
        ConfigError: the actor has no such head.
    """
    position = plan.index(key)
    if position is None:
        raise ConfigError(
            f"{what}: unknown head {key!r}; the heads are {', '.join(map(repr, plan.names))}."
        )
    return position


def eps_pair(eps: Any) -> tuple[Tensor, Tensor]:
    """Returns the clip range as (low, high) tensors.

    Raises:
        ConfigError: a pair of another length, negative, or with low ≥ 1; a negative number.
    """
    if isinstance(eps, Sequence) and not isinstance(eps, str):
        if len(eps) != 2:
            raise ConfigError(f"clip epsilon: expected a pair of length 2 (low, high), got {eps}.")
        low, high = scalar("clip epsilon", eps[0]).clone(), scalar("clip epsilon", eps[1]).clone()
        if not (float(low) >= 0 and float(high) >= 0):
            raise ConfigError(f"clip epsilon: both bounds must be non-negative, got {eps}.")
        if float(low) >= 1:
            raise ConfigError(f"clip epsilon: the lower one must be < 1, got {eps}.")
        return low, high
    value = scalar("clip epsilon", eps)
    if not float(value) >= 0:
        raise ConfigError(f"clip epsilon: must be non-negative, got {eps}.")
    return value.clone(), value.clone()
