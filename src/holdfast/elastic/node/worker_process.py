"""One process of a node, as its agent knows it: a worker, or a standby.

Its process id names it, and it outlives generations. Its commands are numbered, and only the newest
counts. It fetches them by a long poll (`CommandServer`).

    forked --reported--> alive --begin--> working --holds--> holding --begin--> working
                                             '--------- halt ---^
    any --exited--> ended
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.elastic.node.output_relay import ProcessOutput
from holdfast.elastic.protocol.worker_commands import (
    Begin,
    Command,
    CommandPoll,
    CommandReply,
    End,
    Halt,
)
from holdfast.elastic.protocol.worker_messages import MAX_POLL_WAIT_S
from holdfast.policy.recovery.survivors import HeldState
from holdfast.wire.waiting import wait_event

STANDBY_RANK = -1
"""The rank of a standby."""


@dataclass(eq=False)
class WorkerProcess:
    """A worker or standby.

    pid: 0 until the fork server reports its fork.
    acked_command: number of the newest command that it has taken; -1 until its first poll.
    """

    log: ProcessOutput
    rank: int = STANDBY_RANK
    generation: int = 0
    pid: int = 0
    pidfd: int = -1  # -1 where the system has none
    exit_code: int | None = None  # as os.waitstatus_to_exitcode gives it
    command_number: int = 0  # of the newest orders
    command: Command | None = None
    begin_number: int = 0  # number of the newest orders to begin
    halt_number: int = 0  # and to halt
    acked_command: int = -1
    held_state: HeldState | None = None
    kill_pending: bool = False  # to be killed as soon as it is known
    device: str = ""  # that it computes on, for as long as it lives; "": none yet
    kill_reason: str = ""  # it was given up by its host: the cause, in words
    state_changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_alive(self) -> bool:
        return self.exit_code is None

    @property
    def is_standby(self) -> bool:
        """Return True if it is a standby."""
        return self.is_alive and self.rank == STANDBY_RANK

    @property
    def has_acked(self) -> bool:
        """Return True if it has taken its newest command; its main thread may lag behind."""
        return self.acked_command >= self.command_number or self.held_state is not None

    # --- orders -------------------------------------------------------------------------------
    def begin_rank(self, command: Begin) -> None:
        """Order it to become a rank of a generation; from then on it writes into the spec's log."""
        spec = command.spec
        self.rank, self.generation = spec.rank, spec.generation
        self.log.send_to(Path(spec.log))
        self.held_state = None
        self._set_command(command)
        self.begin_number = self.command_number

    def halt_rank(self, generation: int, has_lost_replica_peer: bool) -> None:
        self._set_command(Halt(generation, has_lost_replica_peer))
        self.halt_number = self.command_number

    def _set_command(self, command: Command) -> None:
        self.command_number, self.command = self.command_number + 1, command
        self.notify()

    def notify(self) -> None:
        """Wake the waiters for a change of this process; each event is set once."""
        changed, self.state_changed = self.state_changed, asyncio.Event()
        changed.set()

    def record_poll(self, acked_command: int, held_state: HeldState | None) -> bool:
        """Record a poll's command number and held state; return True if the process newly holds.

        A poll may be older than the newest command. So its state counts if it is of the generation
        that the process was ordered to begin. An older state counts only if the process has taken a
        halt since, and so never began.
        """
        if acked_command > self.acked_command:
            self.acked_command = acked_command
            self.notify()
        if held_state is None or self.held_state is not None:
            return False
        never_begun = self.halt_number > self.begin_number and acked_command >= self.halt_number
        if held_state.generation != self.generation and not never_begun:
            return False
        self.held_state = held_state
        self.notify()
        return True

    # --- life and death -----------------------------------------------------------------------
    def on_forked(self, pid: int) -> None:
        self.pid, self.pidfd = pid, open_pidfd(pid)
        if self.kill_pending:
            self.kill()
        self.notify()

    def on_exited(self, exit_code: int) -> None:
        self.exit_code = exit_code
        self.close()
        self.notify()

    def kill(self) -> None:
        """Kill it and what it started. If its process id is unknown, kill it once it is known."""
        self.kill_pending = True
        if self.is_alive and is_running(self.pidfd):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


class CommandServer:
    """Answers the polls of processes for commands. Lives in one event loop."""

    def __init__(
        self,
        on_held: Callable[[WorkerProcess], None],
        on_first_poll: Callable[[], None] = lambda: None,
    ) -> None:
        """Set up a server without processes.

        Args:
            on_held: called with each process that newly holds.
            on_first_poll: called when a process has polled for the first time.
        """
        self._on_held, self._on_first_poll = on_held, on_first_poll
        self._processes: dict[int, WorkerProcess] = {}
        self._process_added = asyncio.Event()

    def __iter__(self) -> Iterator[WorkerProcess]:
        return iter(tuple(self._processes.values()))

    def add(self, process: WorkerProcess) -> None:
        """Add a process whose fork was reported; from here on its process id is known."""
        self._processes[process.pid] = process
        known, self._process_added = self._process_added, asyncio.Event()
        known.set()

    def find(self, pid: int) -> WorkerProcess | None:
        return self._processes.get(pid)

    def forget(self, pid: int) -> None:
        self._processes.pop(pid, None)

    async def handle_poll(self, generation: int, poll: CommandPoll) -> CommandReply:
        """Answer a process's poll for commands newer than those that it has taken."""
        seen = poll.seen
        loop = asyncio.get_running_loop()
        deadline = loop.time() + MAX_POLL_WAIT_S
        while (
            process := self._processes.get(poll.pid)
        ) is None:  # it may ask before its fork is told
            if not await wait_event(self._process_added, deadline - loop.time()):
                # Its fork server died before it could report the fork, so no generation counts on
                # the process.
                return CommandReply(seen + 1, End())
        first = process.acked_command < 0
        if process.record_poll(seen, poll.held):
            self._on_held(process)
        if first:
            self._on_first_poll()
        while process.command_number <= seen and process.is_alive:
            if not await wait_event(process.state_changed, deadline - loop.time()):
                break
        fresh = process.command_number > seen
        return CommandReply(process.command_number, process.command if fresh else None)


def open_pidfd(pid: int) -> int:
    """Return a handle of this process, never of a later one with the same number."""
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):
        return -1


def has_exited(pidfd: int) -> bool:
    """Return True if the process has exited, whether or not its parent has reaped it."""
    if pidfd < 0:
        return False
    poll = select.poll()  # unlike `select`, takes descriptors above 1023
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def is_running(pidfd: int) -> bool:
    """Return True if the process is alive (or a zombie that its parent has not reaped)."""
    if pidfd < 0:
        return False
    try:
        signal.pidfd_send_signal(pidfd, 0)
    except OSError:
        return False
    return True
