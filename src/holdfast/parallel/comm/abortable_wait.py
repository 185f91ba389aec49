"""Waits for messages that can be given up, because gloo does not always end them.

When a connection breaks, gloo wakes a wait for a message that has not begun to come. It does not
wake a wait for a message of which a part has come. (`Pair::signalException` of gloo's TCP
transport goes through the pending receives, but not through the one being read; seen with torch
2.13.) Closing the group does not wake it either: it waits for as long as the group's deadline.
A peer that is killed or cut off while it sends leaves such a message behind, and more surely the
larger the message is.

So a thread that must continue lets another thread (an errand) wait, and abandons it once the
group has been given up. A closed connection brings nothing any more, so the buffers are free.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from holdfast.parallel.comm.comm_stats import TrafficCounter
from holdfast.parallel.torch_compat import Work

WAKE_GRACE_S = 0.05
"""For what gloo does wake, which says more about its reason."""
CONNECTION_CLOSED = "Connection closed by peer, or by this rank, in the midst of a message"


class AbandonedError(Exception):
    """No thread waits for this errand any more."""


class AbortableWait:
    """One run of `job` on a thread of its own; `job` waits for messages by `wait` alone."""

    def __init__(self, job: Callable[[AbortableWait], None], name: str) -> None:
        self._job = job
        self._changed = threading.Condition()
        self._is_done = self._is_waiting = self._is_aborted = self._is_abandoned = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name=name)

    def start(self) -> None:
        self._thread.start()

    def wait(self, work: Work) -> None:
        """Until the message is there; on this errand's thread. Raises RuntimeError when it does not
        come."""
        self.block(work.wait)

    def check(self) -> None:
        """Raise RuntimeError if the group was given up: what arrives from now on is void."""
        if self._is_aborted:
            raise RuntimeError(CONNECTION_CLOSED)

    def pause(self, seconds: float) -> None:
        """Sleep, but not after the group was given up."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_aborted, seconds)

    def block(self, call: Callable[[], object]) -> None:
        """Call what may wait for other ranks, as `wait` does."""
        with self._changed:
            self.check()
            self._is_waiting = True
        try:
            call()
        finally:
            with self._changed:
                self._is_waiting = False
                # however it ended: when gloo's own time is over it is an error
                if self._is_abandoned:
                    raise AbandonedError

    def abort(self) -> None:
        """The connections are closed: wait for no message from now on."""
        with self._changed:
            self._is_aborted = True
            self._changed.notify_all()

    def join(self) -> None:
        """Return when the job is over. Raises what it raised, and RuntimeError when it waits in
        vain: it touches nothing any more then."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_done or self._is_aborted)
            self._changed.wait_for(lambda: self._is_done, WAKE_GRACE_S)
            if self._is_waiting:
                self._is_abandoned = True
                raise RuntimeError(CONNECTION_CLOSED)
            self._changed.wait_for(lambda: self._is_done)
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._job(self)
        except AbandonedError:
            pass  # the thread that sent it out has got its error already
        except Exception as error:
            self._error = error
        finally:
            with self._changed:
                self._is_done = True
                self._changed.notify_all()


class AbortableGroup:
    """A group of ranks whose waits end when it is given up.

    Rank `rank` of `size` ranks. traffic: counts what leaves this rank; None does not count.
    """

    def __init__(self, rank: int, size: int, traffic: TrafficCounter | None) -> None:
        self.rank, self.size, self.traffic = rank, size, traffic
        self._waits: set[AbortableWait] = set()
        self._is_aborted = False
        self._lock = threading.Lock()  # of the two

    def count(self, nbytes: int, kind: str = "reduce") -> None:
        """Count bytes that leave this rank. kind: see `TRAFFIC_KINDS`."""
        if self.traffic is not None:
            self.traffic.add(kind, nbytes)

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
