"""The ranks of each generation, as one mover knows them: those that write a step, and those of this
node."""

from __future__ import annotations

from collections.abc import Collection

from holdfast.core.format.manifest import PartManifest
from holdfast.core.sharding.state_table import StateTable
from holdfast.layout import Topology


class GenerationRanks:
    """Generations that the snapshots in memory belong to. Guarded by its owner's lock."""

    def __init__(self) -> None:
        self.generations: dict[int, tuple[Topology, StateTable]] = {}
        self.seen: dict[int, set[int]] = {}  # generation -> its ranks that have asked here
        self.declared: dict[int, frozenset[int]] = {}  # the same of all, where that was said
        # generation -> steps of which they all were here
        self._locally_complete_steps: dict[int, set[int]] = {}

    def open(
        self,
        generation: int,
        topology: Topology,
        table: StateTable,
        own_ranks: Collection[int] | None,
    ) -> None:
        """Set the writers of a generation, and which of them are this node's if that is said."""
        self.generations[generation] = (topology, table)
        if own_ranks is not None:
            self.declared[generation] = frozenset(own_ranks)

    def forget_unused(self, generation: int, used: Collection[int]) -> None:
        """Forget the writers of older generations, but for those in use."""
        for older in [g for g in self.generations if g < generation and g not in used]:
            del self.generations[older]
            self.declared.pop(older, None)

    def forget_before(self, generation: int) -> None:
        """Forget what this node's ranks have done in older generations."""
        for known in (self.seen, self._locally_complete_steps):
            for older in [g for g in known if g < generation]:
                del known[older]

    def complete_on_all_nodes(self, part: PartManifest, slots: int) -> bool:
        """Note that the step of a part is complete on this node; return True once every node must
        hold a complete step of its generation. A capture begins when every rank has voted that it
        has a free slot. A node gives a slot back only for a later step that is complete there. So
        once more steps are captured than an arena has slots, each node has completed one of
        them."""
        if part.generation not in self.declared:
            return True
        reached = self._locally_complete_steps.setdefault(part.generation, set())
        reached.add(part.step)
        return len(reached) > slots
