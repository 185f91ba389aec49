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
from typing import Any, NamedTuple

from holdfast.config.sections.cluster import ClusterConfig
from holdfast.elastic.notices.kubernetes import make_kubernetes_source
from holdfast.elastic.notices.ray import make_ray_source
from holdfast.elastic.notices.slurm import make_slurm_source
from holdfast.elastic.notices.source import (
    MIN_NOTICE_S,
    CompositeSource,
    Disruption,
    MetadataClient,
    MetadataReply,
    NoticeSource,
    NoticeSourceError,
    TerminationWarning,
    make_warning,
    parse_json_object,
    seconds_until,
    worst_warning,
)
from holdfast.errors import ConfigError

__all__ = ["NoticeSource", "NoticeSourceError", "TerminationWarning", "make_notice_source"]

BASE_URLS = {
    "aws": "http://169.254.169.254",
    "google": "http://metadata.google.internal",
    "azure": "http://169.254.169.254",
}
AWS_TOKEN_LIFETIME_S = 21600
AWS_NOTICE_S = 120.0
MAINTENANCE_NOTICE_S = 60.0
GOOGLE_LONG_POLL_S = 20
"""Seconds that a request to Google stays open if nothing changes."""
AZURE_FIRST_REPLY_TIMEOUT_S = 150.0
"""The first request of a day switches Azure's service on, which may take two minutes."""

AZURE_DISRUPTIONS: dict[str, Disruption] = {
    "Preempt": Disruption.GONE,
    "Terminate": Disruption.GONE,
    "Reboot": Disruption.RESTART,
    "Redeploy": Disruption.RESTART,
    "Freeze": Disruption.PAUSE,
}


def make_notice_source(
    cluster: ClusterConfig,
    clock: Callable[[], float] = time.time,
    environment: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
) -> NoticeSource | None:
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
        return _make_named_source(cluster.notices, cluster, clock, environment)
    detected = detect_sources(environment, root)
    # The usable ones of the detected sources; the startup message names the rest.
    if cluster.notices_at:
        raise ConfigError(
            "with auto nobody knows whose address this is",
            where="cluster.notices_at",
            remedy="name the source in cluster.notices, or leave the address away",
        )
    sources, left_out = [], []
    for name in detected.source_names:
        try:
            sources.append(_make_named_source(name, cluster, clock, environment))
        except ConfigError as error:
            left_out.append(f"; {name} is left out: {error.message}")
    return CompositeSource(tuple(sources), detected.startup_message + "".join(left_out))


def _make_named_source(
    name: str, cluster: ClusterConfig, clock: Callable[[], float], environment: Mapping[str, str]
) -> NoticeSource:
    where = cluster.notices_at
    if name == "file":
        if not where:
            raise ConfigError(
                "no file is named",
                where="cluster.notices_at",
                remedy="name the file that will be written when this machine is to go",
            )
        return FileNoticeSource(Path(where), cluster.grace_seconds or MIN_NOTICE_S)
    if name == "kubernetes":
        return make_kubernetes_source(cluster, environment, clock)
    if name == "slurm":
        return make_slurm_source(cluster.grace_seconds, environment, clock)
    if name == "ray":
        return make_ray_source(where, cluster.notices_every_seconds, environment, clock)
    service = MetadataClient(where or BASE_URLS[name])
    if name == "google":
        return CompositeSource(
            (GoogleSource(service, "preempted"), GoogleSource(service, "maintenance-event"))
        )
    return AwsSource(service, clock) if name == "aws" else AzureSource(service, clock)


# --- the clouds ---------------------------------------------------------------------------------
class AwsSource(NoticeSource):
    """EC2, by IMDSv2."""

    def __init__(self, client: MetadataClient, clock: Callable[[], float]) -> None:
        self._client, self._clock = client, clock
        self._token = ""

    def poll(self) -> TerminationWarning | None:
        action = self._get("/latest/meta-data/spot/instance-action")
        if action is not None:
            found = parse_json_object(action)
            at = str(found.get("time", ""))
            left = seconds_until(at, datetime.fromisoformat, self._clock, AWS_NOTICE_S)
            what = str(found.get("action", "interruption"))
            if what == "hibernate":  # which begins at once
                left = 1.0
            return make_warning(left, Disruption.GONE, f"aws: {what}", f"{what} {at}")
        rebalance = self._get("/latest/meta-data/events/recommendations/rebalance")
        if rebalance is not None:
            at = str(parse_json_object(rebalance).get("noticeTime", ""))
            source = "aws: rebalance recommendation"
            return make_warning(AWS_NOTICE_S, Disruption.RISK, source, f"rebalance {at}")
        return None

    def _get(self, path: str) -> bytes | None:
        answer = MetadataReply(401, b"")
        for _ in range(2):
            if not self._token:
                self._token = self._fetch_token()
            answer = self._client.request("GET", path, {"X-aws-ec2-metadata-token": self._token})
            if answer.status != 401:
                break
            self._token = ""  # it has expired
        return None if answer.status == 404 else self._client.require_ok(path, answer).body

    def _fetch_token(self) -> str:
        answer = self._client.request(
            "PUT",
            "/latest/api/token",
            {
                "X-aws-ec2-metadata-token-ttl-seconds": str(AWS_TOKEN_LIFETIME_S),
                "Content-Length": "0",
            },
        )
        token = answer.body.decode("ascii", "replace").strip()
        if answer.status != 200 or not token.isascii() or not token.isprintable() or not token:
            raise NoticeSourceError(
                f"{self._client.base_url} gives no token: it answered {answer.status}"
            )
        return token


