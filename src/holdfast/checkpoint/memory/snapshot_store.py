"""The shelf: the snapshots that one mover holds in memory, of its own and of other nodes' ranks.

A snapshot is the content of an arena's slot with its sealed part manifest. The mover made that
manifest when it hashed the bytes after the capture. A snapshot has the keys, bytes and checksums of
a durable part. So a shelf is one more place of "ranged reads over named blobs".

Which slots may be written again is decided here, and nowhere else. A slot is kept while

    it is part of the newest complete step    (every rank of this node is on the shelf)
    its step is newer than that and may yet become complete
    a reader needs it for long                (`pin`)

and is given back at the first moment when none of these holds. Bytes of a slot that was given back
stay readable until they are overwritten; the seqlock in the slot's header tells. A slot that was
given back is never kept again: its worker may be writing there already.

A copy of another node's rank is never complete by itself; the newest of each such rank is kept.
"""

from __future__ import annotations

import os
import select
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from holdfast.checkpoint.memory.arena import Arena, SlotHeader
from holdfast.core.format.manifest import PartManifest
from holdfast.core.sharding.state_table import StateTable
from holdfast.errors import CorruptError
from holdfast.layout import Topology
from holdfast.wire.store.run_store import MissingKeyError


class _ProcessHandle:
    """One that is known by a descriptor, so that another with its number is not taken for it."""

    def __init__(self, pid: int) -> None:
        """Raises OSError when there is no such process."""
        self.pid = pid
        self._fd = os.pidfd_open(pid)
        weakref.finalize(self, os.close, self._fd)

    @property
    def has_ended(self) -> bool:
        ready = select.poll()  # select() takes no descriptor above 1,023
        ready.register(self._fd, select.POLLIN)
        return bool(ready.poll(0))


class MemoryFile:
    """An arena and the descriptor behind it; both go with the last snapshot that needs them."""

    def __init__(self, fd: int) -> None:
        """The descriptor is this object's from now on, also when the arena cannot be mapped."""
        weakref.finalize(self, os.close, fd)
        self.fd = fd
        self.arena = Arena(fd)
        self._writers: list[_ProcessHandle] = []
        self._has_unknown_writer = False  # a process whose end cannot be seen was given it

    def add_writer(self, pid: int | None) -> None:
        """Note that a process has mapped it to write there."""
        self._writers = [writer for writer in self._writers if not writer.has_ended]
        if any(writer.pid == pid for writer in self._writers):
            return
        self._has_unknown_writer = (
            self._has_unknown_writer or pid is None or not hasattr(os, "pidfd_open")
        )
        if pid is not None and not self._has_unknown_writer:
            try:
                self._writers.append(_ProcessHandle(pid))
            except OSError:
                self._has_unknown_writer = True

    def has_no_writers_but(self, pid: int | None) -> bool:
        """Return True if every process that could write there is known to have ended, `pid` apart:
        that one says that it writes there no more. Only then may another write: two writers in one
        slot would spoil both snapshots."""
        others = (writer for writer in self._writers if writer.pid != pid)
        return not self._has_unknown_writer and all(writer.has_ended for writer in others)

    @property
    def nbytes(self) -> int:
        return self.arena.slots * self.arena.capacity


@dataclass(frozen=True)
class Snapshot:
    """One rank's part of a step, where its bytes lie, and what the slot must say."""

    part: PartManifest
    sealed_manifest: bytes = field(repr=False)  # the sealed part manifest, byte for byte
    memory: MemoryFile = field(repr=False)
    slot: int
    header: SlotHeader
    is_own: bool = True  # of a rank of this node

    @property
    def is_intact(self) -> bool:
        """True if the slot still holds it."""
        return self.memory.arena.header(self.slot) == self.header

    def read_into(self, start: int, out: memoryview) -> None:
        """As `SnapshotStore.read_into`."""
        import numpy as np  # a mover starts in a third less without it

        target = out.cast("B")
        data = self.memory.arena.data(self.slot, self.header.length)
        if start + len(target) > len(data):
            raise CorruptError(
                f"{self.part.blob.key} has {len(data)} bytes, {start + len(target)} were expected"
            )
        source = np.frombuffer(data[start : start + len(target)], np.uint8)
        np.copyto(np.frombuffer(target, np.uint8), source)  # other threads run meanwhile
        if not self.is_intact:
            raise MissingKeyError(f"{self.part.blob.key} was overwritten while it was read")


SealedManifest = bytes
"""A part manifest as it is written, byte for byte."""


class InventoryEntry(NamedTuple):
    """A line of the inventory."""

    generation: int
    step: int
    rank: int
    nbytes: int
    sealed_manifest: SealedManifest


_SnapshotName = tuple[int, int, int]  # generation, step, rank
_SlotId = tuple[int, int]  # id of the memory file, slot


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


