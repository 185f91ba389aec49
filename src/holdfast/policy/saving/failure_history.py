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
from holdfast.policy.saving.failure_classes import Classes
from holdfast.policy.saving.failure_rate import Hazard


class Seen:
    """Takes the records of a run, generation by generation; `hazard` is what those before the
    newest say, and `classes` what the failures took with them."""

    def __init__(self, prior: Hazard) -> None:
        self.hazard, self.classes = prior, Classes()
        self._generation, self._nodes = 0, 1
        self._ready: float | None = None
        self._last = 0.0
        self._lost = self._ended = False

    def observe(self, record: Record) -> None:
        if record.generation != self._generation:
            self._conclude()
            self._generation = record.generation
        event, self._last = record.event, max(self._last, record.time)
        if isinstance(event, GenerationStarted):
            self._nodes = len(set(event.topology.get("nodes", ()))) or 1
        elif isinstance(event, WorkerReady):
            self._ready = record.time
        elif isinstance(event, WorkerLost | WorkerHeld):  # its agent said so: that one lived
            self._lost = True
        elif isinstance(event, RunStopped | RunFinished | RunFailed):
            self._ended = True

    def _conclude(self) -> None:
        """The generation is over."""
        if self._ready is not None:
            failures = int(self._lost or not self._ended)
            passed = max(0.0, self._last - self._ready)
            self.hazard = self.hazard.after(passed, self._nodes, failures)
            if failures:  # without a record of the end, the node's memory was lost with the agent
                self.classes = self.classes.after(0 if self._lost else 1)
        self._nodes, self._ready, self._last = 1, None, 0.0
        self._lost = self._ended = False
