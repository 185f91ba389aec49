"""What a cloud says of this machine's end, asked of its metadata service.

Each source is one question, asked again and again, whose answer is a `Warned` or nothing. None
needs a library: they are small HTTP requests to an address on the machine's own link, past every
proxy. The base address can be given, for tests and for machines that reach it elsewhere.

    aws      a session token (IMDSv2), then `spot/instance-action` (404: nothing; about 120 s), and
             `events/recommendations/rebalance`, which may come earlier and names no time
    google   `instance/preempted` (TRUE: at most 30 s), and a maintenance that ends the machine
    azure    `scheduledevents`, of which those count that name this machine; Preempt and Terminate
             end it, Reboot, Redeploy and Freeze stop it. Nothing is acknowledged: that would
             bring the end forward
    file     a file that somebody writes: seconds, or nothing at all

Protocols: AWS EC2 user guide, "Spot Instance interruption notices" and "rebalance recommendations";
Google Compute Engine, "Spot VMs: preemption process"; Azure, "Scheduled Events for Linux VMs".
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

from holdfast.config.cluster import ClusterConfig
from holdfast.errors import ConfigError
from holdfast.spec.parsing import parsed

BASES = {
    "aws": "http://169.254.169.254",
    "google": "http://metadata.google.internal",
    "azure": "http://169.254.169.254",
}
ANSWER_SECONDS = 5.0
TOKEN_SECONDS = 21600
ANSWER_BYTES = 2**20
SHORTEST = 30.0
"""Seconds that Google and Azure promise at least, where an answer names none."""
AWS_SECONDS = 120.0

ENDS, STOPS = frozenset({"Preempt", "Terminate"}), frozenset({"Reboot", "Redeploy", "Freeze"})


class Warned(NamedTuple):
    """seconds: until the machine is gone, or stands still. leave: it will not come back.
    key: equal for two answers that say the same."""

    seconds: float
    leave: bool
    source: str
    key: str


class SourceError(Exception):
    """The service did not answer, or not in a way that can be understood; it is asked again."""


class Source(Protocol):
    def ask(self) -> Warned | None:
        """The worst that is known now; blocks for a few seconds at most. Raises SourceError."""
        ...


def source_of(cluster: ClusterConfig, clock: Callable[[], float] = time.time) -> Source | None:
    """The source that a run file names, None where it names none.

    `clock` gives seconds since 1970. Raises ConfigError for an address that is none.
    """
    where = cluster.notices_at
    if cluster.notices == "none":
        return None
    if cluster.notices == "file":
        if not where:
            raise ConfigError(
                "no file is named", where="cluster.notices_at",
                remedy="the path of the file that will be written when this machine is to go",
            )  # fmt: skip
        return FileSource(Path(where), cluster.grace_seconds or SHORTEST)
    service = Service(where or BASES[cluster.notices])
    if cluster.notices == "aws":
        return Aws(service, clock)
    return Google(service) if cluster.notices == "google" else Azure(service, clock)


# --- the service --------------------------------------------------------------------------------
class Service:
    """Small requests to one base address, each on a connection of its own."""

    def __init__(self, base: str) -> None:
        """Raises ConfigError for a base that is not http://host[:port][/path]."""
        parts = urlsplit(base)
        try:
            port = parts.port or 80
        except ValueError:
            port = 0
        if parts.scheme != "http" or not parts.hostname or not port:
            raise ConfigError(
                f"{base!r} is not the address of a metadata service",
                where="cluster.notices_at", remedy="http://HOST:PORT",
            )  # fmt: skip
        self.base, self._host, self._port = base, parts.hostname, port
        self._path = parts.path.rstrip("/")

    def request(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
        """Status and body. Raises SourceError when nobody answers."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=ANSWER_SECONDS)
        try:
            with closing(connection):
                connection.request(method, self._path + path, headers=headers)
                answer = connection.getresponse()
                return answer.status, answer.read(ANSWER_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise SourceError(f"{self.base} does not answer: {error}") from error

    def get(self, path: str, headers: dict[str, str]) -> bytes | None:
        """The body, None where there is nothing (404). Raises SourceError for any other answer."""
        status, body = self.request("GET", path, headers)
        if status == 404:
            return None
        if status != 200:
            raise SourceError(f"{self.base}{path} answered {status}")
        return body


# --- the clouds ---------------------------------------------------------------------------------
class Aws:
    """EC2, by IMDSv2."""

    def __init__(self, service: Service, clock: Callable[[], float]) -> None:
        self._service, self._clock = service, clock
        self._token = ""

    def ask(self) -> Warned | None:
        action = self._get("/latest/meta-data/spot/instance-action")
        if action is not None:
            found = _json(action)
            at = str(found.get("time", ""))
            left = _until(at, datetime.fromisoformat, self._clock, AWS_SECONDS)
            what = str(found.get("action", "interruption"))
            if what == "hibernate":  # which begins at once
                left = 1.0
            return Warned(left, True, f"aws: {what}", f"{what} {at}")
        rebalance = self._get("/latest/meta-data/events/recommendations/rebalance")
        if rebalance is not None:
            at = str(_json(rebalance).get("noticeTime", ""))
            return Warned(AWS_SECONDS, False, "aws: rebalance recommendation", f"rebalance {at}")
        return None

    def _get(self, path: str) -> bytes | None:
        for _ in range(2):
            if not self._token:
                self._token = self._new_token()
            status, body = self._service.request(
                "GET", path, {"X-aws-ec2-metadata-token": self._token}
            )
            if status != 401:
                break
            self._token = ""  # it has expired
        if status == 404:
            return None
        if status != 200:
            raise SourceError(f"{self._service.base}{path} answered {status}")
        return body

    def _new_token(self) -> str:
        status, body = self._service.request(
            "PUT", "/latest/api/token",
            {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_SECONDS), "Content-Length": "0"},
        )  # fmt: skip
        token = body.decode("ascii", "replace").strip()
        if status != 200 or not token.isprintable() or not token:
            raise SourceError(f"{self._service.base} gives no token: it answered {status}")
        return token


class Google:
    """Compute Engine."""

    HEADERS = {"Metadata-Flavor": "Google"}  # noqa: RUF012  never changed

    def __init__(self, service: Service) -> None:
        self._service = service

    def ask(self) -> Warned | None:
        if self._value("preempted") == "TRUE":
            return Warned(SHORTEST, True, "google: preempted", "preempted")
        if self._value("maintenance-event") == "TERMINATE_ON_HOST_MAINTENANCE":
            return Warned(SHORTEST, False, "google: host maintenance", "maintenance")
        return None

    def _value(self, name: str) -> str:
        found = self._service.get(f"/computeMetadata/v1/instance/{name}", self.HEADERS)
        return "" if found is None else found.decode("utf-8", "replace").strip().upper()


class Azure:
    """Scheduled events. They are told to all machines of a set: those that name this one count."""

    HEADERS = {"Metadata": "true"}  # noqa: RUF012  never changed

    def __init__(self, service: Service, clock: Callable[[], float]) -> None:
        self._service, self._clock = service, clock
        self._name = ""

    def ask(self) -> Warned | None:
        if not self._name:
            path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
            self._name = (self._service.get(path, self.HEADERS) or b"").decode().strip()
        path = "/metadata/scheduledevents?api-version=2020-07-01"
        found = self._service.get(path, self.HEADERS)
        events = _json(found or b"{}").get("Events", [])
        if not isinstance(events, list):
            raise SourceError(f"{self._service.base}: a list of events was expected")
        warned = [w for event in events if (w := self._warned(event)) is not None]
        # What ends the machine comes before what stops it, the soonest first.
        return min(warned, key=lambda w: (not w.leave, w.seconds), default=None)

    def _warned(self, event: Any) -> Warned | None:
        if not isinstance(event, dict) or event.get("EventStatus") == "Completed":
            return None
        kind, mine = str(event.get("EventType")), event.get("Resources") or []
        if kind not in ENDS | STOPS or (self._name and self._name not in mine):
            return None
        at = str(event.get("NotBefore", ""))
        left = _until(at, parsedate_to_datetime, self._clock, SHORTEST)
        return Warned(left, kind in ENDS, f"azure: {kind}", f"{kind} {event.get('EventId')}")


class FileSource:
    """A file that somebody writes when the machine is to go: the seconds that are left, or nothing,
    which means `seconds`."""

    def __init__(self, path: Path, seconds: float) -> None:
        self._path, self._seconds = path, seconds

    def ask(self) -> Warned | None:
        try:
            said = self._path.read_bytes()[:100].decode("utf-8", "replace").strip()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise SourceError(f"{self._path}: {error.strerror}") from error
        try:
            seconds = float(said) if said else self._seconds
        except ValueError:
            raise SourceError(f"{self._path}: {said!r} is not a number of seconds") from None
        if not 0 < seconds < 1e6:
            raise SourceError(f"{self._path}: {said} seconds make no sense")
        return Warned(seconds, True, f"file {self._path}", "file")


def _json(body: bytes) -> dict[str, Any]:
    try:
        found = parsed(body)
    except ValueError as error:
        raise SourceError(f"the metadata service's answer is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise SourceError("the metadata service's answer is not an object")
    return found


def _until(
    at: str, parse: Callable[[str], datetime], clock: Callable[[], float], otherwise: float
) -> float:
    """Seconds until a time, at least one; `otherwise` where none is given."""
    if not at:
        return otherwise
    try:
        when = parse(at)
    except ValueError as error:
        raise SourceError(f"{at!r} is not a time") from error
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return max(1.0, when.timestamp() - clock())
