"""What a worker is told to do, in a question to its agent that stays open.

One thread asks, again and again. `begin` and `end` wait for the training thread, which fetches them
when it has stopped (`next`); `halt` does not wait: it is carried out on this thread, which wakes
the other one from whatever it blocks in. What is told is remembered as a generation ("all up to
this one are over"), so nothing has to be reset when the next one begins, and a halt that comes late
is one of the past. Who cannot be woken (`elastic/worker/stuck_threads.py`) ends with its process.

An agent out of reach is asked again: when it is gone for good, the lifeline ends this process.
"""

from __future__ import annotations

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
from holdfast.wire.http.client import Client
from holdfast.wire.secret import Secret

PATH = "/orders"
_AGAIN_SECONDS = 2.0
"""Who has not come back from where it was woken after so long is woken once more, by all means."""
_VAIN_SECONDS = 1.0
"""Who stands still for so long after all connections were closed waits in vain."""
_TELL_SECONDS = 5.0
"""Whose process has not come back after so long writes down where its threads are: it is killed
after `elastic.node.node_runner.HOLD_SECONDS` and three of its steps, and nobody could say why."""
_PAUSE = 0.1  # seconds before an agent that did not answer is asked again

Interrupt = Callable[[bool], None]
"""Wakes the training thread, wherever it blocks: between replicas, and with True inside its own.
Called a second time when that was not enough."""


class HaltedError(HoldfastError):
    """This generation is over: the training thread was told so between two operations."""


@dataclass(frozen=True)
class Held:
    """What a worker that has stopped says of itself: see docs/elastic.md. state: generation and
    rank whose boxes it holds, where it holds any. bad: `policy.recovery.survivors.BadStep` as
    JSON."""

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
    """What a newcomer is told of the generation whose state it is sent."""

    topology: Topology
    step: int


@dataclass(frozen=True)
class Begin:
    """Take part in the boot's generation. came_from: by rank, which rank of `before` it was;
    None as a whole: everybody reads what `boot.restore_key` names."""

    boot: WorkerBoot
    came_from: tuple[int | None, ...] | None = None
    before: Before | None = None


@dataclass(frozen=True)
class End:
    """Nothing is left to do."""


class Orders:
    """Asks from `start` on. `next` and `interruptible` belong to the training thread."""

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
        """Ask no more."""
        with self._changed:
            self._closed = True
            client = self._client
            self._changed.notify_all()
        client.abort()
        self._thread.join()

    # --- what the training thread asks ----------------------------------------------------
    def halted(self, generation: int) -> bool:
        """Whether this generation has been ended."""
        return self._over >= generation

    def check(self, generation: int) -> None:
        """Raises HaltedError when it has been."""
        if self.halted(generation):
            raise HaltedError(f"generation {generation} was halted")

    def wait(self, generation: int, seconds: float) -> None:
        """Let `seconds` pass, or raise HaltedError as soon as the generation is ended."""
        with self._changed:
            self._changed.wait_for(lambda: self.halted(generation), seconds)
        self.check(generation)

    @contextmanager
    def interruptible(
        self, generation: int, interrupt: Interrupt, *, mortal: bool = False
    ) -> Iterator[None]:
        """While this is open, a halt of `generation` calls `interrupt` on the other thread. When it
        is left, none is running any more. mortal: who can be woken by nothing ends with its
        process. Raises HaltedError when there was a halt before."""
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
        """Say what this process holds, and wait for orders."""
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
                print(f"orders: {type(error).__name__}: {error}", flush=True)
                threading.Event().wait(_PAUSE)

    def _pause(self, asked: Client) -> None:
        """A new question is asked at once, the same one after a pause."""
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
        """Who was woken comes back by itself; or is woken by all means; or never comes. woken: the
        first attempt is over, which takes long where there are many peers and few cores."""
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
        """Whether who was to be woken has not come back. Asks without the lock, as below."""
        return not self._back and self._interrupt is not None and self._generation <= over

    def _end_if_stuck(self, over: float, woken: threading.Event) -> None:
        """It may be the thread that wakes the other which is stuck, within gloo. Who is still to be
        woken sleeps with good reason."""
        if not self._may_be_stuck(over):
            return
        trains = self._trains if woken.is_set() else None
        threads = [each for each in (trains, self._wakes) if each is not None]
        if stuck(threads, _VAIN_SECONDS) and self._may_be_stuck(over):
            print("waits for a message that never comes whole: ends", flush=True)
            os._exit(exit_codes.PEER_LOST)

    def _may_be_stuck(self, over: float) -> bool:
        """Asks without the lock: who waits in vain may hold it."""
        return self._mortal and self._interrupt is not None and self._generation <= over

    def _wake(self, over: float, inside: bool) -> None:
        """Wake who is in a generation up to `over`; it may have left it long ago."""
        with self._waking:
            interrupt = self._interrupt
            if interrupt is None or not self._away(over):
                return
            self._wakes = Who.me()
            try:
                interrupt(inside)
            except Exception as error:  # what it woke may have ended under its hands
                print(f"orders: {type(error).__name__}: {error}", flush=True)
            finally:
                self._wakes = None


def _ends(told: dict[str, Any]) -> float:
    """The newest generation that is over when these orders are given."""
    match told["kind"]:
        case "halt":
            return int(told["generation"])
        case "begin":
            return int(told["boot"]["generation"]) - 1
        case _:
            return inf


def _parsed(told: dict[str, Any]) -> Begin | End | None:
    """None for a halt."""
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
