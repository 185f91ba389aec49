"""When a run waits for a better hour: a signal over time, two limits, and the most that it waits.

The signal is a table of times and values, such as grams of CO2 a kilowatt-hour or the price of
electricity. A value holds until the next one. Pure.
"""

from __future__ import annotations

import csv
from bisect import bisect_right
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from math import inf, isfinite
from statistics import median

from holdfast.errors import DataError

_STALE_ROWS = 2.0
"""Usual distances of rows after which the last value is no longer known."""


@dataclass(frozen=True)
class Signal:
    """Values over time. times: seconds since 1970, rising."""

    times: tuple[float, ...]
    values: tuple[float, ...]

    def at(self, now: float) -> float | None:
        """Return the value at `now`; None before the first row, and long after the last one."""
        row = bisect_right(self.times, now) - 1
        return self.values[row] if row >= 0 and now < self.end else None

    @property
    def end(self) -> float:
        """The time from which on nothing is known."""
        steps = [later - earlier for earlier, later in pairwise(self.times)]
        return self.times[-1] + (_STALE_ROWS * median(steps) if steps else inf)

    def lowest(self, begin: float, end: float) -> float:
        """Return the lowest value that begins between two times; inf without one."""
        rows = slice(bisect_right(self.times, begin), bisect_right(self.times, end))
        return min(self.values[rows], default=inf)


@dataclass(frozen=True)
class PauseLimits:
    """When a pause begins (above) and ends (below), and the seconds that it lasts at most."""

    above: float
    below: float
    longest_s: float


def begins(signal: Signal, limits: PauseLimits, now: float, paused_at: float | None) -> bool:
    """Return True if a pause begins now.

    paused_at: when a pause began that bars another one until the signal was `below`; None: none
    does.
    """
    value = signal.at(now)
    if value is None or value <= limits.above:
        return False
    return paused_at is None or signal.lowest(paused_at, now) <= limits.below


def lasts(signal: Signal, limits: PauseLimits, now: float, paused_at: float) -> bool:
    """Return True if the pause that began at `paused_at` is not over."""
    value = signal.at(now)
    if value is None or now - paused_at >= limits.longest_s:
        return False
    return min(value, signal.lowest(paused_at, now)) > limits.below


def pause_in_force(
    signal: Signal, limits: PauseLimits, now: float, paused_at: float | None
) -> float | None:
    """Return `paused_at` if the pause of that time still bars another one, while the run trains.

    A run that trains within `longest_s` of a pause does so because the signal was low.
    """
    if paused_at is None or now - paused_at < limits.longest_s:
        return None
    value = signal.at(now)
    return None if value is not None and value <= limits.below else paused_at


def read_signal(text: str, source: str, column: str = "") -> Signal:
    """Return the signal of a CSV file: a header, then rows that begin with a time.

    column: of the values; "": the only one. Rows without a value are left out. Raises DataError.
    """
    try:
        rows = list(csv.reader(text.splitlines()))
    except csv.Error as error:
        remedy = "write a time and a number in each row"
        raise DataError(f"this is no table ({error})", where=source, remedy=remedy) from None
    header = rows[0] if rows else []
    if len(header) < 2 or (column and column not in header[1:]):
        named = f"no column {column}" if column else "no column of values"
        raise DataError(
            f"{named} follows the column of times",
            where=f"{source}:1",
            remedy=f"use pause.column={header[1]}" if len(header) > 1 else "write time,value",
        )
    if not column and len(header) > 2:
        raise DataError(
            f"there are {len(header) - 1} columns of values",
            where=f"{source}:1",
            remedy=f"name one, as in pause.column={header[-1]}",
        )
    place = header.index(column, 1) if column else 1
    points: dict[float, float] = {}
    for line, row in enumerate(rows[1:], 2):
        if len(row) <= place or not row[place].strip():
            continue
        try:
            time, value = datetime.fromisoformat(row[0].strip()), float(row[place])
        except ValueError:
            time, value = datetime.min, inf
        if time.tzinfo is None or not isfinite(value):
            raise DataError(
                "a row is a time with its offset from UTC, and a number",
                where=f"{source}:{line}",
                remedy="write 2026-01-31T15:00:00+00:00,412.5",
            )
        points[time.timestamp()] = value
    if not points:
        raise DataError("no row has a value", where=source, remedy="write a row for each hour")
    times = sorted(points)
    return Signal(tuple(times), tuple(points[time] for time in times))
