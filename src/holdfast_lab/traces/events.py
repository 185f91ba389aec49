"""The one form of all traces: a header and events in order. Pure.

Machines join and go, fail and recover, slow down; links, prices and carbon intensities change. The
fields and the order inside one instant are those of docs/studies/traces.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from types import MappingProxyType
from typing import Any

from holdfast.errors import DataError
from holdfast_lab.traces.node_changes import NodeChange, Trace, sort_changes

LONGEST_S = 1e11
"""The latest time of an event, in seconds: 3,000 years. A later one is an error of the file."""
LARGEST_VALUE = 1e12  # the largest value of an event, in the unit of its kind
CONVERTER = "holdfast-trace-1"
"""Version of the readers; it changes when the same file would give other events."""

ORDER = {
    "preempt": 0,
    "fail": 0,
    "recover": 1,
    "join": 1,
    "notice": 2,
    "slow": 3,
    "net": 4,
    "price": 5,
    "carbon": 6,
}
"""The kinds of events, and their order inside one instant."""

_OF_NODES = ("preempt", "fail", "recover", "join", "notice", "slow")

_NOTHING: Mapping[str, Any] = MappingProxyType({})
"""One for all events without further keys: a million mappings of their own take 64 MB."""


def _nothing() -> Mapping[str, Any]:
    return _NOTHING


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One change. source: file and row.

    value: devices (join), seconds of warning (notice), expected outage in seconds or 0 (fail).
    A factor of at least 1 (slow), Gbit/s (net), $/h (price), gCO2/kWh (carbon).
    """

    t_s: float
    kind: str
    node: str = ""
    zone: str = ""
    gpu: str = ""
    value: float = 0.0
    source: str = ""
    extra: Mapping[str, Any] = field(default_factory=_nothing)  # keys of a file that are not known

    @property
    def key(self) -> tuple[float, int, str, str, str]:
        """What events are sorted by."""
        return self.t_s, ORDER[self.kind], self.node, self.zone, self.gpu


@dataclass(frozen=True)
class TraceHeader:
    """What a trace was made from. seconds: its length; the end of a trace is no failure."""

    trace: str
    source: str = ""
    sha256: str = ""
    rows: int = 0
    t0: str = ""
    zones: tuple[str, ...] = ()
    converter: str = CONVERTER
    victim_rule: str = ""
    seed: int = 0
    gaps: tuple[tuple[float, float], ...] = ()  # (start, stop) of which nothing is known
    seconds: float = 0.0
    step_s: float = 0.0  # of the samples, below which no time is known
    disorder: int = 0
    duplicates: int = 0
    notes: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class EventStream:
    header: TraceHeader
    events: tuple[TraceEvent, ...]

    @property
    def seconds(self) -> float:
        last = self.events[-1].t_s if self.events else 0.0
        return max(self.header.seconds, last)


def in_order(events: Iterable[TraceEvent]) -> tuple[TraceEvent, ...]:
    given = tuple(events)
    before = (-inf, 0, "", "", "")
    for event in given:  # most are in order, and the keys of a sort need room
        key = event.key
        if key < before:
            return tuple(sorted(given, key=lambda event: event.key))
        before = key
    return given


# --- checks -------------------------------------------------------------------------------------
def check_events(events: Sequence[TraceEvent], places: Iterable[str]) -> None:
    """Raise DataError for the first event that cannot be. places: of each, for the message."""
    nodes = _NodeStates()
    before = (-inf, 0, "", "", "")
    for event, where in zip(events, places, strict=True):
        problem = _problem_of_event(event) or nodes.apply(event)
        if problem:
            raise DataError(problem[0], where=where, remedy=problem[1])
        if event.key < before:
            raise DataError(
                f"{event.kind} at {event.t_s:g} s stands after a later event",
                where=where,
                remedy="sort the events with `holdfast trace convert FILE --to FILE`",
            )
        before = event.key


