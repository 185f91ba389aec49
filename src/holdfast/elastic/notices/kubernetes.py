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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from http.client import HTTPResponse
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

from holdfast.config.sections.cluster import ClusterConfig
from holdfast.elastic.notices.source import (
    METADATA_REPLY_TIMEOUT_S,
    MIN_NOTICE_S,
    CompositeSource,
    Disruption,
    MetadataClient,
    NoticeSource,
    NoticeSourceError,
    TerminationWarning,
    make_warning,
    parse_json_object,
    seconds_until,
    worst_warning,
)
from holdfast.errors import ConfigError

NODE = "HOLDFAST_NODE_NAME"
POD_NAME_VARIABLE = "HOLDFAST_POD_NAME"
POD_NAMESPACE_VARIABLE = "HOLDFAST_POD_NAMESPACE"
"""Environment variables that the downward API must set: spec.nodeName, metadata.name and
metadata.namespace."""
WATCH_TIMEOUT_S = 30
MAX_OBJECT_BYTES = 2**23
"""Most bytes of one line of a watch, or of a list with one object; etcd keeps objects of 1.5 MiB.
"""
AWS_HANDLER_PREFIX = "aws-node-termination-handler/"
IMMINENT_NOTICE_S = 1.0


class NodeTaint(NamedTuple):
    """A taint that announces a node's end.

    key: may end with `*`.
    notice_s: seconds that are left once the taint is set.
    """

    key: str
    notice_s: float
    disruption: Disruption = Disruption.GONE

    def matches(self, key: str) -> bool:
        return key.startswith(self.key[:-1]) if self.key.endswith("*") else key == self.key


KNOWN_TAINTS = (
    NodeTaint(AWS_HANDLER_PREFIX + "spot-itn", 120.0),
    NodeTaint(AWS_HANDLER_PREFIX + "asg-lifecycle-termination", 120.0),
    NodeTaint(AWS_HANDLER_PREFIX + "scheduled-maintenance", 120.0, Disruption.RESTART),
    NodeTaint(AWS_HANDLER_PREFIX + "*", 120.0, Disruption.RISK),  # rebalance-recommendation
    NodeTaint("cloud.google.com/impending-node-termination", 15.0),  # half of the 30 s is for pods
    NodeTaint("remediator.kubernetes.azure.com/unschedulable", MIN_NOTICE_S),
    NodeTaint("remediator.aks.microsoft.com/unschedulable", MIN_NOTICE_S),
    NodeTaint("ToBeDeletedByClusterAutoscaler", MIN_NOTICE_S),
    NodeTaint("karpenter.sh/disrupted", MIN_NOTICE_S),
    NodeTaint("karpenter.sh/disruption", MIN_NOTICE_S),
    NodeTaint("node.kubernetes.io/out-of-service", IMMINENT_NOTICE_S),
    NodeTaint("node.cloudprovider.kubernetes.io/shutdown", IMMINENT_NOTICE_S),
)
"""Known taints; the first that matches counts."""

CONDITION_DISRUPTIONS = {  # in the reason or the message of VMEventScheduled
    "Preempt": Disruption.GONE,
    "Terminate": Disruption.GONE,
    "Redeploy": Disruption.RESTART,
    "Reboot": Disruption.RESTART,
    "Freeze": Disruption.PAUSE,
}


def make_kubernetes_source(
    cluster: ClusterConfig, environment: Mapping[str, str], clock: Callable[[], float]
) -> NoticeSource:
    """Return a source for this process's node and pod, or the one of them that is known.

    Raises ConfigError for a process in no pod, unless the address is given, and for a taint that
    cannot be read.
    """
    host = environment.get("KUBERNETES_SERVICE_HOST")
    port = environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not cluster.notices_at and not host:
        raise ConfigError(
            "this process runs in no pod: KUBERNETES_SERVICE_HOST is not set",
            where="cluster.notices",
            remedy="give cluster.notices_at=https://HOST:PORT, or use cluster.notices=none",
        )
    base = cluster.notices_at or f"https://{f'[{host}]' if ':' in str(host) else host}:{port}"
    api = KubernetesApi(base, Path(cluster.notices_account))
    pod = environment.get(POD_NAME_VARIABLE) or (environment.get("HOSTNAME", "") if host else "")
    node = environment.get(NODE, "")
    if not pod and not node:
        raise ConfigError(
            "neither the pod nor the node of this process is known",
            where="cluster.notices",
            remedy=f"set {NODE} and {POD_NAME_VARIABLE} by the downward API: see "
            "docs/guide/notices.md",
        )
    taints = (*_parse_taints(cluster.notices_taints), *KNOWN_TAINTS)
    sources: list[NoticeSource] = []

    def pods() -> str:
        namespace = environment.get(POD_NAMESPACE_VARIABLE) or api.read_namespace()
        return f"/api/v1/namespaces/{quote(namespace)}/pods"

    def own_node() -> str:
        return node or api.fetch_node_name(f"{pods()}/{quote(pod)}")

    sources.append(
        KubernetesObjectSource(
            api, lambda: "/api/v1/nodes", own_node, lambda found: node_warning(found, taints)
        )
    )
    if pod:
        sources.append(
            KubernetesObjectSource(api, pods, lambda: pod, lambda found: pod_warning(found, clock))
        )
    return CompositeSource(tuple(sources))


