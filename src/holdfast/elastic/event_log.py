"""The agent's side of the journal: one segment per writer, and the observers.

Workers send their events here. The agent numbers and stamps them with its own clock, so all times
of a generation come from one clock. Each observer (the live view, metrics) receives every record.
An observer that fails is dropped, because it must not disturb training. If a step is reported a
second time, it is neither stored nor shown (`core.data.lineage.DuplicateFilter`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from holdfast.core.data.lineage import DuplicateFilter
from holdfast.errors import HoldfastError
from holdfast.events import Event, Record
from holdfast.wire import process_log
from holdfast.wire.journal import JournalWriter
from holdfast.wire.steady_clock import SteadyClock
from holdfast.wire.store.run_store import RunStore, append_interval

logger = logging.getLogger(__name__)

JOURNAL_THREADS = 32
"""Most flushes under way at a time: one for each local rank, and a few for the agent."""

Observer = Callable[[Record], None]
Say = Callable[[str], None]


def logged(say: Say) -> Say:
    """Return `say` with a copy of each line in the agent's log."""

    def say_and_log(line: str) -> None:
        logger.info(line)
        say(line)

    return say_and_log


class EventLog:
    """Journal writers of the newest generation. Lives in one event loop."""

    def __init__(
        self,
        store: RunStore,
        observers: Sequence[Observer],
        say: Say,
        node: str = "",
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Make a log without writers.

        Args:
            node: the agent's node if the run has several; each agent writes its own segments.
            clock: gives the records' times, in seconds since 1970; None: one that cannot jump.
        """
        self._clock = SteadyClock().now if clock is None else clock
        self._append_interval_s = append_interval(store)
        self._store, self._suffix = store, f".{node}" if node else ""
        self._observers = list(observers)
        self._say = say
        self._generation = 0
        self._writers: dict[str, JournalWriter] = {}
        self._unflushed_writers: list[JournalWriter] = []  # of older generations
        self._other_generation_writers: dict[tuple[int, str], JournalWriter] = {}
        self.problem: HoldfastError | None = None
        """Why the newest flush failed; None if it did not."""
        # Their own: while a disk hangs, they wait, and the agent needs threads for other requests.
        self._threads = ThreadPoolExecutor(JOURNAL_THREADS, "journal")
        # If another agent leads, it reports the starts. Readers drop a step that comes twice.
        self._duplicate_filter = DuplicateFilter(all_starts=False)

    def now(self) -> float:
        """The time that a record would get now, in seconds since 1970."""
        return self._clock()

    def begin_generation(self, generation: int) -> None:
        """Take further events as those of `generation`; keep records that are not stored yet."""
        self._unflushed_writers = [
            w for w in (*self._unflushed_writers, *self._writers.values()) if w.has_pending
        ]
        self._generation = generation
        self._writers = {}
        process_log.enter(generation)

    def emit(self, writer: str, event: Event) -> None:
        """Number, stamp and show an event; `flush` stores it."""
        if not self._duplicate_filter.is_new(self._generation, event):
            return
        if writer == "agent":
            logger.info("%s", event)
        writer = self._full_writer_name(writer)
        if writer not in self._writers:
            # No read: an event must not be lost, nor the event loop wait, for a sick disk.
            self._writers[writer] = JournalWriter(
                self._store, writer, self._generation, self._clock, is_new_generation=True
            )
        self._notify_observers(self._writers[writer].emit(event))

    def emit_in_generation(self, writer: str, generation: int, event: Event) -> None:
        """Emit an event of a generation that this agent may have had no part in.

        writer: a name that no agent has used in that generation, not even an earlier agent of this
        node. If the generation is the newest here, the agent's own segment is used instead."""
        if generation == self._generation:
            self.emit("agent", event)
            return
        place = generation, self._full_writer_name(writer)
        if place not in self._other_generation_writers:
            self._other_generation_writers[place] = JournalWriter(
                self._store, place[1], generation, self._clock, is_new_generation=True
            )
        self._notify_observers(self._other_generation_writers[place].emit(event))

    def _notify_observers(self, record: Record) -> None:
        for observer in tuple(self._observers):
            try:
                observer(record)
            except Exception as error:
                self._observers.remove(observer)
                self._say(f"a view of the run failed and gets no further events: {error!r}")

    def _full_writer_name(self, writer: str) -> str:
        """Return the segment's name: ranks are unique in the run, other writers on their node."""
        return writer if writer.startswith("rank") else writer + self._suffix

    async def flush(
        self, writer: str | None = None, sync: bool = False, at_once: bool = False
    ) -> bool:
        """Store what was emitted (by `writer`, or by all); return True if that worked.

        A full disk stops neither training nor this log: the records wait for the next flush. In a
        bucket each append is an object. So a writer that has appended within the last second waits
        for a later flush, but not with `sync` or `at_once`.
        """
        named = None if writer is None else self._full_writer_name(writer)
        chosen = [self._writers[named]] if named in self._writers else []
        if writer is None:
            everyone = (
                *self._unflushed_writers,
                *self._other_generation_writers.values(),
                *self._writers.values(),
            )
            chosen = [w for w in everyone if w.has_pending or sync]
        if not (sync or at_once):
            chosen = [w for w in chosen if w.is_due(self._append_interval_s)]
        if not chosen:
            return True
        loop = asyncio.get_running_loop()
        try:
            # Off the loop: a disk that is busy with a checkpoint may keep a write waiting.
            await loop.run_in_executor(self._threads, _flush_writers, chosen, sync)
        except HoldfastError as error:
            if self.problem is None:
                self._say(f"the journal cannot be written, its records are kept: {error}")
            self.problem = error
            return False
        self.problem = None
        return True


def _flush_writers(writers: Sequence[JournalWriter], sync: bool) -> None:
    for writer in writers:
        writer.flush(sync)
