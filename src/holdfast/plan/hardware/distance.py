"""How much dearer a collective is far away than in a node: the one answer of `layout distance`,
`claims` and the docs. A ring's all-reduce by the alpha-beta model of `link.py`."""

from __future__ import annotations

from math import inf, sqrt

from holdfast.plan.hardware.link import Link

HUNDREDFOLD = 100.0


def times_dearer(near: Link, far: Link, size: float, ranks: int) -> float:
    """Time of a ring's all-reduce of `size` bytes over `far`, divided by that over `near`."""
    return far.allreduce_s(size, ranks) / near.allreduce_s(size, ranks)


def hundredfold_gbit_s(near: Link, far: Link, size: float, ranks: int, devices: int) -> float:
    """Return the Gbit/s of a node up to which a ring is at least a hundred times dearer.

    near: the link in a node. far: the link between nodes, of which latency and ramp count. size:
    bytes of a rank. devices: of a node, all of which send at once. inf: the latency alone is a
    hundred times dearer."""
    piece = size / ranks
    budget_s = HUNDREDFOLD * near.message_s(piece) - far.latency_s
    if budget_s <= 0:
        return inf
    root = far.ramp * sqrt(far.latency_s)  # seconds of moving solve s + root * sqrt(s) = budget_s
    moving_s = ((sqrt(root * root + 4 * budget_s) - root) / 2) ** 2
    return piece / moving_s * devices * 8 / 1e9
