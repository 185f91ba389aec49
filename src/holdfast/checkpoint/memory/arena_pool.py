"""The arenas of a generation's ranks: which rank has which memory, and the source of new memory.

A rank asks once it has restored. It gets the memory of an older generation if that fits and no
process writes there any more. Otherwise it gets new memory. Gigabytes take seconds, so new memory
is made without the lock, one arena after the other. A newer generation that begins meanwhile is
noticed at the end. If there is no room for both, older snapshots are dropped when every rank has
restored.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.checkpoint.format.blob import header, total_size
from holdfast.checkpoint.format.save_context import Plan
from holdfast.checkpoint.memory.arena import Arena, slot_capacity
from holdfast.checkpoint.memory.snapshot_store import MemoryFile, Shelf
from holdfast.core.format.manifest import Placed, placed
from holdfast.core.sharding.ownership import owned_boxes
from holdfast.errors import CheckpointError, HoldfastError

ROOM_SECONDS = 60.0
"""Seconds that a request for an arena waits, if there is no room, until the other ranks of its
generation have restored. Then older snapshots can be dropped."""


@dataclass
class RankArena:
    """One rank's arena, and what its blobs look like."""

    memory: MemoryFile
    head: bytes
    tensors: tuple[Placed, ...]
    taken: dict[int, int] = field(default_factory=dict)  # slot -> the newest sequence taken over

    @property
    def arena(self) -> Arena:
        return self.memory.arena


class Arenas:
    """Those of one mover. `change` guards everything here; who calls `begin` holds it."""

    def __init__(
        self,
        shelf: Shelf,
        change: threading.Condition,
        current: Callable[[int], Plan],
        hashing: Callable[[], bool],
        dropped: Callable[[int, str], None],
    ) -> None:
        """current: the plan of a generation, or FencedError where that is over. hashing: whether
        captures, or what is left of them, are being read just now. dropped: told of each step that
        made room, and why."""
        self.ranks: dict[int, RankArena] = {}
        self._shelf, self._change, self._current = shelf, change, current
        self._is_hashing, self._dropped = hashing, dropped
        self._making: set[tuple[int, int]] = set()  # (generation, rank) of arenas in the making
        self._allocating = threading.Lock()  # of the present generation
        self._asked: set[int] = set()  # ranks that have restored: they asked for an arena

    def begin(self) -> None:
        """A generation begins; arenas that are being made for older ones go once they are made."""
        self.ranks, self._asked = {}, set()
        self._allocating = threading.Lock()

    def get(
        self, generation: int, rank: int, blob_bytes: int, slots: int,
        process: int | None = None, let_go: bool = False,
    ) -> int:  # fmt: skip
        """The descriptor of a rank's arena, made at the first request; the caller closes it.

        A worker that asks again gets the same memory, so a slot being saved stays safe. `process`
        is the one that asks, and will write there. let_go: it writes no more into what it was given
        in older generations, so that it may be given that again.
        """
        with self._change:
            plan = self._current(generation)
            head, tensors = self._asked_for(plan, rank, blob_bytes, slots)
            # It may be in the making for one who asked before and did not wait for the answer.
            self._change.wait_for(
                lambda: (generation, rank) not in self._making or self._over(plan)
            )
            self._current(generation)
            found = self.ranks.get(rank)
            if found is None:
                memory = self._reusable(rank, blob_bytes, slots, process if let_go else None)
                if memory is None:
                    self._making.add((generation, rank))
                else:
                    found = self.ranks[rank] = RankArena(memory, head, tensors)
        if found is None:
            found = self._made(plan, rank, slots, head, tensors)
        with self._change:
            self._current(generation)
            found.memory.given_to(process)
            return os.dup(found.memory.fd)

    def _made(
        self, plan: Plan, rank: int, slots: int, head: bytes, tensors: tuple[Placed, ...]
    ) -> RankArena:
        """Make a rank's arena in new memory. Gigabytes take seconds, so it is made without the
        lock. If a newer generation began meanwhile, that is noticed at the end, and the memory is
        freed."""
        try:
            memory = self._room(plan, rank, slot_capacity(total_size(head, tensors)), slots)
            with self._change:
                self._current(plan.generation)
                return self.ranks.setdefault(rank, RankArena(memory, head, tensors))
        finally:
            with self._change:
                self._making.discard((plan.generation, rank))
                self._change.notify_all()

    def _asked_for(
        self, plan: Plan, rank: int, blob_bytes: int, slots: int
    ) -> tuple[bytes, tuple[Placed, ...]]:
        """Note that a rank asks; what its blobs begin with, and hold."""
        if not 0 <= rank < plan.topology.world_size:
            raise CheckpointError(f"rank {rank} is not in a world of {plan.topology.world_size}")
        tensors = placed(owned_boxes(plan.topology, plan.table, rank), plan.table)
        head = header(tensors)
        due = slot_capacity(total_size(head, tensors))
        if blob_bytes != due or slots not in (2, 3):
            raise CheckpointError(
                f"rank {rank} asks for {slots} slots of {blob_bytes} bytes, its state needs "
                f"2 or 3 of {due}"
            )
        self._asked.add(rank)
        self._shelf.belongs(plan.generation, rank)
        self._change.notify_all()
        return head, tensors

    def _reusable(self, rank: int, capacity: int, slots: int, but: int | None) -> MemoryFile | None:
        """Return the memory of an older generation whose writers have all ended, `but` one that has
        let go of it. Its pages exist already, and the slot of the newest complete snapshot stays
        held."""
        for memory in self._shelf.memory_of(rank):
            fits = memory.arena.capacity == capacity and memory.arena.slots == slots
            if fits and memory.deserted_but(but) and not self._is_hashing():
                for slot in range(slots):  # captured, and its worker died before it said so
                    if not self._shelf.keeps(memory, slot):
                        memory.arena.release(slot)
                return memory
        return None

    def _room(self, plan: Plan, rank: int, capacity: int, slots: int) -> MemoryFile:
        """Make new memory. If old and new do not fit together, older snapshots are dropped once
        every rank has restored. Raises HoldfastError when there is no room then either."""
        name = f"holdfast-{plan.generation}-{rank}"
        try:
            return self._created(name, slots, capacity)
        except HoldfastError as error:
            with self._change:
                self._change.wait_for(lambda: self._all_asked(plan), ROOM_SECONDS)
                self._current(plan.generation)
            gone = self._shelf.drop_where(lambda g, s: g < plan.generation)
            for _, step in gone:
                self._dropped(step, str(error))
        return self._created(name, slots, capacity)

    def _created(self, name: str, slots: int, capacity: int) -> MemoryFile:
        with self._allocating:  # one after the other: each looks at how much memory is left
            return MemoryFile(Arena.create(name, slots, capacity))

    def _all_asked(self, plan: Plan) -> bool:
        """Return True if every rank has restored and no arena of an older generation is being made.
        True also if a newer generation has begun."""
        older = any(generation < plan.generation for generation, _ in self._making)
        done = len(self._asked) == plan.topology.world_size and not older
        return done or self._over(plan)

    def _over(self, plan: Plan) -> bool:
        """Return True if a newer generation has begun."""
        try:
            return self._current(plan.generation) is not plan
        except HoldfastError:
            return True
