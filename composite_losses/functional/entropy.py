"""The entropy bonus of a policy with several heads."""

from torch import Tensor

from composite_losses.functional.masking import fill
from composite_losses.functional.shapes import require_per_head, require_same_shape


def entropy_sum(
    entropy: Tensor, coeff: Tensor | float = 1.0, active: Tensor | None = None
) -> Tensor:
    """``sum_h coeff_h H_h`` in nats, ``[*S]``.

    Args:
        entropy: ``[*S, H]``, nats.
        coeff: float, 0-dim or ``[H]``, in units of the objective per nat.
        active: bool ``[*S, H]``; an inactive head contributes 0 and may hold anything.

    Gradient goes to the entropy of active heads.

    Raises:
        ShapeError: if a shape is not one of those above.

    Source: Mnih et al. 2016, "Asynchronous methods for deep reinforcement learning", section 4,
    arXiv 1602.01783; by heads: definition.
    """
    if active is not None:
        require_same_shape(entropy=entropy, active=active)
    if isinstance(coeff, Tensor):
        require_per_head("coeff", coeff, entropy)
    return (fill(entropy, active) * coeff).sum(-1)
