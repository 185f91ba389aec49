"""One HTTP connection to a listener of ours, on httptools' parser.

An `Application` sees the head of a request once it is complete, and decides at once. It returns an
answer, and no byte of a body is kept; or it returns the reader of the body. Requests of one
connection are answered in their order, however many have been sent. Input that is no HTTP, has a
head that is too long, or stops in the midst of a body, ends the connection.

A control request costs a third of what a general server and framework take for it. That cost
decides how many agents one coordinator can lead (docs/log/measurements.md, "Scale").
"""

from __future__ import annotations

import asyncio
import http
import os
import select
import socket
import ssl
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from contextlib import suppress
from typing import NamedTuple, Protocol

import httptools

from holdfast.wire.http.connection_limits import ConnectionLimiter
from holdfast.wire.http.head_fields import HeadFields
from holdfast.wire.http.refusals import RefusalReason
from holdfast.wire.http.sync_connection import end_both_ways

MAX_HEAD_BYTES = 16 << 10
"""A request's head at most; ours have less than one KiB."""
BODY_TIMEOUT_S = 60.0
"""A body is there by then, or not read any longer."""
IDLE_TIMEOUT_S = 3600.0
"""Seconds after which an unused connection is closed."""
MAX_QUEUED_REQUESTS = 8
"""Requests that were sent before the answers to earlier ones, until no more are read."""


class RequestHead(NamedTuple):
    """What a request's head says. `headers` by their names in small letters; of one that comes
    several times the first, and its name is in `repeated`."""

    method: bytes
    target: bytes
    headers: dict[str, str]
    repeated: frozenset[str]


SendFile = Callable[[int, int, int], None]
"""Sends bytes of a file: its descriptor, where they begin, how many. Raises OSError."""


class FileBody(NamedTuple):
    """A body that leaves from files."""

    length: int
    send: Callable[[SendFile], bool]  # sends all of it; False: the bytes were not the right ones
    threads: Executor  # where `send` is called


class HttpResponse(NamedTuple):
    status: int
    body: bytes | FileBody = b""
    headers: bytes = b""
    """Complete lines."""
    close: bool = False


BodyHandler = Callable[[bytes], Awaitable[HttpResponse]]


class Application(Protocol):
    limiter: ConnectionLimiter
    tls: ssl.SSLContext | None
    """Settings of TLS; None: the listener speaks plain HTTP."""

    def admit(self, head: RequestHead) -> HttpResponse | BodyHandler:
        """Return the answer if the head is enough for it. Otherwise return the reader of the body,
        of as many bytes as the head says: its sender has proven that it may stay. Does not
        raise."""
        ...