class SnapshotStore:
    """Snapshots by (generation, step, rank). Safe to use from any thread."""

    def __init__(self, on_slots_freed: Callable[[], None] = lambda: None) -> None:
        """`on_slots_freed` is called, without any lock held, after slots have become free."""
        self._lock = threading.Lock()
        self._on_slots_freed = on_slots_freed
        self._ranks = GenerationRanks()
        self._snapshots: dict[_SnapshotName, Snapshot] = {}
        self._kept_slots: dict[_SlotId, MemoryFile] = {}  # slots that are not given back yet
        self._pins: Counter[_SlotId] = Counter()

    # --- putting and dropping ---------------------------------------------------------------
    def open_generation(
        self,
        generation: int,
        topology: Topology,
        table: StateTable,
        own_ranks: Collection[int] | None = None,
    ) -> None:
        """Set the writers of a generation; without them none of its steps is complete. own_ranks:
        those of this node, if there are several nodes."""
        with self._lock:
            self._ranks.forget_unused(generation, {name[0] for name in self._snapshots})
            self._ranks.open(generation, topology, table, own_ranks)

    def register_rank(self, generation: int, rank: int) -> None:
        """Note that a rank of this node takes part in a generation. A step of which all of these
        are here is kept, although other nodes may hold the rest."""
        with self._lock:
            self._ranks.seen.setdefault(generation, set()).add(rank)

    def topology_and_table(self, generation: int) -> tuple[Topology, StateTable]:
        """Raises KeyError for a generation that was never opened here."""
        with self._lock:
            return self._ranks.generations[generation]

    def put(self, snapshot: Snapshot, pin_slot: bool = False) -> bool:
        """Shelve a snapshot, whose slot must be held; return True if this node's part of its step
        is complete now. With `pin_slot` the slot is kept until `unpin`, whatever becomes of the
        step.

        Raises MissingKeyError when the slot holds something else already.
        """
        if not snapshot.is_intact:
            raise MissingKeyError(f"{snapshot.part.blob.key} was overwritten before it was hashed")
        part = snapshot.part
        with self._lock:
            place = _slot_id(snapshot)
            for name, other in list(self._snapshots.items()):
                if _slot_id(other) == place:
                    del self._snapshots[name]  # what lay there before
            self._snapshots[part.generation, part.step, part.rank] = snapshot
            self._kept_slots[place] = snapshot.memory
            if pin_slot:
                self._pins[place] += 1
            complete = self._is_complete(
                part.generation, part.step, required_ranks=self._ranks.declared
            )
            slots = snapshot.memory.arena.slots
            if complete and snapshot.is_own and self._ranks.complete_on_all_nodes(part, slots):
                self._forget_own_before(part.generation)
            freed = self._take_unneeded_slots()
        self._release_slots(freed)
        return complete

    def drop_older_than(self, generation: int) -> None:
        """Drop older states: one of this generation is complete in a safe place."""
        with self._lock:
            self._forget_own_before(generation)
            freed = self._take_unneeded_slots()
        self._release_slots(freed)

    def drop(self, generation: int, step: int, rank: int | None = None) -> None:
        """Forget a step, or one rank's part of it; nothing there is no error."""
        with self._lock:
            for name in list(self._snapshots):
                if name[:2] == (generation, step) and rank in (None, name[2]):
                    del self._snapshots[name]
            freed = self._take_unneeded_slots()
        self._release_slots(freed)

    def drop_where(self, should_drop: Callable[[int, int], bool]) -> list[tuple[int, int]]:
        """Forget this node's part of every step with `gone(generation, step)`; return those steps.
        Other nodes drop their own copies here."""
        with self._lock:
            own = [name for name, snapshot in self._snapshots.items() if snapshot.is_own]
            names = [name for name in own if should_drop(*name[:2])]
            for name in names:
                del self._snapshots[name]
            steps = sorted({name[:2] for name in names})
            freed = self._take_unneeded_slots()
        self._release_slots(freed)
        return steps

    def _forget_own_before(self, generation: int) -> None:
        """This node's snapshots of older generations have served: their memory goes."""
        for name, snapshot in list(self._snapshots.items()):
            if snapshot.is_own and name[0] < generation:
                del self._snapshots[name]
        self._ranks.forget_before(generation)

    # --- questions --------------------------------------------------------------------------
    def inventory(self) -> list[InventoryEntry]:
        """Return the snapshots that can be read now, newest step first."""
        with self._lock:
            found = list(self._snapshots.items())
        return [
            InventoryEntry(*name, s.part.blob.size, s.sealed_manifest)
            for name, s in sorted(found, key=lambda item: _newest_first(item[0]))
            if s.is_intact
        ]

    def complete_steps(self, own_ranks_only: bool = False) -> list[tuple[int, int]]:
        """Return (generation, step) of what is complete here, newest step first. With
        `own_ranks_only`, only this node's part must be complete."""
        with self._lock:
            steps = {name[:2] for name in self._snapshots}
            whole = [
                s
                for s in steps
                if self._is_complete(
                    *s, required_ranks=self._ranks.declared if own_ranks_only else {}
                )
            ]
        return sorted(whole, key=lambda s: (s[1], s[0]), reverse=True)

    def get(self, generation: int, step: int, rank: int) -> Snapshot:
        """Return a snapshot. Raises MissingKeyError when it is not here, or no longer intact."""
        with self._lock:
            found = self._snapshots.get((generation, step, rank))
        if found is None or not found.is_intact:
            raise MissingKeyError(
                f"step {step} of generation {generation} is not in memory for rank {rank}"
            )
        return found

    def ranks_with_part(self, generation: int, step: int) -> list[int]:
        """Those whose part of a step is here, their own node's or a copy."""
        with self._lock:
            return sorted(name[2] for name in self._snapshots if name[:2] == (generation, step))

    def read_into(self, generation: int, step: int, rank: int, start: int, out: memoryview) -> None:
        """Fill `out` with bytes [start, start + len(out)) of the blob.

        Raises MissingKeyError when the snapshot is not here or was overwritten meanwhile, and
        CorruptError when the blob ends before. Checksums are the caller's to check.
        """
        self.get(generation, step, rank).read_into(start, out)

    @contextmanager
    def pin(self, generation: int, step: int, rank: int) -> Iterator[Snapshot]:
        """Keep a snapshot's slot for as long as it is read.

        Raises MissingKeyError when the slot has been given back already.
        """
        with self._lock:
            found = self._snapshots.get((generation, step, rank))
            if found is None or _slot_id(found) not in self._kept_slots or not found.is_intact:
                raise MissingKeyError(
                    f"step {step} of generation {generation} is not kept for rank {rank}"
                )
            self._pins[_slot_id(found)] += 1
        try:
            yield found
        finally:
            self.unpin(found)

    def unpin(self, snapshot: Snapshot) -> None:
        """The end of a `put` that pinned."""
        with self._lock:
            self._pins[_slot_id(snapshot)] -= 1
            self._pins += Counter()  # drops what has come to zero
            freed = self._take_unneeded_slots()
        self._release_slots(freed)

    def own_memory_files(self, rank: int) -> list[MemoryFile]:
        """The memory files in which snapshots of a rank of this node lie."""
        with self._lock:
            own = [s for name, s in self._snapshots.items() if name[2] == rank and s.is_own]
        return list({id(s.memory): s.memory for s in own}.values())

    def is_kept(self, memory: MemoryFile, slot: int) -> bool:
        """Return True if a slot may not be written again yet."""
        with self._lock:
            return (id(memory), slot) in self._kept_slots

    # --- what is kept -----------------------------------------------------------------------
    def _is_complete(
        self,
        generation: int,
        step: int,
        required_ranks: Mapping[int, Collection[int]] = MappingProxyType({}),
    ) -> bool:
        """Return True if every writer's snapshot is on the shelf. If `required_ranks` names ranks
        of the generation, only those count."""
        plan = self._ranks.generations.get(generation)
        if plan is None:
            return False
        due = required_ranks.get(generation, range(plan[0].world_size))
        found = (self._snapshots.get((generation, step, rank)) for rank in due)
        return all(s is not None and s.is_intact for s in found)

    def _take_unneeded_slots(self) -> list[tuple[MemoryFile, int]]:
        """Slots that nothing keeps any more: forgotten here, to be released by `_print_kept`."""
        # The newest step of which every rank of this node is here.
        steps = sorted({name[:2] for name, s in self._snapshots.items() if s.is_own}, reverse=True)
        known = {**self._ranks.seen, **self._ranks.declared}
        newest = next(
            (step for step in steps if self._is_complete(*step, required_ranks=known)), (0, -1)
        )
        wanted = set(self._pins)
        foreign: dict[int, _SnapshotName] = {}
        for name, snapshot in self._snapshots.items():
            if name[:2] == newest or (snapshot.is_own and name[:2] > newest):
                wanted.add(_slot_id(snapshot))
            elif not snapshot.is_own:
                foreign[name[2]] = max(name, foreign.get(name[2], name))
        wanted |= {_slot_id(self._snapshots[name]) for name in foreign.values()}
        freed = [place for place in self._kept_slots if place not in wanted]
        return [(self._kept_slots.pop(place), place[1]) for place in freed]

    def _release_slots(self, freed: list[tuple[MemoryFile, int]]) -> None:
        for memory, slot in freed:
            memory.arena.release(slot)
        if freed:
            self._on_slots_freed()


def _slot_id(snapshot: Snapshot) -> _SlotId:
    return id(snapshot.memory), snapshot.slot


def _newest_first(name: _SnapshotName) -> tuple[int, int, int]:
    return -name[1], -name[0], name[2]
