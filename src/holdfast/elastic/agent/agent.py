"""The agent of one node: starts and watches its other processes, and takes part in the run.

It needs only the run store and the secret to join. It holds no training state and imports no torch,
so it answers within milliseconds. One event loop runs everything:

    control (HTTP)   from its workers: /report, /orders; from other agents: /join, /beat, /term;
                     from workers of all nodes if it leads: /store; /notice
    health (HTTP)    /healthz, /metrics
    role loop        follows a coordinator or leads (`elastic/membership/role_loop.py`)
    node runner      starts and stops this node's workers (`elastic/node/node_runner.py`)
    run controller   if it leads, plans generations (`elastic/coordinator/run_controller.py`)
    shutdown         signals and notices (`elastic/agent/shutdown.py`)
    run folder       a lost run folder (`elastic/agent/run_folder_monitor.py`)
    processes        mover, fork server and workers (`elastic/agent/node_processes.py`)
    requests         answers the requests above (`elastic/agent/requests.py`)
    group end        finishes copies and uploads (`elastic/agent/group_end.py`)
    result           tells the user the run's result (`elastic/agent/node_result.py`)

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
from typing import Any

from holdfast.elastic.agent.group_end import GroupEnd
from holdfast.elastic.agent.health import HealthApplication
from holdfast.elastic.agent.monitors import check_progress_forever, make_refusal_counter
from holdfast.elastic.agent.node_processes import NodeProcesses
from holdfast.elastic.agent.node_result import NodeResult
from holdfast.elastic.agent.requests import RequestHandlers
from holdfast.elastic.agent.run_folder_monitor import (
    FOLDER_GONE_MESSAGE,
    FOLDER_WAIT_MESSAGE,
    RunFolder,
    RunFolderMonitor,
)
from holdfast.elastic.agent.run_progress import RunProgress
from holdfast.elastic.agent.shutdown import ShutdownController
from holdfast.elastic.coordinator.agent_hooks import AgentHooks
from holdfast.elastic.coordinator.coordinator import Coordinator
from holdfast.elastic.coordinator.ledger_repair import LedgerCoverage
from holdfast.elastic.coordinator.rendezvous import RendezvousStore
from holdfast.elastic.coordinator.run_controller import (
    MISSED_HEARTBEATS_UNTIL_LOST,
    RunController,
)
from holdfast.elastic.event_log import EventLog, Observer, Say, logged
from holdfast.elastic.membership.role_loop import RoleLoop
from holdfast.elastic.node.launch_specs import NodeContext
from holdfast.elastic.node.node_runner import NodeRunner
from holdfast.elastic.notices.clouds import make_notice_source
from holdfast.elastic.notices.handler import NoticeHandler
from holdfast.elastic.notices.poller import NoticePoller
from holdfast.elastic.protocol import exit_codes
from holdfast.elastic.protocol.generation_outcome import (
    FailedOutcome,
)
from holdfast.elastic.run_context import RunContext
from holdfast.elastic.run_result import RunEndedError, RunResult, run_result
from holdfast.errors import FencedError, HoldfastError, UserError
from holdfast.events import RunStopped
from holdfast.plan.interface import Planner
from holdfast.policy.membership.election import ElectionTimeouts
from holdfast.policy.saving.failure_history import FailureHistory
from holdfast.policy.saving.failure_rate import FailureRate
from holdfast.wire import process_log
from holdfast.wire.http.server import HttpListener
from holdfast.wire.http.sockets import address_of, bind_listener
from holdfast.wire.journal import read_journal
from holdfast.wire.term import Term, newest_generation

TERM_CHECK_INTERVAL_S = 2.0
"""Seconds between two reads of the newest term in the run store."""
CLEANUP_TIMEOUT_S = 60.0
"""Seconds for the clean-up of an agent whose run folder was unavailable at the end. A disk that
does not answer may block a thread for ever."""
IMMEDIATE_EXIT_CODE = 130
"""Exit code after a second Ctrl-C: 128 + SIGINT, as in a shell."""


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
        say: Say = print,
    ) -> None:
        """control_socket: the bound socket whose address other agents find in the run store.
        planner: lays a generation out over the nodes. say: prints one line for the user."""
        self._context, self._control_socket, self._planner = context, control_socket, planner
        self._render_metrics, self._say = render_metrics, (say := logged(say))
        config, alone = context.config, context.single_node_term is not None
        self._failure_history = FailureHistory(
            FailureRate.from_prior(config.checkpoint.node_mtbf_hours * 3600)
        )
        self._notice_handler = NoticeHandler(
            config, lambda event: self._event_log.emit("agent", event), say
        )
        self._ledger_coverage = LedgerCoverage(config, snapshots_follow_ledger=alone)
        learn: list[Observer] = [self._failure_history.observe, self._notice_handler.observe]
        if alone:
            learn.append(lambda record: self._ledger_coverage.observe(record.event))
        self._event_log = EventLog(context.store, [*learn, *observers], say, context.node_suffix)
        self._notice_source = make_notice_source(config.cluster)
        self._progress = RunProgress(self._event_log)
        self._is_exiting_at_once = False  # exit at once, wait for nothing
        self._exit_code = 1  # the exit code known so far
        self._last_complaint = ""  # the last complaint
        self._cleanup_timer: threading.Timer | None = None

    def run(self) -> int:
        """Run until the run is over or this node leaves it; return the exit code: 0, 1 or 130.

        Raises CannotGoOnError, and UserError for causes that the user can fix. Such causes are an
        address that is in use, no trustworthy checkpoint, or a UserError of a worker.
        """
        it = self._context
        process_log.start(
            "agent", it.folder / "logs" / f"agent{it.node_suffix and '.'}{it.node_suffix}.log"
        )
        try:
            return asyncio.run(self._main())
        finally:
            process_log.stop()
            if self._cleanup_timer is not None:
                self._cleanup_timer.cancel()

    # --- the outer frame ------------------------------------------------------------------------
    async def _main(self) -> int:
        it, cluster = self._context, self._context.config.cluster
        self._loop = asyncio.get_running_loop()
        self._rendezvous = RendezvousStore()
        self._refusals = make_refusal_counter(
            self._event_log, lambda: self._progress.newest_generation > 0, self._say
        )
        metrics = bind_listener(cluster.interface, cluster.metrics_port, "cluster.metrics_port")
        self._processes = NodeProcesses(
            it,
            self._progress,
            self._say,
            lambda: self._run_folder_monitor.require_present(),
        )
        self._process_manager, self._mover = self._processes.process_manager, self._processes.mover
        self._final_upload = self._processes.final_upload
        run_folder = RunFolder(it.folder, it.store)
        self._run_folder_monitor = RunFolderMonitor(
            run_folder,
            lambda: self._shutdown_controller.reason or "",
            self._time_left_s,
            self._leave_lost_folder,
            self._say,
            is_single_node=it.single_node_term is not None,
        )
        self._create_components()
        self._create_handlers()
        try:
            self._exit_code = await self._serve(metrics)
            return self._exit_code
        except HoldfastError as error:
            self._exit_code = error.exit_code
            if self._cleanup_timer is not None:  # the caller may never get to print it
                self._say(str(error))
            raise
        finally:
            run_folder.close()
            await self._processes.stop()
            await asyncio.to_thread(self._refusals.close)
            await self._event_log.flush(sync=True)
            self._processes.close()

    def _create_components(self) -> None:
        """Make the parts that decide; see the module's docstring."""
        it, cluster, address = (
            self._context,
            self._context.config.cluster,
            address_of(self._control_socket),
        )
        alone = it.single_node_term is not None
        around = NodeContext(
            it.config, it.node, it.folder, it.secret, address, self._failure_history, it.places
        )
        self._node_runner = NodeRunner(
            around,
            self._process_manager,
            self._mover,
            self._event_log,
            self._say,
            self._progress.begin_generation,
            lambda worker_group: self._shutdown_controller.on_group_started(worker_group),
            lambda outcome: self._group_end.on_group_ended(outcome),
        )
        self._create_run_controller(address)
        silence = MISSED_HEARTBEATS_UNTIL_LOST * cluster.beat_seconds
        self._role_loop = RoleLoop(
            it.node,
            address,
            it.store,
            it.secret,
            self._node_runner,
            self._lead_term,
            places=it.places,
            join_info={"address": address},
            timeouts=ElectionTimeouts(silence, cluster.beat_seconds / 2, cluster.alone_seconds),
            heartbeat_interval_s=cluster.beat_seconds,
            complain=self._complain_once,
            own_term=it.single_node_term,
            check_run_folder=self._run_folder_monitor.require_not_gone,
        )
        self._processes.attach(self._node_runner, self._role_loop.join_info)
        self._shutdown_controller = ShutdownController(
            it.config,
            it.node,
            alone,
            event_log=self._event_log,
            say=self._say,
            node_runner=self._node_runner,
            role_loop=self._role_loop,
            run_controller=self._run_controller,
            notice_handler=self._notice_handler,
            final_upload=self._final_upload,
            exit_at_once=self._exit_at_once,
        )

    def _create_run_controller(self, address: str) -> None:
        hooks = AgentHooks(
            address,
            lambda: self._process_manager.ensure_processes(0),
            self._on_generation_created,
            newest_generation=lambda: self._progress.newest_generation,
            stop_reason=lambda: self._shutdown_controller.stop_reason,
            committed_step=lambda: self._progress.committed_step,
            on_restored=self._progress.on_restored,
        )
        self._run_controller = RunController(
            self._context,
            hooks,
            self._planner,
            self._mover,
            self._event_log,
            self._say,
            self._ledger_coverage,
        )

    def _create_handlers(self) -> None:
        """Make the parts that answer requests, and that finish what the others began."""
        self._group_end = GroupEnd(
            self._progress,
            self._event_log,
            self._mover,
            self._final_upload,
            self._node_runner,
            self._role_loop,
            self._run_controller,
            self._shutdown_controller,
            self._notice_handler,
        )
        self._node_result = NodeResult(
            self._context,
            self._progress,
            self._run_folder_monitor,
            self._node_runner,
            self._role_loop,
            self._run_controller,
            self._shutdown_controller,
            self._say,
        )
        self._request_handlers = RequestHandlers(
            self._context.secret,
            self._refusals,
            self._progress,
            self._event_log,
            self._rendezvous,
            self._process_manager,
            self._node_runner,
            self._role_loop,
            self._run_controller,
            self._shutdown_controller,
            self._notice_handler,
        )

    async def _serve(self, metrics: socket.socket) -> int:
        listeners = [
            HttpListener(self._request_handlers.make_application(), self._control_socket),
            HttpListener(
                HealthApplication(
                    self._request_handlers.health_fields, self._render_metrics, self._refusals
                ),
                metrics,
            ),
        ]
        served = [asyncio.create_task(listener.serve()) for listener in listeners]
        beat = self._context.config.cluster.heartbeat_seconds
        watches = [
            asyncio.create_task(
                check_progress_forever(
                    beat, lambda: self._node_runner.worker_group, self._event_log.flush
                )
            ),
            asyncio.create_task(self._watch_term()),
        ]
        self._run_task = asyncio.create_task(self._take_part_in_run())
        self._catch_signals()
        every = self._context.config.cluster.notices_every_seconds
        watch = NoticePoller(
            self._notice_source,
            every,
            self._shutdown_controller.on_termination_warning,
            self._say,
            self._progress.emit_once_begun,
        )
        self._shutdown_controller.is_signal_explained = watch.pass_on_signal
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
            if self._shutdown_controller.reason is not None and not self._is_exiting_at_once:
                await watch.acknowledge()
            watch.close()
            self._run_controller.close()
            for task in watches:
                task.cancel()
            for listener in listeners:
                listener.close()
            await asyncio.wait(served, timeout=5.0)

    # --- taking part ----------------------------------------------------------------------------
    async def _take_part_in_run(self) -> int:
        try:
            if await asyncio.to_thread(newest_generation, self._context.store):
                await self._load_history()
            await self._process_manager.ensure_processes(self._context.places)
        except UserError:
            raise
        except HoldfastError as error:  # of the mover or the fork server
            self._say(str(error))
            return 1
        self._processes.publish_mover_address()
        try:
            await self._run_role_loop()
        except RunEndedError as error:
            return self._node_result.report_result(
                run_result(str(error), error.reason, (), "", self._progress.committed_step)
            )
        if self._role_loop.coordinator_fault is not None:
            raise self._role_loop.coordinator_fault
        return await self._node_result.finish_run()

    async def _run_role_loop(self) -> None:
        """Take part in the run until this node has left it. Raises RunEndedError, also if the node
        cannot wait for its run folder any longer."""
        following = asyncio.create_task(self._role_loop.run())
        losing = asyncio.create_task(self._run_folder_monitor.wait_for_end())
        try:
            await asyncio.wait({following, losing}, return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                following.result()
                return
            raise losing.result()
        finally:
            if not self._run_folder_monitor.is_folder_responsive:
                self._cleanup_timer = threading.Timer(
                    CLEANUP_TIMEOUT_S, lambda: os._exit(self._exit_code)
                )
                self._cleanup_timer.daemon = True
                self._cleanup_timer.start()
            for task in (following, losing):
                task.cancel()
            await asyncio.wait({following, losing})

    def _complain_once(self, sentence: str) -> None:
        if sentence not in (FOLDER_WAIT_MESSAGE, self._last_complaint):  # do not repeat it
            self._last_complaint = sentence
            self._say(sentence)

    def _time_left_s(self) -> float:
        """Return the seconds until this node must have left; 0 if not known."""
        return self._notice_handler.time_left_s() or self._role_loop.leave_within_s

    def _leave_lost_folder(self, leave_within_s: float) -> None:
        """Leave the run; each other node checks its own run folder and may continue."""
        self._say(f"{FOLDER_GONE_MESSAGE}: {self._context.node} leaves")
        self._role_loop.leave_within_s = self._role_loop.leave_within_s or leave_within_s
        self._node_runner.state_changed.set()

    async def _load_history(self) -> None:
        """Learn the failures and save times of earlier sessions from the journal, if readable."""
        try:
            records = await asyncio.to_thread(read_journal, self._context.store)
        except HoldfastError as error:
            self._say(f"the run's earlier failures cannot be read from the journal: {error}")
            return
        for record in records:
            self._failure_history.observe(record)
            self._notice_handler.measurements.observe(record)

    # --- leading --------------------------------------------------------------------------------
    async def _lead_term(self, term: Term) -> Coordinator:
        return await self._run_controller.lead_term(self._run_folder_monitor.guard_term(term))

    def _on_generation_created(self, generation: int) -> None:
        """Open a generation whose object this agent has created."""
        self._progress.begin_generation(generation)
        self._rendezvous.begin_generation(generation)

    async def _watch_term(self) -> None:
        while True:
            await asyncio.sleep(TERM_CHECK_INTERVAL_S)
            coordinator, term = self._role_loop.coordinator, self._run_controller.term
            if coordinator is None or term is None:
                continue
            try:
                await asyncio.to_thread(term.check)
            except FencedError as error:
                current = self._node_runner.worker_group
                if self._context.single_node_term is not None and current is not None:
                    current.decide(
                        FailedOutcome(str(error), exit_codes.FENCED)
                    )  # no other part learns of it
                coordinator.fence()
            except HoldfastError:
                continue  # an unreachable run store does not stop the training

    # --- this node ------------------------------------------------------------------------------
    # --- signals --------------------------------------------------------------------------------
    def _catch_signals(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            # Only a process's main thread may set handlers; otherwise our caller has its own.
            with suppress(ValueError, RuntimeError):
                self._loop.add_signal_handler(number, self._shutdown_controller.on_signal, number)

    def _exit_at_once(self, missing_upload: str) -> None:
        """Exit without waiting for anything. missing_upload: what is not saved then, "" for
        nothing."""
        if self._cleanup_timer is not None:  # the clean-up needs a disk that may not answer
            os._exit(IMMEDIATE_EXIT_CODE)
        self._is_exiting_at_once = True
        self._processes.ignore_exits()
        self._run_controller.close()
        if missing_upload:
            event = RunStopped(missing_upload, step=self._progress.committed_step)
            self._run_controller.result_reporter.write_event(event)
            self._run_controller.result_reporter.print_result(
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
