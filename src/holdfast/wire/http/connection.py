"""One HTTP connection to a listener of ours, on httptools' parser.

An `Application` sees the head of a request once it is complete, and decides at once. It returns an
answer, and no byte of a body is kept; or it returns the reader of the body. Requests of one
connection are answered in their order, however many have been sent. Input that is no HTTP, has a
head that is too long, or stops in the midst of a body, ends the connection.

A control request costs a third of what a general server and framework take for it. That cost
decides how many agents one coordinator can lead (docs/measurements.md, "Scale").
"""

from __future__ import annotations

import asyncio
import http
from collections import deque
from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol

import httptools

from holdfast.wire.http.connection_limits import Doors
from holdfast.wire.http.head_fields import Fields
from holdfast.wire.http.refusals import Reason

HEAD_BYTES = 16 << 10
"""A request's head at most; ours have less than one KiB."""
BODY_SECONDS = 60.0
"""A body is there by then, or not read any longer."""
IDLE_SECONDS = 3600.0
"""Seconds after which an unused connection is closed."""
QUEUED = 8
"""Requests that were sent before the answers to earlier ones, until no more are read."""


class Head(NamedTuple):
    """What a request's head says. `headers` by their names in small letters; of one that comes
    several times the first, and its name is in `twice`."""

    method: bytes
    target: bytes
    headers: dict[str, str]
    twice: frozenset[str]


class Answer(NamedTuple):
    status: int
    body: bytes = b""
    headers: bytes = b""
    """Complete lines."""
    close: bool = False


Reader = Callable[[bytes], Awaitable[Answer]]


class Application(Protocol):
    doors: Doors

    def admit(self, head: Head) -> Answer | Reader:
        """Return the answer if the head is enough for it. Otherwise return the reader of the body,
        of as many bytes as the head says: its sender has proven that it may stay. Does not
        raise."""
        ...


