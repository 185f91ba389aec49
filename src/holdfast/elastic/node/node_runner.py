"""Carries out the coordinator's directives on this node, in a run on several nodes.

`role_loop.RoleLoop` brings the directives; the `ProcessManager` has the processes. This module maps
one to the other:

    start   The generation record names the ranks of this node and their processes. The mover and
            the processes receive their orders. The result is this node's stage.
    pause   The workers' next vote asks for a pause: they hold after the same step everywhere.
    halt    The workers hold where they are. Under `cluster.recovery: restart` they end, now or
            after the pause, and the next generation has new ones (`ClusterConfig`).
    leave   The run has ended.

`node_outcome` reports the workers' states and the generation's end. The coordinator plans by it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from holdfast.checkpoint.mover.messages import RestorePoint
from holdfast.elastic.event_log import EventLog, Say
from holdfast.elastic.node.generation_launcher import GenerationLauncher
from holdfast.elastic.node.hang_monitor import HangHooks
from holdfast.elastic.node.launch_specs import NodeContext
from holdfast.elastic.node.mover_supervisor import MoverSupervisor
from holdfast.elastic.node.process_manager import ProcessManager
from holdfast.elastic.node.standby_keeper import StandbyKeeper
from holdfast.elastic.node.worker_group import WorkerGroup
from holdfast.elastic.protocol import exit_codes
from holdfast.elastic.protocol.coordinator_messages import StartState, WorkerPace
from holdfast.elastic.protocol.generation_outcome import (
    FailedOutcome,
    FinishedOutcome,
    GenerationOutcome,
    LeftOutcome,
    LostOutcome,
    NodeOutcome,
)
from holdfast.elastic.protocol.generation_record import GenerationRecord
from holdfast.elastic.protocol.hung_worker import HungWorker, StallReport
from holdfast.errors import FencedError, HoldfastError, StoreError, UserError
from holdfast.policy.membership.transitions import STOPPED_STAGES, NodeStage
from holdfast.policy.recovery.survivors import HeldState

WORKER_HALT_TIMEOUT_S = 10.0
"""Seconds that a worker may take to stop, in addition to three of its steps."""


class NodeRunner:
    """One node's `Workload` (see `role_loop`). Lives in one event loop."""

    def __init__(
        self,
        context: NodeContext,
        process_manager: ProcessManager,
        mover: MoverSupervisor,
        event_log: EventLog,
        say: Say,
        on_generation_started: Callable[[int], None],
        on_group_started: Callable[[WorkerGroup], None],
        on_group_ended: Callable[[GenerationOutcome], Awaitable[GenerationOutcome]],
    ) -> None:
        """Set up an idle runner.

        Args:
            on_generation_started: called with the generation's number before this node does
                anything.
            on_group_started: called once its workers can report.
            on_group_ended: called with this node's outcome before the coordinator receives it.
                Returns the outcome to report.
        """
        self.state_changed = asyncio.Event()
        self.generation, self.stage = 0, NodeStage.IDLE
        self.is_spare = False
        """True while other nodes train without this one."""
        # the generation whose workers are asked to end their step and hold
        self.pause_generation = 0
        self.is_node_leaving = False  # and one of its nodes leaves then
        self.worker_group: WorkerGroup | None = None
        self.closing_reason = ""  # why the run stops after this generation's first step
        self.end_reason = ""  # `EndReason` of a generation that only saves
        self._has_live_state = False  # this generation continued from the state of the one before
        self._context, self._process_manager, self._mover = context, process_manager, mover
        process_manager.find_group = self._find_group
        process_manager.on_worker_held = self.on_worker_held
        process_manager.on_standby_refused = self._on_standby_refused
        self._replaces_all_workers = context.config.cluster.replaces_all_workers
        self._event_log, self._say = event_log, say
        self._on_generation_started = on_generation_started
        self._on_group_started = on_group_started
        self._on_group_ended = on_group_ended
        self._event_cursors: dict[str, int] = {}
        self._paces_taken_at = 0.0
        compiles = context.config.train.compile
        self._hang_hooks = HangHooks(
            kill_process=process_manager.kill_worker,
            report_to_coordinator=self.state_changed.set,
            is_first_step_compiled=compiles,
        )
        self._outcome: GenerationOutcome | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_group_ready = False
        self._launcher = GenerationLauncher(context, process_manager, mover, say)
        self._standby_keeper = StandbyKeeper(context, process_manager, say, self.state_changed)
        self._halt_generation = 0  # the newest generation that was to halt
        self._is_only_node = False  # whether no other node takes part

    # --- reports to the coordinator -------------------------------------------------------------
    @property
    def node_outcome(self) -> NodeOutcome:
        """Return the states of waiting workers, by process, and how the generation ended here."""
        return NodeOutcome(self._process_manager.held_states(), self._outcome)

    @property
    def ready_workers(self) -> int | None:
        """Return the number of places that are ready, as `StandbyKeeper.ready_workers` does."""
        return self._standby_keeper.ready_workers

    def _set_stage(self, stage: NodeStage, outcome: GenerationOutcome | None = None) -> None:
        self.stage = stage
        self._outcome = outcome
        self.state_changed.set()

    # --- orders ---------------------------------------------------------------------------------
    def start_generation(
        self, generation: int, record: GenerationRecord, start_state: StartState
    ) -> None:
        self.generation, self._is_group_ready, self.is_spare = generation, False, False
        self._standby_keeper.on_generation_started()
        self._launcher.on_newer_generation()
        self._set_stage(NodeStage.BUILDING)
        self._replace_task(self._run_generation(generation, record, start_state))

    def halt_generation(self, generation: int, reason: str, *, at_step_end: bool) -> None:
        if self.stage not in (NodeStage.BUILDING, NodeStage.WORKING, NodeStage.BROKEN):
            return
        if at_step_end and self.stage is NodeStage.WORKING:
            self.pause_generation = generation  # told with the answer to each worker's next report
            self.is_node_leaving = reason == "notice"
            return
        self.pause_generation = 0
        if self._halt_generation == generation and self._task is not None and not self._task.done():
            return  # every heartbeat repeats it, as long as it lasts
        self._halt_generation = generation
        self._replace_task(self._halt_workers(generation))

    def on_run_ended(self, end_message: str) -> None:
        """Do nothing: the processes end with the agent."""

    # --- hung workers ---------------------------------------------------------------------------
    @property
    def stalled_workers(self) -> StallReport | None:
        """Return the stall report of this node's workers; None if none is stalled.

        Workers that hold for a pause count, since they wait for other workers.
        """
        current = self.worker_group
        if current is None:
            return None
        paused = self.stage is NodeStage.HELD and any(
            member.is_paused for member in current.workers
        )
        at_work = paused or self.stage in (NodeStage.BUILDING, NodeStage.WORKING)
        return current.stalled_workers() if at_work else None

    @property
    def worker_paces(self) -> tuple[WorkerPace, ...]:
        """Return the recent speed of this node's workers, once per heartbeat."""
        now = asyncio.get_running_loop().time()
        current, every = self.worker_group, self._context.config.cluster.beat_seconds / 2
        if (
            current is None
            or self.stage is not NodeStage.WORKING
            or now - self._paces_taken_at < every
        ):
            return ()
        self._paces_taken_at = now
        return current.take_paces()

    def handle_hung_workers(self, generation: int, hung_workers: Sequence[HungWorker]) -> None:
        """Handle workers of this node that the coordinator declares hung."""
        if group := self._find_group(generation):
            group.handle_hung_workers(hung_workers)

    def _find_group(self, generation: int) -> WorkerGroup | None:
        """Return the workers of a generation, if it is the present one."""
        group = self.worker_group
        return group if group is not None and group.generation == generation else None

    def _replace_task(self, coroutine: Any) -> None:
        """Replace the running task: a newer directive cancels the work for an older one."""
        if self._task is not None:
            self._task.cancel()
        self._task = asyncio.create_task(coroutine)
        self._task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        if not isinstance(error, HoldfastError):
            self._say(f"a fault of this node's agent: {error!r}")
        is_away = isinstance(error, StoreError) and not self._is_only_node  # perhaps for all nodes
        if isinstance(error, UserError) and not is_away:
            self._set_stage(NodeStage.BROKEN, FailedOutcome(str(error), exit_codes.USER_ERROR))
            return
        self._set_stage(NodeStage.BROKEN, LostOutcome("", str(error)))

    def _on_standby_refused(self, sentence: str) -> None:
        """Report that this node cannot work, if the run continues without it: a standby refused."""
        is_stopped = self.stage in (NodeStage.IDLE, NodeStage.HELD)
        if is_stopped and not self._process_manager.workers:
            self._set_stage(self.stage, FailedOutcome(sentence, exit_codes.USER_ERROR))

    # --- one generation -------------------------------------------------------------------------
    async def _run_generation(
        self, generation: int, record: GenerationRecord, start_state: StartState
    ) -> None:
        topology = record.topology
        assert topology is not None, "no node trains without one"
        self._on_generation_started(generation)
        self.closing_reason, self.end_reason = record.stopping, record.end_reason
        self._has_live_state = record.came_from is not None
        self._is_only_node = all(node == self._context.node for node in topology.nodes)
        await self._launcher.prepare(topology, record, start_state)
        self.worker_group = current = WorkerGroup(
            topology,
            start_state.step,
            self._context.config.cluster,
            self._event_log,
            self._say,
            self._on_all_ready,
            self._event_cursors,
            self._context.node,
            self._hang_hooks,
        )
        self._on_group_started(current)
        # Whether all steps are done and this node must verify the final state.
        restored = record.came_from is None and start_state.restore_point is not None
        chosen = start_state.rendezvous == self._context.control_address  # by this node's mover
        is_done = start_state.step >= self._context.config.train.steps
        if restored and is_done and self._is_only_node and chosen:
            newest = start_state.restore_point
            assert newest is not None, "nobody holds a state"
            await self._report_outcome(await _verify_final_state(self._mover, generation, newest))
            return
        await self._launcher.begin_workers(current, record, start_state)
        if not current.ranks:
            self._set_stage(NodeStage.WORKING)
            return
        await self._report_outcome(await current.outcome)

    def _on_all_ready(self) -> None:
        self._is_group_ready = True

    def on_events_stored(self) -> None:
        """Report WORKING once the workers' events so far are in the journal.

        A node that learns that this one works then finds its late events of older generations
        there.
        """
        if self._is_group_ready and self.stage is NodeStage.BUILDING:
            self._is_group_ready = False
            self._set_stage(NodeStage.WORKING)
        current = self.worker_group
        if self.stage is NodeStage.WORKING and current is not None and current.has_stepped:
            world = current.topology.world_size
            # behind the training: it costs time
            self._standby_keeper.replenish(len(current.ranks), world)

    def on_outside_generation(self) -> None:
        """Prepare standbys while other nodes work, so that this node can offer its places."""
        if self.stage in STOPPED_STAGES:
            self.is_spare = True
            self._standby_keeper.on_outside_generation()

    async def _report_outcome(self, outcome: GenerationOutcome) -> None:
        outcome = await self._on_group_ended(outcome)
        done = isinstance(outcome, FinishedOutcome | LeftOutcome)
        self._set_stage(NodeStage.DONE if done else NodeStage.BROKEN, outcome)

    def on_worker_held(self, rank: int, held_state: HeldState) -> None:
        """Note that a worker has stopped; once all hold for a pause, this node holds."""
        current = self.worker_group
        if current is None or held_state.kind != "paused":
            return
        if all(member.held_state is not None for member in current.workers if member.is_alive):
            if self._replaces_all_workers:
                self._replace_task(self._halt_workers(current.generation))
                return
            if self._task is not None:
                self._task.cancel()  # it waits for a verdict that will not come
            self._set_stage(NodeStage.HELD)

    async def _halt_workers(self, generation: int) -> None:
        """Stop all workers, whatever the stage; none works when this returns."""
        current = self._find_group(generation)
        seconds = WORKER_HALT_TIMEOUT_S
        inside: list[int] = []
        if current is not None:
            seconds += 3 * current.longest_step_s
            inside = _bereft_ranks(current)
        failed = isinstance(self._outcome, FailedOutcome)
        is_state_held = self._has_live_state or (current is not None and current.has_stepped)
        if self._replaces_all_workers or (failed and not is_state_held):
            await self._process_manager.kill_and_wait()
        else:
            with suppress(FencedError):
                await self._process_manager.halt_workers(generation, inside, seconds)
        if self._is_only_node:  # the next generation fences what is being saved
            with suppress(HoldfastError):
                await self._mover.drain_saves(generation)
        refusal = None if current is None else current.refusal
        self._set_stage(NodeStage.HELD, refusal or self._outcome)


