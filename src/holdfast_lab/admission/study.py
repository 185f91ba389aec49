"""The same jobs under several policies, over several seeds. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from holdfast_lab.admission.engine import Setup, admit_jobs
from holdfast_lab.admission.outcome import Interval, Outcome, interval, outcome_of
from holdfast_lab.admission.policies import Admission


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


class OutcomeStore(Protocol):
    """Keeps outcomes, for a later call with the same setup, policy and seed."""

    def load(self, setup: Setup, policy: str, seed: int) -> Outcome | None: ...

    def store(self, setup: Setup, policy: str, seed: int, outcome: Outcome) -> None: ...


def run_study(
    setup_of: Callable[[int], Setup],
    policies: Iterable[Admission],
    seeds: Sequence[int],
    progress: Callable[[str], None] = lambda text: None,
    kept: OutcomeStore | None = None,
) -> Study:
    """Simulate each policy for each seed. setup_of: jobs and slow nodes of a seed. kept: outcomes
    that are not simulated again."""
    chosen = tuple(policies)
    found: dict[str, list[Outcome]] = {policy.name: [] for policy in chosen}
    for seed in seeds:
        setup = setup_of(seed)
        for policy in chosen:
            progress(f"seed {seed} of {seeds[0]} to {seeds[-1]}: {len(setup.jobs)} jobs")
            outcome = kept.load(setup, policy.name, seed) if kept else None
            if outcome is None:
                draw = Random(f"{seed}/admission policy")
                outcome = outcome_of(admit_jobs(setup, policy, draw))
                if kept:
                    kept.store(setup, policy.name, seed, outcome)
            found[policy.name].append(outcome)
    return Study({name: tuple(outcomes) for name, outcomes in found.items()})
