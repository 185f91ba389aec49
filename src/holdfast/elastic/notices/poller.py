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

from holdfast.elastic.notices.source import Source, SourceError, Warned
from holdfast.events import Event, NoticesUnheard

T = TypeVar("T")

ACKNOWLEDGE_SECONDS = 6.0
OF_THE_AGENT = frozenset({signal.SIGTERM, signal.SIGINT})
"""Signals that the agent handles itself; it passes them on by `pass_on_signal`."""


class NoticeWatch:
    """Calls `on_warning` with every new warning, and `say` when a source fails and recovers."""

    def __init__(
        self, source: Source | None, every: float, heard: Callable[[Warned], None],
        say: Callable[[str], None], emit: Callable[[Event], object] = lambda event: None,
    ) -> None:  # fmt: skip
        """Start a thread for each source.

        Args:
            source: None to poll nothing.
            interval_s: least seconds from one request to the next.

        Call in the loop in which `on_warning`, `say` and `emit` must run.
        """
        self._every = every
        self._heard, self._say, self._emit = heard, say, emit
        self._loop = asyncio.get_running_loop()
        self._over = threading.Event()
        self._parts = () if source is None else source.parts
        self._signals: dict[int, Callable[[], None]] = {}
        if source is not None and source.told:
            say(source.told)
        for part in self._parts:
            self._signals |= part.signals()
            threading.Thread(target=self._ask, args=(part,), name="notices", daemon=True).start()
        for number in self._signals.keys() - OF_THE_AGENT:
            # Only a process's main thread may; elsewhere the embedding process has the signals.
            with suppress(ValueError, RuntimeError):
                self._loop.add_signal_handler(number, self._signals[number])

    def close(self) -> None:
        """Stop: no callback runs afterwards."""
        self._over.set()  # signals stay caught: their default action would end this process
        for part in self._parts:
            part.close()

    def signalled(self, number: int) -> bool:
        """Return True if a source knows this signal and will call `on_warning` shortly."""
        meant = self._signals.get(number)
        if meant is None or self._over.is_set():
            return False
        meant()
        return True

    async def acknowledge(self) -> None:
        """Notify the sources that the run has left this machine, or moved.

        A service that waits for that may begin early. Takes seconds at most. A failure is reported
        and stops nothing.
        """
        asked = [asyncio.to_thread(part.acknowledge) for part in self._parts]
        try:
            async with asyncio.timeout(ACKNOWLEDGE_SECONDS):
                for found in await asyncio.gather(*asked, return_exceptions=True):
                    if isinstance(found, BaseException):
                        self._say(f"the notice could not be acknowledged: {found}")
        except TimeoutError:
            self._say("the notice could not be acknowledged: no answer")

    def _ask(self, source: Source) -> None:
        told: set[str] = set()
        failing, good = False, 0
        while not self._over.is_set():
            began = time.monotonic()
            try:
                warned = source.ask()
            except Exception as error:  # a bug of ours in reading an answer stops nothing, either
                if not failing:
                    known = isinstance(error, SourceError)
                    why = str(error) if known else f"{type(error).__name__}: {error}"
                    self._tell(self._failed, why)
                failing, good = True, 0
                began = time.monotonic()  # however long it took: nobody is asked in haste
            else:
                good += 1
                if failing and good == 2:  # one that answers every other time is still failing
                    self._tell(self._say, "notices can be had again")
                    failing = False
                if warned is not None and warned.key not in told:
                    told.add(warned.key)
                    self._tell(self._heard, warned)
            self._over.wait(max(0.0, self._every - (time.monotonic() - began)))

    def _failed(self, why: str) -> None:
        self._say(f"notices cannot be had: {why}; asking again")
        self._emit(NoticesUnheard(why))

    def _tell(self, whom: Callable[[T], None], what: T) -> None:
        def tell() -> None:
            if not self._over.is_set():
                whom(what)

        try:
            self._loop.call_soon_threadsafe(tell)
        except RuntimeError:  # the loop is closed
            self._over.set()
