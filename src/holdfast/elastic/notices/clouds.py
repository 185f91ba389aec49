"""The clouds' metadata services: sources of notices that this machine is about to end.

Each cloud needs a few small HTTP requests to an address on the machine's own link
(`elastic/notices/source.py`). The base address can be given, for tests and for machines that reach
it elsewhere.

    aws      a session token (IMDSv2), then `spot/instance-action` (404: nothing; about 120 s), and
             `events/recommendations/rebalance`, which may come earlier and names no time
    google   `instance/preempted` (TRUE: at most 30 s) and `instance/maintenance-event`, each by a
             request that stays open until the value changes
    azure    `scheduledevents`; those count that name this machine, alone or with more machines
    file     a file that a user or a script writes: seconds, or nothing at all

The sources for clusters are in `elastic/notices/kubernetes.py`, `elastic/notices/slurm.py` and
`elastic/notices/ray.py`.

Protocols, AWS: EC2 user guide, "Spot Instance interruption notices", "rebalance recommendations".
Google Compute Engine: "Spot VMs: preemption process", "VM metadata: wait for updates". Azure:
"Scheduled Events for Linux VMs".
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from holdfast.config.cluster import ClusterConfig
from holdfast.elastic.notices.detect import Choice, choose
from holdfast.elastic.notices.kubernetes import kubernetes
from holdfast.elastic.notices.ray import ray
from holdfast.elastic.notices.slurm import slurm
from holdfast.elastic.notices.source import (
    SHORTEST,
    Answer,
    Meaning,
    Service,
    Several,
    Source,
    SourceError,
    Warned,
    json_object,
    seconds_until,
    warned,
    worst,
)
from holdfast.errors import ConfigError

__all__ = ["Source", "SourceError", "Warned", "source_of"]

BASES = {
    "aws": "http://169.254.169.254",
    "google": "http://metadata.google.internal",
    "azure": "http://169.254.169.254",
}
TOKEN_SECONDS = 21600
AWS_SECONDS = 120.0
MAINTENANCE_SECONDS = 60.0
GOOGLE_WAIT = 20
"""Seconds that a request to Google stays open if nothing changes."""
AZURE_FIRST_SECONDS = 150.0
"""The first request of a day switches Azure's service on, which may take two minutes."""

AZURE: dict[str, Meaning] = {
    "Preempt": Meaning.GONE, "Terminate": Meaning.GONE,
    "Reboot": Meaning.BACK, "Redeploy": Meaning.BACK,
    "Freeze": Meaning.PAUSE,
}  # fmt: skip


def source_of(
    cluster: ClusterConfig,
    clock: Callable[[], float] = time.time,
    environment: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
) -> Source | None:
    """Return the source that a run file names, or None if it names none.

    It sends no request, so it is quick.

    Args:
        clock: gives seconds since 1970.
        root: the folder under which this machine's files are found.

    Raises ConfigError for an invalid address, and for a cluster that this process is not in.
    """
    if cluster.notices == "none":
        return None
    if cluster.notices != "auto":
        return _named(cluster.notices, cluster, clock, environment)
    return _chosen(choose(environment, root), cluster, clock, environment)


def _chosen(
    choice: Choice, cluster: ClusterConfig, clock: Callable[[], float],
    environment: Mapping[str, str],
) -> Source:  # fmt: skip
    """Return the usable ones of the detected sources; the startup message names the rest."""
    if cluster.notices_at:
        raise ConfigError(
            "with auto nobody knows whose address this is", where="cluster.notices_at",
            remedy="name the source in cluster.notices, or leave the address away",
        )  # fmt: skip
    sources, left_out = [], []
    for name in choice.names:
        try:
            sources.append(_named(name, cluster, clock, environment))
        except ConfigError as error:
            left_out.append(f"; {name} is left out: {error.message}")
    return Several(tuple(sources), choice.told + "".join(left_out))


