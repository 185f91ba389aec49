"""Detection of hung workers: an agent checks its own workers, the coordinator compares nodes.

    HangMonitor     on each node: reads the workers' reports and the state that the operating system
                    gives. It names a worker that is stopped (SIGSTOP). If all ranks of the
                    generation are on this node, it also names a worker that blocks the rest.
    HangDetector    at the coordinator, if ranks are on several nodes. A node reports a worker that
                    makes no progress for longer than a step. The report goes with the next
                    heartbeat, which is then sent at once. While all is well nothing is sent.

`policy.detection.hangs` decides. Ages travel, never times: clocks of two nodes are not compared.
The coordinator reports the hung worker to its node. The node checks again before it kills it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil

from holdfast.elastic.node.worker_status import WorkerStatus, WorkerTable
from holdfast.elastic.protocol.hung_worker import (
    _MAX_PROGRESS_COUNT,
    _PROGRESS_COUNT_BITS,
    ALL_RANKS,
    HungWorker,
    StalledWorker,
    StallReport,
)
from holdfast.elastic.protocol.worker_messages import STEP_PHASES
from holdfast.policy.detection.hangs import (
    FIRST_STEP_LIMIT_FACTOR,
    SLOW_PHASE_LIMIT_FACTOR,
    ProgressMark,
    Suspect,
    find_deadlock,
    find_hung,
    find_hung_devices,
    normal_step_s,
    stopped_process_limit,
)

WAITING_PHASES = ("reduce", "vote")
"""Phases in which a worker only waits for other ranks."""
MAX_STEP_SAMPLES = 32
"""Number of past steps that define the normal step time."""
REPORTER_BUSY_ALLOWANCE_S = 10.0
"""Seconds that a worker's reporter may be busy with something else after its events were stored."""

_FIRST_REPORT_EXTRA_S = 0.3  # more than a normal step: a hang of that length is reported
# times as old as at the last report: it is reported again
_NEXT_REPORT_AGE_FACTOR, _NEXT_WAITER_REPORT_AGE_FACTOR = (1.2, 2.0)
# seconds late: this agent was suspended itself, so no worker could report
_AGENT_STOPPED_LATENESS_S = 1.0


@dataclass(frozen=True)
class ProcessStat:
    """The operating system's view of a process.

    is_stopped: it was sent SIGSTOP.
    cpu_seconds: CPU time of all its threads.
    """

    is_stopped: bool
    cpu_seconds: float


def read_process_stat(pid: int) -> ProcessStat | None:
    """Return the operating system's view of a process, or None if it is unknown."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            spent = process.cpu_times()
            return ProcessStat(process.status() == psutil.STATUS_STOPPED, spent.user + spent.system)
    except psutil.Error:
        return None


@dataclass(frozen=True)
class HangHooks:
    """The actions on a hung worker.

    step_times: seconds of past steps, over generations.
    kill_process: ends a process, with the reason.
    report_to_coordinator: called when the coordinator must learn of a stalled worker.
    is_first_step_compiled: a first step may take as long as a compiler does.
    """

    step_times: deque[float] = field(default_factory=deque)
    kill_process: Callable[[int, str], None] = lambda pid, why: None
    report_to_coordinator: Callable[[], None] = lambda: None
    is_first_step_compiled: bool = False


@dataclass
class _ProcessObservation:
    """The observations of one worker's process."""

    progress_at: float  # its last progress, at which `base` was read
    cpu_at_progress: float | None = None
    cpu_seconds: float | None = None  # without what its own reports took
    stopped_since: float | None = None  # since when it was seen stopped
    cpu_when_stopped: float = 0.0
    reported_age_s: float = 0.0  # its age when it was told of last
    is_waiting: bool = False


class StepTimer:
    """Collects the times of one generation's steps from the workers' reports."""

    def __init__(self, step_times: deque[float]) -> None:
        """step_times: seconds of past steps, of this generation and older ones."""
        self._step_times = step_times
        self._newest_step: int | None = None  # the newest step that was begun
        self._counted_step_time: dict[int, tuple[float, int]] = {}  # of each rank, what is counted
        self.passed_steps = 0
        """Number of steps that have passed in this generation."""

    @property
    def normal_step_s(self) -> float | None:
        return normal_step_s(tuple(self._step_times))

    def on_report(self, worker: WorkerStatus) -> None:
        """Record the step time of a worker's report.

        Only the step itself counts, as the worker has timed it: between two steps a loader may
        wait, or a validation may run. A worker's first report may be of its third step.
        """
        seconds, steps = worker.step_time
        if self._newest_step is None and not steps:
            if worker.phase == "compute":
                self._newest_step = worker.step
            return
        if self._newest_step is not None and worker.step <= self._newest_step:
            return
        self._newest_step = worker.step
        self.passed_steps += 1
        before, counted = self._counted_step_time.get(worker.rank, (0.0, 0))
        self._counted_step_time[worker.rank] = worker.step_time
        if steps > counted:
            self._step_times.append((seconds - before) / (steps - counted))
            while len(self._step_times) > MAX_STEP_SAMPLES:
                self._step_times.popleft()