class HttpConnection(asyncio.Protocol):
    """Made for each connection; lives in one event loop."""

    def __init__(self, application: Application, connections: set[HttpConnection]) -> None:
        self._application = application
        self._limiter = application.limiter
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._proof_timer: asyncio.TimerHandle | None = None
        self._body_timer: asyncio.TimerHandle | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._last_used = self._loop.time()
        self._queue: deque[tuple[HttpResponse | BodyHandler, bytes, bool]] = deque()
        self.task: asyncio.Task[None] | None = None
        self._drained: asyncio.Future[None] | None = None
        self._file_socket: socket.socket | None = None  # what a FileBody is being sent on
        self._is_closing = False  # nothing more is taken in
        self._closes_after_queue = False  # closed after what is due
        self._in_head, self._unparsed = True, 0
        self._reset_request()

    def _reset_request(self) -> None:
        self._fields = HeadFields()
        self._reader: BodyHandler | None = None
        self._body = bytearray()

    # --- of asyncio -------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(0)  # so what is drained has left
        self._connections.add(self)
        self._proof_timer = self._loop.call_later(
            self._limiter.proof_timeout_s, self._on_proof_timeout
        )
        self._idle_timer = self._loop.call_later(IDLE_TIMEOUT_S, self._on_idle_timeout)
        self._limiter.add(self, self._loop.time())

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_closing = True
        self._leave_limiter()
        for timer in (self._body_timer, self._idle_timer):
            if timer is not None:
                timer.cancel()
        self._queue.clear()
        self.resume_writing()
        self._connections.discard(self)

    def data_received(self, data: bytes) -> None:
        if self._is_closing:
            return
        self._last_used = self._loop.time()
        self._unparsed += len(data) if self._in_head else 0
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._refuse_malformed()
            return
        if self._in_head and self._unparsed > MAX_HEAD_BYTES:
            self._refuse_malformed()
        if self._reader is not None and self._body_timer is None:
            self._body_timer = self._loop.call_later(BODY_TIMEOUT_S, self._on_body_timeout)

    def eof_received(self) -> bool:
        """The other end has no more to say, and may still listen."""
        if self._in_head and self._unparsed:
            self.count_refusal("not ours")
        self._is_closing = self._closes_after_queue = True
        return self.task is not None

    def pause_writing(self) -> None:
        if self._drained is None:
            self._drained = self._loop.create_future()

    def resume_writing(self) -> None:
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        self._drained = None

    # --- of the parser ----------------------------------------------------------------------
    def on_message_begin(self) -> None:
        self._reset_request()

    def on_url(self, url: bytes) -> None:
        self._fields.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields.on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head, self._unparsed = False, 0
        if self._is_closing:
            return
        found = self._fields
        if found.size > MAX_HEAD_BYTES:
            self._refuse_malformed()
            return
        method = self._parser.get_method()
        head = RequestHead(method, found.target, found.headers, frozenset(found.repeated))
        admitted = self._application.admit(head)
        if isinstance(admitted, HttpResponse):
            self._enqueue(admitted, b"")
        else:
            self._leave_limiter()
            self._reader = admitted

    def on_body(self, body: bytes) -> None:
        if self._reader is not None:
            self._body += body

    def on_message_complete(self) -> None:
        self._in_head = True
        if self._limiter.needs_no_proof and self._proof_timer is not None:  # it may ask again
            self._proof_timer.cancel()
            self._proof_timer = self._loop.call_later(
                self._limiter.proof_timeout_s, self._on_proof_timeout
            )
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None
        if self._reader is not None and not self._is_closing:
            reader, self._reader = self._reader, None
            self._enqueue(reader, bytes(self._body))

    # --- answering --------------------------------------------------------------------------
    def _enqueue(self, item: HttpResponse | BodyHandler, body: bytes) -> None:
        keep = self._parser.should_keep_alive()
        if isinstance(item, HttpResponse):
            keep = keep and not item.close
        self._is_closing = self._is_closing or not keep
        if self.task is None and isinstance(item, HttpResponse):
            self._write(item, keep)
            return
        self._queue.append((item, body, keep))
        if self.task is None:
            self.task = self._loop.create_task(self._answer_queue())
        elif len(self._queue) == MAX_QUEUED_REQUESTS:
            self._transport.pause_reading()

    async def _answer_queue(self) -> None:
        """Answers what is due, in order."""
        try:
            while self._queue:
                what, body, keep = self._queue.popleft()
                answer = what if isinstance(what, HttpResponse) else await what(body)
                keep = keep and not answer.close
                self._write(answer, keep)
                if self._drained is not None:
                    await self._drained
                if isinstance(answer.body, FileBody):
                    await self._send_files(answer.body, keep)
            if self._closes_after_queue:
                self._transport.close()
        except OSError:  # of a body from files: the other end has closed
            self._transport.abort()
        except BaseException:
            self._transport.abort()
            raise
        finally:
            self.task = None
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def _write(self, answer: HttpResponse, keep: bool) -> None:
        if self._transport.is_closing():
            return
        close = b"" if keep else b"connection: close\r\n"
        body = b"" if isinstance(answer.body, FileBody) else answer.body
        length = answer.body.length if isinstance(answer.body, FileBody) else len(body)
        self._transport.write(
            b"HTTP/1.1 %b\r\n%b%bcontent-length: %d\r\n\r\n%b"
            % (_STATUS_LINES[answer.status], answer.headers, close, length, body)
        )
        if not keep and not isinstance(answer.body, FileBody):
            self._finish()

    def _finish(self) -> None:
        self._is_closing = True
        self._queue.clear()
        self._transport.close()

    async def _send_files(self, body: FileBody, keep: bool) -> None:
        """Send a body past the transport, on a thread: it has written the head and reads nothing
        meanwhile. Raises OSError."""
        if self._transport.is_closing():
            return
        self._transport.pause_reading()
        sock = self._file_socket = self._transport.get_extra_info("socket").dup()
        sender = FileSender(sock, self._transport.get_extra_info("encrypt"))

        def send() -> bool:
            with sock:  # closed here, so that no other connection gets its number meanwhile
                return body.send(sender.send)

        is_right = await self._loop.run_in_executor(body.threads, send)
        self._file_socket = None
        if not is_right:
            self._transport.abort()
        elif not keep:
            self._finish()

    def count_refusal(self, reason: RefusalReason) -> None:
        self._limiter.refusals.count(self._limiter.listener, reason)

    def _refuse(self, reason: RefusalReason) -> None:
        self.count_refusal(reason)
        self._is_closing, self._reader = True, None
        if self.task is not None or self._queue:  # in the midst of an answer
            self._transport.abort()
        else:
            self._write(HttpResponse(400), False)

    def _refuse_malformed(self) -> None:
        if not self._is_closing:
            self._refuse("not ours")

    def _on_body_timeout(self) -> None:
        if not self._is_closing:
            self._refuse("slow")

    # --- ends -------------------------------------------------------------------------------
    def close_gracefully(self) -> None:
        """Take nothing more in; close after what is being answered."""
        self._is_closing = self._closes_after_queue = True
        if self.task is None:
            self._transport.close()

    def cut(self) -> None:
        self._leave_limiter()
        self._is_closing = True
        if self._file_socket is not None:
            with suppress(OSError):
                end_both_ways(self._file_socket)
        self._transport.abort()

    def abort_and_cancel(self) -> None:
        """Cut, and what was being answered is given up."""
        self.cut()
        if self.task is not None:
            self.task.cancel()

    def _on_proof_timeout(self) -> None:
        self._limiter.refusals.count(self._limiter.listener, "slow")
        self.cut()

    def _on_idle_timeout(self) -> None:
        left = self._last_used + IDLE_TIMEOUT_S - self._loop.time()
        if left > 0 or self.task is not None:
            self._idle_timer = self._loop.call_later(max(left, 1.0), self._on_idle_timeout)
        else:
            self.close_gracefully()

    def _leave_limiter(self) -> None:
        """It has proven itself, or is no more."""
        self._limiter.remove(self)
        if self._proof_timer is not None:
            self._proof_timer.cancel()
            self._proof_timer = None


