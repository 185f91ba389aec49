"""What the leader does while too few nodes are present: it reports that, and waits or ends the run.

The run file says which (`cluster.below_minimum`). Before the run ends for this reason, one last
generation of the present nodes saves their state.
"""

from __future__ import annotations

import asyncio

from holdfast.config.cluster import ClusterConfig
from holdfast.elastic.coordinator.agent_hooks import AgentHooks
from holdfast.elastic.coordinator.coordinator import Coordinator
from holdfast.elastic.event_log import Say
from holdfast.elastic.run_result import EndReason, RunEndedError, raise_if_failed
from holdfast.policy.membership.transitions import Phase


class NodeShortage:
    """The shortage of nodes of one run, under all coordinators of this agent."""

    def __init__(
        self, cluster: ClusterConfig, hooks: AgentHooks, say: Say, is_single_node: bool
    ) -> None:
        self.closing_reason = ""
        """Why the next generation is the last one; "" while the run continues."""
        self.coordinator: Coordinator | None = None
        """The newest coordinator of this agent."""
        self._cluster, self._hooks, self._say = cluster, hooks, say
        self._is_single_node = is_single_node

    @property
    def least_nodes(self) -> int:
        """The fewest nodes that a generation may have."""
        return 1 if self.closing_reason or self._is_single_node else self._cluster.min_nodes

    async def wait_for_nodes(self, notice_delay_s: float = 0.0) -> None:
        """Report after `notice_delay_s` what is lacking; then wait for it, or stop the run."""
        await asyncio.sleep(notice_delay_s)
        coordinator = self.coordinator
        assert coordinator is not None, "nodes gather only once a coordinator exists"
        try:
            raise_if_failed(coordinator.node_reports.values())
        except RunEndedError as error:
            coordinator.finish(str(error), error.reason)
            return
        if (why := self._hooks.stop_reason()) or self._cluster.below_minimum == "leave":
            patience = 0.0 if why else self._cluster.below_minimum_seconds
            if not why:
                self._say(f"{self._describe()}; leaving in {patience:g} s if no node joins")
            await asyncio.sleep(patience)
            self.stop_waiting(why or f"{self._describe()}, for {patience:g} s")
        else:
            self._say(f"{self._describe()}; waiting for more")

    def _describe(self) -> str:
        assert self.coordinator is not None
        nodes, least = self.coordinator.state.nodes, self._cluster.min_nodes
        if len(nodes) < least:
            return f"{len(nodes)} of at least {least} nodes (cluster.min_nodes) are here"
        return f"no layout fits the {sum(n.places for n in nodes)} places that are here"

    def stop_waiting(self, reason: str) -> None:
        """Stop the run if no node works: wait for no further node.

        One last generation of the present nodes saves their state. If none is possible, the run is
        over."""
        coordinator = self.coordinator
        if coordinator is None or coordinator.state.phase is not Phase.GATHERING:
            return
        self.closing_reason = reason
        if self._hooks.newest_generation():  # before that, no node holds any state
            coordinator.reevaluate()
        if coordinator.state.phase is Phase.GATHERING:
            kind = EndReason.STOPPED if self._hooks.stop_reason() else EndReason.TOO_FEW
            coordinator.finish(reason, kind)
