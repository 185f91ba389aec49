"""Reads a trace for prediction: as `read_stream`, but a table of lives with dates as what happened.

`read_stream` draws a trace from such a table, as a replay wants machines that are replaced. A
predictor must be judged on the lives themselves, in the order in which they were lived. Pure.
"""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256

from holdfast_lab.traces.columns import LIVED, Findings, table_of
from holdfast_lab.traces.events import EventStream, TraceEvent, TraceHeader, in_order
from holdfast_lab.traces.node_changes import DEFAULTS, ReadOptions
from holdfast_lab.traces.reading import read_stream
from holdfast_lab.traces.rows import first_rows, number, text_of

_COLUMNS = ("lifetime_s", "other_ops", "insert_end_time")


def read_history(data: bytes, source: str, options: ReadOptions = DEFAULTS) -> EventStream:
    """The events of a file for a predictor. Raises DataError as `read_stream`."""
    if not data.lstrip().startswith((b"{", b"[")) and b"lifetime_s" in data[:4000]:
        text = text_of(data, source)
        if set(_COLUMNS) <= set(first_rows(text)[0]):
            made = lived_stays(text, source, options)
            header = replace(made.header, sha256=sha256(data).hexdigest())
            return EventStream(header, made.events)
    made = read_stream(data, source, options)
    if made.header.sha256:
        return made
    return EventStream(replace(made.header, sha256=sha256(data).hexdigest()), made.events)


def lived_stays(text: str, source: str, options: ReadOptions) -> EventStream:
    """Each machine of a table of lives, from its start (`insert_end_time`) to its end. It was taken
    if `other_ops` names a preemption; otherwise its owner stopped it (`stopped` in the event), and
    its life is censored. Rows without a start are left out."""
    rows = []
    skipped, findings = 0, Findings(LIVED, source)
    for line, row in table_of(text, findings, ("lifetime_s", "other_ops")):
        life = number(row["lifetime_s"], source, line)
        try:
            start = findings.date(row["insert_end_time"], line)
        except OverflowError:
            start = None
        if start is None:
            skipped += 1
            continue
        taken = any(op.endswith("preempted") for op in row["other_ops"].split(";"))
        rows.append((start, life, taken, options.zone or row.get("zone", ""), line))
    origin = min((row[0] for row in rows), default=0.0)
    end = max((row[0] + row[1] for row in rows), default=origin)
    events = list[TraceEvent]()
    for start, life, taken, zone, line in rows:
        base = (f"vm{line}", zone, options.gpu)
        place, at = f"{source}:{line}", start - origin
        events.append(TraceEvent(at, "join", *base, 1.0, place))
        extra = {} if taken else {"stopped": True}
        events.append(TraceEvent(at + max(1.0, life), "preempt", *base, 0.0, place, extra))
    header = TraceHeader(
        "lives as they were lived",
        source,
        rows=len(rows) + skipped,
        zones=tuple(dict.fromkeys(row[3] for row in rows if row[3])),
        victim_rule="given",
        seconds=max(end - origin, *(event.t_s for event in events), 0.0),
        step_s=1.0,
        notes=(
            *((f"{skipped} rows without a start are left out",) if skipped else ()),
            *findings.notes(),
        ),
    )
    return EventStream(header, in_order(events))


def label_zone(stream: EventStream, zone: str) -> EventStream:
    """The same with a zone for its nodes, if the trace names none."""
    if any(event.zone for event in stream.events):
        return stream
    events = tuple(replace(event, zone=zone) for event in stream.events)
    return EventStream(replace(stream.header, zones=(zone,)), events)