def _status_line(status: http.HTTPStatus) -> bytes:
    return f"{status.value} {status.phrase}".encode()


_STATUS_LINES = {status.value: _status_line(status) for status in http.HTTPStatus}


# Bytes of files over one connection, by a thread that waits.
#
# sendfile(2) moves them from the memory of the file to the socket. TLS has no such way: a piece
# is read, encrypted and sent.

STALLED_RECEIVER_TIMEOUT_S = 20.0
"""A receiver that takes nothing for so long is given up."""
ENCRYPTED_PIECE_BYTES = 256 << 10
"""Bytes that are copied and encrypted at a time; they stay in the processor's cache."""


class FileSender:
    """Sends on a socket that does not block."""

    def __init__(
        self, sock: socket.socket, encrypt: Callable[[memoryview], bytes] | None = None
    ) -> None:
        """encrypt: returns what TLS makes of some bytes; None: they leave as they are."""
        self._sock, self._encrypt = sock, encrypt
        self._poll = select.poll()
        self._poll.register(sock, select.POLLOUT)
        size = 0 if encrypt is None else ENCRYPTED_PIECE_BYTES
        self._buffer = memoryview(bytearray(size))

    def send(self, fd: int, offset: int, count: int) -> None:
        """Send bytes of a file. Raises OSError when the other end has closed, or takes nothing for
        STALLED_RECEIVER_TIMEOUT_S."""
        end = offset + count
        while offset < end:
            if self._encrypt is None:
                sock, left = self._sock.fileno(), end - offset
                moved = self._when_ready(os.sendfile, sock, fd, offset, left)
            elif moved := os.preadv(fd, [self._buffer[: end - offset]], offset):
                encrypted = memoryview(self._encrypt(self._buffer[:moved]))
                while encrypted:
                    encrypted = encrypted[self._when_ready(self._sock.send, encrypted) :]
            if not moved:
                raise ConnectionError("the file is shorter than it should be")
            offset += moved

    def _when_ready(self, send: Callable[..., int], *arguments: object) -> int:
        """Return how many bytes left, once the socket takes any."""
        while True:
            try:
                return send(*arguments)
            except BlockingIOError:
                if not self._poll.poll(STALLED_RECEIVER_TIMEOUT_S * 1000):
                    raise TimeoutError("the receiver takes nothing") from None