class HangMonitor:
    """Checks the workers of one generation on this node. Lives in one event loop."""

    def __init__(
        self,
        workers: WorkerTable,
        world_size: int,
        step_times: deque[float],
        progress_timeout_s: float,
        can_compare: bool = True,
        read_stat: Callable[[int], ProcessStat | None] = read_process_stat,
        *,
        is_first_step_compiled: bool = False,
    ) -> None:
        """Set up the monitor of one generation.

        Args:
            step_times: seconds of past steps, of this generation and older ones.
            can_compare: if False, only `progress_timeout_s` counts.
            is_first_step_compiled: as in `HangHooks`.
        """
        self._workers, self._read_stat = workers, read_stat
        self._step_timer = StepTimer(step_times)
        self._has_all_ranks = workers.world_size == world_size  # no rank is on another node
        self._progress_timeout_s, self._can_compare = progress_timeout_s, can_compare
        self._is_first_step_compiled = is_first_step_compiled
        self._observations: dict[int, _ProcessObservation] = {}
        self._last_tick_at: float | None = None
        self._recent_lateness: deque[float] = deque([0.0], maxlen=5)

    @property
    def normal_step_s(self) -> float | None:
        return self._step_timer.normal_step_s

    def on_report(self, worker: WorkerStatus) -> None:
        """Record the step time of a worker's report."""
        self._step_timer.on_report(worker)

    def tick(self, now: float, tick_interval_s: float, is_over: bool = False) -> list[HungWorker]:
        """Check all workers; return those that this node alone can declare hung.

        is_over: the generation has ended, so no worker computes any more.
        """
        late = (
            0.0
            if self._last_tick_at is None
            else max(0.0, now - self._last_tick_at - tick_interval_s)
        )
        self._last_tick_at = now
        if late > _AGENT_STOPPED_LATENESS_S:
            self._workers.forgive_pause(late)
            for seen in self._observations.values():
                seen.progress_at += late
                seen.stopped_since = None
            late = 0.0
        self._recent_lateness.append(late)
        found = [
            blame for member in self._watched_workers if (blame := self._find_stopped(member, now))
        ]
        if not self._can_compare:
            found = []
        return found if found or is_over or not self._has_all_ranks else self._find_hung(now)

    def _find_hung(self, now: float) -> list[HungWorker]:
        """Find hung workers when all ranks are on this node."""
        marks = self.progress_marks(now)
        named = (
            find_hung(marks, self.normal_step_s, now, wakeup_lag_s=max(self._recent_lateness))
            if self._can_compare
            else {}
        )
        waited = (
            find_deadlock(marks, self.normal_step_s, now, wakeup_lag_s=max(self._recent_lateness))
            if self._can_compare and not named
            else None
        )
        hung = self._workers.find_hung(now, self._progress_timeout_s)
        if waited or hung is not None:
            named = named or find_hung_devices(marks, now)
        if named:
            return [self._to_hung_worker(rank, one) for rank, one in named.items()]
        if waited:
            return [HungWorker(ALL_RANKS, 0, 0, "stuck", waited)]
        if hung is None:
            return []
        return [
            HungWorker(
                hung.rank, hung.step, hung.progress_count, "progress", self._progress_timeout_s
            )
        ]

    def _to_hung_worker(self, rank: int, suspect: Suspect) -> HungWorker:
        member = self._workers[rank]
        return HungWorker(
            rank, member.step, member.progress_count, suspect.sign, suspect.stalled_for_s
        )

    def is_still_hung(self, hung_worker: HungWorker) -> bool:
        """Return True if the worker that the coordinator named has made no progress since."""
        member = next((one for one in self._watched_workers if one.rank == hung_worker.rank), None)
        return member is not None and (member.step, member.progress_count) == (
            hung_worker.step,
            hung_worker.progress_count,
        )

    # --- one worker -----------------------------------------------------------------------------
    @property
    def _watched_workers(self) -> list[WorkerStatus]:
        return [m for m in self._workers.live_workers if m.held_state is None and m.outcome is None]

    def _find_stopped(self, worker: WorkerStatus, now: float) -> HungWorker | None:
        """Read the process state; return the worker if it was stopped (SIGSTOP) for too long."""
        seen = self._observations.setdefault(worker.rank, _ProcessObservation(worker.progress_at))
        process = self._read_stat(worker.pid) if worker.pid else None
        if process is None:
            seen.cpu_seconds = seen.stopped_since = None
            return None
        seen.cpu_seconds = process.cpu_seconds - worker.report_cpu_s
        if seen.progress_at != worker.progress_at or seen.cpu_at_progress is None:
            seen.progress_at = worker.progress_at
            seen.cpu_at_progress = seen.cpu_seconds
            seen.reported_age_s = 0.0
        if not process.is_stopped or worker.reply_pending:
            seen.stopped_since = None
            return None
        if (
            seen.stopped_since is None
            or worker.last_heard_at > seen.stopped_since
            or process.cpu_seconds > seen.cpu_when_stopped
        ):
            seen.stopped_since, seen.cpu_when_stopped = now, process.cpu_seconds
        seconds = now - seen.stopped_since
        if seconds <= stopped_process_limit(self.normal_step_s, max(self._recent_lateness)):
            return None
        return HungWorker(worker.rank, worker.step, worker.progress_count, "stopped", seconds)

    def progress_marks(self, now: float) -> dict[int, ProgressMark]:
        """Return the progress marks of every worker here that computes, or holds for a pause."""
        there = (m for m in self._workers.live_workers if m.outcome is None)
        return {
            m.rank: self._progress_mark(m, now)
            for m in there
            if m.held_state is None or m.is_paused
        }

    def _progress_mark(self, worker: WorkerStatus, now: float) -> ProgressMark:
        seen = self._observations.setdefault(worker.rank, _ProcessObservation(worker.progress_at))
        if worker.is_paused:  # it has done all that was asked of it
            return ProgressMark(
                (worker.step << _PROGRESS_COUNT_BITS) + _MAX_PROGRESS_COUNT,
                worker.progress_at,
                is_waiting=True,
            )
        known = (
            seen.cpu_seconds is not None
            and seen.cpu_at_progress is not None
            and seen.progress_at == worker.progress_at
        )
        computed = seen.cpu_seconds - seen.cpu_at_progress if known else None  # type: ignore[operator]
        quiet = 0.0 if worker.reply_pending else now - worker.last_heard_at
        if worker.may_be_busy:
            quiet = max(0.0, quiet - REPORTER_BUSY_ALLOWANCE_S)
        return ProgressMark(
            (worker.step << _PROGRESS_COUNT_BITS) + worker.progress_count,
            worker.progress_at,
            computed,
            worker.phase in WAITING_PHASES,
            quiet,
            self._limit_factor(worker),
            worker.blocked_in_collective,
            worker.device_progress,
        )

    def _limit_factor(self, worker: WorkerStatus) -> float:
        """Return the factor by which this worker's phase may exceed the usual time."""
        if worker.phase not in STEP_PHASES or (
            self._is_first_step_compiled and not self._step_timer.passed_steps
        ):
            return SLOW_PHASE_LIMIT_FACTOR
        return 1.0 if self._step_timer.passed_steps else FIRST_STEP_LIMIT_FACTOR

    # --- reports to the coordinator -------------------------------------------------------------
    def is_report_due(self, now: float) -> bool:
        """Return True if the coordinator must learn of a stalled worker at once."""
        if self._has_all_ranks:
            return False
        for rank, mark in self._stalled_marks(now).items():
            seen, age = self._observations[rank], now - mark.reached_at
            if age >= seen.reported_age_s * (
                _NEXT_WAITER_REPORT_AGE_FACTOR
                if mark.is_waiting and not mark.silent_for_s
                else _NEXT_REPORT_AGE_FACTOR
            ):
                return True
        return False

    def take_stall_report(self, now: float) -> StallReport | None:
        """Return the stall report for the next heartbeat; None while no worker is stalled."""
        if self._has_all_ranks:
            return None
        still = self._stalled_marks(now)
        if not still:
            return None
        stalled = []
        for rank, mark in still.items():
            age = now - mark.reached_at
            self._observations[rank].reported_age_s = age
            member = self._workers[rank]
            stalled.append(
                StalledWorker(
                    rank,
                    member.step,
                    mark.point & _MAX_PROGRESS_COUNT,
                    round(age, 3),
                    None if mark.cpu_seconds is None else round(mark.cpu_seconds, 2),
                    mark.is_waiting,
                    round(mark.silent_for_s, 3),
                    mark.limit_factor,
                    mark.is_blocked_in_collective,
                    mark.device_progress,
                )
            )
        normal = self.normal_step_s if self._can_compare else None  # None: workers are not compared
        return StallReport(
            normal,
            max(self._recent_lateness),
            len(self.progress_marks(now)),
            self._progress_timeout_s,
            tuple(stalled),
        )

    def _stalled_marks(self, now: float) -> dict[int, ProgressMark]:
        first = (
            (self.normal_step_s or 2.0) + _FIRST_REPORT_EXTRA_S
            if self._can_compare
            else self._progress_timeout_s
        )
        marks = self.progress_marks(now)
        return {rank: mark for rank, mark in marks.items() if now - mark.reached_at > first}
