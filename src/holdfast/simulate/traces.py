"""Traces: machines that come and go, read from the kinds of files in which people publish them.

A loader knows a kind of file, never a name. It takes the text, as nothing here reads a disk, and
gives a Trace: changes sorted by time, in seconds from the start. What all loaders keep to:

- Times are sorted first; how many rows were out of order, and how many were exact duplicates and
  dropped, is in the trace.
- What goes in one tick goes at one time: a burst stays a burst.
- A node that is there at the end has not left: the end of a file is no failure.
- A gap of more than ten usual steps is unknown, and named; the count before it is held.
- Counts have no names: the nodes that go are drawn at random, from a seed. (In the one public
  trace with names the age of the nodes that go is close to uniform.)
- Keys that are not known are passed over; a row that cannot be is refused with file and line.
"""

from __future__ import annotations

import csv
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import sha256
from statistics import median
from typing import Any, Literal

from holdfast.core.json_parsing import parse_json
from holdfast.errors import DataError

UNKNOWN_GAP_STEPS = 10
"""A gap is unknown beyond this many usual steps between samples."""


@dataclass(frozen=True, order=True)
class NodeChange:
    """A node goes or comes at `seconds`. At one instant, departures come first."""

    seconds: float
    kind: Literal["go", "join"]
    node: str


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

    @property
    def unknown_share(self) -> float:
        return sum(b - a for a, b in self.unknown) / self.seconds if self.seconds else 0.0

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


def load_trace(text: str, source: str, *, seed: int = 0) -> Trace:
    """A trace of whichever kind the text is. Raises DataError for a kind that is not known here,
    and for a row that cannot be. source: the file's name, for messages. seed: see
    `trace_from_counts`."""
    for sniff, loader in _KINDS:
        if sniff(text):
            return loader(text, source, seed)
    raise DataError(
        "this is no trace of a known kind",
        where=source,
        remedy="give rows 'time_ms,add|remove,node', 'date, time, count' or 'time_ms,count', JSON "
        "with 'data' and 'metadata.gap_seconds', a table with 'lifetime_s', or one of outages",
    )


def parse_named(text: str, source: str, seed: int = 0) -> Trace:
    """Rows `time_ms,add|remove,node`: each node by its name."""
    rows = []
    for line, cells in _cells(text):
        if len(cells) != 3 or cells[1] not in ("add", "remove"):
            raise _row_error(
                source, line, cells, "write 'time_ms,add,node' or 'time_ms,remove,node'"
            )
        rows.append((_number(cells[0], source, line) / 1000, (cells[1], cells[2]), line))
    ordered, disorder, duplicates = _sort_rows(rows)
    origin = ordered[0][0]
    there: set[str] = set()
    used: set[str] = set()
    changes = []
    for at, (verb, node), line in ordered:
        if (verb == "add") is (node in there) or (verb == "add" and node in used):
            problem = "joins twice" if verb == "add" else "goes without having joined"
            raise DataError(
                f"{node} {problem}",
                where=f"{source}:{line}",
                remedy="give every stay of a machine its own name, and one add before its remove",
            )
        (there.add if verb == "add" else there.discard)(node)
        used.add(node)
        changes.append(NodeChange(at - origin, "join" if verb == "add" else "go", node))
    times = [at - origin for at, *_ in ordered]
    return Trace(
        source,
        "named nodes",
        tuple(sorted(changes)),
        times[-1],
        _smallest_step(times),
        f"{origin:g} s",
        (),
        disorder,
        duplicates,
        len(rows),
        _digest(text),
    )


def parse_dated_counts(text: str, source: str, seed: int = 0) -> Trace:
    """Rows `YYYY-MM-DD, HH:MM:SS, count`, of no known time zone."""
    rows = []
    for line, cells in _cells(text):
        if len(cells) != 3:
            raise _row_error(source, line, cells, "write 'YYYY-MM-DD, HH:MM:SS, count'")
        try:
            when = datetime.strptime(f"{cells[0]} {cells[1]}", "%Y-%m-%d %H:%M:%S")
        except ValueError:
            raise _row_error(source, line, cells, "write 'YYYY-MM-DD, HH:MM:SS, count'") from None
        seconds = when.replace(tzinfo=UTC).timestamp()
        rows.append((seconds, _count(cells[2], source, line), line))
    started = " ".join(next(_cells(text))[1][:2])
    return trace_from_counts(rows, source, "dated counts", text, seed=seed, started=started)


