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
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.elastic.protocol.worker_messages import LONGEST_POLL
from holdfast.policy.recovery.survivors import Held
from holdfast.wire.waiting import wait_event

STANDBY = -1
"""The rank of a standby."""


@dataclass(eq=False)
class Process:
    """A worker or standby.

    pid: 0 until the fork server reports its fork.
    acked_command: number of the newest command that it has taken; -1 until its first poll.
    """

    log: Path
    obeys: bool  # it asks for orders; one that does not ends with its generation
    rank: int = STANDBY
    generation: int = 0
    pid: int = 0
    pidfd: int = -1  # -1 where the system has none
    code: int | None = None  # as os.waitstatus_to_exitcode gives it
    number: int = 0  # of the newest orders
    orders: dict[str, Any] | None = None
    begun: int = 0  # number of the newest orders to begin
    halted: int = 0  # and to halt
    seen: int = -1
    held: Held | None = None
    doomed: bool = False  # to be killed as soon as it is known
    why: str = ""  # it was given up by its host: the cause, in words
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def alive(self) -> bool:
        return self.code is None

    @property
    def idle(self) -> bool:
        """Return True if it is a standby."""
        return self.alive and self.rank == STANDBY

    @property
    def heard(self) -> bool:
        """Return True if it has taken its newest command; its main thread may lag behind."""
        return self.seen >= self.number or self.held is not None

    # --- orders -------------------------------------------------------------------------------
    def begin(self, rank: int, generation: int, log: Path, orders: dict[str, Any]) -> None:
        """Order it to become a rank of a generation; from then on it writes into that log."""
        self.rank, self.generation, self.log, self.held = rank, generation, log, None
        self._give(orders)
        self.begun = self.number

    def halt(self, generation: int, inside: bool) -> None:
        self._give({"kind": "halt", "inside": inside, "generation": generation})
        self.halted = self.number

    def end(self) -> None:
        self._give({"kind": "end"})

    def _give(self, orders: dict[str, Any]) -> None:
        self.number, self.orders = self.number + 1, orders
        self.stir()

    def stir(self) -> None:
        """Wake the waiters for a change of this process; each event is set once."""
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    def asked(self, seen: int, held: Held | None) -> bool:
        """Record a poll's command number and held state; return True if the process newly holds.

        A poll may be older than the newest command. So its state counts if it is of the generation
        that the process was ordered to begin. An older state counts only if the process has taken a
        halt since, and so never began.
        """
        if seen > self.seen:
            self.seen = seen
            self.stir()
        if held is None or self.held is not None:
            return False
        never_begun = self.halted > self.begun and seen >= self.halted
        if held.generation != self.generation and not never_begun:
            return False
        self.held = held
        self.stir()
        return True

    # --- life and death -----------------------------------------------------------------------
    def born(self, pid: int) -> None:
        self.pid, self.pidfd = pid, pidfd_of(pid)
        if self.doomed:
            self.kill()
        self.stir()

    def ended(self, code: int) -> None:
        self.code = code
        self.close()
        self.stir()

    def kill(self) -> None:
        """Kill it and what it started. If its process id is unknown, kill it once it is known."""
        self.doomed = True
        if self.alive and still_running(self.pidfd):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


class Desk:
    """Answers the polls of processes for commands. Lives in one event loop."""

    def __init__(
        self, held: Callable[[Process], None], ready: Callable[[], None] = lambda: None
    ) -> None:
        """Set up a server without processes.

        Args:
            on_held: called with each process that newly holds.
            on_first_poll: called when a process has polled for the first time.
        """
        self._held, self._ready = held, ready
        self._processes: dict[int, Process] = {}
        self._known = asyncio.Event()

    def __iter__(self) -> Iterator[Process]:
        return iter(tuple(self._processes.values()))

    def add(self, process: Process) -> None:
        """Add a process whose fork was reported; from here on its process id is known."""
        self._processes[process.pid] = process
        known, self._known = self._known, asyncio.Event()
        known.set()

    def find(self, pid: int) -> Process | None:
        return self._processes.get(pid)

    def forget(self, pid: int) -> None:
        self._processes.pop(pid, None)

    async def handle(self, generation: int, body: dict[str, Any]) -> dict[str, Any]:
        """Answer a process's poll for commands newer than those that it has taken.

        Raises KeyError, ValueError and TypeError if the request makes no sense.
        """
        pid, seen = int(body["process"]), int(body["seen"])
        held = None if body.get("held") is None else Held.from_json(body["held"])
        loop = asyncio.get_running_loop()
        deadline = loop.time() + LONGEST_POLL
        while (process := self._processes.get(pid)) is None:  # it may ask before its fork is told
            if not await wait_event(self._known, deadline - loop.time()):
                # Its fork server died before it could report the fork, so no generation counts on
                # the process.
                return {"number": seen + 1, "orders": {"kind": "end"}}
        first = process.seen < 0
        if process.asked(seen, held):
            self._held(process)
        if first:
            self._ready()
        while process.number <= seen and process.alive:
            if not await wait_event(process.changed, deadline - loop.time()):
                break
        fresh = process.number > seen
        return {"number": process.number, "orders": process.orders if fresh else None}


def pidfd_of(pid: int) -> int:
    """Return a handle of this process, never of a later one with the same number."""
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):
        return -1


def still_running(pidfd: int) -> bool:
    """Return True if the process is alive (or a zombie that its parent has not reaped)."""
    if pidfd < 0:
        return False
    try:
        signal.pidfd_send_signal(pidfd, 0)
    except OSError:
        return False
    return True
