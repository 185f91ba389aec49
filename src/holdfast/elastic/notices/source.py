"""The common parts of notice sources: the warning, and small requests with a deadline.

A source is polled again and again by a thread of its own (`elastic/notices/poller.py`). A poll
returns a `TerminationWarning` or nothing. It may stay open until something changes: then the answer
comes within milliseconds, and no request is in vain.

Requests need no library, bypass every proxy, and end. Their time limit bounds the complete answer,
so that a server that sends a byte now and then cannot block a thread for ever. An invalid answer
raises `NoticeSourceError`, which is reported once and stops nothing.
"""

from __future__ import annotations

import http.client
import io
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from holdfast.core.json_parsing import parsed
from holdfast.errors import ConfigError

ANSWER_SECONDS = 5.0
ANSWER_BYTES = 2**20
SHORTEST = 30.0
"""Least notice that Google and Azure promise, in seconds, if an answer names none."""


class Meaning(StrEnum):
    """The fate of the machine."""

    GONE = "gone"  # it will not come back, nor what it held
    BACK = "back"  # its memory is lost, and what it can lose on disk; then it comes back
    PAUSE = "pause"  # it stands still for seconds and loses nothing
    RISK = "risk"  # it may go, and nobody says when


class Warned(NamedTuple):
    """A warning.

    seconds_left: time until it happens.
    must_leave: the machine will not come back, so the run must leave it.
    dedup_key: equal for two answers with the same content.
    """

    seconds: float
    leave: bool
    source: str
    key: str
    meaning: Meaning = Meaning.GONE


def warned(seconds: float, meaning: Meaning, source: str, key: str) -> Warned:
    return Warned(seconds, meaning is Meaning.GONE, source, key, meaning)


def worst(found: list[Warned]) -> Warned | None:
    """Return the worst warning: one that ends the machine comes first, then the soonest."""
    return min(found, key=lambda w: (not w.leave, w.seconds), default=None)


class SourceError(Exception):
    """The service did not answer, or not in a valid form; the poller tries again."""


class Source:
    """A source that knows whether this machine is about to end."""

    told = ""
    """One line for the start, if the choice of this source needs one."""

    @property
    def parts(self) -> tuple[Source, ...]:
        """Return the sources of which each gets a thread of its own."""
        return (self,)

    def ask(self) -> Warned | None:
        """Return the worst present warning; may block until something changes, half a minute at
        most.

        Raises NoticeSourceError.
        """
        raise NotImplementedError

    def signals(self) -> Mapping[int, Callable[[], None]]:
        """Return the functions to call, in the event loop, when this process gets a signal."""
        return {}

    def acknowledge(self) -> None:
        """Notify the service that the run has left this machine, if it waits for that. Raises
        NoticeSourceError."""

    def close(self) -> None:
        """Release all resources: no poll follows."""


class Several(Source):
    """Several sources as one."""

    def __init__(self, sources: tuple[Source, ...], told: str = "") -> None:
        self._sources = sources
        self.told = told

    @property
    def parts(self) -> tuple[Source, ...]:
        return tuple(part for source in self._sources for part in source.parts)

    def ask(self) -> Warned | None:
        return worst([found for part in self.parts if (found := part.ask()) is not None])


# --- requests -----------------------------------------------------------------------------------
class Answer(NamedTuple):
    status: int
    body: bytes
    etag: str = ""