def parse_timed_counts(text: str, source: str, seed: int = 0) -> Trace:
    """Rows `time_ms,count`; of several rows of one time the last is the state."""
    rows = []
    for line, cells in _cells(text):
        if len(cells) != 2:
            raise _row_error(source, line, cells, "write 'time_ms,count'")
        at = _number(cells[0], source, line) / 1000
        rows.append((at, _count(cells[1], source, line), line))
    return trace_from_counts(rows, source, "timed counts", text, seed=seed, regular=False)


def parse_ticks(text: str, source: str, seed: int = 0, gap_seconds: float | None = None) -> Trace:
    """JSON with `data`, a count per tick, and `metadata.gap_seconds`, which `gap_seconds`
    overrides: nothing else in the file fixes the clock."""
    try:
        value = parse_json(text)
        data = value["data"]
        gap = float(value["metadata"]["gap_seconds"] if gap_seconds is None else gap_seconds)
    except (ValueError, KeyError, TypeError):
        raise DataError(
            "this is not JSON with 'data' and 'metadata.gap_seconds'",
            where=source,
            remedy='write {"metadata": {"gap_seconds": 300}, "data": [4, 4, 3]}',
        ) from None
    if not gap > 0 or not isinstance(data, list) or not data:
        raise DataError(
            f"gap_seconds is {gap:g}, data has {len(data)} ticks",
            where=source,
            remedy="give a positive gap_seconds and at least one tick",
        )
    rows = []
    for tick, count in enumerate(data):
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise DataError(
                f"{count!r} is no number of nodes",
                where=f"{source}: data[{tick}]",
                remedy="write a whole number, 0 or more",
            )
        rows.append((tick * gap, count, tick))
    made = trace_from_counts(rows, source, "ticks", text, seed=seed)
    return replace(made, seconds=len(data) * gap, step=gap)


def trace_from_counts(
    rows: Sequence[tuple[float, int, int]],
    source: str,
    kind: str,
    text: str,
    *,
    seed: int = 0,
    started: str = "",
    regular: bool = True,
) -> Trace:
    """Turn rows (seconds, count, line) into nodes. A rise brings new names; a fall takes nodes
    drawn at random. regular: rows are samples; otherwise changes, and gaps mean nothing."""
    ordered, disorder, duplicates = _sort_rows(rows)
    draw = random.Random(f"{seed}/{kind}")
    origin = ordered[0][0]
    # Of several rows of one time the last counts, even where it repeats the first.
    counts = {at - origin: count for at, count, _ in sorted(rows, key=lambda row: row[0])}
    there: list[str] = []
    changes: list[NodeChange] = []
    born = 0
    for at, count in counts.items():
        for _ in range(len(there) - count):
            changes.append(NodeChange(at, "go", there.pop(draw.randrange(len(there)))))
        for _ in range(count - len(there)):
            born += 1
            there.append(f"n{born}")
            changes.append(NodeChange(at, "join", there[-1]))
    times = list(counts)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    step = (median(gaps) if regular else _smallest_step(times)) if gaps else 0.0
    unknown = tuple(
        (a, b) for a, b in itertools.pairwise(times) if regular and b - a > UNKNOWN_GAP_STEPS * step
    )
    return Trace(
        source,
        kind,
        tuple(sorted(changes)),
        times[-1],
        step,
        started or f"{origin:g} s",
        unknown,
        disorder,
        duplicates,
        len(rows),
        _digest(text),
    )


