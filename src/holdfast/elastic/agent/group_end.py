"""What an agent finishes after its workers have ended: copies, uploads, the journal."""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdfast.elastic.agent.node_processes import NodeProcesses
from holdfast.elastic.agent.run_records import RunRecords
from holdfast.elastic.agent.shutdown import ShutdownController
from holdfast.elastic.coordinator.run_controller import RunController
from holdfast.elastic.membership.role_loop import RoleLoop
from holdfast.elastic.node.node_runner import NodeRunner
from holdfast.elastic.protocol.generation_outcome import (
    FinishedOutcome,
    GenerationOutcome,
    LeftOutcome,
)
from holdfast.events import RunStopped


@dataclass(frozen=True)
class GroupEnd:
    """The end of this node's worker groups."""

    records: RunRecords
    processes: NodeProcesses
    node_runner: NodeRunner
    role_loop: RoleLoop
    run_controller: RunController
    shutdown_controller: ShutdownController

    async def on_group_ended(self, outcome: GenerationOutcome) -> GenerationOutcome:
        """Finish saves and uploads after this node's workers have ended, before it is reported."""
        if not isinstance(outcome, FinishedOutcome | LeftOutcome):
            return outcome
        generation = self.records.progress.newest_generation
        if isinstance(outcome, LeftOutcome) and outcome.unsaved_reason is None:
            outcome = replace(
                outcome,
                unsaved_reason=await self.records.notice_handler.wait_for_peer_copy(outcome.step),
            )
        if outcome.unsaved_reason is None:
            missing = await self._wait_for_bucket(outcome, generation)
            outcome = replace(outcome, missing_upload=missing)
        await self.processes.mover.drain_events(generation)
        return outcome

    async def _wait_for_bucket(
        self, outcome: FinishedOutcome | LeftOutcome, generation: int
    ) -> str | None:
        """Wait for the bucket; return what it lacks at the end. An agent that leaves writes its
        stop into the journal first, because it may be killed while it waits."""

        async def written() -> None:
            why = (
                self.shutdown_controller.stop_reason
                or self.node_runner.closing_reason
                or "the workers left"
            )
            self.run_controller.result_reporter.write_event(RunStopped(why, step=outcome.step))
            await self.records.event_log.flush(sync=True)

        leads = self.role_loop.coordinator is not None
        before = written if leads and isinstance(outcome, LeftOutcome) else None
        return await self.processes.final_upload.wait(
            generation, before, self.records.notice_handler.time_left_s
        )
