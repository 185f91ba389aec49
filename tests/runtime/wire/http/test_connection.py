"""One connection to a listener: in what order it answers, and what ends it."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from holdfast.wire.http import connection
from holdfast.wire.http.connection import MAX_HEAD_BYTES, BodyHandler, HttpResponse, RequestHead
from holdfast.wire.http.connection_limits import ConnectionLimiter
from holdfast.wire.http.refusals import CONTROL, Refusals
from tests.support.attacker import place
from tests.support.listener import listening


class Echo:
    """Answers /at-once by the head alone; of all else, the body. A body "wait" is answered when
    another says "go"."""

    def __init__(self, refusals: Refusals) -> None:
        self.limiter = ConnectionLimiter(CONTROL, refusals)
        self.tls: ssl.SSLContext | None = None
        self.go = asyncio.Event()

    def admit(self, head: RequestHead) -> HttpResponse | BodyHandler:
        if head.target == b"/at-once":
            return HttpResponse(200, b"at once")
        return self._read

    async def _read(self, body: bytes) -> HttpResponse:
        if body == b"wait":
            await self.go.wait()
        if body == b"go":
            self.go.set()
        return HttpResponse(200, body)


@contextmanager
def serving() -> Iterator[tuple[tuple[str, int], Refusals]]:
    refusals = Refusals()
    with listening(lambda: Echo(refusals)) as address:
        yield place(address), refusals


def _post(body: bytes, more: bytes = b"") -> bytes:
    return b"POST / HTTP/1.1\r\n%bcontent-length: %d\r\n\r\n%b" % (more, len(body), body)


def _rest(asks: socket.socket) -> bytes:
    """All that comes until the other end closes."""
    found = b""
    asks.settimeout(60)
    try:
        while more := asks.recv(65536):
            found += more
    except ConnectionResetError:
        pass
    return found


def _bodies(answers: bytes) -> list[bytes]:
    return [part.partition(b"\r\n\r\n")[2] for part in answers.split(b"HTTP/1.1 200 OK\r\n")[1:]]


def test_requests_sent_together_are_answered_in_their_order() -> None:
    at_once = b"GET /at-once HTTP/1.1\r\n\r\n"
    with serving() as (at, _), socket.create_connection(at) as asks:
        asks.sendall(_post(b"wait") + at_once + b"".join(_post(b"%d" % n) for n in range(40)))
        with socket.create_connection(at) as other:
            other.sendall(_post(b"go", b"connection: close\r\n"))
            assert _bodies(_rest(other)) == [b"go"]
        asks.shutdown(socket.SHUT_WR)
        assert _bodies(_rest(asks)) == [b"wait", b"at once", *(b"%d" % n for n in range(40))]


def test_whoever_says_nothing_more_still_gets_its_answer() -> None:
    with serving() as (at, _), socket.create_connection(at) as asks:
        asks.sendall(_post(b"wait"))
        asks.shutdown(socket.SHUT_WR)
        with socket.create_connection(at) as other:
            other.sendall(_post(b"go"))
            assert _bodies(_rest(asks)) == [b"wait"]


def test_a_body_in_pieces() -> None:
    with serving() as (at, _), socket.create_connection(at) as asks:
        whole = _post(b"abc" * 9, b"connection: close\r\n")
        for n in range(len(whole)):
            asks.sendall(whole[n : n + 1])
        assert _bodies(_rest(asks)) == [b"abc" * 9]


@pytest.mark.parametrize("piece", [MAX_HEAD_BYTES * 2, 1000])
def test_a_head_that_is_too_long(piece: int) -> None:
    """In one piece, or in many: it is refused before its end."""
    head = b"POST / HTTP/1.1\r\n" + b"x: " + b"x" * 2 * MAX_HEAD_BYTES
    with serving() as (at, refusals), socket.create_connection(at) as asks:
        try:
            for n in range(0, len(head), piece):
                asks.sendall(head[n : n + piece])
        except (BrokenPipeError, ConnectionResetError):
            pass
        assert _rest(asks)[:12] in (b"", b"HTTP/1.1 400")
        assert refusals.totals() == {"control": {"not ours": 1}}


def test_many_short_headers_that_are_too_long_together() -> None:
    head = b"POST / HTTP/1.1\r\n" + b"x: y\r\n" * MAX_HEAD_BYTES + b"content-length: 0\r\n\r\n"
    with serving() as (at, refusals), socket.create_connection(at) as asks:
        with suppress(BrokenPipeError, ConnectionResetError):
            asks.sendall(head)
        assert _rest(asks)[:12] in (b"", b"HTTP/1.1 400")
        assert refusals.totals() == {"control": {"not ours": 1}}


def test_a_body_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "BODY_TIMEOUT_S", 0.05)
    with serving() as (at, refusals), socket.create_connection(at) as asks:
        asks.sendall(_post(b"x" * 100)[:-1])
        assert _rest(asks).startswith(b"HTTP/1.1 400")
        assert refusals.totals() == {"control": {"slow": 1}}


@pytest.mark.parametrize("more", [b"connection: upgrade\r\nupgrade: websocket\r\n", b""])
def test_what_is_to_become_another_protocol(more: bytes) -> None:
    request = _post(b"", more) if more else b"CONNECT x:1 HTTP/1.1\r\n\r\n"
    with serving() as (at, refusals), socket.create_connection(at) as asks:
        asks.sendall(request + b"\x00" * 100)
        _rest(asks)
        assert refusals.totals() == {"control": {"not ours": 1}}