async def _verify_final_state(
    mover: MoverSupervisor, generation: int, restore_point: RestorePoint
) -> GenerationOutcome:
    """Verify the final state of a run whose steps are all done.

    No worker will read its checkpoint, so the mover does. A run must not finish with a state
    that cannot be restored.
    """
    unsaved = None if restore_point.durable else await mover.wait_until_durable(restore_point)
    problem = None
    if unsaved is None and restore_point.key is not None:
        problem = await mover.find_damage(generation, restore_point.key)
    return (
        FinishedOutcome(restore_point.step, unsaved)
        if problem is None
        else LostOutcome("rot", problem, problem)
    )


def _bereft_ranks(worker_group: WorkerGroup) -> list[int]:
    """Return the ranks that lost a member of their own replica."""
    topology = worker_group.topology
    lost = {member.rank for member in worker_group.workers if not member.is_alive}
    verdict = worker_group.decided_outcome
    lost |= verdict.lost_ranks if isinstance(verdict, LostOutcome) else frozenset()
    # If a replica spans nodes, a rank elsewhere may be lost: then all of its ranks are woken.
    return [
        rank
        for replica in topology.replicas
        if lost & set(replica.ranks) or len({topology.nodes[rank] for rank in replica.ranks}) > 1
        for rank in replica.ranks
    ]
