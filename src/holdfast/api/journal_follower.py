"""The views of one node of several follow the run's journal.

Each agent writes what happens on its node. So a node that does not lead would show the steps of its
own workers only, and no change of membership. Here one thread reads the journal that all nodes
write into the run store. Another thread hands its records to the views in one order, and waits for
no disk.

Records of several nodes arrive late and interleaved. A record waits `HOLD_S` before the views get
it, so that an earlier one of another node can still come. This node's own records come from its
agent, not from the journal. So they are shown while the run store is full or does not answer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from holdfast.core.data.lineage import DuplicateFilter
from holdfast.errors import HoldfastError
from holdfast.events import Record
from holdfast.report.ledger.ordering import order_records
from holdfast.wire.journal import JournalTail
from holdfast.wire.store.run_store import RunStore, append_interval

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.5
HOLD_S = 1.0
CLOSE_TIMEOUT_S = 5.0


class HeldRecords:
    """Puts records into one order, as long as none comes more than `hold_s` late."""

    def __init__(self, hold_s: float = HOLD_S) -> None:
        self._hold_s = hold_s
        self._held: dict[tuple[int, str, int], tuple[float, Record]] = {}

    def add(self, records: Sequence[Record], now: float) -> None:
        """now: seconds on any clock that does not jump."""
        for record in records:
            self._held[_key_of(record)] = now, record

    def take(self, now: float) -> list[Record]:
        """Return what has waited long enough, with all that precedes it."""
        order = order_records(record for _, record in self._held.values())
        due = [
            place
            for place, record in enumerate(order, 1)
            if self._held[_key_of(record)][0] + self._hold_s <= now
        ]
        taken = order[: due[-1]] if due else []
        for record in taken:
            del self._held[_key_of(record)]
        return taken


class JournalFollower:
    """Feeds observers from a run's journal and this node's agent, on threads of its own."""

    def __init__(self, store: RunStore, observers: Sequence[Callable[[Record], None]]) -> None:
        self._tail, self._observers = JournalTail(store), observers
        late_s = append_interval(store)  # of a record that its writer keeps for a while
        self._held, self._lock = HeldRecords(HOLD_S + 2 * late_s), threading.Lock()
        self._poll_interval_s = max(POLL_INTERVAL_S, late_s)
        self._own_segments: set[tuple[int, str]] = set()  # generation and writer
        self._duplicates = DuplicateFilter()
        self._closing = threading.Event()
        self._reader = threading.Thread(target=self._read_all_the_time, name="journal", daemon=True)
        self._shower = threading.Thread(target=self._show_all_the_time, name="views", daemon=True)
        self._is_unreadable = False

    def read_all(self) -> list[Record]:
        """Return the records that the journal has already. Raises what the run store raises."""
        return self._duplicates(self._tail.read_new())

    def observe(self, record: Record) -> None:
        """Take a record of this node's agent; the journal need not have it yet."""
        with self._lock:
            self._own_segments.add((record.generation, record.writer))
            self._held.add([record], time.monotonic())

    def start(self) -> None:
        """Begin to feed the observers with what follows."""
        self._reader.start()
        self._shower.start()

    def close(self) -> None:
        """Show what is in the journal by now, unless the run store does not answer."""
        self._closing.set()
        self._shower.join(2 * CLOSE_TIMEOUT_S)

    def _read_all_the_time(self) -> None:
        while not self._closing.wait(self._poll_interval_s):
            self._read(time.monotonic())
        self._read(time.monotonic())

    def _show_all_the_time(self) -> None:
        while not self._closing.wait(POLL_INTERVAL_S):
            self._show(time.monotonic())
        self._reader.join(CLOSE_TIMEOUT_S)
        self._show(float("inf"))

    def _read(self, now: float) -> None:
        try:
            found = self._tail.read_new()
            with self._lock:
                of_others = [r for r in found if (r.generation, r.writer) not in self._own_segments]
                self._held.add(of_others, now)
            self._is_unreadable = False
        except HoldfastError as error:
            if not self._is_unreadable:
                logger.warning("the views show nothing new: the journal cannot be read: %s", error)
            self._is_unreadable = True

    def _show(self, now: float) -> None:
        with self._lock:
            due = self._duplicates(self._held.take(now))
        for record in due:
            for observer in self._observers:
                observer(record)


def _key_of(record: Record) -> tuple[int, str, int]:
    return record.generation, record.writer, record.sequence
