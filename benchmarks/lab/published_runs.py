"""Runs whose productive share is published, simulated from their parameters.

    python -m benchmarks.lab.published_runs
    python -m benchmarks.lab.published_runs --json

`published_runs.json` has each parameter with its source. What is not published is assumed, and has
a range. The table shows the simulated share and the published one, and if they are within 0.05.
Below it, each assumed parameter is put at both ends of its range. That shows how much the answer
rests on the assumption.

The model: interruptions of the job come at random (Poisson). Each loses the work since the last
save. The run waits for what replaces the node, notices, and starts again.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.runtime.interrupting import run_main
from holdfast.policy.saving.tiers import DISK
from holdfast_lab.engine.interfaces import (
    NOTHING,
    SAVE,
    STAY,
    Change,
    CostModel,
    Costs,
    Decision,
    SavePlan,
    TierSave,
    Transition,
    View,
)
from holdfast_lab.engine.loop import Limits, Simulation
from holdfast_lab.engine.study import Estimate, estimate
from holdfast_lab.engine.table_cost import linear_cost
from holdfast_lab.traces.events import TraceEvent

FILE = Path(__file__).with_suffix(".json")
SEEDS = 40
BAR = 0.05
DAY = 86_400.0
DEFAULTS = {"outages_h": [], "evaluation_share": 0.0, "replace_s": 0.0}


@dataclass
class RestartFromSave:
    """Saves at a fixed interval; after a loss all start again from the last save."""

    cost: CostModel
    interval_s: float
    save_s: float
    pause_s: float
    name: str = "restart"

    def decide(self, view: View, change: Change) -> Decision:
        point = self.cost.point(len(view.nodes))
        pauses = (("recovery", self.pause_s),)
        if change.lost:
            return Decision(Transition(None, (), SAVE, reason="restart"))
        if view.point is None and point is not None:
            return Decision(Transition(point, pauses if view.now else (), NOTHING))
        return STAY

    def saves(self, view: View) -> SavePlan:
        return SavePlan((TierSave(DISK, self.interval_s, self.save_s),))

    def slowdown(self, view: View) -> float:
        return 1.0


def history(values: Mapping[str, Any], seed: int) -> Iterator[TraceEvent]:
    """The job is one node here: what interrupts it takes it away until it is replaced."""
    draw = random.Random(f"{seed}/published")
    end = values["days"] * DAY
    outages = sorted((draw.random() * end, hours * 3600) for hours in values["outages_h"])
    yield TraceEvent(0.0, "join", "job", value=1.0)
    at = 0.0
    rate = values["interruptions_per_day"] / DAY
    coming = draw.expovariate(rate)
    while True:
        begins, lasts = coming, values["replace_s"]
        if outages and outages[0][0] < coming:
            begins, lasts = outages.pop(0)
        else:
            coming += draw.expovariate(rate)
        begins = max(begins, at)  # nothing breaks that is broken
        if begins >= end:
            return
        at = begins + max(lasts, 1e-3)
        yield TraceEvent(begins, "fail", "job", value=lasts)
        yield TraceEvent(at, "recover", "job", value=1.0)


def share(values: Mapping[str, Any], seeds: int = SEEDS) -> Estimate:
    """Productive share of the wall time."""
    cost = linear_cost(1, 1.0, 0.0, Costs())
    found = []
    for seed in range(seeds):
        pause = values["detection_s"] + values["restart_s"]
        policy = RestartFromSave(cost, values["save_interval_s"], values["save_s"], pause)
        simulation = Simulation(cost, policy, Limits(values["days"] * DAY))
        ledger = simulation.run(history(values, seed))
        found.append(ledger.goodput * (1 - values["evaluation_share"]))
    return estimate(found)


def values_of(parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {**DEFAULTS, **{name: each["value"] for name, each in parameters.items()}}


def rows() -> Iterator[dict[str, Any]]:
    for name, run in json.loads(FILE.read_text("utf-8")).items():
        values = values_of(run["parameters"])
        found = share(values)
        ranges = {
            key: [share({**values, key: end}, 10).mean for end in each["range"]]
            for key, each in run["parameters"].items()
            if "range" in each
        }
        yield {
            "run": name,
            "of": run["of"],
            "published": run["published"],
            "simulated": found.mean,
            "interval": [found.low, found.high],
            "holds": abs(found.mean - run["published"]) <= BAR,
            "assumed": {
                key: {**run["parameters"][key], "share_at_ends": ends}
                for key, ends in ranges.items()
            },
        }


def main() -> int:
    parser = argparse.ArgumentParser(description="published runs, simulated")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = list(rows())
    if given.json:
        print(json.dumps(found, indent=1))
        return 0
    print(f"{'run':<26}published  simulated (95 %)        within {BAR}")
    for row in found:
        low, high = row["interval"]
        print(f"{row['run']:<26}{row['published']:<11.2f}{row['simulated']:.3f} ", end="")
        print(f"[{low:.3f}, {high:.3f}]   {'yes' if row['holds'] else 'NO'}")
    print("\nassumed, with its range, and the share at both ends:")
    for row in found:
        for key, each in row["assumed"].items():
            low, high = each["range"]
            one, other = each["share_at_ends"]
            print(f"  {row['run']:<26}{key:<24}{each['value']:>9g}  [{low:g}, {high:g}]", end="")
            print(f" -> {one:.3f}, {other:.3f}")
    return 0


if __name__ == "__main__":
    run_main(main)
