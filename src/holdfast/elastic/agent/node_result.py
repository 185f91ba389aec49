"""The end of an agent: what it tells the user of the run's result, and its exit code."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from holdfast.elastic.agent.parts import AgentParts
from holdfast.elastic.run_result import EndReason, RunResult, run_result
from holdfast.errors import CannotGoOnError, HoldfastError


@dataclass(frozen=True)
class NodeResult:
    """The result of the run as this node's agent reports it."""

    parts: AgentParts

    async def finish_run(self) -> int:
        """Return the exit code; the coordinator's agent has written the result to the journal."""
        await self.parts.run_controller.wait_for_ledger_repair()
        end = await self._find_result()
        if end is None:
            self.parts.run_controller.result_reporter.say_last(
                f"{self.parts.context.node} has left the run "
                f"({self.parts.shutdown_controller.reason or 'as requested'})"
            )
            return self._left_code
        return self.report_result(end)

    def report_result(self, result: RunResult) -> int:
        """Print the result and return the exit code. Raises the result's error."""
        self.parts.run_controller.result_reporter.print_result(result)
        if result.error is not None:
            raise result.error
        short = (
            result.exit_code == 0
            and self.parts.node_runner.closing_reason
            and not self.parts.shutdown_controller.reason
        )
        if short:
            return CannotGoOnError.exit_code
        is_left = result.exit_code == 0 and result.is_resumable
        return self._left_code if is_left else result.exit_code

    @property
    def _left_code(self) -> int:
        """The exit code of a node that leaves while steps are left to do."""
        return self.parts.context.config.cluster.left_exit_code

    async def _find_result(self) -> RunResult | None:
        """Return the run's result; None if the run continues without this node."""
        over, coordinator = self.parts.role_loop.run_end, self.parts.role_loop.coordinator
        if over is None and self.parts.context.single_node_term is not None:
            try:
                await asyncio.to_thread(self.parts.context.single_node_term.check)
            except HoldfastError as error:
                return run_result(
                    str(error), EndReason.FENCED, (), "", self.parts.records.progress.committed_step
                )
        if over is None:
            return None
        if coordinator is not None:
            return self.parts.run_controller.build_result(over[0])
        why = (
            self.parts.node_runner.closing_reason
            or self.parts.shutdown_controller.reason
            or "the workers left"
        )
        done = self.parts.node_runner.node_outcome.done
        if not over[0] and done is None:  # this node had no part in the run
            return RunResult(None, "", 0)
        return run_result(
            over[0],
            over[1],
            () if done is None else (done,),
            why,
            self.parts.records.progress.committed_step,
        )
