"""Carries out the coordinator's directives on this node, in a run on several nodes.

`role_loop.RoleLoop` brings the directives; the `ProcessManager` has the processes. This module maps
one to the other:

    start   The generation record names the ranks of this node and their processes. The mover and
            the processes receive their orders. The result is this node's stage.
    pause   The workers' next vote asks for a pause: they hold after the same step everywhere.
    halt    The workers hold where they are.
    leave   The run has ended.

`node_outcome` reports the workers' states and the generation's end. The coordinator plans by it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.checkpoint.mover.client import RestorePoint
from holdfast.config.run import RunConfig
from holdfast.elastic.event_log import EventLog, Say
from holdfast.elastic.node.hang_monitor import HangHooks
from holdfast.elastic.node.launch_specs import (
    make_standby_spec,
    make_worker_specs,
    max_worker_count,
    standby_count,
)
from holdfast.elastic.node.mover_supervisor import MoverSupervisor
from holdfast.elastic.node.process_manager import NodeAssignment, ProcessManager
from holdfast.elastic.node.worker_group import WorkerGroup
from holdfast.elastic.protocol import exit_codes
from holdfast.elastic.protocol.generation_outcome import (
    FailedOutcome,
    FinishedOutcome,
    GenerationOutcome,
    LeftOutcome,
    LostOutcome,
    NodeOutcome,
)
from holdfast.elastic.protocol.generation_record import GenerationRecord
from holdfast.elastic.protocol.hung_worker import HungWorker
from holdfast.elastic.protocol.start_state import StartState
from holdfast.errors import FencedError, HoldfastError, UserError
from holdfast.layout import Topology
from holdfast.plan.hardware import usable_cores
from holdfast.policy.membership.transitions import STOPPED_STAGES, NodeStage
from holdfast.policy.recovery.survivors import HeldState
from holdfast.policy.saving.failure_history import FailureHistory
from holdfast.wire.secret import Secret

STANDBY_REFILL_INTERVAL_S = 10.0
"""Least seconds between two checks for missing standbys."""
MOVER_UPDATE_RETRY_S = 1.0
"""Seconds before a mover that did not answer gets its announcement again."""
WORKER_HALT_TIMEOUT_S = 10.0
"""Seconds that a worker may take to stop, in addition to three of its steps."""


@dataclass(frozen=True)
class NodeContext:
    """The fixed context of a node runner. control_address: address at which this node's agent
    listens."""

    config: RunConfig
    node: str
    folder: Path
    secret: Secret
    control_address: str
    failure_history: FailureHistory
    places: int


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
        self.pause_generation = (
            0  # the generation whose workers are asked to end their step and hold
        )
        self.is_node_leaving = False  # and one of its nodes leaves then
        self.worker_group: WorkerGroup | None = None
        self.closing_reason = ""  # why the run stops after this generation's first step
        self._context, self._process_manager, self._mover = context, process_manager, mover
        self._event_log, self._say = event_log, say
        self._is_live_recovery = context.config.cluster.recovery == "live"
        self._on_generation_started, self._on_group_started, self._on_group_ended = (
            on_generation_started,
            on_group_started,
            on_group_ended,
        )
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
        self._mover_update: asyncio.Task[None] | None = None
        self._rendezvous_address = ""
        self._is_group_ready = False
        self._standby_task: asyncio.Task[None] | None = None
        self._reported_ready_workers: int | None = None
        self._standbys_checked_at = -math.inf  # when standbys were last seen to
        self._is_ready_known = False  # whether it is known here which processes are ready
        process_manager.on_ready_change = self._on_ready_change
        self._halt_generation = 0  # the newest generation that was to halt
        self._is_only_node = False  # whether no other node takes part

    # --- reports to the coordinator -------------------------------------------------------------
    @property
    def node_outcome(self) -> NodeOutcome:
        """Return the states of waiting workers, by process, and how the generation ended here."""
        return NodeOutcome(self._process_manager.held_states(), self._outcome)

    @property
    def ready_workers(self) -> int | None:
        """Return the number of places with a process that works or could start at once.

        Return None if each generation starts new processes, or before any generation runs, here or
        elsewhere.
        """
        live = self._context.config.cluster.recovery == "live"
        return (
            min(self._process_manager.ready_workers, self._max_workers)
            if live and self._is_ready_known
            else None
        )

    @property
    def _max_workers(self) -> int:
        return self._context.places

    def _on_ready_change(self) -> None:
        if self.ready_workers is not None and self.ready_workers != self._reported_ready_workers:
            self._reported_ready_workers = self.ready_workers
            self.state_changed.set()

    def _set_stage(self, stage: NodeStage, outcome: GenerationOutcome | None = None) -> None:
        self.stage = stage
        self._outcome = outcome
        self.state_changed.set()

    # --- orders ---------------------------------------------------------------------------------
    def start_generation(
        self, generation: int, record: GenerationRecord, start_state: StartState
    ) -> None:
        self.generation, self._is_group_ready, self._is_ready_known = generation, False, True
        self._standbys_checked_at = -math.inf
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
            return  # it is told with every heartbeat, as long as it lasts
        self._halt_generation = generation
        self._replace_task(self._halt_workers(generation))

    def on_run_ended(self, end_message: str) -> None:
        """Do nothing: the processes end with the agent."""

    # --- hung workers ---------------------------------------------------------------------------
    @property
    def stalled_workers(self) -> dict[str, Any]:
        """Return the stall report of this node's workers; {} if none is stalled.

        Workers that hold for a pause count, since they wait for other workers.
        """
        current = self.worker_group
        if current is None:
            return {}
        paused = self.stage is NodeStage.HELD and any(
            member.is_paused for member in current.workers
        )
        at_work = paused or self.stage in (NodeStage.BUILDING, NodeStage.WORKING)
        return current.stalled_workers() if at_work else {}

    @property
    def worker_paces(self) -> list[list[Any]]:
        """Return the recent speed of this node's workers, once per heartbeat."""
        now = asyncio.get_running_loop().time()
        current, every = self.worker_group, self._context.config.cluster.beat_seconds / 2
        if (
            current is None
            or self.stage is not NodeStage.WORKING
            or now - self._paces_taken_at < every
        ):
            return []
        self._paces_taken_at = now
        return current.take_paces()

    def handle_hung_workers(self, generation: int, hung_workers: Sequence[HungWorker]) -> None:
        """Handle workers of this node that the coordinator declares hung."""
        current = self.worker_group
        if current is not None and current.generation == generation:
            current.handle_hung_workers(hung_workers)

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
        if isinstance(error, UserError) and self._is_only_node:
            self._set_stage(NodeStage.BROKEN, FailedOutcome(str(error), exit_codes.USER_ERROR))
            return
        self._set_stage(NodeStage.BROKEN, LostOutcome("", str(error)))

    def _on_mover_update_done(self, task: asyncio.Task[None]) -> None:
        """Log the failure only: workers that have their state keep training without the mover."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._say(f"a fault of this node's agent, while updating its mover: {error!r}")

    # --- one generation -------------------------------------------------------------------------
    async def _run_generation(
        self, generation: int, record: GenerationRecord, start_state: StartState
    ) -> None:
        topology = record.topology
        assert topology is not None, "nobody trains without one"
        if self._mover_update is not None:
            self._mover_update.cancel()
        self._on_generation_started(generation)
        self._rendezvous_address = start_state.rendezvous
        self.closing_reason = record.stopping
        ranks = [rank for rank, node in enumerate(topology.nodes) if node == self._context.node]
        self._is_only_node = len(ranks) == topology.world_size
        await self._process_manager.ensure_processes(len(ranks))
        newest, step = start_state.restore_point, start_state.step
        came_from = record.came_from
        stored = came_from is None and newest is not None and newest.durable
        tell_mover = partial(self._update_mover, topology, step, newest, start_state, stored)
        if came_from is None:  # the workers ask the mover for their state first
            await tell_mover()
        self.worker_group = current = WorkerGroup(
            topology,
            step,
            self._context.config.cluster,
            self._event_log,
            self._say,
            self._on_all_ready,
            self._event_cursors,
            self._context.node,
            self._hang_hooks,
        )
        self._on_group_started(current)
        if self._is_already_finished(record, newest, step):
            assert newest is not None, "nobody holds a state"
            await self._report_outcome(await self._verify_final_state(generation, newest))
            return
        if not (self._is_live_recovery or self._mover.is_alive):
            current.decide(LostOutcome("mover_lost", "the mover ended"))
        processes = self._match_processes(record, ranks)
        current.expect_workers(
            {rank: pid for rank, pid in zip(ranks, processes, strict=True) if pid}
        )
        told = make_worker_specs(
            self._context.config,
            topology,
            folder=self._context.folder,
            agent_address=self._context.control_address,
            mover_socket=self._mover.socket_path,
            cores=usable_cores(),
            restore_key=None if newest is None else newest.key,
            start_step=step,
            failure_history=self._context.failure_history,
            node=self._context.node,
            rendezvous_address=self._rendezvous_address,
            record=record,
        )
        beginning = self._process_manager.begin_generation(
            NodeAssignment(
                generation,
                tuple(told),
                tuple(processes),
                came_from,
                None if record.previous is None else record.previous.to_json(),
            )
        )
        if came_from is not None:
            self._mover_update = asyncio.create_task(
                self._update_mover_in_background(generation, tell_mover)
            )
            self._mover_update.add_done_callback(self._on_mover_update_done)
        await beginning
        if not ranks:
            self._set_stage(NodeStage.WORKING)
            return
        await self._report_outcome(await current.outcome)

    async def _update_mover(
        self,
        topology: Topology,
        step: int,
        restore_point: RestorePoint | None,
        start_state: StartState,
        is_stored: bool,
    ) -> None:
        if start_state.peers is None:  # this node is the run's only one
            await self._mover.expect_generation(topology, step, is_stored=is_stored)
            return
        await self._mover.expect_generation(
            topology, step, restore_point, start_state.peers, start_state.extra_sources, is_stored
        )

    async def _update_mover_in_background(
        self, generation: int, update_mover: Callable[[], Awaitable[None]]
    ) -> None:
        """Repeat the announcement until the mover takes it; the workers train meanwhile.

        The code that restarts a mover announces the generation to the new mover itself.
        """
        while self.generation == generation and self._mover.is_alive:
            try:
                await update_mover()
                return
            except FencedError:
                return
            except HoldfastError as error:
                self._say(f"the mover of {self._context.node} does not answer: {error}")
                await asyncio.sleep(MOVER_UPDATE_RETRY_S)

    def _is_already_finished(
        self, record: GenerationRecord, restore_point: RestorePoint | None, step: int
    ) -> bool:
        """Return True if all steps are done and this node must verify the final state."""
        restored = record.came_from is None and restore_point is not None
        chosen = self._rendezvous_address == self._context.control_address  # by this node's mover
        return (
            restored and step >= self._context.config.train.steps and self._is_only_node and chosen
        )

    async def _verify_final_state(
        self, generation: int, restore_point: RestorePoint
    ) -> GenerationOutcome:
        """Verify the final state of a run whose steps are all done.

        No worker will read its checkpoint, so the mover does. A run must not finish with a state
        that cannot be restored.
        """
        unsaved = (
            None if restore_point.durable else await self._mover.wait_until_durable(restore_point)
        )
        problem = None
        if unsaved is None and restore_point.key is not None:
            problem = await self._mover.find_damage(generation, restore_point.key)
        return (
            FinishedOutcome(restore_point.step, unsaved)
            if problem is None
            else LostOutcome("rot", problem, problem)
        )

    def _match_processes(self, record: GenerationRecord, ranks: list[int]) -> list[int | None]:
        """Return the process of each of this node's ranks; None: a newcomer.

        A newcomer also replaces a process that has died since. The other workers do not expect it,
        and they notice.
        """
        living = {process.pid for process in self._process_manager.workers}
        if not record.processes:
            return [None] * len(ranks)
        return [pid if (pid := record.processes[rank]) in living else None for rank in ranks]

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
            self._replenish_standbys(
                len(current.ranks), world
            )  # behind the training: it costs time

    # --- standbys -------------------------------------------------------------------------------
    def on_outside_generation(self) -> None:
        """Prepare standbys while other nodes work, so that this node can offer its places."""
        if self.stage in STOPPED_STAGES:
            self._is_ready_known = True
            self._replenish_standbys(0, 0)

    def _replenish_standbys(self, workers_here: int, world_size: int) -> None:
        """Start missing standbys: as many as the run file asks for, and one for each lost worker's
        place."""
        now = asyncio.get_running_loop().time()
        busy = self._standby_task is not None and not self._standby_task.done()
        if self._context.config.cluster.recovery != "live" or busy:
            return
        if now - self._standbys_checked_at < STANDBY_REFILL_INTERVAL_S:
            return
        self._standbys_checked_at = now
        wanted, room = max_worker_count(self._context.config), self._max_workers - workers_here
        missing = min(room, wanted - world_size) if wanted else room
        count = standby_count(self._context.config) * bool(workers_here) + max(0, missing)
        if count:
            self._standby_task = asyncio.create_task(self._start_standbys(count))
            self._standby_task.add_done_callback(self._spared_or_not)

    async def _start_standbys(self, count: int) -> None:
        around = self._context
        await self._process_manager.ensure_processes(0)
        boot = make_standby_spec(
            around.config,
            around.folder,
            around.control_address,
            self._mover.socket_path,
            usable_cores(),
        )
        await self._process_manager.keep_standbys(count, boot)

    def _spared_or_not(self, task: asyncio.Task[None]) -> None:
        """Ignore a failed start of standbys: the next check tries again."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        if not isinstance(error, HoldfastError):
            self._say(f"a fault of this node's agent, while starting standbys: {error!r}")

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
            if self._task is not None:
                self._task.cancel()  # it waits for a verdict that nobody will give
            self._set_stage(NodeStage.HELD)

    async def _halt_workers(self, generation: int) -> None:
        """Stop all workers, whatever the stage; none works when this returns."""
        current = self.worker_group
        seconds = WORKER_HALT_TIMEOUT_S
        inside: list[int] = []
        if current is not None and current.generation == generation:
            seconds += 3 * current.longest_step_s
            lost = {member.rank for member in current.workers if not member.is_alive}
            verdict = current.decided_outcome
            lost |= verdict.lost_ranks if isinstance(verdict, LostOutcome) else frozenset()
            # If a replica spans nodes, a rank elsewhere may be lost: then all of its ranks are
            # woken.
            inside = [
                rank
                for replica in current.topology.replicas
                if lost & set(replica.ranks) or self._spans_nodes(current.topology, replica.ranks)
                for rank in replica.ranks
            ]
        if self._is_live_recovery and not isinstance(self._outcome, FailedOutcome):
            with suppress(FencedError):
                await self._process_manager.halt_workers(generation, inside, seconds)
        else:
            await self._process_manager.kill_and_wait()
        if self._is_only_node:  # the next generation fences what is being saved
            with suppress(HoldfastError):
                await self._mover.drain_saves(generation)
        self._set_stage(NodeStage.HELD, self._outcome)

    def _spans_nodes(self, topology: Topology, ranks: tuple[int, ...]) -> bool:
        return len({topology.nodes[rank] for rank in ranks}) > 1
