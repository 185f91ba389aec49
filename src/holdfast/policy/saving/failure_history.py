"""Estimates from a journal how often its run breaks: records in, a Hazard out. Pure.

A generation is at risk from the moment its last worker is ready to its last record. It ended in a
failure if a worker was lost, or if no record says how it ended. In the second case its agent, and
perhaps the node, is lost. Recoveries are no time at risk, because they make nothing that could be
lost. All records of a generation are stamped by one clock.
"""

from __future__ import annotations

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
from holdfast.policy.saving.failure_classes import FailureClassCounts
from holdfast.policy.saving.failure_rate import FailureRate


class FailureHistory:
    """Takes the records of a run, generation by generation; `failure_rate` is what those before the
    newest say, and `failure_classes` what the failures took with them."""

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
        """The generation is over."""
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
