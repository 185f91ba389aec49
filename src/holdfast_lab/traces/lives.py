"""Tables of lives, and of how often a provider takes machines back. A trace is drawn. Pure."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import exp, log
from typing import Any

from holdfast.core.json_parsing import parse_json
from holdfast.errors import DataError
from holdfast_lab.traces.columns import ADVISOR, LIVES, Findings, table_of
from holdfast_lab.traces.events import EventStream, TraceHeader, stream_of_changes
from holdfast_lab.traces.node_changes import DEFAULTS, NodeChange, ReadOptions, Trace, sort_changes
from holdfast_lab.traces.rows import digest, number

_MOST_STAYS = 1e6  # of a trace that is drawn; more would fill the memory


def read_lives(
    text: str, source: str, findings: Findings | None = None
) -> list[tuple[float, bool]]:
    """(seconds, was taken) of each machine of a table with `lifetime_s` and `other_ops`.

    A machine was taken if `other_ops` names a preemption. Otherwise its owner stopped it, and it
    is only known to have lived that long.
    """
    lives, findings = [], findings or Findings(LIVES, source)
    for line, row in table_of(text, findings, ("lifetime_s", "other_ops")):
        life = number(row["lifetime_s"], source, line)
        if row.get("preemptible", "").lower() in ("false", "no", "0"):
            findings.count("machines are not preemptible: left out", line)
            continue
        if life < 1.0:
            findings.count("lives below 1 s count as 1 s", line)
        lives.append((life, any(op.endswith("preempted") for op in row["other_ops"].split(";"))))
    if not any(taken for _, taken in lives):
        raise DataError(
            "no machine of this table was preempted, so none would ever go",
            where=source,
            remedy="give a table in which other_ops of a row ends in preempted",
        )
    return lives


def parse_lifetimes(text: str, source: str, options: ReadOptions = DEFAULTS) -> Trace:
    """Return a trace of `nodes` machines (64) over `days` (14). Each lives as long as the table's
    do, by Kaplan and Meier's estimate, and is replaced when it is taken."""
    findings = Findings(LIVES, source)
    lives = read_lives(text, source, findings)
    nodes = 64 if options.nodes is None else options.nodes
    days = 14.0 if options.days is None else options.days
    mean = sum(life for life, _ in lives) / len(lives)
    stays = nodes * days * 86400 / max(1.0, mean)
    if stays > _MOST_STAYS:
        raise DataError(
            f"machines live for {mean:.3g} s in the mean: {nodes} in {days:g} days are too many",
            where=source,
            remedy="give fewer with --nodes, or a shorter time with --days",
        )
    made = renew_machines(survival_curve(lives), nodes, days * 86400, options.seed)
    return replace(
        made,
        source=source,
        kind="lifetimes",
        rows=len(lives),
        sha256=digest(text),
        step=60.0,
        notes=findings.notes(),
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
    deaths = [-share for _, share in curve]
    changes = []
    for place in range(nodes):
        at, stay = 0.0, 0
        while at < seconds:
            name = f"n{place}.{stay}"
            changes.append(NodeChange(at, "join", name))
            index = bisect_right(deaths, -draw.random())
            life = curve[min(index, len(curve) - 1)][0]
            at, stay = at + max(life, 1.0), stay + 1
            if at < seconds:
                changes.append(NodeChange(at, "go", name))
    return Trace("made", "lives", sort_changes(changes), seconds, 1.0)


# --- rates by bucket ------------------------------------------------------------------------------
_SHARES = (0.025, 0.075, 0.125, 0.175, 0.25)
"""Share of machines taken within a month: the middle of each bucket; the last has no upper end."""
_MONTH_H = 730.0


def is_advisor(text: str) -> bool:
    return text.lstrip().startswith("{") and '"spot_advisor"' in text


def advisor_events(text: str, source: str, options: ReadOptions) -> EventStream:
    """Machines of one type in one region, that go at random at the rate of their bucket."""
    findings = Findings(ADVISOR, source)
    table = _table(text, findings)
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
        notes=(
            f"{end} % taken in a month: drawn without bursts, which real markets have",
            *findings.notes(),
        ),
    )
    return EventStream(header, stream_of_changes(made, zone=options.zone, gpu=options.gpu))


_LIMITS = [5, 11, 16, 22, 100]
"""Percent at which each bucket ends, as the file may say."""


def _table(text: str, findings: Findings) -> dict[str, dict[str, int]]:
    """Bucket by region and type; Linux where systems differ."""
    problem, source = None, findings.source
    found: dict[str, dict[str, int]] = {}
    try:
        everything = parse_json(text)
        value = everything["spot_advisor"]
        if (ranges := everything.get("ranges")) is not None:
            problem = "ranges" if [each["max"] for each in ranges] != _LIMITS else None
        findings.take(everything, source)
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
