"""Connections to one address that stay open between requests."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from holdfast.wire.http.sync_connection import SyncConnection


class ConnectionPool:
    """Threads may share it: each request has a connection to itself, which stays open for the next
    one."""

    def __init__(
        self, connect: Callable[[float], SyncConnection], idle_limit_s: float = math.inf
    ) -> None:
        """`connect` opens a connection within so many seconds. One that was idle for `idle_limit_s`
        is not used again."""
        self._connect, self._idle_limit_s = connect, idle_limit_s
        self._idle_since: dict[SyncConnection, float] = {}
        self._busy: set[SyncConnection] = set()
        self._is_closed = self._is_aborted = False
        self._lock = threading.Lock()

    @contextmanager
    def lend(self, timeout: float, must_be_new: bool = False) -> Iterator[SyncConnection]:
        """A connection for one request, whose silences `timeout` bounds, in seconds. It is closed
        if the block raises, or leaves some of the answer unread.

        Raises ConnectionAbortedError after `abort`, and what `connect` raises.
        """
        self.close_idle(self._idle_limit_s)
        with self._lock:
            reuses = self._idle_since and not must_be_new
            connection = self._idle_since.popitem()[0] if reuses else None
        connection = connection or self._connect(timeout)
        is_kept = False
        try:
            connection.sock.settimeout(timeout)
            with self._lock:
                if self._is_aborted:
                    raise ConnectionAbortedError("this end was closed")
                self._busy.add(connection)
            yield connection
            is_kept = connection.is_reusable
        finally:
            with self._lock:
                self._busy.discard(connection)
                is_kept = is_kept and not self._is_closed
                if is_kept:
                    self._idle_since[connection] = time.monotonic()
            if not is_kept:
                connection.close()

    def close_idle(self, idle_s: float = 0.0) -> None:
        """Close the connections that have been idle for so many seconds."""
        due = time.monotonic() - idle_s
        with self._lock:
            gone = [one for one, since in self._idle_since.items() if since <= due]
            for one in gone:
                del self._idle_since[one]
        for one in gone:
            one.close()

    def close(self) -> None:
        """Keep no connection open any more: what is under way ends, and its connection with it."""
        with self._lock:
            self._is_closed = True
        self.close_idle()

    def abort(self) -> None:
        """End the requests that are under way in other threads, and refuse later ones."""
        with self._lock:
            self._is_aborted = True
            busy = list(self._busy)
        for connection in busy:
            with suppress(OSError):
                connection.abort()
        self.close()
