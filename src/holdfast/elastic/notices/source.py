"""What every source of notices shares: the warning, and small requests with a deadline.

A source is one question, asked again and again by a thread of its own
(`elastic/notices/poller.py`); the answer is a `Warned` or nothing. A question may stay open until
something changes: then the answer comes within milliseconds, and nobody is asked in vain.

Requests need no library, go past every proxy, and end: `seconds` bounds the whole of an answer, so
that a server which sends a byte now and then holds nobody for ever. What answers nonsense raises
`SourceError`, which is said once and stops nothing.
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
"""Seconds that Google and Azure promise at least, where an answer names none."""


class Meaning(StrEnum):
    """What becomes of the machine."""

    GONE = "gone"  # it will not come back, nor what it held
    BACK = "back"  # its memory is lost, and what it can lose on disk; then it comes back
    PAUSE = "pause"  # it stands still for seconds and loses nothing
    RISK = "risk"  # it may go, and nobody says when


class Warned(NamedTuple):
    """seconds: until it happens. leave: the machine will not come back, so what runs on it has to
    go. key: equal for two answers that say the same."""

    seconds: float
    leave: bool
    source: str
    key: str
    meaning: Meaning = Meaning.GONE


def warned(seconds: float, meaning: Meaning, source: str, key: str) -> Warned:
    return Warned(seconds, meaning is Meaning.GONE, source, key, meaning)


def worst(found: list[Warned]) -> Warned | None:
    """What ends the machine comes before what does not, the soonest first."""
    return min(found, key=lambda w: (not w.leave, w.seconds), default=None)


class SourceError(Exception):
    """The service did not answer, or not in a way that can be understood; it is asked again."""


class Source:
    """One who can be asked whether this machine is about to go."""

    told = ""
    """One line for the start, where the choice of this source needs one."""

    @property
    def parts(self) -> tuple[Source, ...]:
        """Each is asked by a thread of its own."""
        return (self,)

    def ask(self) -> Warned | None:
        """The worst that is known now; may block until something changes, half a minute at most.
        Raises SourceError."""
        raise NotImplementedError

    def signals(self) -> Mapping[int, Callable[[], None]]:
        """What to call, in the event loop, when this process gets a signal."""
        return {}

    def acknowledge(self) -> None:
        """The run has left this machine: whoever waits for that may go on. Raises SourceError."""

    def close(self) -> None:
        """Nobody will ask again."""


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
        """`tls` is called for each request by https, as certificates are renewed.

        Raises ConfigError for a base that is not scheme://host[:port][/path].
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
        """Raises SourceError when nobody answers within `seconds`."""
        with self.opened(method, path, headers, body, seconds) as answer:
            said = answer.read(ANSWER_BYTES)
            return Answer(answer.status, said, answer.headers.get("ETag", ""))

    @contextmanager
    def opened(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None,
        seconds: float,
    ) -> Iterator[http.client.HTTPResponse]:  # fmt: skip
        """An answer to read from. Raises SourceError, also for what goes wrong while it is read."""
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
        """The body, None where there is nothing (404). Raises SourceError for any other answer."""
        answer = self.request("GET", path, headers)
        if answer.status == 404:
            return None
        return self.good(path, answer).body

    def good(self, path: str, answer: Answer) -> Answer:
        """Raises SourceError unless it is a 200."""
        if answer.status != 200:
            raise SourceError(f"{self.base}{path.partition('?')[0]} answered {answer.status}")
        return answer


class _Timed(http.client.HTTPResponse):
    """An answer whose last byte has to be there by `until`, however it trickles in."""

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
    """Seconds until a time, at least one; `otherwise` where none is given."""
    if not at:
        return otherwise
    try:
        when = parse(at)
        if when.tzinfo is None:
            when = when.replace(tzinfo=UTC)
        return max(1.0, when.timestamp() - clock())
    except (ValueError, OverflowError, TypeError) as error:
        raise SourceError(f"{at!r} is not a time") from error
