"""Keeps standbys on this node, and tells how many of its places are ready."""

from __future__ import annotations

import asyncio
import math

from holdfast.elastic.event_log import Say
from holdfast.elastic.node.launch_specs import (
    NodeContext,
    make_standby_spec,
    max_worker_count,
    standby_count,
)
from holdfast.elastic.node.process_manager import ProcessManager
from holdfast.errors import HoldfastError

STANDBY_REFILL_INTERVAL_S = 10.0
"""Least seconds between two checks for missing standbys."""


class StandbyKeeper:
    """Starts missing standbys of one node. Lives in one event loop."""

    def __init__(
        self,
        context: NodeContext,
        process_manager: ProcessManager,
        say: Say,
        state_changed: asyncio.Event,
    ) -> None:
        """state_changed: set when the number of ready places has changed."""
        self._context, self._process_manager, self._say = context, process_manager, say
        self._state_changed = state_changed
        self._has_standbys = not context.config.cluster.replaces_all_workers
        self._task: asyncio.Task[None] | None = None
        self._checked_at = -math.inf  # when standbys were last seen to
        self._is_ready_known = False  # whether it is known here which processes are ready
        self._reported_ready_workers: int | None = None
        process_manager.on_ready_change = self._on_ready_change

    @property
    def ready_workers(self) -> int | None:
        """Return the number of places with a process that works or could start at once.

        Return None if each generation starts new processes, or before any generation runs, here or
        elsewhere.
        """
        return (
            min(self._process_manager.ready_workers, self._context.places)
            if self._has_standbys and self._is_ready_known
            else None
        )

    def _on_ready_change(self) -> None:
        if self.ready_workers is not None and self.ready_workers != self._reported_ready_workers:
            self._reported_ready_workers = self.ready_workers
            self._state_changed.set()

    def on_generation_started(self) -> None:
        """Let the next check take place at once."""
        self._is_ready_known = True
        self._checked_at = -math.inf

    def on_outside_generation(self) -> None:
        """Prepare standbys while other nodes work, so that this node can offer its places."""
        self._is_ready_known = True
        self.replenish(0, 0)

    def replenish(self, workers_here: int, world_size: int) -> None:
        """Start missing standbys: as many as the run file asks for, and one for each lost worker's
        place."""
        now = asyncio.get_running_loop().time()
        busy = self._task is not None and not self._task.done()
        if not self._has_standbys or busy:
            return
        if now - self._checked_at < STANDBY_REFILL_INTERVAL_S:
            return
        self._checked_at = now
        wanted, room = max_worker_count(self._context.config), self._context.places - workers_here
        missing = min(room, wanted - world_size) if wanted else room
        count = standby_count(self._context.config) * bool(workers_here) + max(0, missing)
        if count:
            self._task = asyncio.create_task(self._start_standbys(count))
            self._task.add_done_callback(self._on_start_done)

    async def _start_standbys(self, count: int) -> None:
        await self._process_manager.ensure_processes(0)
        boot = make_standby_spec(self._context, self._process_manager.mover.socket_path)
        await self._process_manager.keep_standbys(count, boot)

    def _on_start_done(self, task: asyncio.Task[None]) -> None:
        """Ignore a failed start of standbys: the next check tries again."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        if not isinstance(error, HoldfastError):
            self._say(f"a fault of this node's agent, while starting standbys: {error!r}")
