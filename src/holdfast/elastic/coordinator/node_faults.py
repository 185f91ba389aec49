"""Leaves out a node whose workers refuse something that the user must correct there.

A folder, a disk, a permission, a base model or a dataset is the node's own. So the node ends with
its sentence, and the other nodes continue without it. The run ends only if no node is left, or if
the other nodes do not suffice. A coordinator whose own node is to blame gives up the lead first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.elastic.coordinator.coordinator import Coordinator
from holdfast.elastic.coordinator.node_shortage import NodeShortage
from holdfast.elastic.event_log import Say
from holdfast.elastic.protocol.exit_codes import USER_ERROR
from holdfast.elastic.run_result import EndReason, RunEndedError
from holdfast.policy.membership.state import SelectNodes
from holdfast.wire.term import Term


@dataclass(frozen=True)
class NodeFaults:
    """The faults of single nodes, as the coordinator of one term handles them."""

    node: str  # the coordinator's own
    term: Term
    coordinator: Coordinator
    select_nodes: SelectNodes
    shortage: NodeShortage
    give_up_lead: Callable[[], None]  # ends this coordinator, whose term was closed
    say: Say

    async def leave_out_failed(self) -> bool:
        """Leave out the nodes that failed; return True if there were any.

        Raises RunEndedError if no other node is left, or for a failure that is not one node's."""
        nodes, reports = self.coordinator.state.nodes, self.coordinator.node_reports
        failures = {node.name: reports[node.name].failure for node in nodes}
        failed = {name: one for name, one in failures.items() if one is not None}
        rest = [node for node in nodes if node.name not in failed]
        for failure in failed.values():
            is_own = failure.exit_code == USER_ERROR
            if not rest or not is_own:
                kind = EndReason.USER_ERROR if is_own else EndReason.FAILED
                raise RunEndedError(failure.sentence, kind)
        if self.node in failed:
            await asyncio.to_thread(self.term.close)
            self.give_up_lead()  # the next coordinator leaves this node out
            return True
        for name, failure in failed.items():
            if not self.select_nodes(rest):
                self.shortage.node_fault = f"{name} is left out ({failure.sentence})"
            self.leave_out(name, failure.sentence)
        return bool(failed)

    def leave_out(self, name: str, sentence: str) -> None:
        """Leave a node out, and tell its agent and the user why."""
        why = f"left out of the run: {sentence}"
        if name not in self.coordinator.state.members:  # the journal tells of members
            self.say(f"{name} is {why}")
        self.coordinator.leave_out(name, why)
