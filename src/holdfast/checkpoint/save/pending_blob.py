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
from holdfast.checkpoint.save.save_tracker import Save
from holdfast.checkpoint.save.writer import pieces, write_blob
from holdfast.core.format.manifest import blob_key, writer_name
from holdfast.errors import HoldfastError
from holdfast.wire.store.run_store import RunStore


class Writing:
    """One rank's blob on its way to the run store."""

    def __init__(self, memory: MemoryFile, slot: int, header: SlotHeader, rank: int) -> None:
        self.save: Save = (header.generation, header.step)
        self._memory, self._slot, self._header = memory, slot, header
        self._key = blob_key(header.generation, header.step, writer_name(rank))
        self._sealed: Future[Snapshot] = Future()
        self._turn = threading.Lock()
        self._reading = False  # the slot is read for the disk
        self._then: Callable[[], None] | None = None  # what waits for the end of that

    # --- the side that hashes ---------------------------------------------------------------
    def sealed(self, snapshot: Snapshot) -> None:
        self._sealed.set_result(snapshot)

    def give_up(self, why: Exception, then: Callable[[], None]) -> None:
        with self._turn:
            self._sealed.set_exception(why)
            if self._reading:  # a write that is under way ends with its next piece
                self._then = then
                return
        then()

    # --- the side that saves ----------------------------------------------------------------
    def write(self, store: RunStore, useless: Callable[[], str | None]) -> None:
        """Write the blob under the authority of its own generation. useless: called again and
        again; returns why the blob is no longer needed, or None.

        Raises that reason, the one given to `give_up`, CorruptError when the slot changes
        meanwhile, and what the store raises.
        """
        with self._turn:
            self._go_on(useless)
            self._reading = True
        try:
            with self._memory.arena.reading(self._slot, self._header) as data:
                write_blob(store, self.save[0], self._key, self._content(data, useless))
        finally:
            with self._turn:
                self._reading = False
                then, self._then = self._then, None
            if then is not None:
                then()

    def snapshot(self) -> Snapshot:
        return self._sealed.result()

    def _content(self, data: memoryview, useless: Callable[[], str | None]) -> Iterator[memoryview]:
        for piece in pieces(data):
            self._go_on(useless)
            yield piece
        self._go_on(useless)

    def _go_on(self, useless: Callable[[], str | None]) -> None:
        if self._sealed.done():
            self._sealed.result()
        if reason := useless():
            raise HoldfastError(reason)
