"""HTTP/1.1 over one socket, for a thread that waits: httptools parses heads, a body is read in
place.

The standard library's `http.client` and `http.server` parse each head as if it were an e-mail. That
took nearly half of a small request's cost (docs/log/measurements.md, "Cost of fault tolerance").
`connection` is the same for listeners in an event loop.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

import httptools

from holdfast.wire.http.auth import AuthError
from holdfast.wire.http.head_fields import HeadFields
from holdfast.wire.http.tls import explain, tls_errors

if TYPE_CHECKING:
    import ssl

MAX_HEAD_BYTES = 16 << 10
"""A head at most; ours have less than one KiB."""
HEAD_READ_BYTES = 4096
"""Bytes that are asked for while a head is incomplete: little of a body is copied twice."""
BODY_READ_BYTES = 1 << 20
"""Bytes of a body that are read at a time, if all of it is read."""
MAX_JOINED_BYTES = 64 << 10
"""A body of so many bytes at most leaves in one piece with its head."""
HEAD_END = b"\r\n\r\n"


class HttpFormatError(ConnectionError):
    """The other end does not speak HTTP, or not to the end."""


class SocketReader:
    """What comes over a socket: heads, and after each the bytes of its body."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffered = b""
        """Has come, and was not asked for yet."""

    def read_head(self) -> bytes:
        """Everything until an empty line, and that; b"" where the other end has no more to say.

        Raises HttpFormatError for a head that is too long or breaks off, TimeoutError, OSError.
        """
        found = self._buffered
        while HEAD_END not in found:
            if len(found) > MAX_HEAD_BYTES:
                raise HttpFormatError("the head is too long")
            more = self._sock.recv(HEAD_READ_BYTES)
            if not more:
                if found:
                    raise HttpFormatError("the head broke off")
                return b""
            found += more
        end = found.index(HEAD_END) + len(HEAD_END)
        if end > MAX_HEAD_BYTES:
            raise HttpFormatError("the head is too long")
        self._buffered = found[end:]
        return found[:end]

    def readinto(self, out: memoryview) -> int:
        """Bytes that were put into `out`; 0 where the other end has no more to say."""
        if not self._buffered:
            return self._sock.recv_into(out)
        count = min(len(out), len(self._buffered))
        out[:count] = self._buffered[:count]
        self._buffered = self._buffered[count:]
        return count

    def read(self, count: int) -> bytes:
        """Raises HttpFormatError where fewer come, TimeoutError, OSError."""
        if count <= len(self._buffered):
            found, self._buffered = self._buffered[:count], self._buffered[count:]
            return found
        pieces, self._buffered = [self._buffered], b""
        left = count - len(pieces[0])
        while left:  # what is only promised takes no room
            piece = self._sock.recv(min(left, BODY_READ_BYTES))
            if not piece:
                raise HttpFormatError(f"{count - left} of {count} bytes came")
            pieces.append(piece)
            left -= len(piece)
        return b"".join(pieces)


class ClientResponse:
    """The answer to one request: the head has been read, the caller reads the body."""

    def __init__(self, incoming: SocketReader, head: bytes) -> None:
        """Raises HttpFormatError for what is no answer, or does not say how long it is."""
        said = _HeadParser()
        parser = httptools.HttpResponseParser(said)
        try:
            parser.feed_data(head)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise HttpFormatError(f"no answer in HTTP: {error}") from error
        if not said.complete:
            raise HttpFormatError("no answer in HTTP: the head is not complete")
        length = said.headers.get("content-length", "")
        plain = length.isdecimal() and len(length) < 16  # a row of zeros can be as long as a head
        if not plain or "transfer-encoding" in said.headers:
            raise HttpFormatError("an answer that does not say how long it is")
        self._incoming = incoming
        self._headers = said.headers
        self.status: int = parser.get_status_code()
        self.length = self.bytes_left = int(length)
        version = parser.get_http_version()
        # Whether the connection stays open for another request; the parser has forgotten that by
        # now.
        options = said.headers.get("connection", "").lower().split(",")
        self.keeps_alive = version == "1.1" and "close" not in map(str.strip, options)

    def header(self, name: str) -> str:
        """By its name in small letters; "" where it is missing."""
        return self._headers.get(name, "")

    def readinto(self, out: memoryview) -> int:
        """Bytes of the body that were put into `out`; 0 where the other end broke off."""
        count = self._incoming.readinto(out[: self.bytes_left])
        self.bytes_left -= count
        return count

    def read(self, limit: int) -> bytes:
        """The rest of the body. Raises HttpFormatError for one of more than `limit` bytes, or one
        that breaks off."""
        if self.bytes_left > limit:
            raise HttpFormatError("the answer is too long")
        found = self._incoming.read(self.bytes_left)
        self.bytes_left = 0
        return found


