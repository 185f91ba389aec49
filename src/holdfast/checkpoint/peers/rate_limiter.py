"""A token bucket: how many bytes of copies may leave this machine, so that training's own traffic
goes first.

Over any T seconds at most `burst + rate * T` bytes pass, and one piece. The bucket is stored as one
moment: when all bytes taken so far will be paid for. (This is the virtual scheduling form of the
leaky bucket.) So threads that wait hold no lock and are served in the order in which they came.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

DEFAULT_BURST_S = 0.1
"""The burst where none is named: what the rate gives in this time."""


class TokenBucket:
    """Safe to share between threads."""

    def __init__(
        self,
        rate: float,
        clock: Callable[[], float],
        wait: Callable[[float], object],
        burst: float | None = None,
    ) -> None:
        """`rate` in bytes per second, 0 for no bound; `wait` sleeps that many seconds, or less when
        there is nothing to wait for any more."""
        self._rate = rate
        self._clock = clock
        self._wait = wait
        self._burst = rate * DEFAULT_BURST_S if burst is None else burst
        self._paid_until = clock()  # when everything taken so far will have been paid for
        self._lock = threading.Lock()
        self.taken_bytes = 0

    def take(self, count: int) -> float:
        """Wait until `count` bytes may be sent; return the seconds waited."""
        with self._lock:
            self.taken_bytes += count
            if not self._rate:
                return 0.0
            now = self._clock()
            self._paid_until = max(self._paid_until, now) + count / self._rate
            due = self._paid_until - now - self._burst / self._rate
        if due > 0:
            self._wait(due)
        return max(due, 0.0)
