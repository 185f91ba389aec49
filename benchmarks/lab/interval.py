"""Intervals between saves: the adaptive one against every fixed one, on traces of lost machines.

The result is the expected share of the running time that saves and repeated work cost. It is given
for every trace, job size and cost of a save, as a mean over phases. A phase is another choice of
the job's nodes, another moment of each departure within its sampling step, and another beginning
within the trace. A case has so many phases that FAILURES failures are replayed. The redone work of
one failure is uniform between none and an interval, so the mean of 4,000 is known to 0.9 %. With
fewer, the best of 65 swept intervals is the one with the luckiest phase, and not the best.

The best fixed interval is found by a sweep on that very trace, which no policy could know
beforehand. The adaptive policy begins with the default prior and sees each failure when it happens.
Its bar: it costs at most 1.05 of the best fixed interval. It is also compared with 10 min, 30 min,
and Young's interval with a rate that is 10 times too high or too low. If one of these is itself
within 5 % of the best fixed interval, the row says so and counts apart.

    python -m benchmarks.lab.interval [--traces DIR] [--plot FILE.svg] [--held-out] [--processes N]

DIR: files of the kinds that `holdfast_lab.traces` reads; other files are named and skipped.
The policy's constants were chosen on these traces and on synthetic ones of seeds 11 to 16.
--held-out runs data that was not used for this choice. These are the further clusters of tables
that hold several, and synthetic traces of seeds 3 and 4.
"""

from __future__ import annotations

import argparse
import csv
import lzma
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import log10
from multiprocessing import Pool
from pathlib import Path

from benchmarks.lab.intervals import (
    LostTime,
    belief_path,
    failure_rate,
    job_spells,
    lost_by_adaptive,
    lost_by_fixed,
    poisson,
    rotate_spells,
)
from holdfast.errors import DataError
from holdfast.policy.saving.failure_rate import PRIOR_NODE_MTBF_S, FailureRate, format_duration
from holdfast.policy.saving.interval import IntervalBounds, young_interval
from holdfast.report.page.svg import Scale, line, path, tag, text
from holdfast_lab.traces import synthetic
from holdfast_lab.traces.failures import parse_outages
from holdfast_lab.traces.node_changes import Trace
from holdfast_lab.traces.reading import load_trace

COSTS = (0.005, 0.2, 1.5, 30.0)
BAR = 1.05
ENOUGH = 20
"""Failures that a case needs: with fewer, no policy can know the rate, and the best fixed interval
is the one that suits those few."""
FAILURES = 4000
"""Failures that the phases of one case replay together, if --phases allows so many phases."""
LIMITS = IntervalBounds(0.01, 86400.0)
USED, HELD_OUT = slice(2), slice(2, 10)
SWEEP = tuple(1.08**power for power in range(-32, 33))  # times Young's interval with the true rate


@dataclass(frozen=True)
class Row:
    """One trace, job size and cost. Wastes are shares of the running time."""

    trace: str
    nodes: int
    failures: float
    mtbf: float
    cost: float
    best: float  # seconds
    best_waste: float
    adaptive: float
    known: float  # Young's interval with the true rate: what a policy could know at best
    others: tuple[float, ...]  # 10 min, 30 min, rate x 10, rate / 10
    recovering: float
    curve: tuple[tuple[float, float], ...]  # (seconds, waste) of the sweep
    saves: float  # mean seconds between the adaptive policy's saves

    @property
    def ratio(self) -> float:
        return self.adaptive / self.best_waste

    @property
    def passed(self) -> bool:
        return self.ratio <= BAR

    @property
    def beaten(self) -> bool:
        """Each of the other policies loses more."""
        return all(self.adaptive < other for other in self.others)


@dataclass(frozen=True)
class Job:
    trace: Trace
    nodes: int
    phases: int  # at most
    failures: int  # that all phases together replay
    recovery: float
    mtbf: float


