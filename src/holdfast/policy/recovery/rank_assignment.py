"""Rank assignment: which living process becomes which rank of the next topology.

A process can only be a rank of its own node. The less moves, the sooner the run continues:

    1. a replica that is complete stays together, so that nothing inside it is touched
    2. a process that holds exactly the boxes of a rank becomes that rank, its own first
    3. a process with a state keeps its rank, or takes any: it lacks only a part of its boxes
    4. a process that holds nothing takes a rank that is left

The remaining ranks are for newcomers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from holdfast.layout import Topology


@dataclass(frozen=True)
class Seats:
    """By rank of the new topology. processes: who takes it, None for a newcomer. came_from: the
    old rank whose state that process holds, None where it holds none."""

    processes: tuple[int | None, ...]
    came_from: tuple[int | None, ...]


def seats(
    old: Topology, new: Topology, living: Mapping[int, int], holding: Collection[int]
) -> Seats:
    """living: old rank -> process, of all that are left; holding: those old ranks whose process has
    the state."""
    plan = _Seating(old, new, dict(living), set(holding) & living.keys())
    plan.whole_replicas()
    plan.fill(lambda was, rank: was == rank and plan.same_boxes(was, rank), plan.holders)
    plan.fill(plan.same_boxes, plan.holders)
    plan.fill(lambda was, rank: was == rank, plan.holders)
    plan.fill(lambda was, rank: True, plan.holders)
    plan.fill(lambda was, rank: was == rank, plan.waiting)
    plan.fill(lambda was, rank: True, plan.waiting)
    taken = [plan.taken.get(rank) for rank in range(new.world_size)]
    return Seats(
        tuple(None if was is None else living[was] for was in taken),
        tuple(was if was in plan.has_state else None for was in taken),
    )


class _Seating:
    def __init__(
        self, old: Topology, new: Topology, living: dict[int, int], has_state: set[int]
    ) -> None:
        self.old, self.new, self.has_state = old, new, has_state
        self.waiting = sorted(living)  # old ranks without a seat
        self.taken: dict[int, int] = {}  # new rank -> old rank

    @property
    def holders(self) -> list[int]:
        return [was for was in self.waiting if was in self.has_state]

    def same_boxes(self, was: int, rank: int) -> bool:
        before, after = self.old.replica_of(was), self.new.replica_of(rank)
        return before.kind == after.kind and (before.ranks.index(was) == after.ranks.index(rank))

    def _same_node(self, was: int, rank: int) -> bool:
        return self.old.nodes[was] == self.new.nodes[rank]

    def _sit(self, was: int, rank: int) -> None:
        self.taken[rank] = was
        self.waiting.remove(was)

    def whole_replicas(self) -> None:
        """Give each new replica a complete old one: its own number first."""
        free = [r for r in self.old.replicas if self.has_state.issuperset(r.ranks)]
        for same in (True, False):
            for target in self.new.replicas:
                if target.ranks[0] in self.taken:
                    continue
                found = next(
                    (r for r in free if r.kind == target.kind
                     and (r.ranks == target.ranks or not same)
                     and all(map(self._same_node, r.ranks, target.ranks))),
                    None,
                )  # fmt: skip
                if found is not None:
                    free.remove(found)
                    for was, rank in zip(found.ranks, target.ranks, strict=True):
                        self._sit(was, rank)

    def fill(self, fits: Callable[[int, int], bool], candidates: Collection[int]) -> None:
        for rank in self._open():
            able = [was for was in candidates if was in self.waiting]
            found = next((w for w in able if self._same_node(w, rank) and fits(w, rank)), None)
            if found is not None:
                self._sit(found, rank)

    def _open(self) -> Iterator[int]:
        return iter([rank for rank in range(self.new.world_size) if rank not in self.taken])
