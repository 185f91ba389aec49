"""What a run costs by the mix of machines that `holdfast cloud mix` would choose each hour.

Replays traces of availability: a run of so many node-hours with a deadline, and on-demand nodes at
three times the spot price. Against on-demand nodes alone, and against a policy that takes all spot
there is and changes to on-demand at the last moment.

    python -m benchmarks.lab.mix [--traces FOLDER]
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import DataError
from holdfast.plan.catalogue import Offer
from holdfast_lab.traces.node_changes import Trace
from holdfast_lab.traces.reading import load_trace
from holdfast_lab.traces.synthetic import spot_pool
from holdfast_platform.clouds.mix import Need, choose_mix

SPOT_PRICE, DEMAND_PRICE = 1.0, 3.0
CHANGE_H, LOSS_H = 0.01, 0.01
TICK_H = 0.25
SLACK = 1.5
"""The deadline, as a multiple of the hours that the work takes on all nodes."""
Choice = Callable[[int, Need, dict[str, int]], dict[str, int]]


@dataclass(frozen=True)
class Outcome:
    cost: float
    hours: float
    in_time: bool


def ours(spot: int, need: Need, now: dict[str, int]) -> dict[str, int]:
    offers = (
        Offer("spot", True, SPOT_PRICE, spot, losses_per_hour=0.1),
        Offer("on-demand", False, DEMAND_PRICE, need.max_nodes),
    )
    found = choose_mix(offers, need, now)
    return dict(found.nodes) if found is not None else {}


def demand_alone(spot: int, need: Need, now: dict[str, int]) -> dict[str, int]:
    return {"on-demand": need.max_nodes}


def spot_until_late(spot: int, need: Need, now: dict[str, int]) -> dict[str, int]:
    hours = need.work / need.max_nodes + 2 * need.change_h + TICK_H
    if need.hours_left <= hours:
        return {"on-demand": need.max_nodes}
    return {"spot": min(spot, need.max_nodes)} if spot else {}


def replay(counts: list[int], nodes: int, choice: Choice) -> Outcome:
    """Run through the trace from its start. counts: spot nodes that the market has, by tick."""
    work = 0.4 * len(counts) * TICK_H * nodes / SLACK
    deadline = SLACK * work / nodes
    left, cost, now = work, 0.0, dict[str, int]()
    for tick in range(4 * len(counts)):
        hour = tick * TICK_H
        if left <= 0:
            return Outcome(cost, hour, hour <= deadline + TICK_H)
        spot = counts[tick % len(counts)]
        held = {name: n for name, n in now.items() if name != "spot" or n <= spot}
        need = Need(left, max(0.0, deadline - hour), 1, nodes, LOSS_H, CHANGE_H, TICK_H)
        chosen = choice(spot, need, held)
        change = CHANGE_H if chosen != now and chosen else 0.0
        size = sum(chosen.values())
        left -= size * max(0.0, TICK_H - change)
        prices = {"spot": SPOT_PRICE, "on-demand": DEMAND_PRICE}
        cost += TICK_H * sum(n * prices[name] for name, n in chosen.items())
        now = chosen
    return Outcome(cost, 4 * len(counts) * TICK_H, False)


def sampled(trace: Trace) -> list[int]:
    """The machines that are there at each tick."""
    counts, there, at = [], 0, 0.0
    changes = iter([*trace.instants(), (trace.seconds + 1, [], [])])
    when, gone, come = next(changes)
    while at <= trace.seconds:
        while when <= at:
            there += len(come) - len(gone)
            when, gone, come = next(changes)
        counts.append(there)
        at += TICK_H * 3600
    return counts


def traces_in(folder: Path) -> list[Trace]:
    found = []
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".json", ".csv", ".txt") and path.stat().st_size < 5_000_000:
            try:
                found.append(load_trace(path.read_text("utf-8"), path.name))
            except (DataError, UnicodeDecodeError):
                continue
    repeated = ("listed changes", "intervals")  # such public files repeat another trace
    return [t for t in found if t.seconds > 4 * 3600 and t.kind not in repeated]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--traces", type=Path, default=os.environ.get("HOLDFAST_DATA"))
    given = parser.parse_args()
    traces = traces_in(Path(given.traces) / "churn") if given.traces else []
    if not traces:
        print("no real traces: set HOLDFAST_DATA to their folder; synthetic ones follow")
        traces = [spot_pool(seed) for seed in range(3)]
    print(f"{'trace':<44}{'nodes':>6}  {'ours':>7}  {'late':>7}   cost / on-demand alone")
    missed = False
    for trace in traces:
        counts = sampled(trace)
        nodes = max(1, max(counts))
        alone = replay(counts, nodes, demand_alone)
        mine, late = (replay(counts, nodes, choice) for choice in (ours, spot_until_late))
        shown = [
            f"{each.cost / alone.cost:>6.2f}{' ' if each.in_time else '!'}" for each in (mine, late)
        ]
        print(f"{trace.source[-43:]:<44}{nodes:>6}  {'  '.join(shown)}")
        missed = missed or not mine.in_time
    print("! the deadline was missed")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
