"""Tables of lives: how long machines were there. A trace is drawn from them. Pure."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace

from holdfast.errors import DataError
from holdfast_lab.traces.node_changes import (
    DEFAULTS,
    NodeChange,
    ReadOptions,
    Trace,
    sort_changes,
)
from holdfast_lab.traces.rows import digest, number, table_of

_MOST_STAYS = 1e6  # of a trace that is drawn; more would fill the memory


def read_lives(text: str, source: str) -> list[tuple[float, bool]]:
    """(seconds, was taken) of each machine of a table with `lifetime_s` and `other_ops`.

    A machine was taken if `other_ops` names a preemption. Otherwise its owner stopped it, and it
    is only known to have lived that long.
    """
    lives = []
    for line, row in table_of(text, source, ("lifetime_s", "other_ops")):
        life = number(row["lifetime_s"], source, line)
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
    lives = read_lives(text, source)
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
        made, source=source, kind="lifetimes", rows=len(lives), sha256=digest(text), step=60.0
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
