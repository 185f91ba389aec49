"""Tables of outages, one a row: `System`, `nodenumz`, `Prob Started`, `Prob Fixed`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from holdfast.errors import DataError
from holdfast_lab.traces.node_changes import (
    DEFAULTS,
    NodeChange,
    ReadOptions,
    Trace,
    sort_changes,
)
from holdfast_lab.traces.rows import as_number, count, digest, minute, sort_rows, table_of

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
    unequal: int  # rows whose Down Time is not Prob Fixed - Prob Started

    @property
    def origin(self) -> float:
        return self.outages[0].start

    @property
    def started(self) -> str:
        return datetime.fromtimestamp(self.origin, UTC).strftime("%F %T")


def read_outages(text: str, source: str, system: str | None = None) -> OutageTable:
    """Read one system of the table; the one with most rows if no system is named."""
    rows: list[tuple[int, dict[str, str]]] = list(
        table_of(text, source, _KEYS, ("nodes", "Down Time", *CAUSES))
    )
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
    spans, nodes, unequal, many = [], dict[str, None](), 0, 0
    for line, row in rows:
        start, stop = (minute(row[key], source, line) for key in ("Prob Started", "Prob Fixed"))
        if row["System"] != system:
            continue
        size = as_number(row.get("nodes", "")) or 0
        many = max(many, count(f"{size:.0f}", source, line) if size > 0 else 0)
        nodes[row["nodenumz"]] = None
        down = as_number(row.get("Down Time", ""))
        unequal += down is not None and down * 60 != stop - start
        cause = next((f"{key}: {row[key]}" for key in CAUSES if row.get(key)), "")
        spans.append((start, (row["nodenumz"], max(start, stop), cause), line))
    ordered, disorder, duplicates = sort_rows(spans)
    # Nodes without an outage are named by their number, as those with one.
    nodes |= dict.fromkeys(map(str, range(many)))
    return OutageTable(
        system,
        tuple(Outage(at, back, node, cause, n) for at, (node, back, cause), n in ordered),
        tuple(sorted(nodes)),
        systems,
        disorder,
        duplicates,
        unequal,
    )


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
    )
