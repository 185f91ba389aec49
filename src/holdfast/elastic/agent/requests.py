"""The requests that an agent answers: of its workers, of other agents, and of `/healthz`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from holdfast.elastic.agent import health
from holdfast.elastic.agent.health import HealthStatus
from holdfast.elastic.agent.parts import AgentParts
from holdfast.elastic.coordinator.liveness_probe import ProbeResult, probe
from holdfast.elastic.protocol.messages import handler_of
from holdfast.elastic.protocol.node_check import (
    NODE_CHECK_PATH,
    LinkResult,
    NodeCheck,
    NodeCheckReply,
    NodeMemory,
)
from holdfast.elastic.protocol.notice_messages import (
    NOTICE_PATH,
    EmergencyReply,
    Notice,
    UnknownNodeReply,
)
from holdfast.elastic.protocol.profile_messages import PROFILE_PATH, ProfileReply, ProfileRequest
from holdfast.elastic.protocol.rendezvous_messages import RENDEZVOUS_PATH, StoreRequest
from holdfast.elastic.protocol.worker_commands import COMMANDS_PATH, CommandPoll
from holdfast.elastic.protocol.worker_messages import REPORT_PATH, WorkerReply, WorkerReport
from holdfast.errors import FencedError
from holdfast.machine.hardware import detect_hardware
from holdfast.machine.limits import available_memory
from holdfast.wire.http.auth import Verifier
from holdfast.wire.http.server import SignedApplication


@dataclass(frozen=True)
class RequestHandlers:
    """Handlers of the requests to one agent, and its parts that know the answers."""

    parts: AgentParts
    seen_progress: Callable[[], tuple[int, int]] = lambda: (0, 0)
    """Returns the newest step and the newest committed step that the views have seen."""

    health_address: str = ""
    """Of the listener of `/healthz`."""

    def make_application(self) -> SignedApplication:
        """Return the application of the control listener."""
        outside = {
            COMMANDS_PATH: handler_of(
                CommandPoll.from_json, self.parts.processes.process_manager.handle_command_poll
            ),
            NOTICE_PATH: handler_of(Notice.from_json, self.handle_notice),
            NODE_CHECK_PATH: handler_of(NodeCheck.from_json, self.handle_node_check),
            PROFILE_PATH: handler_of(ProfileRequest.from_json, self.handle_profile),
            **self.parts.role_loop.handlers,
            **self.parts.roles.handlers,
        }
        return SignedApplication(
            {
                REPORT_PATH: handler_of(WorkerReport.from_json, self.handle_report),
                RENDEZVOUS_PATH: handler_of(
                    StoreRequest.from_json, self.parts.rendezvous.handle_operation
                ),
                **outside,
            },
            self.parts.context.secret,
            Verifier(self.parts.context.secret, time.time),
            lambda: self.parts.records.progress.newest_generation,
            generationless_paths=frozenset(outside),
            refusals=self.parts.refusals,
        )

    async def handle_report(self, generation: int, report: WorkerReport) -> WorkerReply:
        """Handle a worker's report. Raises FencedError if its generation is over."""
        current = self.parts.node_runner.worker_group
        if current is None or current.generation != generation:
            raise FencedError(f"generation {generation} is over")
        rank, sync = report.rank, report.is_sync
        events = current.process_report(report)
        stored, durable, reports = True, 0, self.parts.stored_reports
        if events or sync:
            following = current.workers.next_event_number(report)
            stored = await reports.store(generation, rank, following, sync)
        if self.parts.run_controller.is_ledger_repair_pending:
            stored = stored and not sync
        else:
            durable = reports.durable_below(generation, rank)
        current.on_report_answered(rank)
        self.parts.node_runner.on_events_stored()
        stop = bool(
            self.parts.shutdown_controller.stop_reason or self.parts.node_runner.closing_reason
        )
        reply = WorkerReply(
            stop,
            generation,
            stored,
            self.parts.node_runner.pause_generation,
            self.parts.node_runner.is_node_leaving,
            durable_below=durable,
            profile=(current.profile.number, current.profile.steps)
            if rank in current.profile.ranks
            else (0, 0),
        )
        return self.parts.records.notice_handler.add_requests(reply, rank, current.ranks[0])

    async def handle_notice(
        self, generation: int, notice: Notice
    ) -> EmergencyReply | UnknownNodeReply:
        """Handle `holdfast notice`; an unknown node name gets an answer, no protocol error."""
        coordinator = self.parts.role_loop.coordinator
        if coordinator is not None:
            known = sorted(node.name for node in coordinator.state.nodes)
            for name in notice.nodes:
                if known and name not in known:
                    return UnknownNodeReply(f"there is no node {name} in this run", tuple(known))
        return await self.parts.shutdown_controller.handle_notice_request(generation, notice)

    async def handle_profile(self, generation: int, request: ProfileRequest) -> ProfileReply:
        """Handle `holdfast profile`: the answers to the workers' reports carry the request."""
        current = self.parts.node_runner.worker_group
        if current is None:
            return ProfileReply()
        current.profile = request
        return ProfileReply(tuple(rank for rank in request.ranks if rank in current.ranks))

    async def handle_node_check(self, generation: int, check: NodeCheck) -> NodeCheckReply:
        """Handle a check of `holdfast doctor`."""
        return replace(
            await check_node(self.health_status(), check),
            spares=self.parts.spares() or (),
            health=self.health_address,
        )

    def health_status(self) -> HealthStatus:
        """Return the answer to `/healthz`."""
        current, progress = self.parts.node_runner.worker_group, self.parts.records.progress
        step, committed = self.seen_progress()
        committed = max(committed, progress.committed_step)
        return HealthStatus(
            health.describe_state(
                self.parts.node_runner.stage,
                bool(self.parts.shutdown_controller.stop_reason),
                progress.is_save_waiting,
                self.parts.node_runner.is_spare,
                self.parts.role_loop.lacked_majority is not None,
            ),
            self.parts.role_loop.state.term,
            str(self.parts.role_loop.state.role),
            progress.newest_generation,
            max(step, committed) if current is None else current.reached_step,
            committed,
            0 if current is None else len(current.workers.live_workers),
            0 if current is None else current.topology.world_size,
            0 if current is None else len(set(current.topology.nodes)),
        )


