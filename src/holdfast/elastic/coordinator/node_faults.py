"""Leaves out a node whose workers refuse something that the user must correct there.

A folder, a disk, a permission, a base model or a dataset is the node's own. So the node ends with
its sentence, and the other nodes continue without it. The run ends only if no node is left, or if
the other nodes do not suffice. A coordinator whose own node is to blame gives up the lead first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from holdfast.elastic.coordinator.coordinator import Coordinator
from holdfast.elastic.coordinator.node_shortage import NodeShortage
from holdfast.elastic.event_log import Say
from holdfast.elastic.protocol import exit_codes
from holdfast.elastic.protocol.coordinator_messages import NodeReport
from holdfast.elastic.protocol.generation_outcome import FailedOutcome
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

    def on_outsider_failed(self, name: str, sentence: str) -> None:
        """Leave out a node that no generation uses."""
        self._leave_out(name, sentence)

    async def leave_out_failed(self) -> bool:
        """Leave out the nodes that failed; return True if there were any.

        Raises RunEndedError if no other node is left, or for a failure that is not one node's."""
        nodes = self.coordinator.state.nodes
        failed = failures(self.coordinator.node_reports)
        failed = {node.name: failed[node.name] for node in nodes if node.name in failed}
        if not failed:
            return False
        rest = [node for node in nodes if node.name not in failed]
        for failure in failed.values():
            if not rest or failure.exit_code != exit_codes.USER_ERROR:
                raise RunEndedError(failure.sentence, _end_reason(failure))
        if self.node in failed:
            await asyncio.to_thread(self.term.close)
            self.give_up_lead()  # the next coordinator leaves this node out
            return True
        if not self.select_nodes(rest):
            name, failure = next(iter(failed.items()))
            self.shortage.node_fault = f"{name} is left out ({failure.sentence})"
        for name, failure in failed.items():
            self._leave_out(name, failure.sentence)
        return True

    def _leave_out(self, name: str, sentence: str) -> None:
        why = f"left out of the run: {sentence}"
        if name not in self.coordinator.state.members:  # the journal tells of members
            self.say(f"{name} is {why}")
        self.coordinator.leave_out(name, why)


def failures(reports: Mapping[str, NodeReport]) -> dict[str, FailedOutcome]:
    """Return the failures that a restart would not repair, by node."""
    endings = {
        name: report.node_outcome.ending
        for name, report in reports.items()
        if report.node_outcome is not None
    }
    return {
        name: ending
        for name, ending in endings.items()
        if isinstance(ending, FailedOutcome) and ending.sentence
    }


def _end_reason(failure: FailedOutcome) -> EndReason:
    is_user_error = failure.exit_code == exit_codes.USER_ERROR
    return EndReason.USER_ERROR if is_user_error else EndReason.FAILED
