"""Classes of failures, by what they destroy and so by the tier that recovery needs. Pure.

    0  a process: its node's memory still has the state        (killed worker, hang)
    1  a node and its memory: another machine's memory has it  (mover or agent gone, power cut)
    2  several machines at once, peers among them: the run store has it
    3  the run store: the bucket has it

`failure_rate` estimates how often the run breaks. This module estimates the share of each class. It
counts failures of each class and begins with a prior (the mean of a Dirichlet distribution). So the
first failures of a run move the shares by about as much as the prior is worth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.events import (
    GenerationStarted,
    Record,
    RunFailed,
    RunFinished,
    RunStopped,
    WorkerHeld,
    WorkerLost,
    WorkerReady,
)
from holdfast.policy.saving.failure_rate import FailureRate

PRIOR_FAILURE_COUNTS = (1.0, 0.8, 0.15, 0.05)
"""Failures of each class that are assumed in advance: two in all. Every second took a process
alone, and every tenth more than one node. A share that is wrong by a factor of two costs 6 % of
what its tier loses. (The loss has a flat minimum: (x + 1/x) / 2 at x = the root of 2.)"""


@dataclass(frozen=True)
class FailureClassCounts:
    """Failures seen, by class, the prior's included."""

    counts: tuple[float, ...] = PRIOR_FAILURE_COUNTS

    def to_json(self) -> list[float]:
        return list(self.counts)

    @staticmethod
    def from_json(counts: Sequence[float]) -> FailureClassCounts:
        return FailureClassCounts(tuple(counts))

    def with_failure(self, level: int) -> FailureClassCounts:
        """One more failure of this class."""
        counts = list(self.counts)
        counts[level] += 1
        return FailureClassCounts(tuple(counts))

    def rate_by_tier(self, rate: float, tiers: Sequence[int]) -> dict[int, float]:
        """`rate` failures a second, shared out: by tier, those that it survives and no lower one of
        `tiers`. Failures that none of them survives are counted with the highest. A restart returns
        to what that tier holds, or to the beginning, which no interval changes."""
        ordered, total = sorted(tiers), sum(self.counts)
        out = dict.fromkeys(ordered, 0.0)
        for level, count in enumerate(self.counts):
            for tier in ordered:
                if tier >= level:
                    break
            out[tier] += rate * count / total
        return out


class FailureHistory:
    """Takes the records of a run, generation by generation; `failure_rate` is what those before the
    newest say, and `failure_classes` what the failures took with them.

    A generation is at risk from the moment its last worker is ready to its last record. It ended in
    a failure if a worker was lost, or if no record says how it ended. In the second case its agent,
    and perhaps the node, is lost. Recoveries are no time at risk, because they make nothing that
    could be lost. All records of a generation are stamped by one clock.
    """

    def __init__(self, prior: FailureRate) -> None:
        self.failure_rate, self.failure_classes = prior, FailureClassCounts()
        self._generation, self._nodes = 0, 1
        self._ready_at: float | None = None
        self._last_record_at = 0.0
        self._has_lost_worker = self._has_end_record = False

    def observe(self, record: Record) -> None:
        if record.generation != self._generation:
            self._close_generation()
            self._generation = record.generation
        event, self._last_record_at = record.event, max(self._last_record_at, record.time)
        if isinstance(event, GenerationStarted):
            self._nodes = len(set(event.topology.get("nodes", ()))) or 1
        elif isinstance(event, WorkerReady):
            self._ready_at = record.time
        elif isinstance(event, WorkerLost | WorkerHeld):  # its agent said so: that one lived
            self._has_lost_worker = True
        elif isinstance(event, RunStopped | RunFinished | RunFailed):
            self._has_end_record = True

    def _close_generation(self) -> None:
        if self._ready_at is not None:
            failures = int(self._has_lost_worker or not self._has_end_record)
            passed = max(0.0, self._last_record_at - self._ready_at)
            self.failure_rate = self.failure_rate.with_observation(passed, self._nodes, failures)
            if failures:  # without a record of the end, the node's memory was lost with the agent
                self.failure_classes = self.failure_classes.with_failure(
                    0 if self._has_lost_worker else 1
                )
        self._nodes, self._ready_at, self._last_record_at = 1, None, 0.0
        self._has_lost_worker = self._has_end_record = False
