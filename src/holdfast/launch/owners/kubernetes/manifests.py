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
    restricted,
    secret_name,
)
from holdfast.launch.owners.owner import LaunchRequest

USER_ERROR_EXIT_CODE = 2
FAILURES_OF_A_NODE = 100
"""Failures of one node's pods before Kubernetes gives the node up. Losses do not count."""
KUEUE = "kueue.x-k8s.io"
_KUEUE_KINDS = ("job", "jobset", "trainer", "kuberay")
TASK = "node"
"""Name of the pods' group within a job. Kubeflow Trainer asks for this one."""


@dataclass(frozen=True)
class KindOfJob:
    """resource: what kubectl calls it. make: returns the objects of a request, the job last.
    container: name of the agent's container. grows: its number of nodes can be changed."""

    resource: str
    make: Callable[[LaunchRequest, PodTemplate], list[Object]]
    container: str = AGENT
    restart: str = "Never"
    grows: bool = False


def uses_kueue(request: LaunchRequest) -> bool:
    settings = request.config.launch.kubernetes
    return bool(settings.queue) and settings.kind in _KUEUE_KINDS


def make_objects(request: LaunchRequest) -> list[Object]:
    """Return all objects of a run but its secret. Raises ConfigError."""
    kind = KINDS[request.config.launch.kubernetes.kind]
    template = PodTemplate(request, kind.container, kind.restart)
    return [*_account(request), *kind.make(request, template)]


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
    version: str, kind: str, request: LaunchRequest, *, name: str = "", labels: Object | None = None
) -> Object:
    settings, own = request.config.launch.kubernetes, job_name(request)
    metadata: Object = {"name": name or own, "namespace": settings.namespace}
    metadata["labels"] = {"app.kubernetes.io/name": "holdfast", RUN_LABEL: own} | (labels or {})
    return {"apiVersion": version, "kind": kind, "metadata": metadata}


def _account(request: LaunchRequest) -> list[Object]:
    """The account of the pods: it may read pods of its namespace (docs/guide/notices.md)."""
    if request.config.launch.kubernetes.service_account:
        return []
    namespace, name = request.config.launch.kubernetes.namespace, account_name(request)
    rbac = "rbac.authorization.k8s.io"
    rule = {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}
    subject = {"kind": "ServiceAccount", "name": name, "namespace": namespace}
    return [
        _object("v1", "ServiceAccount", request),
        _object(f"{rbac}/v1", "Role", request) | {"rules": [rule]},
        _object(f"{rbac}/v1", "RoleBinding", request)
        | {
            "roleRef": {"apiGroup": rbac, "kind": "Role", "name": name},
            "subjects": [subject],
        },
    ]


def _kueue_labels(request: LaunchRequest) -> dict[str, str]:
    settings = request.config.launch.kubernetes
    if not uses_kueue(request):
        return {}
    labels = {f"{KUEUE}/queue-name": settings.queue}
    if settings.priority_class:
        labels[f"{KUEUE}/priority-class"] = settings.priority_class
    return labels


def _placed(pod: Object, request: LaunchRequest) -> Object:
    """Add to a pod's template what asks for a domain and a priority.

    Kueue reads an annotation. Without it, the scheduler itself puts pods next to each other."""
    settings = request.config.launch.kubernetes
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


def _job_spec(nodes: int, pod: Object, container: str) -> Object:
    """A pod that is lost is replaced, and the new one joins the run. Nothing else is restarted."""
    left = {"containerName": container, "operator": "In", "values": [LEFT_EXIT_CODE]}
    wrong = {"containerName": container, "operator": "In", "values": [USER_ERROR_EXIT_CODE]}
    disrupted = {"type": "DisruptionTarget", "status": "True"}
    return {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        "backoffLimitPerIndex": FAILURES_OF_A_NODE,
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [disrupted]},
                {"action": "Ignore", "onExitCodes": left},
                {"action": "FailIndex", "onExitCodes": wrong},
            ]
        },
        "template": pod,
    }


# --- kinds ----------------------------------------------------------------------------------------
def _job(request: LaunchRequest, template: PodTemplate) -> list[Object]:
    job = _object("batch/v1", "Job", request, labels=_kueue_labels(request))
    least, nodes = request.config.cluster.min_nodes, request.all_nodes
    if uses_kueue(request) and least < nodes:  # Kueue may admit fewer nodes than are asked for
        job["metadata"]["annotations"] = {
            f"{KUEUE}/job-min-parallelism": str(least),
            f"{KUEUE}/job-completions-equal-parallelism": "true",
        }
    pod = _placed(template.make(), request)
    return [job | {"spec": _job_spec(nodes, pod, template.container)}]


