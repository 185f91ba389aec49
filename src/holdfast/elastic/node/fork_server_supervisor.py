"""The fork server of a node: its start, the forks asked of it, and the exits of its children.

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
from collections.abc import Callable
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Protocol

from holdfast.elastic.node.children import ChildFailedError, ForkServer, ForkServerSettings
from holdfast.elastic.node.output_relay import OutputRelay
from holdfast.elastic.node.worker_process import CommandServer, WorkerProcess, has_exited
from holdfast.elastic.protocol.fork_channel import WorkerExited, WorkerForked
from holdfast.elastic.protocol.worker_spec import WorkerSpec
from holdfast.errors import HoldfastError

logger = logging.getLogger(__name__)

REPLY_TIMEOUT_S = 3.0
"""Seconds for the report of an exit, or for a fork, both of which take milliseconds."""
_PR_SET_CHILD_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


class ForkListener(Protocol):
    """Receives the forks and exits of processes, and the start and exit of the fork server."""

    def on_forked(self, process: WorkerProcess) -> None:
        """Note that a process has been forked, and has its process id."""

    def on_exited(self, process: WorkerProcess, exit_code: int) -> None:
        """Note that a process has exited, or that its fork failed."""

    async def on_fork_server_started(self) -> None:
        """Note that a new fork server can fork."""

    def on_fork_server_exited(self) -> None:
        """Note that the fork server has exited. Its children live on."""


class ForkServerSupervisor:
    """Runs one fork server at a time. Lives in one event loop."""

    def __init__(
        self,
        settings: ForkServerSettings,
        command_server: CommandServer,
        listener: ForkListener,
        say: Callable[[str], None],
    ) -> None:
        """Set up without starting a fork server.

        Args:
            command_server: has the processes that were forked; a new one is added to it.
            say: gets a sentence for the log.
        """
        self.pending_forks: deque[WorkerProcess] = deque()
        """Processes whose fork has been asked for."""
        self._settings, self._command_server = settings, command_server
        self._output = OutputRelay()
        self._listener, self._say = listener, say
        self._fork_server: ForkServer | None = None
        self._start: asyncio.Task[None] | None = None
        self._owes_since = inf  # since when a report or a fork is due, by the loop's clock
        if sys.platform == "linux":  # orphans of a fork server that died become ours, to be reaped
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    @property
    def is_alive(self) -> bool:
        return self._fork_server is not None and self._fork_server.is_alive

    @property
    def pid(self) -> int | None:
        server = self._fork_server
        return server.process.pid if server is not None and server.is_alive else None

    def kill_if_hung(self, now: float) -> None:
        """Kill a fork server that owes the report of an exit, or a fork, for too long. Its children
        are then watched here, and another one is started. One that still starts owes nothing: it
        forks once its imports are done."""
        ended = any(each.is_alive and has_exited(each.pidfd) for each in self._command_server)
        is_starting = self._start is not None and not self._start.done()
        owes = not is_starting and (ended or self.pending_forks)
        self._owes_since = min(now, self._owes_since) if owes else inf
        if now - self._owes_since > REPLY_TIMEOUT_S and self.pid is not None:
            self._say(f"the fork server (process {self.pid}) hangs; the agent kills it")
            self._owes_since = inf
            os.kill(self.pid, signal.SIGKILL)

    @property
    def reference(self) -> str:
        """Return the checksum of the fork server's reference computation; "" if it made none."""
        return "" if self._fork_server is None else self._fork_server.reference

    # --- its start and end ----------------------------------------------------------------------
    def ensure_running(self) -> asyncio.Task[None]:
        """Return the task of a fork server's start; start one if none is alive."""
        if self._start is None or (self._start.done() and not self.is_alive):
            self._start = asyncio.create_task(self._try_start())
            self._start.add_done_callback(_retrieve_error)
        return self._start

    async def _try_start(self) -> None:
        """Start the fork server; turn every fault into ChildFailedError for the waiters."""
        try:
            if self._fork_server is not None:
                await self._fork_server.stop()
                self._fork_server = None
            server = self._fork_server = await ForkServer.start(
                self._settings, self._output, self._on_message, self._adopt_orphans
            )
            await server.wait_until_ready()
            await self._listener.on_fork_server_started()
        except HoldfastError:
            raise
        except Exception as error:
            self._say(f"a fault of this node's agent, while starting its fork server: {error!r}")
            raise ChildFailedError(f"the fork server did not start: {error!r}") from error

    async def stop(self) -> None:
        """Stop the fork server, or its start; write what its children have said."""
        if self._start is not None:
            self._start.cancel()
        if self._fork_server is not None:
            await self._fork_server.stop()
        await self._output.close()

    # --- forks ----------------------------------------------------------------------------------
    async def fork(self, spec: WorkerSpec, rank: int, generation: int) -> WorkerProcess:
        """Ask for a fork; return the process, which gets its process id later. Without a fork
        server it is soon reported as exited."""
        output_fd, output = self._output.open(Path(spec.log))
        process = WorkerProcess(output, rank, generation)
        self.pending_forks.append(process)
        try:
            if self._fork_server is None or not self._fork_server.is_alive:
                asyncio.get_running_loop().call_soon(self._fail_pending_forks)
            else:
                await self._fork_server.fork(spec, self._settings.secret, output_fd)
        except Exception:  # the next one that is forked is another
            with suppress(ValueError):
                self.pending_forks.remove(process)
            raise
        finally:
            os.close(output_fd)
        return process

    async def kill_workers(self) -> None:
        """Kill every worker, including workers whose fork is pending. Needs a live fork server."""
        assert self._fork_server is not None, "the caller has asked whether it is alive"
        await self._fork_server.kill_workers()

    def _on_message(self, message: WorkerForked | WorkerExited) -> None:
        """Handle a message of the fork server: it forked a process, or one has exited."""
        if isinstance(message, WorkerForked):
            process = self.pending_forks.popleft()  # they are forked in the order of asking
            process.on_forked(message.pid)
            logger.info("worker %d forked for rank %d", message.pid, process.rank)
            self._command_server.add(process)
            self._listener.on_forked(process)
            return
        found = self._command_server.find(message.pid)
        if found is not None and found.is_alive:
            self._listener.on_exited(found, message.exit_code)

    def _fail_pending_forks(self) -> None:
        """Report every pending fork as exited: the fork server will not make it."""
        while self.pending_forks:
            self._listener.on_exited(self.pending_forks.popleft(), -signal.SIGKILL)

    # --- children of a fork server that has exited ----------------------------------------------
    def _adopt_orphans(self) -> None:
        """Watch the children through their pidfds, now that the fork server has exited."""
        if self._fork_server is not None:
            self._fork_server.drain_messages()
        for process in self._command_server:
            if process.is_alive:
                self._watch_orphan(process)
        self._fail_pending_forks()
        self._listener.on_fork_server_exited()

    def _watch_orphan(self, process: WorkerProcess) -> None:
        if process.pidfd < 0:  # no event would show its end
            process.kill()
            self._listener.on_exited(process, -signal.SIGKILL)
            return
        loop = asyncio.get_running_loop()
        fd = process.pidfd

        def ended() -> None:
            loop.remove_reader(fd)
            code = -signal.SIGKILL  # if unknown: its fork server may have reaped it
            with suppress(ChildProcessError):
                found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG)
                if found is not None:
                    killed = found.si_code != os.CLD_EXITED
                    code = -found.si_status if killed else found.si_status
            self._listener.on_exited(process, code)

        loop.add_reader(fd, ended)


def _retrieve_error(task: asyncio.Task[None]) -> None:
    """Retrieve the error of a failed start: a caller that waits gets it, but there may be none."""
    if not task.cancelled():
        task.exception()
