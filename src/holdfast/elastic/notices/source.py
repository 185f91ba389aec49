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

from holdfast.core.json_parsing import parse_json
from holdfast.errors import ConfigError

METADATA_REPLY_TIMEOUT_S = 5.0
MAX_METADATA_REPLY_BYTES = 2**20
MIN_NOTICE_S = 30.0
"""Least notice that Google and Azure promise, in seconds, if an answer names none."""


class Disruption(StrEnum):
    """The fate of the machine."""

    GONE = "gone"  # it will not come back, nor what it held
    RESTART = "back"  # its memory is lost, and what it can lose on disk; then it comes back
    PAUSE = "pause"  # it stands still for seconds and loses nothing
    RISK = "risk"  # it may go, and nobody says when


class TerminationWarning(NamedTuple):
    """A warning.

    seconds_left: time until it happens.
    must_leave: the machine will not come back, so the run must leave it.
    dedup_key: equal for two answers with the same content.
    """

    seconds_left: float
    must_leave: bool
    source: str
    dedup_key: str
    disruption: Disruption = Disruption.GONE


def make_warning(
    seconds_left: float, disruption: Disruption, source: str, dedup_key: str
) -> TerminationWarning:
    return TerminationWarning(
        seconds_left, disruption is Disruption.GONE, source, dedup_key, disruption
    )


def worst_warning(warnings: list[TerminationWarning]) -> TerminationWarning | None:
    """Return the worst warning: one that ends the machine comes first, then the soonest."""
    return min(warnings, key=lambda w: (not w.must_leave, w.seconds_left), default=None)


class NoticeSourceError(Exception):
    """The service did not answer, or not in a valid form; the poller tries again."""


class NoticeSource:
    """A source that knows whether this machine is about to end."""

    startup_message = ""
    """One line for the start, if the choice of this source needs one."""

    @property
    def leaf_sources(self) -> tuple[NoticeSource, ...]:
        """Return the sources of which each gets a thread of its own."""
        return (self,)

    def poll(self) -> TerminationWarning | None:
        """Return the worst present warning; may block until something changes, half a minute at
        most.

        Raises NoticeSourceError.
        """
        raise NotImplementedError

    def signal_handlers(self) -> Mapping[int, Callable[[], None]]:
        """Return the functions to call, in the event loop, when this process gets a signal."""
        return {}

    def acknowledge(self) -> None:
        """Notify the service that the run has left this machine, if it waits for that. Raises
        NoticeSourceError."""

    def close(self) -> None:
        """Release all resources: no poll follows."""


class CompositeSource(NoticeSource):
    """Several sources as one."""

    def __init__(self, sources: tuple[NoticeSource, ...], startup_message: str = "") -> None:
        self._sources = sources
        self.startup_message = startup_message

    @property
    def leaf_sources(self) -> tuple[NoticeSource, ...]:
        return tuple(part for source in self._sources for part in source.leaf_sources)

    def poll(self) -> TerminationWarning | None:
        return worst_warning(
            [found for part in self.leaf_sources if (found := part.poll()) is not None]
        )


# --- requests -----------------------------------------------------------------------------------
class MetadataReply(NamedTuple):
    status: int
    body: bytes
    etag: str = ""


