"""The requests that an agent answers: of its workers, of other agents, and of `/healthz`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from holdfast.elastic.agent import health
from holdfast.elastic.agent.run_progress import RunProgress
from holdfast.elastic.agent.shutdown import ShutdownController
from holdfast.elastic.coordinator.rendezvous import RendezvousStore
from holdfast.elastic.coordinator.run_controller import RunController
from holdfast.elastic.event_log import EventLog
from holdfast.elastic.membership.role_loop import RoleLoop
from holdfast.elastic.node.node_runner import NodeRunner
from holdfast.elastic.node.process_manager import ProcessManager
from holdfast.elastic.notices.handler import NOTICE_PATH, NoticeHandler
from holdfast.errors import FencedError
from holdfast.wire.http.auth import Verifier
from holdfast.wire.http.refusals import Refusals
from holdfast.wire.http.server import SignedApplication
from holdfast.wire.secret import Secret


@dataclass(frozen=True)
class RequestHandlers:
    """Handlers of the requests to one agent, and its parts that know the answers."""

    secret: Secret
    refusals: Refusals
    progress: RunProgress
    event_log: EventLog
    rendezvous: RendezvousStore
    process_manager: ProcessManager
    node_runner: NodeRunner
    role_loop: RoleLoop
    run_controller: RunController
    shutdown_controller: ShutdownController
    notice_handler: NoticeHandler

    def make_application(self) -> SignedApplication:
        """Return the application of the control listener."""
        outside = {
            "/orders": self.process_manager.handle_command_poll,
            NOTICE_PATH: self.handle_notice,
            **self.role_loop.handlers,
        }
        return SignedApplication(
            {
                "/report": self.handle_report,
                "/store": self.rendezvous.handle_operation,
                **outside,
            },
            self.secret,
            Verifier(self.secret, time.time),
            lambda: self.progress.newest_generation,
            generationless_paths=frozenset(outside),
            refusals=self.refusals,
        )

    async def handle_report(self, generation: int, body: dict[str, Any]) -> dict[str, Any]:
        """Handle a worker's report. Raises FencedError if its generation is over."""
        current = self.node_runner.worker_group
        if current is None or current.generation != generation:
            raise FencedError(f"generation {generation} is over")
        rank = int(body["rank"])
        events, sync = current.process_report(body), bool(body["sync"])
        stored = True
        if events or sync:
            stored = await self.event_log.flush(f"rank{rank}", sync)
            stored = stored and not (sync and self.run_controller.is_ledger_repair_pending)
        current.on_report_answered(rank)
        self.node_runner.on_events_stored()
        stop = bool(self.shutdown_controller.stop_reason or self.node_runner.closing_reason)
        told = self.notice_handler.worker_reply_fields(rank, current.ranks[0])
        return {
            "stop": stop,
            "generation": generation,
            "stored": stored,
            "pause": self.node_runner.pause_generation,
            "parting": self.node_runner.is_node_leaving,
        } | told

    async def handle_notice(self, generation: int, body: dict[str, Any]) -> dict[str, Any]:
        """Handle `holdfast notice`; an unknown node name gets an answer, no protocol error."""
        coordinator, nodes = self.role_loop.coordinator, body.get("nodes")
        if coordinator is not None and isinstance(nodes, list):
            known = sorted(node.name for node in coordinator.state.nodes)
            for name in nodes:
                if known and name not in known:
                    return {"refused": f"there is no node {name} in this run", "nodes": known}
        return await self.shutdown_controller.handle_notice_request(generation, body)

    def health_fields(self) -> dict[str, Any]:
        """Return the fields of `/healthz`."""
        current = self.node_runner.worker_group
        return {
            "state": health.describe_state(
                self.node_runner.stage, bool(self.shutdown_controller.stop_reason)
            ),
            "term": self.role_loop.state.term,
            "standing": str(self.role_loop.state.role),
            "generation": self.progress.newest_generation,
            "step": self.progress.committed_step if current is None else current.newest_step,
            "committed": self.progress.committed_step,
            "workers": 0 if current is None else len(current.workers.live_workers),
        }
