"""The memory of snapshots that a mover keeps for other machines: which slot the next one may take,
and when it is dropped. `receiver.py` fills the slots.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from holdfast.checkpoint.format.blob import parse_header
from holdfast.checkpoint.memory.arena import Arena, identity_digest, slot_capacity
from holdfast.checkpoint.memory.snapshot_store import MemoryFile, Snapshot, SnapshotStore
from holdfast.core.format.manifest import PartManifest, PlacedBox
from holdfast.errors import CorruptError, HoldfastError
from holdfast.wire.store.run_store import MissingKeyError

SnapshotName = tuple[int, int, int]
"""generation, step, rank"""


class ReceivedSnapshots:
    """Two slots of memory for each rank of other machines, within a bound. `lock` guards it."""

    def __init__(self, snapshot_store: SnapshotStore, max_bytes: int) -> None:
        self.lock = threading.Lock()
        self.max_bytes = max_bytes
        self._snapshot_store = snapshot_store
        self._memory: dict[tuple[int, int], MemoryFile] = {}  # (rank, capacity)
        # ours on the shelf, and where
        self.kept_slots: dict[SnapshotName, tuple[MemoryFile, int]] = {}
        # generation -> announced to be sent here
        self._announced_ranks: dict[int, frozenset[int]] = {}
        self._files_being_written: set[int] = set()  # ids of the memory files that are pulled into
        self.reused_bytes: dict[SnapshotName, int] = {}  # bytes of ours that did not travel
        # by rank, the last one
        self._known_headers: dict[int, tuple[bytes, tuple[PlacedBox, ...]]] = {}

    def announce(self, generation: int, ranks: frozenset[int]) -> None:
        """A sender has named the ranks that it sends here; who calls this holds `lock`."""
        self._announced_ranks[generation] = (
            self._announced_ranks.get(generation, frozenset()) | ranks
        )

    def check_blob_header(self, part: PartManifest, header: bytes) -> None:
        """Raises CorruptError when a blob's header does not list what its part does. A rank's is
        the same at every step, and parsed once."""
        if self._known_headers.get(part.rank) == (header, part.tensors):
            return
        if set(parse_header(header, part.blob.key)) != set(part.tensors):
            raise CorruptError(f"{part.blob.key}: its header does not list what its part does")
        self._known_headers[part.rank] = (header, part.tensors)

    def end_write(self, memory: MemoryFile | None) -> None:
        """A pull into a memory file has ended, well or not."""
        with self.lock:
            self._files_being_written.discard(id(memory))

    def claim_slot(self, part: PartManifest) -> tuple[MemoryFile, int]:
        """Return the slot for a rank's part; it is never that of the newest complete step.

        Raises HoldfastError when there is no room.
        """
        capacity = slot_capacity(part.blob.size)
        with self.lock:
            memory = self._memory.get((part.rank, capacity))
            if memory is None:
                self._make_room(part.generation, 2 * capacity)
                name = f"holdfast-{part.generation}-{part.rank}-copy"
                memory = MemoryFile(Arena.create(name, 2, capacity))
                self._memory[part.rank, capacity] = memory
            newest = self._newest_complete()
            held = {slot: name for name, (file, slot) in self.kept_slots.items() if file is memory}
            slots = [s for s in range(memory.arena.slots) if s not in held]
            slots += sorted((s for s in held if held[s][:2] != newest), key=lambda s: held[s])
            chosen = slots[0]  # of two, one at most is protected
            if chosen in held:
                self._drop(held[chosen])
            if memory.arena.is_held(chosen):
                raise HoldfastError(f"the slot for rank {part.rank} is being read")
            self._files_being_written.add(id(memory))
            return memory, chosen

    def store(
        self,
        part: PartManifest,
        sealed_manifest: bytes,
        run_id: str,
        memory: MemoryFile,
        slot: int,
        blob_header: bytes,
    ) -> None:
        """Header last, then onto the shelf; a generation that is complete here ends the older
        ones."""
        header = memory.arena.finish_write(
            slot,
            identity_digest(run_id),
            part.generation,
            part.step,
            part.blob.size,
            identity_digest(blob_header),
        )
        with self.lock:
            self._snapshot_store.put(
                Snapshot(part, sealed_manifest, memory, slot, header, is_own=False)
            )
            self.kept_slots[part.generation, part.step, part.rank] = (memory, slot)
            self._files_being_written.discard(id(memory))
            newest = self._newest_complete()
            if newest is not None:
                self._drop_where(lambda name: name[0] < newest[0])
                self._announced_ranks = {
                    g: r for g, r in self._announced_ranks.items() if g >= newest[0]
                }

    def _newest_complete(self) -> tuple[int, int] | None:
        """(generation, step) of the newest step of which every announced rank lies here."""
        steps: dict[tuple[int, int], set[int]] = {}
        for generation, step, rank in filter(self.is_stored, self.kept_slots):
            steps.setdefault((generation, step), set()).add(rank)
        whole = [
            key for key, ranks in steps.items() if ranks >= self._announced_ranks.get(key[0], ranks)
        ]
        return max(whole, default=None)

    def _make_room(self, generation: int, need: int) -> None:
        """Free memory of older generations until there is room for `need` bytes, incomplete steps
        first."""
        newest = self._newest_complete()
        for spared in (newest, None):
            if self.used_bytes() + need <= self.max_bytes:
                return
            old = {name for name in self.kept_slots if name[0] < generation and name[:2] != spared}
            self._drop_where(old.__contains__)
        if self.used_bytes() + need > self.max_bytes:
            raise HoldfastError(
                f"no room for a copy of {need // 2} bytes in two slots: {self.used_bytes()} of "
                f"{self.max_bytes} bytes are taken"
            )

    def used_bytes(self) -> int:
        return sum(file.nbytes for file in self._memory.values())

    def _drop_where(self, should_drop: Callable[[SnapshotName], bool]) -> None:
        """Drop snapshots, and the memory files that hold none any more."""
        for name in [name for name in self.kept_slots if should_drop(name)]:
            self._drop(name)
        used = {id(file) for file, _ in self.kept_slots.values()} | self._files_being_written
        self._memory = {key: file for key, file in self._memory.items() if id(file) in used}
        ranks = {rank for rank, _ in self._memory}
        self._known_headers = {
            rank: head for rank, head in self._known_headers.items() if rank in ranks
        }

    def _drop(self, name: SnapshotName) -> None:
        del self.kept_slots[name]
        self.reused_bytes.pop(name, None)
        self._snapshot_store.drop(*name)

    def is_stored(self, name: SnapshotName) -> bool:
        try:
            self._snapshot_store.get(*name)
        except MissingKeyError:
            return False
        return True
