"""The processes of one node: a fork server, a mover, and workers that outlive generations.

It decides nothing about the run. The agent assigns ranks to processes (`begin_generation`), ends
generations (`halt_workers`) and sets the number of standbys (`keep_standbys`). The worker group of
a process's generation learns of its start, its exit and its held state.

A rank's process comes from one of three sources, cheapest first:

    - a process that stays, with its state
    - a standby, forked before, with its imports done
    - a new fork of the fork server

`ForkServerSupervisor` has the fork server, and `MoverSupervisor` the mover.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from holdfast.core.devices import DEVICES, DeviceKind
from holdfast.elastic.node.children import ForkServerSettings
from holdfast.elastic.node.fork_server_supervisor import ForkServerSupervisor
from holdfast.elastic.node.helper_watch import HelperWatch
from holdfast.elastic.node.mover_supervisor import MoverSupervisor
from holdfast.elastic.node.worker_group import WorkerGroup
from holdfast.elastic.node.worker_process import STANDBY_RANK, CommandServer, WorkerProcess
from holdfast.elastic.protocol import exit_codes
from holdfast.elastic.protocol.generation_record import PreviousState
from holdfast.elastic.protocol.worker_commands import Begin
from holdfast.elastic.protocol.worker_spec import WorkerSpec
from holdfast.policy.recovery.survivors import HeldState
from holdfast.wire.secret import Secret
from holdfast.wire.waiting import wait_event

logger = logging.getLogger(__name__)

KILLED_EXIT_TIMEOUT_S = 20.0
"""Seconds that killed processes get to exit."""
COMMAND_ACK_TIMEOUT_S = 5.0
"""Seconds within which a worker acknowledges a command: the thread that polls does nothing else."""


@dataclass(frozen=True)
class NodeAssignment:
    """A node's part in a generation: for each of its ranks, the spec and the process.

    pids: None for a newcomer.
    came_from, previous_state: as in a worker's begin command; None: all workers restore.
    """

    generation: int
    worker_specs: tuple[WorkerSpec, ...]
    pids: tuple[int | None, ...]
    came_from: tuple[int | None, ...] | None = None
    previous_state: PreviousState | None = None


class ProcessManager:
    """The processes of one node. Lives in one event loop."""

    def __init__(
        self,
        mover: MoverSupervisor,
        folder: Path,
        secret: Secret,
        entry: str,
        preloads: Sequence[str],
        lifeline: int,
        *,
        on_mover_exit: Callable[[], None],
        on_fork_server_exit: Callable[[], None],
        say: Callable[[str], None],
        devices: DevicePlaces | None = None,
    ) -> None:
        """Set up without starting any process.

        Args:
            folder: gets the logs.
            entry: a worker's main function.
            preloads: further modules that it needs.
            lifeline: descriptor that ends every child when the agent exits.
            on_mover_exit, on_fork_server_exit: called when one has exited.
            say: gets a sentence for the log.
            devices: of this node; None: the run computes on the CPU.
        """
        self.mover, self._devices = mover, devices or DevicePlaces(DEVICES["cpu"], 1)
        self._folder, self._lifeline = folder, lifeline
        self._on_mover_exit, self._on_fork_server_exit = on_mover_exit, on_fork_server_exit
        self.on_ready_change: Callable[[], None] = lambda: None
        """Called when the number of ready processes may have changed."""
        self.find_group: Callable[[int], WorkerGroup | None] = lambda generation: None
        """Returns the workers of a generation, if it is the present one."""
        self.on_worker_held: Callable[[int, HeldState], None] = lambda rank, held_state: None
        """Called after the worker group: a worker of the present generation waits for commands."""
        self.on_standby_refused: Callable[[str], None] = lambda sentence: None
        """Receives what a standby says that ends because the user must correct something."""
        self._command_server = CommandServer(self._on_held, lambda: self.on_ready_change())
        self.handle_command_poll = self._command_server.handle_poll
        log = folder / "logs" / f"fork_server{mover.node_suffix}.log"
        self._fork_server = ForkServerSupervisor(
            ForkServerSettings(
                entry,
                preloads,
                lifeline,
                log,
                secret,
                mover.run_name,
                computes_reference=bool(mover.node_suffix),  # to compare with other nodes
                environment=self._devices.kind.settings,
            ),
            self._command_server,
            self,
            say,
        )
        self._helper_watch = HelperWatch(say)
        self._wanted_standbys: tuple[int, WorkerSpec] | None = None  # standbys
        self._forked_standbys = 0  # ever forked: the number of the next one's log

    @property
    def reference(self) -> str:
        """Return the checksum of this node's reference computation; "" if it made none."""
        return self._fork_server.reference

    # --- what it has ----------------------------------------------------------------------------
    @property
    def _processes(self) -> tuple[WorkerProcess, ...]:
        """Every process, including those whose fork is pending."""
        return (*self._command_server, *self._fork_server.pending_forks)

    @property
    def workers(self) -> list[WorkerProcess]:
        """Every living process that has a rank."""
        return [p for p in self._processes if p.is_alive and p.rank != STANDBY_RANK]

    def held_states(self) -> dict[int, HeldState]:
        """Return the states of workers that wait for commands, by process."""
        return {
            p.pid: p.held_state
            for p in self.workers
            if p.held_state is not None and not p.kill_pending
        }

    @property
    def _idle_processes(self) -> list[WorkerProcess]:
        return [p for p in self._processes if p.is_standby and not p.kill_pending]

    @property
    def ready_workers(self) -> int:
        """Return the number of processes that have a rank or are prepared for one."""
        there = [p for p in self._processes if p.is_alive and not p.kill_pending]
        return sum(p.rank != STANDBY_RANK or p.acked_command >= 0 for p in there)

    # --- beginning ------------------------------------------------------------------------------
    async def ensure_processes(self, workers: int) -> None:
        """Ensure a live mover, and a fork server for `workers` processes.

        If held workers and standbys are enough, a missing fork server starts in the background.
        Raises HoldfastError if a start fails.
        """
        starting: list[Any] = [self.mover.ensure_running(self._lifeline, self._on_mover_exit)]
        if len(self.held_states()) + len(self._idle_processes) < workers:
            starting.append(asyncio.shield(self._fork_server.ensure_running()))
        elif not self._fork_server.is_alive:
            self._fork_server.ensure_running()
        await asyncio.gather(*starting)

    def check_helpers(self, now: float) -> None:
        """Let a fork server or mover that hangs delay no recovery. Called again and again."""
        self._helper_watch.check("fork server", self._fork_server.pid, now)
        self._helper_watch.check("mover", self.mover.pid, now)
        self._fork_server.kill_if_hung(now)

    async def begin_generation(self, assignment: NodeAssignment) -> None:
        """Give every rank to a process. If one has died meanwhile, report its exit as any other."""
        staying = set(assignment.pids)
        for process in self.workers:
            if process.pid in staying:
                continue
            if process.held_state is not None and not process.kill_pending:
                process.rank = STANDBY_RANK  # it has no place now: it waits for one
            else:
                process.kill()
        for boot, pid in zip(assignment.worker_specs, assignment.pids, strict=True):
            stays = None if pid is None else self._command_server.find(pid)
            if stays is None:
                await self._start_newcomer(assignment, boot)
                continue
            self._send_begin(stays, assignment, boot)
            if not stays.is_alive:
                self._report_exit(stays)
        for process in self._command_server:
            if not process.is_alive:
                self._command_server.forget(process.pid)

    async def _start_newcomer(self, assignment: NodeAssignment, spec: WorkerSpec) -> None:
        idle = [process for process in self._idle_processes if process.pid]
        process = self._devices.choose_standby(idle, self._processes)
        if process is not None:
            self._send_begin(process, assignment, spec)
            if group := self.find_group(assignment.generation):
                group.on_joined(spec.rank, process.pid)
        elif assignment.came_from is None:
            placed = self._devices.place(spec, None, self._processes)
            process = await self._fork_server.fork(placed, spec.rank, assignment.generation)
            process.device = placed.device
        else:  # the others send it the state: it is told how, as a standby is
            process = await self._fork_server.fork(
                replace(spec, rank=STANDBY_RANK), spec.rank, assignment.generation
            )
            self._send_begin(process, assignment, spec)

    def _send_begin(
        self, process: WorkerProcess, assignment: NodeAssignment, spec: WorkerSpec
    ) -> None:
        spec = self._devices.place(spec, process, self._processes)
        process.device = spec.device
        process.begin_rank(Begin(spec, assignment.came_from, assignment.previous_state))

    async def keep_standbys(self, count: int, spec: WorkerSpec) -> None:
        """Keep `count` standbys from now on; `spec` gives all but rank and log."""
        self._wanted_standbys = count, spec
        for _ in range(count - len(self._idle_processes) if self._fork_server.is_alive else 0):
            self._forked_standbys += 1
            name = f"standby{self._forked_standbys}{self.mover.node_suffix}.log"
            log = self._folder / "logs" / name
            placed = self._devices.place_standby(
                replace(spec, rank=STANDBY_RANK, log=str(log)), count, self._processes
            )
            process = await self._fork_server.fork(placed, STANDBY_RANK, 0)
            process.device = placed.device if placed.device != spec.device else ""

    # --- ending ---------------------------------------------------------------------------------
    async def halt_workers(
        self, generation: int, bereft_ranks: Collection[int], timeout_s: float
    ) -> dict[int, HeldState]:
        """Stop all workers; return their states, by process, once all hold.

        Args:
            bereft_ranks: ranks that lost a member of their own replica.
            timeout_s: after so many seconds a worker that does not hold is killed. It is killed
                after COMMAND_ACK_TIMEOUT_S if it has not acknowledged the command.
        """
        workers = self.workers
        for process in workers:
            if process.held_state is None:
                process.halt_rank(generation, process.rank in bereft_ranks)
        await asyncio.gather(*(_wait_until_held(process, timeout_s) for process in workers))
        late = [p for p in workers if p.is_alive and p.held_state is None]
        for process in late:
            process.kill()
        await _wait_for_exits(late)
        return self.held_states()

    def kill_worker(self, pid: int, reason: str = "") -> None:
        """Kill one worker that makes no progress."""
        process = self._command_server.find(pid)
        if process is not None:
            process.kill_reason = process.kill_reason or reason
            process.kill()

    async def kill_and_wait(self) -> None:
        """Kill all workers and standbys and wait until they have exited."""
        everybody = [p for p in self._processes if p.is_alive]
        for process in everybody:
            process.kill_pending = True
        if self._fork_server.is_alive:
            await self._fork_server.kill_workers()
        self.kill_all()  # what a dead fork server could not kill
        await _wait_for_exits(everybody)

    def kill_all(self) -> None:
        """Kill all workers and standbys without the fork server."""
        for process in self._processes:
            process.kill()

    async def shut_down(self) -> None:
        """Kill every process and stop the fork server and the mover."""
        self._wanted_standbys = None
        self.kill_all()
        await self._fork_server.stop()
        await self.mover.stop()
        for process in self._command_server:
            process.close()

    # --- news -----------------------------------------------------------------------------------
    def on_forked(self, process: WorkerProcess) -> None:
        """Note that a process has been forked, and has its process id."""
        if process.rank != STANDBY_RANK and (group := self.find_group(process.generation)):
            group.on_joined(process.rank, process.pid)

    def on_exited(self, process: WorkerProcess, exit_code: int) -> None:
        """Note that a process has exited, or that its fork failed."""
        process.on_exited(exit_code)
        logger.info("worker %d of rank %d exited with %d", process.pid, process.rank, exit_code)
        if process.rank == STANDBY_RANK:
            self._command_server.forget(process.pid)
            if exit_code == exit_codes.USER_ERROR:
                self.on_standby_refused(process.log.last_lines(1) or "a worker refused to start")
        else:
            self._report_exit(process)
        self.on_ready_change()

    async def on_fork_server_started(self) -> None:
        """Fork the standbys that are missing."""
        if self._wanted_standbys is not None:
            await self.keep_standbys(*self._wanted_standbys)

    def on_fork_server_exited(self) -> None:
        """Tell the agent. Pending forks have been reported as exited."""
        self._on_fork_server_exit()

    def _report_exit(self, process: WorkerProcess) -> None:
        code = -signal.SIGKILL if process.exit_code is None else process.exit_code
        if group := self.find_group(process.generation):
            group.on_exited(process.rank, process.pid, code, process.log, process.kill_reason)

    def _on_held(self, process: WorkerProcess) -> None:
        assert process.held_state is not None, "only processes that hold are reported"
        if group := self.find_group(process.generation):
            group.on_held(process.rank, process.held_state)
            self.on_worker_held(process.rank, process.held_state)