def measure(job: Job) -> list[Row]:
    """One row a cost, or none where too little fails."""
    once = sum(spell.failed for spell in job_spells(job.trace, job.nodes))
    phases = max(2, min(job.phases, round(job.failures / max(1, once))))
    histories = [
        rotate_spells(job_spells(job.trace, job.nodes, seed), seed / phases)
        for seed in range(phases)
    ]
    histories = [history for history in histories if history]
    failures = sum(s.failed for h in histories for s in h) / max(1, len(histories))
    if failures < ENOUGH:
        return []
    rate = sum(map(failure_rate, histories)) / len(histories)
    prior = FailureRate.from_prior(job.mtbf)
    beliefs = [belief_path(history, prior) for history in histories]
    rows = []
    for cost in COSTS:

        def tried(seconds: float, cost: float = cost) -> LostTime:
            return _sum(lost_by_fixed(h, seconds, cost, job.recovery) for h in histories)

        curve = [
            (f * young_interval(cost, rate), tried(f * young_interval(cost, rate)).by_policy)
            for f in SWEEP
        ]
        best = min(curve, key=lambda point: point[1])
        mine = _sum(
            lost_by_adaptive(h, b, cost, job.recovery, LIMITS)
            for h, b in zip(histories, beliefs, strict=True)
        )
        others = (600.0, 1800.0, young_interval(cost, 10 * rate), young_interval(cost, rate / 10))
        rows.append(
            Row(
                job.trace.source,
                job.nodes,
                failures,
                1 / rate,
                cost,
                *best,
                mine.by_policy,
                tried(young_interval(cost, rate)).by_policy,
                tuple(tried(seconds).by_policy for seconds in others),
                mine.total - mine.by_policy,
                tuple(curve),
                mine.running / max(1, mine.saves),
            )
        )
    return rows


def _sum(wastes: Iterator[LostTime]) -> LostTime:
    return sum(wastes, LostTime())


# --- which traces, which jobs ---------------------------------------------------------------------
def read(path: Path) -> str:
    if path.suffix == ".xz":
        return lzma.decompress(path.read_bytes()).decode("latin-1")
    return path.read_text(errors="replace")


def found(folder: Path, held_out: bool = False) -> tuple[list[Trace], list[str]]:
    """The traces under a folder, and the files that are none. Text files up to 20 MB. held_out:
    the clusters that are otherwise left out, and nothing else."""
    traces: list[Trace] = []
    passed_over = []
    for file in sorted(p for p in folder.rglob("*") if p.is_file()):
        if file.suffix not in (".csv", ".txt", ".json", ".xz") or file.stat().st_size > 20e6:
            continue
        name = str(file.relative_to(folder))
        try:
            content = read(file)
            systems = _systems(content, name, HELD_OUT if held_out else USED)
            traces += systems or ([] if held_out else [_independent(load_trace(content, name))])
        except DataError as error:
            passed_over.append(str(error).split(";")[0])
    return traces, passed_over


def _independent(trace: Trace) -> Trace:
    """Public files of these kinds repeat parts of another trace of the same folder."""
    if trace.kind in ("listed changes", "intervals"):
        raise DataError("this repeats another trace", where=trace.source)
    return trace


def _systems(content: str, name: str, ranks: slice) -> list[Trace]:
    """A table of outages holds several clusters, which must not be pooled: some of them, by their
    place when those with most rows come first."""
    head, _, rest = content.partition("\n")
    header = [cell.strip() for cell in head.split(",")]
    if "Prob Started" not in header:
        return []
    place = header.index("System")
    count: dict[str, int] = {}
    for row in csv.reader(rest.splitlines()):
        if len(row) > place:
            count[row[place]] = count.get(row[place], 0) + 1
    systems = sorted(count, key=lambda system: -count[system])[ranks]
    return [parse_outages(content, name, system=system) for system in systems]


def made(seeds: Sequence[int] = (1, 2)) -> list[Trace]:
    """The synthetic ones, of each kind."""
    return [
        trace
        for seed in seeds
        for trace in (
            synthetic.spot_pool(seed),
            synthetic.gang_offers(seed),
            synthetic.bathtub_lives(seed),
            synthetic.cluster_failures(seed),
            poisson(seed, mtbf=1800, failures=400),
        )
    ]


