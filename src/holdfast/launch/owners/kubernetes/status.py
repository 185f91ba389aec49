"""What a cluster says of a run's pods: the state of each, and why one is missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from holdfast.launch.owners.kubernetes.kubectl import Kubectl, KubectlError, NotFoundError, shorten
from holdfast.launch.owners.kubernetes.manifests import KUEUE
from holdfast.launch.owners.kubernetes.pod import RUN_LABEL
from holdfast.launch.owners.owner import NodeState, NodeStatus

Object = dict[str, Any]
OUT_OF_SERVICE = "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
_BENIGN_WAITS = ("ContainerCreating", "PodInitializing", "")
_LONGEST_LIST = 8
_MISSING = "pod "
STUCK_AFTER_S = 60.0
"""Seconds after the end of its grace from which a pod that is still there counts as lost."""


@dataclass(frozen=True)
class JobReader:
    """Reads the objects of one job.

    resource: what kubectl calls the job. nodes: pods that it should have. queued: Kueue has its
    queue. now: seconds since 1970."""

    kubectl: Kubectl
    resource: str
    name: str
    nodes: int
    queued: bool
    now: float

    def pods(self) -> list[Object]:
        found = self.kubectl.items("pods", f"--selector={RUN_LABEL}={self.name}")
        return sorted(found, key=pod_name)

    def nodes_by_state(self) -> list[NodeStatus]:
        """Return a status for each pod, and one for each pod that is missing; none if the cluster
        does not know the job. Raises KubectlError."""
        pods = self.pods()
        try:
            job = self.kubectl.get(self.resource, self.name)
        except NotFoundError:
            return [pod_status(pod, self.now) for pod in pods]
        found = [pod_status(pod, self.now) for pod in pods]
        if job["metadata"].get("deletionTimestamp"):
            return found
        count = sum(
            each.state in (NodeState.WAITING, NodeState.RUNNING, NodeState.FINISHED)
            for each in found
        )
        if (end := job_end(job)) is not None or count >= self.nodes:
            return found or ([NodeStatus(self.name, *end)] if end else [])
        why = self.why_missing(job)
        missing = range(count + 1, self.nodes + 1)
        return found + [NodeStatus(f"{_MISSING}{n}", NodeState.WAITING, why) for n in missing]

    def why_missing(self, job: Object) -> str:
        """Return in the cluster's own words why there are fewer pods than nodes."""
        if self.queued:
            workload = self.workload(job)
            if workload is None:
                return "Kueue has not seen the job: it is not installed, or does not serve its kind"
            condition = conditions(workload).get("QuotaReserved", {})
            if condition.get("status") == "True":
                return self._warning() or "admitted by Kueue"
            return f"Kueue: {condition.get('message') or 'waits in the queue'}"
        return self._warning() or "no pod yet"

    def workload(self, job: Object) -> Object | None:
        """Return Kueue's object of the job; None if there is none."""
        uid = job["metadata"]["uid"]
        try:
            found = self.kubectl.items(f"workloads.{KUEUE}")
        except KubectlError:
            return None
        for each in found:
            if any(
                owner.get("uid") == uid for owner in each["metadata"].get("ownerReferences", [])
            ):
                return each
        return None

    def _warning(self) -> str:
        """Return the newest warning about this job or a Job of its, such as one about a quota."""
        try:
            events = self.kubectl.items("events", "--field-selector=type=Warning")
        except KubectlError as error:
            return error.words
        own = [
            each
            for each in events
            if str(each.get("involvedObject", {}).get("name", "")).startswith(self.name)
        ]
        if not own:
            return ""
        newest = max(own, key=lambda each: str(each.get("lastTimestamp") or ""))
        return f"{newest.get('reason')}: {shorten(str(newest.get('message')))}"


def is_missing_pod(node: str) -> bool:
    """Return True for the name of a status whose pod does not exist yet."""
    return node.startswith(_MISSING)


def pod_name(pod: Object) -> str:
    return str(pod["metadata"]["name"])


def conditions(thing: Object) -> dict[str, Object]:
    found = thing.get("status", {}).get("conditions") or []
    return {str(each.get("type")): each for each in found}


def job_end(job: Object) -> tuple[NodeState, str] | None:
    """Return how a job has ended; None if it has not."""
    found = conditions(job)
    for word, state in (
        ("Failed", NodeState.FAILED),
        ("Complete", NodeState.FINISHED),
        ("Completed", NodeState.FINISHED),
    ):
        if (condition := found.get(word)) and condition.get("status") == "True":
            return state, str(condition.get("message") or condition.get("reason") or word)
    return None