def parse_lifetimes(
    text: str, source: str, seed: int = 0, nodes: int = 64, days: float = 14
) -> Trace:
    """Read a table with `lifetime_s` and `other_ops`, one machine a row. Return a trace of `nodes`
    machines over `days`. Each lives as long as the table's do, and is replaced when it is taken.

    A machine was taken if `other_ops` names a preemption. Otherwise its owner stopped it, and it
    is only known to have lived that long (Kaplan and Meier's estimate respects that).
    """
    lives = []
    for line, row in _table(text, source, ("lifetime_s", "other_ops")):
        life = _number(row["lifetime_s"], source, line)
        taken = any(op.endswith("preempted") for op in row["other_ops"].split(";"))
        lives.append((life, taken))
    if not any(taken for _, taken in lives):
        raise DataError(
            "no machine of this table was preempted, so none would ever go",
            where=source,
            remedy="give a table in which other_ops of a row ends in preempted",
        )
    made = renew_machines(survival_curve(lives), nodes, days * 86400, seed)
    return replace(
        made, source=source, kind="lifetimes", rows=len(lives), sha256=_digest(text), step=60.0
    )


def survival_curve(lives: Iterable[tuple[float, bool]]) -> list[tuple[float, float]]:
    """(age, share that lives longer), falling, by Kaplan and Meier (JASA 53, 1958)."""
    ordered = sorted(lives)
    share, out = 1.0, [(0.0, 1.0)]
    for index, (life, taken) in enumerate(ordered):
        if taken:
            share *= 1 - 1 / (len(ordered) - index)
            out.append((life, share))
    return out


def renew_machines(
    curve: Sequence[tuple[float, float]], nodes: int, seconds: float, seed: int
) -> Trace:
    """`nodes` machines whose lives follow a survival curve; each is replaced as it goes. A machine
    that outlives the curve goes at its end (the wall of machines with a longest life)."""
    draw = random.Random(f"{seed}/lives")
    changes = []
    for place in range(nodes):
        at, stay = 0.0, 0
        while at < seconds:
            name = f"n{place}.{stay}"
            changes.append(NodeChange(at, "join", name))
            u = draw.random()
            life = next((age for age, share in curve if share < u), curve[-1][0])
            at, stay = at + max(life, 1.0), stay + 1
            if at < seconds:
                changes.append(NodeChange(at, "go", name))
    return Trace("made", "lives", tuple(sorted(changes)), seconds, 1.0)


def parse_outages(text: str, source: str, seed: int = 0, system: str | None = None) -> Trace:
    """Read a table of outages with `System`, `nodenumz`, `Prob Started`, `Prob Fixed`, one a row.
    If no system is named, take the one with most rows. A node goes when its outage starts and is
    back when it is fixed. An outage of a node that is out already only prolongs it."""
    rows = []
    systems: dict[str, int] = {}
    for line, row in _table(text, source, ("System", "nodenumz", "Prob Started", "Prob Fixed")):
        systems[row["System"]] = systems.get(row["System"], 0) + 1
        rows.append((row, line))
    if system is None:
        system = max(systems, key=lambda name: systems[name])
    spans = []
    for row, line in rows:
        if row["System"] == system:
            start, stop = (
                _minute(row[key], source, line) for key in ("Prob Started", "Prob Fixed")
            )
            spans.append((start, (row["nodenumz"], max(start, stop)), line))
    if not spans:
        raise DataError(
            f"there is no outage of system {system!r}",
            where=source,
            remedy=f"name one of {', '.join(sorted(systems))}",
        )
    ordered, disorder, duplicates = _sort_rows(spans)
    origin = ordered[0][0]
    changes = [
        NodeChange(0.0, "join", name) for name in sorted({node for _, (node, _), _ in ordered})
    ]
    out: dict[str, float] = {}
    for at, (node, back), _ in ordered:
        if at > out.get(node, -1.0):
            if node in out:
                changes.append(NodeChange(out[node] - origin, "join", node))
            changes.append(NodeChange(at - origin, "go", node))
            out[node] = back
        else:
            out[node] = max(out[node], back)
    end = ordered[-1][0] - origin
    changes += [NodeChange(t - origin, "join", n) for n, t in out.items() if t - origin <= end]
    return Trace(
        f"{source} (system {system})",
        "outages",
        tuple(sorted(changes)),
        end,
        60.0,
        "",
        (),
        disorder,
        duplicates,
        len(spans),
        _digest(text),
    )


