"""A blob that is written while it is hashed.

A durable save goes twice over a slot: for the checksums, and for the disk. The disk does not need
the checksums; only the part manifest needs both. So both begin when a capture is handed over, and
meet before the part:

    hashing    sealed(snapshot)    the checksums are made, and the slot is pinned
               give_up(why, then)  there will be none; `then` is called once the disk reads no
                                   more: at once, or by the thread that saves, whose disk may hang
    saving     write(store, ...)   the blob, durable; ends early, and leaves nothing, once the save
                                   is of no use
               snapshot()          waits for one of the first two; raises what `give_up` was told

Until either has been said the slot is held for the hashing; from `sealed` on by its pin. So it is
never given back while the disk reads it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

from holdfast.checkpoint.memory.arena import SlotHeader
from holdfast.checkpoint.memory.snapshot_store import MemoryFile, Snapshot
from holdfast.checkpoint.save.save_tracker import SaveId
from holdfast.checkpoint.save.writer import split_into_chunks, write_blob
from holdfast.core.format.manifest import blob_key, writer_name
from holdfast.errors import HoldfastError
from holdfast.wire.store.run_store import RunStore


class PendingBlob:
    """One rank's blob on its way to the run store."""

    def __init__(self, memory: MemoryFile, slot: int, header: SlotHeader, rank: int) -> None:
        self.save: SaveId = (header.generation, header.step)
        self._memory, self._slot, self._header = memory, slot, header
        self.rank, self.nbytes, self.has_been_tried = rank, header.length, False
        self._key = blob_key(header.generation, header.step, writer_name(rank))
        self._sealed_snapshot: Future[Snapshot] = Future()
        self._lock = threading.Lock()
        self._is_reading = False  # the slot is read for the disk
        self._on_read_end: Callable[[], None] | None = None  # what waits for the end of that

    # --- the side that hashes ---------------------------------------------------------------
    def set_sealed(self, snapshot: Snapshot) -> None:
        self._sealed_snapshot.set_result(snapshot)

    def give_up(self, error: Exception, on_read_end: Callable[[], None]) -> None:
        with self._lock:
            self._sealed_snapshot.set_exception(error)
            if self._is_reading:  # a write that is under way ends with its next piece
                self._on_read_end = on_read_end
                return
        on_read_end()

    # --- the side that saves ----------------------------------------------------------------
    def write(self, store: RunStore, why_useless: Callable[[], str | None]) -> None:
        """Write the blob under the authority of its own generation. why_useless: called again and
        again; returns why the blob is no longer needed, or None.

        Raises that reason, the one given to `give_up`, CorruptError when the slot changes
        meanwhile, and what the store raises.
        """
        with self._lock:
            self._check_needed(why_useless)
            self._is_reading = self.has_been_tried = True
        try:
            with self._memory.arena.reading(self._slot, self._header) as data:
                write_blob(store, self.save[0], self._key, self._chunks(data, why_useless))
        finally:
            with self._lock:
                self._is_reading = False
                then, self._on_read_end = self._on_read_end, None
            if then is not None:
                then()

    def wait_sealed(self) -> Snapshot:
        return self._sealed_snapshot.result()

    def _chunks(
        self, data: memoryview, why_useless: Callable[[], str | None]
    ) -> Iterator[memoryview]:
        for piece in split_into_chunks(data):
            self._check_needed(why_useless)
            yield piece
        self._check_needed(why_useless)

    def _check_needed(self, why_useless: Callable[[], str | None]) -> None:
        if self._sealed_snapshot.done():
            self._sealed_snapshot.result()
        if reason := why_useless():
            raise HoldfastError(reason)
