"""Polls notice sources on background threads.

Each source has its own thread: a service out of reach answers after seconds, and some requests stay
open until there is news. The threads are daemons, so that leaving does not wait for them. A service
repeats its warning until the machine ends, so each warning is reported once, in the agent's loop. A
failing source stops nothing. Its failure is reported and written down once, and its recovery is
reported once.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from holdfast.elastic.notices.source import NoticeSource, NoticeSourceError, TerminationWarning
from holdfast.events import Event, NoticesUnheard

T = TypeVar("T")

ACKNOWLEDGE_TIMEOUT_S = 6.0
FORWARDED_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT})
"""Signals that the agent handles itself; it passes them on by `pass_on_signal`."""


class NoticePoller:
    """Calls `on_warning` with every new warning, and `say` when a source fails and recovers."""

    def __init__(
        self,
        source: NoticeSource | None,
        interval_s: float,
        on_warning: Callable[[TerminationWarning], None],
        say: Callable[[str], None],
        emit: Callable[[Event], object] = lambda event: None,
    ) -> None:
        """Start a thread for each source.

        Args:
            source: None to poll nothing.
            interval_s: least seconds from one request to the next.

        Call in the loop in which `on_warning`, `say` and `emit` must run.
        """
        self._interval_s = interval_s
        self._on_warning, self._say, self._emit = on_warning, say, emit
        self._loop = asyncio.get_running_loop()
        self._closed = threading.Event()
        self._sources = () if source is None else source.leaf_sources
        self._signal_handlers: dict[int, Callable[[], None]] = {}
        if source is not None and source.startup_message:
            say(source.startup_message)
        for part in self._sources:
            self._signal_handlers |= part.signal_handlers()
            threading.Thread(
                target=self._poll_source, args=(part,), name="notices", daemon=True
            ).start()
        for number in self._signal_handlers.keys() - FORWARDED_SIGNALS:
            # Only a process's main thread may; elsewhere the embedding process has the signals.
            with suppress(ValueError, RuntimeError):
                self._loop.add_signal_handler(number, self._signal_handlers[number])

    def close(self) -> None:
        """Stop: no callback runs afterwards."""
        self._closed.set()  # signals stay caught: their default action would end this process
        for part in self._sources:
            part.close()

    def pass_on_signal(self, number: int) -> bool:
        """Return True if a source knows this signal and will call `on_warning` shortly."""
        meant = self._signal_handlers.get(number)
        if meant is None or self._closed.is_set():
            return False
        meant()
        return True

    async def acknowledge(self) -> None:
        """Notify the sources that the run has left this machine, or moved.

        A service that waits for that may begin early. Takes seconds at most. A failure is reported
        and stops nothing.
        """
        asked = [asyncio.to_thread(part.acknowledge) for part in self._sources]
        try:
            async with asyncio.timeout(ACKNOWLEDGE_TIMEOUT_S):
                for found in await asyncio.gather(*asked, return_exceptions=True):
                    if isinstance(found, BaseException):
                        self._say(f"the notice could not be acknowledged: {found}")
        except TimeoutError:
            self._say("the notice could not be acknowledged: no answer")

    def _poll_source(self, source: NoticeSource) -> None:
        told: set[str] = set()
        failing, good = False, 0
        while not self._closed.is_set():
            began = time.monotonic()
            try:
                warned = source.poll()
            except Exception as error:  # a bug of ours in reading an answer stops nothing, either
                if not failing:
                    known = isinstance(error, NoticeSourceError)
                    why = str(error) if known else f"{type(error).__name__}: {error}"
                    self._call_in_loop(self._report_failure, why)
                failing, good = True, 0
                began = time.monotonic()  # however long it took: nobody is asked in haste
            else:
                good += 1
                if failing and good == 2:  # one that answers every other time is still failing
                    self._call_in_loop(self._say, "notices can be had again")
                    failing = False
                if warned is not None and warned.dedup_key not in told:
                    told.add(warned.dedup_key)
                    self._call_in_loop(self._on_warning, warned)
            self._closed.wait(max(0.0, self._interval_s - (time.monotonic() - began)))

    def _report_failure(self, reason: str) -> None:
        self._say(f"notices cannot be had: {reason}; asking again")
        self._emit(NoticesUnheard(reason))

    def _call_in_loop(self, callback: Callable[[T], None], value: T) -> None:
        def tell() -> None:
            if not self._closed.is_set():
                callback(value)

        try:
            self._loop.call_soon_threadsafe(tell)
        except RuntimeError:  # the loop is closed
            self._closed.set()