LINK_PROBES = 3
"""Connections to each agent: the quickest one is the round trip."""
LINK_PROBE_TIMEOUT_S = 1.5
"""Seconds for one connection; the kernel can resend one lost packet within it."""
MAX_PROBES_AT_A_TIME = 64


async def check_node(health: HealthStatus, check: NodeCheck) -> NodeCheckReply:
    """Probe the agents that the request names, and read this node's memory meanwhile."""
    turns = asyncio.Semaphore(MAX_PROBES_AT_A_TIME)
    memory, links = await asyncio.gather(
        asyncio.to_thread(_read_memory),
        asyncio.gather(*(_probe_link(address, turns) for address in check.agents.values())),
    )
    return NodeCheckReply(
        health.state,
        health.step,
        health.committed_step,
        memory,
        dict(zip(check.agents, links, strict=True)),
    )


async def _probe_link(address: str, turns: asyncio.Semaphore) -> LinkResult:
    """Connect to an address until it fails, `LINK_PROBES` times at most."""
    quickest: float | None = None
    async with turns:
        for _ in range(LINK_PROBES):
            begun = time.perf_counter()
            found = await probe(address, LINK_PROBE_TIMEOUT_S)
            seconds = time.perf_counter() - begun
            if found is not ProbeResult.LISTENS:
                return LinkResult(found.value)
            quickest = seconds if quickest is None else min(quickest, seconds)
    return LinkResult(ProbeResult.LISTENS.value, quickest)


def _read_memory() -> NodeMemory:
    machine = detect_hardware()
    devices = tuple(one.memory_bytes for one in machine.accelerators)
    return NodeMemory(machine.memory_bytes, available_memory(), devices)
