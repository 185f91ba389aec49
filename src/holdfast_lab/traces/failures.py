"""Tables of failures as events: outages, stays of devices, and counts by component. Pure."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from holdfast.errors import DataError
from holdfast_lab.traces.columns import (
    COMPONENTS,
    OUTAGES,
    STAYS,
    Findings,
    optional_number,
    table_of,
)
from holdfast_lab.traces.events import EventStream, TraceEvent, TraceHeader, in_order
from holdfast_lab.traces.node_changes import DEFAULTS, NodeChange, ReadOptions, Trace, sort_changes
from holdfast_lab.traces.rows import count, digest, row_error, sort_rows

_KEYS = ("System", "nodenumz", "Prob Started", "Prob Fixed")
CAUSES = ("Facilities", "Hardware", "Human Error", "Network", "Undetermined", "Software")


@dataclass(frozen=True)
class Outage:
    """A node did not work from `start` to `stop` (seconds of the wall clock)."""

    start: float
    stop: float
    node: str
    cause: str
    line: int


@dataclass(frozen=True)
class OutageTable:
    """The outages of one system, sorted. systems: rows of each system of the file."""

    system: str
    outages: tuple[Outage, ...]
    nodes: tuple[str, ...]
    systems: dict[str, int]
    disorder: int
    duplicates: int
    notes: tuple[str, ...]

    @property
    def origin(self) -> float:
        return self.outages[0].start

    @property
    def started(self) -> str:
        return datetime.fromtimestamp(self.origin, UTC).strftime("%F %T")


def read_outages(text: str, source: str, system: str | None = None) -> OutageTable:
    """Read one system of the table; the one with most rows if no system is named."""
    findings = Findings(OUTAGES, source)
    rows = list(table_of(text, findings, _KEYS))
    systems: dict[str, int] = {}
    for _, row in rows:
        systems[row["System"]] = systems.get(row["System"], 0) + 1
    if system is None and systems:
        system = max(systems, key=lambda name: systems[name])
    if system is None or system not in systems:
        raise DataError(
            f"there is no outage of system {system!r}",
            where=source,
            remedy=f"name one of {', '.join(sorted(systems)) or 'those in a table with rows'}",
        )
    spans, nodes, many = [], dict[str, None](), 0
    for line, row in rows:
        start, stop = _span(row, findings, "Prob Started", "Prob Fixed", line)
        if row["System"] != system:
            continue
        size = optional_number(row.get("nodes", ""), "nodes", source, line) or 0
        many = max(many, count(f"{size:.0f}", source, line))
        nodes[row["nodenumz"]] = None
        down = optional_number(row.get("Down Time", ""), "Down Time", source, line)
        if down is not None and down * 60 != stop - start:
            findings.count("rows have a Down Time that is not Prob Fixed - Prob Started", line)
        cause = next((f"{key}: {row[key]}" for key in CAUSES if row.get(key)), "")
        spans.append((start, (row["nodenumz"], stop, cause), line))
    ordered, disorder, duplicates = sort_rows(spans)
    outages = tuple(Outage(at, back, node, cause, n) for at, (node, back, cause), n in ordered)
    begun = {each.line for each in merge_outages(outages)}
    for each in outages:
        if each.line not in begun:
            findings.count("outages begin during another of a node", each.line)
    # Nodes without an outage are named by their number, as those with one.
    nodes |= dict.fromkeys(map(str, range(many)))
    return OutageTable(
        system, outages, tuple(sorted(nodes)), systems, disorder, duplicates, findings.notes()
    )


def _span(
    row: dict[str, str], findings: Findings, begin: str, end: str, line: int
) -> tuple[float, float]:
    """(start, stop) of an interval. Raises DataError if it ends before it begins; counts one of no
    length."""
    start, stop = (findings.date(row[key], line) for key in (begin, end))
    if start is None or stop is None or start > stop:
        wrong = next((row[k] for k, t in ((begin, start), (end, stop)) if t is None), None)
        why = f"{wrong!r} is no time" if wrong is not None else f"{end} is before {begin}"
        raise DataError(
            f"{why}: {begin} {row[begin]}, {end} {row[end]}",
            where=f"{findings.source}:{line}",
            remedy="write month/day/year hour:minute or YYYY-MM-DD HH:MM:SS, the begin first",
        )
    if start == stop:
        findings.count(f"rows have {begin} and {end} at the same time", line)
    return start, stop


def merge_outages(outages: Sequence[Outage]) -> list[Outage]:
    """Sorted outages, of which no two of a node overlap: a second one only prolongs the first."""
    merged: list[Outage] = []
    last: dict[str, int] = {}
    for each in outages:
        place = last.get(each.node)
        if place is not None and each.start <= merged[place].stop:
            old = merged[place]
            stop = max(old.stop, each.stop)
            merged[place] = Outage(old.start, stop, old.node, old.cause, old.line)
        else:
            last[each.node] = len(merged)
            merged.append(each)
    return merged


def parse_outages(
    text: str, source: str, options: ReadOptions = DEFAULTS, *, system: str | None = None
) -> Trace:
    """A node goes when its outage starts and is back when it is fixed. Nodes without an outage
    are left out."""
    table = read_outages(text, source, options.system if system is None else system)
    origin, end = table.origin, table.outages[-1].start - table.origin
    names = sorted({each.node for each in table.outages})
    changes = [NodeChange(0.0, "join", name) for name in names]
    for each in merge_outages(table.outages):
        changes.append(NodeChange(each.start - origin, "go", each.node, each.line))
        if each.stop - origin <= end:
            changes.append(NodeChange(each.stop - origin, "join", each.node, each.line))
    return Trace(
        f"{source} (system {table.system})",
        "outages",
        sort_changes(changes),
        end,
        60.0,
        "",
        (),
        table.disorder,
        table.duplicates,
        table.systems[table.system],
        digest(text),
        notes=table.notes,
    )


# --- events ---------------------------------------------------------------------------------------
def outage_events(text: str, source: str, options: ReadOptions) -> EventStream:
    """One system of a table of outages: all its nodes join at the start, fail and recover."""
    table = read_outages(text, source, options.system)
    zone = options.place or f"system-{table.system}"
    names = {node: f"{zone}/{node}" for node in table.nodes}
    events = [TraceEvent(0.0, "join", name, zone, options.gpu, 1.0) for name in names.values()]
    origin = table.origin - 60.0  # all nodes work before the first of them fails
    end = table.outages[-1].start - origin
    merged = merge_outages(table.outages)
    for each in merged:
        at, place = each.start - origin, f"{source}:{each.line}"
        base = (names[each.node], zone, options.gpu)
        outage = each.stop - each.start
        cause = {"cause": each.cause} if each.cause else {}
        events.append(TraceEvent(at, "fail", *base, outage, place, cause))
        if at + outage <= end:
            events.append(TraceEvent(at + outage, "recover", *base, 1.0, place))
    rest = len(table.systems) - 1
    notes = [f"system {table.system}; {rest} more systems are left out"] if rest else []
    header = TraceHeader(
        "outages",
        source,
        rows=sum(table.systems.values()),
        t0=table.started,
        zones=(zone,),
        victim_rule="given",
        seed=options.seed,
        seconds=end,
        step_s=60.0,
        disorder=table.disorder,
        duplicates=table.duplicates,
        notes=(*notes, *table.notes),
        extra={"systems": table.systems},
    )
    return EventStream(header, in_order(events))


_STAY = ("SN", "location", "insert", "remove", "event")


def stay_events(text: str, source: str, options: ReadOptions) -> EventStream:
    """A table with one stay of one device at one place a row. A stay joins, and ends by an event
    (fail), because the device was moved (preempt), or with the file (no event)."""
    rows, findings = list[tuple[float, float, dict[str, str], int]](), Findings(STAYS, source)
    last = 0.0
    for line, row in table_of(text, findings, _STAY):
        if row["insert"]:
            start, stop = _span(row, findings, "insert", "remove", line)
        else:
            _, stop = _span(
                row | {"insert": row["remove"]}, Findings(STAYS, source), "insert", "remove", line
            )
            start = stop - 1.0
            findings.count("stays without a start got one of 1 s", line)
        last = max(last, stop)
        rows.append((start, stop, row, line))
    if not rows:
        raise row_error(source, 1, [], "give at least one stay")
    origin = min(min(row[0], row[1] - 1.0) for row in rows)
    zone, gpu, stays, duplicates = options.place, options.gpu, Counter[str](), 0
    events: list[TraceEvent] = []
    causes = Counter[str]()
    seen: set[tuple[str, ...]] = set()
    for start, stop, row, line in rows:
        node = f"{row['SN']}@{row['location']}"
        cause = row["event"]
        causes[cause] += bool(cause)
        exact = tuple(row.values())
        if exact in seen:
            duplicates += 1
            continue
        seen.add(exact)
        stays[node] += 1
        base = (f"{node}#{stays[node]}", zone, gpu)
        place = f"{source}:{line}"
        start = min(start, stop - 1.0)
        events.append(TraceEvent(start - origin, "join", *base, 1.0, place))
        if cause:
            extra = {"cause": cause}
            events.append(TraceEvent(stop - origin, "fail", *base, 0.0, place, extra))
        elif stop < last:
            events.append(TraceEvent(stop - origin, "preempt", *base, 0.0, place))
    words = ", ".join(f"{name} {many:,}" for name, many in causes.items() if name)
    notes = [f"events: {words}"] if words else []
    header = TraceHeader(
        "stays",
        source,
        rows=len(rows),
        t0=datetime.fromtimestamp(origin, UTC).strftime("%F %T"),
        zones=(zone,) if zone else (),
        victim_rule="given",
        seed=options.seed,
        seconds=last - origin,
        step_s=1.0,
        duplicates=duplicates,
        notes=(*notes, *findings.notes()),
        extra={"causes": {name: many for name, many in causes.items() if name}},
    )
    return EventStream(header, in_order(events))


def component_events(text: str, source: str, options: ReadOptions) -> EventStream:
    """A table of how often each component failed. Their times are not in it: they are drawn,
    each alike over `days` (54) and `nodes` (2,048)."""
    days = 54.0 if options.days is None else options.days
    names = [f"n{index}" for index in range(2048 if options.nodes is None else options.nodes)]
    zone, gpu = options.place, options.gpu
    draw, end = random.Random(f"{options.seed}/components"), days * 86400
    failures, rows, total, findings = [], 0, 0, Findings(COMPONENTS, source)
    for line, row in table_of(text, findings, ("component", "count")):
        rows += 1
        for _ in range(count(row["count"], source, line)):
            total += 1
            cause = f"{row.get('category', '')}: {row['component']}".removeprefix(": ")
            failures.append((draw.random() * end, draw.choice(names), cause, line))
    events = [TraceEvent(0.0, "join", name, zone, gpu, 1.0) for name in names]
    back: dict[str, float] = {}
    for at, name, cause, line in sorted(failures):
        if at <= back.get(name, -1.0):
            at = back[name] + 1.0  # a node that is out fails again after it is back
            findings.count("failures of a node that is out come after its return", line)
        place, back[name] = f"{source}:{line}", at + options.outage_s
        events.append(
            TraceEvent(at, "fail", name, zone, gpu, options.outage_s, place, {"cause": cause})
        )
        events.append(TraceEvent(back[name], "recover", name, zone, gpu, 1.0, place))
    notes = (
        f"{total} failures at times that were drawn, over {days:g} days and {len(names)} nodes",
        f"an outage of {options.outage_s:g} s is assumed; real failures cluster more",
    )
    header = TraceHeader(
        "failures by component",
        source,
        rows=rows,
        zones=(zone,) if zone else (),
        victim_rule="drawn",
        seed=options.seed,
        seconds=max(end, *back.values(), 0.0),
        notes=(*notes, *findings.notes()),
    )
    return EventStream(header, in_order(events))
