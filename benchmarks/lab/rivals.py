"""Policies of other trainers and ours on the same traces under one cost model.

    python -m benchmarks.lab.rivals [p3] [a100] [parcae] [acute] [--seeds 10]

p3      BERT-large on the p3 trace, with the throughput that Parcae's authors measured for each
        layout. Their saved decisions run under the same cost model.
a100    GPT-6.7B on the GCP A100 trace, with the closed form of a pipeline. Three rules for which
        nodes go, and one table of kept tokens against ours by rule.
parcae  how far our reading of Parcae agrees with its saved decisions.
acute   checkpoint time, pause and makespan by hierarchy of levels, interval and size.

A seed is another assignment of nodes to ranks, and another moment of each departure within a step
of the trace. If the trace has counts only, other nodes go. Intervals are of the mean, at
95 %. HOLDFAST_DATA names the folder of the traces.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.lab import rival_workloads as workloads
from benchmarks.lab.rival_workloads import (
    BERT_MIGRATION,
    GPT_MIGRATION,
    HIERARCHIES,
    MULTI_LEVEL,
    GridCost,
)
from benchmarks.lab.saved_parcae import (
    layout_changes,
    offline_decisions,
    parse_saved,
    saved_chooser,
)
from holdfast.plan.hardware.tables import read_rows
from holdfast_lab.engine.holdfast import HoldfastRules, holdfast
from holdfast_lab.engine.interfaces import CostModel, Costs, Policy, PolicyMaker
from holdfast_lab.engine.ledger import Ledger
from holdfast_lab.engine.loop import Limits, Simulation
from holdfast_lab.engine.table_cost import linear_cost
from holdfast_lab.rivals.acute import HierarchyPolicy
from holdfast_lab.rivals.bamboo import BambooPolicy
from holdfast_lab.rivals.liveput import LiveputOptimizer, SharedMigration
from holdfast_lab.rivals.parcae import Chooser, MinutelyPolicy, forecast_chooser
from holdfast_lab.rivals.registry import policy_named
from holdfast_lab.rivals.torchft import TorchftPolicy
from holdfast_lab.rivals.varuna import VarunaPolicy
from holdfast_lab.traces.events import EventStream, in_order
from holdfast_lab.traces.node_changes import ReadOptions, Victims
from holdfast_lab.traces.reading import read_stream

P3, A100 = "churn/bamboo/p3-trace.csv", "churn/bamboo/gcp-a100-us-east1-b.txt"
SAVED = {
    workloads.BERT_LARGE: "churn/parcae/liveput_res/bert_p3_gbs1024_mbs8.json",
    workloads.GPT_6_7B: "churn/parcae/liveput_res/gpt-6.7b_gbs64_mbs1.json",
}
TABLE = Path(workloads.__file__).with_name("parcae_throughput.csv")


# --- traces -------------------------------------------------------------------------------------
def data_folder() -> Path:
    folder = os.environ.get("HOLDFAST_DATA")
    if not folder or not (Path(folder) / P3).exists():
        sys.exit(
            "benchmarks.lab.rivals needs the public traces of Bamboo and Parcae (churn/bamboo, "
            "churn/parcae); set HOLDFAST_DATA to the folder that holds them"
        )
    return Path(folder)


def trace_of(path: Path, seed: int, victims: Victims = "random") -> EventStream:
    """The trace as one seed sees it: other names, hence ranks, and other moments within a step."""
    made = read_stream(path.read_bytes(), path.name, ReadOptions(seed=seed, victims=victims))
    draw = random.Random(f"{seed}/rivals")
    names = sorted({event.node for event in made.events})
    other = dict(zip(names, draw.sample(range(len(names)), len(names)), strict=True))
    step = min(made.header.step_s or 60.0, 60.0)
    shifts: dict[float, float] = {}
    before = 0.0
    for event in made.events:
        if event.t_s not in shifts:
            earliest = max(before + 1e-3, event.t_s - step * draw.random())
            is_loss = event.kind == "preempt"
            shifts[event.t_s] = min(event.t_s, earliest) if is_loss else event.t_s
            before = event.t_s
    events = [
        replace(event, t_s=shifts[event.t_s], node=f"n{other[event.node]:05d}")
        for event in made.events
    ]
    return EventStream(made.header, in_order(events))


def simulated(cost: CostModel, maker: PolicyMaker, stream: EventStream) -> Ledger:
    run = Simulation(cost, maker(cost), Limits(stream.seconds))
    return run.run(stream.events)


# --- one table ----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Entry:
    """A row: who, and what makes the policy for a seed."""

    name: str
    maker: Callable[[int], PolicyMaker]


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """(mean, half of its 95 % interval)."""
    if len(values) < 2:
        return values[0], 0.0
    return statistics.mean(values), 1.96 * statistics.stdev(values) / len(values) ** 0.5


def rows_of(
    cost: CostModel, entries: Sequence[Entry], streams: Sequence[EventStream]
) -> dict[str, list[Ledger]]:
    return {
        entry.name: [simulated(cost, entry.maker(seed), s) for seed, s in enumerate(streams)]
        for entry in entries
    }


def against(ledgers: Sequence[Ledger], ours: Sequence[Ledger]) -> tuple[float, float]:
    """Kept tokens of a policy for each of ours, with half of the 95 % interval."""
    return mean_interval([a.tokens / b.tokens for a, b in zip(ledgers, ours, strict=True)])


def show(found: Mapping[str, Sequence[Ledger]], ours: str = "holdfast") -> None:
    print(
        f"{'policy':<34}{'kept Mtokens':>20}{'of ideal':>9}{'goodput':>9}{'lost s':>9}"
        f"{'changes':>9}{'$/Gtoken':>10}  against ours"
    )
    ordered = sorted(found, key=lambda n: -statistics.mean(led.tokens for led in found[n]))
    for name in ordered:
        ledgers = found[name]
        mean, half = mean_interval([ledger.tokens / 1e6 for ledger in ledgers])
        ratio, spread = against(ledgers, found[ours])
        lost = statistics.mean(ledger.lost_s.mean for ledger in ledgers)
        cells = (
            f"{mean:,.1f} +- {half:,.1f}".rjust(20),
            f"{statistics.mean(ledger.g for ledger in ledgers):9.3f}",
            f"{statistics.mean(ledger.goodput for ledger in ledgers):9.3f}",
            f"{lost:9.1f}",
            f"{statistics.mean(ledger.changes for ledger in ledgers):9.0f}",
            f"{1e9 * statistics.mean(led.usd / max(1.0, led.tokens) for led in ledgers):10.2f}",
        )
        verdict = "" if name == ours else f"  {ratio:.3f} +- {spread:.3f}"
        if not name.startswith(ours) and ratio - spread > 1:
            verdict += "  OURS LOSES"
        print(f"{name:<34}{''.join(cells)}{verdict}")
    labels = ("checkpoint", "rework", "recovery")
    for name in (each for each in ordered if each.startswith(ours) or each == "parcae"):
        means = (statistics.mean(led.seconds[label] for led in found[name]) for label in labels)
        spent = ", ".join(f"{label} {s:,.0f} s" for label, s in zip(labels, means, strict=True))
        print(f"  {name}: {spent}")


def plain(name: str) -> Entry:
    return Entry(name, lambda seed: policy_named(name))


def best_depth(
    name: str, cost: GridCost, made: Callable[[int], PolicyMaker], streams: Sequence[EventStream]
) -> Entry:
    """The depth of pipelines that is best on the first stream: known only afterwards. Tried are
    those of the fastest layouts for any number of nodes, and 8."""
    points = (cost.point(nodes) for nodes in range(1, cost.wanted + 1))
    known = {pp for _, pp in cost.shapes}
    depths = sorted(({p.nodes_per_replica for p in points if p} | {8}) & known)
    scored = {pp: simulated(cost, made(pp), streams[0]).tokens for pp in depths}
    best = max(scored, key=lambda pp: scored[pp])
    return Entry(f"{name}, {best} stages (best)", lambda seed: made(best))


SNAPSHOT_S = 20.0


def peers(cost: CostModel) -> Policy:
    """Ours with snapshots on neighbours at an interval that is set by hand."""
    return holdfast(cost, HoldfastRules(peer_interval_s=SNAPSHOT_S))


def staged(cost: CostModel) -> Policy:
    """Snapshots on a node that stays, as Parcae has its server, at the policy's interval."""
    return holdfast(cost, HoldfastRules(staged=True))


