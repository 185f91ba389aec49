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


def mirror_of(topology: Topology, machines: Mapping[str, Machine], rank: int) -> int | None:
    """The rank that captures this one's part too, if there is one: at the same place of another
    replica of the same kind, on a machine that shares the least with its own, and no node.

    Of replicas that stand equally far away it is the next one, in their order around, so that every
    rank mirrors about as many as mirror it.
    """

    def machine(of: int) -> Machine:
        name = topology.nodes[of]
        return machines.get(name, Machine(name))

    number, replica = next((n, r) for n, r in enumerate(topology.replicas) if rank in r.ranks)
    place = replica.ranks.index(rank)
    best, least = None, len(DOMAINS) * (True,)
    for other in (*topology.replicas[number + 1 :], *topology.replicas[:number]):
        if other.kind != replica.kind:
            continue
        twin = other.ranks[place]
        both = shared(machine(rank), machine(twin))
        danger = tuple(kind in both for kind in DOMAINS)
        if "node" not in both and danger < least:
            best, least = twin, danger
        if not any(least):
            break
    return best


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