def _parse_taints(text: str) -> tuple[NodeTaint, ...]:
    """Parse taints: `KEY` or `KEY=SECONDS`, separated by commas."""
    found = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, _, seconds = part.partition("=")
        try:
            left = float(seconds) if seconds else MIN_NOTICE_S
        except ValueError:
            left = 0.0
        if not key or not 0 < left < 1e6:
            raise ConfigError(
                f"{part!r} is no taint",
                where="cluster.notices_taints",
                remedy="write KEY or KEY=SECONDS, as example.com/drain=60",
            )
        found.append(NodeTaint(key, left))
    return tuple(found)


# --- the API server -----------------------------------------------------------------------------
class KubernetesApi:
    """Requests with the token of a service account.

    account_folder: holds token, ca.crt and namespace.
    """

    def __init__(self, base_url: str, account_folder: Path) -> None:
        self._account_folder = account_folder
        self._client = MetadataClient(base_url, ("https", "http"), self._make_tls_context)

    def _make_tls_context(self) -> ssl.SSLContext:
        authority = self._account_folder / "ca.crt"
        # If the account names no authority, the machine's own count.
        context = ssl.create_default_context(cafile=authority if authority.exists() else None)
        # Python 3.13 asks for extensions that the authorities of many clusters do not have.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        return context

    def read_namespace(self) -> str:
        return self._read_account_file("namespace") or "default"

    def _read_account_file(self, name: str) -> str:
        try:
            return (self._account_folder / name).read_text("ascii").strip()
        except FileNotFoundError:
            return ""
        except (OSError, ValueError) as error:
            raise NoticeSourceError(f"{self._account_folder / name} cannot be read") from error

    def fetch_node_name(self, pod: str) -> str:
        found = parse_json_object(self._get(pod))
        name = _get_object(found, "spec").get("nodeName")
        if not isinstance(name, str) or not name:
            raise NoticeSourceError(f"the pod does not say its node: set {NODE}")
        return name

    def _get(self, path: str) -> bytes:
        with self.open_reply(path, METADATA_REPLY_TIMEOUT_S) as answer:
            return answer.read(MAX_OBJECT_BYTES)

    def list_objects(self, path: str) -> dict[str, Any]:
        return parse_json_object(self._get(path))

    @contextmanager
    def open_reply(self, path: str, timeout_s: float) -> Iterator[HTTPResponse]:
        """Yield a reply with status 200, to read from; anything else raises NoticeSourceError."""
        with self._client.open_reply("GET", path, self._headers(), None, timeout_s) as answer:
            if answer.status != 200:
                why = STATUS_REASONS.get(answer.status)
                place = path.partition("?")[0]
                sentence = f"{place} answered {answer.status}{f': {why}' if why else ''}"
                is_expired = answer.status == 410
                raise (ResourceVersionExpiredError if is_expired else NoticeSourceError)(sentence)
            yield answer

    def _headers(self) -> dict[str, str]:
        headers = {"Accept": "application/json"}
        token = self._read_account_file("token") if self._client.is_tls else ""
        return headers | ({"Authorization": f"Bearer {token}"} if token else {})


class ResourceVersionExpiredError(NoticeSourceError):
    """The server no longer has the requested version."""


STATUS_REASONS = {
    401: "the token is not accepted",
    403: "the account may not (see docs/guide/notices.md)",
}


