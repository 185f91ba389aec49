"""Synthetic traces, one generator per kind of real one: seeded, with documented parameters.

They imitate what matters to a policy: bursts, rates that change, machines that go together, lives
with a wall, failures that cluster. The defaults are the statistics of published traces; the tests
say which statistic each generator reproduces. Pure: the same seed gives the same trace.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from holdfast_lab.traces.columns import Findings
from holdfast_lab.traces.counts import trace_from_counts
from holdfast_lab.traces.lives import renew_machines
from holdfast_lab.traces.node_changes import NodeChange, ReadOptions, Trace, sort_changes

_DAY = 86400.0

BURST_SIZE_WEIGHTS = (39, 13, 15, 7, 1, 4)
"""How many of the bursts of a spot pool took 1, 2, ... 6 machines (Bamboo, NSDI 2023)."""

BATHTUB = ((1.0, 0.175), (3.0, 0.052), (6.0, 0.020), (23.0, 0.008), (24.0, 0.006))
"""(age limit in hours, failures per machine and hour) of preemptible machines that all end at
24 h (Kadupitiya, Jadhao and Sharma, arXiv 1911.05160, from 1,442 machines)."""


def spot_pool(
    seed: int,
    *,
    days: float = 1.0,
    wanted: int = 32,
    between: float = 520.0,
    swing: float = 5.0,
    sizes: Sequence[int] = BURST_SIZE_WEIGHTS,
) -> Trace:
    """A pool of spot machines that loses them in bursts and gets them back one by one.

    between: mean seconds between bursts; the rate swings by `swing` between its lowest and its
    highest, over six hours each. Times are full minutes, as they are sampled.
    """
    draw = random.Random(f"{seed}/spot pool")
    rows: list[tuple[float, int, int]] = [(0.0, wanted, 1)]
    count, minute, busy = wanted, 0, False
    while minute * 60 < days * _DAY:
        if minute % 360 == 0:
            busy = not busy
        minute += 1
        factor = swing**0.5 if busy else swing**-0.5
        lost = 0
        if draw.random() < 60 / between * factor:
            lost = min(count, draw.choices(range(1, len(sizes) + 1), sizes)[0])
        # On average as many join as leave: 2.1 a burst.
        joined = sum(draw.random() < 0.06 for _ in range(wanted - count))
        count += (0 if lost else joined) - lost
        rows.append((minute * 60.0, count, minute + 1))
    made = trace_from_counts(
        rows,
        Findings(None, f"synthetic spot pool, seed {seed}"),
        "spot pool",
        "",
        options=ReadOptions(seed=seed),
    )
    return replace(made, seconds=rows[-1][0], step=60.0)


def gang_offers(
    seed: int, *, days: float = 12.0, wanted: int = 16, up: float = 5400.0, down: float = 7200.0
) -> Trace:
    """Offers of a full gang: all machines or nearly none, for runs of mean length `up` and `down`.
    Two in five of the losses take all. One probe in 300 s."""
    draw = random.Random(f"{seed}/gang")
    rows: list[tuple[float, int, int]] = []
    at, count = 0.0, 0
    while at < days * _DAY:
        rows.append((at, count, len(rows) + 1))
        if count and draw.random() < 300 / up:
            count = 0 if draw.random() < 0.4 else draw.randrange(count)
        elif count < wanted and draw.random() < 300 / down * (3 if count else 1):
            count = wanted
        at += 300.0
    made = trace_from_counts(
        rows,
        Findings(None, f"synthetic gang offers, seed {seed}"),
        "gang offers",
        "",
        options=ReadOptions(seed=seed),
    )
    return replace(made, seconds=at, step=300.0)


def bathtub_lives(seed: int, *, nodes: int = 32, days: float = 7.0, wall: float = 24.0) -> Trace:
    """Machines that go early, or late, or at the latest after `wall` hours; each is replaced."""
    share, age, curve = 1.0, 0.0, [(0.0, 1.0)]
    while age < wall:
        rate = next((rate for upto, rate in BATHTUB if age < upto), BATHTUB[-1][1])
        share, age = share * (1 - rate / 60), age + 1 / 60
        curve.append((age * 3600, share))
    made = renew_machines(curve, nodes, days * _DAY, seed)
    source = f"synthetic bathtub lives, seed {seed}"
    return replace(made, source=source, kind="bathtub lives", step=60.0)  # lives end on minutes


def cluster_failures(
    seed: int,
    *,
    nodes: int = 512,
    days: float = 365.0,
    per_node_year: float = 1.2,
    lemons: float = 0.02,
    repeat: float = 0.35,
) -> Trace:
    """A cluster whose failures cluster. Some nodes are lemons, which have a quarter of all first
    failures. After a failure the same node often (`repeat`) fails again within hours. An
    outage lasts an hour in the median, and a tenth lasts over five hours."""
    draw = random.Random(f"{seed}/cluster")
    names = [f"n{number}" for number in range(nodes)]
    bad = names[: max(1, round(lemons * nodes))]
    changes = [NodeChange(0.0, "join", name) for name in names]
    rate = nodes * per_node_year * (1 - repeat) / (365 * _DAY)
    end, at, back = days * _DAY, 0.0, dict.fromkeys(names, 0.0)
    while (at := at + draw.expovariate(rate)) < end:
        name, when = draw.choice(bad if draw.random() < 0.25 else names), at
        while when < end:
            when = 60.0 * int(when / 60)
            if when > back[name]:
                back[name] = when + 60.0 * int(draw.lognormvariate(4.1, 1.2) + 1)
                changes.append(NodeChange(when, "go", name))
                if back[name] < end:
                    changes.append(NodeChange(back[name], "join", name))
            if draw.random() >= repeat:
                break
            when = max(when, back[name]) + draw.expovariate(1 / 7200)
    source = f"synthetic cluster failures, seed {seed}"
    return Trace(source, "cluster failures", sort_changes(changes), end, 60.0)