def entries_for(cost: GridCost, streams: Sequence[EventStream]) -> list[Entry]:
    optimizer = LiveputOptimizer(cost, SharedMigration(cost.costs))

    def parcae(seed: int) -> PolicyMaker:
        return lambda _: MinutelyPolicy(cost, forecast_chooser(cost, optimizer, seed=seed))

    return [
        Entry("holdfast", lambda seed: holdfast),
        Entry("holdfast, peers every 20 s", lambda seed: peers),
        Entry("holdfast, staging node", lambda seed: staged),
        plain("restart"),
        plain("torchft"),
        best_depth("torchft", cost, lambda pp: lambda _: TorchftPolicy(cost, pp), streams),
        plain("bamboo"),
        best_depth("bamboo", cost, lambda pp: lambda _: BambooPolicy(cost, pp), streams),
        plain("varuna"),
        Entry("varuna without its wait", lambda seed: lambda _: VarunaPolicy(cost, 0.0)),
        Entry("parcae", parcae),
    ]


def saved_entry(name: str, cost: GridCost, chooser: Chooser) -> Entry:
    return Entry(name, lambda seed: lambda _: MinutelyPolicy(cost, chooser))


def p3(folder: Path, seeds: int) -> None:
    rows = read_rows(TABLE)
    streams = [trace_of(folder / P3, seed) for seed in range(seeds)]
    for model, file in SAVED.items():
        cost = workloads.measured_grid(rows, model)
        saved = parse_saved((folder / file).read_text("utf-8"), file)
        entries = entries_for(cost, streams)
        for kind, decisions in saved.by_kind.items():
            chooser = saved_chooser(decisions)
            entries.append(saved_entry(f"parcae's saved: {kind}", cost, chooser))
        print(f"\n{model} on the p3 trace, {streams[0].seconds / 3600:.2f} h, {seeds} seeds")
        show(rows_of(cost, entries, streams))


