"""Series of counts: how many machines there were. The nodes are named here.

A rise brings new names; a fall takes nodes by a rule. (In the one public trace with names the age
of the nodes that go is close to uniform. So the rule is a draw, if nothing else is asked for.)
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from statistics import median
from typing import Any

from holdfast.core.json_parsing import parse_json
from holdfast.errors import DataError
from holdfast_lab.traces.columns import (
    INTERVALS,
    LISTED,
    NAMED,
    POINTS,
    TICKS,
    TICKS_METADATA,
    Findings,
    optional_number,
    refuse_other_clock,
    refuse_other_quantity,
    seconds_of_unit,
)
from holdfast_lab.traces.node_changes import (
    DEFAULTS,
    UNKNOWN_GAP_STEPS,
    NodeChange,
    ReadOptions,
    Trace,
    sort_changes,
)
from holdfast_lab.traces.rows import (
    MOST_NODES,
    as_number,
    cells_of,
    count,
    digest,
    headed,
    number,
    row_error,
    smallest_step,
    sort_rows,
)


def parse_dated_counts(text: str, source: str, options: ReadOptions = DEFAULTS) -> Trace:
    """Rows `YYYY-MM-DD, HH:MM:SS, count`, of no known time zone. One cell may hold both."""
    rows, findings = [], Findings(None, source)
    header, found = headed(cells_of(text, source))
    if header:
        refuse_other_quantity(header[-1], source, is_count=True)
    for line, cells in found:
        seconds = findings.date(" ".join(cells[:-1]), line)
        if len(cells) not in (2, 3) or seconds is None:
            raise row_error(source, line, cells, "write 'YYYY-MM-DD, HH:MM:SS, count'")
        rows.append((seconds, count(cells[-1], source, line), line))
    started = datetime.fromtimestamp(min(row[0] for row in rows), UTC).strftime("%F %T")
    made = trace_from_counts(rows, findings, "dated counts", text, options=options)
    return replace(made, started=started)


def parse_timed_counts(text: str, source: str, options: ReadOptions = DEFAULTS) -> Trace:
    """Rows `time_ms,count`; of several rows of one time the last is the state. A header may name
    another unit of the time."""
    rows, findings = [], Findings(None, source)
    header, found = headed(cells_of(text, source))
    if header:
        refuse_other_quantity(header[-1], source, is_count=True)
    unit = seconds_of_unit(header[0]) if header else None
    for line, cells in found:
        if len(cells) != 2:
            raise row_error(source, line, cells, "write 'time_ms,count'")
        at = number(cells[0], source, line) * (unit or 1e-3)
        rows.append((at, count(cells[1], source, line), line))
    _check_clock(rows, findings, unit, is_stated=unit is not None)
    return trace_from_counts(rows, findings, "timed counts", text, options=options, regular=False)


def _check_clock(
    rows: Sequence[tuple[float, Any, int]],
    findings: Findings,
    unit: float | None,
    *,
    is_stated: bool,
) -> None:
    """Refuse times of another clock; count those without a unit that make a short trace."""
    if rows:
        first, last = min(rows), max(rows)
        refuse_other_clock(first[0], findings.source, first[-1], is_stated)
        if unit is None and 0 < last[0] - first[0] < 60:
            what = "times without a unit are read as milliseconds: the trace is below a minute"
            findings.count(what, first[-1], len(rows))


def parse_ticks(
    text: str, source: str, options: ReadOptions = DEFAULTS, *, gap_seconds: float | None = None
) -> Trace:
    """JSON with `data`, a count per tick, and `metadata.gap_seconds`, which `gap_seconds`
    overrides: nothing else in the file fixes the clock."""
    override = options.tick_seconds if gap_seconds is None else gap_seconds
    findings = Findings(TICKS, source)
    try:
        value = parse_json(text)
        data = value["data"]
        findings.take(value, source)
        findings.take(value.get("metadata", {}), f"{source}: metadata", TICKS_METADATA)
        gap = float(value["metadata"]["gap_seconds"] if override is None else override)
    except (ValueError, KeyError, TypeError):
        raise DataError(
            "this is not JSON with 'data' and 'metadata.gap_seconds'",
            where=source,
            remedy='write {"metadata": {"gap_seconds": 300}, "data": [4, 4, 3]}',
        ) from None
    if not 0 < gap < float("inf") or not isinstance(data, list) or not data:
        raise DataError(
            f"gap_seconds is {gap:g}, data has {len(data) if isinstance(data, list) else 0} ticks",
            where=source,
            remedy="give a positive gap_seconds and at least one tick",
        )
    rows = [(i * gap, json_count(n, source, f"data[{i}]"), i + 1) for i, n in enumerate(data)]
    made = trace_from_counts(rows, findings, "ticks", text, options=options)
    return replace(made, seconds=len(data) * gap, step=gap)


def json_count(value: Any, source: str, place: str) -> int:
    """A number of nodes in a JSON file."""
    is_flag = isinstance(value, bool)
    if is_flag or not isinstance(value, int) or not 0 <= value <= MOST_NODES:
        raise DataError(
            f"{value!r} is no number of nodes",
            where=f"{source}: {place}",
            remedy=f"write a whole number, 0 to {MOST_NODES:,}",
        )
    return value


def trace_from_counts(
    rows: Sequence[tuple[float, int, int]],
    findings: Findings,
    kind: str,
    text: str,
    *,
    options: ReadOptions = DEFAULTS,
    regular: bool = True,
) -> Trace:
    """Turn rows (seconds, count, line) into nodes. regular: rows are samples; otherwise changes,
    and gaps mean nothing."""
    source = findings.source
    if not rows:
        raise DataError(
            "no row has a number of nodes", where=source, remedy="add a row for each change"
        )
    ordered, disorder, duplicates = sort_rows(rows)
    origin = ordered[0][0]
    # Of several rows of one time the last counts, even where it repeats the first.
    states = {at - origin: (n, line) for at, n, line in sorted(rows, key=lambda row: row[0])}
    if replaced := len(ordered) - len(states):
        findings.count("counts of a time that a later row replaces", ordered[0][2], replaced)
    draw = random.Random(f"{options.seed}/{kind}")
    there: list[str] = []
    changes: list[NodeChange] = []
    born = 0
    for at, (wanted, line) in states.items():
        for name in take_victims(there, len(there) - wanted, options, draw):
            changes.append(NodeChange(at, "go", name, line))
        for _ in range(wanted - len(there)):
            born += 1
            there.append(f"n{born}")
            changes.append(NodeChange(at, "join", there[-1], line))
    times = list(states)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    step = (median(gaps) if regular else smallest_step(times)) if gaps else 0.0
    unknown = tuple(
        (a, b) for a, b in itertools.pairwise(times) if regular and b - a > UNKNOWN_GAP_STEPS * step
    )
    return Trace(
        source,
        kind,
        sort_changes(changes),
        times[-1],
        step,
        f"{origin:g} s",
        unknown,
        disorder,
        duplicates,
        len(rows),
        digest(text),
        findings.notes(),
    )


def take_victims(
    there: list[str], number_of: int, options: ReadOptions, draw: random.Random
) -> list[str]:
    """Remove nodes from `there`, which is in the order of ranks and of age; return their names."""
    if number_of <= 0:
        return []
    if options.victims == "lifo":
        places = list(range(len(there) - 1, len(there) - 1 - number_of, -1))
    elif options.victims == "fifo":
        places = list(range(number_of))
    elif options.burst == "neighbours":
        first = draw.randrange(len(there) - number_of + 1)
        places = list(range(first, first + number_of))
    elif options.burst == "spread":
        first = draw.randrange(len(there))
        places = [(first + k * len(there) // number_of) % len(there) for k in range(number_of)]
    else:
        return [there.pop(draw.randrange(len(there))) for _ in range(number_of)]
    names = [there[place] for place in places]
    going = set(names)
    there[:] = [name for name in there if name not in going]
    return names


# --- changes by name or number --------------------------------------------------------------------
LIST_VERBS = ("add", "remove", "no-op", "migration")
_LIST_ROW = 'write [time_ms, "add", {"nodes": ["a"]}], with a verb of add, remove, no-op, migration'
_MINUTE = 'write {"interval": [nodes, joined, removed], "duration": ms}'

Row = tuple[float, tuple[str, str], int]
"""Seconds, (verb, node), line."""


def parse_named(text: str, source: str, options: ReadOptions = DEFAULTS) -> Trace:
    """Rows `time_ms,add|remove,node`: each node by its name."""
    rows, findings = list[Row](), Findings(NAMED, source)
    header, found = headed(cells_of(text, source))
    unit = seconds_of_unit(header[0]) if header else None
    for line, cells in found:
        if len(cells) < 3 or cells[1] not in ("add", "remove") or not cells[2]:
            raise row_error(
                source, line, cells, "write 'time_ms,add,node' or 'time_ms,remove,node'"
            )
        if any(cells[3:]):
            names = [*header[3:], *(f"number {n}" for n in range(len(header), len(cells)) if n > 2)]
            others = dict(zip(names, cells[3:], strict=False))
            findings.take(others, f"{source}:{line}")
        at = number(cells[0], source, line) * (unit or 1e-3)
        rows.append((at, (cells[1], cells[2]), line))
    _check_clock(rows, findings, unit, is_stated=unit is not None)
    return _trace_from_rows(rows, findings, "named nodes", text)


def parse_lists(text: str, source: str, options: ReadOptions = DEFAULTS) -> Trace:
    """One JSON list per line: `[time_ms, verb, {"nodes": [...]}]`. Verbs of layouts change no
    node. The last line has a duration: the trace ends when that is over."""
    rows, findings = list[Row](), Findings(LISTED, source)
    end = 0.0
    for line, content in enumerate(text.splitlines(), start=1):
        if not content.strip():
            continue
        at, verb, given = _list_row(content, source, line)
        length = optional_number(str(given.get("duration", "")), "duration", source, line) or 0.0
        findings.take(given, f"{source}:{line}")
        end = max(end, at + length / 1000)
        if verb in ("add", "remove"):
            rows += [(at, (verb, str(node)), line) for node in given.get("nodes", [])]
    if not rows:
        raise row_error(source, 1, [text[:60]], _LIST_ROW)
    _check_clock(rows, findings, 1e-3, is_stated=False)
    return _trace_from_rows(rows, findings, "listed changes", text, end)


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
    changes, findings = list[NodeChange](), Findings(INTERVALS, source)
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
        findings.take(item, place)
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
    if max(steps) < 1.0:
        raise DataError(
            f"no interval is longer than {max(steps) * 1000:g} ms",
            where=f"{source}: duration",
            remedy=f"write milliseconds: {_MINUTE}",
        )
    return Trace(
        source,
        "intervals",
        sort_changes(changes),
        at,
        min(steps),
        "0 s",
        rows=len(steps),
        sha256=digest(text),
        notes=findings.notes(),
    )


def parse_time_points(text: str, source: str, options: ReadOptions = DEFAULTS) -> Trace:
    """A JSON list of `{"Time": seconds, "GPUs": n}`: a step function."""
    rows, findings = [], Findings(POINTS, source)
    for index, item in enumerate(_json_list(text)):
        try:
            findings.take(item, f"{source}: item {index + 1}")
            seconds = number(str(item["Time"]), source, index + 1)
        except (KeyError, TypeError, AttributeError):
            raise DataError(
                "this is no point in time",
                where=f"{source}: item {index + 1}",
                remedy='write {"Time": seconds, "GPUs": n}',
            ) from None
        rows.append((seconds, json_count(item.get("GPUs"), source, f"item {index + 1}"), index + 1))
    _check_clock(rows, findings, 1.0, is_stated=True)
    return trace_from_counts(rows, findings, "points", text, options=options, regular=False)


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
    counts, findings = [], Findings(None, source)
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
    _check_clock(counts, findings, 1.0, is_stated=True)
    return trace_from_counts(counts, findings, "pools", text, options=options, regular=False)


def _whole(cell: str) -> float | int | None:
    """The number in a cell, as an int if it has no fraction; None if the cell has no number."""
    found = as_number(cell)
    return int(found) if found is not None and found.is_integer() else found


def _json_list(text: str) -> Sequence[Any]:
    found = parse_json(text)
    return found if isinstance(found, list) else []


def _trace_from_rows(
    rows: Iterable[Row], findings: Findings, kind: str, text: str, end: float = 0.0
) -> Trace:
    source = findings.source
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
            findings.count("stays ended as they began: left out", line)
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
        notes=findings.notes(),
    )
