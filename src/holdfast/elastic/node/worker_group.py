"""The workers of one generation on this node: their events, and the outcome of the generation.

The first cause sets the outcome, once. Its consequences are not reported as losses: peers that stop
because one was lost, workers that are killed. A worker that dies by itself while the other workers
stop is reported.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence

from holdfast.config.sections.cluster import ClusterConfig
from holdfast.elastic.event_log import EventLog, Say
from holdfast.elastic.node.hang_monitor import HangHooks, HangMonitor
from holdfast.elastic.node.output_relay import ProcessOutput
from holdfast.elastic.node.worker_status import WorkerStatus, WorkerTable
from holdfast.elastic.protocol import exit_codes
from holdfast.elastic.protocol.coordinator_messages import WorkerPace
from holdfast.elastic.protocol.generation_outcome import (
    FailedOutcome,
    FinishedOutcome,
    GenerationOutcome,
    LeftOutcome,
    LostOutcome,
)
from holdfast.elastic.protocol.hung_worker import ALL_RANKS, HungWorker, StallReport
from holdfast.elastic.protocol.profile_messages import ProfileRequest
from holdfast.elastic.protocol.worker_messages import SCRIPT_END, WorkerReport
from holdfast.events import Event, StepDone, WorkerHeld, WorkerLost, WorkerReady, WorkerStarted
from holdfast.layout import Topology
from holdfast.policy.recovery.survivors import HeldState

_MAX_REASON_CHARS = 120
"""Most characters of a worker's reason. The rest, which may come from a library, is in its log."""


