"""Which node will be lost soon: predictors on traces they have not seen, and what they are worth.

First table: each model on what came after the time that its fit has seen, and on traces that it
never saw. It has precision, recall, average precision and skill. The floor is the base rate, which
is the precision of a model that knows nothing. Bar: the chosen model is above the floor and above
the last event.

Second table: the judged time is replayed by the engine with Holdfast's own policy, without and with
prediction. It has the makespan for the same tokens, and what was done. The oracle knows the future.
The floor is the run without prediction.

    HOLDFAST_DATA=FOLDER python -m benchmarks.lab.prediction [--only NAME] [--no-replay]

Traces are found by name under the folder: SkyPilot's, Bamboo's, the lives of GCP machines, and the
failures of Los Alamos.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.lab.predicting_policy import Oracle, PredictingPolicy, Predictor
from benchmarks.runtime.interrupting import run_main
from holdfast.policy.prediction.predictor import FittedModels, NodePredictor
from holdfast.policy.prediction.response import ResponsePolicy
from holdfast_lab.commands.predict import first_unseen_second, read_histories, train_lstm
from holdfast_lab.engine.holdfast import HoldfastRules, holdfast
from holdfast_lab.engine.interfaces import CostModel, Costs, OperatingPoint, Policy, PolicyMaker
from holdfast_lab.engine.study import Case, run_case
from holdfast_lab.engine.table_cost import TableCost
from holdfast_lab.prediction.fitting import TrainingPart, fit_models, predict_all
from holdfast_lab.prediction.judging import Verdict, judge
from holdfast_lab.prediction.samples import changes_of, take_samples
from holdfast_lab.traces.events import EventStream
from holdfast_lab.traces.scenario import stream_part

UNTIL = 0.6
SKY, LANL = "churn/skypilot/", "failures/lanl/LA-UR-05-7318-failure-data-1996-2005.csv.xz"


@dataclass(frozen=True)
class Study:
    """A fit on the first part of some traces, judged on the rest and on more. system: of each
    file, for tables of outages. nodes: that the replayed job wants; 0: no replay."""

    name: str
    horizon_s: float
    past: tuple[str, ...]
    unseen: tuple[str, ...]
    nodes: int = 0
    systems: tuple[str, ...] = ()
    every_nth: int = 1


STUDIES = (
    Study("p3", 600, ("churn/bamboo/p3-trace.csv",), ("churn/bamboo/gcp-a100-us-east1-b.txt",), 12),
    Study(
        "gangs",
        1800,
        (f"{SKY}availability-16-node-us-east-2b.json",),
        (f"{SKY}availability-16-node-us-west-2a.json", f"{SKY}preemption-4-node-us-east-1f.json"),
        12,
    ),
    Study(
        "single nodes",
        3600,
        tuple(f"{SKY}availability-1-node-us-east-1{zone}.json" for zone in "acd"),
        tuple(f"{SKY}availability-1-node-us-west-2{zone}.json" for zone in "ab"),
    ),
    Study("lives", 3600, ("churn/gcp-preemptible-lifetimes/gcp_preemptible_lifetimes.csv",), ()),
    Study("failures", 7 * 86400, (LANL,), (LANL, LANL, LANL), 0, ("20", "18", "19", "2"), 4),
)


def load(folder: Path, study: Study) -> tuple[list[EventStream], list[EventStream]]:
    """(the traces of the fit, those that it never sees)."""
    names = [*study.past, *study.unseen]
    streams = read_histories([folder / name for name in names], None, study.systems or None, 0)
    return streams[: len(study.past)], streams[len(study.past) :]


# --- first table --------------------------------------------------------------------------------
def judged(fit: FittedModels, stream: EventStream, start: float, every_nth: int) -> list[Verdict]:
    asked = take_samples(stream, fit.horizon_s, start, None, every_nth)
    chances = predict_all(fit.models, fit.bilstm, asked, fit.horizon_s)
    return [judge(name, asked, row, fit.verdicts[name].threshold) for name, row in chances.items()]


def print_verdicts(fit: FittedModels, found: Sequence[Verdict], label: str) -> bool:
    """Print a block; return whether the chosen model beats both floors."""
    first = found[0]
    print(
        f"\n{label}: {first.samples:,} samples, {first.losses:,} losses, "
        f"floor (base rate) {first.base_rate:.3f}"
    )
    for v in found:
        lead = "-" if v.lead_s is None else f"{v.lead_s:,.0f} s"
        mark = "*" if v.model == fit.chosen else " "
        print(
            f"  {mark} {v.model:<11} alarms {v.alarms:>6,}  precision {v.precision:5.2f}  recall "
            f"{v.recall:5.2f}  average precision {v.average_precision:6.3f}  skill {v.skill:+7.3f}"
            f"  calibration error {v.calibration_error:.3f}  lead {lead}"
        )
    of = {v.model: v.average_precision for v in found}
    is_good = of[fit.chosen] > max(first.base_rate, of["last event"])
    print(f"    {fit.chosen} against both floors: {'above' if is_good else 'NOT ABOVE'}")
    return is_good


# --- second table -------------------------------------------------------------------------------
def job_cost(nodes: int, pause_s: float) -> TableCost:
    """A state of 200 GB, sharded over 4 to `nodes` nodes, each part on one node alone."""
    costs = Costs(
        state_bytes=200e9,
        store_bandwidth=4e9,
        node_store_bandwidth=1e9,
        peer_bandwidth=2.5e9,
        save_pause_s=pause_s,
    )
    points = [
        OperatingPoint(f"{n} nodes", n, 1000.0 * n, step_s=10.0, replicas=1)
        for n in range(min(4, nodes), nodes + 1)
    ]
    return TableCost(points, costs)


@dataclass
class Forecasting:
    """Makes Holdfast's policy with a predictor, and keeps the last one."""

    rules: HoldfastRules
    predictor: Predictor
    response: ResponsePolicy
    made: PredictingPolicy | None = None

    def __call__(self, cost: CostModel) -> Policy:
        self.made = PredictingPolicy(holdfast(cost, self.rules), self.predictor, self.response)
        return self.made

    def deeds(self) -> str:
        assert self.made is not None
        actions, record = self.made.actions, self.made.response.record
        return (
            f"{actions['save']} saves, {actions['move']} moves, {actions['nothing']} ignored, "
            f"{record.came_true} of {record.alarms} true"
        )


