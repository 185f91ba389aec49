"""Heads and bodies over a real socket, cut anywhere, with more than one request in a piece."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from holdfast.wire.http.sync_connection import (
    MAX_HEAD_BYTES,
    ClientResponse,
    HttpFormatError,
    SocketReader,
    SyncConnection,
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
                    length = re.search(rb"content-length: (\d+)", heads[-1])
                    body = incoming.read(int(length[1]) if length else 0)
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