class WorkerGroup:
    """The workers of a generation, from the first start to the outcome. Lives in one event loop."""

    def __init__(
        self,
        topology: Topology,
        start_step: int,
        cluster: ClusterConfig,
        event_log: EventLog,
        say: Say,
        on_all_ready: Callable[[], None],
        event_cursors: dict[str, int],
        node: str = "",
        hang_hooks: HangHooks | None = None,
    ) -> None:
        """Set up a generation without workers.

        Args:
            on_all_ready: called once, when every worker is about to compute its first step.
            node: if given, only this node's workers count; other nodes' agents have the rest.
            hang_hooks: the actions on a hung worker.
        """
        self._loop = asyncio.get_running_loop()
        self.generation = topology.generation
        self.start_step = start_step
        self.newest_step = start_step  # the newest step that a worker reported done
        self.longest_step_s = 0.0  # what the longest of its steps took
        here = [rank for rank, at in enumerate(topology.nodes) if node in ("", at)]
        self.ranks = tuple(here)
        self.workers = WorkerTable(topology.generation, len(here), event_cursors)
        self.outcome: asyncio.Future[GenerationOutcome] = self._loop.create_future()
        self.topology = topology
        self.refusal: FailedOutcome | None = None
        """A worker's refusal of something that the user must correct on this node."""
        self.profile = ProfileRequest()
        """The newest request for a profile of workers here."""
        self._cluster = cluster
        self._event_log = event_log
        self._say = say
        self._on_all_ready = on_all_ready
        self._hang_hooks = hang_hooks or HangHooks()
        self.hang_monitor = HangMonitor(
            self.workers,
            topology.world_size,
            self._hang_hooks.step_times,
            cluster.progress_seconds,
            cluster.compare,
            is_first_step_compiled=self._hang_hooks.is_first_step_compiled,
        )

    @property
    def reached_step(self) -> int:
        """Return the newest step that the workers here have completed, reported or not."""
        return max(self.newest_step, *(member.step - 1 for member in self.workers), 0)

    @property
    def has_stepped(self) -> bool:
        """Return True if a worker here has completed a step of this generation."""
        return any(member.step > self.start_step + 1 for member in self.workers)

    # --- beginning and end ----------------------------------------------------------------
    def expect_workers(self, pids: Mapping[int, int]) -> None:
        """Register the workers before any of them receives its begin command.

        pids: of the processes that stay, by rank.
        """
        for rank in self.ranks:
            self.workers.expect_worker(rank, self._loop.time(), pids.get(rank, 0))

    def decide(self, outcome: GenerationOutcome) -> None:
        """Set the outcome, unless it is set: the first counts."""
        if not self.outcome.done():
            self.outcome.set_result(outcome)

    @property
    def decided_outcome(self) -> GenerationOutcome | None:
        """Return the outcome, if this node found it."""
        verdict = self.outcome
        return verdict.result() if verdict.done() and not verdict.cancelled() else None

    # --- news of processes ------------------------------------------------------------------
    def on_joined(self, rank: int, pid: int) -> None:
        self.workers.on_joined(rank, pid)
        node = self.topology.nodes[rank]
        self._event_log.emit("agent", WorkerStarted(rank, pid, node, step=self.newest_step))

    def on_exited(
        self, rank: int, pid: int, exit_code: int, log: ProcessOutput, kill_reason: str
    ) -> None:
        """Handle a worker's exit; `kill_reason`, if the process manager gave the worker up."""
        member = self.workers.on_exited(rank, pid, exit_code)
        if member is None or member.is_loss_reported:
            return
        if exit_code == exit_codes.USER_ERROR and member.outcome is None:
            words = log.last_lines(1) or "a worker refused to start"
            self.refusal = FailedOutcome(words, exit_codes.USER_ERROR)
        if not self.outcome.done():
            self._decide_after_exit(member, log)
        elif kill_reason:
            self._report_loss(member, kill_reason, "halt")
        elif (
            member.outcome is None
            and exit_code not in (exit_codes.PEER_LOST, exit_codes.USER_ERROR)
            and self._can_survivors_continue
        ):
            self._report_dead_worker(member, log, "exit")  # a second fault

    @property
    def _can_survivors_continue(self) -> bool:
        """Return True if the survivors continue, so that only lost workers may exit."""
        elsewhere = self.outcome.cancelled()  # the agent has cancelled it: other nodes ended it
        lost = elsewhere or isinstance(self.decided_outcome, LostOutcome)
        return lost and not self._cluster.replaces_all_workers

    def on_held(self, rank: int, held_state: HeldState) -> None:
        """Record that a worker has stopped, by itself or on command, and waits."""
        member = self.workers[rank]
        member.held_state = held_state
        why = (held_state.text or held_state.kind)[:_MAX_REASON_CHARS]
        event = WorkerHeld(rank, held_state.applied, held_state.whole, why, step=self.newest_step)
        self._event_log.emit("agent", event)
        if not self.outcome.done():
            self._decide_after_hold(member, held_state)

    def _decide_after_hold(self, worker: WorkerStatus, held_state: HeldState) -> None:
        """Derive the outcome from a worker that has stopped by itself."""
        if held_state.kind == "paused":
            return  # it was asked to, with all the others
        if held_state.kind == "script":
            self.decide(FailedOutcome(held_state.text, exit_codes.USER_ERROR))
            return
        if held_state.kind == "non_finite" and self._cluster.replaces_all_workers:
            unharmed = "the state before that step is unharmed"
            hint = "try a lower train.optimizer.learning_rate"
            self.decide(FailedOutcome(f"{held_state.text}; {unharmed}: {hint}"))
            return
        outcome = _outcome_of_hold(worker.rank, held_state)
        if outcome.reason != "peer_lost":
            self.decide(outcome)
            return
        # The worker that really died is reported at the same moment. Only if none is, this worker's
        # report counts.
        self._loop.call_later(self._cluster.heartbeat_seconds, self.decide, outcome)

    def _decide_after_exit(self, worker: WorkerStatus, log: ProcessOutput) -> None:
        """Derive the outcome from a worker that exited while its generation ran."""
        if worker.outcome is not None:
            worker.script_error = _failure_at_end(worker, log, self._say)
            if not self.workers.live_workers:
                self.decide(_common_outcome(self.workers))
            return
        match worker.exit_code:
            case exit_codes.USER_ERROR:
                assert self.refusal is not None
                self.decide(self.refusal)
            case exit_codes.PEER_LOST:
                # The worker that really died is reported at the same moment. Only if none is, this
                # worker's report counts.
                beat = self._cluster.heartbeat_seconds
                self._loop.call_later(beat, self._report_dead_worker_unless_decided, worker, log)
            case _:
                self._report_dead_worker(worker, log, "exit")

    def _report_dead_worker_unless_decided(self, worker: WorkerStatus, log: ProcessOutput) -> None:
        if not self.outcome.done():
            self._report_dead_worker(worker, log, "peer")

    def _report_dead_worker(
        self, worker: WorkerStatus, log: ProcessOutput, noticed_by: str
    ) -> None:
        code = worker.exit_code if worker.exit_code is not None else -signal.SIGKILL
        cause = exit_codes.describe_exit_code(code)
        said = log.last_lines(12)
        if code in (exit_codes.CRASHED, exit_codes.DONE):
            cause = f"{cause}: {log.last_lines(1) or 'it said nothing'}"
        elif code in (-signal.SIGKILL, exit_codes.PEER_LOST, exit_codes.AGENT_LOST):
            said = ""  # it says nothing about its own end
        if said:
            self._say(f"worker {worker.rank} ended; the last lines of {log.path}:")
            self._say(said)
        self._report_loss(worker, cause, noticed_by)

    def _report_loss(
        self, worker: WorkerStatus, cause: str, noticed_by: str, reason: str = "worker_lost"
    ) -> None:
        worker.is_loss_reported = True
        node = self.topology.nodes[worker.rank]
        event = WorkerLost(worker.rank, worker.pid, cause, noticed_by, node, step=self.newest_step)
        self._event_log.emit("agent", event)
        self.decide(
            LostOutcome(
                reason, f"worker {worker.rank}: {cause}", lost_ranks=frozenset({worker.rank})
            )
        )

    # --- news from the workers ------------------------------------------------------------
    def process_report(self, report: WorkerReport) -> Sequence[Event]:
        """Process a worker's report; return its new events. Raises KeyError for another's rank."""
        rank = report.rank
        events = self.workers.process_report(report, self._loop.time())
        self.hang_monitor.on_report(self.workers[rank])
        for event in events:
            match event:
                case StepDone():
                    self.newest_step = max(self.newest_step, event.step)  # it may be told once more
                    self.longest_step_s = max(self.longest_step_s, event.seconds)
                case WorkerReady():
                    if self.workers.mark_ready(rank):
                        self._on_all_ready()
            self._event_log.emit(f"rank{rank}", event)
        return events

    def on_report_answered(self, rank: int) -> None:
        """Note that a worker's report is answered."""
        self.workers.on_report_answered(rank, self._loop.time())

    # --- hung workers ---------------------------------------------------------------------
    def check_progress(self, now: float) -> None:
        """Check for hung workers; called at every tick. A hung worker ends the generation."""
        over = self.outcome.done()
        for blame in self.hang_monitor.tick(now, self._cluster.heartbeat_seconds, over):
            self._give_up_worker(blame)
        if self.decided_outcome is None and self.hang_monitor.is_report_due(now):
            self._hang_hooks.report_to_coordinator()

    def stalled_workers(self) -> StallReport | None:
        """Return the stall report for the coordinator; None if no worker is stalled."""
        if self.decided_outcome is not None:
            return None
        return self.hang_monitor.take_stall_report(self._loop.time())

    def take_paces(self) -> tuple[WorkerPace, ...]:
        """Return what each worker here has computed since the last call, as `_worker_paces` does.

        The first steps do not count.
        """
        if not self._cluster.compare or not self.has_stepped or self.outcome.done():
            return ()
        return _worker_paces(self.topology, self.workers.live_workers)

    def handle_hung_workers(self, hung_workers: Iterable[HungWorker]) -> None:
        """Give up workers that the coordinator declares hung, if they still are."""
        for one in hung_workers:
            if not self.outcome.done() and self.hang_monitor.is_still_hung(one):
                self._give_up_worker(one)

    def _give_up_worker(self, hung_worker: HungWorker) -> None:
        """Report a worker, kill it, and end the generation. If the generation has ended, only kill
        it."""
        if hung_worker.rank == ALL_RANKS:
            several = self.topology.world_size > 1
            what = "all workers wait for one another" if several else "the worker makes no progress"
            self.decide(LostOutcome("hang", f"{what} for {hung_worker.stalled_for_s:.1f} s"))
            return
        member = self.workers[hung_worker.rank]
        cause = hung_worker.describe(member.phase)
        if not self.outcome.done() and not member.is_loss_reported:
            self._report_loss(member, cause, hung_worker.symptom, "hang")
        self._hang_hooks.kill_process(member.pid, cause)