def a100(folder: Path, seeds: int) -> None:
    cost = workloads.a100_grid()
    rules: tuple[Victims, ...] = ("random", "lifo", "fifo")
    by_rule: list[dict[str, list[Ledger]]] = []
    for victims in rules:
        streams = [trace_of(folder / A100, seed, victims) for seed in range(seeds)]
        print(
            f"\nGPT-6.7B on the GCP A100 trace, {streams[0].seconds / 3600:.2f} h, victims "
            f"{victims}, {seeds} seeds"
        )
        found = rows_of(cost, entries_for(cost, streams), streams)
        show(found)
        # The best depth may differ between rules.
        by_rule.append({re.sub(r", \d+ stages", "", name): found[name] for name in found})
    print(f"\n{'kept tokens against ours':<34}" + "".join(f"{rule:>17}" for rule in rules))
    for name in by_rule[0]:
        ratios = (against(found[name], found["holdfast"]) for found in by_rule)
        print(f"{name:<34}" + "".join(f"{mean:8.3f} +- {half:.3f}" for mean, half in ratios))


# --- Parcae's decisions -------------------------------------------------------------------------
def parcae(folder: Path) -> None:
    rows = read_rows(TABLE)
    migrations = {workloads.BERT_LARGE: BERT_MIGRATION, workloads.GPT_6_7B: GPT_MIGRATION}
    print("\nminutes on which our reading of Parcae and its saved decisions agree; layout changes")
    for model, file in SAVED.items():
        cost = workloads.measured_grid(rows, model)
        saved = parse_saved((folder / file).read_text("utf-8"), file)
        points = (cost.point(before + new - gone) for before, new, gone in saved.intervals)
        best = [(p.replicas, p.nodes_per_replica) if p else (1, 1) for p in points]
        _agreement(model, "throughput", best, saved.by_kind["throughput"])
        for kind, knows in (("liveput, future known", True), ("liveput, forecast", False)):
            optimizer = LiveputOptimizer(cost, migrations[model])
            mine = offline_decisions(saved, optimizer, 12, knows=knows)
            _agreement(model, kind, mine, saved.by_kind[kind])