class Connection(asyncio.Protocol):
    """Made for each connection; lives in one event loop."""

    def __init__(self, application: Application, among: set[Connection]) -> None:
        self._application, self._doors, self._among = application, application.doors, among
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._patience: asyncio.TimerHandle | None = None
        self._late_body: asyncio.TimerHandle | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._used = self._loop.time()
        self._due: deque[tuple[Answer | Reader, bytes, bool]] = deque()
        self.working: asyncio.Task[None] | None = None
        self._drained: asyncio.Future[None] | None = None
        self._over = False  # nothing more is taken in
        self._last = False  # closed after what is due
        self._in_head, self._unparsed = True, 0
        self._begin()

    def _begin(self) -> None:
        self._fields = Fields()
        self._reader: Reader | None = None
        self._body = bytearray()

    # --- of asyncio -------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._among.add(self)
        self._patience = self._loop.call_later(self._doors.patience, self._late)
        self._idle = self._loop.call_later(IDLE_SECONDS, self._unused)
        self._doors.enter(self, self._loop.time())

    def connection_lost(self, exc: Exception | None) -> None:
        self._over = True
        self._settled()
        for timer in (self._late_body, self._idle):
            if timer is not None:
                timer.cancel()
        self._due.clear()
        self.resume_writing()
        self._among.discard(self)

    def data_received(self, data: bytes) -> None:
        if self._over:
            return
        self._used = self._loop.time()
        self._unparsed += len(data) if self._in_head else 0
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._nonsense()
            return
        if self._in_head and self._unparsed > HEAD_BYTES:
            self._nonsense()
        if self._reader is not None and self._late_body is None:
            self._late_body = self._loop.call_later(BODY_SECONDS, self._slow_body)

    def eof_received(self) -> bool:
        """The other end has no more to say, and may still listen."""
        self._over = self._last = True
        return self.working is not None

    def pause_writing(self) -> None:
        if self._drained is None:
            self._drained = self._loop.create_future()

    def resume_writing(self) -> None:
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        self._drained = None

    # --- of the parser ----------------------------------------------------------------------
    def on_message_begin(self) -> None:
        self._begin()

    def on_url(self, url: bytes) -> None:
        self._fields.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields.on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head, self._unparsed = False, 0
        if self._over:
            return
        found = self._fields
        if found.size > HEAD_BYTES:
            self._nonsense()
            return
        method = self._parser.get_method()
        head = Head(method, found.target, found.headers, frozenset(found.twice))
        admitted = self._application.admit(head)
        if isinstance(admitted, Answer):
            self._put(admitted, b"")
        else:
            self._settled()
            self._reader = admitted

    def on_body(self, body: bytes) -> None:
        if self._reader is not None:
            self._body += body

    def on_message_complete(self) -> None:
        self._in_head = True
        if self._doors.open and self._patience is not None:  # it may ask again
            self._patience.cancel()
            self._patience = self._loop.call_later(self._doors.patience, self._late)
        if self._late_body is not None:
            self._late_body.cancel()
            self._late_body = None
        if self._reader is not None and not self._over:
            reader, self._reader = self._reader, None
            self._put(reader, bytes(self._body))

    # --- answering --------------------------------------------------------------------------
    def _put(self, what: Answer | Reader, body: bytes) -> None:
        keep = self._parser.should_keep_alive()
        if isinstance(what, Answer):
            keep = keep and not what.close
        self._over = self._over or not keep
        if self.working is None and isinstance(what, Answer):
            self._write(what, keep)
            return
        self._due.append((what, body, keep))
        if self.working is None:
            self.working = self._loop.create_task(self._work())
        elif len(self._due) == QUEUED:
            self._transport.pause_reading()

    async def _work(self) -> None:
        """Answers what is due, in order."""
        try:
            while self._due:
                what, body, keep = self._due.popleft()
                answer = what if isinstance(what, Answer) else await what(body)
                self._write(answer, keep and not answer.close)
                if self._drained is not None:
                    await self._drained
            if self._last:
                self._transport.close()
        except BaseException:
            self._transport.abort()
            raise
        finally:
            self.working = None
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def _write(self, answer: Answer, keep: bool) -> None:
        if self._transport.is_closing():
            return
        close = b"" if keep else b"connection: close\r\n"
        self._transport.write(
            b"HTTP/1.1 %b\r\n%b%bcontent-length: %d\r\n\r\n%b"
            % (_LINES[answer.status], answer.headers, close, len(answer.body), answer.body)
        )
        if not keep:
            self._over = True
            self._due.clear()
            self._transport.close()

    def _refuse(self, reason: Reason) -> None:
        self._doors.refusals.count(self._doors.listener, reason)
        self._over, self._reader = True, None
        if self.working is not None or self._due:  # in the midst of an answer
            self._transport.abort()
        else:
            self._write(Answer(400), False)

    def _nonsense(self) -> None:
        if not self._over:
            self._refuse("not ours")

    def _slow_body(self) -> None:
        if not self._over:
            self._refuse("slow")

    # --- ends -------------------------------------------------------------------------------
    def end(self) -> None:
        """Take nothing more in; close after what is being answered."""
        self._over = self._last = True
        if self.working is None:
            self._transport.close()

    def cut(self) -> None:
        self._settled()
        self._over = True
        self._transport.abort()

    def drop(self) -> None:
        """Cut, and what was being answered is given up."""
        self.cut()
        if self.working is not None:
            self.working.cancel()

    def _late(self) -> None:
        self._doors.refusals.count(self._doors.listener, "slow")
        self.cut()

    def _unused(self) -> None:
        left = self._used + IDLE_SECONDS - self._loop.time()
        if left > 0 or self.working is not None:
            self._idle = self._loop.call_later(max(left, 1.0), self._unused)
        else:
            self.end()

    def _settled(self) -> None:
        """It has proven itself, or is no more."""
        self._doors.leave(self)
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None


def _line(status: http.HTTPStatus) -> bytes:
    return f"{status.value} {status.phrase}".encode()


_LINES = {status.value: _line(status) for status in http.HTTPStatus}
