"""How refused requests are counted and told, and when a connection of a stranger ends."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain, repeat
from typing import Any

import pytest

from holdfast.errors import RunFolderError
from holdfast.events import Record, RequestsRefused, from_json, to_json
from holdfast.report.live.metrics import RunMetrics
from holdfast.wire.http.auth import Verifier
from holdfast.wire.http.client import Client
from holdfast.wire.http.connection_limits import ConnectionLimiter
from holdfast.wire.http.refusals import CONTROL, MOVER, PEERS, Refusals, describe_refusals
from holdfast.wire.http.server import SignedApplication
from holdfast.wire.http.sockets import bind_listener
from holdfast.wire.secret import Secret
from tests.support.listener import listening
from tests.support.ranks import wait_until

SECRET = Secret(b"c" * 32)


def test_a_thousand_refusals_are_told_in_two_events() -> None:
    told: list[RequestsRefused] = []
    refusals = Refusals(told.append, interval_s=3600.0)
    refusals.count(CONTROL, "no proof")
    wait_until(lambda: told, what="the first word of it")
    for _ in range(1000):
        refusals.count(CONTROL, "replayed", "POST /heartbeat")
        refusals.count(PEERS, "older generation")
    assert len(told) == 1
    refusals.close()  # says the rest, and does not wait for the minute's end
    assert [event.counts for event in told] == [
        {"control": {"no proof": 1}},
        {"control": {"replayed": 1000}, "peers": {"older generation": 1000}},
    ]
    assert refusals.totals()["control"] == {"no proof": 1, "replayed": 1000}
    line = "refused requests: 1000 at control (replayed, POST /heartbeat)"
    assert describe_refusals(told[1]) == line
    assert (
        describe_refusals(RequestsRefused({"peers": {"older generation": 4}})) is None
    )  # not a stranger's


def test_without_anybody_to_tell_they_are_counted() -> None:
    refusals = Refusals()
    refusals.count(MOVER, "no proof")
    refusals.close()
    assert refusals.totals() == {"mover": {"no proof": 1}}


def test_they_are_in_the_metrics_and_in_the_journals_form() -> None:
    record = Record(1, "agent", 0, 1.0, RequestsRefused({"control": {"replayed": 7}}, step=3))
    assert from_json(to_json(record)) == record
    metrics = RunMetrics("demo")
    for _ in range(2):
        metrics.observe(record)
    line = (
        'holdfast_refused_requests_total{listener="control",reason="replayed",run_id="demo"} 14.0'
    )
    assert line in metrics.render().decode()


@contextmanager
def serving(
    report: Callable[[RequestsRefused], None] | None = None, **doors: Any
) -> Iterator[tuple[str, Refusals]]:
    """A guarded listener with other limits; its address, and what it refuses."""
    refusals = Refusals(report)

    async def echo(generation: int, body: dict[str, Any]) -> dict[str, Any]:
        return body

    def make() -> SignedApplication:
        guard = SignedApplication(
            {"/echo": echo}, SECRET, Verifier(SECRET, time.time), lambda: 1, refusals=refusals
        )
        guard.limiter = ConnectionLimiter(CONTROL, refusals, **doors)
        return guard

    with listening(make) as address:
        yield address, refusals


def test_a_path_of_ours_is_named_and_a_strangers_is_not() -> None:
    told: list[RequestsRefused] = []
    with serving(told.append) as (address, _):
        for path in ("/echo", "/stranger"):
            with _connect(address) as connection:
                connection.sendall(f"POST {path} HTTP/1.1\r\ncontent-length: 0\r\n\r\n".encode())
                wait_until(lambda c=connection: _cut(c) or None, what=path)
        wait_until(lambda: told, what="the report")
    (event,) = told
    (reason, request) = event.requests["control"].popitem()
    assert event.counts["control"] == {reason: 1, "no such path": 1}
    assert request == "POST /echo"
    assert "stranger" not in str(event)


def _connect(address: str) -> socket.socket:
    host, port = address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), 60)


def _cut(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_whoever_proves_nothing_is_cut_in_time_and_others_stay() -> None:
    """One that is silent, and one that sends a byte of a head now and then."""
    with serving(proof_timeout_s=0.5) as (address, refusals), ExitStack() as stack:
        client = Client(address, SECRET, 1)
        stack.callback(client.close)
        assert client.post("/echo", {"x": 1}) == {"x": 1}
        (held,) = client._connections._idle_since
        silent = stack.enter_context(_connect(address))
        dripping = stack.enter_context(_connect(address))
        dripping.settimeout(0.05)
        head = chain(b"POST /echo HTTP/1.1\r\nx: ", repeat(ord("x")))

        def dripped() -> bool:
            try:
                dripping.send(bytes([next(head)]))
                return _cut(dripping)
            except TimeoutError:
                return False
            except (BrokenPipeError, ConnectionResetError):
                return True

        wait_until(dripped, what="the end of a connection that drips")
        assert _cut(silent)
        assert refusals.totals() == {"control": {"slow": 2}}
        assert client.post("/echo", {"x": 2}) == {"x": 2}
        assert list(client._connections._idle_since) == [held]


def test_the_oldest_stranger_makes_way() -> None:
    with (
        serving(proof_timeout_s=3600.0, max_unproven=5) as (address, refusals),
        ExitStack() as stack,
    ):
        client = Client(address, SECRET, 1)
        stack.callback(client.close)
        client.post("/echo", {})
        first = stack.enter_context(_connect(address))

        def crowded() -> bool:
            stack.enter_context(_connect(address))
            return bool(refusals.totals())

        wait_until(crowded, what="one that makes way")  # a second old, at least
        assert _cut(first)
        assert client.post("/echo", {"x": 1}) == {"x": 1}


def test_what_is_no_http_in_the_midst_of_an_answer_writes_no_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serving() as (address, refusals), _connect(address) as connection:
        connection.sendall(
            b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n" + b"\xff" * 9
        )
        while not _cut(connection):
            pass
        assert refusals.totals()["control"]["no proof"] == 1
        assert Client(address, SECRET, 1).post("/echo", {"x": 1}) == {"x": 1}
    assert "Traceback" not in caplog.text
    assert caplog.records == []


@pytest.mark.parametrize("host", ["", " ", "nowhere.invalid", "::ffff:1:2:3:4:5:6:7:8:9"])
def test_an_address_that_names_no_interface(host: str) -> None:
    with pytest.raises(RunFolderError, match=r"cluster\.interface"):
        bind_listener(host, 0, "cluster.interface")


def test_an_ipv6_address_is_that_alone() -> None:
    try:
        bound = bind_listener("::", 0, "cluster.interface")
    except RunFolderError:
        pytest.skip("no IPv6 here")
    with bound:
        port = bound.getsockname()[1]
        assert bound.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY) == 1
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 10)


FEW = """
import asyncio, json, resource, time
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
from holdfast.elastic.agent import health
from holdfast.wire.http.auth import Verifier
from holdfast.wire.secret import Secret
from holdfast.wire.http.sockets import address_of, bind_listener
from holdfast.wire.http.server import HttpListener, SignedApplication

