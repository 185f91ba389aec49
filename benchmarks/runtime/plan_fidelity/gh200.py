"""The planner against 27 plans that were measured on 1 to 64 nodes of four GH200.

    python -m benchmarks.runtime.plan_fidelity.gh200 [--folder FOLDER] [--splits 500]

Its input is a measured profile of each layer. The prediction is that of the product's `Evaluator`.
Constants are fitted on a third of the trusted plans (every third by name), and all figures are of
the rest. `--splits` draws other thirds, and prints the spread.

Seven constants are fitted. Messages between stages have a latency and a bandwidth, the all-reduce
has its own. A step pays a share of launches. Memory has the bytes of a context and a share of
fragmentation.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from benchmarks.runtime.plan_fidelity.sailor import (
    DEVICE,
    DOUBTFUL,
    DOUBTFUL_MEMORY,
    FOLDER,
    SEQUENCE,
    Plan,
    Sailor,
    read_sailor,
)
from holdfast.errors import UserError
from holdfast.plan.cost.collectives import allreduce_s
from holdfast.plan.cost.evaluate import Evaluator, Problem, StepCost
from holdfast.plan.cost.group_links import group_links
from holdfast.plan.cost.layer_times import Part
from holdfast.plan.hardware.cluster import Cluster, NodePool
from holdfast.plan.hardware.devices import load_devices
from holdfast.plan.hardware.link import Link
from holdfast.plan.memory.stage_bytes import MemoryOverhead

LATENCIES = (0.0, 0.5e-3, 1e-3)
BANDWIDTHS = (20e9, 25e9, 30e9, 35e9, 40e9, 50e9)
LAUNCH_SHARES = (1.0, 0.9, 0.8)
REDUCE_LATENCIES = (0.0, 0.1e-3, 0.2e-3, 0.5e-3, 1e-3)
REDUCE_BANDWIDTHS = tuple(each * 1e9 for each in range(6, 21, 2))
CONTEXTS = tuple(each * 0.25e9 for each in range(12, 23))
FRAGMENTATIONS = tuple(each / 100 for each in range(16))
_INSIDE = Link(5e-6, 150e9)

Passing = tuple[float, float, float]
"""Latency and bandwidth of messages, share of launches."""


@dataclass(frozen=True)
class Constants:
    """What was fitted."""

    passing: Passing
    reduce: Link
    overhead: MemoryOverhead


@dataclass(frozen=True)
class Predictions:
    """Of one plan, for all values of the constants. steps: seconds without the all-reduce. summed:
    bytes of the all-reduce. memory: (state, the rest) of each stage."""

    plan: Plan
    steps: Mapping[Passing, float]
    summed: float
    memory: tuple[tuple[float, float], ...]

    def step_error(self, constants: Constants, is_reduce_given: bool) -> float:
        """Signed, in percent of the measured step."""
        plan = self.plan
        reduce = plan.reduce_s
        if not is_reduce_given:
            reduce = allreduce_s(constants.reduce, self.summed, plan.replicas)
        return 100 * ((self.steps[constants.passing] + reduce) / plan.step_s - 1)

    def memory_error(self, overhead: MemoryOverhead) -> float:
        found = max(
            state + passing * (1 + overhead.fragmentation) for state, passing in self.memory
        )
        return 100 * ((overhead.context + found) / self.plan.peak_bytes - 1)


def problem_of(sailor: Sailor, plan: Plan, passing: Passing) -> Problem:
    """The plan's cluster and model, as the product takes them."""
    latency, bandwidth, share = passing
    pool = NodePool(DEVICE, plan.nodes, 4, DEVICE, _INSIDE, Link(latency, bandwidth))
    workload = sailor.workload(plan)
    return Problem(
        workload,
        Cluster((pool,)),
        load_devices(),
        replace(sailor.times(plan, workload), launch_share=share),
        overhead=MemoryOverhead(0.0, 0.0),
        waits_for_sends=True,
        hides_gradients=False,
    )


def predictions_of(sailor: Sailor, plan: Plan) -> Predictions:
    steps = dict[Passing, float]()
    for passing in product(LATENCIES, BANDWIDTHS, LAUNCH_SHARES):
        cost = Evaluator(problem_of(sailor, plan, passing)).cost(plan.choice)
        steps[passing] = cost.step_s - cost.parts["gradients"]
    return Predictions(plan, steps, _summed(cost), _memory(cost))


def _summed(cost: StepCost) -> float:
    return max(stage.gradients for group in cost.groups for stage in group.memory)


def _memory(cost: StepCost) -> tuple[tuple[float, float], ...]:
    return tuple(
        (
            stage.weights + stage.gradients + stage.optimizer,
            stage.activations + stage.logits + stage.buffers,
        )
        for group in cost.groups
        for stage in group.memory
    )


