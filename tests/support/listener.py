"""A listener of ours in a thread of its own, and ports that are free."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from holdfast.wire.http.connection import Application
from holdfast.wire.http.server import HttpListener
from holdfast.wire.http.sockets import address_of, bind_listener


@contextmanager
def listening(make: Callable[[], Application], port: int = 0) -> Iterator[str]:
    """Serve an application, which is made in its event loop; yield the address."""
    bound, started = bind_listener("127.0.0.1", port, "cluster.interface"), threading.Event()
    serving: list[tuple[asyncio.AbstractEventLoop, HttpListener]] = []

    async def serve() -> None:
        serving.append((asyncio.get_running_loop(), HttpListener(make(), bound)))
        started.set()
        await serving[0][1].serve()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert started.wait(120)
    try:
        yield address_of(bound)
    finally:
        loop, listener = serving[0]
        loop.call_soon_threadsafe(listener.close)
        thread.join(120)
        assert not thread.is_alive()


def free_ports(number: int) -> list[int]:
    """Return ports of loopback that nothing listened on a moment ago."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports
