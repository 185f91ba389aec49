"""What one node has: a template, a mover, and processes that outlive generations.

It decides nothing about the run: the agent says which of its processes becomes which rank
(`begin`), that a generation is over (`halt`), how many idle processes to keep (`standby`), and
it tells what becomes of them (`News`). All of that can travel as JSON.

A process is taken from one of three places, cheapest first: it stays (its state with it), it is a
standby (forked before, with its imports done), or it is forked from the template now. The template
may die: its children live on, their end is then noticed by their pidfd, and a new template is
started behind the training.
"""

from __future__ import annotations

import asyncio
import ctypes
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

CLEAR_SECONDS = 20.0
"""How long killed processes are waited for."""
HEARD_SECONDS = 5.0
"""Within this time a worker takes an order: the thread that asks for orders does nothing else."""
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


class News(Protocol):
    """Whoever wants to know what becomes of processes."""

    def joined(self, generation: int, rank: int, process: int) -> None:
        """A process that was no worker before has become this rank."""

    def exited(
        self, generation: int, rank: int, process: int, code: int, log: Path, doom: str
    ) -> None:
        """A worker has ended. doom: why it was killed by its host; "" if it was not."""

    def held(self, generation: int, rank: int, held: Held) -> None:
        """A worker has stopped and waits for orders."""


@dataclass(frozen=True)
class Start:
    """How a node takes part in a generation: by rank, what to begin with, and which process does;
    None: a newcomer. came_from and before as in a worker's orders; None: everybody restores."""

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
        """`folder` gets the logs, `entry` is a worker's main function, `preloads` are modules that
        it needs besides, and the lifeline ends every child. mover_gone, template_gone: called when
        one has ended. say: gets a sentence for the log."""
        self.mover = mover
        self._folder, self._secret, self._lifeline = folder, secret, lifeline
        self._entry, self._preloads = entry, preloads
        self._news, self._mover_gone, self._told_gone = news, mover_gone, template_gone
        self._say = say
        self._template: Template | None = None
        self._starting: asyncio.Task[None] | None = None
        self.noticed: Callable[[], None] = lambda: None
        """Called when `ready` may be another."""
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
        """What those who wait for orders hold, by process."""
        return {p.pid: p.held for p in self.workers if p.held is not None and not p.doomed}

    @property
    def _idle(self) -> list[Process]:
        return [p for p in (*self._desk, *self._pending) if p.idle and not p.doomed]

    @property
    def ready(self) -> int:
        """Processes that have a rank, or are prepared for one."""
        there = [p for p in (*self._desk, *self._pending) if p.alive and not p.doomed]
        return sum(p.rank != STANDBY or p.seen >= 0 for p in there)

    @property
    def can_fork(self) -> bool:
        return self._template is not None and self._template.alive

    # --- beginning ------------------------------------------------------------------------------
    async def prepare(self, workers: int) -> None:
        """A mover that is alive; a template, too, where `workers` are more than those who hold and
        stand by, else one is started behind this. Raises HoldfastError when they do not start."""
        starting: list[Any] = [self.mover.ensure(self._lifeline, self._mover_gone)]
        if len(self.holding()) + len(self._idle) < workers:
            starting.append(asyncio.shield(self._mend()))
        elif not self.can_fork:
            self._mend()
        await asyncio.gather(*starting)

    async def begin(self, start: Start) -> None:
        """Give every rank to a process. One that has died meanwhile is told as any that ends."""
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
        """Keep so many idle processes from now on; `boot` says all but rank and log."""
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
        """Stop all workers, and wait until they hold; what each holds, by process. inside: ranks
        that lost somebody of their own replica. Who has not heard of it within HEARD_SECONDS, or
        does not hold after `seconds`, is killed."""
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
        """Until it holds or has ended, or its time is over."""
        begun = asyncio.get_running_loop().time()
        if not process.obeys or process.doomed:
            return
        while process.alive and process.held is None:
            limit = seconds if process.heard else min(seconds, HEARD_SECONDS)
            left = begun + limit - asyncio.get_running_loop().time()
            if left <= 0:
                heard = "stop" if process.heard else "answer"
                process.why = f"did not {heard} within {limit:g} s of being told to"
                return
            await wait_event(process.changed, left)

    def kill(self, pid: int, why: str = "") -> None:
        """End one worker that makes no progress."""
        process = self._desk.find(pid)
        if process is not None:
            process.why = process.why or why
            process.kill()

    async def clear(self) -> None:
        """Nobody is left when this returns, neither worker nor standby."""
        everybody = [p for p in (*self._desk, *self._pending) if p.alive]
        for process in everybody:
            process.doomed = True
        if self._template is not None and self._template.alive:
            await self._template.kill()
            await _ended(everybody)
        self.kill_all()  # what a dead template could not kill

    def kill_all(self) -> None:
        """Without the template's help."""
        for process in (*self._desk, *self._pending):
            process.kill()

    async def end(self) -> None:
        """Leave nothing behind."""
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
        """A template that is alive and ready, at once or behind what is done now."""
        if self._starting is None or (self._starting.done() and not self.can_fork):
            self._starting = asyncio.create_task(self._try_template())
            self._starting.add_done_callback(_looked_at)
        return self._starting

    async def _try_template(self) -> None:
        """Whatever goes wrong is a failed start to whoever waits for it."""
        try:
            await self._start_template()
        except HoldfastError:
            raise
        except Exception as error:
            self._say(f"a fault of this node's agent, which starts its template: {error!r}")
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
        """Its children live on as ours: from here on their end is noticed by their pidfd."""
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
        """Forks that were asked for and will not be."""
        while self._pending:
            self._exited(self._pending.popleft(), -signal.SIGKILL)

    def _told(self, message: dict[str, Any]) -> None:
        """The template has forked a process, or one has ended."""
        pid = int(message["pid"])
        if message["event"] == "forked":
            process = self._pending.popleft()  # they are forked in the order of asking
            process.born(pid)
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
        assert process.held is not None, "the desk tells of those who do"
        self._news.held(process.generation, process.rank, process.held)


async def _ended(processes: Iterable[Process]) -> None:
    """Wait until they have ended, for a while."""

    async def one(process: Process) -> None:
        while process.alive:
            await process.changed.wait()

    with suppress(TimeoutError):
        async with asyncio.timeout(CLEAR_SECONDS):
            await asyncio.gather(*map(one, processes))


def _looked_at(task: asyncio.Task[None]) -> None:
    """A template that does not start is told to whoever waits for it; nobody may be waiting."""
    if not task.cancelled():
        task.exception()
