"""The objects of a run on Kubernetes, as plain dictionaries in the order in which they are made."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import yaml

from holdfast.errors import ConfigError
from holdfast.launch.owners.kubernetes.pod import (
    AGENT,
    LEFT_EXIT_CODE,
    RUN_LABEL,
    SECRET_KEY,
    Object,
    PodTemplate,
    account_name,
    job_name,
    refuse_incomplete,
    restricted,
    secret_name,
)
from holdfast.launch.owners.owner import LaunchRequest

USER_ERROR_EXIT_CODE = 2
FAILURES_OF_A_NODE = 100
"""Failures of one node's pods before Kubernetes gives the node up. Losses do not count."""
KUEUE = "kueue.x-k8s.io"
_KUEUE_KINDS = ("job", "jobset", "trainer", "kuberay")
TASK = "node"  # Name of the pods' group within a job. Kubeflow Trainer asks for this one.


@dataclass(frozen=True)
class KindOfJob:
    """resource: what kubectl calls it. make: returns the objects of a request, the job last.
    container: name of the agent's container. grows: its number of nodes can be changed."""

    resource: str
    make: Callable[[PodTemplate], list[Object]]
    container: str = AGENT
    restart: str = "Never"
    grows: bool = False


def uses_kueue(request: LaunchRequest) -> bool:
    settings = request.config.launch.kubernetes
    return bool(settings.queue) and settings.kind in _KUEUE_KINDS


def make_objects(request: LaunchRequest) -> list[Object]:
    """Return all objects of a run but its secret. Raises ConfigError."""
    refuse_incomplete(request)
    kind = KINDS[request.config.launch.kubernetes.kind]
    template = PodTemplate(request, kind.container, kind.restart)
    return [*_account(request), *kind.make(template)]


def make_secret(request: LaunchRequest, secret: str) -> Object:
    return _object("v1", "Secret", request, name=secret_name(request)) | {
        "type": "Opaque",
        "stringData": {SECRET_KEY: secret},
    }


def to_yaml(objects: Iterable[Object]) -> str:
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, explicit_start=True, width=100)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


# --- parts of several kinds -----------------------------------------------------------------------
def _object(
    version: str,
    kind: str,
    request: LaunchRequest,
    spec: Object | None = None,
    *,
    name: str = "",
    labels: Object | None = None,
) -> Object:
    settings, own = request.config.launch.kubernetes, job_name(request)
    metadata: Object = {"name": name or own, "namespace": settings.namespace}
    metadata["labels"] = {"app.kubernetes.io/name": "holdfast", RUN_LABEL: own} | (labels or {})
    made: Object = {"apiVersion": version, "kind": kind, "metadata": metadata}
    return made if spec is None else made | {"spec": spec}


def _account(request: LaunchRequest) -> list[Object]:
    """The account of the pods: it may read pods of its namespace (docs/guide/notices.md)."""
    if request.config.launch.kubernetes.service_account:
        return []
    namespace, name = request.config.launch.kubernetes.namespace, account_name(request)
    rbac = "rbac.authorization.k8s.io"
    rule = {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}
    subject = {"kind": "ServiceAccount", "name": name, "namespace": namespace}
    role = {"apiGroup": rbac, "kind": "Role", "name": name}
    return [
        _object("v1", "ServiceAccount", request),
        _object(f"{rbac}/v1", "Role", request) | {"rules": [rule]},
        _object(f"{rbac}/v1", "RoleBinding", request) | {"roleRef": role, "subjects": [subject]},
    ]


def _kueue_labels(request: LaunchRequest) -> dict[str, str]:
    settings = request.config.launch.kubernetes
    if not uses_kueue(request):
        return {}
    labels = {f"{KUEUE}/queue-name": settings.queue}
    if settings.priority_class:
        labels[f"{KUEUE}/priority-class"] = settings.priority_class
    return labels


def _pod(template: PodTemplate) -> Object:
    """A pod's template with what asks for a domain and a priority.

    Kueue reads an annotation. Without it, the scheduler itself puts pods next to each other."""
    request, settings, pod = template.request, template.settings, template.make()
    if settings.priority_class and not uses_kueue(request):
        pod["spec"]["priorityClassName"] = settings.priority_class
    if settings.topology == "none":
        return pod
    if uses_kueue(request):
        key = f"{KUEUE}/podset-{settings.topology}-topology"
        pod["metadata"]["annotations"] = {key: settings.topology_level}
        return pod
    selector = {"matchLabels": {RUN_LABEL: job_name(request)}}
    term = {"labelSelector": selector, "topologyKey": settings.topology_level}
    moment = "DuringSchedulingIgnoredDuringExecution"
    if settings.topology == "required":
        near: Object = {f"required{moment}": [term]}
    else:
        near = {f"preferred{moment}": [{"weight": 100, "podAffinityTerm": term}]}
    pod["spec"]["affinity"] = {"podAffinity": near}
    return pod


