"""What the planner predicts for this machine, against what is measured on it.

    holdfast calibrate                          first: the constants of this machine
    python -m benchmarks.runtime.plan_here two          every layout of two ranks, with real workers
    python -m benchmarks.runtime.plan_here waiting      12 seeded layouts of 4 and 8 ranks that wait
    python -m benchmarks.runtime.plan_here two --take FILE  the table of a measurement that was kept

`benchmarks/runtime/here/two_ranks.py` and `benchmarks/runtime/here/waiting_ranks.py` say how they
measure. The memory of seeded layouts is `python -m pytest -m slow
tests/runtime/training/test_memory_estimate.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.work import Work
from benchmarks.runtime.here import two_ranks
from benchmarks.runtime.here.profiled_times import ProfiledTimes, measure_profile
from benchmarks.runtime.here.waiting_ranks import drawn, step_seconds
from holdfast.plan.cost.layer_times import LayerTimes, ShapeTimes
from holdfast.plan.hardware.this_machine import detect_machine
from holdfast.plan.placing.topology_cost import Fleet

MOST_ERROR, WITHIN = 0.10, 0.05
EXPERTS = "experts"


def fleet_here() -> Fleet:
    """Exits where nothing was calibrated."""
    machine = detect_machine()
    if machine.calibration is None:
        sys.exit("this machine has no calibration: run holdfast calibrate first")
    print(machine.calibration.summary)
    return Fleet(machine.devices, machine.cluster.pools[0])


def two(given: argparse.Namespace) -> int:
    shape: dict[str, Any] = {"preset": given.preset, "vocabulary": given.vocabulary}
    shape |= {"sequence": given.sequence}
    cases = [case for case in two_ranks.CASES if not given.only or given.only in case.name]
    fleet = fleet_here()
    if given.take:
        kept = json.loads(given.take.read_text())
        profile, taken = kept["profile"], [kept["seconds"][case.name] for case in cases]
    else:
        profile, taken = measure_profile(Work(**shape), given.rounds), []
        for start in range(0, len(cases), given.together):
            some = cases[start : start + given.together]
            taken += two_ranks.measured(some, shape, given.rounds, given.steps)
            if given.keep:
                two_ranks.save(given.keep, cases[: len(taken)], taken, profile)
    measured = [two_ranks.lower_quartile(times) for times in taken]
    works = two_ranks.works(cases, shape)
    print("\nfrom shapes and the constants of the calibration alone")
    _two_table(cases, works, measured, fleet, None)
    print("\nwith the layers of this model timed alone (benchmarks/peers/profile.py)")
    times = ProfiledTimes(profile, ShapeTimes("fp32", 4.0))
    return _two_table(cases, works, measured, fleet, times)


def waiting(given: argparse.Namespace) -> int:
    cases = [drawn(seed) for seed in range(given.first, given.first + given.seeds)]
    costs, measured = [case.predicted() for case in cases], []
    for case, cost in zip(cases, costs, strict=True):
        measured.append(step_seconds(case))
        print(f"{case.name}: {cost.step_s:.3f} {measured[-1]:.3f} s", flush=True)
    parts = [
        " ".join(f"{name} {1e3 * seconds:.0f}" for name, seconds in cost.parts.items() if seconds)
        for cost in costs
    ]
    names = [case.name for case in cases]
    return table(names, [cost.step_s for cost in costs], measured, parts, choose=False)


def _two_table(
    cases: Sequence[two_ranks.Case],
    works: Sequence[Work],
    measured: Sequence[float],
    fleet: Fleet,
    times: LayerTimes | None,
) -> int:
    costs = [
        two_ranks.predicted(case, work, fleet, times)
        for case, work in zip(cases, works, strict=True)
    ]
    parts = [
        " ".join(f"{name} {1e3 * seconds:.0f}" for name, seconds in cost.parts.items() if seconds)
        for cost in costs
    ]
    return table([case.name for case in cases], [cost.step_s for cost in costs], measured, parts)


def table(
    names: Sequence[str],
    predicted: Sequence[float],
    measured: Sequence[float],
    notes: Sequence[str] = (),
    choose: bool = True,
) -> int:
    """Print it; 0 if the median error and the chosen layout are within what is asked. choose: the
    rows are layouts of one problem, and of a second one with experts."""
    print(f"load {os.getloadavg()[0]:.1f}")
    print(f"{'layout':<34}{'predicted ms':>13}{'measured ms':>13}{'error':>8}")
    errors = [p / m - 1 for p, m in zip(predicted, measured, strict=True)]
    for at, name in enumerate(names):
        ms = f"{1e3 * predicted[at]:13.1f}{1e3 * measured[at]:13.1f}"
        print(f"{name:<34}{ms}{errors[at]:>+8.1%}  {notes[at] if notes else ''}")
    median = statistics.median(map(abs, errors))
    print(f"median error {median:.1%} (asked: at most {MOST_ERROR:.0%})")
    if not choose:
        return 0 if median <= MOST_ERROR else 1
    is_near = True
    problems = [name.startswith(EXPERTS) for name in names]
    for problem in sorted(set(problems)):
        rows = [at for at, each in enumerate(problems) if each == problem]
        chosen = min(rows, key=lambda at: predicted[at])
        best = min(rows, key=lambda at: measured[at])
        behind = measured[chosen] / measured[best] - 1
        is_near = is_near and behind <= WITHIN
        print(f"chosen {names[chosen]}: {behind:+.1%} of the best measured, {names[best]}")
    return 0 if median <= MOST_ERROR and is_near else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("two", help="every layout of two ranks")
    one.add_argument("--preset", default="small")
    one.add_argument("--vocabulary", type=int, default=2048)
    one.add_argument("--sequence", type=int, default=128)
    one.add_argument("--rounds", type=int, default=12)
    one.add_argument("--steps", type=int, default=1, help="of a block")
    one.add_argument("--together", type=int, default=8, help="loops that take turns")
    one.add_argument("--only", default="", help="layouts whose name holds this")
    one.add_argument("--keep", type=Path, help="a file for the measured times")
    one.add_argument("--take", type=Path, help="measured times that were kept")
    one.set_defaults(run=two)
    many = commands.add_parser("waiting", help="seeded layouts of 4 and 8 ranks that wait")
    many.add_argument("--seeds", type=int, default=12)
    many.add_argument("--first", type=int, default=0)
    many.set_defaults(run=waiting)
    given = parser.parse_args()
    return int(given.run(given))


if __name__ == "__main__":
    sys.exit(main())
