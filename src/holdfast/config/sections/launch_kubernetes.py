"""The section `launch.kubernetes:` of a run file: the pods that a cluster starts."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from holdfast.config.sections.base import Section

QUANTITY = r"^([0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?)?$"
OBJECT_NAME = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$"
TOLERATION = re.compile(
    r"(?P<key>[^=:]+)(=(?P<value>[^:]*))?:(?P<effect>NoSchedule|PreferNoSchedule|NoExecute)"
)

JobKind = Literal["job", "jobset", "volcano", "trainer", "kuberay", "yunikorn", "kubedl"]


class KubernetesConfig(Section):
    """One pod for each node. [kubernetes.md](../guide/kubernetes.md) says which kind suits
    which cluster."""

    kind: JobKind = "job"
    """what is submitted: a Job of Kubernetes, JobSet, Job of Volcano, TrainJob, RayCluster, Job for
    YuniKorn, PyTorchJob of KubeDL"""
    context: str = Field("", description="context of kubectl; empty: the current one")
    namespace: str = Field("default", pattern=OBJECT_NAME, min_length=1)
    """namespace of all objects"""
    image: str = ""
    """image of the pods, which has Holdfast (docs/guide/deploy.md)"""
    pull_secret: str = Field("", pattern=OBJECT_NAME, description="Secret for pulling the image")
    queue: str = ""
    """queue of Kueue (a LocalQueue), or of Volcano or YuniKorn; empty: none"""
    priority_class: str = Field("", pattern=OBJECT_NAME)
    """a WorkloadPriorityClass if Kueue has the queue; otherwise a PriorityClass"""
    topology: Literal["none", "preferred", "required"] = "none"
    """whether all nodes have to lie in one domain of topology_level"""
    topology_level: str = ""
    """label of nodes that names their domain, as topology.kubernetes.io/zone; for Volcano the
    number of the highest tier of HyperNodes"""
    service_account: str = Field("", pattern=OBJECT_NAME)
    """account of the pods; empty: launch makes one that may read pods"""
    cpu: str = Field("", pattern=QUANTITY, description="CPUs of a pod, as 8 or 500m; empty: open")
    memory: str = Field("", pattern=QUANTITY, description="memory of a pod, as 64Gi; empty: open")
    gpus: int = Field(0, ge=0, description="accelerators of a pod")
    gpu_resource: str = Field("nvidia.com/gpu", description="what the cluster calls them")
    resources: tuple[str, ...] = ()
    """further resources of a pod, each as NAME=QUANTITY, as rdma/hca=1"""
    shared_memory: str = Field("", pattern=QUANTITY)
    """size of /dev/shm, which holds snapshots; it counts as memory of the pod. Empty: half of
    launch.kubernetes.memory"""
    node_selector: tuple[str, ...] = ()
    """labels that a pod's node has to have, each as LABEL=VALUE"""
    tolerations: tuple[str, ...] = ()
    """taints that pods tolerate, each as KEY[=VALUE]:EFFECT"""
    claim: str = Field("", pattern=OBJECT_NAME)
    """PersistentVolumeClaim with the run folder; this machine mounts it, too"""
    claim_at: str = Field("", pattern=r"^(/.*)?$")
    """path of the claim, in pods as on this machine; empty: the folder that the run folder lies
    in"""
    secret: str = Field("", pattern=OBJECT_NAME)
    """Secret whose key `secret` is the run's secret; empty: launch makes one"""
    environment_from: tuple[str, ...] = ()
    """Secrets whose keys become variables, as credentials of a bucket"""
    user: int = Field(1000, ge=1, description="number of the user and group of the processes")

    @field_validator("tolerations")
    @classmethod
    def _are_taints(cls, taints: tuple[str, ...]) -> tuple[str, ...]:
        for taint in taints:
            if TOLERATION.fullmatch(taint) is None:
                raise ValueError(
                    f"{taint!r} is no taint: use KEY:NoSchedule or KEY=VALUE:NoExecute"
                )
        return taints

    @field_validator("resources", "node_selector")
    @classmethod
    def _are_pairs(cls, pairs: tuple[str, ...]) -> tuple[str, ...]:
        for pair in pairs:
            if not re.fullmatch(r"[^=\s]+=[^=\s]*", pair):
                raise ValueError(f"{pair!r} is no pair: use NAME=VALUE")
        return pairs

    @model_validator(mode="after")
    def _names_a_level(self) -> KubernetesConfig:
        if self.topology != "none" and not self.topology_level:
            raise ValueError(
                f"launch.kubernetes.topology {self.topology} needs a level: use "
                "topology_level: topology.kubernetes.io/zone, or topology: none"
            )
        if self.kind == "volcano" and self.topology != "none" and not self.topology_level.isdigit():
            raise ValueError(
                "Volcano counts tiers of HyperNodes: use a number as "
                "launch.kubernetes.topology_level, as 1"
            )
        return self
