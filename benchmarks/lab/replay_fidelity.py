"""Goodput of real runs against their simulation from the same events.

    python -m benchmarks.lab.replay_fidelity [--out score] [--seeds 2] [--scenario F1,F2] [--kept]

Real runs are those of `holdfast score --level 1`: four nodes of this machine, real SIGKILL, and
steps that take time without computing. Runs that lie in --out are not repeated. The simulation is
`holdfast_lab.engine` with Holdfast's own policy. Its constants come from two calibration runs
that are not judged. They are step times by the number of nodes, and the costs of a loss, a return
and a move after a notice. The last one is the time until a new node takes part.

Each run is simulated twice. A `join` of a trace says from when a node is usable
(docs/studies/traces.md). So the first simulation gets these times from the real run. A node is
usable from the begin of the first step that has it. The second one gets the calibrated time
instead, the same for every node. The bars judge the first one.

Of F9, which no bar judges, each step of the simulation is longer by the messages that wait for
the degraded link (`benchmarks.lab.links`).

G is kept tokens over tokens of the reference table on the nodes that were there. The step in flight
at the end counts by its share, in both. error: G of the simulation relative to that of the real
run. The bars: at most 5 % on average, and 10 % at worst.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.lab.links import HOLDFAST_WAITS, with_slow_nodes
from holdfast_lab.engine.holdfast import HoldfastRules, holdfast
from holdfast_lab.engine.interfaces import CostModel, Costs, OperatingPoint, Policy
from holdfast_lab.engine.loop import Limits, Simulation
from holdfast_lab.engine.table_cost import TableCost
from holdfast_lab.score.harness.campaign import RealCampaign, step_seconds
from holdfast_lab.score.harness.harness import RunOptions, run_scenario
from holdfast_lab.score.harness.trainer import trainer_named
from holdfast_lab.score.record import (
    ReferenceTable,
    RunRecord,
    flight_tokens,
    format_record,
    history_of,
    parse_record,
)
from holdfast_lab.score.scenarios import LEVEL_1, ScenarioRun, draw_scenario, scoring_seeds
from holdfast_lab.traces.events import TraceEvent, in_order

JUDGED = ("F1", "F2", "F3", "F4", "F7", "F11", "F12")
MEAN_BAR, WORST_BAR, LEAST_PAIRS = 0.05, 0.10, 12
BATCH_TOKENS = 24.0
GRADIENT_BYTES = 4 * 577.0
"""Of the model of level 1, in float32."""


@dataclass(frozen=True)
class Constants:
    """What the simulation is given. step_s: by nodes. loss_s: from a loss to the begin of a step
    of the rest. grow_s: what a return adds to the step in which it comes. join_s: from the moment
    at which a node is there to the begin of the first step with it. move_s: the same as grow_s, of
    a departure with a notice."""

    step_s: dict[int, float]
    loss_s: float
    grow_s: float
    join_s: float
    move_s: float


def calibration_scenario() -> ScenarioRun:
    """Losses down to two nodes, their return, a notice, a join, one more loss."""
    step, events = (
        LEVEL_1.step_s,
        [TraceEvent(0.0, "join", f"n{n}", value=1.0) for n in range(1, 5)],
    )
    for at, name in ((6.3, "n4"), (14.5, "n3")):
        events.append(TraceEvent(at * step, "fail", name, value=(24 - at) * step))
        events.append(TraceEvent(24 * step, "recover", name, value=1.0))
    events.append(TraceEvent(42 * step, "notice", "n1", value=4 * step))
    events.append(TraceEvent(46 * step, "preempt", "n1"))
    events.append(TraceEvent(54 * step, "join", "n5", value=1.0))
    events.append(TraceEvent(70.6 * step, "fail", "n5", value=step * 100))
    return ScenarioRun("F0", 0, 4, 76 * step, step, in_order(events), 20 * step)


def calibrate(
    records: Sequence[RunRecord], run: ScenarioRun, reference: ReferenceTable
) -> Constants:
    """Constants from calibration runs; the step of one node is that of the reference table."""
    steps: dict[int, list[float]] = {}
    losses, grows, joins, moves = list[float](), list[float](), list[float](), list[float]()
    for record in records:
        for n, seconds in step_seconds(record).items():
            steps.setdefault(n, []).append(seconds)
    step_s = {n: BATCH_TOKENS / reference.rate(n) for n in reference.rates}
    step_s |= {n: statistics.mean(values) for n, values in steps.items()}
    for record in records:
        for event in run.events:
            if event.t_s == 0:
                continue
            after = [c for c in record.commits if c.t_s > event.t_s]
            if event.kind == "fail" and after:
                losses.append(after[0].t_s - event.t_s - step_s[after[0].workers])
            elif event.kind == "notice":
                pairs = zip(record.commits, record.commits[1:], strict=False)
                for one, two in pairs:
                    if two.t_s > event.t_s and two.workers < one.workers:
                        moves.append(two.t_s - one.t_s - step_s[two.workers])
                        break
            elif event.kind in ("join", "recover") and event.node in ("n3", "n5"):
                for one, two in zip(record.commits, record.commits[1:], strict=False):
                    if two.t_s > event.t_s and two.workers > one.workers:
                        grows.append(two.t_s - one.t_s - step_s[two.workers])
                        joins.append(one.t_s - event.t_s)
                        break
    return Constants(
        step_s,
        max(0.0, statistics.mean(losses)),
        max(0.0, statistics.mean(grows)),
        max(0.0, statistics.mean(joins)),
        max(0.0, statistics.mean(moves)),
    )


def simulated_tokens(
    run: ScenarioRun, constants: Constants, events: tuple[TraceEvent, ...]
) -> float:
    """Kept tokens of a scenario's simulation. run: compressed. events: of it, with times at which
    nodes take part."""
    points = [
        OperatingPoint(f"{n} nodes", n, BATCH_TOKENS / seconds, seconds, n)
        for n, seconds in sorted(constants.step_s.items())
    ]
    free = Costs(detection_s=0.0, start_s=0.0, communicator_s=0.0, save_pause_s=0.0)
    rungs = dict.fromkeys(range(7), constants.loss_s) | {5: constants.grow_s}
    rules = HoldfastRules(rung_s=rungs)

    def policy(cost: CostModel) -> Policy:
        return holdfast(cost, rules)

    cost = TableCost(points, free)
    ledger = Simulation(cost, policy(cost), Limits(run.seconds)).run(events)
    return ledger.tokens


def with_start_time(run: ScenarioRun, constants: Constants) -> tuple[TraceEvent, ...]:
    """The events, with returns as late as a node takes to take part, by the one constant."""
    late = {
        number: event.t_s + constants.join_s
        for number, event in enumerate(run.events)
        if _is_return(event)
    }
    return _moved(run, late)


def with_recorded_times(
    run: ScenarioRun, record: RunRecord, constants: Constants
) -> tuple[TraceEvent, ...]:
    """The events, with returns at the times at which the nodes of the real run were usable.

    A node is usable from the begin of the first step that has it. Of nodes that wait, the one that
    came first takes part first. A node that is in no step is never usable."""
    found, waiting, active = dict[int, float](), list[int](), set[str]()
    left, before = list(enumerate(run.events)), 0.0
    for commit in record.commits:
        begin = before
        while left and left[0][1].t_s < commit.t_s:
            number, event = left.pop(0)
            if event.kind == "join" and event.t_s == 0:
                active.add(event.node)
            elif _is_return(event):
                waiting.append(number)
            elif event.kind in ("fail", "preempt"):
                waiting = [n for n in waiting if run.events[n].node != event.node]
                active.discard(event.node)
                if not active:  # the first step after the loss of all nodes
                    begin = commit.t_s - constants.step_s[commit.workers]
        while waiting and commit.workers > len(active):
            number = waiting.pop(0)
            active.add(run.events[number].node)
            found[number] = max(begin, run.events[number].t_s)
        before = commit.t_s
    return _moved(run, found)


def _is_return(event: TraceEvent) -> bool:
    return event.t_s > 0 and event.kind in ("join", "recover")


def _moved(run: ScenarioRun, times: dict[int, float]) -> tuple[TraceEvent, ...]:
    """The events, with returns at `times`, by index. A return without a time, or whose node goes
    before it, is left out."""
    gone = {e.node: e.t_s for e in run.events if e.kind == "preempt"}
    events = []
    for number, event in enumerate(run.events):
        if _is_return(event):
            at = times.get(number, run.seconds)
            if at >= min(run.seconds, gone.get(event.node, run.seconds)):
                continue
            event = replace(event, t_s=at)
        events.append(event)
    there = {e.node for e in events if e.kind == "join"}
    return in_order(e for e in events if e.node in there)


def real_tokens(record: RunRecord) -> float:
    """Kept tokens, with the share of the step in flight at the end."""
    kept = history_of(record).kept
    return sum(commit.tokens for commit in kept) + flight_tokens(record)


def calibration_records(out: Path, options: RunOptions, is_kept: bool) -> list[RunRecord]:
    """Two calibration runs, made once. is_kept: those that are there, at least one."""
    records: list[RunRecord] = []
    for number in (1, 2):
        file = out / f"calibration-k{options.k:g}-{number}.json"
        if not file.exists() and is_kept and records:
            break
        if not file.exists():
            run = calibration_scenario()
            record = run_scenario(trainer_named("holdfast"), run, out / "calibrating", options)
            file.write_text(format_record(record) + "\n")
        records.append(parse_record(file.read_text(), str(file)))
    return records


@dataclass(frozen=True)
class Pair:
    """G of a real run and of its simulations. starts_told: with the times at which nodes of the
    real run were usable; False: with the calibrated time instead."""

    scenario: str
    seed: int
    real: float
    simulated: dict[bool, float]

    def error(self, starts_told: bool) -> float:
        return self.simulated[starts_told] / self.real - 1


def compare(
    records: Sequence[RunRecord], k: float, constants: Constants, reference: ReferenceTable
) -> list[Pair]:
    """One pair for each record."""
    rows = []
    for record in records:
        run = draw_scenario(record.scenario, record.seed, LEVEL_1).compressed(k)
        run = with_slow_nodes(run, constants.step_s[run.nodes], HOLDFAST_WAITS, GRADIENT_BYTES)
        ideal = reference.tokens(record.capacity, 0.0, record.seconds)
        given = {
            True: with_recorded_times(run, record, constants),
            False: with_start_time(run, constants),
        }
        found = {key: simulated_tokens(run, constants, e) / ideal for key, e in given.items()}
        rows.append(Pair(record.scenario, record.seed, real_tokens(record) / ideal, found))
    return rows


def print_pairs(pairs: Sequence[Pair]) -> bool:
    """The table and the verdict. Returns whether the bars hold with the recorded times."""
    print(f"{'':<16}{'G real':>9}  recorded starts      constant start")
    print(f"{'':<6}{'seed':>10}{'':>9}{'G':>9}{'error %':>9}{'G':>9}{'error %':>9}")
    for pair in pairs:
        print(f"{pair.scenario:<6}{pair.seed:>10}{pair.real:9.3f}", end="")
        for told in (True, False):
            print(f"{pair.simulated[told]:9.3f}{100 * pair.error(told):9.1f}", end="")
        print()
    verdict = {}
    for told, name in ((True, "recorded starts"), (False, "constant start")):
        errors = [abs(pair.error(told)) for pair in pairs]
        mean, worst = statistics.mean(errors), max(errors)
        verdict[told] = mean <= MEAN_BAR and worst <= WORST_BAR and len(pairs) >= LEAST_PAIRS
        print(
            f"{name}, {len(pairs)} runs: mean absolute error {100 * mean:.1f} % (bar 5), worst "
            f"{100 * worst:.1f} % (bar 10): {'held' if verdict[told] else 'MISSED'}"
        )
    return verdict[True]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("score"))
    parser.add_argument("--k", type=float, default=40.0)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--scenario", default=",".join(JUDGED))
    parser.add_argument("--kept", action="store_true", help="make no run; judge those in --out")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    options = RunOptions(given.k)
    calibration = calibration_records(given.out, options, given.kept)
    campaign = RealCampaign(
        trainer_named("holdfast"), given.out, options, lambda text: print(text, flush=True)
    )
    reference = campaign.reference_table()
    constants = calibrate(calibration, calibration_scenario().compressed(given.k), reference)
    steps = ", ".join(f"{n}: {s:.3f}" for n, s in sorted(constants.step_s.items()))
    print(f"step s by nodes, of {len(calibration)} calibration runs: {steps}")
    print(
        f"loss {constants.loss_s:.3f} s, return {constants.grow_s:.3f} s, until a node takes part "
        f"{constants.join_s:.2f} s, move after a notice {constants.move_s:.3f} s"
    )
    names = given.scenario.split(",")
    if given.kept:
        records = kept_records(given.out, names, given.k)
    else:
        records = campaign.records(names, scoring_seeds(given.seeds))
    return int(not print_pairs(compare(records, given.k, constants, reference)))


def kept_records(out: Path, scenarios: Sequence[str], k: float) -> list[RunRecord]:
    """The runs of some scenarios that lie in a folder."""
    files = (f for name in scenarios for f in out.glob(f"runs/holdfast-k{k:g}-{name}-*.json"))
    return [parse_record(f.read_text(), str(f)) for f in sorted(files) if "-off" not in f.name]


if __name__ == "__main__":
    sys.exit(main())
