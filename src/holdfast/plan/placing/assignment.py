"""Turns the number of replicas into an assignment of workers, with as little change as possible."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from holdfast.config.run import RunConfig
from holdfast.layout import Layout, MeshShape, Replica, Stages
from holdfast.plan.hardware.cluster import Cluster
from holdfast.plan.placing.domains import DomainChooser, placement_costs
from holdfast.plan.placing.interface import NodePlaces, PresentPlacement
from holdfast.plan.placing.replica_counts import ReplicaCounts
from holdfast.plan.placing.replica_shapes import AllowedShapes, StateOverlap


class WorkerSlot(NamedTuple):
    """A worker's place. old_rank: its rank in the present topology; None for a newcomer."""

    node: int
    old_rank: int | None


class PlacePool:
    """Free places by node, and the workers without a place that are on each. These count among the
    free places of their node.

    A replica goes to the fullest node that it fits on. One that fits on none fills the emptiest
    nodes, in parts that tp divides, and the rest goes where it fits best. Nodes are indexed by the
    number of their free places, so a choice does not scan the other nodes.
    """

    def __init__(self, free: Sequence[int], speeds: Sequence[float], held: Mapping[int, list[int]]):
        self.free_places = list(free)
        self.workers_by_node = {node: list(ranks) for node, ranks in held.items()}
        self._speeds = speeds
        self._empty = [n - len(self.workers_by_node.get(node, ())) for node, n in enumerate(free)]
        self._by_free: dict[int, list[tuple[float, int]]] = {}
        for node, n in enumerate(self.free_places):
            self._by_free.setdefault(n, []).append((-speeds[node], node))
        for heap in self._by_free.values():
            heapify(heap)

    def leave_idle(self, number: int, unit: int = 1) -> None:
        """Give up this many places. Those come first that no group of `unit` workers fills. Then
        come slow nodes, then nodes without held state, then complete nodes."""
        if number <= 0:
            return
        for node, free in enumerate(self.free_places):
            held = len(self.workers_by_node.get(node, ()))
            given = min(number, free % unit, free - held)
            if given > 0:
                self.reserve(node, given)
                number -= given
        order = sorted(
            (node for node, n in enumerate(self.free_places) if n),
            key=lambda i: (
                self._speeds[i],
                len(self.workers_by_node.get(i, ())),
                self.free_places[i] > number,
                -self.free_places[i],
                -i,
            ),
        )
        for node in order:
            given = min(number, self.free_places[node])
            self.reserve(node, given)
            number -= given

    def reserve(self, node: int, number: int) -> None:
        self.free_places[node] -= number
        heap = self._by_free.setdefault(self.free_places[node], [])
        heappush(heap, (-self._speeds[node], node))

    def take_places(
        self, size: int, unit: int = 1, among: Collection[int] | None = None
    ) -> list[tuple[int, int]]:
        """(node, places) for a replica of `size` workers, of which `unit` in a row belong
        together. There must be so many free places. among: nodes that may be used; None: all."""
        if among is not None:
            return self._take_among(size, unit, among)
        parts: list[tuple[int, int]] = []
        while size:
            counts = sorted(n for n in self._by_free if n)
            node = next(
                (i for n in counts if n >= size and (i := self._fastest_node_with(n)) is not None),
                None,
            )
            given = size
            if node is None:
                node = next(
                    i for n in reversed(counts) if (i := self._fastest_node_with(n)) is not None
                )
                given = self.free_places[node]
                given -= given % unit if given > unit else 0
            self.reserve(node, given)
            parts.append((node, given))
            size -= given
        return parts

    def _take_among(self, size: int, unit: int, among: Collection[int]) -> list[tuple[int, int]]:
        """As `take_places`, by a look at each of these nodes."""
        parts: list[tuple[int, int]] = []
        while size:
            there = [node for node in among if self.free_places[node]]
            speed_first = {node: (-self._speeds[node], node) for node in there}
            enough = [node for node in there if self.free_places[node] >= size]
            if enough:
                node = min(enough, key=lambda i: (self.free_places[i], speed_first[i]))
                given = size
            else:
                node = min(there, key=lambda i: (-self.free_places[i], speed_first[i]))
                given = self.free_places[node]
                given -= given % unit if given > unit else 0
            self.reserve(node, given)
            parts.append((node, given))
            size -= given
        return parts

    def use_newcomer(self, node: int) -> WorkerSlot:
        """Return a seat for a worker without state, or for a remaining worker if the node has no
        free place."""
        if self._empty[node] > 0 or not self.workers_by_node.get(node):
            self._empty[node] -= 1
            return WorkerSlot(node, None)
        return WorkerSlot(node, self.workers_by_node[node].pop(0))

    def use_worker(self, node: int, rank: int) -> WorkerSlot:
        """A worker that is there."""
        self.workers_by_node[node].remove(rank)
        return WorkerSlot(node, rank)

    def _fastest_node_with(self, free: int) -> int | None:
        """The quickest node with so many free places."""
        heap = self._by_free[free]
        while heap and self.free_places[heap[0][1]] != free:
            heappop(heap)
        return heap[0][1] if heap else None


