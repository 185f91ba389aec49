"""The workers of one generation, as the agent sees them: which run, and which make progress."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from holdfast.core.device_progress import GroupProgress
from holdfast.elastic.protocol.worker_messages import WorkerReport
from holdfast.events import Event
from holdfast.policy.recovery.survivors import HeldState


@dataclass
class WorkerStatus:
    """One worker's status.

    progress_at: when it last made progress, on the agent's monotonic clock.
    progress_count: how often it made progress within its step.
    blocked_in_collective: by its own report, it sleeps where ranks wait for each other.
    device_progress: how far its device is with exchanges, if training makes no progress.
    arrivals: by its own report, how often bytes of other ranks came without progress.
    last_heard_at: when it last reported anything.
    reply_pending: its report is not answered yet, so it cannot report again.
    report_cpu_s: CPU seconds that its reports took.
    may_be_busy: by its own report, it may do something else before it reports again.
    """

    rank: int
    pid: int  # 0 until its fork is told
    progress_at: float
    step: int = 0
    phase: str = "fork"
    progress_count: int = 0
    blocked_in_collective: bool = False
    device_progress: tuple[GroupProgress, ...] = ()
    arrivals: int = 0
    is_ready: bool = False
    outcome: tuple[str, int] | None = None  # ("finished" or "left", step)
    unsaved_reason: str | None = None  # why the state after that step is not durable
    script_error: str | None = None  # how its script failed after the loop
    held_state: HeldState | None = None  # it has stopped, and waits for what comes next
    exit_code: int | None = None  # as os.waitstatus_to_exitcode gives it
    is_loss_reported: bool = False  # and that has been said
    last_heard_at: float = 0.0
    reply_pending: bool = False
    may_be_busy: bool = False
    report_cpu_s: float = 0.0
    compute_time: tuple[float, int] = (0.0, 0)  # seconds of computing, and microbatches, in all
    reported_compute_time: tuple[float, int] = (0.0, 0)  # of these, what has been passed on
    load: tuple[float, float] = (0.0, 0.0)  # seconds without a processor, and elements, in all
    reported_load: tuple[float, float] = (0.0, 0.0)
    # seconds of whole steps, without what lies between them
    step_time: tuple[float, int] = (0.0, 0)

    @property
    def is_alive(self) -> bool:
        return self.exit_code is None

    @property
    def is_paused(self) -> bool:
        """Return True if it holds because it was asked to end its step and wait."""
        return self.held_state is not None and self.held_state.kind == "paused"


class WorkerTable:
    """The table of a generation's workers. It only keeps records."""

    def __init__(
        self, generation: int, world_size: int, event_cursors: dict[str, int] | None = None
    ) -> None:
        """Create an empty table.

        event_cursors: for each process that ever reported, the number of its next event. Events
        that a process could not send in an older generation arrive in this one, with the same
        numbers.
        """
        self.generation = generation
        self.world_size = world_size
        self._event_cursors = {} if event_cursors is None else event_cursors
        self._workers: dict[int, WorkerStatus] = {}

    def __iter__(self) -> Iterator[WorkerStatus]:
        return iter(self._workers.values())

    def __getitem__(self, rank: int) -> WorkerStatus:
        return self._workers[rank]

    @property
    def live_workers(self) -> list[WorkerStatus]:
        return [member for member in self if member.is_alive]

    def expect_worker(self, rank: int, now: float, pid: int = 0) -> None:
        """Add a worker. Its first report may arrive before the report of its fork."""
        self._workers[rank] = WorkerStatus(rank, pid, now, last_heard_at=now)

    def on_joined(self, rank: int, pid: int) -> WorkerStatus:
        member = self._workers[rank]
        member.pid = pid
        return member

    def mark_ready(self, rank: int) -> bool:
        """Mark a worker as about to compute; return True if it is the last of all."""
        self._workers[rank].is_ready = True
        return len(self._workers) == self.world_size and all(m.is_ready for m in self)

    def on_exited(self, rank: int, pid: int, exit_code: int) -> WorkerStatus | None:
        """Record an exit; return the worker, or None if it belongs to an older generation."""
        member = self._workers.get(rank)
        if member is None or member.pid != pid:
            return None
        member.exit_code = exit_code
        return member

    def process_report(self, report: WorkerReport, now: float) -> Sequence[Event]:
        """Process one report; return its new events.

        Events that were seen before are skipped; a gap is what the worker had to drop. Raises
        KeyError for a rank without a worker.
        """
        member = self._workers[report.rank]
        member.last_heard_at, member.reply_pending = now, True
        member.may_be_busy = report.has_callbacks
        member.compute_time = report.compute_time or member.compute_time
        member.load = report.load or member.load
        member.step_time = report.step_time or member.step_time
        member.report_cpu_s = max(member.report_cpu_s, report.cpu_s)
        progress = report.step, report.phase, report.progress_count
        if progress != (member.step, member.phase, member.progress_count):
            member.step, member.phase, member.progress_count = progress
            member.progress_at = now
        if report.arrivals != member.arrivals:  # it is no further, but the link is not dead
            member.arrivals, member.progress_at = report.arrivals, now
        member.blocked_in_collective = report.is_asleep
        member.device_progress = report.device_progress
        stream = self._stream_of(report)
        following = self._event_cursors.get(stream, 0)
        first, events = report.first_number, report.events
        fresh = events[max(0, following - first) :]
        self._event_cursors[stream] = max(following, first + len(events))
        if report.outcome is not None:
            member.outcome = report.outcome.kind, report.outcome.step
            member.unsaved_reason = report.outcome.unsaved_reason
        return fresh

    def next_event_number(self, report: WorkerReport) -> int:
        """Return the number of the first event that no report of this process has brought."""
        return self._event_cursors.get(self._stream_of(report), 0)

    def _stream_of(self, report: WorkerReport) -> str:
        return report.stream_id or f"{self.generation}.{report.rank}"

    def on_report_answered(self, rank: int, now: float) -> None:
        """Note that a report of this worker is answered, so it can report again."""
        member = self._workers.get(rank)
        if member is not None:
            member.last_heard_at, member.reply_pending = now, False

    def find_hung(self, now: float, limit_s: float) -> WorkerStatus | None:
        """Return the worker to blame if none has made progress for `limit_s` seconds; None
        otherwise.

        If one hangs, the other workers reach the next collective and wait there. While any of them
        makes progress, the run does. So all must have stalled. The worker with the least progress
        blocks the rest.
        """
        working = [member for member in self.live_workers if member.held_state is None]
        if not working or any(now - member.progress_at <= limit_s for member in working):
            return None
        return min(working, key=lambda m: (m.step, m.progress_count, m.progress_at))

    def forgive_pause(self, seconds: float) -> None:
        """Move all times on: the agent itself was suspended, so no worker could report."""
        for member in self:
            member.progress_at += seconds
            member.last_heard_at += seconds
