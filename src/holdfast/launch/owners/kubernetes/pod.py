"""The pod of one node: an agent, the run's secret, shared memory and the run folder.

All kinds of jobs start the same pod. What a kind needs differently is an argument of `PodTemplate`.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.config.run import RunConfig
from holdfast.config.sections.launch import TOLERATION, KubernetesConfig
from holdfast.elastic.notices.kubernetes import NODE as NODE_VARIABLE
from holdfast.elastic.notices.kubernetes import POD_NAME_VARIABLE, POD_NAMESPACE_VARIABLE
from holdfast.errors import ConfigError
from holdfast.launch.node.node_place import ZONE_VARIABLE
from holdfast.launch.owners.owner import LaunchRequest
from holdfast.wire.secret import SECRET_FILE_VARIABLE

Object = dict[str, Any]

RUN_LABEL = "holdfast/run"  # Label of a node's pod; its value is the name of the job
AGENT = "agent"
METRICS_PORT = 9400
"""Port of `/healthz` in a pod if `cluster.metrics_port` is 0: probes need a number."""
DEFAULT_GRACE_S = 30
"""What Kubernetes grants a pod between SIGTERM and SIGKILL if nothing else is asked for."""
LEFT_EXIT_CODE = 143
"""Exit code of a node that leaves before the run's last step. Kubernetes counts a pod that exits
with 0 as done and never replaces it, also after an eviction (kubernetes/kubernetes#118310)."""
ZONE_LABEL = "topology.kubernetes.io/zone"
"""Kubernetes 1.35 and later copies this label of the machine to the pod. Otherwise it is empty."""
SECRET_FOLDER = "/etc/holdfast"
SECRET_KEY = "secret"
STARTUP_S, PROBE_S, PROBE_TIMEOUT_S = 600, 10, 5
"""Seconds until an agent has to listen, between two probes, and until an answer."""
_LONGEST_NAME = 40  # a JobSet makes names of 23 more characters from it; 63 are allowed
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def job_name(request: LaunchRequest) -> str:
    """Return a name for the objects of a run: as a DNS label, and another for each run store."""
    word = re.sub(r"[^a-z0-9-]+", "-", request.name.lower()).strip("-") or "run"
    digest = hashlib.sha256(request.location.encode()).hexdigest()[:6]
    return f"hf-{word[: _LONGEST_NAME - 10].rstrip('-')}-{digest}"


def secret_name(request: LaunchRequest) -> str:
    return request.config.launch.kubernetes.secret or f"{job_name(request)}-secret"


def account_name(request: LaunchRequest) -> str:
    return request.config.launch.kubernetes.service_account or job_name(request)


def mount_path(request: LaunchRequest) -> str | None:
    """Return where the claim of the run folder is mounted; None for a run store in a bucket."""
    settings = request.config.launch.kubernetes
    if "://" in request.location:
        return settings.claim_at or None if settings.claim else None
    return settings.claim_at or str(Path(request.location).parent)


def refuse_incomplete(request: LaunchRequest) -> None:
    """Raises ConfigError, one for all that pods lack."""
    config, at, found = request.config, mount_path(request), list[str]()
    settings, is_folder = config.launch.kubernetes, "://" not in request.location

    def add(what: str, where: str, remedy: str) -> None:
        found.append(str(ConfigError(what, where=where, remedy=remedy)))

    if not settings.image:
        remedy = "build one (docs/guide/deploy.md) and use launch.kubernetes.image=NAME:TAG"
        add("no image is named for the pods", "launch.kubernetes.image", remedy)
    if config.device == "cuda" and not settings.gpus:
        remedy = f"use launch.kubernetes.gpus={config.cluster.places or 1}"
        what = "device cuda needs accelerators, and pods ask for none"
        add(what, "launch.kubernetes.gpus", remedy)
    shared, memory = settings.shared_memory, settings.memory
    if shared and memory and bytes_of(shared) > bytes_of(memory):
        what = f"shared memory of {shared} counts as memory of the pod, which is {memory}"
        add(what, "launch.kubernetes.shared_memory", f"use at most {memory}, or more memory")
    if is_folder and not settings.claim:
        remedy = "name the volume that it lies on, with launch.kubernetes.claim=NAME"
        add("pods cannot reach a run folder on this machine's disk", request.location, remedy)
    if is_folder and not Path(request.location).is_relative_to(at or "/"):
        remedy = f"use launch.kubernetes.claim_at={Path(request.location).parent}"
        what = f"the run folder {request.location} does not lie on the claim"
        add(what, f"launch.kubernetes.claim_at={at}", remedy)
    data = os.path.abspath(config.data.folder)
    is_there = at is not None and Path(data).is_relative_to(at)
    if not (is_there or "://" in config.data.folder or config.has_own_data):
        remedy = f"prepare it on the claim, as data.folder={at or 'PATH'}/dataset, or in a bucket"
        add(f"pods cannot reach the dataset in {data}", "data.folder", remedy)
    if found:
        raise ConfigError("\n".join(found))


def bytes_of(quantity: str) -> int:
    """Return the bytes of a quantity such as 64Gi."""
    parts = re.fullmatch(r"([0-9.]+)([a-zA-Z]*)", quantity)
    assert parts is not None  # as the section's pattern demands
    number, unit = parts.groups()
    return int(float(number) * _UNITS.get(unit, 1))


@dataclass(frozen=True)
class PodTemplate:
    """Makes the template of a node's pod.

    container: name of the agent's container. restart: `restartPolicy` of the pod.
    """

    request: LaunchRequest
    container: str = AGENT
    restart: str = "Never"

    @property
    def config(self) -> RunConfig:
        return self.request.config

    @property
    def settings(self) -> KubernetesConfig:
        return self.request.config.launch.kubernetes

    @property
    def grace_s(self) -> int:
        return math.ceil(self.config.cluster.grace_seconds) or DEFAULT_GRACE_S

    @property
    def port(self) -> int:
        return self.config.cluster.metrics_port or METRICS_PORT

    def labels(self) -> dict[str, str]:
        return {"app.kubernetes.io/name": "holdfast", RUN_LABEL: job_name(self.request)}

    def make(self) -> Object:
        """Return the template with its metadata."""
        return {"metadata": {"labels": self.labels()}, "spec": self.spec()}

    def spec(self) -> Object:
        settings, user = self.settings, self.settings.user
        spec: Object = {
            "restartPolicy": self.restart,
            "terminationGracePeriodSeconds": self.grace_s,
            "serviceAccountName": account_name(self.request),
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": user,
                "runAsGroup": user,
                "fsGroup": user,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [self.agent()],
            "volumes": self.volumes(),
        }
        if settings.pull_secret:
            spec["imagePullSecrets"] = [{"name": settings.pull_secret}]
        if settings.node_selector:
            spec["nodeSelector"] = dict(pair.split("=", 1) for pair in settings.node_selector)
        if settings.tolerations:
            spec["tolerations"] = [_toleration(each) for each in settings.tolerations]
        return spec

    def agent(self) -> Object:
        """Return the container of the node's agent."""
        agent: Object = {
            "name": self.container,
            "image": self.settings.image,
            "command": ["holdfast"],
            "args": self.arguments(),
            "env": environment(),
            "ports": [{"name": "health", "containerPort": self.port}],
            "resources": self.resources(),
            "securityContext": restricted(),
            "volumeMounts": self.mounts(),
            "startupProbe": self.probe(PROBE_TIMEOUT_S, STARTUP_S // PROBE_TIMEOUT_S),
            "livenessProbe": self.probe(PROBE_S, 3),
            "readinessProbe": self.probe(PROBE_S, 1),
        }
        if self.settings.environment_from:
            agent["envFrom"] = [
                {"secretRef": {"name": name}} for name in self.settings.environment_from
            ]
        return agent

    def arguments(self) -> list[str]:
        notices = self.config.cluster.notices
        return self.request.join_arguments(
            f"$({POD_NAME_VARIABLE})",
            f"cluster.notices={'kubernetes' if notices == 'none' else notices}",
            f"cluster.grace_seconds={self.grace_s}",
            f"cluster.metrics_port={self.port}",
            f"cluster.left_exit_code={LEFT_EXIT_CODE}",
        )

    def probe(self, period_s: int, failures: int) -> Object:
        return {
            "httpGet": {"path": "/healthz", "port": "health"},
            "periodSeconds": period_s,
            "timeoutSeconds": PROBE_TIMEOUT_S,
            "failureThreshold": failures,
        }

    def requests(self) -> dict[str, str]:
        """Return what a pod asks for, by resource."""
        settings = self.settings
        found = {"cpu": settings.cpu, "memory": settings.memory}
        found[settings.gpu_resource] = str(settings.gpus) if settings.gpus else ""
        found |= dict(pair.split("=", 1) for pair in settings.resources)
        return {name: quantity for name, quantity in found.items() if quantity}

    def resources(self) -> Object:
        """CPUs are no limit: a pod that is throttled misses heartbeats."""
        limits = {name: each for name, each in self.requests().items() if name != "cpu"}
        return {"requests": self.requests()} | ({"limits": limits} if limits else {})

    def mounts(self) -> list[Object]:
        mounts: list[Object] = [
            {"name": "secret", "mountPath": SECRET_FOLDER, "readOnly": True},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
            {"name": "temporary", "mountPath": "/tmp"},
        ]
        if (at := mount_path(self.request)) is not None:
            mounts.append({"name": "runs", "mountPath": at})
        return mounts

    def volumes(self) -> list[Object]:
        settings = self.settings
        shared = settings.shared_memory
        if not shared and settings.memory:
            shared = f"{bytes_of(settings.memory) // 2**21}Mi"
        memory: Object = {"medium": "Memory"} | ({"sizeLimit": shared} if shared else {})
        volumes: list[Object] = [
            # 0400. fsGroup adds the group's right to read, which a process that is not root needs.
            {
                "name": "secret",
                "secret": {"secretName": secret_name(self.request), "defaultMode": 0o400},
            },
            {"name": "shared-memory", "emptyDir": memory},
            {"name": "temporary", "emptyDir": {}},
        ]
        if mount_path(self.request) is not None:
            volumes.append({"name": "runs", "persistentVolumeClaim": {"claimName": settings.claim}})
        return volumes


def environment() -> list[Object]:
    """Return the variables of an agent; no secret is among them."""
    fields = {
        POD_NAME_VARIABLE: "metadata.name",
        POD_NAMESPACE_VARIABLE: "metadata.namespace",
        NODE_VARIABLE: "spec.nodeName",
        ZONE_VARIABLE: f"metadata.labels['{ZONE_LABEL}']",
    }
    given = {
        SECRET_FILE_VARIABLE: f"{SECRET_FOLDER}/{SECRET_KEY}",
        "HOME": "/tmp",  # the image may not know the user's number
        "USER": "holdfast",
        "PYTHONUNBUFFERED": "1",
    }
    found = [{"name": n, "valueFrom": {"fieldRef": {"fieldPath": at}}} for n, at in fields.items()]
    return [*found, *({"name": name, "value": value} for name, value in given.items())]


def restricted() -> Object:
    """Return the security context of a container under the `restricted` Pod Security Standard."""
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def _toleration(taint: str) -> Object:
    found = TOLERATION.fullmatch(taint)
    assert found is not None  # the run file was checked
    key, value, effect = found["key"], found["value"], found["effect"]
    if value is None:
        return {"key": key, "operator": "Exists", "effect": effect}
    return {"key": key, "operator": "Equal", "value": value, "effect": effect}
