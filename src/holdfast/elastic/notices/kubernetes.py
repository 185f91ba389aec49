"""The notices of a Kubernetes API server: the end of this pod, and of its node.

Two objects are watched, as every controller does it: listed once, then followed from the version in
the list. News come within milliseconds, and a quiet hour costs a request every `WATCH_TIMEOUT_S`. A
watch that ends or breaks off resumes from its version. If that version is too old for the server
(410), the object is listed again.

    the pod    metadata.deletionTimestamp, which is when its grace is over
    the node   taints that announce its end (`KNOWN_TAINTS`, and `cluster.notices_taints`), AKS'
               condition VMEventScheduled, and its own deletion

Each request reads the token again, since it is renewed. The token is sent by https alone, to a
server whose certificate is signed by the account's own authority.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import datetime
from http.client import HTTPResponse
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

from holdfast.config.cluster import ClusterConfig
from holdfast.elastic.notices.source import (
    ANSWER_SECONDS,
    SHORTEST,
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

NODE, POD, NAMESPACE = "HOLDFAST_NODE_NAME", "HOLDFAST_POD_NAME", "HOLDFAST_POD_NAMESPACE"
"""Environment variables that the downward API must set: spec.nodeName, metadata.name and
metadata.namespace."""
WATCH_SECONDS = 30
OBJECT_BYTES = 2**23
"""Most bytes of one line of a watch, or of a list with one object; etcd keeps objects of 1.5 MiB.
"""
HANDLER = "aws-node-termination-handler/"
AT_ONCE = 1.0


class Taint(NamedTuple):
    """A taint that announces a node's end.

    key: may end with `*`.
    notice_s: seconds that are left once the taint is set.
    """

    key: str
    seconds: float
    meaning: Meaning = Meaning.GONE

    def matches(self, key: str) -> bool:
        return key.startswith(self.key[:-1]) if self.key.endswith("*") else key == self.key


TAINTS = (
    Taint(HANDLER + "spot-itn", 120.0),
    Taint(HANDLER + "asg-lifecycle-termination", 120.0),
    Taint(HANDLER + "scheduled-maintenance", 120.0, Meaning.BACK),
    Taint(HANDLER + "*", 120.0, Meaning.RISK),  # rebalance-recommendation
    Taint("cloud.google.com/impending-node-termination", 15.0),  # half of the 30 s is for pods
    Taint("remediator.kubernetes.azure.com/unschedulable", SHORTEST),
    Taint("remediator.aks.microsoft.com/unschedulable", SHORTEST),
    Taint("ToBeDeletedByClusterAutoscaler", SHORTEST),
    Taint("karpenter.sh/disrupted", SHORTEST),
    Taint("karpenter.sh/disruption", SHORTEST),
    Taint("node.kubernetes.io/out-of-service", AT_ONCE),
    Taint("node.cloudprovider.kubernetes.io/shutdown", AT_ONCE),
)
"""Known taints; the first that matches counts."""

CONDITIONS = {  # in the reason or the message of VMEventScheduled
    "Preempt": Meaning.GONE, "Terminate": Meaning.GONE, "Redeploy": Meaning.BACK,
    "Reboot": Meaning.BACK, "Freeze": Meaning.PAUSE,
}  # fmt: skip


def kubernetes(
    cluster: ClusterConfig, environment: Mapping[str, str], clock: Callable[[], float]
) -> Source:
    """Return a source for this process's node and pod, or the one of them that is known.

    Raises ConfigError for a process in no pod, unless the address is given, and for a taint that
    cannot be read.
    """
    host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get(
        "KUBERNETES_SERVICE_PORT", "443"
    )  # fmt: skip
    if not cluster.notices_at and not host:
        raise ConfigError(
            "this process runs in no pod: KUBERNETES_SERVICE_HOST is not set",
            where="cluster.notices", remedy="give cluster.notices_at=https://HOST:PORT, or none",
        )  # fmt: skip
    base = cluster.notices_at or f"https://{f'[{host}]' if ':' in str(host) else host}:{port}"
    api = Api(base, Path(cluster.notices_account))
    pod = environment.get(POD) or (environment.get("HOSTNAME", "") if host else "")
    node = environment.get(NODE, "")
    if not pod and not node:
        raise ConfigError(
            "neither the pod nor the node of this process is known", where="cluster.notices",
            remedy=f"set {NODE} and {POD} by the downward API: see docs/notices.md",
        )  # fmt: skip
    taints = (*_more_taints(cluster.notices_taints), *TAINTS)
    sources: list[Source] = []

    def pods() -> str:
        return f"/api/v1/namespaces/{quote(environment.get(NAMESPACE) or api.namespace())}/pods"

    def own_node() -> str:
        return node or api.node_of(f"{pods()}/{quote(pod)}")

    sources.append(Watched(
        api, lambda: "/api/v1/nodes", own_node, lambda found: of_node(found, taints)))  # fmt: skip
    if pod:
        sources.append(Watched(api, pods, lambda: pod, lambda found: of_pod(found, clock)))
    return Several(tuple(sources))


def _more_taints(text: str) -> tuple[Taint, ...]:
    """Parse taints: `KEY` or `KEY=SECONDS`, separated by commas."""
    found = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, _, seconds = part.partition("=")
        try:
            left = float(seconds) if seconds else SHORTEST
        except ValueError:
            left = 0.0
        if not key or not 0 < left < 1e6:
            raise ConfigError(
                f"{part!r} is no taint", where="cluster.notices_taints",
                remedy="write KEY or KEY=SECONDS, as example.com/drain=60",
            )  # fmt: skip
        found.append(Taint(key, left))
    return tuple(found)


# --- the API server -----------------------------------------------------------------------------
class Api:
    """Requests with the token of a service account.

    account_folder: holds token, ca.crt and namespace.
    """

    def __init__(self, base: str, account: Path) -> None:
        self._account = account
        self._service = Service(base, ("https", "http"), self._tls)

    def _tls(self) -> ssl.SSLContext:
        authority = self._account / "ca.crt"
        # If the account names no authority, the machine's own count.
        context = ssl.create_default_context(cafile=authority if authority.exists() else None)
        # Python 3.13 asks for extensions that the authorities of many clusters do not have.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        return context

    def namespace(self) -> str:
        return self._read("namespace") or "default"

    def _read(self, name: str) -> str:
        try:
            return (self._account / name).read_text("ascii").strip()
        except FileNotFoundError:
            return ""
        except (OSError, ValueError) as error:
            raise SourceError(f"{self._account / name} cannot be read") from error

    def node_of(self, pod: str) -> str:
        found = json_object(self._one(pod))
        name = _at(found, "spec").get("nodeName")
        if not isinstance(name, str) or not name:
            raise SourceError(f"the pod does not say its node: set {NODE}")
        return name

    def _one(self, path: str) -> bytes:
        with self.opened(path, ANSWER_SECONDS) as answer:
            return answer.read(OBJECT_BYTES)

    def listed(self, path: str) -> dict[str, Any]:
        return json_object(self._one(path))

    def opened(self, path: str, seconds: float) -> AbstractContextManager[HTTPResponse]:
        """Open a reply with status 200, to read from; anything else raises NoticeSourceError."""
        return _Checked(self._service.opened("GET", path, self._headers(), None, seconds), path)

    def _headers(self) -> dict[str, str]:
        headers = {"Accept": "application/json"}
        token = self._read("token") if self._service.secure else ""
        return headers | ({"Authorization": f"Bearer {token}"} if token else {})


class GoneError(SourceError):
    """The server no longer has the requested version."""


WHY = {401: "the token is not accepted", 403: "the account may not (see docs/notices.md)"}


class _Checked(AbstractContextManager[HTTPResponse]):
    def __init__(self, opened: AbstractContextManager[HTTPResponse], path: str) -> None:
        self._opened, self._path = opened, path.partition("?")[0]

    def __enter__(self) -> HTTPResponse:
        answer = self._opened.__enter__()
        if answer.status == 200:
            return answer
        self._opened.__exit__(None, None, None)
        why = WHY.get(answer.status)
        sentence = f"{self._path} answered {answer.status}{f': {why}' if why else ''}"
        raise (GoneError if answer.status == 410 else SourceError)(sentence)

    def __exit__(self, *error: Any) -> bool | None:
        return self._opened.__exit__(*error)


class Watched(Source):
    """One object, listed once and then watched."""

    def __init__(
        self, api: Api, kind: Callable[[], str], name: Callable[[], str],
        verdict: Callable[[dict[str, Any]], Warned | None],
    ) -> None:  # fmt: skip
        """Watch one object.

        Args:
            find_collection_path: returns the path of all objects of the kind.
            find_name: returns the object's name. Both are called when needed and may raise
                NoticeSourceError.
            to_warning: returns the warning in an object, or None.
        """
        self._api, self._verdict = api, verdict
        self._kind, self._name = kind, name
        self._path = ""
        self._version = ""

    def ask(self) -> Warned | None:
        if not self._path:
            selector = urlencode({"fieldSelector": f"metadata.name={self._name()}"})
            self._path = f"{self._kind()}?{selector}"
        version, self._version = self._version, ""  # after a failure everything is listed anew
        try:
            if not version:
                return self._list()
            return self._follow(version)
        except GoneError:
            return None

    def _list(self) -> Warned | None:
        found = self._api.listed(f"{self._path}&resourceVersion=0")
        items = found.get("items")
        if not isinstance(items, list):
            raise SourceError(f"{self._path}: a list was expected")
        if not items:
            raise SourceError(f"{self._path}: there is none of this name")
        self._version = _version_of(found)
        return worst([w for item in items if (w := self._verdict(_object(item))) is not None])

    def _follow(self, version: str) -> Warned | None:
        path = (f"{self._path}&watch=1&allowWatchBookmarks=true"
                f"&resourceVersion={quote(version)}&timeoutSeconds={WATCH_SECONDS}")  # fmt: skip
        with self._api.opened(path, WATCH_SECONDS + ANSWER_SECONDS) as answer:
            self._version = version
            return self._news(answer)

    def _news(self, answer: HTTPResponse) -> Warned | None:
        """Return the first warning of this watch; None when the watch ends."""
        while True:
            try:
                line = answer.readline(OBJECT_BYTES)
            except Exception:  # whatever a torn stream raises: it is taken up where it was
                return None
            if not line.endswith(b"\n"):
                return None  # the end, or a line that was cut off
            try:
                found = self._event(json_object(line))
            except SourceError:
                self._version = ""
                raise
            if found is not None:
                return found

    def _event(self, event: dict[str, Any]) -> Warned | None:
        kind, about = event.get("type"), _object(event.get("object"))
        if kind == "ERROR":
            sentence = f"the watch says: {str(about.get('message'))[:200]}"
            raise (GoneError if about.get("code") == 410 else SourceError)(sentence)
        self._version = _version_of(about)
        if kind == "DELETED":
            what = str(about.get("kind", "object")).lower()
            uid = _at(about, "metadata").get("uid")
            return warned(AT_ONCE, Meaning.GONE, f"kubernetes: the {what} was deleted", f"{uid}")
        return self._verdict(about) if kind in ("ADDED", "MODIFIED") else None


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise SourceError("an object was expected")
    return value


def _at(value: dict[str, Any], key: str) -> dict[str, Any]:
    return _object(value.get(key) or {})


def _many(value: dict[str, Any], key: str) -> list[dict[str, Any]]:
    found = value.get(key) or []
    if not isinstance(found, list):
        raise SourceError(f"{key}: a list was expected")
    return [_object(item) for item in found]


def _version_of(value: dict[str, Any]) -> str:
    version = _at(value, "metadata").get("resourceVersion")
    if not isinstance(version, str) or not version.isalnum():
        raise SourceError("an object without a version")
    return version


# --- what the objects say -----------------------------------------------------------------------
def of_pod(pod: dict[str, Any], clock: Callable[[], float]) -> Warned | None:
    about = _at(pod, "metadata")
    at = about.get("deletionTimestamp")
    if not at:
        return None
    grace = about.get("deletionGracePeriodSeconds")
    left = seconds_until(str(at), datetime.fromisoformat, clock, SHORTEST)
    if isinstance(grace, int) and not isinstance(grace, bool):  # clocks of two machines differ
        left = max(AT_ONCE, min(left, float(grace)))
    return warned(left, Meaning.GONE, "kubernetes: the pod is deleted", f"{about.get('uid')} {at}")


def of_node(node: dict[str, Any], taints: tuple[Taint, ...]) -> Warned | None:
    found: list[Warned] = []
    about = _at(node, "metadata")
    if at := about.get("deletionTimestamp"):
        found.append(warned(
            SHORTEST, Meaning.GONE, "kubernetes: the node is deleted", f"node {at}"))  # fmt: skip
    for taint in _many(_at(node, "spec"), "taints"):
        key = str(taint.get("key"))
        known = next((t for t in taints if t.matches(key)), None)
        if known is not None:
            # A taint that is removed and set again is another notice.
            said = f"{key}={taint.get('value')} {taint.get('timeAdded')}"
            found.append(warned(known.seconds, known.meaning, f"kubernetes: taint {key}", said))
    for condition in _many(_at(node, "status"), "conditions"):
        if condition.get("type") == "VMEventScheduled" and condition.get("status") == "True":
            text = f"{condition.get('reason')} {condition.get('message')}"
            kind = next((kind for kind in CONDITIONS if kind in text), None)
            if kind is not None:
                key = f"{kind} {condition.get('lastTransitionTime')}"
                found.append(warned(SHORTEST, CONDITIONS[kind], f"kubernetes: {kind}", key))
    return worst(found)
