"""Which ranks need no copy in another machine's memory, because it holds their boxes already.

Replicas hold the same state. Where each box that a rank owns lies, whole, in the memory of ranks
on machines that share no domain with its own, the loss of any one domain leaves a holder, and no
byte has to travel. Live tensors are no snapshot, though: what a rank owns is captured by the owner
alone, so that nothing is written twice to disk and bucket, and has one holder then.

So a rank may have a **mirror**: the rank at the same place of another replica of the same kind, on
a machine that stands apart. It holds every box that the first one owns, so it can capture the very
same part: the same boxes in the same order, the same bytes, the same checksums, under the same key,
into an arena of its own (`Capturer(..., part=)`), for memory alone. With two replicas both halves
of the state then lie on both sides. Nobody relies on it unseen: the owner still offers its part,
and the mirror's mover compares the checksums with what it captured itself. Equal: it is held, and
no byte travels. Not there (a capture was skipped, that node is slow): it is pulled like any other.
Not equal: the replicas differ, which they never may, and the offer is refused with that sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache

from holdfast.layout import Topology
from holdfast.policy.placement import DOMAINS, Machine, shared
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


def mirrors(topology: Topology, machines: Mapping[str, Machine]) -> dict[int, int]:
    """rank -> the rank that captures its part too, for those that have one: at the same place of
    another replica of the same kind, on a machine that shares the least with its own, and no node.

    Of replicas that stand equally far away each takes the next one, in their order around, so that
    every rank mirrors about as many as mirror it.
    """

    def machine(rank: int) -> Machine:
        name = topology.nodes[rank]
        return machines.get(name, Machine(name))

    found: dict[int, int] = {}
    for number, replica in enumerate(topology.replicas):
        around = [*topology.replicas[number + 1 :], *topology.replicas[:number]]
        twins = [other for other in around if other.kind == replica.kind]
        for place, rank in enumerate(replica.ranks):
            apart = [
                (danger, twin.ranks[place])
                for twin in twins
                if "node" not in (both := shared(machine(rank), machine(twin.ranks[place])))
                for danger in [tuple(kind in both for kind in DOMAINS)]
            ]
            if apart:
                found[rank] = min(apart, key=lambda one: one[0])[1]
    return found


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
