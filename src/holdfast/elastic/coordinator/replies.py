"""The coordinator's answers to nodes: what each of them is to do, and what it needs for that."""

from __future__ import annotations

from dataclasses import replace

from holdfast.elastic.protocol.coordinator_messages import (
    JOIN_FIRST_COMMAND,
    REPLACED_COMMAND,
    HeartbeatReply,
    NodeSituation,
    RunEnd,
)
from holdfast.elastic.protocol.start_state import StartState
from holdfast.policy.membership.transitions import (
    TERMINAL_PHASES,
    CoordinatorState,
    NodeCommand,
    Phase,
    directive_for,
)


class ReplyWriter:
    """Writes the answers of one term's coordinator."""

    def __init__(self) -> None:
        self.start_state: StartState | None = None
        """What the nodes of the newest generation begin from; None if another coordinator made it.
        """
        self.nodes_to_leave: set[str] = set()
        """Nodes to leave once the rest works without them."""
        self.dismissed_nodes: set[str] = set()
        """Nodes that know that the run is over."""

    def write(
        self, state: CoordinatorState, name: str, incarnation: str | None, end_reason: str
    ) -> HeartbeatReply | None:
        """Return the answer to a node; None if it is to begin, and the start state is not here.

        incarnation: the agent's process; None if it joins. end_reason: why the run ended."""
        node, term = state.node(name), state.term
        over = state.phase in TERMINAL_PHASES
        if not over and (
            node is None or (incarnation is not None and node.incarnation != incarnation)
        ):
            return HeartbeatReply(term, JOIN_FIRST_COMMAND if node is None else REPLACED_COMMAND)
        due = directive_for(state, name)
        situation = self._situation(state, name)
        reply = HeartbeatReply(term, due.command.value, due.generation, situation)
        if due.command is NodeCommand.START:
            return None if self.start_state is None else replace(reply, start=self.start_state)
        if due.command in (NodeCommand.HALT, NodeCommand.PAUSE):
            return replace(reply, reason=state.reason)
        if due.command is NodeCommand.LEAVE:
            self.dismissed_nodes.add(name)
            return replace(reply, run_end=RunEnd(state.end_reason, end_reason))
        return reply

    def _situation(self, state: CoordinatorState, name: str) -> NodeSituation:
        return NodeSituation(
            is_outside=name not in state.members and state.phase is Phase.TRAINING,
            may_leave=name in self.nodes_to_leave,
            # no node works, and several nodes are present that may continue
            is_idle=state.phase is Phase.GATHERING and len(state.nodes) > 1,
        )