def _job_spec(template: PodTemplate, pod: Object | None = None) -> Object:
    """A pod that is lost is replaced, and the new one joins the run. Nothing else is restarted."""
    nodes, exits = template.request.all_nodes, {"containerName": template.container}
    left = exits | {"operator": "In", "values": [LEFT_EXIT_CODE]}
    wrong = exits | {"operator": "In", "values": [USER_ERROR_EXIT_CODE]}
    rules = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": left},
        {"action": "FailIndex", "onExitCodes": wrong},
    ]
    return {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        "backoffLimitPerIndex": FAILURES_OF_A_NODE,
        "podFailurePolicy": {"rules": rules},
        "template": pod or _pod(template),
    }


# --- kinds ----------------------------------------------------------------------------------------
def _job(template: PodTemplate) -> list[Object]:
    request, spec = template.request, _job_spec(template)
    job = _object("batch/v1", "Job", request, spec, labels=_kueue_labels(request))
    least = request.config.cluster.min_nodes
    if uses_kueue(request) and least < request.all_nodes:  # Kueue may admit fewer nodes
        job["metadata"]["annotations"] = {
            f"{KUEUE}/job-min-parallelism": str(least),
            f"{KUEUE}/job-completions-equal-parallelism": "true",
        }
    return [job]


def _job_set(template: PodTemplate) -> list[Object]:
    request, job = template.request, {"spec": _job_spec(template)}
    jobs = [{"name": TASK, "replicas": 1, "template": job}]
    spec = {"failurePolicy": {"maxRestarts": 0}, "replicatedJobs": jobs}
    labels = _kueue_labels(request)
    return [_object("jobset.x-k8s.io/v1alpha2", "JobSet", request, spec, labels=labels)]


def _volcano(template: PodTemplate) -> list[Object]:
    """Volcano makes the PodGroup itself, of `minAvailable` pods."""
    request, settings = template.request, template.settings
    least = min(request.config.cluster.min_nodes, request.all_nodes)
    spec: Object = {
        "schedulerName": "volcano",
        "minAvailable": least,
        "maxRetry": FAILURES_OF_A_NODE * request.all_nodes,
    }
    if settings.queue:
        spec["queue"] = settings.queue
    if settings.priority_class:
        spec["priorityClassName"] = settings.priority_class
    if settings.topology == "required":
        tier = int(settings.topology_level)
        spec["networkTopology"] = {"mode": "hard", "highestTierAllowed": tier}
    elif settings.topology == "preferred":
        spec["networkTopology"] = {"mode": "soft"}
    events = ("PodFailed", "PodEvicted")
    spec["tasks"] = [
        {
            "name": TASK,
            "replicas": request.all_nodes,
            "minAvailable": least,
            "policies": [{"event": event, "action": "RestartPod"} for event in events],
            "template": template.make(),
        }
    ]
    return [_object("batch.volcano.sh/v1alpha1", "Job", request, spec)]


def _trainer(template: PodTemplate) -> list[Object]:
    """A runtime of the run's own, and a TrainJob of it."""
    group, request = "trainer.kubeflow.org", template.request
    nodes, name = request.all_nodes, job_name(request)
    job = {
        "metadata": {"labels": {f"{group}/trainjob-ancestor-step": "trainer"}},
        "spec": _job_spec(template),
    }
    jobs = {
        "failurePolicy": {"maxRestarts": 0},
        "replicatedJobs": [{"name": TASK, "template": job}],
    }
    runtime = {"mlPolicy": {"numNodes": nodes}, "template": {"spec": jobs}}
    train_job = {
        "runtimeRef": {"apiGroup": group, "kind": "TrainingRuntime", "name": name},
        "trainer": {"numNodes": nodes},
    }
    version, labels = f"{group}/v1alpha1", _kueue_labels(request)
    return [
        _object(version, "TrainingRuntime", request, runtime),
        _object(version, "TrainJob", request, train_job, labels=labels),
    ]


