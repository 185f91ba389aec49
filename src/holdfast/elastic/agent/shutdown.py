"""The shutdown of a node or of the run: signals, notices, `holdfast notice`.

If other nodes take part, a node that is asked to leave is dropped. The coordinator ends the
generation after a step, and the next generation has the remaining nodes. If no other node takes
part, or all must leave, the run stops. The workers learn it from the answers to their reports, and
leave at one common step. A mere warning (the machine comes back, or may go) causes a save into
tiers that survive the machine (`elastic/notices/handler.py`).
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from math import inf

from holdfast.checkpoint.save.held_save import MESSAGE_INTERVAL_S
from holdfast.config.run import RunConfig
from holdfast.elastic.agent.final_upload import FinalUpload
from holdfast.elastic.agent.run_folder_monitor import LAST_NODE_FOLDER_WAIT_S
from holdfast.elastic.coordinator.coordinator import Coordinator
from holdfast.elastic.coordinator.run_controller import RunController
from holdfast.elastic.event_log import EventLog, Say
from holdfast.elastic.membership.role_loop import RoleLoop
from holdfast.elastic.node.node_runner import NodeRunner
from holdfast.elastic.node.worker_group import WorkerGroup
from holdfast.elastic.notices.clouds import TerminationWarning
from holdfast.elastic.notices.handler import DeferredNotices, NoticeHandler
from holdfast.elastic.notices.prediction import PredictionWatch
from holdfast.elastic.protocol.notice_messages import EmergencyReply, Notice
from holdfast.elastic.run_result import EndReason, unsaved_sentence
from holdfast.errors import CannotGoOnError, HoldfastError, UserError
from holdfast.events import (
    NoticeReceived,
    PredictedMove,
    PredictionFailed,
    SaveWaiting,
    StopRequested,
)
from holdfast.policy.detection.stop_rules import StopDecision
from holdfast.policy.membership.election import Role
from holdfast.policy.membership.transitions import NodeStage, Phase

DEFAULT_LEAVE_TIMEOUT_S = 20.0
"""Seconds until a node that is asked to leave is dropped."""
DEFAULT_GRACE_S = 30.0
"""Seconds from a signal to the kill, if the run file does not say: Kubernetes' and Slurm's."""
END_WITHOUT_STEP_SHARE = 0.8
"""Share of the grace after which a run ends that has not completed a step in its generation. The
rest is for the end of its processes."""
WARNING_SIGNAL_S = 60.0
"""Seconds from SIGUSR1 to what it warns of, where no notice source knows: Grid Engine's default."""


