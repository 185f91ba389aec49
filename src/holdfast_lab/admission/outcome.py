"""The admission study: figures of a run, and intervals over seeds by policy. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil, sqrt
from random import Random
from statistics import fmean, stdev

from holdfast_lab.admission.board import LABELS, JobState
from holdfast_lab.admission.engine import Run, Setup, admit_jobs
from holdfast_lab.admission.policies import Admission
from holdfast_lab.engine.kept_replays import KeptReplays, key_of

HOUR = 3600.0
FIGURES: Mapping[str, str] = {
    "wait_mean_h": "hours from submission to the first step, mean",
    "wait_p95_h": "the same, 95th percentile",
    "wait_large_h": "the mean of the jobs that have most pods",
    "idle_h": "hours without training of a job, evictions included, mean",
    "done_h": "hours from submission to the end, mean",
    "slowdown": "the same over the job's own hours, median",
    "makespan_h": "hours until all jobs have ended",
    "utilisation": "share of the devices that jobs hold, until the last submission",
    "useful": "share of the held device-hours that is useful computing",
    "fragmentation": "share of the free devices that a pod of these jobs cannot use",
    "stranded": "share of the devices that is idle while it would suffice for a waiting job",
    "jain": "Jain's index of the teams' shares of what they are entitled to",
    "worst_team": "the least of these shares",
    "amplification": "seconds of computing until the slowest pod is done, over a pod's mean",
    "deadlocks": "times that incomplete groups blocked each other",
    "deadlock_h": "device-hours held by groups that block each other",
    "timeouts": "groups that gave up",
    "evictions": "evictions of jobs that trained",
    "resizes": "changes of elastic jobs",
}
"""Names and meanings. A team is entitled to the lesser of its quota and its demand, at any time.
Devices are the only resource of these jobs, so a team's dominant share is its share of devices."""

_STUDENT_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)
_NORMAL_975 = 1.96


@dataclass(frozen=True)
class Outcome:
    """figures: by `FIGURES`. labels: device-hours by `LABELS`. waits_h: of each job, sorted.
    team_waits_h: mean wait by team. team_use: its mean devices over its quota, which is its
    dominant share over that of its quota; until the last submission."""

    policy: str
    figures: Mapping[str, float]
    labels: Mapping[str, float]
    waits_h: tuple[float, ...]
    team_waits_h: Mapping[str, float]
    team_use: Mapping[str, float]


@dataclass(frozen=True)
class Interval:
    """Mean over seeds, and half the width of its 95 % interval (Student's t; 0 for one seed)."""

    mean: float
    half: float


def outcome_of(run: Run) -> Outcome:
    """Sum up one run."""
    labels = {
        label: sum(state.ledger.seconds[label] for state in run.states) / HOUR for label in LABELS
    }
    waits = sorted(_wait_h(state) for state in run.states)
    by_team: dict[str, list[float]] = {}
    for state in run.states:
        by_team.setdefault(state.job.team, []).append(_wait_h(state))
    return Outcome(
        run.policy,
        _figures(run, labels, waits),
        labels,
        tuple(waits),
        {team: fmean(values) for team, values in sorted(by_team.items())},
        _team_use(run),
    )


def interval(values: Sequence[float]) -> Interval:
    if len(values) < 2:
        return Interval(fmean(values), 0.0)
    freedom = len(values) - 1
    factor = _STUDENT_975[freedom - 1] if freedom <= len(_STUDENT_975) else _NORMAL_975
    return Interval(fmean(values), factor * stdev(values) / sqrt(len(values)))