def fit(rows: Sequence[Predictions]) -> Constants:
    """The constants of least mean error on these rows."""
    timed = [row for row in rows if row.plan.name not in DOUBTFUL]
    held = [row for row in rows if row.plan.name not in DOUBTFUL_MEMORY]
    unknown = Constants((0, 0, 0), Link(0, 1), MemoryOverhead())
    passing = min(
        timed[0].steps,
        key=lambda each: _mean(
            row.step_error(replace(unknown, passing=each), True) for row in timed
        ),
    )
    reduce = min(
        (Link(*each) for each in product(REDUCE_LATENCIES, REDUCE_BANDWIDTHS)),
        key=lambda each: _mean(
            100
            * (allreduce_s(each, row.summed, row.plan.replicas) - row.plan.reduce_s)
            / row.plan.step_s
            for row in timed
        ),
    )
    overhead = min(
        (MemoryOverhead(*each) for each in product(FRAGMENTATIONS, CONTEXTS)),
        key=lambda each: _mean(row.memory_error(each) for row in held),
    )
    return Constants(passing, reduce, overhead)


def _mean(errors: Iterator[float]) -> float:
    return statistics.fmean(map(abs, errors))


def textbook_error(sailor: Sailor, plan: Plan) -> float:
    """The floor. The first microbatch takes the sum of the stages' times, each further one that of
    the slowest stage. The update and the measured all-reduce follow."""
    problem = problem_of(sailor, plan, (0.0, 1e18, 1.0))
    workload, group = problem.workload, plan.choice.replicas[0]
    assert problem.times is not None
    part = Part(plan.microbatch * SEQUENCE, SEQUENCE, plan.tp, sequence_parallel=False)
    links = group_links(problem.cluster, group, 0, plan.replicas)
    times = {
        kind: problem.times.of(kind, part, problem.devices[DEVICE], links)
        for kind in workload.kinds
    }
    passes, updates, first = [], [], 0
    for number in plan.stages:
        own = [times[layer] for layer in workload.layers[first : first + number]]
        passes.append(sum(each.forward + each.backward for each in own))
        updates.append(sum(each.update or 0.0 for each in own))
        first += number
    found = sum(passes) + (plan.microbatches - 1) * max(passes) + max(updates)
    return 100 * ((found + plan.reduce_s) / plan.step_s - 1)


@dataclass(frozen=True)
class Errors:
    """Signed, in percent, by plan: step with the measured all-reduce, step with the predicted one,
    peak memory."""

    given: Mapping[str, float]
    predicted: Mapping[str, float]
    memory: Mapping[str, float]


def errors_of(rows: Sequence[Predictions], constants: Constants) -> Errors:
    return Errors(
        {row.plan.name: row.step_error(constants, True) for row in rows},
        {row.plan.name: row.step_error(constants, False) for row in rows},
        {row.plan.name: row.memory_error(constants.overhead) for row in rows},
    )


def is_trusted(row: Predictions) -> bool:
    return row.plan.name not in DOUBTFUL


def is_memory_trusted(row: Predictions) -> bool:
    return row.plan.name not in DOUBTFUL_MEMORY


def fixed_third(rows: Sequence[Predictions]) -> list[Predictions]:
    """The plans that constants are fitted on: every third trusted one by name."""
    return [row for row in rows if is_trusted(row)][1::3]