@dataclass(eq=False)
class ShutdownController:
    """The shutdown controller of one agent. Lives in one event loop.

    is_single_node: the run has no other node. exit_at_once: makes the agent exit without
    waiting; it receives what is not saved then, "" for nothing. committed_step: returns the
    newest step that a checkpoint has.
    """

    config: RunConfig
    node: str
    is_single_node: bool
    _: KW_ONLY
    event_log: EventLog
    say: Say
    node_runner: NodeRunner
    role_loop: RoleLoop
    run_controller: RunController
    notice_handler: NoticeHandler
    final_upload: FinalUpload
    exit_at_once: Callable[[str], None]
    committed_step: Callable[[], int]
    stop_cause: Callable[[], str] | None = None  # as in `RunContext`

    def __post_init__(self) -> None:
        self.reason: str | None = None
        self.ended_code: int | None = None
        """Exit code of a run that a rule or the budget stopped; None for other stops."""
        self._is_whole_run_leaving = False  # all of the run must stop, though other nodes take part
        self._deferred_notices = DeferredNotices()
        self._clock = asyncio.get_running_loop().time
        self._said_at, self._give_up_at = -inf, inf  # of a save that the journal keeps waiting
        self._has_given_up = False
        self._explanation: asyncio.Future[None] | None = None
        self._call_later: Callable[[float, Callable[[], None]], object]
        self._call_later = asyncio.get_running_loop().call_later
        self.is_signal_explained: Callable[[int], bool] = lambda number: False
        """Returns True if a notice source knows what the signal means, and will report it."""

    # --- what follows from it -------------------------------------------------------------------
    @property
    def is_last_node(self) -> bool:
        """Return True if no other node takes part, so that leaving stops the run."""
        coordinator = self.role_loop.coordinator
        if coordinator is not None:
            return len(coordinator.state.nodes) == 1
        if self.role_loop.state.role is Role.FOLLOWER:  # a spare knows no other node's address
            return False
        return len(self.role_loop.agent_addresses) <= 1

    @property
    def stop_reason(self) -> str:
        """Reason for which all of the run must stop; "" while it continues."""
        return (
            self.reason if self.reason and (self._is_whole_run_leaving or self.is_last_node) else ""
        )

    # --- signals --------------------------------------------------------------------------------
    def on_signal(self, number: signal.Signals) -> None:
        """Act on one of `lifeline.AGENT_SIGNALS`.

        SIGUSR1 is a mere warning: a scheduler sends it before it suspends a job, or some time
        before its end. SIGINT leaves, and at once if it comes twice. The rest ask to leave, as
        SIGTERM does.
        """
        name, grace = number.name, self.config.cluster.grace_seconds
        if number is signal.SIGUSR1:
            self.say(f"{name}: saving; training continues")
            self.on_termination_warning(TerminationWarning(WARNING_SIGNAL_S, False, name, name))
        elif self.final_upload.missing_upload:  # only the final upload is still under way
            self.exit_at_once(f"{name}; {self.final_upload.missing_upload}")
        elif self.reason is not None:
            if number is signal.SIGINT and not self._give_up_save():
                self.exit_at_once("")
        elif number is signal.SIGTERM and self.is_signal_explained(number):
            return  # the notice source will say how much time is left
        elif number is not signal.SIGINT and grace and self.is_last_node:
            self.on_termination_warning(TerminationWarning(grace, True, name, name))
        else:
            self.begin_shutdown(name, 0.0 if number is signal.SIGINT else grace)
            if number is signal.SIGTERM and self.stop_cause is not None:
                explaining = self._explain_stop(name, self.stop_cause)
                self._explanation = asyncio.ensure_future(explaining)

    async def _explain_stop(self, reason: str, stop_cause: Callable[[], str]) -> None:
        """Name what is behind a signal, if the run folder tells; a disk may hang meanwhile."""
        cause = await asyncio.to_thread(stop_cause)
        if cause and self.reason == reason:
            self.reason = cause

    def begin_shutdown(self, reason: str, leave_within_s: float = 0.0) -> None:
        """Leave the run; if the run continues without this node, within `leave_within_s`."""
        if self.reason is not None:
            return
        self.reason = reason
        if not (self.is_last_node or self._is_whole_run_leaving):
            self.say(
                f"{reason}: {self.node} leaves; the other nodes continue, or save if all leave"
            )
            self.role_loop.leave_within_s = leave_within_s or DEFAULT_LEAVE_TIMEOUT_S
            self.node_runner.state_changed.set()
            return
        # A run of one node may have its first object already: its session must end with a stop.
        if not self.node_runner.generation and not self.is_single_node:
            self.role_loop.leave_run()  # nothing has begun
            return
        self.say(f"{reason}: saving and leaving at the next step (Ctrl-C again: at once)")
        if reason != signal.SIGINT.name:  # Ctrl-C can be pressed again
            share = END_WITHOUT_STEP_SHARE * (leave_within_s or DEFAULT_GRACE_S)
            self._call_later(share, self.end_without_step)
            known_s = END_WITHOUT_STEP_SHARE * leave_within_s
            self._give_up_at = self._clock() + (known_s or LAST_NODE_FOLDER_WAIT_S)
        if self.node_runner.generation:
            self.event_log.emit("agent", StopRequested(reason, step=self.newest_step))
        self.run_controller.stop_waiting(reason)  # acts if no node works

    def stop_by_rule(self, decision: StopDecision) -> None:
        """Stop all of the run at the next step, as a rule of train.stop says."""
        code = CannotGoOnError.exit_code if decision.is_failure else 0
        self.stop_run(f"train.stop.{decision.rule}: {decision.sentence}", code)

    def stop_run(self, reason: str, exit_code: int) -> None:
        """Stop all of the run at the next step, with an exit code of its own."""
        if self.reason is None:
            self.ended_code = exit_code
            self._is_whole_run_leaving = True
            self.begin_shutdown(reason)

    def end_without_step(self) -> None:
        """End a run that must stop, if its generation has not completed a step.

        A generation that begins, or a recovery, may take minutes until its first step. The kill
        would come before."""
        group, stage = self.node_runner.worker_group, self.node_runner.stage
        has_stepped = group is not None and group.reached_step > group.start_step
        if (stage is NodeStage.WORKING and has_stepped) or stage is NodeStage.DONE:
            return  # the workers leave at the next step boundary, or have left
        sentence = f"{self.reason}; the workers had completed no step when time was up"
        coordinator = self.role_loop.coordinator
        if coordinator is None:
            self.say(sentence)
            self.exit_at_once("")
            return
        is_lossless = self.newest_step <= self.committed_step()
        coordinator.finish(sentence, EndReason.LEFT if is_lossless else EndReason.STOPPED)

    # --- a stop whose save waits ----------------------------------------------------------------
    def check_save(self) -> None:
        """Report once a minute that the save of an asked stop waits for the journal, and give it up
        when this node's time is over. Called again and again.

        A snapshot is handed over once the journal has its steps. So the mover has nothing to say
        about a save whose run folder takes no write at all."""
        problem, now = self._save_problem, self._clock()
        if problem is None:
            return
        if now >= self._give_up_at:
            self._give_up_save()
        elif now - self._said_at >= MESSAGE_INTERVAL_S:
            self._said_at, reason, where, remedy = now, str(problem), "", ""
            if isinstance(problem, UserError):
                reason, where, remedy = problem.message, problem.where or "", problem.remedy or ""
            event = SaveWaiting(reason, where, remedy, 0, step=self.newest_step)
            self.event_log.emit("agent", event)

    def _give_up_save(self) -> bool:
        """End the run without the save that waits, and name the steps that are lost. Return False
        if none waits."""
        problem, coordinator = self._save_problem, self.role_loop.coordinator
        if problem is None or coordinator is None:
            return False
        self._has_given_up = True
        said = unsaved_sentence(self.newest_step, str(problem), self.committed_step())
        coordinator.finish(f"{self.reason}; {said}", EndReason.STOPPED)
        return True

    @property
    def _save_problem(self) -> HoldfastError | None:
        """The error of the journal for which the save of an asked stop waits; None if none does.

        The save of the run's last step waits by its own rules (`SnapshotSaver`)."""
        group = self.node_runner.worker_group
        if not self.stop_reason or self._has_given_up or group is None:
            return None
        if self.role_loop.coordinator is None or self.newest_step >= self.config.train.steps:
            return None
        is_saving = any(worker.phase == "save" for worker in group.workers)
        return self.event_log.problem if is_saving else None

    @property
    def newest_step(self) -> int:
        """The newest step that this node's workers have reached; 0 without workers."""
        return (
            0
            if self.node_runner.worker_group is None
            else self.node_runner.worker_group.reached_step
        )

    # --- notices --------------------------------------------------------------------------------
    def on_termination_warning(self, warning: TerminationWarning) -> None:
        """Act on a cloud's termination warning: save into tiers that survive this machine, and
        leave if the machine will not come back."""
        if self.reason is not None:
            return
        notice = Notice(warning.seconds_left, (), warning.must_leave, warning.source)
        if not self.is_last_node:
            notice = Notice(warning.seconds_left, (self.node,), warning.must_leave, warning.source)
        if notice.must_leave and not self.is_last_node:
            self._log_notice(notice)
            self.begin_shutdown(notice.source, notice.seconds)
            return
        current = self.node_runner.worker_group
        if current is None:
            self._deferred_notices.add(notice, self._clock())
        elif not set(notice.nodes) <= set(current.topology.nodes):
            self._log_notice(notice)  # no worker sits there
        else:
            self.notice_handler.handle_notice(notice, current.topology, self.newest_step)
        if notice.must_leave:
            self.begin_shutdown(notice.source, notice.seconds)

    def check_prediction(self, watch: PredictionWatch) -> None:
        """Save this node's part early, or let its workers move, if a predictor says so. Called
        again and again."""
        current, now = self.node_runner.worker_group, self._clock()
        if current is None or self.reason is not None:
            return
        watch.end_alarms(now)
        while watch.failed:
            failed = PredictionFailed(self.node, watch.failed.pop(), step=self.newest_step)
            self.event_log.emit("agent", failed)
        if self.node not in current.topology.nodes or self.node_runner.is_spare:
            return
        present = self.role_loop.agent_addresses
        watch.observe_nodes(frozenset(current.topology.nodes), now, present)
        prices = self.notice_handler.response_prices(
            current.topology, self.role_loop.has_replacement
        )
        due = watch.check(now, prices)
        if due is None:
            return
        if due.is_move:
            move = PredictedMove(self.node, due.left_s, due.reason, step=self.newest_step)
            self.event_log.emit("agent", move)
            self.say(f"{self.node} may be lost, so its workers move to other nodes: {due.reason}")
            self.role_loop.move_aside(due.left_s)
            return
        self.notice_handler.handle_prediction(due, self.node, current.topology, self.newest_step)

    def _log_notice(self, notice: Notice) -> None:
        if self.node_runner.generation:
            self.event_log.emit(
                "agent",
                NoticeReceived(
                    notice.seconds,
                    list(notice.nodes),
                    notice.must_leave,
                    notice.source,
                    step=self.newest_step,
                ),
            )

    def on_group_started(self, worker_group: WorkerGroup) -> None:
        """Pass the notices that came while no generation was at work to the one that begins."""
        self.notice_handler.begin_generation()
        for notice in self._deferred_notices.take_all(self._clock()):
            if set(notice.nodes) <= set(worker_group.topology.nodes):
                self.notice_handler.handle_notice(
                    notice, worker_group.topology, worker_group.newest_step
                )

    async def handle_notice_request(self, generation: int, notice: Notice) -> EmergencyReply:
        """Handle `holdfast notice` about nodes that will be lost.

        Raises ValueError for an unknown node, or if another agent coordinates by now."""
        coordinator, current = self.role_loop.coordinator, self.node_runner.worker_group
        if coordinator is None and self.role_loop.state.role is not Role.LEADER:
            raise ValueError("another agent coordinates the run by now: ask again")
        if coordinator is not None and self._try_continue_without(notice, coordinator):
            names = ", ".join(notice.nodes)
            reason = f"the others go on without {names} after the step that is under way"
            self.say(f"{names} will be gone in {notice.seconds:g} s: {reason}")
            return EmergencyReply((), reason, moves=notice.nodes)
        if current is None:
            self._deferred_notices.add(notice, self._clock())
            return EmergencyReply((), "kept for the workers that begin next")
        plan = self.notice_handler.handle_notice(notice, current.topology, self.newest_step)
        if notice.must_leave:
            self._is_whole_run_leaving = True
            self.begin_shutdown(notice.source)
        return EmergencyReply(tuple(plan.tiers), plan.reason)

    def _try_continue_without(self, notice: Notice, coordinator: Coordinator) -> bool:
        """Make the run continue without the notice's nodes, if the remaining nodes suffice.

        Return True if they do. Raises ValueError for an unknown node."""
        reign, names = coordinator.state, set(notice.nodes)
        if unknown := names - {node.name for node in reign.nodes}:
            raise ValueError(f"there is no node {min(unknown)} in this run")
        rest = [node for node in reign.nodes if node.name not in names]
        if (
            not names
            or reign.phase is not Phase.TRAINING
            or not self.run_controller.select_nodes(rest)
        ):
            return False
        self._log_notice(notice)
        if notice.must_leave:
            coordinator.nodes_to_leave |= names
        for name in sorted(names):
            coordinator.mark_leaving(name, notice.seconds)
        return True
