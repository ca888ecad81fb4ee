"""Checkpoints of TorchRL's losses: where their entries stand in ours."""

from __future__ import annotations

from typing import Any

# TorchRL keeps coefficients on the loss, this library on the part that owns them
PLACES = {
    "clip_epsilon": "surrogate.eps_low",
    "clip_epsilon_low": "surrogate.eps_low",
    "clip_epsilon_high": "surrogate.eps_high",
    "entropy_coeff": "entropy.coeff",
    "critic_coeff": "value.coeff",
    "clip_value": "value.clip",
    "beta": "surrogate.beta",
}
NORMS = {"value_norm.": "value.norm.", "advantage_norm.": "advantage.norm."}
PARTS = ("surrogate.", "entropy.", "value.", "advantage.")


def adopt(loss: Any, state: dict[str, Any], prefix: str) -> None:
    """Renames, in place, the entries of a TorchRL checkpoint to those of a loss of this library.

    What only TorchRL's constructor knows is not in its checkpoint and stays as it is; what TorchRL
    stores and this checkpoint lacks stays missing, so that a strict load says so. A checkpoint of
    this library is left alone.
    """
    own = {key for key in state if key.startswith(prefix)}
    if any(key.startswith(prefix + part) for key in own for part in PARTS):
        return
    current = loss.state_dict()
    pair = bool(getattr(loss.surrogate, "asymmetric", False))
    for name, place in PLACES.items():
        known = place in current
        if name.startswith("clip_epsilon") and (name != "clip_epsilon") != pair:
            known = False
        if not known or prefix + name not in state:
            continue  # what has no place stays, and a strict load says so
        value = state.pop(prefix + name)
        if name == "entropy_coeff" and current["entropy.coeff"].ndim:
            continue
        shape = current[place].shape
        state[prefix + place] = value.expand(shape) if value.ndim == 0 else value
    for key in own:
        for theirs, ours in NORMS.items():
            if key.startswith(prefix + theirs):
                state[prefix + ours + key[len(prefix + theirs) :]] = state.pop(key)
    stored = set(PLACES.values())
    if loss.label == "Reinforce":
        stored = set()  # TorchRL's has no coefficients
    elif "entropy.coeff" in current and current["entropy.coeff"].ndim:
        stored.discard("entropy.coeff")  # a mapping by head is not in TorchRL's checkpoint
    for key, value in current.items():
        statistic = key.startswith(tuple(NORMS.values()))
        if key.startswith(PARTS) and key not in stored and not statistic:
            state.setdefault(prefix + key, value)