def _agreement(
    model: str, kind: str, mine: Sequence[tuple[int, int]], theirs: Sequence[tuple[int, int]]
) -> None:
    equal = sum(a == b for a, b in zip(mine, theirs, strict=True)) / len(theirs)
    print(
        f"{model:<10}{kind:<24}{equal:6.1%} of {len(theirs)} minutes; layout changes "
        f"{layout_changes(mine)} against {layout_changes(theirs)}"
    )


# --- ACUTE --------------------------------------------------------------------------------------
def acute(folder: Path, seeds: int) -> None:
    streams = [trace_of(folder / P3, seed) for seed in range(seeds)]
    for nbytes in (667e6, 1.31e9):
        print(f"\n{nbytes / 1e6:.0f} MB: hierarchies, and their closed forms")
        base = MULTI_LEVEL
        for each in HIERARCHIES:
            shorter = 1 - each.checkpoint_s(nbytes) / base.checkpoint_s(nbytes)
            pause = 1 - each.pause_s(nbytes) / base.pause_s(nbytes)
            print(
                f"  {each.name:<68} checkpoint {each.checkpoint_s(nbytes):7.2f} s "
                f"({-shorter:+7.1%}), "
                f"pause {1e3 * each.pause_s(nbytes):6.1f} ms ({-pause:+7.1%})"
            )
        print(
            "  interval s: pause share of the makespan without failures | kept tokens on the p3 "
            "trace, of the ideal"
        )
        costs = Costs(state_bytes=nbytes, peer_bandwidth=1.25e9)
        cost = linear_cost(32, 32_000.0, 64_000.0, costs)
        for each in HIERARCHIES:
            print(f"  {each.name}")
            print("   ", "; ".join(_acute_cell(cost, each.name, i, nbytes, streams) for i in SWEEP))


SWEEP = (1.0, 4.0, 15.0, 60.0, 240.0, 960.0)


def _acute_cell(
    cost: CostModel, name: str, interval: float, nbytes: float, streams: Sequence[EventStream]
) -> str:
    hierarchy = next(each for each in HIERARCHIES if each.name == name)
    share = hierarchy.pause_s(nbytes) / (interval + hierarchy.pause_s(nbytes))
    kept = [
        simulated(cost, lambda c: HierarchyPolicy(c, hierarchy, interval), stream).g
        for stream in streams
    ]
    mark = "*" if share < 1e-4 else ""
    return f"{interval:g}: {100 * share:.4f} %{mark} | {statistics.mean(kept):.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parts = ("p3", "a100", "parcae", "acute")
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(parts)}; all if none is named")
    parser.add_argument("--seeds", type=int, default=10)
    given = parser.parse_args()
    folder = data_folder()
    wanted = given.parts or parts
    if "p3" in wanted:
        p3(folder, given.seeds)
    if "a100" in wanted:
        a100(folder, given.seeds)
    if "parcae" in wanted:
        parcae(folder)
    if "acute" in wanted:
        acute(folder, given.seeds)


if __name__ == "__main__":
    main()