def _named(
    name: str, cluster: ClusterConfig, clock: Callable[[], float], environment: Mapping[str, str]
) -> Source:
    where = cluster.notices_at
    if name == "file":
        if not where:
            raise ConfigError(
                "no file is named", where="cluster.notices_at",
                remedy="the path of the file that will be written when this machine is to go",
            )  # fmt: skip
        return FileSource(Path(where), cluster.grace_seconds or SHORTEST)
    if name == "kubernetes":
        return kubernetes(cluster, environment, clock)
    if name == "slurm":
        return slurm(cluster.grace_seconds, environment, clock)
    if name == "ray":
        return ray(where, cluster.notices_every_seconds, environment, clock)
    service = Service(where or BASES[name])
    if name == "google":
        return Several((Google(service, "preempted"), Google(service, "maintenance-event")))
    return Aws(service, clock) if name == "aws" else Azure(service, clock)


# --- the clouds ---------------------------------------------------------------------------------
class Aws(Source):
    """EC2, by IMDSv2."""

    def __init__(self, service: Service, clock: Callable[[], float]) -> None:
        self._service, self._clock = service, clock
        self._token = ""

    def ask(self) -> Warned | None:
        action = self._get("/latest/meta-data/spot/instance-action")
        if action is not None:
            found = json_object(action)
            at = str(found.get("time", ""))
            left = seconds_until(at, datetime.fromisoformat, self._clock, AWS_SECONDS)
            what = str(found.get("action", "interruption"))
            if what == "hibernate":  # which begins at once
                left = 1.0
            return warned(left, Meaning.GONE, f"aws: {what}", f"{what} {at}")
        rebalance = self._get("/latest/meta-data/events/recommendations/rebalance")
        if rebalance is not None:
            at = str(json_object(rebalance).get("noticeTime", ""))
            source = "aws: rebalance recommendation"
            return warned(AWS_SECONDS, Meaning.RISK, source, f"rebalance {at}")
        return None

    def _get(self, path: str) -> bytes | None:
        answer = Answer(401, b"")
        for _ in range(2):
            if not self._token:
                self._token = self._new_token()
            answer = self._service.request(
                "GET", path, {"X-aws-ec2-metadata-token": self._token}
            )  # fmt: skip
            if answer.status != 401:
                break
            self._token = ""  # it has expired
        return None if answer.status == 404 else self._service.good(path, answer).body

    def _new_token(self) -> str:
        answer = self._service.request(
            "PUT", "/latest/api/token",
            {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_SECONDS), "Content-Length": "0"},
        )  # fmt: skip
        token = answer.body.decode("ascii", "replace").strip()
        if answer.status != 200 or not token.isascii() or not token.isprintable() or not token:
            raise SourceError(f"{self._service.base} gives no token: it answered {answer.status}")
        return token


class Google(Source):
    """Compute Engine: one value of its metadata.

    The first answer comes at once. A later request stays open until the value changes, or
    `GOOGLE_LONG_POLL_S` have passed.
    """

    HEADERS = {"Metadata-Flavor": "Google"}  # noqa: RUF012  never changed
    MEANS: Mapping[str, Mapping[str, Warned | None]] = {
        "preempted": {
            "FALSE": None,
            "TRUE": warned(SHORTEST, Meaning.GONE, "google: preempted", "preempted"),
        },
        "maintenance-event": {
            "NONE": None,
            "TERMINATE_ON_HOST_MAINTENANCE": warned(
                MAINTENANCE_SECONDS, Meaning.BACK, "google: host maintenance", "maintenance"),
            "MIGRATE_ON_HOST_MAINTENANCE": warned(
                MAINTENANCE_SECONDS, Meaning.PAUSE, "google: live migration", "migration"),
        },
    }  # fmt: skip

    def __init__(self, service: Service, value: str, wait: int = GOOGLE_WAIT) -> None:
        self._service, self._value, self._wait = service, value, wait
        self._etag = ""

    def ask(self) -> Warned | None:
        path, seconds = f"/computeMetadata/v1/instance/{self._value}", 0
        if self._etag:
            seconds = self._wait
            path += f"?wait_for_change=true&last_etag={self._etag}&timeout_sec={seconds}"
        self._etag = ""  # after a failure the first question is asked again
        answer = self._service.request("GET", path, self.HEADERS, seconds=seconds + 5.0)
        if answer.status == 404:
            return None
        said = self._service.good(path, answer).body.decode("utf-8", "replace").strip().upper()
        means = self.MEANS[self._value]
        if said not in means:
            raise SourceError(f"{self._service.base} says {said[:40]!r} of {self._value}")
        self._etag = answer.etag if answer.etag.isalnum() else ""
        return means[said]