class PresentReplicas:
    """The present replicas: which are complete, and which workers are left of the rest.

    `whole_replicas`, smaller: complete replicas, of the run file's kinds and of other kinds.
    broken_replicas: the rest, with the ranks that are alive in mesh order.
    """

    def __init__(
        self, shapes: AllowedShapes, nodes: Sequence[NodePlaces], present: PresentPlacement | None
    ):
        self._node_index = {node.name: i for i, node in enumerate(nodes)}
        self.whole_replicas: list[tuple[Replica, Layout]] = []
        self.smaller_replicas: list[tuple[Replica, Layout]] = []
        self.broken_replicas: list[tuple[Replica, Sequence[int | None]]] = []
        self._names: tuple[str, ...] = ()
        if present is None:
            return
        self._names = present.topology.nodes
        alive = self._placeable_ranks(present, nodes)
        kinds = {shape.kind: shape for shape in shapes.configured}
        for r in present.topology.replicas:
            if not alive.issuperset(r.ranks):
                left = [rank if rank in alive else None for rank in r.ranks]
                self.broken_replicas.append((r, left))
            elif r.kind in kinds and shapes.fits_memory(kinds[r.kind]):
                self.whole_replicas.append((r, kinds[r.kind]))
            elif shapes.is_allowed(r.mesh_shape):
                shape = Layout.of_mesh(r.mesh_shape, r.stages, is_folded=r.is_folded)
                self.smaller_replicas.append((r, shape))
            else:
                self.broken_replicas.append((r, r.ranks))

    def node_of(self, rank: int) -> int:
        return self._node_index[self._names[rank]]

    def _placeable_ranks(self, present: PresentPlacement, nodes: Sequence[NodePlaces]) -> set[int]:
        """Return the ranks whose process lives and has a place. If a node has fewer places than
        workers, workers of complete replicas stay first."""
        found: dict[int, list[tuple[bool, int]]] = {}
        for r in present.topology.replicas:
            there = [rank for rank in r.ranks if rank not in present.lost_ranks]
            there = [rank for rank in there if self._names[rank] in self._node_index]
            for rank in there:
                found.setdefault(self.node_of(rank), []).append((len(there) < len(r.ranks), rank))
        return {
            rank for node, held in found.items() for _, rank in sorted(held)[: nodes[node].places]
        }


@dataclass
class PlacedReplica:
    """A replica of the new topology."""

    shape: Layout
    slots: list[WorkerSlot]  # in mesh order
    sort_key: tuple[int, int]  # those that were there come first, by their numbers
    is_unchanged: bool = False


_Was = tuple[MeshShape, Stages, int]  # mesh, stages and mesh rank of a worker in the old topology