def _problem_of_event(event: TraceEvent) -> tuple[str, str] | None:
    """(what is wrong with an event alone, what to do), or None."""
    if event.kind not in ORDER:
        return f"there is no kind {event.kind!r} of event", f"write one of {', '.join(ORDER)}"
    if not 0 <= event.t_s <= LONGEST_S:
        return f"t_s is {event.t_s:g}", f"write seconds from the start, 0 to {LONGEST_S:g}"
    least = 1.0 if event.kind == "slow" else 0.0
    if not least <= event.value <= LARGEST_VALUE:
        remedy = f"write a number, {least:g} to {LARGEST_VALUE:g}"
        return f"value of {event.kind} is {event.value:g}", remedy
    if not event.node and event.kind in (*_OF_NODES, "net"):
        return f"{event.kind} names no node", 'write "node": a name, or "a->b" for a link'
    return None


class _NodeStates:
    """Which nodes there are, and which of them work."""

    def __init__(self) -> None:
        self._there: dict[str, str] = {}  # node: "", "fail" or "slow"
        self._left: set[str] = set()

    def apply(self, event: TraceEvent) -> tuple[str, str] | None:
        """Take an event in; return what is wrong with it, and what to do."""
        node, kind = event.node, event.kind
        if kind not in _OF_NODES:
            return None
        if kind == "join":
            if node in self._there or node in self._left:
                return f"{node} joins twice", "give every stay of a machine a name of its own"
            self._there[node] = ""
            return None
        if node not in self._there:
            word = "after it left" if node in self._left else "without having joined"
            return f"{kind} of {node} {word}", f"write a join of {node} before it, or drop it"
        state = self._there[node]
        if kind == "fail" and state == "fail":
            return f"{node} fails twice", "write recover between them"
        if kind == "recover" and not state:
            return f"{node} recovers, and nothing was wrong", "write fail or slow before it"
        if kind == "preempt":
            del self._there[node]
            self._left.add(node)
        elif kind != "notice":
            self._there[node] = "" if kind == "recover" else kind
        return None


# --- machines that come and go -------------------------------------------------------------------
def stream_of_changes(trace: Trace, *, zone: str = "", gpu: str = "") -> tuple[TraceEvent, ...]:
    """Joins and departures as events. A node that joins again was only out of order: it failed."""
    back: dict[str, float] = {}
    again: dict[tuple[str, float], float] = {}
    for change in reversed(trace.changes):
        if change.kind == "join":
            back[change.node] = change.seconds
        elif change.node in back:
            again[change.node, change.seconds] = back.pop(change.node) - change.seconds
    events, seen = [], set[str]()
    for change in trace.changes:
        kind, value = "join", 1.0
        if change.kind == "go":
            outage = again.get((change.node, change.seconds))
            kind, value = ("preempt", 0.0) if outage is None else ("fail", outage)
        elif change.node in seen:
            kind = "recover"
        seen.add(change.node)
        name = f"{zone}/{change.node}" if zone else change.node
        place = f"{trace.source}:{change.row}" if change.row else trace.source
        events.append(TraceEvent(change.seconds, kind, name, zone, gpu, value, place))
    return in_order(events)


def changes_of_stream(stream: EventStream) -> Trace:
    """The machines of a stream, for code that asks only who is there. A failed node goes, and joins
    when it recovers."""
    changes = []
    slow: set[str] = set()
    for event in stream.events:
        if event.kind in ("preempt", "fail"):
            changes.append(NodeChange(event.t_s, "go", event.node))
        elif event.kind == "join":
            changes.append(NodeChange(event.t_s, "join", event.node))
        elif event.kind == "slow":
            slow.add(event.node)
        elif event.kind == "recover" and event.node in slow:
            slow.discard(event.node)
        elif event.kind == "recover":
            changes.append(NodeChange(event.t_s, "join", event.node))
    header = stream.header
    return Trace(
        header.source or header.trace,
        "events",
        sort_changes(changes),
        stream.seconds,
        header.step_s,
        header.t0,
        header.gaps,
        header.disorder,
        header.duplicates,
        header.rows,
        header.sha256,
    )