def replays(fit: FittedModels, part: EventStream, nodes: int) -> list[str]:
    """The lines of one trace, for three kinds of job."""
    losses: dict[str, list[float]] = {}
    for change in changes_of(part):
        if change.kind == "lost":
            losses.setdefault(change.node, []).append(change.t_s)
    chosen = NodePredictor.of(fit)
    lines = []
    for words, peers, pause in (
        ("memory of peers, 0.1 s a save", True, 0.1),
        ("run store, 2 s a save", False, 2.0),
        ("run store, 30 s a save", False, 30.0),
    ):
        cost, rules = job_cost(nodes, pause), HoldfastRules(peers=peers)
        plain = partial(holdfast, rules=rules)
        kept = run_case(Case("", plain, cost), [part]).ledgers[0].tokens
        if not kept:
            continue
        base = makespan(plain, cost, part, 0.9 * kept)
        row = f"    {words:<30} without {base / 3600:7.2f} h"
        of: tuple[tuple[str, Predictor, float], ...] = (
            (fit.chosen, chosen, chosen.threshold),
            ("oracle", Oracle(losses), 0.5),
        )
        for label, predictor, threshold in of:
            response = ResponsePolicy(fit.horizon_s, threshold)
            policy = Forecasting(rules, predictor, response)
            seconds = makespan(policy, cost, part, 0.9 * kept)
            row += f" | {label} {seconds / base - 1:+.2%}: {policy.deeds()}"
        lines.append(row)
    return lines


def makespan(policy: PolicyMaker, cost: TableCost, part: EventStream, tokens: float) -> float:
    return run_case(Case("", policy, cost), [part], tokens).ledgers[0].wall_s


def main() -> None:
    """Print both tables; exit 1 where a bar was missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="a study's name")
    parser.add_argument("--no-replay", action="store_true")
    given = parser.parse_args()
    folder = Path(os.environ.get("HOLDFAST_DATA", ""))
    if not (folder / STUDIES[0].past[0]).is_file():
        print(
            "no real traces: set HOLDFAST_DATA to a folder with churn/bamboo/p3-trace.csv "
            "(github.com/uclasystem/bamboo) and churn/skypilot (skypilot-org/spot-traces)"
        )
        sys.exit(2)
    good = []
    for study in STUDIES:
        if given.only not in ("", study.name):
            continue
        past, unseen = load(folder, study)
        parts = [TrainingPart(s, UNTIL * s.seconds, study.every_nth) for s in past]
        fit = fit_models(parts, study.horizon_s, train_lstm)
        print(
            f"\n== {study.name}: horizon {study.horizon_s:g} s, fitted to the first {UNTIL:.0%}, "
            f"chosen in validation: {fit.chosen}"
        )
        for stream in (*past, *unseen):
            start = (
                first_unseen_second(fit, stream) if any(stream is each for each in past) else 0.0
            )
            zones = ", ".join(stream.header.zones)
            label = f"{zones} {'later' if start else 'never seen'}"
            good.append(print_verdicts(fit, judged(fit, stream, start, study.every_nth), label))
            if study.nodes and not given.no_replay:
                part = stream_part(stream, start, stream.seconds) if start else stream
                print("\n".join(replays(fit, part, study.nodes)), flush=True)
    print(f"\n{sum(good)} of {len(good)} judged parts: the chosen model is above both floors")


if __name__ == "__main__":
    run_main(main)
