"""Which ranks need no copy in another machine's memory, because it holds their boxes already.

Replicas hold the same state. Where each box that a rank owns lies, whole, in the memory of ranks
on machines that share no domain with its own, the loss of any one domain leaves a holder, and no
byte has to travel. Whoever relies on it captures those boxes there as well: a snapshot that only
its owner captures has one holder, whatever the live tensors of others are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache

from holdfast.layout import Topology
from holdfast.policy.placement import Machine, shared
from holdfast.spec.boxes import Box
from holdfast.spec.ownership import owned_boxes
from holdfast.spec.state import StateTable, local_boxes


def held_apart(
    topology: Topology, table: StateTable, machines: Mapping[str, Machine]
) -> frozenset[int]:
    """The ranks whose every owned box is held, too, by ranks that stand apart from them.

    `machines` by the names in `topology.nodes`; one that is missing there stands alone. Where a
    rank that stands apart has the same place in a replica of the same kind, it holds all that this
    one holds, and no box needs to be looked at.
    """

    @cache
    def apart(one: str, other: str) -> bool:
        return not shared(
            machines.get(one, Machine(one)), machines.get(other, Machine(other))
        )  # fmt: skip

    @cache
    def local(rank: int) -> dict[str, Box]:
        return {box.name: box for box in local_boxes(topology, table, rank)}

    def covered(rank: int) -> bool:
        others = [r for r, node in enumerate(nodes) if apart(nodes[rank], node)]
        return all(_covered(box, others, local) for box in owned_boxes(topology, table, rank))

    nodes = topology.nodes
    found: set[int] = set()
    for replica in topology.replicas:
        twins = [other for other in topology.replicas if other.kind == replica.kind]
        for place, rank in enumerate(replica.ranks):
            if any(apart(nodes[rank], nodes[t.ranks[place]]) for t in twins) or covered(rank):
                found.add(rank)
    return frozenset(found)


def _covered(box: Box, ranks: Iterable[int], local: Callable[[int], dict[str, Box]]) -> bool:
    left = [box] if box.size else []
    for rank in ranks:
        left = [rest for part in left for rest in without(part, local(rank)[box.name])]
        if not left:
            return True
    return not left


def without(box: Box, hole: Box) -> list[Box]:
    """What is left of a box when a part is taken out: at most two boxes a dim."""
    common = box.intersect(hole)
    if common is None:
        return [box]
    out: list[Box] = []
    offsets, lengths = list(box.offsets), list(box.lengths)
    for dim, (start, stop) in enumerate(zip(common.offsets, common.stops, strict=True)):
        end = offsets[dim] + lengths[dim]
        for low, high in ((offsets[dim], start), (stop, end)):
            if low < high:
                at, size = [*offsets], [*lengths]
                at[dim], size[dim] = low, high - low
                out.append(Box(box.name, tuple(at), tuple(size)))
        offsets[dim], lengths[dim] = start, stop - start
    return out