def random_thirds(
    rows: Sequence[Predictions], number: int
) -> list[tuple[float, float, float, float, float]]:
    """Errors on the rest for so many other thirds. Of each: mean and median with the measured
    all-reduce, mean and median with the predicted one, mean of memory."""
    chance, found = random.Random(0), []
    trusted = [row for row in rows if is_trusted(row)]
    for _ in range(number):
        fitted = chance.sample(trusted, len(trusted) // 3)
        rest = [row for row in trusted if row not in fitted]
        errors = errors_of(rest, fit(fitted))
        memory = [errors.memory[row.plan.name] for row in rest if is_memory_trusted(row)]
        given, predicted = list(errors.given.values()), list(errors.predicted.values())
        found.append((*_mean_median(given), *_mean_median(predicted), _mean(iter(memory))))
    return found


def _mean_median(errors: Sequence[float]) -> tuple[float, float]:
    sizes = [abs(each) for each in errors]
    return statistics.fmean(sizes), statistics.median(sizes)


def _summary(errors: Sequence[float]) -> str:
    mean, median = _mean_median(errors)
    worst = max(map(abs, errors))
    return (
        f"{len(errors):4} {mean:6.1f} {median:6.1f} {worst:6.1f} {statistics.fmean(errors):+7.1f}"
    )


def report(sailor: Sailor, folder: Path, splits: int) -> Iterator[str]:
    """The lines to print."""
    rows = [predictions_of(sailor, plan) for plan in sailor.plans]
    fitted = fixed_third(rows)
    constants = fit(fitted)
    latency, bandwidth, share = constants.passing
    yield f"fitted on {len(fitted)} of {sum(map(is_trusted, rows))} trusted plans:"
    yield f"  messages {latency * 1e3:.1f} ms and {bandwidth / 1e9:.0f} GB/s"
    yield f"  launches: a step pays {share:.0%} of what a small microbatch takes beyond its share"
    reduce, overhead = constants.reduce, constants.overhead
    yield f"  all-reduce {reduce.latency_s * 1e3:.1f} ms, {reduce.bandwidth / 1e9:.0f} GB/s"
    yield f"  context {overhead.context / 1e9:.1f} GB, fragmentation {overhead.fragmentation:.0%}"
    yield ""
    yield f"{'error in percent':54}rows   mean median    max  signed"
    yield from _sets(rows, fitted, constants, sailor)
    yield from _of_other_planners(folder)
    yield ""
    yield from _each(rows, fitted, constants)
    yield ""
    yield from _spread(random_thirds(rows, splits))


def _sets(
    rows: Sequence[Predictions], fitted: Sequence[Predictions], constants: Constants, sailor: Sailor
) -> Iterator[str]:
    rest = [row for row in rows if row not in fitted]
    sets = (
        ("trusted plans that were not fitted on", [row for row in rest if is_trusted(row)]),
        (
            "the same, and the two launch-bound ones (the 24 of other planners' tables)",
            [row for row in rest if is_trusted(row) or row.plan.nodes == 1],
        ),
        ("all plans that were not fitted on", rest),
        ("all plans", list(rows)),
    )
    for name, own in sets:
        errors = errors_of(own, constants)
        yield name
        yield f"  {'step, all-reduce given':52}{_summary(list(errors.given.values()))}"
        yield f"  {'step, all-reduce predicted':52}{_summary(list(errors.predicted.values()))}"
        floor = [textbook_error(sailor, row.plan) for row in own]
        yield f"  {'floor: textbook step, all-reduce given':52}{_summary(floor)}"
        yield f"  {'peak memory':52}{_summary(list(errors.memory.values()))}"
        memory = [errors.memory[row.plan.name] for row in own if is_memory_trusted(row)]
        yield f"  {'peak memory without doubtful ones':52}{_summary(memory)}"


def _of_other_planners(folder: Path) -> Iterator[str]:
    """What other planners reach on these plans with the same profiles."""
    path = folder / "other-planners-errors.txt"
    if not path.is_file():
        return
    yield "other planners, all plans"
    for line in path.read_text("utf-8").splitlines():
        words = line.split()
        if "FAILED" in words or "mean" not in words or int(words[4]) < 2:
            continue
        model, planner, kind, _, number, _, mean, _, median, _, worst = words[:11]
        name = f"{planner}, {'step' if kind == 'time' else 'peak memory'}, {model}"
        yield f"  {name:52}{number:>4} {mean:>6} {median:>6} {worst:>6}"


def _each(
    rows: Sequence[Predictions], fitted: Sequence[Predictions], constants: Constants
) -> Iterator[str]:
    errors = errors_of(rows, constants)
    yield "signed errors in percent       given  predicted  memory   (f: fitted on)"
    for row in sorted(rows, key=lambda each: -abs(errors.given[each.plan.name])):
        name = row.plan.name
        notes = [DOUBTFUL.get(name, ""), DOUBTFUL_MEMORY.get(name, "")]
        said = "; ".join(note for note in dict.fromkeys(notes) if note)
        mark = "f" if row in fitted else " "
        yield (
            f"  {name:26} {mark}{errors.given[name]:+7.1f} {errors.predicted[name]:+10.1f} "
            f"{errors.memory[name]:+7.1f}   {said}"
        ).rstrip()


def _spread(found: Sequence[tuple[float, float, float, float, float]]) -> Iterator[str]:
    if not found:
        return
    yield f"{len(found)} random thirds, trusted plans that were not fitted on: mean (sd; largest)"
    names = (
        "step, all-reduce given: mean",
        "step, all-reduce given: median",
        "step, all-reduce predicted: mean",
        "step, all-reduce predicted: median",
        "peak memory: mean",
    )
    for name, values in zip(names, zip(*found, strict=True), strict=True):
        deviation = statistics.pstdev(values)
        yield f"  {name:40} {statistics.fmean(values):5.1f} ({deviation:.1f}; {max(values):.1f})"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.runtime.plan_fidelity.gh200",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--folder", type=Path, default=FOLDER, help="folder of Sailor's files")
    parser.add_argument("--splits", type=int, default=500, help="random thirds to fit on")
    options = parser.parse_args(arguments)
    try:
        for line in report(read_sailor(options.folder), options.folder, options.splits):
            print(line)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