def jobs(
    traces: Sequence[Trace], phases: int, failures: int, recovery: float, mtbf: float
) -> list[Job]:
    """All nodes that ever are there at a time, a quarter and a sixteenth of them."""
    out = []
    for trace in traces:
        count = peak = 0
        for _, gone, joined in trace.instants():
            count += len(joined) - len(gone)
            peak = max(peak, count)
        sizes = sorted({max(1, peak // part) for part in (1, 4, 16)}, reverse=True)
        out += [Job(trace, nodes, phases, failures, recovery, mtbf) for nodes in sizes]
    return out


# --- what is printed, and drawn ----------------------------------------------------------------
HEAD = (
    f"{'trace':<52}{'nodes':>6}{'failures':>9}{'MTBF':>10}{'a save':>8}{'best':>10}"
    f"{'lost':>8}{'adaptive':>9}{'/ best':>8}{'r known':>8}{'10 min':>8}{'30 min':>8}"
    f"{'r x 10':>8}{'r / 10':>8}"
)


def shown(row: Row) -> str:
    others = "".join(f"{other / row.best_waste:>8.2f}" for other in row.others)
    return (
        f"{row.trace[-50:]:<52}{row.nodes:>6}{row.failures:>9.0f}{format_duration(row.mtbf):>10}"
        f"{format_duration(row.cost):>8}{format_duration(row.best):>10}{row.best_waste:>8.2%}"
        f"{row.adaptive:>9.2%}{row.ratio:>8.3f}"
        f"{row.known / row.best_waste:>8.3f}{others}{_verdict(row)}"
    )


def _verdict(row: Row) -> str:
    if not row.passed:
        return "  MISSED"
    return "" if row.beaten else "  another is the best fixed one"


def summary(rows: Sequence[Row]) -> str:
    """Say how many cases pass, and compare with 10 and 30 min over all cases and by trace."""
    ratios = sorted(row.ratio for row in rows)
    middle, tenth = ratios[len(ratios) // 2], ratios[-max(1, len(ratios) // 10)]
    found = [
        f"{sum(row.passed for row in rows)} of {len(rows)} cases within {BAR:g} of the best fixed "
        f"interval; {sum(row.passed and row.beaten for row in rows)} of them better than all four "
        f"others; adaptive / best: median {middle:.3f}, worst tenth from {tenth:.3f}, worst "
        f"{ratios[-1]:.3f}"
    ]
    close = [row for row in rows if row.passed and not row.beaten]
    if close:
        nearest = max(min(row.others) / row.best_waste for row in close)
        found.append(
            f"{len(close)} cases where another loses no more: it lies within "
            f"{nearest:.3f} of the best fixed interval itself"
        )
    names = list(dict.fromkeys(row.trace for row in rows))
    for index, fixed in enumerate(("10 min", "30 min")):
        better = sum(row.adaptive < row.others[index] for row in rows)
        traces = sum(
            sum(row.adaptive for row in rows if row.trace == name)
            < sum(row.others[index] for row in rows if row.trace == name)
            for name in names
        )
        found.append(
            f"better than {fixed}: {better} of {len(rows)} cases, and {traces} of {len(names)} "
            "traces, their cases added up"
        )
    missed = sorted({f"{row.trace} on {row.nodes}" for row in rows if not row.passed})
    return "\n".join(found) + (f"\nmissed: {'; '.join(missed)}" if missed else "")


def drawing(rows: Sequence[Row], cost: float = 1.5, across: int = 3) -> str:
    """Draw lost time over the interval, a panel per trace (its largest job), both scales by tens.
    The dot is the adaptive policy at its mean interval, the line its level."""
    chosen: dict[str, Row] = {}
    for row in rows:
        if row.cost == cost and row.nodes >= chosen.get(row.trace, row).nodes:
            chosen[row.trace] = row
    wide, high = 300, 200
    panels = [
        tag(
            "g",
            _panel(row, wide, high),
            transform=f"translate({index % across * wide},{index // across * high + 24})",
        )
        for index, row in enumerate(chosen.values())
    ]
    title = text(
        12,
        16,
        f"time lost to saves of {format_duration(cost)} and to redone work, over the "
        "seconds between saves; dot and line: the adaptive policy",
        font_size=12,
    )
    width, height = across * wide, -(-len(panels) // across) * high + 24
    background = tag("rect", width=width, height=height, fill="white")
    return tag(
        "svg",
        background + title + "".join(panels),
        xmlns="http://www.w3.org/2000/svg",
        width=width,
        height=height,
        viewBox=f"0 0 {width} {height}",
        font_family="sans-serif",
        font_size=10,
    )


def _panel(row: Row, wide: int, high: int) -> str:
    curve = [(log10(x), log10(y)) for x, y in row.curve]
    mine = log10(row.adaptive)
    values = [y for _, y in curve] + [mine]
    across = Scale(curve[0][0], curve[-1][0], 44, wide - 14)
    up = Scale(min(values) - 0.03, max(values), high - 30, 26)
    parts = [
        text(44, 18, f"{row.trace[-38:]}, {row.nodes} nodes"),
        path(
            ((across(x), up(y)) for x, y in curve), fill="none", stroke="#4269d0", stroke_width=1.5
        ),
        line(44, up(mine), wide - 14, up(mine), stroke="#ff725c", stroke_dasharray="3 3"),
    ]
    place = min(max(log10(row.saves), curve[0][0]), curve[-1][0])
    parts.append(tag("circle", cx=across(place), cy=up(mine), r=3.5, fill="#ff725c"))
    for x in (curve[0][0], curve[len(curve) // 2][0], curve[-1][0]):
        parts.append(text(across(x), high - 14, format_duration(10**x), text_anchor="middle"))
    for y in (min(values), max(values)):
        parts.append(text(40, up(y) + 3, f"{10**y:.1%}", text_anchor="end"))
    return "".join(parts)


def main() -> None:
    """Print the table; exit 1 where a bar was missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--traces", type=Path, default=os.environ.get("HOLDFAST_DATA"))
    parser.add_argument("--plot", type=Path, help="an SVG file")
    parser.add_argument("--phases", type=int, default=128)
    parser.add_argument("--failures", type=int, default=FAILURES, help="replayed in each case")
    parser.add_argument("--recovery", type=float, default=60.0, help="seconds a failure costs")
    parser.add_argument(
        "--node-mtbf", type=float, default=PRIOR_NODE_MTBF_S, help="the prior, in seconds"
    )
    parser.add_argument("--held-out", action="store_true", help="what no constant was chosen by")
    parser.add_argument("--only", default="", help="a part of the traces' names")
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args()
    traces, passed_over = found(given.traces, given.held_out) if given.traces else ([], [])
    if given.held_out:
        traces += made((3, 4))
    elif not traces:
        print(
            "no real traces: set HOLDFAST_DATA or --traces to a folder with, for example, "
            "Bamboo's p3-trace.csv (github.com/uclasystem/bamboo) or skypilot-org/spot-traces; "
            "synthetic ones follow"
        )
        traces = made()
    traces = [trace for trace in traces if given.only in trace.source]
    print(HEAD)
    rows: list[Row] = []
    asked = jobs(traces, given.phases, given.failures, given.recovery, given.node_mtbf)
    with Pool(given.processes) as pool:
        for job, measured in zip(asked, pool.imap(measure, asked), strict=True):
            rows += measured
            if not measured:
                print(f"{job.trace.source[-50:]:<52}{job.nodes:>6}  fewer than {ENOUGH} failures")
            for row in measured:
                print(shown(row), flush=True)
    print(summary(rows))
    for sentence in passed_over:
        print(f"passed over: {sentence}")
    if given.plot:
        given.plot.write_text(drawing(rows))
    sys.exit(0 if all(row.passed for row in rows) else 1)


if __name__ == "__main__":
    main()
