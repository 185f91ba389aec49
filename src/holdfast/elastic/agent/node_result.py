"""The end of an agent: what it tells the user of the run's result, and its exit code."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from holdfast.elastic.agent.run_folder_monitor import FOLDER_GONE_MESSAGE, RunFolderMonitor
from holdfast.elastic.agent.run_progress import RunProgress
from holdfast.elastic.agent.shutdown import ShutdownController
from holdfast.elastic.coordinator.run_controller import RunController
from holdfast.elastic.event_log import Say
from holdfast.elastic.membership.role_loop import RoleLoop
from holdfast.elastic.node.node_runner import NodeRunner
from holdfast.elastic.run_context import RunContext
from holdfast.elastic.run_result import EndReason, RunResult, run_result
from holdfast.errors import CannotGoOnError, HoldfastError


@dataclass(frozen=True)
class NodeResult:
    """The result of the run as this node's agent reports it."""

    context: RunContext
    progress: RunProgress
    run_folder_monitor: RunFolderMonitor
    node_runner: NodeRunner
    role_loop: RoleLoop
    run_controller: RunController
    shutdown_controller: ShutdownController
    say: Say

    async def finish_run(self) -> int:
        """Return the exit code; the coordinator's agent has written the result to the journal."""
        end = await self._find_result()
        if end is None and self.run_folder_monitor.is_leaving:
            end = run_result(
                FOLDER_GONE_MESSAGE, EndReason.FENCED, (), "", self.progress.committed_step
            )
        if end is None:
            self.say(
                f"{self.context.node} has left the run "
                f"({self.shutdown_controller.reason or 'as requested'})"
            )
            return 0
        return self.report_result(end)

    def report_result(self, result: RunResult) -> int:
        """Print the result and return the exit code. Raises the result's error."""
        self.run_controller.result_reporter.print_result(result)
        if result.error is not None:
            raise result.error
        short = (
            result.exit_code == 0
            and self.node_runner.closing_reason
            and not self.shutdown_controller.reason
        )
        return CannotGoOnError.exit_code if short else result.exit_code

    async def _find_result(self) -> RunResult | None:
        """Return the run's result; None if the run continues without this node."""
        over, coordinator = self.role_loop.run_end, self.role_loop.coordinator
        if over is None and self.context.single_node_term is not None:
            try:
                await asyncio.to_thread(self.context.single_node_term.check)
            except HoldfastError as error:
                return run_result(
                    str(error), EndReason.FENCED, (), "", self.progress.committed_step
                )
        if over is None:
            return None
        if coordinator is not None:
            return self.run_controller.build_result(over[0])
        why = (
            self.node_runner.closing_reason or self.shutdown_controller.reason or "the workers left"
        )
        done = self.node_runner.node_outcome.done
        if not over[0] and done is None:  # this node had no part in the run
            return RunResult(None, "", 0)
        return run_result(
            over[0], over[1], () if done is None else (done,), why, self.progress.committed_step
        )