class MetadataClient:
    """Small requests to one base address, each on a connection of its own."""

    def __init__(
        self,
        base_url: str,
        schemes: tuple[str, ...] = ("http",),
        make_tls_context: Callable[[], ssl.SSLContext] = ssl.create_default_context,
    ) -> None:
        """Check and split the base address.

        make_tls_context: called for each request by https, as certificates are renewed. Raises
        ConfigError for a base that is not scheme://host[:port][/path].
        """
        parts = urlsplit(base_url)
        try:
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            port = 0
        if parts.scheme not in schemes or not parts.hostname or not port:
            raise ConfigError(
                f"{base_url!r} is not the address of a metadata service",
                where="cluster.notices_at",
                remedy=f"write {schemes[0]}://HOST:PORT",
            )
        self.base_url, self._host, self._port = base_url, parts.hostname, port
        self._path, self._make_tls_context = parts.path.rstrip("/"), make_tls_context
        self.is_tls = parts.scheme == "https"

    def request(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes | None = None,
        timeout_s: float = METADATA_REPLY_TIMEOUT_S,
    ) -> MetadataReply:
        """Return the reply to a request. Raises NoticeSourceError if none comes in `timeout_s`."""
        with self.open_reply(method, path, headers, body, timeout_s) as answer:
            said = answer.read(MAX_METADATA_REPLY_BYTES)
            return MetadataReply(answer.status, said, answer.headers.get("ETag", ""))

    @contextmanager
    def open_reply(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes | None,
        timeout_s: float,
    ) -> Iterator[http.client.HTTPResponse]:
        """Yield a reply to read from. Raises NoticeSourceError, also for an error while reading."""
        until = time.monotonic() + timeout_s
        try:
            with closing(self._connect(timeout_s)) as connection:
                connection.response_class = partial(_DeadlineResponse, deadline=until)  # type: ignore[assignment]
                connection.request(method, self._path + path, body, dict(headers))
                with closing(connection.getresponse()) as answer:
                    yield answer
        # ValueError: a header that cannot be sent, such as a token with a line break in it.
        except (OSError, http.client.HTTPException, ValueError) as error:
            said = str(error) or type(error).__name__
            raise NoticeSourceError(f"{self.base_url} does not answer: {said}") from error

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        wait = min(timeout_s, METADATA_REPLY_TIMEOUT_S)  # for the connection alone
        if self.is_tls:
            return http.client.HTTPSConnection(
                self._host, self._port, timeout=wait, context=self._make_tls_context()
            )
        return http.client.HTTPConnection(self._host, self._port, timeout=wait)

    def get(self, path: str, headers: Mapping[str, str]) -> bytes | None:
        """Return the body; None for a 404. Raises NoticeSourceError for any other status."""
        answer = self.request("GET", path, headers)
        if answer.status == 404:
            return None
        return self.require_ok(path, answer).body

    def require_ok(self, path: str, answer: MetadataReply) -> MetadataReply:
        """Return the reply if its status is 200; raise NoticeSourceError otherwise."""
        if answer.status != 200:
            raise NoticeSourceError(
                f"{self.base_url}{path.partition('?')[0]} answered {answer.status}"
            )
        return answer


class _DeadlineResponse(http.client.HTTPResponse):
    """A reply whose last byte must arrive by `deadline`, however slow the stream."""

    def __init__(self, sock: socket.socket, *given: Any, deadline: float, **named: Any) -> None:
        super().__init__(sock, *given, **named)
        self.fp = io.BufferedReader(_DeadlineReader(self.fp.detach(), sock, deadline))


class _DeadlineReader(io.RawIOBase):
    def __init__(self, inner: io.RawIOBase, sock: socket.socket, deadline: float) -> None:
        self._inner, self._sock, self._deadline = inner, sock, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self._sock.settimeout(left)
        return self._inner.readinto(buffer)

    def close(self) -> None:
        self._inner.close()
        super().close()


# --- what answers say ---------------------------------------------------------------------------
def parse_json_object(body: bytes) -> dict[str, Any]:
    try:
        found = parse_json(body)
    except ValueError as error:
        raise NoticeSourceError(f"the answer is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise NoticeSourceError("the answer is not an object")
    return found


def seconds_until(
    time_text: str, parse: Callable[[str], datetime], clock: Callable[[], float], default_s: float
) -> float:
    """Return the seconds until a time, at least one; `default_s` if no time is given."""
    if not time_text:
        return default_s
    try:
        when = parse(time_text)
        if when.tzinfo is None:
            when = when.replace(tzinfo=UTC)
        return max(1.0, when.timestamp() - clock())
    except (ValueError, OverflowError, TypeError) as error:
        raise NoticeSourceError(f"{time_text!r} is not a time") from error
