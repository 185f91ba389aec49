"""Tables of prices, intensities and links as events. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import UTC, datetime
from statistics import median
from typing import Any

from holdfast.errors import DataError
from holdfast_lab.traces.columns import (
    LINKS,
    MIX,
    PRICES,
    TRANSFERS,
    Findings,
    optional_number,
    refuse_other_quantity,
    table_of,
)
from holdfast_lab.traces.events import EventStream, TraceEvent, TraceHeader, in_order
from holdfast_lab.traces.node_changes import UNKNOWN_GAP_STEPS, ReadOptions
from holdfast_lab.traces.rows import (
    as_number,
    cells_of,
    refuse_longer_row,
    row_error,
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
    rows, findings = 0, Findings(PRICES, source)
    keys = ("date", "machine_type", "region", _SPOT)
    for line, row in table_of(text, findings, keys):
        rows += 1
        at = findings.date(row["date"], line)
        value = optional_number(row[_SPOT], _SPOT, source, line)
        fixed = optional_number(row.get(_FIXED, ""), _FIXED, source, line)
        if at is None:
            raise row_error(
                source, line, [row[key] for key in keys], "write a date such as 2024-01-31"
            )
        known[0].add(row["region"])
        known[1].add(row["machine_type"])
        chosen = options.gpu in ("", row["machine_type"]) and options.zone in ("", row["region"])
        if value is None:
            findings.count("rows without a spot price were left out", line)
        if value is None or not chosen:
            continue
        extra = {} if fixed is None else {"on_demand": fixed}
        place = f"{source}:{line}"
        event = TraceEvent(
            0.0, "price", "", row["region"], row["machine_type"], value, place, extra
        )
        points.append((at, event))
    _refuse_unknown(options, *known, source)
    pairs = len({(event.zone, event.gpu) for _, event in points})
    notes = [f"{pairs} pairs of machine type and region"]
    return _stream("prices", points, findings, rows, notes, step_s=86400.0)


# --- carbon -------------------------------------------------------------------------------------
def mix_events(text: str, source: str, options: ReadOptions) -> EventStream:
    """A table of time, generation by source in MW, and `avg_CI`. An hour whose generation is below
    30 % of the median, or that is empty, is unknown: the value before it holds."""
    rows = with_date_first(list(cells_of(text, source)))
    header = rows[0][1]
    at_ci = [name.lower() for name in header].index("avg_ci")
    zone, findings = options.place or "grid", Findings(MIX, source)
    found, sources = [], {name.lower() for name in MIX.used} - {"avg_ci"}
    for line, cells in rows[1:]:
        at = findings.date(cells[0], line)
        if at is None:
            raise row_error(source, line, cells, "write a time such as 2022-01-01 00:00:00+00:00")
        refuse_longer_row(header, cells, source, line)
        cells = [*cells, *[""] * (len(header) - len(cells))]
        named = dict(zip(header[1:], cells[1:], strict=True))
        used = {n: c for n, c in named.items() if n.lower() in sources}
        rest = {n: c for n, c in named.items() if n not in used and n != header[at_ci]}
        findings.take(dict.fromkeys(MIX.used) | rest, f"{source}:{line}")
        value, *numbers = (as_number(cell) for cell in (cells[at_ci], *used.values()))
        given = (cells[at_ci], *used.values())
        bad = any(c and n is None for c, n in zip(given, (value, *numbers), strict=True))
        if bad or (value or 0.0) < 0:
            raise row_error(source, line, cells, "write numbers, an intensity of 0 or more")
        total = sum(n or 0.0 for n in numbers)
        if value is None:
            findings.count("hours have no intensity", line)
        else:
            event = TraceEvent(0.0, "carbon", "", zone, "", value, f"{source}:{line}")
            found.append((at, total, event))
    usual = median(total for _, total, _ in found) if found else 0.0
    kept = [(at, event) for at, total, event in found if total >= _LEAST_GENERATION * usual]
    notes = ["average intensity"]
    few = len(found) - len(kept)
    notes += [f"{few} hours report below 30 % of the usual generation: left out"] if few else []
    return _stream("average carbon", kept, findings, len(rows) - 1, notes, sampled=True)


def signal_events(text: str, source: str, options: ReadOptions) -> EventStream:
    """A table of time and one column of intensities per zone. Whether they are average or marginal
    is not in it."""
    rows = iter(with_date_first(list(cells_of(text, source))))
    _, header = next(rows)
    for name in header[1:]:
        refuse_other_quantity(name, source, is_count=False)
    points: list[Point] = []
    many, findings = 0, Findings(None, source)
    for line, cells in rows:
        many += 1
        refuse_longer_row(header, cells, source, line)
        at = findings.date(cells[0], line)
        values = [as_number(cell) for cell in cells[1:]]
        wrong = any(cell and value is None for cell, value in zip(cells[1:], values, strict=True))
        if at is None or wrong or min((v for v in values if v is not None), default=0.0) < 0:
            raise row_error(source, line, cells, "write a time, and intensities of 0 or more")
        for name, value in zip(header[1:], values, strict=False):
            if options.zone in ("", name) or len(header) == 2:
                zone = options.zone or name
                if value is None:
                    findings.count("cells are empty", line)
                else:
                    place = f"{source}:{line}"
                    points.append((at, TraceEvent(0.0, "carbon", "", zone, "", value, place)))
    if len(header) > 2:
        _refuse_unknown(options, set(header[1:]), set(), source)
    unsaid = "the file does not say whether intensities are average or marginal: see --carbon"
    notes = [f"{options.carbon} intensity" if options.carbon else unsaid]
    name = f"{options.carbon} carbon".strip()
    return _stream(name, points, findings, many, notes, sampled=True)


# --- links --------------------------------------------------------------------------------------
_RECEIVED = ("throughput_received", "throughput_recieved")  # the second is in public files
_RTT = {"min_rtt": "rtt_min_ms", "avg_rtt": "rtt_ms", "max_rtt": "rtt_max_ms"}
_LABELS = ("src_tier", "dst_tier", "src_instance_class", "dst_instance_class")


def link_events(text: str, source: str, options: ReadOptions) -> EventStream:
    """A table of throughputs (bit/s) or round trips (ms) between regions, at one time."""
    events, rows, findings = [], 0, Findings(LINKS, source)
    for line, row in table_of(text, findings, ("src_region", "dst_region")):
        rows += 1
        success = (row.get("success") or "true").lower()
        if success in ("false", "0", "no"):
            findings.count("measurements failed: left out", line)
            continue
        given = {key: row[key] for key in (*_RECEIVED, *_RTT) if row.get(key)}
        numbers = {key: as_number(cell) for key, cell in given.items()}
        is_known = success in ("true", "1", "yes")
        if not (given and is_known) or any(n is None or n < 0 for n in numbers.values()):
            cells = [row["src_region"], row["dst_region"], *given.values()]
            remedy = (
                "write a throughput in bit/s or round trips in ms, and success as true or false"
            )
            raise row_error(source, line, [*cells, row.get("success", "")], remedy)
        rate = next((numbers[key] for key in _RECEIVED if key in numbers), None)
        extra: dict[str, Any] = {_RTT[key]: v for key, v in numbers.items() if key in _RTT}
        extra |= {key: row[key] for key in _LABELS if row.get(key)}
        node = f"{row['src_region']}->{row['dst_region']}"
        value = 0.0 if rate is None else rate / 1e9
        place = f"{source}:{line}"
        events.append(TraceEvent(0.0, "net", node, row["src_region"], "", value, place, extra))
    notes = list[str]()
    if events and not any(event.value for event in events):
        notes.append("round trips only: value 0 is a throughput that is not known")
    return _stream("links", [(0.0, e) for e in events], findings, rows, notes)


def transfer_price_events(text: str, source: str, options: ReadOptions) -> EventStream:
    """A table of `src`, `dest` or `dst`, and `cost` in $ for a GB between regions."""
    _, first = next(cells_of(text, source))
    other = "dest" if "dest" in [name.lower() for name in first] else "dst"
    points: list[Point] = []
    rows, findings = 0, Findings(TRANSFERS, source)
    for line, row in table_of(text, findings, ("src", other, "cost")):
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
    return _stream("transfer prices", points, findings, rows, notes)


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
    findings: Findings,
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
            where=findings.source,
            remedy="give rows with values; --zone and --gpu together may choose none",
        )
    disorder = sum(b[0] < a[0] for a, b in itertools.pairwise(points))
    origin = min(at for at, _ in points)
    unique = dict[tuple[Any, ...], TraceEvent]()
    values = dict[tuple[Any, ...], float]()
    for at, e in points:
        if e.kind != "net" and values.setdefault((at, e.zone, e.gpu), e.value) != e.value:
            line = int(e.source.rpartition(":")[2])
            findings.count(
                "values contradict another of their time and place, and replace it", line
            )
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
        findings.source,
        rows=rows,
        t0=t0,
        zones=tuple(sorted({e.zone for e in events if e.zone})),
        gaps=tuple(gaps),
        seconds=times[-1] + (usual if sampled else 0.0),
        step_s=usual,
        disorder=disorder,
        duplicates=len(points) - len(unique),
        notes=(*notes, *findings.notes()),
    )
    return EventStream(header, events)