class Service:
    """Small requests to one base address, each on a connection of its own."""

    def __init__(
        self, base: str, schemes: tuple[str, ...] = ("http",),
        tls: Callable[[], ssl.SSLContext] = ssl.create_default_context,
    ) -> None:  # fmt: skip
        """Check and split the base address.

        make_tls_context: called for each request by https, as certificates are renewed. Raises
        ConfigError for a base that is not scheme://host[:port][/path].
        """
        parts = urlsplit(base)
        try:
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            port = 0
        if parts.scheme not in schemes or not parts.hostname or not port:
            raise ConfigError(
                f"{base!r} is not the address of a metadata service",
                where="cluster.notices_at", remedy=f"{schemes[0]}://HOST:PORT",
            )  # fmt: skip
        self.base, self._host, self._port = base, parts.hostname, port
        self._path, self._tls = parts.path.rstrip("/"), tls
        self.secure = parts.scheme == "https"

    def request(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None = None,
        seconds: float = ANSWER_SECONDS,
    ) -> Answer:  # fmt: skip
        """Return the reply to a request. Raises NoticeSourceError if none comes in `timeout_s`."""
        with self.opened(method, path, headers, body, seconds) as answer:
            said = answer.read(ANSWER_BYTES)
            return Answer(answer.status, said, answer.headers.get("ETag", ""))

    @contextmanager
    def opened(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None,
        seconds: float,
    ) -> Iterator[http.client.HTTPResponse]:  # fmt: skip
        """Yield a reply to read from. Raises NoticeSourceError, also for an error while reading."""
        until = time.monotonic() + seconds
        try:
            with closing(self._connection(seconds)) as connection:
                connection.response_class = partial(_Timed, until=until)  # type: ignore[assignment]
                connection.request(method, self._path + path, body, dict(headers))
                with closing(connection.getresponse()) as answer:
                    yield answer
        # ValueError: a header that cannot be sent, such as a token with a line break in it.
        except (OSError, http.client.HTTPException, ValueError) as error:
            said = str(error) or type(error).__name__
            raise SourceError(f"{self.base} does not answer: {said}") from error

    def _connection(self, seconds: float) -> http.client.HTTPConnection:
        wait = min(seconds, ANSWER_SECONDS)  # for the connection alone
        if self.secure:
            return http.client.HTTPSConnection(
                self._host, self._port, timeout=wait, context=self._tls()
            )
        return http.client.HTTPConnection(self._host, self._port, timeout=wait)

    def get(self, path: str, headers: Mapping[str, str]) -> bytes | None:
        """Return the body; None for a 404. Raises NoticeSourceError for any other status."""
        answer = self.request("GET", path, headers)
        if answer.status == 404:
            return None
        return self.good(path, answer).body

    def good(self, path: str, answer: Answer) -> Answer:
        """Return the reply if its status is 200; raise NoticeSourceError otherwise."""
        if answer.status != 200:
            raise SourceError(f"{self.base}{path.partition('?')[0]} answered {answer.status}")
        return answer


class _Timed(http.client.HTTPResponse):
    """A reply whose last byte must arrive by `deadline`, however slow the stream."""

    def __init__(self, sock: socket.socket, *given: Any, until: float, **named: Any) -> None:
        super().__init__(sock, *given, **named)
        self.fp = io.BufferedReader(_Until(self.fp.detach(), sock, until))


class _Until(io.RawIOBase):
    def __init__(self, inner: io.RawIOBase, sock: socket.socket, until: float) -> None:
        self._inner, self._sock, self._until = inner, sock, until

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self._sock.settimeout(left)
        return self._inner.readinto(buffer)

    def close(self) -> None:
        self._inner.close()
        super().close()


# --- what answers say ---------------------------------------------------------------------------
def json_object(body: bytes) -> dict[str, Any]:
    try:
        found = parsed(body)
    except ValueError as error:
        raise SourceError(f"the answer is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise SourceError("the answer is not an object")
    return found


def seconds_until(
    at: str, parse: Callable[[str], datetime], clock: Callable[[], float], otherwise: float
) -> float:
    """Return the seconds until a time, at least one; `default_s` if no time is given."""
    if not at:
        return otherwise
    try:
        when = parse(at)
        if when.tzinfo is None:
            when = when.replace(tzinfo=UTC)
        return max(1.0, when.timestamp() - clock())
    except (ValueError, OverflowError, TypeError) as error:
        raise SourceError(f"{at!r} is not a time") from error
