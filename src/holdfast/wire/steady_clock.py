"""Wall-clock time whose differences are true: a clock that is set changes nothing.

The journal's times give durations: wall seconds, goodput, recovery. A person or NTP may set the
system's clock an hour back, or a day on. So the wall clock is read once, and a clock that only
counts gives the rest. It counts on while the machine sleeps, if the system has a clock for that.
"""

from __future__ import annotations

import time
from collections.abc import Callable


def counted_seconds() -> float:
    """Return seconds of a clock that cannot be set."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


class SteadyClock:
    """Seconds since 1970, as the wall clock said when this was made, and counted since."""

    def __init__(
        self, wall: Callable[[], float] = time.time, counted: Callable[[], float] = counted_seconds
    ) -> None:
        self._counted = counted
        self._origin = wall() - counted()

    def now(self) -> float:
        return self._origin + self._counted()
