"""Cost of TLS for control: `python -m benchmarks.runtime.encrypted_requests [--requests 2000]`.

A real listener in a thread and a client in another, over loopback. CPU is that of both, in
microseconds for each request or connection. "TLS alone" has no proofs in requests: what the run's
certificate would cost as the only lock.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from holdfast.core.json_parsing import parse_json
from holdfast.wire.http.auth import Verifier
from holdfast.wire.http.client import Client
from holdfast.wire.http.connection import BodyHandler, HttpResponse, RequestHead
from holdfast.wire.http.server import HttpListener, SignedApplication
from holdfast.wire.http.sockets import address_of, bind_listener
from holdfast.wire.http.sync_connection import SyncConnection
from holdfast.wire.http.tls import with_tls
from holdfast.wire.secret import Secret

KEPT_OPEN, NEW = "a request, connection kept open", "a new client and its first request"


class WithoutProofs(SignedApplication):
    """Takes every request that TLS lets through."""

    def admit(self, head: RequestHead) -> HttpResponse | BodyHandler:
        async def read(body: bytes) -> HttpResponse:
            content = json.dumps(parse_json(body), separators=(",", ":")).encode()
            return HttpResponse(200, content, b"content-type: application/json\r\n")

        return read if int(head.headers["holdfast-generation"]) == 1 else HttpResponse(409)


class ClientWithoutProofs:
    def __init__(self, address: str, secret: Secret, generation: int) -> None:
        host, _, port = address.rpartition(":")
        self._connection = SyncConnection(host, int(port), 10.0, secret.client_tls)
        self._headers = {"holdfast-generation": str(generation)}

    def post(self, path: str, body: dict[str, Any]) -> Any:
        content = json.dumps(body, separators=(",", ":")).encode()
        return parse_json(self._connection.request("POST", path, self._headers, content).read(9999))

    def close(self) -> None:
        self._connection.close()


@contextmanager
def listening(secret: Secret, application: type[SignedApplication]) -> Iterator[str]:
    """The address of a listener that answers requests with their own body."""
    bound, loop = bind_listener("127.0.0.1", 0, "cluster.interface"), asyncio.new_event_loop()

    async def echo(generation: int, body: dict[str, Any]) -> dict[str, Any]:
        return body

    verifier = Verifier(secret, time.time)
    listener = HttpListener(application({"/echo": echo}, secret, verifier, lambda: 1), bound)
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


def measure(secret: Secret, count: int, has_proofs: bool = True) -> dict[str, float]:
    body = {"x": "a" * 200}
    kind = Client if has_proofs else ClientWithoutProofs
    with listening(secret, SignedApplication if has_proofs else WithoutProofs) as address:
        client = kind(address, secret, 1)
        client.post("/echo", body)

        def ask_anew() -> None:
            other = kind(address, secret, 1)
            other.post("/echo", body)
            other.close()

        costs = {
            KEPT_OPEN: cpu_us(lambda: client.post("/echo", body), count),
            NEW: cpu_us(ask_anew, max(1, count // 10)),
        }
        client.close()
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000)
    count = parser.parse_args().requests
    plain = Secret(b"benchmark" * 4)
    columns = {
        "plain": measure(plain, count),
        "TLS": measure(with_tls(plain), count),
        "TLS alone": measure(with_tls(plain), count, has_proofs=False),
    }
    print(f"{'CPU us, both ends':40s}" + "".join(f"{name:>11s}" for name in columns))
    for what in (KEPT_OPEN, NEW):
        print(f"{what:40s}" + "".join(f"{costs[what]:11.0f}" for costs in columns.values()))


if __name__ == "__main__":
    main()