def _outcome_of_hold(rank: int, held_state: HeldState) -> LostOutcome:
    """Return the generation's outcome, by the reason for which a worker stopped by itself."""
    cause = f"worker {rank}: {held_state.text or held_state.kind}"
    match held_state.kind:
        case "non_finite" | "loss_jump":
            return LostOutcome(held_state.kind, held_state.text)
        case "rotten":
            said = held_state.text or "it could not be read"
            return LostOutcome("rot", f"worker {rank}: {said}", said)
        case "error":
            return LostOutcome("error", cause, lost_ranks=frozenset({rank}))
        case _:
            return LostOutcome("peer_lost", cause, lost_ranks=frozenset({rank}))


def _failure_at_end(
    worker: WorkerStatus, log: ProcessOutput, say: Callable[[str], None]
) -> str | None:
    """Say that a worker failed after its last step. Return why, if a script failed after its loop:
    the run is complete, but the script is not."""
    assert worker.outcome is not None
    if (code := worker.exit_code) in (None, exit_codes.DONE):
        return None
    words = log.last_lines(1) if code in (exit_codes.USER_ERROR, exit_codes.CRASHED) else ""
    why = words or exit_codes.describe_exit_code(code)
    say(
        f"worker {worker.rank} failed after its last step ({worker.outcome[1]}): {why}; "
        f"more is in {log.path}"
    )
    is_script = code == exit_codes.USER_ERROR or worker.phase == SCRIPT_END
    return (words or f"worker {worker.rank} ended after the loop: {why}") if is_script else None


def _common_outcome(workers: WorkerTable) -> GenerationOutcome:
    """Return the outcome of workers that have all reported one, and exited."""
    outcomes = {member.outcome for member in workers}
    if len(outcomes) > 1:
        return LostOutcome("worker_lost", f"the workers ended differently: {outcomes}")
    ((kind, step),) = (outcome for outcome in outcomes if outcome is not None)
    unsaved = next((m.unsaved_reason for m in workers if m.unsaved_reason is not None), None)
    if kind != "finished":
        return LeftOutcome(step, unsaved)
    error = next((m.script_error for m in workers if m.script_error is not None), None)
    return FinishedOutcome(step, unsaved, script_error=error)


def _worker_paces(topology: Topology, workers: Iterable[WorkerStatus]) -> tuple[WorkerPace, ...]:
    """Return what each worker has computed since it was last reported.

    Workers with equal positions do the same work.
    """
    paces = []
    for member in workers:
        (seconds, done), (before, passed) = member.compute_time, member.reported_compute_time
        member.reported_compute_time = member.compute_time
        (waited, elements), (waited_before, elements_before) = member.load, member.reported_load
        member.reported_load = member.load
        if done > passed > 0:
            replica = topology.replica_of(member.rank)
            place = f"{replica.kind} {replica.ranks.index(member.rank)}"
            load = round(waited - waited_before, 6), elements - elements_before
            pace = WorkerPace(member.pid, place, round(seconds - before, 6), done - passed, load)
            paces.append(pace)
    return tuple(paces)
