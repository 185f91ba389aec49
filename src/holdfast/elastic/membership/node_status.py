"""What a node tells its coordinator: who it is, and what its workers do."""

from __future__ import annotations

from holdfast.elastic.membership.reachability import ReachabilityProbe
from holdfast.elastic.membership.workload import Workload
from holdfast.elastic.protocol.coordinator_messages import AgentFacts, Heartbeat, JoinRequest
from holdfast.elastic.protocol.generation_outcome import NodeOutcome
from holdfast.policy.membership.transitions import Directive, NodeStage


class NodeStatus:
    """The status of one node, as requests to the coordinator."""

    def __init__(
        self,
        name: str,
        incarnation: str,
        places: int,
        facts: AgentFacts,
        workload: Workload,
        reachability_probe: ReachabilityProbe,
    ) -> None:
        """incarnation: this agent's process."""
        self._name, self._incarnation, self._places = name, incarnation, places
        self._workload = workload
        self.facts = facts
        """About this agent. A change counts from the next request to join."""
        self._reachability_probe = reachability_probe

    def make_join_request(self) -> JoinRequest:
        stage, held = self._stage_and_outcome()
        return JoinRequest(
            self._name,
            self._incarnation,
            self._places,
            self.facts,
            self._workload.generation,
            stage,
            held,
            self._workload.ready_workers,
        )

    def make_heartbeat(
        self, term: int, doing: Directive, leave_within_s: float, max_wait_s: float
    ) -> Heartbeat:
        """Return a heartbeat for the coordinator of `term`.

        doing: what this node does now. leave_within_s: 0 if it stays. max_wait_s: seconds within
        which the answer is due."""
        stage, held = self._stage_and_outcome()
        work = self._workload
        return Heartbeat(
            self._name,
            self._incarnation,
            term,
            doing,
            work.generation,
            stage,
            leave_within_s,
            held,
            work.ready_workers,
            tuple(self._reachability_probe.unreachable),
            work.stalled_workers,
            work.worker_paces,
            max_wait_s,
        )

    def _stage_and_outcome(self) -> tuple[NodeStage, NodeOutcome | None]:
        stage = self._workload.stage
        if stage is NodeStage.HELD and self._reachability_probe.is_probing:
            stage = NodeStage.WORKING  # the next generation has only nodes that reach each other
        return stage, self._workload.node_outcome if stage in (
            NodeStage.HELD,
            NodeStage.DONE,
        ) else None
