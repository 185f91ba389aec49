"""`holdfast simulate admission`: the same jobs under several ways to admit them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from json import dumps
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from holdfast.api.progress import LongWork
from holdfast.errors import ConfigError, DataError
from holdfast.plan.hardware.cluster_file import load_cluster, read_cluster
from holdfast.show.output import print_json, print_table, say, write_text
from holdfast_lab.admission.board import LABELS
from holdfast_lab.admission.engine import Setup
from holdfast_lab.admission.fabric import Fabric, example_cluster
from holdfast_lab.admission.jobs import Job, Rules, Team, format_jobs, read_jobs
from holdfast_lab.admission.outcome import FIGURES, Interval, Study, run_study
from holdfast_lab.admission.policies import POLICIES
from holdfast_lab.admission.step_time import JitterProfile, lognormal_profile, profile_of_trace
from holdfast_lab.admission.workload import Workload, example_teams, make_jobs, slow_nodes
from holdfast_lab.charts.study_charts import exceeded_svg, intervals_svg, stacked_svg
from holdfast_lab.commands.output_paths import explained_out_errors, make_folder, only_writer
from holdfast_lab.commands.trace import read_bytes
from holdfast_lab.engine.kept_replays import KeptReplays
from holdfast_lab.engine.settings import refuse_repeated
from holdfast_lab.traces.node_changes import DEFAULTS
from holdfast_lab.traces.reading import read_stream
from holdfast_lab.traces.rows import text_of

_SHOWN = (
    ("wait, mean", "wait_mean_h", "h"),
    ("wait, p95", "wait_p95_h", "h"),
    ("wait, largest", "wait_large_h", "h"),
    ("until done", "done_h", "h"),
    ("makespan", "makespan_h", "h"),
    ("utilisation", "utilisation", "%"),
    ("useful", "useful", "%"),
    ("fragmented", "fragmentation", "%"),
    ("stranded", "stranded", "%"),
    ("Jain", "jain", ""),
    ("worst team", "worst_team", "%"),
    ("deadlocks", "deadlocks", "n"),
    ("gave up", "timeouts", "n"),
    ("evictions", "evictions", "n"),
    ("resizes", "resizes", "n"),
)
_COMPARED = ("wait_mean_h", "wait_large_h", "idle_h", "done_h", "makespan_h", "useful")
_WORDS = {
    "useful": "useful computing",
    "uneven": "uneven microbatches",
    "jitter": "jitter of the group",
    "slow_node": "slow nodes",
    "collective": "collectives, near",
    "slow_link": "slow links",
    "group_wait": "incomplete group",
    "start": "start and resize",
    "lost": "lost by evictions",
}
_SUMS = {
    "waiting for collectives": ("group_wait", "collective", "slow_link"),
    "waiting for stragglers": ("jitter", "slow_node"),
}


@dataclass(frozen=True)
class StudyReport:
    """setup: of the first seed."""

    study: Study
    setup: Setup
    seeds: Sequence[int]

    def print_tables(self) -> None:
        print(self._about())
        print()
        self._print_figures()
        print("\nshare of the held device-hours, %")
        rows = [
            [_WORDS[label], *(_percent(self.study.label(p, label)) for p in self.study.policies)]
            for label in LABELS
        ]
        for words, labels in _SUMS.items():
            rows.append(
                [words, *(_percent(self.study.sum(p, labels)) for p in self.study.policies)]
            )
        slowed = (self._shown(p, "amplification", "x") for p in self.study.policies)
        rows.append(["amplification by stragglers", *slowed])
        print_table(rows, ["", *self.study.policies])
        self._print_teams("mean wait of each team, h", self.study.team_wait, 2)
        self._print_teams("mean devices of each team over its quota", self.study.team_use, 3)
        self._print_differences()

    def to_json(self) -> dict[str, Any]:
        study = self.study
        return {
            "jobs": len(self.setup.jobs),
            "devices": self.setup.fabric.devices,
            "seeds": list(self.seeds),
            "jitter": self.setup.jitter.source,
            "teams": {team.name: team.quota for team in self.setup.teams},
            "meaning": dict(FIGURES),
            "policies": {
                policy: {
                    "figures": {n: _pair(study.figure(policy, n)) for n in FIGURES},
                    "share_of_held": {n: _pair(study.label(policy, n)) for n in LABELS},
                    "team_wait_h": {
                        team.name: _pair(study.team_wait(policy, team.name))
                        for team in self.setup.teams
                    },
                    "team_use": {
                        team.name: _pair(study.team_use(policy, team.name))
                        for team in self.setup.teams
                    },
                }
                for policy in study.policies
            },
        }

    def write(self, folder: Path) -> None:
        """Write three charts, the figures, and the jobs of the first seed."""
        make_folder(folder)
        study, policies = self.study, self.study.policies
        shares = {p: [study.label(p, label).mean for label in LABELS] for p in policies}
        write_text(
            folder / "hours.svg",
            stacked_svg(
                "What the held device-hours are spent on", [_WORDS[n] for n in LABELS], shares
            ),
        )
        waits = {p: [wait for each in study.outcomes[p] for wait in each.waits_h] for p in policies}
        write_text(
            folder / "waits.svg", exceeded_svg("Share of the jobs that wait longer", "hours", waits)
        )
        by_team = {
            team.name: [
                (found.mean, found.half)
                for found in (study.team_wait(p, team.name) for p in policies)
            ]
            for team in self.setup.teams
        }
        write_text(
            folder / "teams.svg",
            intervals_svg("Mean wait by team, 95 % intervals", "hours", policies, by_team),
        )
        write_text(folder / "admission.json", dumps(self.to_json(), indent=2) + "\n")
        write_text(folder / "jobs.csv", format_jobs(self.setup.jobs))

    # --- parts ----------------------------------------------------------------------------------
    def _about(self) -> str:
        setup = self.setup
        teams = ", ".join(f"{team.name} {team.quota}" for team in setup.teams)
        return (
            f"{len(setup.jobs)} jobs of seed {self.seeds[0]}, {len(self.seeds)} seeds, "
            f"{len(setup.fabric.nodes)} nodes in {len(setup.fabric.racks)} racks, "
            f"{setup.fabric.devices} devices; quotas: {teams}; jitter: {setup.jitter.source}"
        )

    def _shown(self, policy: str, name: str, unit: str) -> str:
        found = self.study.figure(policy, name)
        if unit == "%":
            return _percent(found)
        digits = {"h": 2, "n": 0, "x": 3}.get(unit, 3)
        return _with_interval(found, digits)

    def _print_figures(self) -> None:
        rows = [
            [
                f"{label}, {unit}" if unit in ("h", "%") else label,
                *(self._shown(policy, name, unit) for policy in self.study.policies),
            ]
            for label, name, unit in _SHOWN
        ]
        print_table(rows, ["", *self.study.policies])

    def _print_teams(self, title: str, of: Callable[[str, str], Interval], digits: int) -> None:
        print(f"\n{title}")
        rows = [
            [team.name, *(_with_interval(of(p, team.name), digits) for p in self.study.policies)]
            for team in self.setup.teams
        ]
        print_table(rows, ["", *self.study.policies])

    def _print_differences(self) -> None:
        first, *others = self.study.policies
        base = "gang" if "gang" in others else first
        others = [policy for policy in self.study.policies if policy != base]
        if not others:
            return
        print(f"\ndifference to {base}, seed by seed")
        rows = [
            [name, *(_with_interval(self.study.difference(p, base, name), 3) for p in others)]
            for name in _COMPARED
        ]
        print_table(rows, ["", *others])


def _with_interval(found: Interval, digits: int) -> str:
    text = f"{found.mean:.{digits}f}"
    return f"{text} ±{found.half:.{digits}f}" if found.half else text


def _percent(found: Interval) -> str:
    return _with_interval(Interval(100 * found.mean, 100 * found.half), 2)


def _pair(found: Interval) -> dict[str, float]:
    return {"mean": found.mean, "half": found.half}


# --- the command ----------------------------------------------------------------------------------
_EXAMPLE = "example"
_PUBLIC_JITTER = "jitter/bytedance-straggler/data/trace-SE.parquet"
Quotas = Literal["reclaim", "borrow", "hard"]


class PolicyName(StrEnum):
    """Names of `holdfast_lab.admission.policies.POLICIES`."""

    PODS = "pods"
    GANG = "gang"
    TOPOLOGY = "topology"
    BACKFILL = "backfill"
    ELASTIC = "elastic"


Jobs = Annotated[
    Path | None,
    typer.Option(help="a CSV file of jobs (docs/studies/admission.md); default: jobs are drawn"),
]
Policies = Annotated[
    list[PolicyName] | None, typer.Option(help="a way to admit jobs; repeatable; default: all")
]
Seeds = Annotated[int, typer.Option(min=1, help="workloads to draw, for the intervals")]
Seed = Annotated[int, typer.Option(help="the first of the --seeds")]
ClusterName = Annotated[
    str, typer.Option(help="a cluster file, or NODESxDEVICESxNAME; example: 64 nodes of 8 devices")
]
Zones = Annotated[int, typer.Option(min=1, help="zones of the example cluster")]
Teams = Annotated[
    list[str] | None, typer.Option(help="NAME=DEVICES: a team and its quota; repeatable")
]
QuotaRule = Annotated[
    Quotas, typer.Option(help="reclaim: borrowed devices are taken back; hard: none are lent")
]
Load = Annotated[
    float, typer.Option(min=0.01, max=100, help="demand of drawn jobs, over all devices")
]
Days = Annotated[
    float, typer.Option(min=0.01, max=3650, help="days in which drawn jobs are submitted")
]
Elastic = Annotated[
    float,
    typer.Option(min=0, max=1, help="share of the drawn jobs of several pods that are elastic"),
]
Jitter = Annotated[
    Path | None, typer.Option(help="a trace of operations, such as ByteDance's, in Parquet")
]
Timeout = Annotated[float, typer.Option(min=1, help="seconds until an incomplete group gives up")]
Saves = Annotated[
    bool, typer.Option("--save-on-eviction", help="an evicted job saves first, and loses none")
]
Out = Annotated[Path | None, typer.Option(help="a folder for charts, JSON and jobs")]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]


def admission(
    jobs: Jobs = None,
    policy: Policies = None,
    seeds: Seeds = 10,
    seed: Seed = 0,
    cluster: ClusterName = _EXAMPLE,
    zones: Zones = 1,
    team: Teams = None,
    quotas: QuotaRule = "reclaim",
    load: Load = 1.0,
    days: Days = 7.0,
    elastic: Elastic = 0.5,
    jitter: Jitter = None,
    group_timeout: Timeout = 600.0,
    save_on_eviction: Saves = False,
    out: Out = None,
    json: Json = False,
) -> None:
    """Compare how jobs of several teams are admitted.

    Each job has a fixed decomposition into pods. They are admitted pod by pod, as gangs, near to
    each other, with backfill, or as elastic jobs. All seeds are drawn alike for every policy.
    docs/studies/admission.md explains the figures.

    \b
    Example:
      holdfast simulate admission --seeds 10 --out admission
      holdfast simulate admission --jobs jobs.csv --cluster 16x8xA100-80 --policy elastic
    """
    for option, names in (("--policy", policy), ("--team", team)):
        refuse_repeated([name.partition("=")[0] for name in names or ()], option)
    for words in team or ():
        _team_of(words)
    drawn = Workload(load=load, days=days, elastic=elastic)
    _refuse_unused(drawn, jobs, cluster, zones)
    rules = Rules(
        group_timeout_s=group_timeout, evicted_save=save_on_eviction, reclaims=quotas == "reclaim"
    )
    cases = _Cases(
        _fabric_of(cluster, zones),
        _jobs_of(jobs),
        drawn,
        _jitter_of(jitter),
        rules,
        tuple(team or ()),
        quotas == "hard",
    )
    chosen = [POLICIES[name] for name in policy or list(PolicyName)]
    numbers = range(seed, seed + seeds)
    with only_writer(out), explained_out_errors(out or Path()):
        kept = KeptReplays(out)
        with kept.counted(len(chosen) * seeds), LongWork("simulating") as work:
            study = run_study(cases.setup_of, chosen, numbers, work.stage, kept)
        if kept.reused:
            say(f"{kept.reused} of {len(chosen) * seeds} replays were kept in {out}")
        report = StudyReport(study, cases.setup_of(seed), numbers)
        if json:
            print_json(report.to_json())
        else:
            report.print_tables()
        if out is not None:
            report.write(out)


def _refuse_unused(drawn: Workload, jobs: Path | None, cluster: str, zones: int) -> None:
    """Raise ConfigError for an option that another one makes void."""
    usual = Workload(load=1.0, days=7.0, elastic=0.5)
    void = [(name, "--jobs") for name in ("load", "days", "elastic") if jobs is not None]
    void = [each for each in void if getattr(drawn, each[0]) != getattr(usual, each[0])]
    void += [("zones", "--cluster")] if zones > 1 and cluster != _EXAMPLE else []
    for name, other in void:
        raise ConfigError(
            f"--{name} has no effect with {other}",
            where="command line",
            remedy=f"leave --{name} or {other} out",
        )


@dataclass(frozen=True)
class _Cases:
    """What was asked for. given: jobs of a file; without, each seed draws its own."""

    fabric: Fabric
    given: tuple[Job, ...]
    workload: Workload
    jitter: JitterProfile
    rules: Rules
    quotas: tuple[str, ...]
    is_hard: bool

    def setup_of(self, seed: int) -> Setup:
        teams = _teams_of(self.quotas, self.fabric, self.given, self.is_hard)
        names = tuple(team.name for team in teams) if self.quotas else ()
        jobs = self.given or make_jobs(self.workload, self.fabric, seed, names)
        slow = slow_nodes(self.fabric, seed)
        return Setup(self.fabric, teams, jobs, self.jitter, slow, self.rules)


def _fabric_of(cluster: str, zones: int) -> Fabric:
    if cluster == _EXAMPLE:
        return Fabric(example_cluster(zones))
    path = Path(cluster)
    return Fabric(load_cluster(path) if path.suffix in (".yaml", ".yml") else read_cluster(cluster))


def _jobs_of(path: Path | None) -> tuple[Job, ...]:
    if path is None:
        return ()
    return read_jobs(text_of(read_bytes(path), str(path)), str(path))


def _teams_of(
    given: Sequence[str], fabric: Fabric, jobs: tuple[Job, ...], is_hard: bool
) -> tuple[Team, ...]:
    """Teams with the quotas that are given. Without them, the teams of a file share evenly."""
    if given:
        teams = tuple(_team_of(words) for words in given)
    elif jobs:
        names = sorted({job.team for job in jobs})
        parts = [fabric.devices * k // len(names) for k in range(len(names) + 1)]
        sizes = [stop - start for start, stop in pairwise(parts)]
        teams = tuple(Team(name, size) for name, size in zip(names, sizes, strict=True))
    else:
        teams = example_teams(fabric)
    return tuple(replace(team, borrow=0) for team in teams) if is_hard else teams


def _team_of(words: str) -> Team:
    name, _, quota = words.partition("=")
    if not name or not quota.isascii() or not quota.isdigit():
        raise DataError(
            f"{words!r} is no team with a quota",
            where="command line, --team",
            remedy="write NAME=DEVICES, such as --team red=96",
        )
    return Team(name, int(quota))


def _jitter_of(path: Path | None) -> JitterProfile:
    """The trace that is given, or the one of the public data, or the shipped generator."""
    if path is None and (folder := os.environ.get("HOLDFAST_DATA")):
        public = Path(folder) / _PUBLIC_JITTER
        path = public if public.is_file() else None
    if path is None:
        return lognormal_profile()
    with LongWork(f"reading {path}"):
        return profile_of_trace(read_stream(read_bytes(path), path.name, DEFAULTS))
