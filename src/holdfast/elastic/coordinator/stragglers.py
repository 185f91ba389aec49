"""The coordinator's straggler tracker: compares the workers' time per microbatch.

Every heartbeat of a node reports how long each of its workers has computed since the last one, and
how many microbatches. Once all workers are reported, `policy.detection.stragglers` compares them.
It names workers that are slow beyond doubt by the median of their kind, so a common slowdown
cancels out. A slow worker gets fewer microbatches in the next generation (`speeds`, which weigh its
replica). If that is not enough, its node becomes a standby, provided that the run does not need it.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.elastic.protocol.coordinator_messages import WorkerPace
from holdfast.policy.detection.stragglers import (
    Pace,
    PaceChange,
    StepTiming,
    StragglerDetector,
    StragglerLimits,
)

WorkerId = tuple[str, int]
"""A node and one of its processes; both stay when ranks change."""


def worker_of(change: PaceChange) -> WorkerId:
    """Return the worker that a change concerns."""
    who = change.worker
    assert isinstance(who, tuple), "workers are known by node and process"
    node, pid = who
    return str(node), int(pid)


class StragglerTracker:
    """The straggler tracker of one term."""

    def __init__(self, limits: StragglerLimits | None = None) -> None:
        self._detector = StragglerDetector(limits)
        self._generation = 0
        # workers that were reported in this generation
        self._reporting_workers: set[WorkerId] = set()
        self._pending_timings: dict[WorkerId, StepTiming] = {}
        self._slowdowns: dict[WorkerId, float] = {}  # of slow workers: time relative to normal

    def observe(
        self, node_name: str, generation: int, paces: Iterable[WorkerPace]
    ) -> tuple[PaceChange, ...]:
        """Take a node's report on its workers; return the changed verdicts."""
        if generation != self._generation:
            self._generation, self._reporting_workers, self._pending_timings = generation, set(), {}
        for pace in paces:
            who = (node_name, pace.pid)
            before = self._pending_timings.get(who)
            waited, elements = pace.load
            told = StepTiming(who, pace.position, pace.seconds, pace.microbatches, waited, elements)
            if before is not None:
                told = told.plus(before)
            self._reporting_workers.add(who)
            self._pending_timings[who] = told
        if len(self._pending_timings) < max(2, len(self._reporting_workers)):
            return ()
        timings, self._pending_timings = list(self._pending_timings.values()), {}
        changes = self._detector.observe(timings)
        for change in changes:
            who = worker_of(change)
            if change.after is Pace.WELL:
                self._slowdowns.pop(who, None)
            else:
                self._slowdowns[who] = max(1.0, change.slowdown)
        return changes

    @property
    def relative_speeds(self) -> dict[WorkerId, float]:
        """Relative speed of each slow worker; a normal one has 1."""
        return {
            who: round(1 / slower, 2) for who, slower in self._slowdowns.items() if slower > 1.0
        }

    def is_node_excluded(self, node_name: str) -> bool:
        """Return True if no worker of this node should get work."""
        here = {who for who in self._reporting_workers if who[0] == node_name}
        return bool(here) and here <= self._detector.excluded.keys()