async def _wait_until_held(process: WorkerProcess, timeout_s: float) -> None:
    """Wait until the worker holds, has exited, or its time is over."""
    begun = asyncio.get_running_loop().time()
    if process.kill_pending:
        return
    while process.is_alive and process.held_state is None:
        limit = timeout_s if process.has_acked else min(timeout_s, COMMAND_ACK_TIMEOUT_S)
        left = begun + limit - asyncio.get_running_loop().time()
        if left <= 0:
            heard = "stop" if process.has_acked else "answer"
            process.kill_reason = f"did not {heard} within {limit:g} s of the command"
            return
        await wait_event(process.state_changed, left)


async def _wait_for_exits(processes: Iterable[WorkerProcess]) -> None:
    """Wait until the processes have exited, for KILLED_EXIT_TIMEOUT_S at most."""

    async def one(process: WorkerProcess) -> None:
        while process.is_alive:
            await process.state_changed.wait()

    with suppress(TimeoutError):
        async with asyncio.timeout(KILLED_EXIT_TIMEOUT_S):
            await asyncio.gather(*map(one, processes))


# Which device of its node a process computes on.
#
# A process keeps its device for as long as it lives, whatever rank it gets. A standby has none
# until it gets a rank. Then it takes a free device, which may be that of the worker that it
# replaces. If there is a standby for each device, each gets its device at once, and prepares it.
class DevicePlaces:
    """Gives the devices of one node to its processes. places: workers that fit on the node."""

    def __init__(self, kind: DeviceKind, places: int) -> None:
        self.kind = kind
        self._count = max(1, -(-places // max(1, kind.ranks_per_device)))  # devices

    def place(
        self, spec: WorkerSpec, process: WorkerProcess | None, processes: Iterable[WorkerProcess]
    ) -> WorkerSpec:
        """Return the spec with the device of `process`, or with a free one if it has none."""
        if process is not None and process.device:
            return replace(spec, device=process.device)
        alive = [each for each in processes if each.is_alive and each is not process]
        ranked = Counter(each.device for each in alive if each.rank != STANDBY_RANK)
        held = Counter(each.device for each in alive)
        devices = [self.kind.device(index) for index in range(self._count)]
        return replace(spec, device=min(devices, key=lambda name: (ranked[name], held[name])))

    def place_standby(
        self, spec: WorkerSpec, count: int, processes: Iterable[WorkerProcess]
    ) -> WorkerSpec:
        """Return the spec of one of `count` standbys, with its device if each device has one."""
        if count < self._count:
            return spec
        held = Counter(each.device for each in processes if each.is_standby)
        devices = [self.kind.device(index) for index in range(self._count)]
        return replace(spec, device=min(devices, key=lambda name: held[name]))

    def choose_standby(
        self, idle: Sequence[WorkerProcess], processes: Collection[WorkerProcess]
    ) -> WorkerProcess | None:
        """Return the standby that gets a rank: a prepared one if possible. Return None if there is
        none, or if the devices of all are in use."""
        taken = Counter(
            each.device for each in processes if each.is_alive and each.rank != STANDBY_RANK
        )
        limit = self.kind.ranks_per_device
        able = [
            each for each in idle if not (limit and each.device and taken[each.device] >= limit)
        ]
        prepared = [each for each in able if each.acked_command >= 0]
        return next(iter(prepared or able), None)
