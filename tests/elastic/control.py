"""An agent's control server in a thread, without an agent: what workers talk to."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.elastic.rendezvous import Rendezvous
from holdfast.wire.auth import Verifier
from holdfast.wire.secret import Secret
from holdfast.wire.server import MAX_BODY, Guard, Handler, Listener, address_of, bind

SECRET = Secret(b"e" * 32)


class Control:
    """The rendezvous at /store, and `report` at /report when given."""

    def __init__(self, report: Handler | None, max_body: int) -> None:
        self._max_body = max_body
        self._bound = bind("127.0.0.1", 0, "cluster.interface")
        self.address = address_of(self._bound)
        self.generation = 1
        self._report = report
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def begin(self, generation: int) -> None:
        """Open the next generation, as an agent does."""
        done = threading.Event()

        def now() -> None:
            self.generation = generation
            self._rendezvous.begin(generation)
            done.set()

        self._loop.call_soon_threadsafe(now)
        assert done.wait(10)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._rendezvous = Rendezvous()
        self._rendezvous.begin(1)
        handlers: dict[str, Handler] = {"/store": self._rendezvous.handle}
        if self._report is not None:
            handlers["/report"] = self._report
        verifier = Verifier(SECRET, time.time)
        guard = Guard(handlers, SECRET, verifier, lambda: self.generation, max_body=self._max_body)
        self._listener = Listener(guard.application, self._bound)
        self._started.set()
        await self._listener.serve()


@contextmanager
def controlling(report: Handler | None = None, max_body: int = MAX_BODY) -> Iterator[Control]:
    control = Control(report, max_body)
    control._thread.start()
    assert control._started.wait(10)
    try:
        yield control
    finally:
        control._loop.call_soon_threadsafe(control._listener.close)
        control._thread.join(10)
