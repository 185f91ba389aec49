"""Reads any file of a known kind as one stream of events.

A kind is found by the form of the file, never by its name. The text is decoded, unpacked and cut
into rows in `rows`; each kind has its reader.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256

from holdfast.core.json_parsing import parse_json
from holdfast.errors import DataError, nearest_of
from holdfast_lab.traces.counts import (
    LIST_VERBS,
    parse_dated_counts,
    parse_lists,
    parse_minutes,
    parse_named,
    parse_pools,
    parse_ticks,
    parse_time_points,
    parse_timed_counts,
)
from holdfast_lab.traces.events import (
    EventStream,
    TraceHeader,
    changes_of_stream,
    check_events,
    in_order,
    stream_of_changes,
)
from holdfast_lab.traces.failures import component_events, outage_events, parse_outages, stay_events
from holdfast_lab.traces.jitter import (
    PARQUET,
    is_step_results,
    operation_events,
    step_result_events,
)
from holdfast_lab.traces.levels import (
    link_events,
    mix_events,
    price_events,
    signal_events,
    transfer_price_events,
)
from holdfast_lab.traces.lives import advisor_events, is_advisor, parse_lifetimes
from holdfast_lab.traces.node_changes import DEFAULTS, ReadOptions, Trace
from holdfast_lab.traces.rows import as_date, as_number, date_place, first_rows, text_of
from holdfast_lab.traces.stream_file import is_stream, parse_stream

Reader = Callable[[str, str, ReadOptions], Trace]


def load_trace(
    text: str, source: str, *, seed: int = 0, options: ReadOptions | None = None
) -> Trace:
    """A trace of whichever kind the text is. Raises DataError for a kind that is not known here,
    and for a row that cannot be.

    Args:
        text: the file's content.
        source: the file's name, for messages.
        seed: for what the file leaves open; that of `options`, if those are given.
        options: what the file does not say.
    """
    if is_stream(text):
        return changes_of_stream(parse_stream(text, source))
    reader = churn_reader(text)
    if reader is None:
        raise DataError(
            "this is no trace of a known kind",
            where=source,
            remedy="give rows 'time_ms,add|remove,node', 'date, time, count' or 'time_ms,count', "
            "JSON with 'data' and 'metadata.gap_seconds', a table with 'lifetime_s', or one of "
            "outages",
        )
    return reader(text, source, options or ReadOptions(seed=seed))


def churn_reader(text: str) -> Reader | None:
    """The reader of machines that come and go for a text of this form."""
    head = text[:4000].lstrip()
    if head.startswith(("{", "[")):
        if head.startswith("{"):
            return parse_ticks if '"data"' in text else None
        line = head.split("\n", 1)[0]
        if line.startswith("[") and any(f'"{verb}"' in line for verb in LIST_VERBS):
            return parse_lists
        try:
            items = parse_json(text)
        except ValueError:
            return None
        is_table = isinstance(items, list) and items and isinstance(items[0], dict)
        keys = items[0].keys() if is_table else ()
        if "interval" in keys:
            return parse_minutes
        return parse_time_points if {"Time", "GPUs"} <= set(keys) else None
    first, data = first_rows(text)
    if "lifetime_s" in first:
        return parse_lifetimes
    if "Prob Started" in first:
        return parse_outages
    if "Timestamp" in first and any("_" in name for name in first):
        return parse_pools
    if len(data) >= 3 and data[1] in ("add", "remove"):
        return parse_named
    if len(data) in (2, 3) and as_date(" ".join(data[:-1])) and _is_whole(data[-1]):
        return parse_dated_counts
    if len(data) == 2 and as_number(data[0]) is not None and _is_whole(data[1]):
        return parse_timed_counts
    return None


def _is_whole(cell: str) -> bool:
    return cell.isascii() and cell.lstrip("-").isdigit()


# --- any file as a stream -------------------------------------------------------------------------
StreamReader = Callable[[str, str, ReadOptions], EventStream]

KINDS_IN_WORDS = (
    "rows 'time_ms,add|remove,node', 'date, time, count' or 'time_ms,count'; JSON with 'data' and "
    "'metadata.gap_seconds'; tables of lives, outages, stays, prices, carbon or links; see "
    "docs/studies/traces.md"
)


def read_stream(data: bytes, source: str, options: ReadOptions = DEFAULTS) -> EventStream:
    """A stream from the bytes of a file. Raises DataError for a kind that is not known, and for
    a row that cannot be, with file, line and remedy. source: the file's name, for messages."""
    if data.startswith(PARQUET):
        made = operation_events(data, source, options)
    else:
        text = text_of(data, source)
        if not text.strip():
            raise DataError(
                "the file is empty", where=f"{source}:1", remedy=f"give {KINDS_IN_WORDS}"
            )
        made = _reader_of(text, source)(text, source, options)
        if is_stream(text):
            return made
    check_events(made.events, (event.source or source for event in made.events))
    return EventStream(replace(made.header, sha256=sha256(data).hexdigest()), made.events)


