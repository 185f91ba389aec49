"""The one loop of all studies: time passes between instants at which something changes. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Generic, TypeVar

News = TypeVar("News")


class Process(Generic[News]):
    """A study over time. Between two changes its accounts follow from formulas.

    Any unit of time will do, if all times of a process have the same.
    """

    now: float = 0.0

    def take(self, news: News) -> None:
        """Take in what happens outside of the process now, and decide."""

    def next_change(self, end: float) -> float:
        """Return when the process changes by itself, at most `end`."""
        return end

    def elapse(self, until: float) -> bool:
        """Let time pass in which nothing changes. Return True if the process is over by then."""
        self.now = until
        return False

    def act(self) -> None:
        """Do what the process has to do now."""


def run_process(
    process: Process[News], instants: Iterable[tuple[float, News]] = (), end: float = inf
) -> None:
    """Run a process over instants of rising time until `end`, or until it is over.

    An instant at `end` or later is not taken. With an endless `end`, the process ends itself.
    """
    for time, news in instants:
        if time >= end:
            break
        if process.now < time and _advance(process, time):
            return
        process.take(news)
    _advance(process, end)


def _advance(process: Process[News], end: float) -> bool:
    """Return True if the process is over before `end`."""
    next_change, elapse, act = process.next_change, process.elapse, process.act
    while process.now < end:
        until = next_change(end)
        if until > process.now and elapse(until):
            return True
        act()
    return False
