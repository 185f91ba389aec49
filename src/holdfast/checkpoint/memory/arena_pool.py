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

from holdfast.checkpoint.format.blob import blob_header, blob_size
from holdfast.checkpoint.format.save_context import SaveContext
from holdfast.checkpoint.memory.arena import Arena, slot_capacity
from holdfast.checkpoint.memory.snapshot_store import MemoryFile, SnapshotStore
from holdfast.core.format.manifest import PlacedBox, place_boxes
from holdfast.core.json_parsing import JsonObject
from holdfast.core.sharding.ownership import owned_boxes
from holdfast.errors import CheckpointError, HoldfastError

RESTORE_WAIT_FOR_ROOM_S = 60.0
"""Seconds that a request for an arena waits, if there is no room, until the other ranks of its
generation have restored. Then older snapshots can be dropped."""


@dataclass
class RankArena:
    """One rank's arena, and what its blobs look like."""

    memory: MemoryFile
    blob_header: bytes
    tensors: tuple[PlacedBox, ...]
    # slot -> the newest sequence taken over
    taken_sequences: dict[int, int] = field(default_factory=dict)

    @property
    def arena(self) -> Arena:
        return self.memory.arena


class ArenaPool:
    """Those of one mover. `change` guards everything here; who calls `begin_generation` holds
    it."""

    def __init__(
        self,
        snapshot_store: SnapshotStore,
        change: threading.Condition,
        current_context: Callable[[int], SaveContext],
        is_hashing: Callable[[], bool],
        on_dropped: Callable[[int, str], None],
    ) -> None:
        """current_context: the plan of a generation, or FencedError where that is over. is_hashing:
        whether captures, or what is left of them, are being read just now. on_dropped: told of each
        step that made room, and why."""
        self.ranks: dict[int, RankArena] = {}
        self._snapshot_store, self._change, self._current_context = (
            snapshot_store,
            change,
            current_context,
        )
        self._is_hashing, self._on_dropped = is_hashing, on_dropped
        # (generation, rank) of arenas in the making
        self._in_progress: set[tuple[int, int]] = set()
        self._allocation_lock = threading.Lock()  # of the present generation
        self._restored_ranks: set[int] = set()  # ranks that have restored: they asked for an arena

    def begin_generation(self) -> None:
        """A generation begins; arenas that are being made for older ones go once they are made."""
        self.ranks, self._restored_ranks = {}, set()
        self._allocation_lock = threading.Lock()

    def status(self) -> JsonObject:
        """The state of every arena, by rank; who calls this holds `change`."""
        return {
            str(rank): {
                "slots": r.arena.slots,
                "bytes": r.memory.nbytes,
                "held": [s for s in range(r.arena.slots) if r.arena.is_held(s)],
            }
            for rank, r in sorted(self.ranks.items())
        }

    def wait_for_free_slot(self, rank: int, timeout_s: float) -> bool:
        """Return True if a slot of the rank became free in time."""
        with self._change:
            found = self.ranks.get(rank)
            if found is None:
                return False
            arena = found.arena
            return self._change.wait_for(lambda: arena.free_slot() is not None, timeout_s)

    def get(
        self,
        generation: int,
        rank: int,
        blob_bytes: int,
        slots: int,
        pid: int | None = None,
        has_released_old_memory: bool = False,
        numa_node: int | None = None,
    ) -> int:
        """The descriptor of a rank's arena, made at the first request; the caller closes it.

        A worker that asks again gets the same memory, so a slot being saved stays safe. `pid`
        is the one that asks, and will write there. has_released_old_memory: it writes no more into
        what it was given in older generations, so that it may be given that again. numa_node: from
        which new memory should come; memory that is used again stays where it is.
        """
        with self._change:
            plan = self._current_context(generation)
            head, tensors = self._register_request(plan, rank, blob_bytes, slots)
            # It may be in the making for one who asked before and did not wait for the answer.
            self._change.wait_for(
                lambda: (generation, rank) not in self._in_progress or self._is_superseded(plan)
            )
            self._current_context(generation)
            found = self.ranks.get(rank)
            if found is None:
                memory = self._find_reusable(
                    rank, blob_bytes, slots, pid if has_released_old_memory else None
                )
                if memory is None:
                    self._in_progress.add((generation, rank))
                else:
                    found = self.ranks[rank] = RankArena(memory, head, tensors)
        if found is None:
            found = self._make_arena(plan, rank, slots, head, tensors, numa_node)
        with self._change:
            self._current_context(generation)
            found.memory.add_writer(pid)
            return os.dup(found.memory.fd)

    def _make_arena(
        self,
        plan: SaveContext,
        rank: int,
        slots: int,
        head: bytes,
        tensors: tuple[PlacedBox, ...],
        numa_node: int | None,
    ) -> RankArena:
        """Make a rank's arena in new memory. Gigabytes take seconds, so it is made without the
        lock. If a newer generation began meanwhile, that is noticed at the end, and the memory is
        freed."""
        try:
            memory = self._allocate_or_make_room(
                plan, rank, slot_capacity(blob_size(head, tensors)), slots, numa_node
            )
            with self._change:
                self._current_context(plan.generation)
                return self.ranks.setdefault(rank, RankArena(memory, head, tensors))
        finally:
            with self._change:
                self._in_progress.discard((plan.generation, rank))
                self._change.notify_all()

    def _register_request(
        self, plan: SaveContext, rank: int, blob_bytes: int, slots: int
    ) -> tuple[bytes, tuple[PlacedBox, ...]]:
        """Note that a rank asks; what its blobs begin with, and hold."""
        if not 0 <= rank < plan.topology.world_size:
            raise CheckpointError(f"rank {rank} is not in a world of {plan.topology.world_size}")
        tensors = place_boxes(owned_boxes(plan.topology, plan.table, rank), plan.table)
        head = blob_header(tensors)
        due = slot_capacity(blob_size(head, tensors))
        if blob_bytes != due or slots not in (2, 3):
            raise CheckpointError(
                f"rank {rank} asks for {slots} slots of {blob_bytes} bytes, its state needs "
                f"2 or 3 of {due}"
            )
        self._restored_ranks.add(rank)
        self._snapshot_store.register_rank(plan.generation, rank)
        self._change.notify_all()
        return head, tensors

    def _find_reusable(
        self, rank: int, capacity: int, slots: int, except_pid: int | None
    ) -> MemoryFile | None:
        """Return the memory of an older generation whose writers have all ended, `except_pid` one
        that has let go of it. Its pages exist already, and the slot of the newest complete snapshot
        stays held."""
        for memory in self._snapshot_store.own_memory_files(rank):
            fits = memory.arena.capacity == capacity and memory.arena.slots == slots
            if fits and memory.has_no_writers_but(except_pid) and not self._is_hashing():
                for slot in range(slots):  # captured, and its worker died before it said so
                    if not self._snapshot_store.is_kept(memory, slot):
                        memory.arena.release(slot)
                return memory
        return None

    def _allocate_or_make_room(
        self, plan: SaveContext, rank: int, capacity: int, slots: int, numa_node: int | None
    ) -> MemoryFile:
        """Make new memory. If old and new do not fit together, older snapshots are dropped once
        every rank has restored. Raises HoldfastError when there is no room then either."""
        name = f"holdfast-{plan.generation}-{rank}"
        try:
            return self._allocate(name, slots, capacity, numa_node)
        except HoldfastError as error:
            with self._change:
                self._change.wait_for(lambda: self._all_restored(plan), RESTORE_WAIT_FOR_ROOM_S)
                self._current_context(plan.generation)
            gone = self._snapshot_store.drop_where(lambda g, s: g < plan.generation)
            for _, step in gone:
                self._on_dropped(step, str(error))
        return self._allocate(name, slots, capacity, numa_node)

    def _allocate(self, name: str, slots: int, capacity: int, numa_node: int | None) -> MemoryFile:
        with self._allocation_lock:  # one after the other: each looks at how much memory is left
            return MemoryFile(Arena.create(name, slots, capacity, numa_node))

    def _all_restored(self, plan: SaveContext) -> bool:
        """Return True if every rank has restored and no arena of an older generation is being made.
        True also if a newer generation has begun."""
        older = any(generation < plan.generation for generation, _ in self._in_progress)
        done = len(self._restored_ranks) == plan.topology.world_size and not older
        return done or self._is_superseded(plan)

    def _is_superseded(self, plan: SaveContext) -> bool:
        """Return True if a newer generation has begun."""
        try:
            return self._current_context(plan.generation) is not plan
        except HoldfastError:
            return True
