"""Chances of each class of a loss (`ladder.py`), if nodes are lost at random. Pure.

A plan costs thousands of layouts, so it takes these formulas in place of drawn losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, lgamma


def class_chances(
    replicas: Sequence[tuple[int, int]] | None, nodes: int, lost: int
) -> tuple[float, float, float]:
    """Return the chances of CONTINUES, FROM_MEMORY and FROM_STORE.

    Args:
        replicas: (groups of replicas that share no node, nodes of each), by kind of replica. None:
            a replica lies elsewhere.
        nodes: that may be lost.
        lost: how many of them are, each set of them with the same chance.
    """
    broken = 1.0 if replicas is not None else 0.0  # chance that no replica stays complete
    for groups, size in replicas or ():
        hit = 1 - chance_of_none(nodes, min(size, nodes), lost)
        broken *= 0.0 if lost < groups else hit**groups
    memory = _copies_survive(nodes, lost)
    return 1 - broken, broken * memory, broken * (1 - memory)


def _copies_survive(nodes: int, lost: int) -> float:
    """Return the chance that each lost node's copy lies on a node that is left. Each has one copy,
    on another node."""
    if lost >= nodes:
        return 0.0
    return (1 - (lost - 1) / (nodes - 1)) ** lost if nodes > 1 else 0.0


def chance_of_none(nodes: int, marked: int, drawn: int) -> float:
    """Return the chance that none of the marked nodes is drawn."""
    if drawn > nodes - marked:
        return 0.0
    return exp(_log_ways(nodes - marked, drawn) - _log_ways(nodes, drawn))


def _log_ways(n: int, k: int) -> float:
    return lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)
