"""One loss for a whole map of agent groups."""

from __future__ import annotations

from composite_losses.losses._groups import Groups


class GroupLoss(Groups):
    """The sum of one loss per agent group: one call, one backward pass.

    Groups may differ in everything: number of agents, observations, heads, algorithm,
    coefficients. A member's keys that are still at their defaults (advantage, value target, value,
    reward, done, terminated) become ``(group, name)``; a reward, done or terminated entry that a
    group does not have is the root's, expanded over the group's agents.

    Outputs, all 0-dim: for every name that starts with "loss" the coefficient-weighted sum over the
    groups that have it, and ``"<group>/<name>"``, unweighted, for everything.

    Args:
        losses: group name → loss, one of its own for every group; kept as the members, see
            ``losses``.
        coeff: group name → weight of its losses in the sums, dimensionless, 1 for groups it does
            not name; kept as the buffer ``coeff``, in the order of the groups.
        missing: what happens where the data hold no entry of a group: ``"error"``, or ``"skip"``
            (its losses are 0, its metrics NaN).

    Shapes:
        Data: each group's entries as its loss takes them; S is ``[*B, A]``, the root batch and the
        group's agents (``[*B]`` without any). Log-probs are in nats, advantages in units of return.
        Outputs are 0-dim.

    Raises:
        ConfigError: no group, a group whose name starts with "loss", a member that does not reduce,
            one loss for two groups, a loss that a group of another name has taken, or an unknown
            group in ``coeff``.
        MissingKeyError: (call) the data hold no entry of a group and ``missing`` is "error", or a
            member finds no entry it needs.
        ShapeError: (call) an entry whose shape does not fit the samples.
        GraphError: (call) a stored log-prob or value requires grad.
        NonFiniteError: (call, a member that validates) a log-prob that counts is not finite.

    Source: definition.

    Example:
        >>> loss = GroupLoss.from_group_map(env.group_map, lambda group: MAPPOLoss(*nets[group]))
        >>> loss.value_estimator(data)
        >>> out = loss(data)
        >>> sum(value for name, value in out.items() if name.startswith("loss")).backward()
    """