def pod_status(pod: Object, now: float) -> NodeStatus:
    status, name = pod.get("status", {}), pod_name(pod)
    node = str(pod.get("spec", {}).get("nodeName") or "")
    phase = status.get("phase")
    if phase == "Succeeded":
        return NodeStatus(name, NodeState.FINISHED)
    if phase == "Failed":
        return NodeStatus(name, *_failure(pod))
    if at := pod["metadata"].get("deletionTimestamp"):
        return NodeStatus(name, *_terminating(pod, node, str(at), now))
    if phase == "Running":
        containers = status.get("containerStatuses") or []
        again = sum(int(each.get("restartCount", 0)) for each in containers)
        restarts = f", {again} restarts" if again else ""
        return NodeStatus(name, NodeState.RUNNING, f"on {node}{restarts}")
    return NodeStatus(name, NodeState.WAITING, _wait(pod, node))


def _failure(pod: Object) -> tuple[NodeState, str]:
    disruption = conditions(pod).get("DisruptionTarget", {})
    if disruption.get("status") == "True":
        why = disruption.get("message") or disruption.get("reason")
        return NodeState.LOST, f"{disruption.get('reason')}: {why}"
    codes = [
        f"exit code {ended['exitCode']}{reason}"
        for each in pod["status"].get("containerStatuses") or []
        if (ended := each.get("state", {}).get("terminated"))
        for reason in [
            f" ({ended['reason']})" if ended.get("reason") not in (None, "Error") else ""
        ]
    ]
    found = pod["status"].get("message") or pod["status"].get("reason")
    return NodeState.FAILED, ", ".join(codes) or str(found or "failed")


def _terminating(pod: Object, node: str, at: str, now: float) -> tuple[NodeState, str]:
    """A pod that is deleted has its grace to save and leave. at: when the grace is over."""
    is_late = now > datetime.fromisoformat(at).astimezone(UTC).timestamp() + STUCK_AFTER_S
    if not is_late and pod["status"].get("reason") != "NodeLost":
        return NodeState.RUNNING, f"leaves {node or 'the cluster'}, until {at} at most"
    help_ = f"; if that machine is off: kubectl taint node {node} {OUT_OF_SERVICE}" if node else ""
    return NodeState.LOST, f"Terminating since {at} on {node}{help_}"


def _wait(pod: Object, node: str) -> str:
    """An image that cannot be pulled, a volume that is missing, no machine with room."""
    for each in pod.get("status", {}).get("containerStatuses") or []:
        waiting = each.get("state", {}).get("waiting") or {}
        if waiting.get("reason", "") not in _BENIGN_WAITS:
            return f"{waiting['reason']}: {shorten(str(waiting.get('message') or ''))}"
    scheduled = conditions(pod).get("PodScheduled", {})
    if scheduled.get("status") == "False":
        return f"{scheduled.get('reason')}: {shorten(str(scheduled.get('message') or ''))}"
    return f"starts on {node}" if node else "no machine yet"


# --- what was asked for, and what was given -------------------------------------------------------
def topology_warnings(
    pods: Iterable[Object], labels: Mapping[str, Mapping[str, str]], level: str, wish: str
) -> list[str]:
    """Return a sentence if the cluster has ignored the wish for one domain.

    labels: of each machine, by its name. level: the label that names a domain. wish: "required" or
    "preferred"."""
    machines = {
        str(pod["spec"]["nodeName"])
        for pod in pods
        if pod.get("spec", {}).get("nodeName") and pod.get("status", {}).get("phase") == "Running"
    }
    without = sorted(name for name in machines if not labels.get(name, {}).get(level))
    if without:
        return [
            f"the machines {_listed(without)} have no label {level}, so nothing can be said of "
            f"launch.kubernetes.topology={wish}"
        ]
    domains = Counter(labels[name][level] for name in machines)
    if len(domains) < 2:
        return []
    given = _listed(f"{domain} ({count} machines)" for domain, count in sorted(domains.items()))
    if wish == "preferred":
        return [f"the pods lie in several domains of {level}: {given}"]
    return [
        f"launch.kubernetes.topology=required was ignored: the pods lie in several domains of "
        f"{level}: {given}. Kueue ignores the request without a word if its feature gate "
        "TopologyAwareScheduling is off, or the flavor of the queue names no topology"
    ]


def _listed(names: Iterable[str]) -> str:
    found = list(names)
    more = f" and {len(found) - _LONGEST_LIST} more" if len(found) > _LONGEST_LIST else ""
    return ", ".join(found[:_LONGEST_LIST]) + more
