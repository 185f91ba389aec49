"""Shows on one node what the agents of other nodes write into the run's journal.

An agent sees its own node's events. The steps are rank 0's, and losses are the coordinator's. So a
node that joins would show nothing of the run that it takes part in.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from holdfast.errors import HoldfastError
from holdfast.events import Record
from holdfast.report.ordering import order_records
from holdfast.wire.journal import JournalTail
from holdfast.wire.store.run_store import RunStore

READ_INTERVAL_S = 1.0
"""Seconds between two looks at the journal."""
CLOSE_TIMEOUT_S = 5.0


class RunFollower:
    """Reads the journal on a thread of its own, so that a slow store holds up nothing else."""

    def __init__(
        self,
        store: RunStore,
        show: Callable[[Record], None],
        interval_s: float = READ_INTERVAL_S,
    ) -> None:
        """show: gets each new record of another agent; any thread may call it."""
        self._tail, self._show, self._interval_s = JournalTail(store), show, interval_s
        self._own: set[tuple[int, str]] = set()  # generation and writer of this agent's segments
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)
        self._tail.read_new()  # what the caller has shown already

    def start(self) -> None:
        self._thread.start()

    def observe(self, record: Record) -> None:
        """Note a record of this agent, which is shown without a look at the journal."""
        self._own.add((record.generation, record.writer))

    def close(self) -> None:
        """Show what is there, and stop."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._closing.wait(self._interval_s)
            try:
                found = self._tail.read_new()
            except (HoldfastError, OSError):
                continue  # a store that is away is read again later
            for record in order_records(found):
                if (record.generation, record.writer) not in self._own:
                    self._show(record)