# --- what the loaders share ---------------------------------------------------------------------
def _cells(text: str) -> Iterator[tuple[int, list[str]]]:
    """(line, cells without blanks) of every row that is not empty."""
    for line, row in enumerate(csv.reader(text.splitlines()), start=1):
        cells = [cell.strip() for cell in row]
        if any(cells):
            yield line, cells


def _table(text: str, source: str, keys: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """(line, row by column) of a table with a header; other columns are passed over."""
    rows = _cells(text)
    _, header = next(rows, (0, []))
    missing = [key for key in keys if key not in header]
    if missing:
        raise DataError(
            f"there is no column {missing[0]!r}",
            where=f"{source}:1",
            remedy=f"give a header line with {', '.join(keys)}",
        )
    places = {key: header.index(key) for key in keys}
    for line, cells in rows:
        if len(cells) <= max(places.values()):
            raise _row_error(source, line, cells, f"give all {len(header)} columns of the header")
        yield line, {key: cells[place] for key, place in places.items()}


def _sort_rows(
    rows: Sequence[tuple[float, Any, int]],
) -> tuple[list[tuple[float, Any, int]], int, int]:
    """Sorted by time, stable, without exact duplicates; how many were out of order, and dropped."""
    disorder = sum(b[0] < a[0] for a, b in itertools.pairwise(rows))
    kept: list[tuple[float, Any, int]] = []
    seen: set[tuple[float, Any]] = set()
    for row in sorted(rows, key=lambda r: r[0]):
        if row[:2] not in seen:
            seen.add(row[:2])
            kept.append(row)
    return kept, disorder, len(rows) - len(kept)


def _smallest_step(times: Sequence[float]) -> float:
    """The step on which the times of changes lie: the smallest difference there is."""
    known = sorted(set(times))
    return min((b - a for a, b in itertools.pairwise(known)), default=0.0)


def _number(cell: str, source: str, line: int) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise DataError(
            f"{cell!r} is no time or length of time",
            where=f"{source}:{line}",
            remedy="write a number, 0 or more",
        )
    return value


def _count(cell: str, source: str, line: int) -> int:
    if not cell.isdigit():
        raise DataError(
            f"{cell!r} is no number of nodes",
            where=f"{source}:{line}",
            remedy="write a whole number, 0 or more",
        )
    return int(cell)


def _minute(cell: str, source: str, line: int) -> float:
    try:
        return datetime.strptime(cell, "%m/%d/%Y %H:%M").replace(tzinfo=UTC).timestamp()
    except ValueError:
        raise DataError(
            f"{cell!r} is no time",
            where=f"{source}:{line}",
            remedy="write month/day/year hour:minute",
        ) from None


def _row_error(source: str, line: int, cells: Sequence[str], remedy: str) -> DataError:
    return DataError(f"{','.join(cells)!r} is no row", where=f"{source}:{line}", remedy=remedy)


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def _first(text: str) -> list[str]:
    return next(_cells(text[:2000]), (0, [""]))[1]


def _is_ticks(text: str) -> bool:
    head = text[:2000].lstrip()
    return head.startswith("{") and '"data"' in text


_KINDS: tuple[tuple[Callable[[str], bool], Callable[[str, str, int], Trace]], ...] = (
    (_is_ticks, parse_ticks),
    (lambda text: "lifetime_s" in _first(text), parse_lifetimes),
    (lambda text: "Prob Started" in _first(text), parse_outages),
    (lambda text: len(_first(text)) == 3 and _first(text)[1] in ("add", "remove"), parse_named),
    (lambda text: len(_first(text)) == 3 and _first(text)[0][4:5] == "-", parse_dated_counts),
    (
        lambda text: len(_first(text)) == 2 and all(c.isdigit() for c in _first(text)),
        parse_timed_counts,
    ),
)
