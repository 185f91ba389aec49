"""The agent's side of the journal: one segment per writer, and those who look on.

Workers send their events here; the agent numbers and stamps them with its own clock, so that all
times of a generation come from one clock. Whoever looks on (the live view, metrics) is told of
every record, and one that fails is dropped rather than let it disturb training. A step that is told
once more (`core.data.lineage.Once`) goes no further.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from holdfast.core.data.lineage import Once
from holdfast.errors import HoldfastError
from holdfast.events import Event, Record
from holdfast.wire.journal import JournalWriter
from holdfast.wire.store.run_store import RunStore

Observer = Callable[[Record], None]
Say = Callable[[str], None]


class Board:
    """Takes events of the newest generation. Lives in one event loop."""

    def __init__(
        self, store: RunStore, observers: Sequence[Observer], say: Say, node: str = ""
    ) -> None:
        """node: whose agent this is, where a run has several; each writes segments of its own."""
        self._store, self._suffix = store, f".{node}" if node else ""
        self._observers = list(observers)
        self._say = say
        self._generation = 0
        self._writers: dict[str, JournalWriter] = {}
        self._unstored: list[JournalWriter] = []  # of older generations
        self._late: dict[tuple[int, str], JournalWriter] = {}
        self._complained = False
        # Where others lead, their agents tell of the starts; readers leave out a step too much.
        self._once = Once(all_starts=False)

    def begin(self, generation: int) -> None:
        """Further events are of `generation`. What could not be stored yet is kept."""
        self._unstored = [w for w in (*self._unstored, *self._writers.values()) if w.pending]
        self._generation = generation
        self._writers = {}

    def emit(self, writer: str, event: Event) -> None:
        """Number, stamp and show an event; `flush` stores it."""
        if not self._once.news(self._generation, event):
            return
        writer = self._named(writer)
        if writer not in self._writers:
            # No read: an event must not be lost, nor the event loop wait, for a sick disk.
            self._writers[writer] = JournalWriter(self._store, writer, self._generation, fresh=True)
        self._show(self._writers[writer].emit(event))

    def late(self, writer: str, generation: int, event: Event) -> None:
        """An event of a generation that this agent may have had no part in. writer: a name that
        nobody has written under in it, not even an agent of this node before this one; where the
        generation is the newest here, the agent's own segment is as good."""
        if generation == self._generation:
            self.emit("agent", event)
            return
        place = generation, self._named(writer)
        if place not in self._late:
            self._late[place] = JournalWriter(self._store, place[1], generation, fresh=True)
        self._show(self._late[place].emit(event))

    def _show(self, record: Record) -> None:
        for observer in tuple(self._observers):
            try:
                observer(record)
            except Exception as error:
                self._observers.remove(observer)
                self._say(f"a view of the run failed and is left out from here on: {error!r}")

    def _named(self, writer: str) -> str:
        """Ranks are the run's; whatever else writes is a node's."""
        return writer if writer.startswith("rank") else writer + self._suffix

    async def flush(self, writer: str | None = None, sync: bool = False) -> bool:
        """Store what was emitted (by `writer`, or by all); whether that worked.

        A full disk stops neither training nor this board: the records wait for the next flush.
        """
        named = None if writer is None else self._named(writer)
        chosen = [self._writers[named]] if named in self._writers else []
        if writer is None:
            everyone = (*self._unstored, *self._late.values(), *self._writers.values())
            chosen = [w for w in everyone if w.pending or sync]
        if not chosen:
            return True
        try:
            # Off the loop: a disk that is busy with a checkpoint may keep a write waiting.
            await asyncio.to_thread(_flush, chosen, sync)
        except HoldfastError as error:
            if not self._complained:
                self._say(f"the journal cannot be written, its records are kept: {error}")
            self._complained = True
            return False
        self._complained = False
        return True


def _flush(writers: Sequence[JournalWriter], sync: bool) -> None:
    for writer in writers:
        writer.flush(sync)
