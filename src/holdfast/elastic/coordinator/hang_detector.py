"""Find the hung worker by comparing what all nodes report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from holdfast.elastic.protocol.hung_worker import _PROGRESS_COUNT_BITS, HungWorker, StallReport
from holdfast.policy.detection.hangs import (
    HANG_LIMIT_EXTRA_S,
    HANG_LIMIT_STEPS,
    ProgressMark,
    find_deadlock,
    find_furthest_behind,
    find_hung,
    find_hung_devices,
)


@dataclass
class _NodeStallReport:
    """The last report of one node. of: its workers at work. progress: seconds that it tolerates
    without progress of any worker."""

    received_at: float
    normal_step_s: float | None
    lateness_s: float
    worker_count: int
    progress_timeout_s: float
    marks: dict[int, ProgressMark] = field(default_factory=dict)
    positions: dict[int, tuple[int, int]] = field(default_factory=dict)  # rank -> step, marks

    @staticmethod
    def receive(report: StallReport, now: float) -> _NodeStallReport:
        """Return a report that arrives now: its ages become times of the coordinator's clock."""
        told = _NodeStallReport(
            now,
            report.normal_step_s,
            report.lateness_s,
            report.worker_count,
            report.progress_timeout_s,
        )
        for one in report.workers:
            told.positions[one.rank] = one.step, one.progress_count
            told.marks[one.rank] = ProgressMark(
                (one.step << _PROGRESS_COUNT_BITS) + one.progress_count,
                now - one.stalled_for_s,
                one.cpu_seconds,
                one.is_waiting,
                one.silent_for_s,
                one.limit_factor,
                one.is_blocked_in_collective,
                one.device_progress,
            )
        return told


class HangDetector:
    """The nodes' reports of one generation on workers without progress."""

    def __init__(self) -> None:
        self._generation = self._furthest_point = 0
        self._reports: dict[str, _NodeStallReport] = {}

    def observe(
        self,
        node_name: str,
        generation: int,
        stall_report: StallReport | None,
        now: float,
        oldest_heartbeat_at: Callable[[], float] = lambda: inf,
    ) -> list[HungWorker]:
        """Take a node's report; return those of its workers that the node must kill.

        stall_report: None if all its workers make progress. oldest_heartbeat_at: returns the time
        of the members' oldest last heartbeat; called only if a worker is behind. No worker counts
        as behind before all members were heard again. It may wait for one that is cut off."""
        if generation != self._generation:
            self._generation, self._reports, self._furthest_point = generation, {}, 0
        if stall_report is None:
            self._reports.pop(node_name, None)
            return []
        self._reports[node_name] = told = _NodeStallReport.receive(stall_report, now)
        limit = self.stall_limit_s
        self._furthest_point = max(
            self._furthest_point, *(mark.point for mark in told.marks.values())
        )
        # most reported workers wait for another rank: return early for them
        if limit is None or not any(
            now - mark.reached_at > limit
            and (
                mark.point < self._furthest_point
                or mark.silent_for_s > limit
                or not (mark.is_waiting or mark.is_blocked_in_collective)
            )
            for mark in told.marks.values()
        ):
            return []
        named = find_hung(self._marks, self.normal_step_s, now, wakeup_lag_s=told.lateness_s)
        return [
            HungWorker(rank, *told.positions[rank], named[rank].sign, named[rank].stalled_for_s)
            for rank, mark in told.marks.items()
            if rank in named
            if named[rank].sign != "behind" or oldest_heartbeat_at() > mark.reached_at + limit
        ]

    @property
    def node_names(self) -> frozenset[str]:
        """Nodes that have workers without progress."""
        return frozenset(self._reports)

    @property
    def _marks(self) -> dict[int, ProgressMark]:
        return {rank: mark for one in self._reports.values() for rank, mark in one.marks.items()}

    @property
    def normal_step_s(self) -> float | None:
        """Seconds that a step normally takes, as the slowest node reports."""
        return max(
            (t.normal_step_s for t in self._reports.values() if t.normal_step_s is not None),
            default=None,
        )

    @property
    def stall_limit_s(self) -> float | None:
        """Seconds that one worker may keep other workers waiting; None until known."""
        normal = self.normal_step_s
        return None if normal is None else HANG_LIMIT_STEPS * normal + HANG_LIMIT_EXTRA_S

    def waiting_since(self, since: float) -> float | None:
        """Return when the last of the waiting workers began to wait; None if none waits. Only
        reports after `since` count."""
        return max(
            (
                mark.reached_at
                for told in self._reports.values()
                if told.received_at >= since
                for mark in told.marks.values()
                if mark.is_waiting
            ),
            default=None,
        )

    def find_deadlock(self, now: float, node_names: frozenset[str]) -> float | None:
        """Return the seconds that all workers of these nodes have waited for one another."""
        if not node_names <= self._reports.keys():
            return None
        if any(one.worker_count != len(one.marks) for one in self._reports.values()):
            return None
        late = max(one.lateness_s for one in self._reports.values())
        return find_deadlock(self._marks, self.normal_step_s, now, wakeup_lag_s=late)

    def find_hung_devices(self, now: float) -> dict[str, list[HungWorker]]:
        """Return the workers whose devices the rest waits for, by node, if all have waited for too
        long."""
        named = find_hung_devices(self._marks, now)
        found: dict[str, list[HungWorker]] = {}
        for node, one in self._reports.items():
            for rank in named.keys() & one.marks.keys():
                suspect = named[rank]
                hung = HungWorker(rank, *one.positions[rank], suspect.sign, suspect.stalled_for_s)
                found.setdefault(node, []).append(hung)
        return found

    def find_hung_worker(
        self, now: float, node_names: frozenset[str]
    ) -> tuple[str, HungWorker] | None:
        """Return the node and the worker with the least progress if all workers hang.

        This is the last resort, if every worker of these nodes has made no progress for long."""
        if not node_names <= self._reports.keys():
            return None
        told = {name: self._reports[name] for name in node_names}
        if any(one.worker_count != len(one.marks) for one in told.values()):
            return None
        seconds = max(one.progress_timeout_s for one in told.values())
        found = find_furthest_behind(self._marks, now, seconds)
        for name, one in told.items():
            if found is not None and found in one.positions:
                return name, HungWorker(found, *one.positions[found], "progress", seconds)
        return None