def _job_set(request: LaunchRequest, template: PodTemplate) -> list[Object]:
    job_set = _object("jobset.x-k8s.io/v1alpha2", "JobSet", request, labels=_kueue_labels(request))
    pod = _placed(template.make(), request)
    job = {"spec": _job_spec(request.all_nodes, pod, template.container)}
    return [
        job_set
        | {
            "spec": {
                "failurePolicy": {"maxRestarts": 0},
                "replicatedJobs": [{"name": TASK, "replicas": 1, "template": job}],
            }
        }
    ]


def _volcano(request: LaunchRequest, template: PodTemplate) -> list[Object]:
    """Volcano makes the PodGroup itself, of `minAvailable` pods."""
    settings = request.config.launch.kubernetes
    least = min(request.config.cluster.min_nodes, request.all_nodes)
    again = [
        {"event": "PodFailed", "action": "RestartPod"},
        {"event": "PodEvicted", "action": "RestartPod"},
    ]
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
    spec["tasks"] = [
        {
            "name": TASK,
            "replicas": request.all_nodes,
            "minAvailable": least,
            "policies": again,
            "template": template.make(),
        }
    ]
    return [_object("batch.volcano.sh/v1alpha1", "Job", request) | {"spec": spec}]


def _trainer(request: LaunchRequest, template: PodTemplate) -> list[Object]:
    """A runtime of the run's own, and a TrainJob of it."""
    group, nodes = "trainer.kubeflow.org", request.all_nodes
    pod = _placed(template.make(), request)
    job = {
        "metadata": {"labels": {f"{group}/trainjob-ancestor-step": "trainer"}},
        "spec": _job_spec(nodes, pod, template.container),
    }
    runtime = _object(f"{group}/v1alpha1", "TrainingRuntime", request) | {
        "spec": {
            "mlPolicy": {"numNodes": nodes},
            "template": {
                "spec": {
                    "failurePolicy": {"maxRestarts": 0},
                    "replicatedJobs": [{"name": TASK, "template": job}],
                }
            },
        }
    }
    train_job = _object(f"{group}/v1alpha1", "TrainJob", request, labels=_kueue_labels(request)) | {
        "spec": {
            "runtimeRef": {"apiGroup": group, "kind": "TrainingRuntime", "name": job_name(request)},
            "trainer": {"numNodes": nodes},
        }
    }
    return [runtime, train_job]


def _ray_cluster(request: LaunchRequest, template: PodTemplate) -> list[Object]:
    """Pods of Ray, each with an agent next to Ray's own container. The agents get the accelerators,
    and Ray counts none of a node's: it is there for `holdfast data prepare RUN_FILE --on ray`."""
    settings, nodes = request.config.launch.kubernetes, request.all_nodes

    def ray(name: str) -> Object:
        small = {"cpu": "1", "memory": "2Gi"}
        return {
            "name": name,
            "image": settings.image,
            "resources": {"requests": small, "limits": {"memory": "2Gi"}},
            "securityContext": restricted(),
        }

    pod = _placed(template.make(), request)
    pod["spec"]["containers"].insert(0, ray("ray-worker"))
    head = {
        "spec": {
            "serviceAccountName": account_name(request),
            "securityContext": template.spec()["securityContext"],
            "containers": [ray("ray-head")],
        }
    }
    if settings.pull_secret:
        head["spec"]["imagePullSecrets"] = [{"name": settings.pull_secret}]
    group = {
        "groupName": TASK,
        "replicas": nodes,
        "minReplicas": nodes,
        "maxReplicas": nodes,
        "rayStartParams": {"num-cpus": "1", "num-gpus": "0"},
        "template": pod,
    }
    cluster = _object("ray.io/v1", "RayCluster", request, labels=_kueue_labels(request))
    return [
        cluster
        | {
            "spec": {
                "headGroupSpec": {"rayStartParams": {"num-cpus": "0"}, "template": head},
                "workerGroupSpecs": [group],
            }
        }
    ]


def _yunikorn(request: LaunchRequest, template: PodTemplate) -> list[Object]:
    """A plain Job whose pods YuniKorn starts together."""
    settings = request.config.launch.kubernetes
    pod = _placed(template.make(), request)
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
    job = _object("batch/v1", "Job", request)
    return [job | {"spec": _job_spec(request.all_nodes, pod, template.container)}]


def _kubedl(request: LaunchRequest, template: PodTemplate) -> list[Object]:
    """A PyTorchJob, whose first node KubeDL calls the master. To Holdfast all nodes are alike."""

    def replicas(count: int) -> Object:
        pod = _placed(template.make(), request)
        return {"replicas": count, "restartPolicy": "ExitCode", "template": pod}

    found = {"Master": replicas(1)}
    if request.all_nodes > 1:
        found["Worker"] = replicas(request.all_nodes - 1)
    job = _object("training.kubedl.io/v1alpha1", "PyTorchJob", request)
    return [job | {"spec": {"cleanPodPolicy": "None", "pytorchReplicaSpecs": found}}]


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