def _reader_of(text: str, source: str) -> StreamReader:
    if is_stream(text):
        return lambda text, source, options: parse_stream(text, source)
    if text.lstrip().startswith(("{", "[")):
        for is_kind, reader in _JSON_KINDS:
            if is_kind(text):
                return reader
    else:
        first, data = first_rows(text)
        names = {name.lower() for name in first}
        for columns, reader in _TABLES:
            if {column.lower() for column in columns} <= names:
                return reader
        if churn_reader(text) is None and _is_signal(first, data):
            return signal_events
    if churn_reader(text) is not None:
        return read_churn
    header = {name.lower(): name for name in first_rows(text)[0]}
    for columns, _ in _TABLES:
        lacks = [column for column in columns if column.lower() not in header]
        if len(lacks) == 1 < len(columns):
            near = nearest_of(lacks[0], {*header.values()} - columns, 0.5)
            raise DataError(
                f"a table with {', '.join(sorted(columns - {lacks[0]}))} needs {lacks[0]!r}"
                + (f", and {near!r} has another name or unit" if near else ""),
                where=f"{source}:1",
                remedy=f"give a column {lacks[0]}, with values in its unit",
            )
    raise DataError(
        "this is no trace of a known kind", where=f"{source}:1", remedy=f"give {KINDS_IN_WORDS}"
    )


_JSON_KINDS: tuple[tuple[Callable[[str], bool], StreamReader], ...] = (
    (is_advisor, advisor_events),
    (is_step_results, step_result_events),
)
_TABLES: tuple[tuple[frozenset[str], StreamReader], ...] = (
    (frozenset({"Prob Started", "Prob Fixed"}), outage_events),
    (frozenset({"SN", "location", "insert", "remove"}), stay_events),
    (frozenset({"component", "count"}), component_events),
    (frozenset({"machine_type", "region", "usd_per_hour_spot"}), price_events),
    (frozenset({"avg_CI"}), mix_events),
    (frozenset({"src_region", "dst_region"}), link_events),
    (frozenset({"src", "dest", "cost"}), transfer_price_events),
    (frozenset({"src", "dst", "cost"}), transfer_price_events),
)
"""What columns a table must have to be of a kind, in capitals or not."""


def _is_signal(first: Sequence[str], data: Sequence[str]) -> bool:
    """Return True for a header, and rows of a time and numbers."""
    place = date_place(data)
    return (
        len(first) == len(data) >= 2
        and first != data
        and as_date(data[place]) is not None
        and all(i == place or not c or as_number(c) is not None for i, c in enumerate(data))
    )


def read_churn(text: str, source: str, options: ReadOptions) -> EventStream:
    """Machines that come and go."""
    reader = churn_reader(text)
    assert reader is not None
    trace = reader(text, source, options)
    rule: str = "given" if trace.kind in ("named nodes", "listed changes") else options.victims
    if rule != "given" and options.burst != "any":
        rule = f"{rule}, {options.burst}"
    notes = list(trace.notes)
    if trace.kind == "lifetimes":
        notes.append("lives were drawn from the table, for --nodes over --days")
    header = TraceHeader(
        trace=trace.kind,
        source=source,
        rows=trace.rows,
        t0=trace.started,
        zones=(options.place,) if options.place else (),
        victim_rule=rule,
        seed=options.seed,
        gaps=trace.unknown,
        seconds=trace.seconds,
        step_s=trace.step,
        disorder=trace.disorder,
        duplicates=trace.duplicates,
        notes=tuple(notes),
    )
    return EventStream(header, stream_of_changes(trace, zone=options.place, gpu=options.gpu))


_LEVELS = ("price", "carbon")


# --- several streams ----------------------------------------------------------------------------
def merge_streams(streams: Sequence[EventStream]) -> EventStream:
    """One stream of several that begin at the same time, such as those of several zones. Nodes of
    one name in two of them get the number of their stream."""
    if len(streams) == 1:
        return streams[0]
    seen: set[str] = set()
    events, notes = [], list[str]()
    for number, stream in enumerate(streams, start=1):
        names = {event.node for event in stream.events if event.node and "->" not in event.node}
        levels = {f"{e.kind} {e.gpu} {e.zone}" for e in stream.events if e.kind in _LEVELS}
        twice = bool(names & seen)
        if twice:
            notes.append(f"{len(names & seen)} names are in an earlier file: now {number}/NAME")
        if levels & seen:
            notes.append(f"{min(levels & seen)} is in two files: the last change counts")
        seen |= names | levels
        for event in stream.events:
            rename = twice and event.node and "->" not in event.node
            events.append(replace(event, node=f"{number}/{event.node}") if rename else event)
    headers = [stream.header for stream in streams]
    first = headers[0]
    begins = list(dict.fromkeys(each.t0 for each in headers if "-" in each.t0))
    if len(begins) > 1:
        notes.append(f"the files begin at {' and '.join(begins)}: each is put at 0")
    header = replace(
        first,
        source=", ".join(each.source for each in headers),
        sha256=", ".join(each.sha256 for each in headers),
        rows=sum(each.rows for each in headers),
        zones=tuple(dict.fromkeys(itertools.chain(*(each.zones for each in headers)))),
        gaps=tuple(sorted(itertools.chain(*(each.gaps for each in headers)))),
        seconds=max(stream.seconds for stream in streams),
        step_s=max(each.step_s for each in headers),
        disorder=sum(each.disorder for each in headers),
        duplicates=sum(each.duplicates for each in headers),
        notes=(*dict.fromkeys(itertools.chain(*(each.notes for each in headers))), *notes),
    )
    return EventStream(header, in_order(events))