def jain(values: Sequence[float]) -> float:
    """Jain's index: 1 if all are equal, 1/n if one has all (Jain, Chiu and Hawe, 1984)."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def percentile(ordered: Sequence[float], share: float) -> float:
    """The least value that so many of the values do not exceed."""
    return ordered[max(0, ceil(share * len(ordered)) - 1)]


def _figures(run: Run, labels: Mapping[str, float], waits: Sequence[float]) -> dict[str, float]:
    seen, states = run.observer, run.states
    done = [(state.done_s - state.job.submit_s) / HOUR for state in states]
    own = [state.job.seconds / HOUR for state in states]
    held = sum(labels.values())
    span = min(seen.horizon_s, run.end_s) * run.setup.fabric.devices
    shares = [
        seen.served_s[team] / entitled for team, entitled in seen.entitled_s.items() if entitled
    ]
    most = max(state.job.pods for state in states)
    computing = labels["useful"] + labels["uneven"]
    slowed = computing + labels["jitter"] + labels["slow_node"]
    return {
        "wait_mean_h": fmean(waits),
        "wait_p95_h": percentile(waits, 0.95),
        "wait_large_h": fmean(_wait_h(state) for state in states if state.job.pods == most),
        "idle_h": fmean((s.done_s - s.job.submit_s - s.active_s) / HOUR for s in states),
        "done_h": fmean(done),
        "slowdown": percentile(sorted(d / o for d, o in zip(done, own, strict=True)), 0.5),
        "makespan_h": run.end_s / HOUR,
        "utilisation": seen.used_s / span if span else 0.0,
        "useful": labels["useful"] / held if held else 0.0,
        "fragmentation": seen.fragment_s / seen.free_s if seen.free_s else 0.0,
        "stranded": seen.stranded_s / span if span else 0.0,
        "jain": jain(shares),
        "worst_team": min(shares, default=1.0),
        "amplification": slowed / computing if computing else 1.0,
        "deadlocks": float(seen.deadlocks),
        "deadlock_h": seen.deadlock_s / HOUR,
        "timeouts": float(sum(state.timeouts for state in states)),
        "evictions": float(sum(state.evictions for state in states)),
        "resizes": float(sum(state.resizes for state in states)),
    }


def _team_use(run: Run) -> dict[str, float]:
    seconds = min(run.observer.horizon_s, run.end_s)
    return {
        team.name: run.observer.team_used_s[team.name] / (team.quota * seconds)
        for team in run.setup.teams
        if team.quota and seconds
    }


def _wait_h(state: JobState) -> float:
    return ((state.started_s or 0.0) - state.job.submit_s) / HOUR


# --- several policies and seeds -------------------------------------------------------------------
@dataclass(frozen=True)
class Study:
    """outcomes: of each policy, one for each seed, in the order of the seeds."""

    outcomes: Mapping[str, tuple[Outcome, ...]]

    @property
    def policies(self) -> tuple[str, ...]:
        return tuple(self.outcomes)

    def figure(self, policy: str, name: str) -> Interval:
        return interval([each.figures[name] for each in self.outcomes[policy]])

    def label(self, policy: str, label: str) -> Interval:
        """Share of the held device-hours with a label."""
        return self.sum(policy, (label,))

    def sum(self, policy: str, labels: Sequence[str]) -> Interval:
        """Share of the held device-hours with any of these labels."""
        return interval(
            [
                sum(each.labels[label] for label in labels) / sum(each.labels.values())
                for each in self.outcomes[policy]
            ]
        )

    def team_wait(self, policy: str, team: str) -> Interval:
        return interval([each.team_waits_h.get(team, 0.0) for each in self.outcomes[policy]])

    def team_use(self, policy: str, team: str) -> Interval:
        return interval([each.team_use.get(team, 0.0) for each in self.outcomes[policy]])

    def difference(self, policy: str, other: str, name: str) -> Interval:
        """Of two policies, seed by seed: both had the same jobs and the same slow nodes."""
        pairs = zip(self.outcomes[policy], self.outcomes[other], strict=True)
        return interval([one.figures[name] - two.figures[name] for one, two in pairs])


def run_study(
    setup_of: Callable[[int], Setup],
    policies: Iterable[Admission],
    seeds: Sequence[int],
    progress: Callable[[str], None] = lambda text: None,
    kept: KeptReplays | None = None,
) -> Study:
    """Simulate each policy for each seed. setup_of: jobs and slow nodes of a seed. kept: outcomes
    of an interrupted study with the same inputs, which are not simulated again."""
    chosen = tuple(policies)
    found: dict[str, list[Outcome]] = {policy.name: [] for policy in chosen}
    for seed in seeds:
        setup = setup_of(seed)
        for policy in chosen:
            progress(f"seed {seed} of {seeds[0]} to {seeds[-1]}: {len(setup.jobs)} jobs")
            key = key_of(setup, policy.name, seed) if kept else ""
            if kept and (known := kept.get(key)) is not None:
                outcome = Outcome(**{**known, "waits_h": tuple(known["waits_h"])})
            else:
                draw = Random(f"{seed}/admission policy")
                outcome = outcome_of(admit_jobs(setup, policy, draw))
                if kept:
                    kept.put(key, asdict(outcome))
            found[policy.name].append(outcome)
    return Study({name: tuple(outcomes) for name, outcomes in found.items()})
