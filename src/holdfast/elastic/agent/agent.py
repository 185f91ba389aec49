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

A run of one node works the same way without other nodes. Its term is opened before, so that a
second trainer is refused. The agent waits for no other node, and the run is over when its term is.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast.elastic.agent import health
from holdfast.elastic.agent.final_upload import FinalUpload
from holdfast.elastic.agent.monitors import check_progress_forever, make_refusal_counter
from holdfast.elastic.agent.run_folder_monitor import (
    FOLDER_GONE_MESSAGE,
    FOLDER_WAIT_MESSAGE,
    RunFolder,
    RunFolderMonitor,
)
from holdfast.elastic.agent.shutdown import ShutdownController
from holdfast.elastic.coordinator.coordinator import Coordinator
from holdfast.elastic.coordinator.ledger_repair import LedgerCoverage
from holdfast.elastic.coordinator.rendezvous import RendezvousStore
from holdfast.elastic.coordinator.run_controller import (
    MISSED_HEARTBEATS_UNTIL_LOST,
    AgentHooks,
    RunController,
)
from holdfast.elastic.event_log import EventLog, Observer, Say, logged
from holdfast.elastic.membership.role_loop import RoleLoop
from holdfast.elastic.node.launch_specs import NodeContext, make_mover_settings
from holdfast.elastic.node.mover_supervisor import MoverSupervisor
from holdfast.elastic.node.node_runner import NodeRunner
from holdfast.elastic.node.process_manager import ProcessManager
from holdfast.elastic.node.worker_group import WorkerGroup
from holdfast.elastic.notices.clouds import make_notice_source
from holdfast.elastic.notices.handler import NOTICE_PATH, NoticeHandler
from holdfast.elastic.notices.poller import NoticePoller
from holdfast.elastic.protocol import exit_codes
from holdfast.elastic.protocol.generation_outcome import (
    FailedOutcome,
    FinishedOutcome,
    GenerationOutcome,
    LeftOutcome,
    LostOutcome,
)
from holdfast.elastic.protocol.worker_spec import modules_to_preload
from holdfast.elastic.reviving import MoverRestarter
from holdfast.elastic.run_context import RunContext
from holdfast.elastic.run_result import EndReason, RunEndedError, RunResult, run_result
from holdfast.errors import CannotGoOnError, FencedError, HoldfastError, UserError
from holdfast.events import CheckpointCommitted, Event, RunStopped
from holdfast.plan.interface import Planner
from holdfast.policy.membership.election import ElectionTimeouts
from holdfast.policy.recovery.survivors import HeldState
from holdfast.policy.saving.failure_history import FailureHistory
from holdfast.policy.saving.failure_rate import FailureRate
from holdfast.wire import lifeline, process_log
from holdfast.wire.http.auth import Verifier
from holdfast.wire.http.server import HttpListener, SignedApplication
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
        self._is_live_recovery = config.cluster.recovery == "live"
        self._newest_generation = 0  # the newest generation that is known here
        self._committed_step = 0
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
            self._event_log, lambda: self._newest_generation > 0, self._say
        )
        metrics = bind_listener(cluster.interface, cluster.metrics_port, "cluster.metrics_port")
        self._lifeline_fd, line_end = lifeline.open_lifeline()
        settings = make_mover_settings(it.config, it.config_hash, it.dataset_version)
        self._mover = MoverSupervisor(
            it.config,
            it.folder,
            it.secret,
            settings,
            self._on_mover_event,
            it.node_suffix,
            lambda: self._run_folder_monitor.require_present(),
        )
        self._mover_restarter = MoverRestarter(
            lambda: self._mover.restart(self._lifeline_fd, self._on_mover_exit),
            lambda: self._mover.is_alive,
            self._say,
            self._publish_mover_address,
        )
        self._process_manager = ProcessManager(
            self._mover,
            it.folder,
            it.secret,
            it.worker_entry,
            modules_to_preload(it.config),
            self._lifeline_fd,
            self,
            on_mover_exit=self._on_mover_exit,
            on_fork_server_exit=self._on_fork_server_exit,
            say=self._say,
        )
        self._final_upload = FinalUpload(
            self._mover, it.config.checkpoint.bucket_wait_seconds, self._say
        )
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
            if self._is_exiting_at_once:
                os.close(line_end)  # ends every child
            await self._mover_restarter.stop()
            await self._process_manager.shut_down()
            await asyncio.to_thread(self._refusals.close)
            await self._event_log.flush(sync=True)
            if not self._is_exiting_at_once:
                os.close(line_end)
            os.close(self._lifeline_fd)

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
            self._begin_generation,
            self._on_group_started,
            self._on_group_ended,
        )
        desk = AgentHooks(
            address,
            lambda: self._process_manager.ensure_processes(0),
            self._on_generation_created,
            newest_generation=lambda: self._newest_generation,
            stop_reason=lambda: self._shutdown_controller.stop_reason,
            committed_step=lambda: self._known_committed_step,
        )
        self._run_controller = RunController(
            it, desk, self._planner, self._mover, self._event_log, self._say, self._ledger_coverage
        )
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

    async def _serve(self, metrics: socket.socket) -> int:
        listeners = [
            HttpListener(self._make_application(), self._control_socket),
            HttpListener(
                health.HealthApplication(self._health_fields, self._render_metrics, self._refusals),
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
            self._log_event,
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

    def _make_application(self) -> SignedApplication:
        outside = {
            "/orders": self._process_manager.handle_command_poll,
            NOTICE_PATH: self._handle_notice,
            **self._role_loop.handlers,
        }
        return SignedApplication(
            {
                "/report": self._handle_report,
                "/store": self._rendezvous.handle_operation,
                **outside,
            },
            self._context.secret,
            Verifier(self._context.secret, time.time),
            lambda: self._newest_generation,
            generationless_paths=frozenset(outside),
            refusals=self._refusals,
        )

    # --- taking part ----------------------------------------------------------------------------
    async def _take_part_in_run(self) -> int:
        try:
            if await asyncio.to_thread(newest_generation, self._context.store):
                await self._load_history()
            await self._process_manager.ensure_processes(self._context.places)
        except UserError:
            raise
        except HoldfastError as error:  # of the mover or the template
            self._say(str(error))
            return 1
        self._publish_mover_address()
        try:
            await self._run_role_loop()
        except RunEndedError as error:
            return self._report_result(
                run_result(str(error), error.reason, (), "", self._known_committed_step)
            )
        if self._role_loop.coordinator_fault is not None:
            raise self._role_loop.coordinator_fault
        return await self._finish_run()

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

    async def _finish_run(self) -> int:
        """Return the exit code; the coordinator's agent has written the result to the journal."""
        end = await self._find_result()
        if end is None and self._run_folder_monitor.is_leaving:
            end = run_result(
                FOLDER_GONE_MESSAGE, EndReason.FENCED, (), "", self._known_committed_step
            )
        if end is None:
            self._say(
                f"{self._context.node} has left the run "
                f"({self._shutdown_controller.reason or 'as requested'})"
            )
            return 0
        return self._report_result(end)

    def _report_result(self, result: RunResult) -> int:
        self._run_controller.result_reporter.print_result(result)
        if result.error is not None:
            raise result.error
        short = (
            result.exit_code == 0
            and self._node_runner.closing_reason
            and not self._shutdown_controller.reason
        )
        return CannotGoOnError.exit_code if short else result.exit_code

    async def _find_result(self) -> RunResult | None:
        """Return the run's result; None if the run continues without this node."""
        over, coordinator = self._role_loop.run_end, self._role_loop.coordinator
        if over is None and self._context.single_node_term is not None:
            try:
                await asyncio.to_thread(self._context.single_node_term.check)
            except HoldfastError as error:
                return run_result(str(error), EndReason.FENCED, (), "", self._known_committed_step)
        if over is None:
            return None
        if coordinator is not None:
            return self._run_controller.build_result(over[0])
        why = (
            self._node_runner.closing_reason
            or self._shutdown_controller.reason
            or "the workers left"
        )
        done = self._node_runner.node_outcome.done
        if not over[0] and done is None:  # this node had no part in the run
            return RunResult(None, "", 0)
        return run_result(
            over[0], over[1], () if done is None else (done,), why, self._known_committed_step
        )

    # --- leading --------------------------------------------------------------------------------
    async def _lead_term(self, term: Term) -> Coordinator:
        return await self._run_controller.lead_term(self._run_folder_monitor.guard_term(term))

    def _on_generation_created(self, generation: int) -> None:
        """Open a generation whose object this agent has created."""
        self._begin_generation(generation)
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

    @property
    def _known_committed_step(self) -> int:
        """The newest committed step that this agent knows of."""
        return max(self._committed_step, self._run_controller.restored_step)

    # --- this node ------------------------------------------------------------------------------
    def _begin_generation(self, generation: int) -> None:
        """Refuse requests of generations older than this one from here on."""
        if generation > self._newest_generation:
            self._newest_generation = generation
            self._event_log.begin_generation(generation)

    def _on_group_started(self, worker_group: WorkerGroup) -> None:
        self._shutdown_controller.on_group_started(worker_group)

    async def _on_group_ended(self, outcome: GenerationOutcome) -> GenerationOutcome:
        """Finish saves and uploads after this node's workers have ended, before it is reported."""
        if not isinstance(outcome, FinishedOutcome | LeftOutcome):
            return outcome
        generation = self._newest_generation
        if isinstance(outcome, LeftOutcome) and outcome.unsaved_reason is None:
            outcome = replace(
                outcome, unsaved_reason=await self._notice_handler.wait_for_peer_copy(outcome.step)
            )
        if outcome.unsaved_reason is None:
            missing = await self._wait_for_bucket(outcome, generation)
            outcome = replace(outcome, missing_upload=missing)
        await self._mover.drain_events(generation)
        return outcome

    async def _wait_for_bucket(
        self, outcome: FinishedOutcome | LeftOutcome, generation: int
    ) -> str | None:
        """Wait for the bucket; return what it lacks at the end. An agent that leaves writes its
        stop into the journal first, because it may be killed while it waits."""

        async def written() -> None:
            why = (
                self._shutdown_controller.stop_reason
                or self._node_runner.closing_reason
                or "the workers left"
            )
            self._run_controller.result_reporter.write_event(RunStopped(why, step=outcome.step))
            await self._event_log.flush(sync=True)

        leads = self._role_loop.coordinator is not None
        before = written if leads and isinstance(outcome, LeftOutcome) else None
        return await self._final_upload.wait(generation, before, self._notice_handler.time_left_s)

    def _on_fork_server_exit(self) -> None:
        if self._is_exiting_at_once:
            return
        if self._is_live_recovery:
            self._say("the template has exited; a new one is started while training continues")
            return
        self._say("the template has exited; its workers are killed and a new one is started")
        if self._node_runner.worker_group is not None:
            self._node_runner.worker_group.decide(
                LostOutcome("template_lost", "the template ended")
            )

    def _on_mover_exit(self) -> None:
        if self._is_exiting_at_once:
            return
        if self._is_live_recovery:
            self._mover_restarter.start()
            return
        self._say("the mover has exited and its arenas are lost; a new one is started")
        if self._node_runner.worker_group is not None:
            self._node_runner.worker_group.decide(LostOutcome("mover_lost", "the mover ended"))

    def _publish_mover_address(self) -> None:
        peer = self._mover.peer  # the coordinator passes its address on
        self._role_loop.join_info["peer"] = None if peer is None else peer.to_json()

    def _on_mover_event(self, event: Event) -> None:
        if isinstance(event, CheckpointCommitted):
            self._committed_step = max(self._committed_step, event.step)
        if self._newest_generation:
            self._event_log.emit("mover", event)

    def _log_event(self, event: Event) -> None:
        if self._newest_generation:
            self._event_log.emit("agent", event)

    # --- events of processes (`process_manager`) ------------------------------------------------
    def on_joined(self, generation: int, rank: int, pid: int) -> None:
        current = self._node_runner.worker_group
        if current is not None and current.generation == generation:
            current.on_joined(rank, pid)

    def on_exited(
        self, generation: int, rank: int, pid: int, exit_code: int, log_path: Path, kill_reason: str
    ) -> None:
        current = self._node_runner.worker_group
        if current is not None and current.generation == generation:
            current.on_exited(rank, pid, exit_code, log_path, kill_reason)

    def on_held(self, generation: int, rank: int, held_state: HeldState) -> None:
        current = self._node_runner.worker_group
        if current is not None and current.generation == generation:
            current.on_held(rank, held_state)
            self._node_runner.on_worker_held(rank, held_state)

    # --- requests -------------------------------------------------------------------------------
    async def _handle_report(self, generation: int, body: dict[str, Any]) -> dict[str, Any]:
        current = self._node_runner.worker_group
        if current is None or current.generation != generation:
            raise FencedError(f"generation {generation} is over")
        rank = int(body["rank"])
        events, sync = current.process_report(body), bool(body["sync"])
        stored = True
        if events or sync:
            stored = await self._event_log.flush(f"rank{rank}", sync)
            stored = stored and not (sync and self._run_controller.is_ledger_repair_pending)
        current.on_report_answered(rank)
        self._node_runner.on_events_stored()
        stop = bool(self._shutdown_controller.stop_reason or self._node_runner.closing_reason)
        told = self._notice_handler.worker_reply_fields(rank, current.ranks[0])
        return {
            "stop": stop,
            "generation": generation,
            "stored": stored,
            "pause": self._node_runner.pause_generation,
            "parting": self._node_runner.is_node_leaving,
        } | told

    async def _handle_notice(self, generation: int, body: dict[str, Any]) -> dict[str, Any]:
        """Handle `holdfast notice`; an unknown node name gets an answer, no protocol error."""
        coordinator, nodes = self._role_loop.coordinator, body.get("nodes")
        if coordinator is not None and isinstance(nodes, list):
            known = sorted(node.name for node in coordinator.state.nodes)
            for name in nodes:
                if known and name not in known:
                    return {"refused": f"there is no node {name} in this run", "nodes": known}
        return await self._shutdown_controller.handle_notice_request(generation, body)

    def _health_fields(self) -> dict[str, Any]:
        current = self._node_runner.worker_group
        return {
            "state": health.describe_state(
                self._node_runner.stage, bool(self._shutdown_controller.stop_reason)
            ),
            "term": self._role_loop.state.term,
            "standing": str(self._role_loop.state.role),
            "generation": self._newest_generation,
            "step": self._known_committed_step if current is None else current.newest_step,
            "committed": self._known_committed_step,
            "workers": 0 if current is None else len(current.workers.live_workers),
        }

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
        self._run_controller.close()
        if missing_upload:
            event = RunStopped(missing_upload, step=self._known_committed_step)
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
