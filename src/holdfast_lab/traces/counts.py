"""Series of counts: how many machines there were. The nodes are named here.

A rise brings new names; a fall takes nodes by a rule. (In the one public trace with names the age
of the nodes that go is close to uniform. So the rule is a draw, if nothing else is asked for.)
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from statistics import median
from typing import Any

from holdfast.core.json_parsing import parse_json
from holdfast.errors import DataError
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
    as_date,
    cells_of,
    count,
    digest,
    number,
    row_error,
    smallest_step,
    sort_rows,
    without_header,
)


def parse_dated_counts(text: str, source: str, options: ReadOptions = DEFAULTS) -> Trace:
    """Rows `YYYY-MM-DD, HH:MM:SS, count`, of no known time zone. One cell may hold both."""
    rows = []
    for line, cells in without_header(cells_of(text, source)):
        seconds = as_date(" ".join(cells[:-1]))
        if len(cells) not in (2, 3) or seconds is None:
            raise row_error(source, line, cells, "write 'YYYY-MM-DD, HH:MM:SS, count'")
        rows.append((seconds, count(cells[-1], source, line), line))
    started = datetime.fromtimestamp(min(row[0] for row in rows), UTC).strftime("%F %T")
    return trace_from_counts(rows, source, "dated counts", text, options=options, started=started)


def parse_timed_counts(text: str, source: str, options: ReadOptions = DEFAULTS) -> Trace:
    """Rows `time_ms,count`; of several rows of one time the last is the state."""
    rows = []
    for line, cells in without_header(cells_of(text, source)):
        if len(cells) != 2:
            raise row_error(source, line, cells, "write 'time_ms,count'")
        at = number(cells[0], source, line) / 1000
        rows.append((at, count(cells[1], source, line), line))
    return trace_from_counts(rows, source, "timed counts", text, options=options, regular=False)


def parse_ticks(
    text: str, source: str, options: ReadOptions = DEFAULTS, *, gap_seconds: float | None = None
) -> Trace:
    """JSON with `data`, a count per tick, and `metadata.gap_seconds`, which `gap_seconds`
    overrides: nothing else in the file fixes the clock."""
    override = options.tick_seconds if gap_seconds is None else gap_seconds
    try:
        value = parse_json(text)
        data = value["data"]
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
    made = trace_from_counts(rows, source, "ticks", text, options=options)
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
    source: str,
    kind: str,
    text: str,
    *,
    options: ReadOptions = DEFAULTS,
    started: str = "",
    regular: bool = True,
) -> Trace:
    """Turn rows (seconds, count, line) into nodes. regular: rows are samples; otherwise changes,
    and gaps mean nothing."""
    if not rows:
        raise DataError(
            "no row has a number of nodes", where=source, remedy="add a row for each change"
        )
    ordered, disorder, duplicates = sort_rows(rows)
    origin = ordered[0][0]
    # Of several rows of one time the last counts, even where it repeats the first.
    states = {at - origin: (n, line) for at, n, line in sorted(rows, key=lambda row: row[0])}
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
        started or f"{origin:g} s",
        unknown,
        disorder,
        duplicates,
        len(rows),
        digest(text),
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
