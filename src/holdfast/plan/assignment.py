"""Turns the number of replicas into an assignment of workers, with as little change as possible."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from holdfast.config.run import RunConfig
from holdfast.layout import MeshShape, Replica, Stages
from holdfast.plan.interface import NodePlaces, Present
from holdfast.plan.packing import Pool, Seat
from holdfast.plan.replica_counts import Filling
from holdfast.plan.replica_shapes import Parts, Shape, Shapes


class Old:
    """The present replicas: which are complete, and which workers are left of the rest.

    `whole`, smaller: complete replicas, of the run file's kinds and of other kinds. broken: the
    rest, with the ranks that are alive in mesh order.
    """

    def __init__(self, shapes: Shapes, nodes: Sequence[NodePlaces], present: Present | None):
        self._number = {node.name: i for i, node in enumerate(nodes)}
        self.whole: list[tuple[Replica, Shape]] = []
        self.smaller: list[tuple[Replica, Shape]] = []
        self.broken: list[tuple[Replica, Sequence[int | None]]] = []
        self._names: tuple[str, ...] = ()
        if present is None:
            return
        self._names = present.topology.nodes
        alive = self._alive(present, nodes)
        kinds = {(s.mesh_shape, s.stages if s.mesh_shape[0] > 1 else ()): s for s in shapes.wanted}
        for r in present.topology.replicas:
            if not alive.issuperset(r.ranks):
                self.broken.append((r, [rank if rank in alive else None for rank in r.ranks]))
            elif r.kind in kinds and shapes.fits(kinds[r.kind]):
                self.whole.append((r, kinds[r.kind]))
            elif shapes.allows(r.mesh_shape):
                shape = Shape(r.mesh_shape, r.stages, shapes.least(r.degree("pp")))
                self.smaller.append((r, shape))
            else:
                self.broken.append((r, r.ranks))

    def node_of(self, rank: int) -> int:
        return self._number[self._names[rank]]

    def _alive(self, present: Present, nodes: Sequence[NodePlaces]) -> set[int]:
        """Return the ranks whose process lives and has a place. If a node has fewer places than
        workers, workers of complete replicas stay first."""
        found: dict[int, list[tuple[bool, int]]] = {}
        for r in present.topology.replicas:
            there = [
                rank for rank in r.ranks
                if rank not in present.lost and self._names[rank] in self._number
            ]  # fmt: skip
            for rank in there:
                found.setdefault(self.node_of(rank), []).append((len(there) < len(r.ranks), rank))
        return {
            rank for node, held in found.items() for _, rank in sorted(held)[: nodes[node].places]
        }


@dataclass
class Built:
    """A replica of the new topology. seats: in mesh order. order: those that were there come
    first, by their numbers. stays: nothing of it has changed."""

    shape: Shape
    seats: list[Seat]
    order: tuple[int, int]
    stays: bool = False


_Was = tuple[MeshShape, Stages, int]  # mesh, stages and mesh rank of a worker in the old topology


@dataclass
class Making:
    config: RunConfig
    nodes: Sequence[NodePlaces]
    old: Old
    chosen: Filling
    built: list[Built] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._parts = Parts(self.config)
        self._was: dict[int, _Was] = {}
        self._gone_on: list[tuple[Replica, Sequence[int | None]]] = list(self.old.broken)

    def run(self) -> list[Built]:
        free = [node.places for node in self.nodes]
        due = self._keep(free)
        pool = Pool(free, [node.speed for node in self.nodes], self._without_place())
        pool.leave_idle(sum(free) - sum(shape.size * n for shape, n in due.items()))
        self._mend(due, pool)
        for shape in sorted((+due).elements(), key=lambda s: (-s.size, s.mesh_shape)):
            seats = self._seated(shape, pool.take(shape.size, shape.tp), pool)
            self.built.append(Built(shape, seats, (1, len(self.built))))
        return sorted(self.built, key=lambda each: each.order)

    def moved(self, built: Built) -> int:
        """Bytes that its workers lack."""
        if built.stays:
            return 0
        return sum(
            self._parts.whole(built.shape, at) - self._common(seat.was, built.shape, at)
            for at, seat in enumerate(built.seats)
        )

    # --- what stays -------------------------------------------------------------------------
    def _keep(self, free: list[int]) -> Counter[Shape]:
        """Takes the replicas that stay as they are out of `free`; returns what is to be made."""
        due = self.chosen.whole + Counter(self.chosen.new)
        kept = set(self.chosen.kept)
        staying = [each for i, each in enumerate(self.old.smaller) if i in kept]
        leaving = [each for i, each in enumerate(self.old.smaller) if i not in kept]
        for each in self.old.whole:
            stays = due[each[1]] > 0
            (staying if stays else leaving).append(each)
            due[each[1]] -= stays
        for replica, shape in staying:
            seats = [Seat(self.old.node_of(rank), rank) for rank in replica.ranks]
            for seat in seats:
                free[seat.node] -= 1
            self.built.append(Built(shape, seats, (0, replica.index), stays=True))
        self._gone_on += [(replica, replica.ranks) for replica, _ in leaving]
        return due

    def _without_place(self) -> dict[int, list[int]]:
        """Workers that are alive in a replica that does not stay, by node."""
        held: dict[int, list[int]] = {}
        for replica, ranks in self._gone_on:
            for at, rank in enumerate(ranks):
                if rank is not None:
                    self._was[rank] = (*replica.kind, at)
                    held.setdefault(self.old.node_of(rank), []).append(rank)
        return held

    def _common(self, was: int | None, shape: Shape, at: int) -> int:
        """Bytes that an old rank holds of what is needed at a place of `shape`."""
        if was is None:
            return 0
        return self._parts.common(*self._was[was], shape.mesh_shape, shape.stages, at)

    # --- what is mended ---------------------------------------------------------------------
    def _mend(self, due: Counter[Shape], pool: Pool) -> None:
        """Mend the due replicas that lost a worker, those with the fewest gaps first. All their
        remaining workers get places before any gap is filled. So no replica is dissolved to fill
        another."""
        kinds = {(s.mesh_shape, s.stages if s.mesh_shape[0] > 1 else ()): s for s in due}
        order = sorted(
            (each for each in self.old.broken if each[0].kind in kinds),
            key=lambda each: (each[1].count(None) / len(each[1]), each[0].index),
        )
        begun: list[tuple[Replica, Shape, dict[int, Seat]]] = []
        for replica, ranks in order:
            shape = kinds[replica.kind]
            seats = self._left_in_place(ranks, pool) if due[shape] > 0 else {}
            if seats:
                due[shape] -= 1
                begun.append((replica, shape, seats))
        for replica, shape, seats in begun:
            self._fill_gaps(shape, seats, pool)
            placed = [seats[at] for at in range(shape.size)]
            self.built.append(Built(shape, placed, (0, replica.index)))

    def _left_in_place(self, ranks: Sequence[int | None], pool: Pool) -> dict[int, Seat]:
        seats: dict[int, Seat] = {}
        for at, rank in enumerate(ranks):
            if rank is not None and pool.free[node := self.old.node_of(rank)]:
                pool.reserve(node, 1)
                seats[at] = pool.use(node, rank)
        return seats

    def _fill_gaps(self, shape: Shape, seats: dict[int, Seat], pool: Pool) -> None:
        own = Counter(seat.node for seat in seats.values())
        gaps = [at for at in range(shape.size) if at not in seats]
        for node, _ in own.most_common():
            gaps = self._fill(shape, node, min(len(gaps), pool.free[node]), gaps, pool, seats)
        while gaps and (found := self._donors(shape, gaps, pool)):
            node, number = found
            gaps = self._fill(shape, node, number, gaps, pool, seats)
        for node, number in pool.take(len(gaps)):
            seats.update(self._matched(shape, node, number, gaps, pool))
            gaps = [at for at in gaps if at not in seats]

    def _fill(
        self, shape: Shape, node: int, number: int, gaps: list[int], pool: Pool,
        seats: dict[int, Seat],
    ) -> list[int]:  # fmt: skip
        """Put `number` workers of a node into some of the gaps; the gaps that are left."""
        if number:
            pool.reserve(node, number)
            seats.update(self._matched(shape, node, number, gaps, pool))
        return [at for at in gaps if at not in seats]

    def _matched(
        self, shape: Shape, node: int, number: int, places: Sequence[int], pool: Pool
    ) -> dict[int, Seat]:
        """`number` of the places, each to whom of the node holds most of it; then newcomers."""
        pairs = [
            (-common, at, rank)
            for rank in pool.held.get(node, ())
            for at in places
            if (common := self._common(rank, shape, at))
        ]
        out: dict[int, Seat] = {}
        used: set[int] = set()
        for _, at, rank in sorted(pairs):
            if at not in out and rank not in used and len(out) < number:
                out[at] = pool.use(node, rank)
                used.add(rank)
        for at in places:
            if at not in out and len(out) < number:
                out[at] = pool.newcomer(node)
        return out

    def _donors(self, shape: Shape, gaps: Sequence[int], pool: Pool) -> tuple[int, int] | None:
        """The node with the most workers that hold just what is missing, and their number."""
        kind = (shape.mesh_shape, shape.stages if shape.mesh_shape[0] > 1 else ())
        wanted = set(gaps)
        found = Counter(
            {
                node: len({at for r in ranks if (at := self._was[r][2]) in wanted and
                           self._was[r][:2] == kind})
                for node, ranks in pool.held.items() if ranks and pool.free[node]
            }
        )  # fmt: skip
        best = min(found, key=lambda node: (-found[node], node), default=None)
        if best is None or not found[best]:
            return None
        return best, min(found[best], pool.free[best])

    # --- what is new ------------------------------------------------------------------------
    def _seated(self, shape: Shape, parts: list[tuple[int, int]], pool: Pool) -> list[Seat]:
        seats: dict[int, Seat] = {}
        first = 0
        for node, number in self._ordered(shape, parts, pool):
            places = range(first, first + number)
            seats.update(self._matched(shape, node, number, places, pool))
            first += number
        return [seats[at] for at in range(shape.size)]

    def _ordered(
        self, shape: Shape, parts: list[tuple[int, int]], pool: Pool
    ) -> list[tuple[int, int]]:
        """Return equal parts in the order in which their workers hold the most. Return unlike parts
        unchanged, because there a change of order moves the boundaries too."""
        number = parts[0][1]
        if any(n != number for _, n in parts) or not any(pool.held.get(i) for i, _ in parts):
            return parts
        pairs = [
            (-common, slot, index)
            for index, (node, _) in enumerate(parts)
            for slot in range(len(parts))
            if (common := self._hold(shape, node, range(slot * number, (slot + 1) * number), pool))
        ]
        order: dict[int, int] = {}
        used: set[int] = set()
        for _, slot, index in sorted(pairs):
            if slot not in order and index not in used:
                order[slot] = index
                used.add(index)
        rest = iter([index for index in range(len(parts)) if index not in used])
        return [parts[order[s] if s in order else next(rest)] for s in range(len(parts))]

    def _hold(self, shape: Shape, node: int, places: range, pool: Pool) -> int:
        return sum(
            max(self._common(rank, shape, at) for at in places) for rank in pool.held.get(node, ())
        )
