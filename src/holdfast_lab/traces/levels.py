"""Tables of prices, intensities and links as events. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import UTC, datetime
from statistics import median
from typing import Any

from holdfast.errors import DataError
from holdfast_lab.traces.events import EventStream, TraceEvent, TraceHeader, in_order
from holdfast_lab.traces.node_changes import UNKNOWN_GAP_STEPS, ReadOptions
from holdfast_lab.traces.rows import (
    as_date,
    as_number,
    cells_of,
    refuse_longer_row,
    row_error,
    table_of,
    with_date_first,
)

_LEAST_GENERATION = 0.3
"""An hour that reports less than this share of the median generation is incomplete."""

Point = tuple[float, TraceEvent]
"""Seconds of the wall clock, and the event, whose own time is not set yet."""


# --- prices -------------------------------------------------------------------------------------
_SPOT, _FIXED = "usd_per_hour_spot", "usd_per_hour_on_demand"


def price_events(text: str, source: str, options: ReadOptions) -> EventStream:
    """A table in which a row is a change of price of a machine type in a region."""
    points: list[Point] = []
    known: tuple[set[str], set[str]] = set(), set()
    rows = left = 0
    keys = ("date", "machine_type", "region", _SPOT)
    for line, row in table_of(text, source, keys, (_FIXED,)):
        rows += 1
        at, value = as_date(row["date"]), as_number(row[_SPOT])
        fixed = as_number(row.get(_FIXED, ""))
        if at is None or (row[_SPOT] and (value is None or value < 0)) or (fixed or 0.0) < 0:
            raise row_error(
                source, line, [row[key] for key in keys], "write a date, and a price of 0 or more"
            )
        known[0].add(row["region"])
        known[1].add(row["machine_type"])
        chosen = options.gpu in ("", row["machine_type"]) and options.zone in ("", row["region"])
        if value is None or not chosen:
            left += value is None
            continue
        extra = {} if fixed is None else {"on_demand": fixed}
        place = f"{source}:{line}"
        event = TraceEvent(
            0.0, "price", "", row["region"], row["machine_type"], value, place, extra
        )
        points.append((at, event))
    notes = [f"{left} rows without a spot price were left out"] if left else []
    _refuse_unknown(options, *known, source)
    pairs = len({(event.zone, event.gpu) for _, event in points})
    notes.append(f"{pairs} pairs of machine type and region")
    return _stream("prices", points, source, rows, notes, step_s=86400.0)


# --- carbon -------------------------------------------------------------------------------------
def mix_events(text: str, source: str, options: ReadOptions) -> EventStream:
    """A table of time, generation by source in MW, and `avg_CI`. An hour whose generation is below
    30 % of the median, or that is empty, is unknown: the value before it holds."""
    rows = with_date_first(list(cells_of(text, source)))
    header = rows[0][1]
    at_ci = [name.lower() for name in header].index("avg_ci")
    zone = options.place or "grid"
    found, missing = [], 0
    for line, cells in rows[1:]:
        at = as_date(cells[0])
        if at is None:
            raise row_error(source, line, cells, "write a time such as 2022-01-01 00:00:00+00:00")
        refuse_longer_row(header, cells, source, line)
        cells = [*cells, *[""] * (len(header) - len(cells))]
        numbers = [as_number(cell) for cell in cells[1:]]
        bad = [
            cell for cell, value in zip(cells[1:], numbers, strict=True) if cell and value is None
        ]
        value = numbers[at_ci - 1]
        if bad or (value or 0.0) < 0:
            raise row_error(source, line, cells, "write numbers, an intensity of 0 or more")
        total = sum(n or 0.0 for place, n in enumerate(numbers, start=1) if place != at_ci)
        missing += value is None
        if value is not None:
            event = TraceEvent(0.0, "carbon", "", zone, "", value, f"{source}:{line}")
            found.append((at, total, event))
    usual = median(total for _, total, _ in found) if found else 0.0
    kept = [(at, event) for at, total, event in found if total >= _LEAST_GENERATION * usual]
    notes = ["average intensity"]
    notes += [f"{missing} hours have no intensity"] if missing else []
    few = len(found) - len(kept)
    notes += [f"{few} hours report below 30 % of the usual generation: left out"] if few else []
    return _stream("average carbon", kept, source, len(rows) - 1, notes, sampled=True)


def signal_events(text: str, source: str, options: ReadOptions) -> EventStream:
    """A table of time and one column of intensities per zone. Whether they are average or marginal
    is not in it."""
    rows = iter(with_date_first(list(cells_of(text, source))))
    _, header = next(rows)
    points: list[Point] = []
    many = empty = 0
    for line, cells in rows:
        many += 1
        refuse_longer_row(header, cells, source, line)
        at = as_date(cells[0])
        values = [as_number(cell) for cell in cells[1:]]
        wrong = any(cell and value is None for cell, value in zip(cells[1:], values, strict=True))
        if at is None or wrong or min((v for v in values if v is not None), default=0.0) < 0:
            raise row_error(source, line, cells, "write a time, and intensities of 0 or more")
        for name, value in zip(header[1:], values, strict=False):
            if options.zone in ("", name) or len(header) == 2:
                empty += value is None
                zone = options.zone or name
                if value is not None:
                    place = f"{source}:{line}"
                    points.append((at, TraceEvent(0.0, "carbon", "", zone, "", value, place)))
    if len(header) > 2:
        _refuse_unknown(options, set(header[1:]), set(), source)
    unsaid = "the file does not say whether intensities are average or marginal: see --carbon"
    notes = [f"{options.carbon} intensity" if options.carbon else unsaid]
    notes += [f"{empty} cells are empty"] if empty else []
    return _stream(f"{options.carbon} carbon".strip(), points, source, many, notes, sampled=True)


# --- links --------------------------------------------------------------------------------------
_RECEIVED = ("throughput_received", "throughput_recieved")  # the second is in public files
_RTT = {"min_rtt": "rtt_min_ms", "avg_rtt": "rtt_ms", "max_rtt": "rtt_max_ms"}
_LABELS = ("src_tier", "dst_tier", "src_instance_class", "dst_instance_class")


def link_events(text: str, source: str, options: ReadOptions) -> EventStream:
    """A table of throughputs (bit/s) or round trips (ms) between regions, at one time."""
    events, rows, failed = [], 0, 0
    optional = (*_RECEIVED, *_RTT, *_LABELS, "success")
    for line, row in table_of(text, source, ("src_region", "dst_region"), optional):
        rows += 1
        if row.get("success", "True").lower() in ("false", "0"):
            failed += 1
            continue
        given = {key: row[key] for key in (*_RECEIVED, *_RTT) if row.get(key)}
        numbers = {key: as_number(cell) for key, cell in given.items()}
        if not given or any(value is None or value < 0 for value in numbers.values()):
            cells = [row["src_region"], row["dst_region"], *given.values()]
            raise row_error(source, line, cells, "write a throughput in bit/s or round trips in ms")
        rate = next((numbers[key] for key in _RECEIVED if key in numbers), None)
        extra: dict[str, Any] = {_RTT[key]: v for key, v in numbers.items() if key in _RTT}
        extra |= {key: row[key] for key in _LABELS if row.get(key)}
        node = f"{row['src_region']}->{row['dst_region']}"
        value = 0.0 if rate is None else rate / 1e9
        place = f"{source}:{line}"
        events.append(TraceEvent(0.0, "net", node, row["src_region"], "", value, place, extra))
    notes = [f"{failed} measurements failed: left out"] if failed else []
    if events and not any(event.value for event in events):
        notes.append("round trips only: value 0 is a throughput that is not known")
    return _stream("links", [(0.0, e) for e in events], source, rows, notes)


def transfer_price_events(text: str, source: str, options: ReadOptions) -> EventStream:
    """A table of `src`, `dest` or `dst`, and `cost` in $ for a GB between regions."""
    _, first = next(cells_of(text, source))
    other = "dest" if "dest" in [name.lower() for name in first] else "dst"
    points: list[Point] = []
    rows = 0
    for line, row in table_of(text, source, ("src", other, "cost"), ("src_tier", "dest_tier")):
        rows += 1
        cost = as_number(row["cost"])
        if cost is None or cost < 0:
            raise row_error(source, line, list(row.values()), "write $ for a GB, 0 or more")
        extra: dict[str, Any] = {key: v for key, v in row.items() if key.endswith("tier")}
        extra["usd_per_gb"] = cost
        node = f"{row['src']}->{row[other]}"
        place = f"{source}:{line}"
        points.append((0.0, TraceEvent(0.0, "net", node, row["src"], "", 0.0, place, extra)))
    notes = ["prices of transfers only: value 0 is a throughput that is not known"]
    return _stream("transfer prices", points, source, rows, notes)


# --- what they share ----------------------------------------------------------------------------
def _refuse_unknown(options: ReadOptions, zones: set[str], gpus: set[str], source: str) -> None:
    """Raise DataError for a choice of --zone or --gpu that a table with rows does not have."""
    for option, chosen, known in (("--zone", options.zone, zones), ("--gpu", options.gpu, gpus)):
        if chosen and known and chosen not in known:
            raise DataError(
                f"this table has no {chosen!r}",
                where=f"{source}: {option}",
                remedy=f"choose with {option} one of: {', '.join(sorted(known))}",
            )


def _stream(
    name: str,
    points: Sequence[Point],
    source: str,
    rows: int,
    notes: Sequence[str],
    *,
    step_s: float = 0.0,
    sampled: bool = False,
) -> EventStream:
    """Set the times from the first point on; find disorder, duplicates and, of samples, gaps."""
    if not points:
        raise DataError(
            "no row of this table can be used",
            where=source,
            remedy="give rows with values; --zone and --gpu together may choose none",
        )
    disorder = sum(b[0] < a[0] for a, b in itertools.pairwise(points))
    origin = min(at for at, _ in points)
    unique = dict[tuple[Any, ...], TraceEvent]()
    for at, e in points:
        key = (at, e.node, e.zone, e.gpu, e.value, *e.extra.items())
        if key not in unique:
            unique[key] = TraceEvent(
                at - origin, e.kind, e.node, e.zone, e.gpu, e.value, e.source, e.extra
            )
    events = in_order(unique.values())
    times = sorted({event.t_s for event in events})
    steps = [b - a for a, b in itertools.pairwise(times)]
    usual = median(steps) if sampled and steps else step_s
    gaps = [
        (a, b)
        for a, b in itertools.pairwise(times)
        if sampled and b - a > UNKNOWN_GAP_STEPS * usual
    ]
    t0 = datetime.fromtimestamp(origin, UTC).strftime("%F %T") if origin else ""
    header = TraceHeader(
        name,
        source,
        rows=rows,
        t0=t0,
        zones=tuple(sorted({e.zone for e in events if e.zone})),
        gaps=tuple(gaps),
        seconds=times[-1] + (usual if sampled else 0.0),
        step_s=usual,
        disorder=disorder,
        duplicates=len(points) - len(unique),
        notes=tuple(notes),
    )
    return EventStream(header, events)
