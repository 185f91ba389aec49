"""The admission study as tables, JSON, and charts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import Any

from holdfast.show.output import make_folder, print_table, write_text
from holdfast_lab.admission.board import LABELS
from holdfast_lab.admission.engine import Setup
from holdfast_lab.admission.jobs import format_jobs
from holdfast_lab.admission.outcome import FIGURES, Interval, Study
from holdfast_lab.charts.study_charts import exceeded_svg, intervals_svg, stacked_svg

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
