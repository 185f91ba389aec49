"""Runs the agent's event loop, also in a thread that runs a loop already, as a notebook's does."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from math import inf
from queue import Empty, SimpleQueue
from typing import Any

from holdfast.wire import lifeline

Arrived = SimpleQueue[signal.Signals | None]
"""Signals in their order; None: the coroutine has ended. A signal handler may put into it, even if
it interrupts another call of the queue."""
WAKE_UP_S = 0.2
"""Seconds. Python runs the handler of a signal only once the main thread's wait returns, if the
signal came just before that wait began."""


def run_to_end(main: Coroutine[Any, Any, int], on_signal: Callable[[signal.Signals], None]) -> int:
    """Run a coroutine in an event loop of its own; return its result.

    A thread runs one event loop at a time. If the caller's thread is inside one, the coroutine gets
    another thread, whose loop cannot catch signals.

    on_signal: called in the caller's thread for each of the agent's signals in that case.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(main)
    arrived: Arrived = SimpleQueue()
    with ThreadPoolExecutor(1, "agent") as pool, _signals_queued(arrived):
        result = pool.submit(asyncio.run, main)
        result.add_done_callback(lambda _: arrived.put(None))
        while (number := _next(arrived)) is not None:
            on_signal(number)
        return result.result()


def _next(arrived: Arrived) -> signal.Signals | None:
    while True:
        with suppress(Empty):
            return arrived.get(timeout=WAKE_UP_S)


@contextmanager
def _signals_queued(arrived: Arrived) -> Iterator[None]:
    """Put the agent's signals into a queue, in place of what the process does with them."""
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():  # no other may set handlers
        for number in lifeline.AGENT_SIGNALS:
            if signal.getsignal(number) is not None and not lifeline.is_ignored_hangup(number):
                before[number] = signal.signal(
                    number, lambda found, _: arrived.put(signal.Signals(found))
                )
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Pulse:
    """Notices that an event loop's process was stopped for a while."""

    PERIOD_S = 0.1
    MISSED_S = 0.2  # later than due, so long that the process was stopped, or very busy
    RECENT_S = 1.0

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._due, self._missed_at = loop, loop.time(), -inf
        self._beat()

    def _beat(self) -> None:
        now = self._loop.time()
        if now - self._due > self.MISSED_S:
            self._missed_at = now
        self._due = now + self.PERIOD_S
        self._loop.call_later(self.PERIOD_S, self._beat)

    def has_missed(self) -> bool:
        """Return True if the loop did nothing until just now."""
        now = self._loop.time()
        return now - self._due > self.MISSED_S or now - self._missed_at < self.RECENT_S
