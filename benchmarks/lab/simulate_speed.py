"""How fast a run is simulated, on one core, and whether memory grows with simulated time.

    HOLDFAST_DATA=... python -m benchmarks.lab.simulate_speed

Three rows. Node-days a second on the p3 trace (bar: 1,000; Bamboo's own simulator did 6 and 12).
Seconds for 1,024 nodes over 90 days at the rates of a cluster (bar: 10). Peak memory of 30
times the p3 trace, of that of 3 times (bar: 1.1). The floor of the first row reads the events and
counts the nodes, without any policy. Seconds are CPU seconds, the least of several rounds.
"""

from __future__ import annotations

import os
import random
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

from holdfast_lab.engine.fleet import Fleet, instants
from holdfast_lab.engine.holdfast import holdfast
from holdfast_lab.engine.interfaces import Costs
from holdfast_lab.engine.ledger import Ledger
from holdfast_lab.engine.loop import Limits, Simulation
from holdfast_lab.engine.study import repeated
from holdfast_lab.engine.table_cost import linear_cost
from holdfast_lab.traces.events import EventStream, TraceEvent
from holdfast_lab.traces.reading import read_stream

P3 = "churn/bamboo/p3-trace.csv"
DAY = 86_400.0
COSTS = Costs(state_bytes=20e9)
LOSSES_PER_1000_NODE_DAYS = 3.3  # LANL clusters 18 to 20
OUTAGE_S = 6 * 3600.0


def cluster_failures(nodes: int, seed: int) -> Iterator[TraceEvent]:
    """Failures of single nodes without end, each back after hours."""
    draw = random.Random(f"{seed}/speed")
    yield from (TraceEvent(0.0, "join", f"n{index}", value=8.0) for index in range(nodes))
    rate = nodes * LOSSES_PER_1000_NODE_DAYS / 1000 / DAY
    away: list[tuple[float, str]] = []
    at = draw.expovariate(rate)
    while True:
        while away and away[0][0] <= at:
            back, name = away.pop(0)
            yield TraceEvent(back, "recover", name, value=1.0)
        name = f"n{draw.randrange(nodes)}"
        if all(name != other for _, other in away):
            yield TraceEvent(at, "fail", name, value=OUTAGE_S)
            away.append((at + OUTAGE_S, name))
        at += draw.expovariate(rate)


def least(rounds: int, work: Callable[[], object]) -> float:
    """CPU seconds of the quickest round."""
    found = []
    for _ in range(rounds):
        begun = time.process_time()
        work()
        found.append(time.process_time() - begun)
    return min(found)


def on_p3(stream: EventStream) -> Ledger:
    cost = linear_cost(48, 48_000, 240_000, COSTS, nodes_per_replica=4)
    return Simulation(cost, holdfast(cost), Limits(stream.seconds)).run(stream.events)


def on_a_cluster(days: float, nodes: int = 1024) -> Ledger:
    cost = linear_cost(nodes, 1e6, 10e6, Costs(state_bytes=2e12), 64, nodes // 64 - 1)
    events = cluster_failures(nodes, 0)
    return Simulation(cost, holdfast(cost), Limits(days * DAY)).run(events)


def peak_bytes(times: int, stream: EventStream) -> int:
    tracemalloc.start()
    cost = linear_cost(48, 48_000, 240_000, COSTS, nodes_per_replica=4)
    limits = Limits(times * stream.seconds)
    Simulation(cost, holdfast(cost), limits).run(repeated(stream))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def counting(stream: EventStream) -> int:
    fleet, none = Fleet(), dict[str, int]()
    return sum(len(fleet.take(group, none.get).joined) for _, group in instants(stream.events))


def main() -> int:
    folder = Path(os.environ.get("HOLDFAST_DATA", ""))
    if not (folder / P3).is_file():
        print(f"HOLDFAST_DATA must name the folder that has {P3}", file=sys.stderr)
        return 2
    stream = read_stream((folder / P3).read_bytes(), P3)
    days = on_p3(stream).node_s / DAY
    seconds, floor = least(20, lambda: on_p3(stream)), least(20, lambda: counting(stream))
    print(f"p3: {days:.1f} node-days in {seconds * 1e3:.1f} ms of CPU: ", end="")
    print(f"{days / seconds:,.0f} node-days/s (bar 1,000; floor {days / floor:,.0f})")
    seconds = least(1, lambda: on_a_cluster(90))
    days = 90 * 1024
    print(
        f"1,024 nodes, 90 days: {seconds:.2f} s of CPU (bar 10): {days / seconds:,.0f} node-days/s"
    )
    first, tenth = peak_bytes(3, stream), peak_bytes(30, stream)
    print(f"peak memory, 3 and 30 times p3: {first / 1e6:.2f} and {tenth / 1e6:.2f} MB ", end="")
    print(f"({tenth / first:.2f} times; bar 1.1)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
