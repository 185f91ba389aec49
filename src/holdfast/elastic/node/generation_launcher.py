"""Starts the processes of a generation on this node: its mover, and a worker for each rank."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from holdfast.elastic.event_log import Say
from holdfast.elastic.node.launch_specs import NodeContext, make_worker_specs
from holdfast.elastic.node.mover_supervisor import Announcement, MoverSupervisor
from holdfast.elastic.node.process_manager import NodeAssignment, ProcessManager
from holdfast.elastic.node.worker_group import WorkerGroup
from holdfast.elastic.protocol.coordinator_messages import StartState
from holdfast.elastic.protocol.generation_record import GenerationRecord
from holdfast.errors import FencedError, HoldfastError
from holdfast.layout import Topology

MOVER_UPDATE_RETRY_S = 1.0
"""Seconds before a mover that did not answer gets its announcement again."""


class GenerationLauncher:
    """Launches one generation after the other on this node. Lives in one event loop.

    prepare         the mover and the fork server are there; the mover knows of the generation if
                    the workers ask it for their state
    begin_workers   each rank has a process, which has its begin command
    """

    def __init__(
        self,
        context: NodeContext,
        process_manager: ProcessManager,
        mover: MoverSupervisor,
        say: Say,
    ) -> None:
        self._context, self._process_manager, self._mover = context, process_manager, mover
        self._say = say
        self._mover_update: asyncio.Task[None] | None = None

    async def prepare(
        self, topology: Topology, record: GenerationRecord, start_state: StartState
    ) -> None:
        """Ensure the processes for the generation. Raises HoldfastError if a start fails."""
        await self._process_manager.ensure_processes(len(self._ranks_here(topology)))
        if record.came_from is None:  # the workers ask the mover for their state first
            await self._update_mover(topology, record, start_state)

    async def begin_workers(
        self, current: WorkerGroup, record: GenerationRecord, start_state: StartState
    ) -> None:
        """Give each of this node's ranks a process, and announce the generation to the mover, if
        `prepare` has not."""
        topology = current.topology
        ranks = self._ranks_here(topology)
        processes = self._match_processes(record, ranks)
        current.expect_workers(
            {rank: pid for rank, pid in zip(ranks, processes, strict=True) if pid}
        )
        specs = make_worker_specs(
            self._context, topology, self._mover.socket_path, record, start_state
        )
        beginning = self._process_manager.begin_generation(
            NodeAssignment(
                topology.generation,
                tuple(specs),
                tuple(processes),
                record.came_from,
                record.previous,
            )
        )
        if record.came_from is not None:
            self._mover_update = asyncio.create_task(
                self._update_mover_in_background(topology, record, start_state)
            )
            self._mover_update.add_done_callback(self._on_mover_update_done)
        await beginning

    def on_newer_generation(self) -> None:
        """End the announcement of the last generation: a newer one has begun."""
        if self._mover_update is not None:
            self._mover_update.cancel()

    # --- the mover ------------------------------------------------------------------------------
    async def _update_mover(
        self, topology: Topology, record: GenerationRecord, start_state: StartState
    ) -> None:
        newest, step = start_state.restore_point, start_state.step
        stored = record.came_from is None and newest is not None and newest.durable
        announcement = Announcement(topology, step, is_stored=stored)
        if (peers := start_state.peers) is not None:  # this node is not the run's only one
            announcement = replace(
                announcement,
                restore_point=newest,
                machines=peers,
                sources=start_state.extra_sources,
            )
        await self._mover.expect_generation(announcement)

    async def _update_mover_in_background(
        self, topology: Topology, record: GenerationRecord, start_state: StartState
    ) -> None:
        """Repeat the announcement until the mover takes it; the workers train meanwhile.

        The code that restarts a mover announces the generation to the new mover itself.
        """
        while self._mover.is_alive:
            try:
                await self._update_mover(topology, record, start_state)
                return
            except FencedError:
                return
            except HoldfastError as error:
                self._say(f"the mover of {self._context.node} does not answer: {error}")
                await asyncio.sleep(MOVER_UPDATE_RETRY_S)

    def _on_mover_update_done(self, task: asyncio.Task[None]) -> None:
        """Log the failure only: workers that have their state keep training without the mover."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._say(f"a fault of this node's agent, while updating its mover: {error!r}")

    # --- the processes --------------------------------------------------------------------------
    def _ranks_here(self, topology: Topology) -> list[int]:
        return [rank for rank, node in enumerate(topology.nodes) if node == self._context.node]

    def _match_processes(self, record: GenerationRecord, ranks: list[int]) -> list[int | None]:
        """Return the process of each of this node's ranks; None: a newcomer.

        A newcomer also replaces a process that has died since. The other workers do not expect it,
        and they notice.
        """
        living = {process.pid for process in self._process_manager.workers}
        if not record.processes:
            return [None] * len(ranks)
        return [pid if (pid := record.processes[rank]) in living else None for rank in ranks]
