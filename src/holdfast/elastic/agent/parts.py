"""The parts of an agent: makes them and connects them with each other.

Some parts need another one that is made after them. They get a function that looks it up later.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Callable
from dataclasses import replace

from holdfast.elastic.agent.monitors import make_refusal_counter
from holdfast.elastic.agent.node_processes import NodeProcesses
from holdfast.elastic.agent.role_supervisor import RoleSupervisor
from holdfast.elastic.agent.run_folder_monitor import (
    FOLDER_LOST_MESSAGE,
    RunFolder,
    RunFolderMonitor,
)
from holdfast.elastic.agent.run_records import RunRecords, StoredReports
from holdfast.elastic.agent.shutdown import ShutdownController
from holdfast.elastic.agent.term_monitor import TermMonitor
from holdfast.elastic.agent.tracker_supervisor import TrackerSupervisor
from holdfast.elastic.coordinator.agent_hooks import AgentHooks
from holdfast.elastic.coordinator.rendezvous import RendezvousStore
from holdfast.elastic.coordinator.run_controller import RunController
from holdfast.elastic.event_log import Say
from holdfast.elastic.membership.role_loop import RoleLoop
from holdfast.elastic.node.launch_specs import NodeContext
from holdfast.elastic.node.node_runner import NodeRunner
from holdfast.elastic.protocol.generation_outcome import (
    FinishedOutcome,
    GenerationOutcome,
    LeftOutcome,
)
from holdfast.elastic.run_context import RunContext
from holdfast.events import RunStopped
from holdfast.plan.placing.interface import Planner
from holdfast.policy.membership.election import ElectionTimeouts
from holdfast.policy.membership.state import node_timeout_s
from holdfast.policy.spending import NodePrice


class AgentParts:
    """The parts of one agent; `elastic/agent/agent.py` lists them. They live in one event loop."""

    def __init__(
        self,
        context: RunContext,
        address: str,
        planner: Planner,
        records: RunRecords,
        say: Say,
        exit_at_once: Callable[[str], None],
    ) -> None:
        """Make the parts; `close` ends them.

        Args:
            address: Where the agent's control listens.
            planner: Lays a generation out over the nodes.
            exit_at_once: Makes the agent exit without waiting; it receives what is not saved then,
                "" for nothing.
        """
        self.context, self.records, self.say = context, records, say
        self._last_complaint = ""
        self.rendezvous = RendezvousStore()
        self.stored_reports = StoredReports(records.event_log)
        self.refusals = make_refusal_counter(
            records.event_log, lambda: records.progress.newest_generation > 0, say
        )
        self.processes = NodeProcesses(
            context, records.progress, say, lambda: self.run_folder_monitor.require_folder()
        )
        self.roles = RoleSupervisor(
            context,
            address,
            self.processes.lifeline_fd,
            self._find_leader,
            say,
            records.progress.emit_once_begun,
        )
        self.run_folder_monitor = RunFolderMonitor(
            RunFolder(context.store),
            lambda: self.shutdown_controller.reason or "",
            self._time_left_s,
            say,
            self._describe_held,
        )
        self.node_runner = self._make_node_runner(address)
        self.run_controller = self._make_run_controller(address, planner)
        self.role_loop = self._make_role_loop(address)
        self.term_monitor = self._make_term_monitor()
        self.processes.attach(self.role_loop.publish_mover, self.role_loop.publish_identity)
        self.trackers = self._make_trackers()
        self.shutdown_controller = self._make_shutdown_controller(exit_at_once)
        records.on_stop = self.shutdown_controller.stop_by_rule
        records.spending.present = self.prices
        records.spending.newest_step = lambda: self.shutdown_controller.newest_step
        records.spending.stop = self.shutdown_controller.stop_run
        records.pausing.leads = lambda: self.prices() is not None
        records.pausing.newest_step = records.spending.newest_step
        records.pausing.stop = self.shutdown_controller.stop_run

    async def close(self) -> None:
        """End the processes, and store the records that are left."""
        await self.roles.stop()
        await self.processes.stop()
        await asyncio.to_thread(self.refusals.close)
        await self.records.best.finish()
        await self.records.event_log.flush(sync=True)
        seconds = self.context.config.logging.finish_seconds
        is_killed = self.processes.is_killed
        await self.trackers.finish(
            0.0 if is_killed else seconds,
            is_leaving=is_killed or self.shutdown_controller.reason is not None,
        )
        self.processes.close()

    # --- making one part each -------------------------------------------------------------------
    def _make_trackers(self) -> TrackerSupervisor:
        return TrackerSupervisor(
            self.context.trackers,
            self.processes.lifeline_fd,
            lambda: self.role_loop.coordinator is not None,
            self.say,
            shlex.join(["holdfast", "track", str(self.context.folder)]),
        )

    def _make_node_runner(self, address: str) -> NodeRunner:
        it = self.context
        around = NodeContext(
            it.config,
            it.node,
            it.folder,
            it.secret,
            address,
            self.records.failure_history,
            it.places,
            self.roles.folder if it.config.rollout.is_on else None,
        )
        return NodeRunner(
            around,
            self.processes.process_manager,
            self.processes.mover,
            self.records.event_log,
            self.say,
            self.records.progress.begin_generation,
            lambda worker_group: self.shutdown_controller.on_group_started(worker_group),
            self.on_group_ended,
        )

    def _make_run_controller(self, address: str, planner: Planner) -> RunController:
        progress = self.records.progress
        hooks = AgentHooks(
            address,
            lambda: self.processes.process_manager.ensure_processes(0),
            self._on_generation_created,
            newest_generation=lambda: progress.newest_generation,
            stop_reason=lambda: self.shutdown_controller.stop_reason,
            committed_step=lambda: progress.committed_step,
            on_restored=progress.on_restored,
            has_stepped=lambda: progress.has_stepped,
            identity=lambda: self.role_loop.identity,
            give_up_lead=lambda: self.role_loop.give_up_lead(),
        )
        return RunController(
            self.context,
            hooks,
            planner,
            self.processes.mover,
            self.records.event_log,
            self.say,
            self.records.ledger_coverage,
        )

    def _make_role_loop(self, address: str) -> RoleLoop:
        it, cluster = self.context, self.context.config.cluster
        silence = node_timeout_s(cluster.beat_seconds)
        return RoleLoop(
            it.node,
            address,
            it.store,
            it.secret,
            self.node_runner,
            self.run_controller.lead_term,
            places=it.places,
            timeouts=ElectionTimeouts(silence, cluster.beat_seconds / 2, cluster.alone_seconds),
            heartbeat_interval_s=cluster.beat_seconds,
            complain=self._complain_once,
            own_term=it.single_node_term,
            check_run_folder=self.run_folder_monitor.require_folder,
            price=it.price,
        )

    def _make_term_monitor(self) -> TermMonitor:
        it = self.context
        return TermMonitor(
            it.node, self.role_loop, lambda: self.run_controller.term, it.single_node_term, self.say
        )

    def _make_shutdown_controller(self, exit_at_once: Callable[[str], None]) -> ShutdownController:
        it = self.context
        return ShutdownController(
            it.config,
            it.node,
            it.single_node_term is not None,
            event_log=self.records.event_log,
            say=self.say,
            node_runner=self.node_runner,
            role_loop=self.role_loop,
            run_controller=self.run_controller,
            notice_handler=self.records.notice_handler,
            final_upload=self.processes.final_upload,
            exit_at_once=exit_at_once,
            committed_step=lambda: self.records.progress.committed_step,
            stop_cause=it.stop_cause,
        )

    def _find_leader(self) -> str:
        """Return the address of the coordinator; "" for this agent, "?" if none is known."""
        if self.role_loop.coordinator is not None:
            return ""
        return self.role_loop.state.leader_address or "?"

    def spares(self) -> tuple[str, ...] | None:
        """Return the nodes that have joined and have no place in the generation; None if this agent
        does not coordinate a generation."""
        coordinator = self.role_loop.coordinator
        if coordinator is None or not self.records.progress.newest_generation:
            return None
        joined = {node.name for node in coordinator.state.nodes}
        return tuple(sorted(joined - set(self.role_loop.agent_addresses)))

    def prices(self) -> dict[str, NodePrice | None] | None:
        """Return the nodes that have joined, and the price that each told; None if this agent does
        not coordinate a generation."""
        coordinator = self.role_loop.coordinator
        if coordinator is None or not self.records.progress.newest_generation:
            return None
        reports = coordinator.node_reports
        return {
            node.name: reports[node.name].facts.price if node.name in reports else None
            for node in coordinator.state.nodes
        }

    # --- requests of one part to several --------------------------------------------------------
    def _on_generation_created(self, generation: int) -> None:
        """Open a generation whose object this agent has created."""
        self.records.progress.begin_generation(generation)
        self.rendezvous.begin_generation(generation)

    def _complain_once(self, sentence: str) -> None:
        if sentence not in (FOLDER_LOST_MESSAGE, self._last_complaint):  # do not repeat it
            self._last_complaint = sentence
            self.say(sentence)

    def _describe_held(self) -> str:
        """Return which state this node holds in memory."""
        group = self.node_runner.worker_group
        if group is None or not group.ranks:
            return f"{self.context.node} holds no state"
        ranks, step = ", ".join(map(str, group.ranks)), group.reached_step
        return f"{self.context.node} holds the state of rank {ranks} after step {step}"

    def _time_left_s(self) -> float:
        """Return the seconds until this node must have left; 0 if not known."""
        return self.records.notice_handler.time_left_s() or self.role_loop.leave_within_s

    # --- the end of this node's worker groups ----------------------------------------------------
    async def on_group_ended(self, outcome: GenerationOutcome) -> GenerationOutcome:
        """Finish saves and uploads after this node's workers have ended, before it is reported."""
        if not isinstance(outcome, FinishedOutcome | LeftOutcome):
            return outcome
        generation = self.records.progress.newest_generation
        if isinstance(outcome, LeftOutcome) and outcome.unsaved_reason is None:
            outcome = replace(
                outcome,
                unsaved_reason=await self.records.notice_handler.wait_for_peer_copy(outcome.step),
            )
        if outcome.unsaved_reason is None:
            missing = await self._wait_for_bucket(outcome, generation)
            outcome = replace(outcome, missing_upload=missing)
        await self.processes.mover.drain_events(generation)
        return outcome

    async def _wait_for_bucket(
        self, outcome: FinishedOutcome | LeftOutcome, generation: int
    ) -> str | None:
        """Wait for the bucket; return what it lacks at the end. An agent that leaves writes its
        stop into the journal first, because it may be killed while it waits."""

        async def written() -> None:
            why = (
                self.shutdown_controller.stop_reason
                or self.node_runner.closing_reason
                or "the workers left"
            )
            self.run_controller.result_reporter.write_event(RunStopped(why, step=outcome.step))
            await self.records.event_log.flush(sync=True)

        leads = self.role_loop.coordinator is not None
        before = written if leads and isinstance(outcome, LeftOutcome) else None
        return await self.processes.final_upload.wait(
            generation, before, self.records.notice_handler.time_left_s
        )
