"""Heads and bodies over a real socket, cut anywhere, with more than one request in a piece."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from holdfast.wire.http.sync_connection import (
    HEAD_READ_BYTES,
    MAX_HEAD_BYTES,
    ClientResponse,
    HttpFormatError,
    SocketReader,
    SyncConnection,
    parse_request,
)
from tests.support.ranks import DEADLINE_S

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    left, right = socket.socketpair()
    with left, right:
        for end in (left, right):
            end.settimeout(DEADLINE_S)
        yield left, right


def _sent(sock: socket.socket, data: bytes, piece: int) -> threading.Thread:
    """From a thread of its own, in pieces, and then no more."""

    def work() -> None:
        with suppress(OSError):
            for at in range(0, len(data), piece):
                sock.sendall(data[at : at + piece])
            sock.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("piece", [1, 7, 100_000])
def test_requests_follow_each_other_however_they_are_cut(pair: Pair, piece: int) -> None:
    body = bytes(range(256)) * (3 * HEAD_READ_BYTES // 256)
    one = b"POST /offer?x=1 HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    two = b"GET /range HTTP/1.1\r\nHost: a\r\nX: 1\r\nx: 2\r\nconnection: close\r\n\r\n"
    thread = _sent(pair[0], one + two, piece)
    incoming = SocketReader(pair[1])
    first = parse_request(incoming.read_head())
    assert first == (
        "POST",
        "/offer?x=1",
        {"host": "a", "content-length": str(len(body))},
        frozenset(),
        True,
    )
    half, rest = bytearray(1000), len(body) - 1000
    view = memoryview(half)
    while view:
        view = view[incoming.readinto(view) :]
    assert bytes(half) + incoming.read(rest) == body
    assert parse_request(incoming.read_head()) == (
        "GET",
        "/range",
        {"host": "a", "x": "1", "connection": "close"},
        frozenset({"x"}),
        False,
    )
    assert incoming.read_head() == b""
    thread.join(DEADLINE_S)


@pytest.mark.parametrize("piece", [1000, 1 << 20])
@pytest.mark.parametrize("end", [b"", b"\r\n\r\n"])
def test_a_head_has_a_bound(pair: Pair, piece: int, end: bytes) -> None:
    _sent(pair[0], b"GET / HTTP/1.1\r\nx: " + b"x" * MAX_HEAD_BYTES + end, piece)
    with pytest.raises(HttpFormatError, match="too long"):
        SocketReader(pair[1]).read_head()


def test_what_breaks_off_is_said(pair: Pair) -> None:
    thread = _sent(pair[0], b"GET / HTTP/1.1\r\n\r\nHTTP", 100)
    incoming = SocketReader(pair[1])
    incoming.read_head()
    thread.join(DEADLINE_S)
    with pytest.raises(HttpFormatError, match="4 of 5 bytes"):
        incoming.read(5)
    left, right = socket.socketpair()
    with right:
        left.sendall(b"GET / HT")
        left.close()
        with pytest.raises(HttpFormatError, match="broke off"):
            SocketReader(right).read_head()


@pytest.mark.parametrize(
    "head",
    [
        b"\r\n\r\n",
        b"hello\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET / HTTP/1.1\r\na: b\r\n c\r\n\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: 99999999999999999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
    ],
)
def test_what_is_no_request_is_none(head: bytes) -> None:
    with pytest.raises(ValueError, match="no request in HTTP"):
        parse_request(head)


@pytest.mark.parametrize(
    "head",
    [
        b"\r\n\r\n",
        b"SSH-2.0-x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: " + b"0" * 5000 + b"\r\n\r\n",
    ],
)
def test_what_is_no_answer_is_none(pair: Pair, head: bytes) -> None:
    with pytest.raises(HttpFormatError):
        ClientResponse(SocketReader(pair[1]), head)


def test_an_answer_ends_where_it_says(pair: Pair) -> None:
    """What follows belongs to the next one."""
    said = b"HTTP/1.1 404 Not Found\r\ncontent-length: 3\r\nHoldfast-Hmac: x\r\n\r\nabc"
    _sent(pair[0], said + said, 10)
    incoming = SocketReader(pair[1])
    for _ in range(2):
        answer = ClientResponse(incoming, incoming.read_head())
        assert (answer.status, answer.length, answer.keeps_alive) == (404, 3, True)
        assert (answer.header("holdfast-hmac"), answer.header("missing")) == ("x", "")
        with pytest.raises(HttpFormatError, match="too long"):
            answer.read(2)
        out = bytearray(10)
        at = 0
        while answer.bytes_left:
            at += answer.readinto(memoryview(out)[at:])
        assert bytes(out[:at]) == b"abc"


def test_a_link_asks_again_and_says_when_it_was_cut() -> None:
    """A body that is large goes apart from its head; one end closes without an answer."""
    heads: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(DEADLINE_S)

        def answering() -> None:
            connection, _ = server.accept()
            with connection:
                connection.settimeout(DEADLINE_S)
                incoming = SocketReader(connection)
                for _ in range(3):
                    heads.append(incoming.read_head())
                    length = parse_request(heads[-1]).headers.get("content-length", "0")
                    body = incoming.read(int(length))
                    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body)
                    connection.sendall(head + body)
                incoming.read_head()

        thread = threading.Thread(target=answering, daemon=True)
        thread.start()
        host, port = server.getsockname()
        link = SyncConnection(host, port, DEADLINE_S)
        for method, body in (("GET", b""), ("POST", b""), ("POST", bytes(range(256)) * 1000)):
            answer = link.request(method, "/a?b=c", {"x-y": "z"}, body)
            assert (answer.status, answer.read(1 << 20)) == (200, body)
        with pytest.raises(ConnectionResetError, match="without an answer"):
            link.request("GET", "/", {})
        link.close()
        thread.join(DEADLINE_S)
    assert heads[0] == f"GET /a?b=c HTTP/1.1\r\nhost: {host}:{port}\r\nx-y: z\r\n\r\n".encode()
    assert b"content-length: 0\r\n" in heads[1], "a POST says so"
