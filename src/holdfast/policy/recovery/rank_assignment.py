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
class RankAssignment:
    """By rank of the new topology. processes: who takes it, None for a newcomer. came_from: the
    old rank whose state that process holds, None where it holds none."""

    processes: tuple[int | None, ...]
    came_from: tuple[int | None, ...]


def assign_ranks(
    old: Topology, new: Topology, process_of: Mapping[int, int], state_holders: Collection[int]
) -> RankAssignment:
    """process_of: old rank -> process, of all that are left; state_holders: those old ranks whose
    process has the state."""
    plan = _RankAssigner(old, new, dict(process_of), set(state_holders) & process_of.keys())
    plan.assign_whole_replicas()
    plan.assign_where(
        lambda was, rank: was == rank and plan.has_same_boxes(was, rank), plan.unassigned_holders
    )
    plan.assign_where(plan.has_same_boxes, plan.unassigned_holders)
    plan.assign_where(lambda was, rank: was == rank, plan.unassigned_holders)
    plan.assign_where(lambda was, rank: True, plan.unassigned_holders)
    plan.assign_where(lambda was, rank: was == rank, plan.unassigned)
    plan.assign_where(lambda was, rank: True, plan.unassigned)
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
        self.unassigned = sorted(living)  # old ranks without a seat
        self.old_rank_of: dict[int, int] = {}  # new rank -> old rank

    @property
    def unassigned_holders(self) -> list[int]:
        return [was for was in self.unassigned if was in self.has_state]

    def has_same_boxes(self, old_rank: int, rank: int) -> bool:
        before, after = self.old.replica_of(old_rank), self.new.replica_of(rank)
        return before.kind == after.kind and (
            before.ranks.index(old_rank) == after.ranks.index(rank)
        )

    def _is_on_same_node(self, old_rank: int, rank: int) -> bool:
        return self.old.nodes[old_rank] == self.new.nodes[rank]

    def _assign(self, old_rank: int, rank: int) -> None:
        self.old_rank_of[rank] = old_rank
        self.unassigned.remove(old_rank)

    def assign_whole_replicas(self) -> None:
        """Give each new replica a complete old one: its own number first."""
        free = [r for r in self.old.replicas if self.has_state.issuperset(r.ranks)]
        for same in (True, False):
            for target in self.new.replicas:
                if target.ranks[0] in self.old_rank_of:
                    continue
                found = next(
                    (
                        r
                        for r in free
                        if r.kind == target.kind
                        and (r.ranks == target.ranks or not same)
                        and all(map(self._is_on_same_node, r.ranks, target.ranks))
                    ),
                    None,
                )
                if found is not None:
                    free.remove(found)
                    for was, rank in zip(found.ranks, target.ranks, strict=True):
                        self._assign(was, rank)

    def assign_where(self, fits: Callable[[int, int], bool], candidates: Collection[int]) -> None:
        for rank in self._free_ranks():
            able = [was for was in candidates if was in self.unassigned]
            found = next(
                (w for w in able if self._is_on_same_node(w, rank) and fits(w, rank)), None
            )
            if found is not None:
                self._assign(found, rank)

    def _free_ranks(self) -> Iterator[int]:
        return iter([rank for rank in range(self.new.world_size) if rank not in self.old_rank_of])
