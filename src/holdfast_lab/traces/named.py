"""Files of changes: which nodes came and went, by name or by number. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

from holdfast.core.json_parsing import parse_json
from holdfast.errors import DataError
from holdfast_lab.traces.counts import json_count, take_victims, trace_from_counts
from holdfast_lab.traces.node_changes import DEFAULTS, NodeChange, ReadOptions, Trace, sort_changes
from holdfast_lab.traces.rows import (
    as_number,
    cells_of,
    digest,
    number,
    row_error,
    smallest_step,
    sort_rows,
    without_header,
)

LIST_VERBS = ("add", "remove", "no-op", "migration")
_LIST_ROW = 'write [time_ms, "add", {"nodes": ["a"]}], with a verb of add, remove, no-op, migration'
_MINUTE = 'write {"interval": [nodes, joined, removed], "duration": ms}'

Row = tuple[float, tuple[str, str], int]
"""Seconds, (verb, node), line."""


def parse_named(text: str, source: str, options: ReadOptions = DEFAULTS) -> Trace:
    """Rows `time_ms,add|remove,node`: each node by its name."""
    rows: list[Row] = []
    for line, cells in without_header(cells_of(text, source)):
        if len(cells) < 3 or cells[1] not in ("add", "remove") or not cells[2]:
            raise row_error(
                source, line, cells, "write 'time_ms,add,node' or 'time_ms,remove,node'"
            )
        rows.append((number(cells[0], source, line) / 1000, (cells[1], cells[2]), line))
    return _trace_from_rows(rows, source, "named nodes", text)


def parse_lists(text: str, source: str, options: ReadOptions = DEFAULTS) -> Trace:
    """One JSON list per line: `[time_ms, verb, {"nodes": [...]}]`. Verbs of layouts change no
    node. The last line has a duration: the trace ends when that is over."""
    rows: list[Row] = []
    end = 0.0
    for line, content in enumerate(text.splitlines(), start=1):
        if not content.strip():
            continue
        at, verb, given = _list_row(content, source, line)
        length = as_number(str(given.get("duration", 0))) or 0.0
        end = max(end, at + length / 1000)
        if verb in ("add", "remove"):
            rows += [(at, (verb, str(node)), line) for node in given.get("nodes", [])]
    if not rows:
        raise row_error(source, 1, [text[:60]], _LIST_ROW)
    return _trace_from_rows(rows, source, "listed changes", text, end)


def _list_row(content: str, source: str, line: int) -> tuple[float, str, dict[str, Any]]:
    try:
        at, verb, given = parse_json(content)
    except (ValueError, TypeError):
        raise row_error(source, line, [content], _LIST_ROW) from None
    nodes = given.get("nodes", []) if isinstance(given, dict) else None
    if verb not in LIST_VERBS or not isinstance(nodes, list):
        raise row_error(source, line, [content], _LIST_ROW)
    return number(str(at), source, line) / 1000, verb, given


def parse_minutes(text: str, source: str, options: ReadOptions = DEFAULTS) -> Trace:
    """A JSON list with `interval` = [nodes before, joined, removed] and `duration` per item."""
    changes: list[NodeChange] = []
    draw = random.Random(f"{options.seed}/minutes")
    there: list[str] = []
    born, at, steps = 0, 0.0, []
    for index, item in enumerate(_json_list(text)):
        place = f"{source}: item {index + 1}"
        try:
            before, joined, removed = item["interval"]
            length = number(str(item["duration"]), source, index + 1) / 1000
        except (KeyError, TypeError, ValueError):
            raise DataError("this is no interval", where=place, remedy=_MINUTE) from None
        counts = [json_count(n, source, f"item {index + 1}") for n in (before, joined, removed)]
        if (index and counts[0] != len(there)) or removed > len(there) + joined:
            raise DataError(
                f"{len(there)} nodes are there, and the interval counts {before} - {removed}",
                where=place,
                remedy="begin each interval with the nodes that the one before ends with",
            )
        names = take_victims(there, removed, options, draw)
        changes += [NodeChange(at, "go", name, index + 1) for name in names]
        new = joined if index else joined + before
        for _ in range(new):
            born += 1
            there.append(f"n{born}")
            changes.append(NodeChange(at, "join", there[-1], index + 1))
        at += length
        steps.append(length)
    return Trace(
        source,
        "intervals",
        sort_changes(changes),
        at,
        min(steps),
        "0 s",
        rows=len(steps),
        sha256=digest(text),
    )


def parse_time_points(text: str, source: str, options: ReadOptions = DEFAULTS) -> Trace:
    """A JSON list of `{"Time": seconds, "GPUs": n}`: a step function."""
    rows = []
    for index, item in enumerate(_json_list(text)):
        try:
            seconds = number(str(item["Time"]), source, index + 1)
        except (KeyError, TypeError):
            raise DataError(
                "this is no point in time",
                where=f"{source}: item {index + 1}",
                remedy='write {"Time": seconds, "GPUs": n}',
            ) from None
        rows.append((seconds, json_count(item.get("GPUs"), source, f"item {index + 1}"), index + 1))
    return trace_from_counts(rows, source, "points", text, options=options, regular=False)


def parse_pools(text: str, source: str, options: ReadOptions = DEFAULTS) -> Trace:
    """A table with `Timestamp` and a column of counts per pool; one pool is read.

    The pool is the one that `gpu` and `zone` of the options name; it may be the only one.
    """
    rows = cells_of(text, source)
    _, header = next(rows)
    at = header.index("Timestamp")
    pools = [name for place, name in enumerate(header) if place != at and name]
    wanted = "_".join(filter(None, (options.gpu, options.zone))) or (pools or [""])[0]
    if wanted not in pools or (len(pools) > 1 and not (options.gpu or options.zone)):
        raise DataError(
            f"there are {len(pools)} pools, and none is named",
            where=f"{source}:1",
            remedy=f"choose with --gpu and --zone one of: {', '.join(pools)}",
        )
    place = header.index(wanted)
    counts = []
    for line, cells in rows:
        if len(cells) <= max(at, place):
            raise row_error(source, line, cells, f"give all {len(header)} columns of the header")
        counts.append(
            (
                number(cells[at], source, line),
                json_count(_whole(cells[place]), source, f"line {line}"),
                line,
            )
        )
    return trace_from_counts(counts, source, "pools", text, options=options, regular=False)


def _whole(cell: str) -> float | int | None:
    """The number in a cell, as an int if it has no fraction; None if the cell has no number."""
    found = as_number(cell)
    return int(found) if found is not None and found.is_integer() else found


def _json_list(text: str) -> Sequence[Any]:
    found = parse_json(text)
    return found if isinstance(found, list) else []


def _trace_from_rows(
    rows: Iterable[Row], source: str, kind: str, text: str, end: float = 0.0
) -> Trace:
    given = list(rows)
    ordered, disorder, duplicates = sort_rows(given)
    origin = ordered[0][0]
    there: dict[str, float] = {}
    used: set[str] = set()
    changes = []
    momentary: set[tuple[str, float]] = set()
    for at, (verb, node), line in ordered:
        if (verb == "add") is (node in there) or (verb == "add" and node in used):
            problem = "joins twice" if verb == "add" else "goes without having joined"
            raise DataError(
                f"{node} {problem}",
                where=f"{source}:{line}",
                remedy="give every stay of a machine its own name, and one add before its remove",
            )
        if verb == "add":
            there[node] = at
        elif there.pop(node) == at:
            momentary.add((node, at - origin))
        used.add(node)
        changes.append(NodeChange(at - origin, "join" if verb == "add" else "go", node, line))
    kept = [c for c in changes if (c.node, c.seconds) not in momentary] if momentary else changes
    times = [at - origin for at, *_ in ordered]
    return Trace(
        source,
        kind,
        sort_changes(kept),
        max(times[-1], end - origin),
        smallest_step(times),
        f"{origin:g} s",
        disorder=disorder,
        duplicates=duplicates,
        rows=len(given),
        sha256=digest(text),
        momentary=len(momentary),
    )
