"""The processes of one node: a fork server, a mover, and workers that outlive generations.

It decides nothing about the run. The agent assigns ranks to processes (`begin_generation`), ends
generations (`halt_workers`) and sets the number of standbys (`keep_standbys`). A `ProcessListener`
learns of starts, exits and held workers. All of these messages can travel as JSON.

A rank's process comes from one of three sources, cheapest first:

    - a process that stays, with its state
    - a standby, forked before, with its imports done
    - a new fork of the fork server

The fork server may die. Its children live on, and their pidfds report their exits. A new fork
server starts while training continues.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from holdfast.elastic.node.children import ChildFailedError, Template
from holdfast.elastic.node.mover_supervisor import MoverLink
from holdfast.elastic.node.worker_process import STANDBY, Desk, Process
from holdfast.elastic.protocol.worker_spec import WorkerBoot
from holdfast.errors import HoldfastError
from holdfast.policy.recovery.survivors import Held
from holdfast.wire.secret import Secret
from holdfast.wire.waiting import wait_event

logger = logging.getLogger(__name__)

CLEAR_SECONDS = 20.0
"""Seconds that killed processes get to exit."""
HEARD_SECONDS = 5.0
"""Seconds within which a worker acknowledges a command: the thread that polls does nothing else."""
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


class News(Protocol):
    """Receives starts, exits and held states of workers."""

    def joined(self, generation: int, rank: int, process: int) -> None:
        """Note that a process without a rank has become this rank."""

    def exited(
        self, generation: int, rank: int, process: int, code: int, log: Path, doom: str
    ) -> None:
        """Note that a worker has exited. kill_reason: why it was given up; "" if it was not."""

    def held(self, generation: int, rank: int, held: Held) -> None:
        """Note that a worker has stopped and waits for commands."""


@dataclass(frozen=True)
class Start:
    """A node's part in a generation: for each of its ranks, the spec and the process.

    pids: None for a newcomer.
    came_from, previous_state: as in a worker's begin command; None: all workers restore.
    """

    generation: int
    boots: tuple[WorkerBoot, ...]
    processes: tuple[int | None, ...]
    came_from: tuple[int | None, ...] | None = None
    before: dict[str, Any] | None = None

    def orders(self, boot: WorkerBoot) -> dict[str, Any]:
        came_from = None if self.came_from is None else list(self.came_from)
        return {"kind": "begin", "boot": boot.to_json(), "came_from": came_from,
                "before": self.before}  # fmt: skip


class Host:
    """The processes of one node. Lives in one event loop."""

    def __init__(
        self,
        mover: MoverLink,
        folder: Path,
        secret: Secret,
        entry: str,
        preloads: Sequence[str],
        lifeline: int,
        news: News,
        *,
        mover_gone: Callable[[], None],
        template_gone: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        """Set up without starting any process.

        Args:
            folder: gets the logs.
            entry: a worker's main function.
            preloads: further modules that it needs.
            lifeline: descriptor that ends every child when the agent exits.
            on_mover_exit, on_fork_server_exit: called when one has exited.
            say: gets a sentence for the log.
        """
        self.mover = mover
        self._folder, self._secret, self._lifeline = folder, secret, lifeline
        self._entry, self._preloads = entry, preloads
        self._news, self._mover_gone, self._told_gone = news, mover_gone, template_gone
        self._say = say
        self._template: Template | None = None
        self._starting: asyncio.Task[None] | None = None
        self.noticed: Callable[[], None] = lambda: None
        """Called when the number of ready processes may have changed."""
        self._desk = Desk(self._holds, lambda: self.noticed())
        self.orders = self._desk.handle
        self._pending: deque[Process] = deque()  # whose fork has been asked for
        self._wanted: tuple[int, WorkerBoot] | None = None  # standbys
        self._standbys = 0  # ever forked: the number of the next one's log
        if sys.platform == "linux":  # orphans of a template that died become ours, to be reaped
            ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)

    # --- what it has ----------------------------------------------------------------------------
    @property
    def workers(self) -> list[Process]:
        """Every living process that has a rank."""
        everybody = (*self._desk, *self._pending)
        return [p for p in everybody if p.alive and p.rank != STANDBY]

    def holding(self) -> dict[int, Held]:
        """Return the states of workers that wait for commands, by process."""
        return {p.pid: p.held for p in self.workers if p.held is not None and not p.doomed}

    @property
    def _idle(self) -> list[Process]:
        return [p for p in (*self._desk, *self._pending) if p.idle and not p.doomed]

    @property
    def ready(self) -> int:
        """Return the number of processes that have a rank or are prepared for one."""
        there = [p for p in (*self._desk, *self._pending) if p.alive and not p.doomed]
        return sum(p.rank != STANDBY or p.seen >= 0 for p in there)

    @property
    def can_fork(self) -> bool:
        return self._template is not None and self._template.alive

    # --- beginning ------------------------------------------------------------------------------
    async def prepare(self, workers: int) -> None:
        """Ensure a live mover, and a fork server for `workers` processes.

        If held workers and standbys are enough, a missing fork server starts in the background.
        Raises HoldfastError if a start fails.
        """
        starting: list[Any] = [self.mover.ensure(self._lifeline, self._mover_gone)]
        if len(self.holding()) + len(self._idle) < workers:
            starting.append(asyncio.shield(self._mend()))
        elif not self.can_fork:
            self._mend()
        await asyncio.gather(*starting)

    async def begin(self, start: Start) -> None:
        """Give every rank to a process. If one has died meanwhile, report its exit as any other."""
        staying = set(start.processes)
        for process in self.workers:
            if process.pid in staying:
                continue
            if process.obeys and process.held is not None and not process.doomed:
                process.rank = STANDBY  # it has no place now: it waits for one
            else:
                process.kill()
        for boot, pid in zip(start.boots, start.processes, strict=True):
            stays = None if pid is None else self._desk.find(pid)
            if stays is None:
                await self._newcomer(start, boot)
                continue
            self._order(stays, start, boot)
            if not stays.alive:
                self._tell_exit(stays)
        for process in self._desk:
            if not process.alive:
                self._desk.forget(process.pid)

    async def _newcomer(self, start: Start, boot: WorkerBoot) -> None:
        idle = [process for process in self._idle if process.pid]
        process = next((p for p in idle if p.seen >= 0), idle[0] if idle else None)
        if process is not None:
            self._order(process, start, boot)
            self._news.joined(start.generation, boot.rank, process.pid)
        elif start.came_from is None:
            await self._fork(boot, boot.rank, start.generation)
        else:  # the others send it the state: it is told how, as a standby is
            process = await self._fork(replace(boot, rank=STANDBY), boot.rank, start.generation)
            self._order(process, start, boot)

    @staticmethod
    def _order(process: Process, start: Start, boot: WorkerBoot) -> None:
        process.begin(boot.rank, start.generation, Path(boot.log), start.orders(boot))

    async def standby(self, count: int, boot: WorkerBoot) -> None:
        """Keep `count` standbys from now on; `spec` gives all but rank and log."""
        self._wanted = count, boot
        for _ in range(count - len(self._idle) if self.can_fork else 0):
            self._standbys += 1
            log = self._folder / "logs" / f"standby{self._standbys}{self.mover.suffix}.log"
            await self._fork(replace(boot, rank=STANDBY, log=str(log)), STANDBY, 0)

    async def _fork(self, boot: WorkerBoot, rank: int, generation: int) -> Process:
        process = Process(Path(boot.log), boot.orders, rank, generation)
        self._pending.append(process)
        if self._template is None or not self._template.alive:
            asyncio.get_running_loop().call_soon(self._bury)
        else:
            try:
                await self._template.fork(boot, self._secret)
            except Exception:  # the next one that is forked is another
                with suppress(ValueError):
                    self._pending.remove(process)
                raise
        return process

    # --- ending ---------------------------------------------------------------------------------
    async def halt(
        self, generation: int, inside: Collection[int], seconds: float
    ) -> dict[int, Held]:
        """Stop all workers; return their states, by process, once all hold.

        Args:
            bereft_ranks: ranks that lost a member of their own replica.
            timeout_s: after so many seconds a worker that does not hold is killed. It is killed
                after COMMAND_ACK_TIMEOUT_S if it has not acknowledged the command.
        """
        workers = self.workers
        for process in workers:
            if process.held is None and process.obeys:
                process.halt(generation, process.rank in inside)
        await asyncio.gather(*(self._stopped(process, seconds) for process in workers))
        late = [p for p in workers if p.alive and p.held is None]
        for process in late:
            process.kill()
        await _ended(late)
        return self.holding()

    async def _stopped(self, process: Process, seconds: float) -> None:
        """Wait until the worker holds, has exited, or its time is over."""
        begun = asyncio.get_running_loop().time()
        if not process.obeys or process.doomed:
            return
        while process.alive and process.held is None:
            limit = seconds if process.heard else min(seconds, HEARD_SECONDS)
            left = begun + limit - asyncio.get_running_loop().time()
            if left <= 0:
                heard = "stop" if process.heard else "answer"
                process.why = f"did not {heard} within {limit:g} s of the command"
                return
            await wait_event(process.changed, left)

    def kill(self, pid: int, why: str = "") -> None:
        """Kill one worker that makes no progress."""
        process = self._desk.find(pid)
        if process is not None:
            process.why = process.why or why
            process.kill()

    async def clear(self) -> None:
        """Kill all workers and standbys and wait until they have exited."""
        everybody = [p for p in (*self._desk, *self._pending) if p.alive]
        for process in everybody:
            process.doomed = True
        if self._template is not None and self._template.alive:
            await self._template.kill()
            await _ended(everybody)
        self.kill_all()  # what a dead template could not kill

    def kill_all(self) -> None:
        """Kill all workers and standbys without the fork server."""
        for process in (*self._desk, *self._pending):
            process.kill()

    async def end(self) -> None:
        """Kill every process and stop the fork server and the mover."""
        self._wanted = None
        self.kill_all()
        if self._starting is not None:
            self._starting.cancel()
        if self._template is not None:
            await self._template.stop()
        await self.mover.stop()
        for process in self._desk:
            process.close()

    # --- the template ---------------------------------------------------------------------------
    def _mend(self) -> asyncio.Task[None]:
        """Return the task of a fork server's start; start one if none is alive."""
        if self._starting is None or (self._starting.done() and not self.can_fork):
            self._starting = asyncio.create_task(self._try_template())
            self._starting.add_done_callback(_looked_at)
        return self._starting

    async def _try_template(self) -> None:
        """Start the fork server; turn every fault into ChildFailedError for the waiters."""
        try:
            await self._start_template()
        except HoldfastError:
            raise
        except Exception as error:
            self._say(f"a fault of this node's agent, while starting its fork server: {error!r}")
            raise ChildFailedError(f"the template did not start: {error!r}") from error

    async def _start_template(self) -> None:
        if self._template is not None:
            await self._template.stop()
            self._template = None
        log = self._folder / "logs" / f"template{self.mover.suffix}.log"
        template = self._template = await Template.start(
            self._lifeline, self._entry, self._preloads, log, self._told, self._template_gone
        )
        await template.ready()
        if self._wanted is not None:
            await self.standby(*self._wanted)

    def _template_gone(self) -> None:
        """Watch the children through their pidfds, now that the fork server has exited."""
        if self._template is not None:
            self._template.hear_out()
        for process in self._desk:
            if process.alive:
                self._adopt(process)
        self._bury()
        self._told_gone()

    def _adopt(self, process: Process) -> None:
        if process.pidfd < 0:  # nobody would notice its end
            process.kill()
            self._exited(process, -signal.SIGKILL)
            return
        loop = asyncio.get_running_loop()
        fd = process.pidfd

        def ended() -> None:
            loop.remove_reader(fd)
            code = -signal.SIGKILL  # where it is not told: its template may have reaped it
            with suppress(ChildProcessError):
                found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG)
                if found is not None:
                    killed = found.si_code != os.CLD_EXITED
                    code = -found.si_status if killed else found.si_status
            self._exited(process, code)

        loop.add_reader(fd, ended)

    def _bury(self) -> None:
        """Report every pending fork as exited: the fork server will not make it."""
        while self._pending:
            self._exited(self._pending.popleft(), -signal.SIGKILL)

    def _told(self, message: dict[str, Any]) -> None:
        """Handle a message of the fork server: it forked a process, or one has exited."""
        pid = int(message["pid"])
        if message["event"] == "forked":
            process = self._pending.popleft()  # they are forked in the order of asking
            process.born(pid)
            logger.info("worker %d forked for rank %d", pid, process.rank)
            self._desk.add(process)
            if process.rank != STANDBY:
                self._news.joined(process.generation, process.rank, pid)
            return
        found = self._desk.find(pid)
        if found is not None and found.alive:
            self._exited(found, int(message["code"]))

    # --- news -----------------------------------------------------------------------------------
    def _exited(self, process: Process, code: int) -> None:
        process.ended(code)
        logger.info("worker %d of rank %d exited with %d", process.pid, process.rank, code)
        if process.rank == STANDBY:
            self._desk.forget(process.pid)
        else:
            self._tell_exit(process)
        self.noticed()

    def _tell_exit(self, process: Process) -> None:
        code = -signal.SIGKILL if process.code is None else process.code
        self._news.exited(
            process.generation, process.rank, process.pid, code, process.log, process.why
        )

    def _holds(self, process: Process) -> None:
        assert process.held is not None, "only processes that hold are reported"
        self._news.held(process.generation, process.rank, process.held)


async def _ended(processes: Iterable[Process]) -> None:
    """Wait until the processes have exited, for KILLED_EXIT_TIMEOUT_S at most."""

    async def one(process: Process) -> None:
        while process.alive:
            await process.changed.wait()

    with suppress(TimeoutError):
        async with asyncio.timeout(CLEAR_SECONDS):
            await asyncio.gather(*map(one, processes))


def _looked_at(task: asyncio.Task[None]) -> None:
    """Retrieve the error of a failed start: a caller that waits gets it, but there may be none."""
    if not task.cancelled():
        task.exception()