class Azure(Source):
    """Scheduled events. Azure sends them to a set of machines; those that name this one count."""

    HEADERS = {"Metadata": "true"}  # noqa: RUF012  never changed
    EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"

    def __init__(self, service: Service, clock: Callable[[], float]) -> None:
        self._service, self._clock = service, clock
        self._name = ""
        self._awake = False  # the service is switched off after a day without a question
        self._lock = threading.Lock()
        self._own: tuple[str, ...] = ()  # events that are this machine's alone

    def ask(self) -> Warned | None:
        if not self._name:
            self._name = self._own_name()
        seconds = 5.0 if self._awake else AZURE_FIRST_SECONDS
        self._awake = False
        answer = self._service.request("GET", self.EVENTS, self.HEADERS, seconds=seconds)
        self._awake = True
        events = json_object(self._service.good(self.EVENTS, answer).body).get("Events", [])
        if not isinstance(events, list):
            raise SourceError(f"{self._service.base}: a list of events was expected")
        found = [(event, w) for event in events if (w := self._warned(event)) is not None]
        with self._lock:
            self._own = tuple(
                str(event.get("EventId")) for event, w in found
                if w.meaning is not Meaning.PAUSE and len(event["Resources"]) == 1
                and event.get("EventStatus") == "Scheduled"
            )  # fmt: skip
        return worst([w for _, w in found])

    def _own_name(self) -> str:
        path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
        answer = self._service.good(path, self._service.request("GET", path, self.HEADERS))
        name = answer.body.decode("utf-8", "replace").strip()
        if not name or len(name) > 256 or not name.isprintable() or "<" in name:
            raise SourceError(f"{self._service.base} does not say this machine's name")
        return name

    def _warned(self, event: Any) -> Warned | None:
        if not isinstance(event, dict) or event.get("EventStatus") == "Completed":
            return None
        kind, mine = str(event.get("EventType")), event.get("Resources")
        if kind not in AZURE or not isinstance(mine, list):
            return None
        if self._name.casefold() not in {str(name).casefold() for name in mine}:
            return None
        at = str(event.get("NotBefore") or "")
        begun = event.get("EventStatus") == "Started"
        otherwise = 1.0 if begun else SHORTEST
        left = seconds_until(at, parsedate_to_datetime, self._clock, otherwise)
        return warned(left, AZURE[kind], f"azure: {kind}", f"{kind} {event.get('EventId')}")

    def acknowledge(self) -> None:
        """Start this machine's own events early.

        An event that names more machines is left alone: an early start would hit all of them. So is
        a pause, since no run has to leave for it.
        """
        with self._lock:
            own, self._own = self._own, ()
        if not own:
            return
        body = json.dumps({"StartRequests": [{"EventId": number} for number in own]}).encode()
        headers = {**self.HEADERS, "Content-Type": "application/json"}
        self._service.good(
            self.EVENTS, self._service.request("POST", self.EVENTS, headers, body)
        )  # fmt: skip


class FileSource(Source):
    """A file that a user or a script writes when the machine is to end: the seconds left.

    An empty file means `default_s`.
    """

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
        return warned(seconds, Meaning.GONE, f"file {self._path}", "file")