async def echo(generation, body):
    return body

async def main():
    secret = Secret(b"c" * 32)
    guard = SignedApplication({"/echo": echo}, secret, Verifier(secret, time.time), lambda: 1)
    bound = [bind_listener("127.0.0.1", 0, "x"), bind_listener("127.0.0.1", 0, "x")]
    print(json.dumps([address_of(b) for b in bound]), flush=True)
    everybody = health.HealthApplication(lambda: {}, lambda: b"")
    await asyncio.gather(*(HttpListener(a, b).serve() for a, b in
                           zip((guard, everybody), bound)))

asyncio.run(main())
"""


def test_a_crowd_does_not_take_every_descriptor() -> None:
    """Many times more connections at both listeners than there are descriptors, all at once: our
    own is served, and nothing is written about it."""
    with ExitStack() as stack:
        process = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", FEW],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        stack.callback(process.kill)
        assert process.stdout is not None
        assert process.stderr is not None
        addresses = json.loads(process.stdout.readline())
        for _ in range(300):
            for address in addresses:
                stack.enter_context(_connect(address))
        client = Client(addresses[0], SECRET, 1)
        stack.callback(client.close)
        assert client.post("/echo", {"x": 1}, 60.0) == {"x": 1}
        process.kill()
        assert process.stderr.read() == ""
