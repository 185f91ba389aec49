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

from collections.abc import Mapping

from holdfast.layout import Topology
from holdfast.policy.placement import DOMAINS, Machine, shared


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
