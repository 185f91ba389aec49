"""The best layout without failures, and the best with them, replayed under random losses.

    python -m benchmarks.lab.plan_failures [--run FILE] [--cluster CLUSTER] [--days 60] [--seeds 5]

The search runs twice: for the time of a step, and for expected goodput. Both layouts are then
replayed event by event (`benchmarks/lab/layout_replay.py`) with the same seeds. The replay draws
what the formulas of the objective assume: nodes, bursts, copies, saves, returns.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from benchmarks.lab.layout_replay import run_layout
from holdfast.config.loading.load import load_config
from holdfast.plan.cost.choice import Choice
from holdfast.plan.cost.evaluate import Problem
from holdfast.plan.cost.run_workload import workload_of
from holdfast.plan.hardware.cluster_file import read_cluster
from holdfast.plan.hardware.devices import load_devices
from holdfast.plan.objective.goodput import GoodputModel
from holdfast.plan.objective.objectives import objective_named
from holdfast.plan.search.search import Limits, search

EXAMPLE = Path(__file__).parents[2] / "examples" / "spot-losses"


LIMITS = Limits(cp=1, tp=1, schedules=("1f1b",))
"""Of both searches. All schedules and degrees would take minutes by goodput."""


def problem_of(run_file: Path, cluster: str) -> Problem:
    """The problem of a run file on a cluster."""
    workload = workload_of(load_config(run_file).config)
    return Problem(workload, read_cluster(cluster), load_devices())


def words(choice: Choice) -> str:
    """A layout in short."""
    groups = (
        f"{g.dp_replicate} x (pp {g.pp}, dp_shard {g.dp_shard}, cp {g.cp}, tp {g.tp}, "
        f"{g.microbatches} microbatches, recompute {g.recompute[0]})"
        for g in choice.replicas
    )
    return f"{' + '.join(groups)}, microbatch {choice.microbatch}, ZeRO {choice.zero}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--run", type=Path, default=EXAMPLE / "run.yaml")
    parser.add_argument("--cluster", default=str(EXAMPLE / "cluster.yaml"))
    parser.add_argument("--days", type=float, default=60.0)
    parser.add_argument("--seeds", type=int, default=5)
    given = parser.parse_args()
    problem = problem_of(given.run, given.cluster)
    model = GoodputModel(problem)
    for name in ("time", "goodput"):
        best = search(problem, LIMITS, objective_named(name, problem)).best
        expected = model.expected(best.choice, best.cost)
        found = [
            run_layout(model, best.choice, best.cost, given.days, seed).tokens_per_s
            for seed in range(given.seeds)
        ]
        mean = statistics.mean(found)
        print(f"best by {name}: {words(best.choice)}")
        print(
            f"  without failures {expected.full:12,.0f} tokens/s, a step {best.cost.step_s:.3f} s"
        )
        print(f"  expected         {expected.tokens_per_s:12,.0f} ({expected.availability:.3f})")
        print(f"  replayed         {mean:12,.0f} ({min(found):,.0f} to {max(found):,.0f})")
        print(f"  formula against replay {expected.tokens_per_s / mean - 1:+.2%}")


if __name__ == "__main__":
    main()