@dataclass
class ReplicaPlacer:
    config: RunConfig
    nodes: Sequence[NodePlaces]
    present: PresentReplicas
    counts: ReplicaCounts
    cluster: Cluster | None = None
    replicas: list[PlacedReplica] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._parts = StateOverlap(self.config)
        self._domains = DomainChooser(
            [node.machine for node in self.nodes], placement_costs(self.config, self.cluster)
        )
        self._was: dict[int, _Was] = {}
        self._gone_on: list[tuple[Replica, Sequence[int | None]]] = list(
            self.present.broken_replicas
        )

    def place(self) -> list[PlacedReplica]:
        free = [node.places for node in self.nodes]
        due = self._keep_unchanged(free)
        pool = PlacePool(free, [node.speed for node in self.nodes], self._unplaced_workers())
        idle = sum(free) - sum(shape.replica_size * n for shape, n in due.items())
        if self._domains.is_of_use:  # the domains decide which places stay idle, but for slow ones
            fastest = max(node.speed for node in self.nodes)
            pairs = zip(self.nodes, free, strict=True)
            idle = min(idle, sum(n for node, n in pairs if node.speed < fastest))
        pool.leave_idle(idle, max((s.tp for s in +due), default=1))
        self._repair_replicas(due, pool)
        domains = self._domains
        for replica in self.replicas:
            domains.place(seat.node for seat in replica.slots)
        for shape in sorted((+due).elements(), key=lambda s: (-s.replica_size, s.mesh_shape)):
            among = domains.choose(shape.replica_size, pool.free_places)
            parts = pool.take_places(shape.replica_size, shape.tp, among)
            domains.place(node for node, _ in parts)
            seats = self._assign_slots(shape, domains.in_order(parts), pool)
            self.replicas.append(PlacedReplica(shape, seats, (1, len(self.replicas))))
        return sorted(self.replicas, key=lambda each: each.sort_key)

    def missing_bytes(self, replica: PlacedReplica) -> int:
        """Bytes that its workers lack."""
        if replica.is_unchanged:
            return 0
        return sum(
            self._parts.total_bytes(replica.shape, at)
            - self._common_bytes(seat.old_rank, replica.shape, at)
            for at, seat in enumerate(replica.slots)
        )

    # --- what stays -------------------------------------------------------------------------
    def _keep_unchanged(self, free: list[int]) -> Counter[Layout]:
        """Takes the replicas that stay as they are out of `free`; returns what is to be made."""
        due = self.counts.full_replicas + Counter(self.counts.new_shapes)
        kept = set(self.counts.kept_replicas)
        staying = [each for i, each in enumerate(self.present.smaller_replicas) if i in kept]
        leaving = [each for i, each in enumerate(self.present.smaller_replicas) if i not in kept]
        for each in self.present.whole_replicas:
            stays = due[each[1]] > 0
            (staying if stays else leaving).append(each)
            due[each[1]] -= stays
        for replica, shape in staying:
            seats = [WorkerSlot(self.present.node_of(rank), rank) for rank in replica.ranks]
            for seat in seats:
                free[seat.node] -= 1
            self.replicas.append(PlacedReplica(shape, seats, (0, replica.index), is_unchanged=True))
        self._gone_on += [(replica, replica.ranks) for replica, _ in leaving]
        return due

    def _unplaced_workers(self) -> dict[int, list[int]]:
        """Workers that are alive in a replica that does not stay, by node."""
        held: dict[int, list[int]] = {}
        for replica, ranks in self._gone_on:
            for at, rank in enumerate(ranks):
                if rank is not None:
                    self._was[rank] = (*replica.kind, at)
                    held.setdefault(self.present.node_of(rank), []).append(rank)
        return held

    def _common_bytes(self, was: int | None, shape: Layout, at: int) -> int:
        """Bytes that an old rank holds of what is needed at a place of `shape`."""
        if was is None:
            return 0
        return self._parts.common_bytes(*self._was[was], shape.mesh_shape, shape.stages, at)

    # --- what is mended ---------------------------------------------------------------------
    def _repair_replicas(self, due: Counter[Layout], pool: PlacePool) -> None:
        """Mend the due replicas that lost a worker, those with the fewest gaps first. All their
        remaining workers get places before any gap is filled. So no replica is dissolved to fill
        another."""
        kinds = {shape.kind: shape for shape in due}
        order = sorted(
            (each for each in self.present.broken_replicas if each[0].kind in kinds),
            key=lambda each: (each[1].count(None) / len(each[1]), each[0].index),
        )
        begun: list[tuple[Replica, Layout, dict[int, WorkerSlot]]] = []
        for replica, ranks in order:
            shape = kinds[replica.kind]
            seats = self._left_in_place(ranks, pool) if due[shape] > 0 else {}
            if seats:
                due[shape] -= 1
                begun.append((replica, shape, seats))
        for replica, shape, seats in begun:
            self._fill_gaps(shape, seats, pool)
            placed = [seats[at] for at in range(shape.replica_size)]
            self.replicas.append(PlacedReplica(shape, placed, (0, replica.index)))

    def _left_in_place(self, ranks: Sequence[int | None], pool: PlacePool) -> dict[int, WorkerSlot]:
        seats: dict[int, WorkerSlot] = {}
        for at, rank in enumerate(ranks):
            if rank is not None and pool.free_places[node := self.present.node_of(rank)]:
                pool.reserve(node, 1)
                seats[at] = pool.use_worker(node, rank)
        return seats

    def _fill_gaps(self, shape: Layout, seats: dict[int, WorkerSlot], pool: PlacePool) -> None:
        own = Counter(seat.node for seat in seats.values())
        gaps = [at for at in range(shape.replica_size) if at not in seats]

        def fill(node: int, number: int) -> list[int]:
            """Put workers of a node into some of the gaps; the gaps that are left."""
            seats.update(self._match_workers(shape, node, number, gaps, pool))
            return [at for at in gaps if at not in seats]

        for node, _ in own.most_common():
            if number := min(len(gaps), pool.free_places[node]):
                pool.reserve(node, number)
                gaps = fill(node, number)
        while gaps and (found := self._find_donors(shape, gaps, pool)):
            pool.reserve(*found)
            gaps = fill(*found)
        near = self._domains.near(own, len(gaps), pool.free_places)
        for node, number in pool.take_places(len(gaps), among=near):
            gaps = fill(node, number)

    def _match_workers(
        self, shape: Layout, node: int, number: int, places: Sequence[int], pool: PlacePool
    ) -> dict[int, WorkerSlot]:
        """`number` of the places, each to whom of the node holds most of it; then newcomers."""
        pairs = [
            (-common, at, rank)
            for rank in pool.workers_by_node.get(node, ())
            for at in places
            if (common := self._common_bytes(rank, shape, at))
        ]
        out: dict[int, WorkerSlot] = {}
        used: set[int] = set()
        for _, at, rank in sorted(pairs):
            if at not in out and rank not in used and len(out) < number:
                out[at] = pool.use_worker(node, rank)
                used.add(rank)
        for at in places:
            if at not in out and len(out) < number:
                out[at] = pool.use_newcomer(node)
        return out

    def _find_donors(
        self, shape: Layout, gaps: Sequence[int], pool: PlacePool
    ) -> tuple[int, int] | None:
        """The node with the most workers that hold just what is missing, and their number."""
        kind = shape.kind
        wanted = set(gaps)
        found = dict[int, int]()
        for node, ranks in pool.workers_by_node.items():
            if ranks and pool.free_places[node]:
                places = {self._was[r][2] for r in ranks if self._was[r][:2] == kind}
                found[node] = len(places & wanted)
        best = min(found, key=lambda node: (-found[node], node), default=None)
        if best is None or not found[best]:
            return None
        return best, min(found[best], pool.free_places[best])

    # --- what is new ------------------------------------------------------------------------
    def _assign_slots(
        self, shape: Layout, parts: list[tuple[int, int]], pool: PlacePool
    ) -> list[WorkerSlot]:
        seats: dict[int, WorkerSlot] = {}
        first = 0
        for node, number in self._order_parts(shape, parts, pool):
            places = range(first, first + number)
            seats.update(self._match_workers(shape, node, number, places, pool))
            first += number
        return [seats[at] for at in range(shape.replica_size)]

    def _order_parts(
        self, shape: Layout, parts: list[tuple[int, int]], pool: PlacePool
    ) -> list[tuple[int, int]]:
        """Return equal parts in the order in which their workers hold the most. Return unlike parts
        unchanged, because there a change of order moves the boundaries too."""
        number = parts[0][1]
        if any(n != number for _, n in parts) or not any(
            pool.workers_by_node.get(i) for i, _ in parts
        ):
            return parts
        slots = [range(first, first + number) for first in range(0, len(parts) * number, number)]
        pairs = [
            (-common, slot, index)
            for index, (node, _) in enumerate(parts)
            for slot, places in enumerate(slots)
            if (common := self._held_bytes(shape, node, places, pool))
        ]
        order: dict[int, int] = {}
        used: set[int] = set()
        for _, slot, index in sorted(pairs):
            if slot not in order and index not in used:
                order[slot] = index
                used.add(index)
        rest = iter([index for index in range(len(parts)) if index not in used])
        return [parts[order[s] if s in order else next(rest)] for s in range(len(parts))]

    def _held_bytes(self, shape: Layout, node: int, places: range, pool: PlacePool) -> int:
        return sum(
            max(self._common_bytes(rank, shape, at) for at in places)
            for rank in pool.workers_by_node.get(node, ())
        )
