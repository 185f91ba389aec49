"""A group of ranks whose waits end when it is given up."""

from __future__ import annotations

import threading

from holdfast.parallel.comm.abortable_wait import AbortableWait
from holdfast.parallel.comm.comm_stats import TrafficCounter


class AbortableGroup:
    """rank `rank` of `size` ranks. traffic: counts what leaves this rank; None does not count."""

    def __init__(self, rank: int, size: int, traffic: TrafficCounter | None) -> None:
        self.rank, self.size, self.traffic = rank, size, traffic
        self._waits: set[AbortableWait] = set()
        self._is_aborted = False
        self._lock = threading.Lock()  # of the two

    def start_wait(self, wait: AbortableWait) -> None:
        """Start an errand that waits for messages of this group: it is given up with it."""
        self.add_wait(wait)
        wait.start()

    def add_wait(self, wait: AbortableWait) -> None:
        """An errand, of several groups perhaps, is given up with this group."""
        with self._lock:
            self._waits.add(wait)
            aborted = self._is_aborted
        if aborted:
            wait.abort()

    def join_wait(self, wait: AbortableWait) -> None:
        """Return when it is over. Raises what `AbortableWait.join` raises."""
        try:
            wait.join()
        finally:
            self.forget_wait(wait)

    def forget_wait(self, wait: AbortableWait) -> None:
        """An errand is over, or abandoned."""
        with self._lock:
            self._waits.discard(wait)

    def _abort_waits(self) -> None:
        """Give up the errands of this group, those that begin later too."""
        with self._lock:
            self._is_aborted = True
            errands = list(self._waits)
        for errand in errands:
            errand.abort()
