"""An agent's control server in a thread, without an agent: what workers talk to."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from holdfast.elastic.coordinator.rendezvous import RendezvousStore
from holdfast.elastic.protocol.messages import handler_of
from holdfast.elastic.protocol.rendezvous_messages import StoreRequest
from holdfast.wire.http.auth import Verifier
from holdfast.wire.http.server import MAX_BODY_BYTES, Handler, SignedApplication
from holdfast.wire.secret import Secret
from tests.support.listener import listening

SECRET = Secret(b"e" * 32)


class Desk:
    """Serves commands to workers. Commands of a test, and the state that workers hold, are kept by
    process."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()
        self._orders: dict[int, tuple[int, dict[str, Any]]] = {}  # process -> number, orders
        self.held: dict[int, dict[str, Any]] = {}
        self.asked: set[int] = set()

    def give(self, process: int, orders: dict[str, Any]) -> None:
        """Order something; what the process held is forgotten with it, unless that is a halt."""
        number = self._orders.get(process, (0, {}))[0] + 1
        if orders["kind"] != "halt":
            self.held.pop(process, None)
        self._orders[process] = (number, orders)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._notify)

    async def handle(self, generation: int, body: dict[str, Any]) -> dict[str, Any]:
        self._loop = asyncio.get_running_loop()
        process, seen = int(body["process"]), int(body["seen"])
        self.asked.add(process)
        if body["held"] is not None and seen == self._orders.get(process, (0, {}))[0]:
            self.held[process] = body["held"]
        while self._orders.get(process, (0, {}))[0] <= seen:
            try:
                await asyncio.wait_for(self._changed.wait(), 5.0)
            except TimeoutError:
                return {"number": seen, "orders": None}
        number, orders = self._orders[process]
        return {"number": number, "orders": orders}

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class Control:
    """The rendezvous at /store, and what else is given at its path."""

    def __init__(self, report: Handler | None, max_body: int, desk: Desk | None = None) -> None:
        self._max_body, self._desk, self._report = max_body, desk, report
        self.address, self.generation = "", 1

    def begin(self, generation: int) -> None:
        """Open the next generation, as an agent does."""
        done = threading.Event()

        def now() -> None:
            self.generation = generation
            self._rendezvous.begin_generation(generation)
            done.set()

        self._loop.call_soon_threadsafe(now)
        assert done.wait(120)

    def make(self) -> SignedApplication:
        self._loop = asyncio.get_running_loop()
        self._rendezvous = RendezvousStore()
        self._rendezvous.begin_generation(1)
        rendezvous = handler_of(StoreRequest.from_json, self._rendezvous.handle_operation)
        handlers: dict[str, Handler] = {"/store": rendezvous}
        if self._report is not None:
            handlers["/report"] = self._report
        if self._desk is not None:
            handlers["/orders"] = self._desk.handle
        return SignedApplication(
            handlers,
            SECRET,
            Verifier(SECRET, time.time),
            lambda: self.generation,
            max_body_bytes=self._max_body,
            generationless_paths=frozenset({"/orders"}),
        )


@contextmanager
def controlling(
    report: Handler | None = None, max_body: int = MAX_BODY_BYTES, desk: Desk | None = None
) -> Iterator[Control]:
    control = Control(report, max_body, desk)
    with listening(control.make) as control.address:
        yield control
