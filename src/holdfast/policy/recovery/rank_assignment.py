"""Rank assignment: which living process becomes which rank of the next topology.

A process can only be a rank of its own node. The less moves, the sooner the run continues:

    1. a replica that is complete stays together, so that nothing inside it is touched
    2. a process that holds exactly the boxes of a rank becomes that rank, its own first
    3. a process with a state keeps its rank, or takes any: it lacks only a part of its boxes
    4. a process that holds nothing takes a rank that is left

The remaining ranks are for newcomers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass

from holdfast.layout import Topology


@dataclass(frozen=True)
class RankAssignment:
    """By rank of the new topology."""

    processes: tuple[int | None, ...]  # that takes it; None: a newcomer
    came_from: tuple[int | None, ...]  # old rank whose state that process holds; None: it has none


def assign_ranks(
    old: Topology, new: Topology, process_of: Mapping[int, int], state_holders: Collection[int]
) -> RankAssignment:
    """process_of: old rank -> process, of all that are left; state_holders: those old ranks whose
    process has the state."""
    plan = _RankAssigner(old, new, dict(process_of), set(state_holders) & process_of.keys())
    plan.assign_whole_replicas()
    for has_state in (True, False):
        if has_state:
            plan.assign_where(
                lambda was, rank: was == rank and plan.has_same_boxes(was, rank), has_state=True
            )
            plan.assign_where(plan.has_same_boxes, has_state=True)
        plan.assign_where(lambda was, rank: was == rank, has_state=has_state)
        plan.assign_where(lambda was, rank: True, has_state=has_state)
    taken = [plan.old_rank_of.get(rank) for rank in range(new.world_size)]
    return RankAssignment(
        tuple(None if was is None else process_of[was] for was in taken),
        tuple(was if was in plan.has_state else None for was in taken),
    )


class _RankAssigner:
    def __init__(
        self, old: Topology, new: Topology, living: dict[int, int], has_state: set[int]
    ) -> None:
        self.old, self.new, self.has_state = old, new, has_state
        self.unassigned: dict[str, list[int]] = {}  # by node: old ranks without a seat, rising
        for rank in sorted(living):
            self.unassigned.setdefault(old.nodes[rank], []).append(rank)
        self.old_rank_of: dict[int, int] = {}  # new rank -> old rank
        self._old_boxes, self._new_boxes = _boxes_by_rank(old), _boxes_by_rank(new)

    def has_same_boxes(self, old_rank: int, rank: int) -> bool:
        return self._old_boxes[old_rank] == self._new_boxes[rank]

    def _assign(self, old_rank: int, rank: int) -> None:
        self.old_rank_of[rank] = old_rank
        self.unassigned[self.old.nodes[old_rank]].remove(old_rank)

    def assign_whole_replicas(self) -> None:
        """Give each new replica a complete old one: its own number first."""
        free = [r for r in self.old.replicas if self.has_state.issuperset(r.ranks)]
        old, new = self.old.nodes, self.new.nodes
        for same in (True, False):
            for target in self.new.replicas:
                if target.ranks[0] in self.old_rank_of:
                    continue
                nodes = [new[rank] for rank in target.ranks]
                alike = (r for r in free if r.kind == target.kind)
                alike = (r for r in alike if r.ranks == target.ranks or not same)
                fitting = (r for r in alike if [old[was] for was in r.ranks] == nodes)
                if (found := next(fitting, None)) is not None:
                    free.remove(found)
                    for was, rank in zip(found.ranks, target.ranks, strict=True):
                        self._assign(was, rank)

    def assign_where(self, fits: Callable[[int, int], bool], *, has_state: bool) -> None:
        """Give each free rank the first process of its node that fits. has_state: only processes
        with a state."""
        free = [rank for rank in range(self.new.world_size) if rank not in self.old_rank_of]
        for rank in free:
            able = self.unassigned.get(self.new.nodes[rank], ())
            able = [was for was in able if was in self.has_state or not has_state]
            if (found := next((was for was in able if fits(was, rank)), None)) is not None:
                self._assign(found, rank)


def _boxes_by_rank(topology: Topology) -> dict[int, tuple[object, int]]:
    """Return (kind of replica, place in it) by rank: ranks alike in both hold the same boxes."""
    return {
        rank: (replica.kind, place)
        for replica in topology.replicas
        for place, rank in enumerate(replica.ranks)
    }


def fill_places(
    used: Sequence[str], left: Container[str], free: Sequence[str], number: int
) -> list[str]:
    """Return `number` nodes in the order of ranks, or all if there are fewer.

    A node keeps its place if possible. A free node takes the place of a lost one.

    Args:
        used: nodes in the order of ranks.
        left: those that are not lost.
        free: nodes without a rank, in the order in which they are taken.
        number: of nodes that get ranks.
    """
    if len(used) > number:
        kept = [name for name in used if name in left][:number]
        return kept + list(free[: number - len(kept)])
    takers = iter(free)
    places = [name if name in left else next(takers, None) for name in used]
    return [name for name in places if name is not None] + list(takers)[: number - len(used)]
