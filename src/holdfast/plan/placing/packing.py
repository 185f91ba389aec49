"""Places on nodes, and how a replica takes some of them: on as few nodes as possible.

A replica goes to the fullest node that it fits on. One that fits on none fills the emptiest nodes,
in parts that tp divides, and the rest goes where it fits best. Nodes are indexed by the number of
their free places, so a choice does not scan the other nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple


class WorkerSlot(NamedTuple):
    """A worker's place. old_rank: its rank in the present topology; None for a newcomer."""

    node: int
    old_rank: int | None


class PlacePool:
    """Free places by node, and the workers without a place that are on each.

    workers_by_node: ranks that are alive. They count among the free places of their node.
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