class GoogleSource(NoticeSource):
    """Compute Engine: one value of its metadata.

    The first answer comes at once. A later request stays open until the value changes, or
    `GOOGLE_LONG_POLL_S` have passed.
    """

    HEADERS = {"Metadata-Flavor": "Google"}  # noqa: RUF012  never changed
    WARNINGS: Mapping[str, Mapping[str, TerminationWarning | None]] = {
        "preempted": {
            "FALSE": None,
            "TRUE": make_warning(MIN_NOTICE_S, Disruption.GONE, "google: preempted", "preempted"),
        },
        "maintenance-event": {
            "NONE": None,
            "TERMINATE_ON_HOST_MAINTENANCE": make_warning(
                MAINTENANCE_NOTICE_S, Disruption.RESTART, "google: host maintenance", "maintenance"
            ),
            "MIGRATE_ON_HOST_MAINTENANCE": make_warning(
                MAINTENANCE_NOTICE_S, Disruption.PAUSE, "google: live migration", "migration"
            ),
        },
    }

    def __init__(
        self, client: MetadataClient, key: str, long_poll_s: int = GOOGLE_LONG_POLL_S
    ) -> None:
        self._client, self._key, self._long_poll_s = client, key, long_poll_s
        self._etag = ""

    def poll(self) -> TerminationWarning | None:
        path, seconds = f"/computeMetadata/v1/instance/{self._key}", 0
        if self._etag:
            seconds = self._long_poll_s
            path += f"?wait_for_change=true&last_etag={self._etag}&timeout_sec={seconds}"
        self._etag = ""  # after a failure the first question is asked again
        answer = self._client.request("GET", path, self.HEADERS, timeout_s=seconds + 5.0)
        if answer.status == 404:
            return None
        said = self._client.require_ok(path, answer).body.decode("utf-8", "replace").strip().upper()
        means = self.WARNINGS[self._key]
        if said not in means:
            raise NoticeSourceError(f"{self._client.base_url} says {said[:40]!r} of {self._key}")
        self._etag = answer.etag if answer.etag.isalnum() else ""
        return means[said]


class AzureSource(NoticeSource):
    """Scheduled events. Azure sends them to a set of machines; those that name this one count."""

    HEADERS = {"Metadata": "true"}  # noqa: RUF012  never changed
    EVENTS_PATH = "/metadata/scheduledevents?api-version=2020-07-01"

    def __init__(self, client: MetadataClient, clock: Callable[[], float]) -> None:
        self._client, self._clock = client, clock
        self._machine_name = ""
        self._is_service_on = False  # the service is switched off after a day without a question
        self._lock = threading.Lock()
        self._own_event_ids: tuple[str, ...] = ()  # events that are this machine's alone

    def poll(self) -> TerminationWarning | None:
        if not self._machine_name:
            self._machine_name = self._fetch_machine_name()
        seconds = 5.0 if self._is_service_on else AZURE_FIRST_REPLY_TIMEOUT_S
        self._is_service_on = False
        answer = self._client.request("GET", self.EVENTS_PATH, self.HEADERS, timeout_s=seconds)
        self._is_service_on = True
        events = parse_json_object(self._client.require_ok(self.EVENTS_PATH, answer).body).get(
            "Events", []
        )
        if not isinstance(events, list):
            raise NoticeSourceError(f"{self._client.base_url}: a list of events was expected")
        found = [(event, w) for event in events if (w := self._to_warning(event)) is not None]
        with self._lock:
            self._own_event_ids = tuple(
                str(event.get("EventId"))
                for event, w in found
                if w.disruption is not Disruption.PAUSE
                and len(event["Resources"]) == 1
                and event.get("EventStatus") == "Scheduled"
            )
        return worst_warning([w for _, w in found])

    def _fetch_machine_name(self) -> str:
        path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
        answer = self._client.require_ok(path, self._client.request("GET", path, self.HEADERS))
        name = answer.body.decode("utf-8", "replace").strip()
        if not name or len(name) > 256 or not name.isprintable() or "<" in name:
            raise NoticeSourceError(f"{self._client.base_url} does not say this machine's name")
        return name

    def _to_warning(self, event: Any) -> TerminationWarning | None:
        if not isinstance(event, dict) or event.get("EventStatus") == "Completed":
            return None
        kind, mine = str(event.get("EventType")), event.get("Resources")
        if kind not in AZURE_DISRUPTIONS or not isinstance(mine, list):
            return None
        if self._machine_name.casefold() not in {str(name).casefold() for name in mine}:
            return None
        at = str(event.get("NotBefore") or "")
        begun = event.get("EventStatus") == "Started"
        otherwise = 1.0 if begun else MIN_NOTICE_S
        left = seconds_until(at, parsedate_to_datetime, self._clock, otherwise)
        return make_warning(
            left, AZURE_DISRUPTIONS[kind], f"azure: {kind}", f"{kind} {event.get('EventId')}"
        )

    def acknowledge(self) -> None:
        """Start this machine's own events early.

        An event that names more machines is left alone: an early start would hit all of them. So is
        a pause, since no run has to leave for it.
        """
        with self._lock:
            own, self._own_event_ids = self._own_event_ids, ()
        if not own:
            return
        body = json.dumps({"StartRequests": [{"EventId": number} for number in own]}).encode()
        headers = {**self.HEADERS, "Content-Type": "application/json"}
        self._client.require_ok(
            self.EVENTS_PATH, self._client.request("POST", self.EVENTS_PATH, headers, body)
        )