def _ray_cluster(template: PodTemplate) -> list[Object]:
    """Pods of Ray, each with an agent next to Ray's own container. The agents get the accelerators,
    and Ray counts none of a node's: it is there for `holdfast data prepare RUN_FILE --on ray`."""
    request, settings, nodes = template.request, template.settings, template.request.all_nodes

    def ray(name: str) -> Object:
        small = {"cpu": "1", "memory": "2Gi"}
        return {
            "name": name,
            "image": settings.image,
            "resources": {"requests": small, "limits": {"memory": "2Gi"}},
            "securityContext": restricted(),
        }

    pod = _pod(template)
    pod["spec"]["containers"].insert(0, ray("ray-worker"))
    head: Object = {
        "serviceAccountName": account_name(request),
        "securityContext": template.spec()["securityContext"],
        "containers": [ray("ray-head")],
    }
    if settings.pull_secret:
        head["imagePullSecrets"] = [{"name": settings.pull_secret}]
    group = {
        "groupName": TASK,
        "replicas": nodes,
        "minReplicas": nodes,
        "maxReplicas": nodes,
        "rayStartParams": {"num-cpus": "1", "num-gpus": "0"},
        "template": pod,
    }
    spec = {
        "headGroupSpec": {"rayStartParams": {"num-cpus": "0"}, "template": {"spec": head}},
        "workerGroupSpecs": [group],
    }
    return [_object("ray.io/v1", "RayCluster", request, spec, labels=_kueue_labels(request))]


def _yunikorn(template: PodTemplate) -> list[Object]:
    """A plain Job whose pods YuniKorn starts together."""
    request, settings, pod = template.request, template.settings, _pod(template)
    pod["metadata"]["labels"]["applicationId"] = job_name(request)
    if settings.queue:
        pod["metadata"]["labels"]["queue"] = settings.queue
    group: Object = {
        "name": TASK,
        "minMember": min(request.config.cluster.min_nodes, request.all_nodes),
        "minResource": template.requests(),
    }
    for key in ("nodeSelector", "tolerations", "affinity"):  # a placeholder needs the pod's own
        if key in pod["spec"]:
            group[key] = pod["spec"][key]
    pod["metadata"]["annotations"] = {
        "yunikorn.apache.org/task-group-name": TASK,
        "yunikorn.apache.org/task-groups": json.dumps([group]),
        "yunikorn.apache.org/schedulingPolicyParameters": "gangSchedulingStyle=Hard",
    }
    pod["spec"]["schedulerName"] = "yunikorn"
    return [_object("batch/v1", "Job", request, _job_spec(template, pod))]


def _kubedl(template: PodTemplate) -> list[Object]:
    """A PyTorchJob, whose first node KubeDL calls the master. To Holdfast all nodes are alike."""
    nodes = template.request.all_nodes
    counts = {"Master": 1} | ({"Worker": nodes - 1} if nodes > 1 else {})
    replicas = {
        name: {"replicas": count, "restartPolicy": "ExitCode", "template": _pod(template)}
        for name, count in counts.items()
    }
    spec = {"cleanPodPolicy": "None", "pytorchReplicaSpecs": replicas}
    return [_object("training.kubedl.io/v1alpha1", "PyTorchJob", template.request, spec)]


KINDS: dict[str, KindOfJob] = {
    "job": KindOfJob("jobs.batch", _job, grows=True),
    "jobset": KindOfJob("jobsets.jobset.x-k8s.io", _job_set),
    "volcano": KindOfJob("jobs.batch.volcano.sh", _volcano, grows=True),
    "trainer": KindOfJob("trainjobs.trainer.kubeflow.org", _trainer, container=TASK),
    "kuberay": KindOfJob("rayclusters.ray.io", _ray_cluster, restart="OnFailure", grows=True),
    "yunikorn": KindOfJob("jobs.batch", _yunikorn, grows=True),
    "kubedl": KindOfJob("pytorchjobs.training.kubedl.io", _kubedl, container="pytorch"),
}


def refuse_resize(request: LaunchRequest) -> None:
    """Raises ConfigError for a kind whose number of nodes is fixed."""
    kind = request.config.launch.kubernetes.kind
    if not KINDS[kind].grows:
        growing = ", ".join(name for name, each in KINDS.items() if each.grows)
        raise ConfigError(
            f"a {kind} on Kubernetes keeps its number of nodes",
            where="launch.nodes",
            remedy=f"end it with holdfast down and launch it again, or use one of {growing}",
        )
