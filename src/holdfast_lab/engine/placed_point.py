"""The topology of a layout at work, for the recovery ladder. Pure.

A cost model that knows its layouts gives their topologies. Otherwise a node is one rank: it has an
equal share of its replica. Nodes are named by their place in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from holdfast.layout import Replica, Topology
from holdfast.policy.recovery.ladder import Successor, loss_of_nodes, recover
from holdfast.policy.recovery.state_parts import StateSizes
from holdfast_lab.engine.interfaces import OperatingPoint


def topology_by_place(point: OperatingPoint) -> Topology:
    """Return the topology on nodes "0", "1", ..."""
    return point.topology or _topology(point.nodes, point.replicas)


@lru_cache(maxsize=1024)
def _topology(nodes: int, replicas: int) -> Topology:
    places = tuple(map(str, range(nodes)))
    if replicas > nodes:  # several on a node
        alone = tuple(Replica(index, (index,)) for index in range(replicas))
        return Topology(0, alone, tuple(places[i * nodes // replicas] for i in range(replicas)))
    each = nodes // replicas
    found: list[Replica] = []
    for index in range(replicas):
        last = nodes if index == replicas - 1 else (index + 1) * each
        ranks = tuple(range(index * each, last))
        found.append(Replica(index, ranks, (1, len(ranks), 1, 1)))
    return Topology(0, tuple(found), places)


def topology_on(point: OperatingPoint, names: Sequence[str]) -> Topology:
    """Return the topology on nodes with these names, in the order of ranks."""
    placed = topology_by_place(point)
    return replace(placed, nodes=tuple([names[int(place)] for place in placed.nodes]))


def sizes_of(point: OperatingPoint, state_bytes: float) -> StateSizes:
    """Return the bytes of the state by layer. They add up to `state_bytes`."""
    if point.sizes is None:
        return StateSizes(blocks=(state_bytes,))
    sizes = point.sizes
    factor = state_bytes / (sizes.first + sum(sizes.blocks) + sizes.last)
    if factor == 1:
        return sizes
    blocks = tuple(factor * block for block in sizes.blocks)
    return StateSizes(factor * sizes.first, blocks, factor * sizes.last)


@lru_cache(maxsize=1024)
def growth_rung(before: OperatingPoint, after: OperatingPoint) -> int:
    """Return the rung on which a run takes another layout if no node is lost."""
    loss = loss_of_nodes(topology_by_place(before), (), {})
    return recover(loss, Successor(topology_by_place(after))).rung
