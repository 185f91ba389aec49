"""The requests that an agent answers: of its workers, of other agents, and of `/healthz`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from holdfast.elastic.agent import health
from holdfast.elastic.agent.parts import AgentParts
from holdfast.elastic.notices.handler import NOTICE_PATH
from holdfast.errors import FencedError
from holdfast.wire.http.auth import Verifier
from holdfast.wire.http.server import SignedApplication


@dataclass(frozen=True)
class RequestHandlers:
    """Handlers of the requests to one agent, and its parts that know the answers."""

    parts: AgentParts

    def make_application(self) -> SignedApplication:
        """Return the application of the control listener."""
        outside = {
            "/orders": self.parts.processes.process_manager.handle_command_poll,
            NOTICE_PATH: self.handle_notice,
            **self.parts.role_loop.handlers,
        }
        return SignedApplication(
            {
                "/report": self.handle_report,
                "/store": self.parts.rendezvous.handle_operation,
                **outside,
            },
            self.parts.context.secret,
            Verifier(self.parts.context.secret, time.time),
            lambda: self.parts.records.progress.newest_generation,
            generationless_paths=frozenset(outside),
            refusals=self.parts.refusals,
        )

    async def handle_report(self, generation: int, body: dict[str, Any]) -> dict[str, Any]:
        """Handle a worker's report. Raises FencedError if its generation is over."""
        current = self.parts.node_runner.worker_group
        if current is None or current.generation != generation:
            raise FencedError(f"generation {generation} is over")
        rank = int(body["rank"])
        events, sync = current.process_report(body), bool(body["sync"])
        stored = True
        if events or sync:
            stored = await self.parts.records.event_log.flush(f"rank{rank}", sync)
            stored = stored and not (sync and self.parts.run_controller.is_ledger_repair_pending)
        current.on_report_answered(rank)
        self.parts.node_runner.on_events_stored()
        stop = bool(
            self.parts.shutdown_controller.stop_reason or self.parts.node_runner.closing_reason
        )
        told = self.parts.records.notice_handler.worker_reply_fields(rank, current.ranks[0])
        return {
            "stop": stop,
            "generation": generation,
            "stored": stored,
            "pause": self.parts.node_runner.pause_generation,
            "parting": self.parts.node_runner.is_node_leaving,
        } | told

    async def handle_notice(self, generation: int, body: dict[str, Any]) -> dict[str, Any]:
        """Handle `holdfast notice`; an unknown node name gets an answer, no protocol error."""
        coordinator, nodes = self.parts.role_loop.coordinator, body.get("nodes")
        if coordinator is not None and isinstance(nodes, list):
            known = sorted(node.name for node in coordinator.state.nodes)
            for name in nodes:
                if known and name not in known:
                    return {"refused": f"there is no node {name} in this run", "nodes": known}
        return await self.parts.shutdown_controller.handle_notice_request(generation, body)

    def health_fields(self) -> dict[str, Any]:
        """Return the fields of `/healthz`."""
        current = self.parts.node_runner.worker_group
        return {
            "state": health.describe_state(
                self.parts.node_runner.stage, bool(self.parts.shutdown_controller.stop_reason)
            ),
            "term": self.parts.role_loop.state.term,
            "standing": str(self.parts.role_loop.state.role),
            "generation": self.parts.records.progress.newest_generation,
            "step": self.parts.records.progress.committed_step
            if current is None
            else current.newest_step,
            "committed": self.parts.records.progress.committed_step,
            "workers": 0 if current is None else len(current.workers.live_workers),
            "world_size": 0 if current is None else current.topology.world_size,
            "nodes": 0 if current is None else len(set(current.topology.nodes)),
        }
