"""A Kubernetes cluster as an owner: one pod for each node, started by a job of the kind that
`launch.kubernetes.kind` names. Everything is asked of the cluster through kubectl."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Iterator
from contextlib import suppress

from holdfast.config.sections.launch import KubernetesConfig
from holdfast.errors import ConfigError
from holdfast.launch.owners.kubernetes.kubectl import Kubectl, KubectlError, NotFoundError
from holdfast.launch.owners.kubernetes.manifests import (
    KINDS,
    KUEUE,
    make_objects,
    make_secret,
    refuse_resize,
    to_yaml,
    uses_kueue,
)
from holdfast.launch.owners.kubernetes.pod import SECRET_KEY, job_name, secret_name
from holdfast.launch.owners.kubernetes.status import (
    JobReader,
    is_missing_pod,
    pod_name,
    topology_warnings,
)
from holdfast.launch.owners.owner import LaunchRequest, NodeStatus, OwnedJob, chosen_nodes
from holdfast.wire.secret import open_secret

DELETE_TIMEOUT_S = 60


class KubernetesOwner:
    """Implements `MachineOwner`."""

    def describe(self, request: LaunchRequest) -> str:
        """Return the objects as YAML. The content of the Secret is not for a screen."""
        text = to_yaml(make_objects(request))
        if request.config.launch.kubernetes.secret:
            return text
        namespace = request.config.launch.kubernetes.namespace
        words = ["kubectl", "create", "secret", "generic", secret_name(request)]
        words += [f"--namespace={namespace}", f"--from-file={SECRET_KEY}={request.secret_file}"]
        made = f"# Secret {secret_name(request)} is not shown; 'holdfast launch' makes it, as with:"
        return f"{made}\n# {shlex.join(words)}\n{text}"

    def check(self, request: LaunchRequest) -> None:
        make_objects(request)
        kubectl = _kubectl(request.config.launch.kubernetes)
        resource = KINDS[request.config.launch.kubernetes.kind].resource
        kubectl.run("get", resource, job_name(request), "--ignore-not-found", "-o", "name")
        _refuse_unknown_queue(request, kubectl)

    def submit(self, request: LaunchRequest) -> OwnedJob:
        """Make the objects of a run, in place of those of an earlier job that has ended."""
        objects, kubectl = make_objects(request), _kubectl(request.config.launch.kubernetes)
        _refuse_unknown_queue(request, kubectl)
        resource = KINDS[request.config.launch.kubernetes.kind].resource
        kubectl.delete(resource, job_name(request), f"--timeout={DELETE_TIMEOUT_S}s")
        if not request.config.launch.kubernetes.secret:
            objects.insert(0, make_secret(request, open_secret(request.folder).hex()))
        job = _owned(request)
        try:
            # The job last: kubectl makes what it may of a list, and fails only then.
            for part in (objects[:-1], objects[-1:]):
                if part:
                    kubectl.apply(to_yaml(part))
        except KubectlError:
            with suppress(KubectlError):
                self.release(job)
            raise
        return job

    def resize(self, job: OwnedJob, request: LaunchRequest) -> OwnedJob:
        if request.all_nodes == job.nodes:
            return job  # the cluster itself replaces the pods that fail
        refuse_resize(request)
        _kubectl(request.config.launch.kubernetes).apply(to_yaml(make_objects(request)))
        return _owned(request)

    def status(self, job: OwnedJob) -> list[NodeStatus]:
        return _reader(job).nodes_by_state()

    def warnings(self, job: OwnedJob) -> list[str]:
        """Return what the cluster has given otherwise than it was asked for."""
        wish, level = job.details["topology"], job.details["topology_level"]
        if wish == "none" or level.isdigit():  # a tier of Volcano is no label of a machine
            return []
        reader = _reader(job)
        try:
            machines = reader.kubectl.items("nodes")
        except KubectlError as error:
            return [f"the machines' labels, which show the topology, cannot be read: {error.words}"]
        labels = {pod_name(each): each["metadata"].get("labels", {}) for each in machines}
        return topology_warnings(reader.pods(), labels, level, wish)

    def logs(self, job: OwnedJob, node: str) -> Iterator[str]:
        reader = _reader(job)
        names = [pod_name(pod) for pod in reader.pods()]
        if is_missing_pod(node):
            return
        container = f"--container={KINDS[_kind(job)].container}"
        for name in chosen_nodes(names, node):
            for line in _lines(reader.kubectl, name, container):
                yield line if node else f"{name}: {line}"

    def release(self, job: OwnedJob) -> None:
        kubectl, run = _reader(job).kubectl, f"--selector=holdfast/run={job.job}"
        kubectl.delete(KINDS[_kind(job)].resource, job.job, "--wait=false")
        if made := job.details["made"]:
            kubectl.delete(made, run, "--wait=false")


def _lines(kubectl: Kubectl, pod: str, container: str) -> list[str]:
    """Return what a pod has printed; nothing for one that has not started."""
    try:
        return kubectl.run("logs", pod, container).splitlines()
    except KubectlError as error:
        if re.search(r"waiting to start|ContainerCreating|PodInitializing", error.words):
            return []
        raise


def _kubectl(settings: KubernetesConfig) -> Kubectl:
    return Kubectl(settings.context, settings.namespace)


def _owned(request: LaunchRequest) -> OwnedJob:
    settings = request.config.launch.kubernetes
    made = [] if settings.secret else ["secrets"]
    made += [] if settings.service_account else ["rolebindings", "roles", "serviceaccounts"]
    made += ["trainingruntimes.trainer.kubeflow.org"] if settings.kind == "trainer" else []
    details = {
        "kind": settings.kind,
        "made": ",".join(made),
        "context": settings.context,
        "namespace": settings.namespace,
        "queue": settings.queue if uses_kueue(request) else "",
        "topology": settings.topology,
        "topology_level": settings.topology_level,
    }
    return OwnedJob("kubernetes", job_name(request), request.all_nodes, details)


def _kind(job: OwnedJob) -> str:
    return job.details["kind"]


def _reader(job: OwnedJob) -> JobReader:
    kubectl = Kubectl(job.details["context"], job.details["namespace"])
    queued = bool(job.details["queue"])
    resource = KINDS[_kind(job)].resource
    return JobReader(kubectl, resource, job.job, job.nodes, queued, time.time())


def _refuse_unknown_queue(request: LaunchRequest, kubectl: Kubectl) -> None:
    """Raises ConfigError if the namespace has no such queue of Kueue."""
    settings = request.config.launch.kubernetes
    if not uses_kueue(request):
        return
    try:
        kubectl.run("get", f"localqueues.{KUEUE}", settings.queue, "-o", "name")
    except NotFoundError as error:
        raise ConfigError(
            f"namespace {settings.namespace} has no queue {settings.queue}: {error.words}",
            where="launch.kubernetes.queue",
            remedy=f"choose one of kubectl get localqueues --namespace {settings.namespace}",
        ) from None
