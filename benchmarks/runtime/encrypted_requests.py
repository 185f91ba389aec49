"""Cost of TLS for control: `python -m benchmarks.runtime.encrypted_requests [--requests 2000]`.

A real listener in a thread and a client in another, over loopback. CPU is that of both, in
microseconds for each request or connection.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from holdfast.wire.http.auth import Verifier
from holdfast.wire.http.client import Client
from holdfast.wire.http.server import HttpListener, SignedApplication
from holdfast.wire.http.sockets import address_of, bind_listener
from holdfast.wire.http.tls import with_tls
from holdfast.wire.secret import Secret

KEPT_OPEN, NEW = "a request, connection kept open", "a new client and its first request"


@contextmanager
def listening(secret: Secret) -> Iterator[str]:
    """The address of a listener that answers requests with their own body."""
    bound, loop = bind_listener("127.0.0.1", 0, "cluster.interface"), asyncio.new_event_loop()

    async def echo(generation: int, body: dict[str, Any]) -> dict[str, Any]:
        return body

    verifier = Verifier(secret, time.time)
    listener = HttpListener(SignedApplication({"/echo": echo}, secret, verifier, lambda: 1), bound)
    thread = threading.Thread(target=lambda: loop.run_until_complete(listener.serve()))
    thread.start()
    try:
        yield address_of(bound)
    finally:
        loop.call_soon_threadsafe(listener.close)
        thread.join()
        loop.close()


def cpu_us(work: Callable[[], object], times: int) -> float:
    """CPU of this process for one of several calls."""
    before = _cpu_s()
    for _ in range(times):
        work()
    return (_cpu_s() - before) / times * 1e6


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure(secret: Secret, count: int) -> dict[str, float]:
    body = {"x": "a" * 200}
    with listening(secret) as address:
        client = Client(address, secret, 1)
        client.post("/echo", body)

        def ask_anew() -> None:
            other = Client(address, secret, 1)
            other.post("/echo", body)
            other.close()

        found = {
            KEPT_OPEN: cpu_us(lambda: client.post("/echo", body), count),
            NEW: cpu_us(ask_anew, max(1, count // 10)),
        }
        client.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000)
    count = parser.parse_args().requests
    plain = Secret(b"benchmark" * 4)
    before, after = measure(plain, count), measure(with_tls(plain), count)
    print(f"{'CPU us, both ends':40s}{'plain':>9s}{'TLS':>9s}")
    for what in before:
        print(f"{what:40s}{before[what]:9.0f}{after[what]:9.0f}")


if __name__ == "__main__":
    main()
