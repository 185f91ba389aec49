"""The commands of a worker's agent, fetched by a long poll.

One thread polls. `begin` and `end` wait for the training thread, which fetches them after it has
stopped (`wait_for_command`). `halt` does not wait: the polling thread wakes the training thread
from any blocking call. A command is kept as a number: all generations up to it have ended. So
nothing has to be reset for the next generation, and a late halt only concerns the past. If the
training thread cannot be woken (`elastic/worker/stuck_threads.py`), the process exits.

If the agent is out of reach, the thread retries. If the agent has exited, the lifeline ends this
process.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import inf
from typing import Any

from holdfast.elastic.protocol import exit_codes
from holdfast.elastic.protocol.worker_messages import LONGEST_POLL
from holdfast.elastic.protocol.worker_spec import WorkerBoot
from holdfast.elastic.worker.stuck_threads import Trace, Who, stuck
from holdfast.errors import HoldfastError
from holdfast.layout import Topology
from holdfast.wire import process_log
from holdfast.wire.http.client import Client
from holdfast.wire.secret import Secret

logger = logging.getLogger(__name__)

PATH = "/orders"
_AGAIN_SECONDS = 2.0
"""Seconds after the first wake-up before a training thread that still blocks is woken by all means.
"""
_VAIN_SECONDS = 1.0
"""A thread still blocked this many seconds after all connections closed will never return."""
_TELL_SECONDS = 5.0
"""Seconds after a halt before a process that has not stopped dumps its threads' stacks.

After `elastic.node.node_runner.WORKER_HALT_TIMEOUT_S` and three of its steps it is killed. Without
the dump the cause would be unknown.
"""
_PAUSE = 0.1  # seconds before an agent that did not answer is asked again

Interrupt = Callable[[bool], None]
"""Wakes the training thread, wherever it blocks: between replicas, and with True inside its own.
Called a second time if that was not enough."""


class HaltedError(HoldfastError):
    """Raised in the training thread between two operations: its generation was halted."""


@dataclass(frozen=True)
class Held:
    """The state of a stopped worker, by its own report: see docs/elastic.md.

    state: generation and rank whose boxes it holds; None if it holds none.
    bad: `policy.recovery.survivors.RejectedStep` as JSON.
    """

    generation: int
    rank: int
    applied: int
    whole: int | None
    torn: bool
    kind: str
    text: str
    state: tuple[int, int] | None = None
    bad: dict[str, Any] | None = None


@dataclass(frozen=True)
class Before:
    """The generation whose state a newcomer receives."""

    topology: Topology
    step: int


@dataclass(frozen=True)
class Begin:
    """The command to take part in the spec's generation.

    came_from: by rank, the rank of `previous` that it was. If all of it is None, every worker reads
    `spec.restore_key`.
    """

    boot: WorkerBoot
    came_from: tuple[int | None, ...] | None = None
    before: Before | None = None


@dataclass(frozen=True)
class End:
    """The command to exit: nothing is left to do."""


class Orders:
    """Polls from `start` on. Only the training thread may call `wait_for_command` and
    `interruptible`."""

    def __init__(self, agent: str, secret: Secret, process: int | None = None) -> None:
        self._agent, self._secret = agent, secret
        self._process = os.getpid() if process is None else process
        self._changed = threading.Condition()
        self._client = Client(agent, secret)
        self._held: Held | None = None
        self._seen = 0
        self._idle = False  # the training thread waits for orders
        self._closed = False
        self._over: float = 0  # generations up to this one have been ended
        self._next: Begin | End | None = None
        self._waking = threading.Lock()  # held while an interrupt runs
        self._wakes: Who | None = None  # the thread that runs one
        self._back = False  # who was to be woken waits for nothing but the end of an interrupt
        self._interrupt: Interrupt | None = None
        self._generation = 0  # that the interrupt is of
        self._mortal = False
        self._trains = Who.me()  # the thread that is woken
        self._trace = Trace(_TELL_SECONDS)
        self._thread = threading.Thread(target=self._run, name="orders", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop polling."""
        with self._changed:
            self._closed = True
            client = self._client
            self._changed.notify_all()
        client.abort()
        self._thread.join()

    # --- calls of the training thread -----------------------------------------------------
    def halted(self, generation: int) -> bool:
        """Return True if this generation has been ended."""
        return self._over >= generation

    def check(self, generation: int) -> None:
        """Raise HaltedError if this generation has been ended."""
        if self.halted(generation):
            raise HaltedError(f"generation {generation} was halted")

    def wait(self, generation: int, seconds: float) -> None:
        """Wait `wait_s` seconds; raise HaltedError at once if the generation is ended meanwhile."""
        with self._changed:
            self._changed.wait_for(lambda: self.halted(generation), seconds)
        self.check(generation)

    @contextmanager
    def interruptible(
        self, generation: int, interrupt: Interrupt, *, mortal: bool = False
    ) -> Iterator[None]:
        """Allow a halt of `generation` to call `interrupt` on the polling thread while this is
        open.

        When the block is left, no interrupt runs any more. exits_if_stuck: if nothing can wake the
        thread, its process exits. Raises HaltedError if there was a halt before.
        """
        with self._waking:
            self.check(generation)
            self._mortal, self._back = mortal, False
            self._generation, self._interrupt = generation, interrupt
            self._trains = Who.me()
        try:
            yield
        finally:
            self._back = True
            with self._waking:
                self._interrupt = None

    def next(self, held: Held | None) -> Begin | End:
        """Report the state that this process holds, and wait for a command."""
        if held is not None:
            with self._changed:
                self._held = held
                client, self._client = self._client, Client(self._agent, self._secret)
            client.abort()  # the open question knows nothing of what is held
        with self._changed:
            self._idle = True
        self._trace.call_off()
        with self._changed:
            self._changed.wait_for(lambda: self._next is not None)
            orders, self._next, self._held = self._next, None, None
            self._idle = False
        assert orders is not None
        return orders

    # --- the other thread -----------------------------------------------------------------
    def _run(self) -> None:
        while not self._closed:
            with self._changed:
                client, held, seen = self._client, self._held, self._seen
            body = {"process": self._process, "seen": seen, "held": held and asdict(held)}
            try:
                self._take(client.post(PATH, body, LONGEST_POLL + 10.0))
            except HoldfastError:
                self._pause(client)
            except Exception as error:  # our own bug, or an answer of another version
                logger.warning("commands: %s: %s", type(error).__name__, error)
                threading.Event().wait(_PAUSE)

    def _pause(self, asked: Client) -> None:
        """Pause before the same request is repeated; return at once if there is a new one."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._client is not asked, _PAUSE)

    def _take(self, answer: dict[str, Any]) -> None:
        number, told = int(answer["number"]), answer["orders"]
        with self._changed:
            if number <= self._seen:
                return
            orders = None if told is None else _parsed(told)
            self._seen = number
            over = _ends(told) if told is not None else 0
            self._over = max(self._over, over)
            if orders is not None:
                self._next = orders
            elif told is not None:
                self._next = None  # a halt takes back what was ordered before
            busy = not self._idle
            self._changed.notify_all()
        if told is None:
            return
        if orders is None and busy:
            self._trace.arm()
            if self._idle:  # it came back meanwhile
                self._trace.call_off()
        inside, woken = bool(told.get("inside", True)), threading.Event()
        threading.Thread(
            target=self._see_through, args=(over, inside, woken), name="halt", daemon=True
        ).start()
        self._wake(over, inside)
        woken.set()

    def _see_through(self, over: float, inside: bool, woken: threading.Event) -> None:
        """Escalate until the training thread returns: wait, then force the wake-up, then end the
        process.

        first_wakeup_done: set when the first wake-up call has returned. With many peers and few
        cores that takes long.
        """
        begun = time.monotonic()
        if inside:
            woken.wait(_VAIN_SECONDS)
            self._end_if_stuck(over, woken)
        threading.Event().wait(max(0.0, begun + _AGAIN_SECONDS - time.monotonic()))
        if not woken.is_set():
            while self._away(over) and not woken.wait(_PAUSE):
                self._end_if_stuck(over, woken)
            threading.Event().wait(_VAIN_SECONDS)  # to come back in
        if self._away(over):  # not by this thread: it may get stuck, and nobody would see it
            again = threading.Thread(target=self._wake, args=(over, True), name="wake", daemon=True)
            again.start()
            again.join(_VAIN_SECONDS)
        while self._may_be_stuck(over):
            self._end_if_stuck(over, woken)

    def _away(self, over: float) -> bool:
        """Return True if the training thread still blocks. Reads without the lock, as below."""
        return not self._back and self._interrupt is not None and self._generation <= over

    def _end_if_stuck(self, over: float, woken: threading.Event) -> None:
        """End the process if a thread is stuck.

        The waking thread may itself be stuck, within gloo. A training thread that is not yet woken
        sleeps with good reason, so it does not count.
        """
        if not self._may_be_stuck(over):
            return
        trains = self._trains if woken.is_set() else None
        threads = [each for each in (trains, self._wakes) if each is not None]
        if stuck(threads, _VAIN_SECONDS) and self._may_be_stuck(over):
            logger.error("stuck in a receive that cannot complete; exiting (lost its peers)")
            process_log.stop()
            os._exit(exit_codes.PEER_LOST)

    def _may_be_stuck(self, over: float) -> bool:
        """Return True if a thread may be stuck. Reads without the lock, which a stuck thread may
        hold."""
        return self._mortal and self._interrupt is not None and self._generation <= over

    def _wake(self, over: float, inside: bool) -> None:
        """Wake the training thread if it is in a generation up to `ended_up_to`; it may have left
        it long ago."""
        with self._waking:
            interrupt = self._interrupt
            if interrupt is None or not self._away(over):
                return
            self._wakes = Who.me()
            try:
                interrupt(inside)
            except Exception as error:  # what it woke may have ended under its hands
                logger.warning("commands: %s: %s", type(error).__name__, error)
            finally:
                self._wakes = None


def _ends(told: dict[str, Any]) -> float:
    """Return the newest generation that has ended when this command is given."""
    match told["kind"]:
        case "halt":
            return int(told["generation"])
        case "begin":
            return int(told["boot"]["generation"]) - 1
        case _:
            return inf


def _parsed(told: dict[str, Any]) -> Begin | End | None:
    """Parse a command; return None for a halt."""
    match told["kind"]:
        case "halt":
            return None
        case "end":
            return End()
        case "begin":
            before = told.get("before")
            came_from: Sequence[int | None] | None = told.get("came_from")
            return Begin(
                WorkerBoot.from_json(told["boot"]),
                None if came_from is None else tuple(came_from),
                before and Before(Topology.from_json(before["topology"]), int(before["step"])),
            )
        case kind:
            raise ValueError(f"orders of an unknown kind: {kind!r}")