class FileNoticeSource(NoticeSource):
    """A file that a user or a script writes when the machine is to end: the seconds left.

    An empty file means `default_s`.
    """

    def __init__(self, path: Path, default_s: float) -> None:
        self._path, self._default_s = path, default_s

    def poll(self) -> TerminationWarning | None:
        try:
            said = self._path.read_bytes()[:100].decode("utf-8", "replace").strip()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise NoticeSourceError(f"{self._path}: {error.strerror}") from error
        try:
            seconds = float(said) if said else self._default_s
        except ValueError:
            raise NoticeSourceError(f"{self._path}: {said!r} is not a number of seconds") from None
        if not 0 < seconds < 1e6:
            raise NoticeSourceError(f"{self._path}: {said} seconds make no sense")
        return make_warning(seconds, Disruption.GONE, f"file {self._path}", "file")


# `cluster.notices: auto`: the sources that this machine has, by its files and environment.
#
# Nothing is sent over a network, so the start is not slowed. Environment variables tell whether
# this process is in a pod, a Slurm job or a Ray cluster. The firmware names the cloud that owns
# the machine. If a detected source then does not answer, that is reported once, as for any
# source.

AZURE_CHASSIS_TAG = "7783-7084-3265-9085-8269-3286-77"
"""The chassis of every Azure machine; other machines on Hyper-V have the same vendor."""
CLUSTER_VARIABLES = (
    ("kubernetes", "KUBERNETES_SERVICE_HOST"),
    ("slurm", "SLURM_JOB_ID"),
    ("ray", "RAY_ADDRESS"),
)


class DetectedSources(NamedTuple):
    """The detected sources. startup_message: one line for the user."""

    source_names: tuple[str, ...]
    startup_message: str


def detect_sources(environment: Mapping[str, str], root: Path) -> DetectedSources:
    found = [(name, variable) for name, variable in CLUSTER_VARIABLES if environment.get(variable)]
    cloud = _detect_cloud(root)
    if cloud is not None:
        found.append(cloud)
    if not found:
        return DetectedSources(
            (), "notices: auto found nobody to ask: no cloud's firmware, no cluster's variables"
        )
    because = ", ".join(f"{name} ({why})" for name, why in found)
    return DetectedSources(tuple(name for name, _ in found), f"notices: auto asks {because}")


def _detect_cloud(root: Path) -> tuple[str, str] | None:
    """Return the cloud that made this machine, and the evidence."""
    vendor = _read_firmware(root, "sys_vendor")
    if vendor.startswith("Amazon"):
        return "aws", f"made by {vendor}"
    product = _read_firmware(root, "product_name")
    if product.startswith("Google Compute Engine"):
        return "google", f"a {product}"
    if (
        vendor == "Microsoft Corporation"
        and _read_firmware(root, "chassis_asset_tag") == AZURE_CHASSIS_TAG
    ):
        return "azure", "an Azure chassis"
    bios = _read_firmware(root, "bios_version")
    return ("aws", f"BIOS {bios}") if bios.endswith(".amazon") else None  # before Nitro


def _read_firmware(root: Path, name: str) -> str:
    try:
        return (root / "sys/class/dmi/id" / name).read_text("utf-8", "replace").strip()[:100]
    except OSError:
        return ""