class SyncConnection:
    """A connection that was opened from here. One request at a time."""

    def __init__(
        self, host: str, port: int, timeout: float, tls: ssl.SSLContext | None = None
    ) -> None:
        """Connect; `timeout` bounds that and every silence after it, in seconds. tls: speak TLS.

        Raises OSError, and AuthError if the other end has another certificate.
        """
        self.sock = socket.create_connection((host, port), timeout)
        # What leaves in two writes would wait for an acknowledgement of the first (Nagle's
        # algorithm against delayed ones: 40 ms).
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            self.sock = _encrypt(self.sock, tls, f"{host}:{port}")
        name = f"[{host}]" if ":" in host else host
        self._host = f"host: {name}:{port}\r\n"
        self._incoming = SocketReader(self.sock)
        self._answer: ClientResponse | None = None  # the last one

    @property
    def is_reusable(self) -> bool:
        """True if an answer has come and been read, and the other end takes another request."""
        return (answer := self._answer) is not None and answer.keeps_alive and not answer.bytes_left

    def request(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes = b""
    ) -> ClientResponse:
        """Send a request, and wait for the head of the answer, whose body is to be read before the
        next one. Raises ConnectionResetError where the other end closes without an answer,
        HttpFormatError, TimeoutError, OSError."""
        self._answer = None
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        if body or method == "POST":
            lines += f"content-length: {len(body)}\r\n"
        head = f"{method} {path} HTTP/1.1\r\n{self._host}{lines}\r\n".encode("latin-1")
        # A listener that refuses the head closes before the body has left, and has answered.
        with suppress(BrokenPipeError, ConnectionResetError, *tls_errors(self.sock)):
            if len(body) <= MAX_JOINED_BYTES:
                self.sock.sendall(head + body)
            else:
                self.sock.sendall(head)
                self.sock.sendall(body)
        found = self._incoming.read_head()
        if not found:
            raise ConnectionResetError("the connection was closed without an answer")
        self._answer = ClientResponse(self._incoming, found)
        return self._answer

    def close(self) -> None:
        self.sock.close()

    def abort(self) -> None:
        """Wake the thread that reads from it. Raises OSError if the connection has ended."""
        end_both_ways(self.sock)


def end_both_ways(sock: socket.socket) -> None:
    """End a connection, which another thread may read from. Raises OSError.

    The method of an `SSLSocket` would make that thread take encrypted bytes for plain ones."""
    socket.socket.shutdown(sock, socket.SHUT_RDWR)


def _encrypt(sock: socket.socket, tls: ssl.SSLContext, address: str) -> socket.socket:
    """Shake hands. Raises AuthError for another certificate, HttpFormatError if the other end
    speaks no TLS, ConnectionResetError if it closes, TimeoutError, OSError."""
    import ssl

    try:
        return tls.wrap_socket(sock)
    except ssl.SSLCertVerificationError:
        sock.close()
        raise AuthError(f"{address} does not accept this run's secret") from None
    except ssl.SSLEOFError as error:
        sock.close()
        raise ConnectionResetError("closed in the midst of a handshake") from error
    except ssl.SSLError as error:
        sock.close()
        raise HttpFormatError(explain(error)) from error
    except OSError:
        sock.close()
        raise


class _HeadParser(HeadFields):
    def __init__(self) -> None:
        super().__init__()
        self.complete = False

    def on_headers_complete(self) -> None:
        self.complete = True