class KubernetesObjectSource(NoticeSource):
    """One object, listed once and then watched."""

    def __init__(
        self,
        api: KubernetesApi,
        find_collection_path: Callable[[], str],
        find_name: Callable[[], str],
        to_warning: Callable[[dict[str, Any]], TerminationWarning | None],
    ) -> None:
        """Watch one object.

        Args:
            find_collection_path: returns the path of all objects of the kind.
            find_name: returns the object's name. Both are called when needed and may raise
                NoticeSourceError.
            to_warning: returns the warning in an object, or None.
        """
        self._api, self._to_warning = api, to_warning
        self._find_collection_path, self._find_name = find_collection_path, find_name
        self._path = ""
        self._version = ""

    def poll(self) -> TerminationWarning | None:
        if not self._path:
            selector = urlencode({"fieldSelector": f"metadata.name={self._find_name()}"})
            self._path = f"{self._find_collection_path()}?{selector}"
        version, self._version = self._version, ""  # after a failure everything is listed anew
        try:
            if not version:
                return self._list()
            path = (
                f"{self._path}&watch=1&allowWatchBookmarks=true"
                f"&resourceVersion={quote(version)}&timeoutSeconds={WATCH_TIMEOUT_S}"
            )
            with self._api.open_reply(path, WATCH_TIMEOUT_S + METADATA_REPLY_TIMEOUT_S) as answer:
                self._version = version
                return self._read_changes(answer)
        except ResourceVersionExpiredError:
            return None

    def _list(self) -> TerminationWarning | None:
        found = self._api.list_objects(f"{self._path}&resourceVersion=0")
        items = found.get("items")
        if not isinstance(items, list):
            raise NoticeSourceError(f"{self._path}: a list was expected")
        if not items:
            raise NoticeSourceError(f"{self._path}: there is none of this name")
        self._version = _resource_version(found)
        return worst_warning(
            [w for item in items if (w := self._to_warning(_require_object(item))) is not None]
        )

    def _read_changes(self, answer: HTTPResponse) -> TerminationWarning | None:
        """Return the first warning of this watch; None when the watch ends."""
        while True:
            try:
                line = answer.readline(MAX_OBJECT_BYTES)
            except Exception:  # whatever a torn stream raises: it is taken up where it was
                return None
            if not line.endswith(b"\n"):
                return None  # the end, or a line that was cut off
            try:
                found = self._handle_change(parse_json_object(line))
            except NoticeSourceError:
                self._version = ""
                raise
            if found is not None:
                return found

    def _handle_change(self, event: dict[str, Any]) -> TerminationWarning | None:
        kind, about = event.get("type"), _require_object(event.get("object"))
        if kind == "ERROR":
            sentence = f"the watch says: {str(about.get('message'))[:200]}"
            raise (ResourceVersionExpiredError if about.get("code") == 410 else NoticeSourceError)(
                sentence
            )
        self._version = _resource_version(about)
        if kind == "DELETED":
            what = str(about.get("kind", "object")).lower()
            uid = _get_object(about, "metadata").get("uid")
            return make_warning(
                IMMINENT_NOTICE_S, Disruption.GONE, f"kubernetes: the {what} was deleted", f"{uid}"
            )
        return self._to_warning(about) if kind in ("ADDED", "MODIFIED") else None


def _require_object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise NoticeSourceError("an object was expected")
    return value


def _get_object(value: dict[str, Any], key: str) -> dict[str, Any]:
    return _require_object(value.get(key) or {})


def _get_objects(value: dict[str, Any], key: str) -> list[dict[str, Any]]:
    found = value.get(key) or []
    if not isinstance(found, list):
        raise NoticeSourceError(f"{key}: a list was expected")
    return [_require_object(item) for item in found]


def _resource_version(value: dict[str, Any]) -> str:
    version = _get_object(value, "metadata").get("resourceVersion")
    if not isinstance(version, str) or not version.isalnum():
        raise NoticeSourceError("an object without a version")
    return version


# --- what the objects say -----------------------------------------------------------------------
def pod_warning(pod: dict[str, Any], clock: Callable[[], float]) -> TerminationWarning | None:
    about = _get_object(pod, "metadata")
    at = about.get("deletionTimestamp")
    if not at:
        return None
    grace = about.get("deletionGracePeriodSeconds")
    left = seconds_until(str(at), datetime.fromisoformat, clock, MIN_NOTICE_S)
    if isinstance(grace, int) and not isinstance(grace, bool):  # clocks of two machines differ
        left = max(IMMINENT_NOTICE_S, min(left, float(grace)))
    return make_warning(
        left, Disruption.GONE, "kubernetes: the pod is deleted", f"{about.get('uid')} {at}"
    )


def node_warning(node: dict[str, Any], taints: tuple[NodeTaint, ...]) -> TerminationWarning | None:
    found: list[TerminationWarning] = []
    about = _get_object(node, "metadata")
    if at := about.get("deletionTimestamp"):
        found.append(
            make_warning(
                MIN_NOTICE_S, Disruption.GONE, "kubernetes: the node is deleted", f"node {at}"
            )
        )
    for taint in _get_objects(_get_object(node, "spec"), "taints"):
        key = str(taint.get("key"))
        known = next((t for t in taints if t.matches(key)), None)
        if known is not None:
            # A taint that is removed and set again is another notice.
            said = f"{key}={taint.get('value')} {taint.get('timeAdded')}"
            found.append(
                make_warning(known.notice_s, known.disruption, f"kubernetes: taint {key}", said)
            )
    for condition in _get_objects(_get_object(node, "status"), "conditions"):
        if condition.get("type") == "VMEventScheduled" and condition.get("status") == "True":
            text = f"{condition.get('reason')} {condition.get('message')}"
            kind = next((kind for kind in CONDITION_DISRUPTIONS if kind in text), None)
            if kind is not None:
                key = f"{kind} {condition.get('lastTransitionTime')}"
                found.append(
                    make_warning(
                        MIN_NOTICE_S, CONDITION_DISRUPTIONS[kind], f"kubernetes: {kind}", key
                    )
                )
    return worst_warning(found)
