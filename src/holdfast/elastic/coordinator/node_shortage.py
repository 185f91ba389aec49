"""What the leader does while too few nodes are present: it reports that, and waits or ends the run.

The run file says which (`cluster.below_minimum`). Before the run ends for this reason, one last
generation of the present nodes saves their state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from holdfast.config.sections.cluster import ClusterConfig
from holdfast.elastic.coordinator.agent_hooks import AgentHooks
from holdfast.elastic.coordinator.coordinator import Coordinator
from holdfast.elastic.event_log import Say
from holdfast.elastic.run_result import EndReason, RunEndedError
from holdfast.policy.membership import transitions
from holdfast.policy.membership.queries import is_staying
from holdfast.policy.membership.state import SelectNodes
from holdfast.policy.membership.transitions import Phase

ENOUGH_CHECK_INTERVAL_S = 1.0
"""Seconds between two looks whether the nodes that are here still suffice."""


class NodeShortage:
    """The shortage of nodes of one run, under all coordinators of this agent."""

    def __init__(
        self,
        cluster: ClusterConfig,
        hooks: AgentHooks,
        say: Say,
        is_single_node: bool,
        select_nodes: SelectNodes,
    ) -> None:
        """select_nodes: the planner's answer, under the limit of `least_nodes`."""
        self.closing_reason = ""
        """Why the next generation is the last one; "" while the run continues."""
        self.node_fault = ""
        """Why a node was left out without which too few are here; "" for none."""
        self.leave_out_failed: Callable[[], Awaitable[bool]]
        """Leaves out nodes whose workers refuse; see `NodeFaults`. Set with the coordinator."""
        self.coordinator: Coordinator | None = None
        """The newest coordinator of this agent."""
        self._cluster, self._hooks, self._say = cluster, hooks, say
        self._is_single_node, self._select_nodes = is_single_node, select_nodes

    @property
    def least_nodes(self) -> int:
        """The fewest nodes that a generation may have."""
        return 1 if self.closing_reason or self._is_single_node else self._cluster.min_nodes

    async def wait_for_nodes(self, notice_delay_s: float = 0.0) -> None:
        """Report after `notice_delay_s` what is lacking; then wait for it, or stop the run."""
        await asyncio.sleep(notice_delay_s)
        await self._wait_while_enough()
        coordinator = self.coordinator
        assert coordinator is not None, "nodes gather only once a coordinator exists"
        try:
            await self.leave_out_failed()
        except RunEndedError as error:
            coordinator.finish(str(error), error.reason)
            return
        if self.node_fault:
            self.stop_waiting(f"{self.node_fault}; {self._describe()}")
        elif (why := self._hooks.stop_reason()) or self._cluster.below_minimum == "leave":
            patience = 0.0 if why else self._cluster.below_minimum_seconds
            if not why:
                self._say(f"{self._describe()}; leaving in {patience:g} s if no node joins")
            await asyncio.sleep(patience)
            self.stop_waiting(why or f"{self._describe()}, for {patience:g} s")
        else:
            self._say(f"{self._describe()}; waiting for more, without a limit of time")

    async def _wait_while_enough(self) -> None:
        """Wait while the nodes that are here suffice: the coordinator is about to use them."""
        has_reported = False
        while not self._hooks.stop_reason() and (blocking := self._find_blocking()) is not None:
            if blocking and not has_reported:
                has_reported = True
                names = ", ".join(blocking)
                self._say(f"training begins again as soon as the workers of {names} have stopped")
            await asyncio.sleep(ENOUGH_CHECK_INTERVAL_S)

    def _find_blocking(self) -> list[str] | None:
        """Return the nodes whose workers have not stopped; None if a layout needs more nodes."""
        assert self.coordinator is not None, "nodes gather only once a coordinator exists"
        state = self.coordinator.state
        staying = [node for node in state.nodes if is_staying(node)]
        if state.unreachable_pairs or not self._select_nodes(staying):
            return None
        stopped = {node.name for node in transitions.usable_nodes(state)}
        return [node.name for node in staying if node.name not in stopped]

    def _describe(self) -> str:
        assert self.coordinator is not None
        state, least = self.coordinator.state, self._cluster.min_nodes
        nodes, places = state.nodes, sum(node.places for node in state.nodes)
        if len(nodes) < least:
            return f"{len(nodes)} of at least {least} nodes (cluster.min_nodes) are here"
        if state.unreachable_pairs:
            pair = state.unreachable_pairs[0]
            return (
                f"{pair.one} and {pair.other} do not reach each other, and neither suffices alone"
            )
        are = "place that is" if places == 1 else "places that are"
        return f"no layout fits the {places} {are} here (see holdfast layout show)"

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
