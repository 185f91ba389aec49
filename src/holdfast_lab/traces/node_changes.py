"""Machines that come and go: what every reader of churn makes of a file. Pure.

What all of them keep to:

- Times are sorted first. A trace says how many rows were out of order, and how many were exact
  duplicates and dropped.
- What goes in one tick goes at one time: a burst stays a burst.
- A node that is there at the end has not left: the end of a file is no failure.
- A gap of more than ten usual steps is unknown, and named; the count before it is held.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Literal

UNKNOWN_GAP_STEPS = 10  # A gap is unknown beyond this many usual steps between samples

Victims = Literal["random", "lifo", "fifo"]
"""Which nodes of a count go: drawn from a seed, the youngest, or the oldest."""
Burst = Literal["any", "neighbours", "spread"]
"""How the nodes that go at one instant lie in the order of ranks."""


@dataclass(frozen=True, order=True, slots=True)
class NodeChange:
    """A node goes or comes at `seconds`. At one instant, departures come first.

    row: of the source, from 1; 0 if there is none.
    """

    seconds: float
    kind: Literal["go", "join"]
    node: str
    row: int = field(default=0, compare=False)


def sort_changes(changes: Iterable[NodeChange]) -> tuple[NodeChange, ...]:
    """Sorted by time; at one instant departures come first, then names decide."""
    return tuple(sorted(changes, key=attrgetter("seconds", "kind", "node")))


@dataclass(frozen=True)
class Trace:
    """Machines over time. step: usual seconds between samples, below which no time is known.

    unknown: (start, stop) of gaps. disorder, duplicates: rows that were out of order, or dropped.
    """

    source: str
    kind: str
    changes: tuple[NodeChange, ...]
    seconds: float
    step: float
    started: str = ""  # wall clock as the file gives it, of no known zone
    unknown: tuple[tuple[float, float], ...] = ()
    disorder: int = 0
    duplicates: int = 0
    rows: int = 0
    sha256: str = ""
    notes: tuple[str, ...] = ()  # what is not read, and repairs

    def instants(self) -> Iterator[tuple[float, list[str], list[str]]]:
        """(time, who goes, who joins) of every instant at which anything changes."""
        at, gone, come = 0.0, list[str](), list[str]()
        for change in self.changes:
            if change.seconds != at:
                if gone or come:
                    yield at, gone, come
                at, gone, come = change.seconds, [], []
            (gone if change.kind == "go" else come).append(change.node)
        if gone or come:
            yield at, gone, come


@dataclass(frozen=True)
class ReadOptions:
    """What a file does not say, and a reader needs.

    tick_seconds: replaces the clock of a series of ticks. nodes, days: for tables of lives and of
    rates, which have no time. system: of a table of outages. zone, gpu: names for the rows of a
    file that has none, or a choice from one that has several. label: a name for such rows if zone
    is empty; it chooses nothing. outage_s: of failures whose length
    the file leaves out. carbon: what an intensity is, if the file does not say it.
    """

    seed: int = 0
    victims: Victims = "random"
    burst: Burst = "any"
    tick_seconds: float | None = None
    nodes: int | None = None
    days: float | None = None
    system: str | None = None
    zone: str = ""
    label: str = ""
    gpu: str = ""
    outage_s: float = 3600.0
    carbon: Literal["", "average", "marginal"] = ""

    @property
    def place(self) -> str:
        """The zone of rows that name none."""
        return self.zone or self.label


DEFAULTS = ReadOptions()
