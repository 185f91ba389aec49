"""The agent of one node: starts and watches its other processes, and takes part in the run.

It needs only the run store and the secret to join. It holds no training state and imports no torch,
so it answers within milliseconds. One event loop runs everything:

    control (HTTP)   from its workers: /report, /orders; from other agents: /join, /beat, /term;
                     from workers of all nodes if it leads: /store; /notice
    health (HTTP)    /healthz, /metrics
    records          the journal, and what learns from it (`elastic/agent/run_records.py`)
    parts            makes the next eight and connects them (`elastic/agent/parts.py`)
    role loop        follows a coordinator or leads (`elastic/membership/role_loop.py`)
    node runner      starts and stops this node's workers (`elastic/node/node_runner.py`)
    run controller   if it leads, plans generations (`elastic/coordinator/run_controller.py`)
    shutdown         signals and notices (`elastic/agent/shutdown.py`)
    run folder       a lost run folder (`elastic/agent/run_folder_monitor.py`)
    term             a leader's term and links (`elastic/agent/term_monitor.py`)
    processes        mover, fork server and workers (`elastic/agent/node_processes.py`)
    group end        finishes copies and uploads (`elastic/agent/parts.py`)
    trackers         keeps them running if it leads (`elastic/agent/tracker_supervisor.py`)
    requests         answers the requests above (`elastic/agent/requests.py`)
    result           tells the user the run's result (`elastic/agent/agent.py`)

A run of one node works the same way without other nodes. Its term is opened before, so that a
second trainer is refused. The agent waits for no other node, and the run is over when its term is.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from holdfast.elastic.agent.event_loop import Pulse, run_to_end
from holdfast.elastic.agent.health import STALLED_AFTER_TIMEOUTS, HealthApplication
from holdfast.elastic.agent.monitors import (
    check_prediction_forever,
    check_progress_forever,
    check_save_forever,
    report_minority_forever,
    report_spare_forever,
    report_spares_forever,
)
from holdfast.elastic.agent.parts import AgentParts
from holdfast.elastic.agent.requests import RequestHandlers
from holdfast.elastic.agent.run_records import RunRecords
from holdfast.elastic.event_log import Observer, Say, logged
from holdfast.elastic.notices.clouds import make_notice_source
from holdfast.elastic.notices.poller import NoticePoller
from holdfast.elastic.notices.prediction import load_prediction_watch
from holdfast.elastic.run_context import RunContext
from holdfast.elastic.run_result import EndReason, RunEndedError, RunResult, run_result
from holdfast.errors import CannotGoOnError, HoldfastError, UserError
from holdfast.events import RunStopped
from holdfast.plan.placing.interface import Planner
from holdfast.wire import lifeline, process_log
from holdfast.wire.http.server import HttpListener
from holdfast.wire.http.sockets import address_of, bind_listener
from holdfast.wire.process_title import is_own_process, set_process_title
from holdfast.wire.term import newest_generation

CLEANUP_TIMEOUT_S = 60.0
"""Seconds for the clean-up of an agent whose run folder was unavailable at the end. A disk that
does not answer may block a thread for ever."""
IMMEDIATE_EXIT_CODE = 130
"""Exit code after a second Ctrl-C: 128 + SIGINT, as in a shell."""
SIGNAL_TIMEOUT_S = 5.0
"""Seconds for an agent that has just begun, until it can act on a signal."""


class NodeAgent:
    """One node's agent, from joining to exit code."""

    def __init__(
        self,
        context: RunContext,
        control_socket: socket.socket,
        planner: Planner,
        *,
        observers: Sequence[Observer] = (),
        render_metrics: Callable[[], bytes] = lambda: b"",
        seen_progress: Callable[[], tuple[int, int]] = lambda: (0, 0),
        say: Say = print,
        say_last: Say | None = None,
    ) -> None:
        """control_socket: the bound socket whose address other agents find in the run store.
        planner: lays a generation out over the nodes. seen_progress: returns the newest step and
        the newest committed step of the views. say: prints one line for the user. say_last:
        prints the result, after the views have shown all records; None: `say` does."""
        self._context, self._control_socket, self._planner = context, control_socket, planner
        self._render_metrics, self._say = render_metrics, (say := logged(say))
        self._seen_progress = seen_progress
        self._say_last = say if say_last is None else logged(say_last)
        self._records = RunRecords(context, observers, say)
        self._notice_source = make_notice_source(context.config.cluster)
        self._prediction = load_prediction_watch(context.config.cluster, context.node)
        self._is_exiting_at_once = False  # exit at once, wait for nothing
        self._exit_code = 1  # the exit code known so far
        self._cleanup_timer: threading.Timer | None = None
        self._answers_signals = threading.Event()

    def run(self) -> int:
        """Run until the run is over or this node leaves it; return the exit code: 0, 1 or 130.

        Raises CannotGoOnError, and UserError for causes that the user can fix. Such causes are an
        address that is in use, no trustworthy checkpoint, or a UserError of a worker.
        """
        it = self._context
        if is_own_process():
            set_process_title(f"agent {it.node}", it.config.name)
        process_log.start(
            "agent", it.folder / "logs" / f"agent{it.node_suffix and '.'}{it.node_suffix}.log"
        )
        try:
            return run_to_end(self._main(), self._pass_on_signal)
        finally:
            process_log.stop()
            if self._cleanup_timer is not None:
                self._cleanup_timer.cancel()

    # --- the outer frame ------------------------------------------------------------------------
    async def _main(self) -> int:
        self._loop, cluster = asyncio.get_running_loop(), self._context.config.cluster
        metrics = bind_listener(cluster.host, cluster.metrics_port, "cluster.metrics_port")
        self._parts = AgentParts(
            self._context,
            address_of(self._control_socket),
            self._planner,
            self._records,
            self._say,
            self._exit_at_once,
        )
        self._parts.run_controller.result_reporter.say_last = self._say_last
        try:
            self._exit_code = await self._serve(metrics)
            return self._exit_code
        except HoldfastError as error:
            self._exit_code = error.exit_code
            if self._cleanup_timer is not None:  # the caller may never get to print it
                self._say(str(error))
            raise
        finally:
            await self._parts.close()
            await self._close_term()

    async def _close_term(self) -> None:
        """Close the term of a leader whose run is over, so that the next start does not wait.

        The term of a run of one node is closed by its owner. A run folder that was lost, and a disk
        that is full, keep the term open: the next start asks, and gets no answer."""
        term, roles = self._parts.run_controller.term, self._parts.role_loop
        is_leader = roles.run_end is not None and roles.coordinator is not None
        if term is None or not is_leader or self._context.single_node_term is not None:
            return
        with suppress(HoldfastError):
            await asyncio.to_thread(term.check)
            await asyncio.to_thread(term.close)

    async def _serve(self, metrics: socket.socket) -> int:
        handlers = RequestHandlers(self._parts, self._seen_progress, address_of(metrics))
        refusals = self._parts.refusals
        cluster = self._context.config.cluster
        stalled = STALLED_AFTER_TIMEOUTS * cluster.progress_seconds
        listeners = [
            HttpListener(handlers.make_application(), self._control_socket),
            HttpListener(
                HealthApplication(handlers.health_status, self._render_metrics, refusals, stalled),
                metrics,
            ),
        ]
        served = [asyncio.create_task(listener.serve()) for listener in listeners]
        beat = cluster.heartbeat_seconds
        watches = [
            asyncio.create_task(
                check_progress_forever(
                    beat,
                    lambda: self._parts.node_runner.worker_group,
                    self._records.event_log.flush,
                    self._parts.processes.process_manager.check_helpers,
                )
            ),
            asyncio.create_task(self._parts.trackers.watch()),
            asyncio.create_task(self._parts.term_monitor.run_forever()),
            asyncio.create_task(
                report_spare_forever(
                    cluster.beat_seconds, self._context, self._parts.node_runner, self._say
                )
            ),
        ]
        check_save = self._parts.shutdown_controller.check_save
        watches.append(asyncio.create_task(check_save_forever(beat, check_save)))
        spending = self._records.spending.check_forever(beat, self._records.event_log.now)
        watches.append(asyncio.create_task(spending))
        if self._context.config.pause.file:
            pausing = self._records.pausing.check_forever(beat, self._records.event_log.now)
            watches.append(asyncio.create_task(pausing))
        if self._context.single_node_term is None:
            emit = self._records.progress.emit_once_begun
            spares = report_spares_forever(cluster.beat_seconds, self._parts.spares, emit)
            watches.append(asyncio.create_task(spares))
            lacked = report_minority_forever(
                beat, self._context.node, lambda: self._parts.role_loop.lacked_majority, emit
            )
            watches.append(asyncio.create_task(lacked))
        if self._prediction is not None:
            check = self._parts.shutdown_controller.check_prediction
            checks = check_prediction_forever(self._prediction, check, self._say)
            watches.append(asyncio.create_task(checks))
        self._run_task = asyncio.create_task(self._take_part_in_run())
        self._catch_signals()
        watch = NoticePoller(
            self._notice_source,
            cluster.notices_every_seconds,
            self._parts.shutdown_controller.on_termination_warning,
            self._say,
            self._records.progress.emit_once_begun,
        )
        self._parts.shutdown_controller.is_signal_explained = watch.pass_on_signal
        try:
            # A watch or a listener ends only by a bug of ours, which must not go unseen.
            await asyncio.wait(
                {self._run_task, *served, *watches}, return_when=asyncio.FIRST_COMPLETED
            )
            others: list[asyncio.Task[Any]] = [*served, *watches]
            for task in others:
                if task.done() and not self._run_task.done():
                    task.result()
            return await self._run_task
        except asyncio.CancelledError:
            if not self._is_exiting_at_once:
                raise
            return IMMEDIATE_EXIT_CODE
        finally:
            self._run_task.cancel()
            if self._parts.shutdown_controller.reason is not None and not self._is_exiting_at_once:
                await watch.acknowledge()
            watch.close()
            self._parts.run_controller.close()
            for task in watches:
                task.cancel()
            for listener in listeners:
                listener.close()
            await asyncio.wait(served, timeout=5.0)

    # --- taking part ----------------------------------------------------------------------------
    async def _take_part_in_run(self) -> int:
        places, manager = self._context.places, self._parts.processes.process_manager
        self._parts.roles.start()  # its imports take as long as those of the fork server
        try:
            if self._context.before_joining is not None:
                await manager.ensure_processes(places)
                await asyncio.to_thread(self._context.before_joining)
            if await asyncio.to_thread(newest_generation, self._context.store):
                await self._records.load_earlier_sessions()
            await manager.ensure_processes(places)
        except UserError:
            raise
        except HoldfastError as error:  # of the mover or the fork server
            self._say(str(error))
            return 1
        self._parts.processes.publish_mover_address()
        if self._context.single_node_term is None:
            await self._parts.processes.publish_identity()
        try:
            await self._run_role_loop()
        except RunEndedError as error:
            return NodeResult(self._parts).report_result(
                run_result(str(error), error.reason, (), "", self._records.progress.committed_step)
            )
        if self._parts.role_loop.coordinator_fault is not None:
            raise self._parts.role_loop.coordinator_fault
        return await NodeResult(self._parts).finish_run()

    async def _run_role_loop(self) -> None:
        """Take part in the run until this node has left it. Raises RunEndedError, also if the node
        cannot wait for its run folder any longer."""
        following = asyncio.create_task(self._parts.role_loop.run())
        losing = asyncio.create_task(self._parts.run_folder_monitor.wait_for_end())
        try:
            await asyncio.wait({following, losing}, return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                following.result()
                return
            raise losing.result()
        finally:
            if not self._parts.run_folder_monitor.is_folder_responsive:
                self._cleanup_timer = threading.Timer(
                    CLEANUP_TIMEOUT_S, lambda: os._exit(self._exit_code)
                )
                self._cleanup_timer.daemon = True
                self._cleanup_timer.start()
            for task in (following, losing):
                task.cancel()
            await asyncio.wait({following, losing})

    # --- signals --------------------------------------------------------------------------------
    def _catch_signals(self) -> None:
        for number in lifeline.AGENT_SIGNALS:
            if lifeline.is_ignored_hangup(number):
                continue
            # Only a process's main thread may set handlers; otherwise our caller has its own.
            with suppress(ValueError, RuntimeError):
                self._loop.add_signal_handler(
                    number, self._parts.shutdown_controller.on_signal, number
                )
        with suppress(ValueError, RuntimeError):
            agent = f"the agent of {self._context.node} (process {os.getpid()})"
            pulse = Pulse(self._loop)
            said = f"{agent} was stopped; it works again"
            self._loop.add_signal_handler(
                signal.SIGCONT, lambda: self._say(said) if pulse.has_missed() else None
            )
        self._answers_signals.set()

    def _pass_on_signal(self, number: signal.Signals) -> None:
        """Called in the caller's thread, while this agent's loop runs in another one."""
        if self._answers_signals.wait(SIGNAL_TIMEOUT_S):
            on_signal = self._parts.shutdown_controller.on_signal
            self._loop.call_soon_threadsafe(on_signal, number)

    def _exit_at_once(self, missing_upload: str) -> None:
        """Exit without waiting for anything. missing_upload: what is not saved then, "" for
        nothing."""
        if self._cleanup_timer is not None:  # the clean-up needs a disk that may not answer
            os._exit(IMMEDIATE_EXIT_CODE)
        self._is_exiting_at_once = True
        self._parts.processes.ignore_exits()
        self._parts.run_controller.close()
        if missing_upload:
            event = RunStopped(missing_upload, step=self._records.progress.committed_step)
            self._parts.run_controller.result_reporter.write_event(event)
            self._parts.run_controller.result_reporter.print_result(
                RunResult(event, f"stopped after step {event.step} ({missing_upload})", 0)
            )
        self._run_task.cancel()


def check_node_name(node: str) -> None:
    """Raises UserError if a name cannot be part of the names of files and events."""
    if not node or not all(c.isalnum() or c in "._-" for c in node):
        raise UserError(
            f"{node!r} cannot be a node's name",
            where="cluster.node",
            remedy="use letters, digits, dots, dashes and underscores",
        )


@dataclass(frozen=True)
class NodeResult:
    """The result of the run as this node's agent reports it."""

    parts: AgentParts

    async def finish_run(self) -> int:
        """Return the exit code; the coordinator's agent has written the result to the journal."""
        await self.parts.run_controller.wait_for_ledger_repair()
        end = await self._find_result()
        if end is not None and (end.exit_code == 0 or end.is_resumable):
            lost = await self.parts.run_folder_monitor.find_loss()
            end = end if lost is None else RunResult(None, str(lost), 1)
        if end is None:
            self.parts.run_controller.result_reporter.say_last(
                f"{self.parts.context.node} has left the run "
                f"({self.parts.shutdown_controller.reason or 'as requested'})"
            )
            return self._left_code
        return self.report_result(end)

    def report_result(self, result: RunResult) -> int:
        """Print the result and return the exit code. Raises the result's error."""
        self.parts.run_controller.result_reporter.print_result(result)
        if result.error is not None:
            raise result.error
        short = (
            result.exit_code == 0
            and self.parts.node_runner.closing_reason
            and not self.parts.shutdown_controller.reason
        )
        if short:
            return CannotGoOnError.exit_code
        is_left = result.exit_code == 0 and result.is_resumable
        if is_left and (code := self.parts.shutdown_controller.ended_code) is not None:
            return code
        return self._left_code if is_left else result.exit_code

    @property
    def _left_code(self) -> int:
        """The exit code of a node that leaves while steps are left to do."""
        return self.parts.context.config.cluster.left_exit_code

    async def _find_result(self) -> RunResult | None:
        """Return the run's result; None if the run continues without this node."""
        over, coordinator = self.parts.role_loop.run_end, self.parts.role_loop.coordinator
        if over is None and self.parts.context.single_node_term is not None:
            try:
                await asyncio.to_thread(self.parts.context.single_node_term.check)
            except HoldfastError as error:
                return run_result(
                    str(error), EndReason.FENCED, (), "", self.parts.records.progress.committed_step
                )
        if over is None:
            return None
        if coordinator is not None:
            return self.parts.run_controller.build_result(over[0])
        why = (
            self.parts.node_runner.closing_reason
            or self.parts.shutdown_controller.reason
            or "the workers left"
        )
        done = self.parts.node_runner.node_outcome.done
        if not over[0] and done is None:  # this node had no part in the run
            return RunResult(None, "", 0)
        return run_result(
            over[0],
            over[1],
            () if done is None else (done,),
            why,
            self.parts.records.progress.committed_step,
            self.parts.node_runner.end_reason,
        )
