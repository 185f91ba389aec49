"""Tables of how often a provider takes machines back: a rank of places, not a trace. Pure."""

from __future__ import annotations

from dataclasses import replace
from math import exp, log
from typing import Any

from holdfast.core.json_parsing import parse_json
from holdfast.errors import DataError
from holdfast_lab.traces.events import EventStream, TraceHeader, stream_of_changes
from holdfast_lab.traces.lives import renew_machines
from holdfast_lab.traces.node_changes import ReadOptions

_SHARES = (0.025, 0.075, 0.125, 0.175, 0.25)
"""Share of machines taken within a month: the middle of each bucket; the last has no upper end."""
_MONTH_H = 730.0


def is_advisor(text: str) -> bool:
    return text.lstrip().startswith("{") and '"spot_advisor"' in text


def advisor_events(text: str, source: str, options: ReadOptions) -> EventStream:
    """Machines of one type in one region, that go at random at the rate of their bucket."""
    table = _table(text, source)
    if options.zone not in table:
        raise DataError(
            f"this table ranks regions and has no time; there is no region {options.zone!r}",
            where=source,
            remedy=f"choose with --zone one of: {', '.join(sorted(table))}",
        )
    types = table[options.zone]
    if options.gpu not in types:
        raise DataError(
            f"{options.zone} has no type {options.gpu!r}",
            where=source,
            remedy=f"choose with --gpu one of: {', '.join(sorted(types)[:40])}",
        )
    bucket = types[options.gpu]
    per_hour = -log(1 - _SHARES[bucket]) / _MONTH_H
    hours = [0.0, *(10 ** (k / 20) for k in range(-40, 100))]
    curve = [(h * 3600, exp(-per_hour * h)) for h in hours]
    nodes = 64 if options.nodes is None else options.nodes
    days = 14.0 if options.days is None else options.days
    made = replace(renew_machines(curve, nodes, days * 86400, options.seed), source=source)
    end = "more than 20" if bucket == 4 else f"about {100 * _SHARES[bucket]:g}"
    header = TraceHeader(
        "monthly shares",
        source,
        rows=sum(map(len, table.values())),
        zones=(options.zone,),
        victim_rule="drawn",
        seed=options.seed,
        seconds=made.seconds,
        step_s=made.step,
        notes=(f"{end} % taken in a month: drawn without bursts, which real markets have",),
    )
    return EventStream(header, stream_of_changes(made, zone=options.zone, gpu=options.gpu))


def _table(text: str, source: str) -> dict[str, dict[str, int]]:
    """Bucket by region and type; Linux where systems differ."""
    problem = None
    found: dict[str, dict[str, int]] = {}
    try:
        value = parse_json(text)["spot_advisor"]
        for region, systems in value.items():
            types: dict[str, Any] = systems.get("Linux") or next(iter(systems.values()))
            found[region] = {name: entry["r"] for name, entry in types.items()}
            bad = [n for n, r in found[region].items() if r not in range(len(_SHARES))]
            if bad and problem is None:
                problem = f"spot_advisor.{region}.{bad[0]}"
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration):
        problem = "spot_advisor"
    if problem:
        raise DataError(
            "this is no table of buckets",
            where=f"{source}: {problem}",
            remedy='write {"spot_advisor": {"region": {"Linux": {"type": {"r": 0}}}}}, r of 0 to 4',
        )
    return found
