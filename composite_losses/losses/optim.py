"""Parameter groups for an optimiser: separate options for actors, critics and groups of agents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from composite_losses.errors import ConfigError
from composite_losses.losses._base import BaseLoss
from composite_losses.losses._groups import Groups
from composite_losses.losses._options import plain

Options = float | Mapping[str, Any] | None


def param_groups(
    loss: BaseLoss | Groups,
    *,
    actor: Options = None,
    critic: Options = None,
    groups: Mapping[str, Mapping[str, Options]] | None = None,
) -> list[dict[str, Any]]:
    """Returns parameter groups, one per actor and critic, each parameter once.

    A parameter that an actor shares with a critic (or with another group) belongs to the first that
    has it, actors before critics. Frozen parameters are left out.

    Args:
        loss: a loss, or a loss over a map of groups.
        actor: learning rate of the actors, or options such as ``{"lr": 3e-4, "eps": 1e-5}``;
            None leaves the optimiser's default.
        critic: the same for the critics.
        groups: agent group → ``{"actor": ..., "critic": ...}``, in place of the two.

    Raises:
        ConfigError: a group or a network that the loss does not have.

    Example:
        >>> optimiser = torch.optim.Adam(param_groups(loss, actor=3e-4, critic=1e-3))
    """
    members = dict(loss.losses) if isinstance(loss, Groups) else {"": loss}
    for name, options in (groups or {}).items():
        if name not in members or not name:
            known = ", ".join(map(repr, filter(None, members))) or "none"
            raise ConfigError(f"groups: unknown group {name!r}; the loss has {known}.")
        for network in options:
            if network not in ("actor", "critic"):
                raise ConfigError(
                    f"groups[{name!r}]: expected 'actor' or 'critic', found {network!r}."
                )
    defaults = {"actor": actor, "critic": critic}
    seen: set[int] = set()
    out: list[dict[str, Any]] = []
    for network in ("actor", "critic"):
        for name, member in members.items():
            chosen = (groups or {}).get(name, {}).get(network, defaults[network])
            fresh = [p for p in _parameters(member, network) if id(p) not in seen]
            seen.update(map(id, fresh))
            if fresh:
                label = f"{name}/{network}" if name else network
                out.append({"params": fresh, "name": label, **_as_options(chosen)})
    return out


def _as_options(options: Options) -> dict[str, Any]:
    """Returns a learning rate, or options, as options."""
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        return {"lr": float(options)}
    return dict(plain(options))


def _parameters(loss: BaseLoss, network: str) -> Iterator[nn.Parameter]:
    """Yields the trainable parameters of a loss's actor or critic."""
    held = getattr(loss, f"{network}_network_params")
    module = getattr(loss, f"{network}_network") if held is None else held
    if module is not None:
        yield from (p for p in module.parameters() if p.requires_grad)
