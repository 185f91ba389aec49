"""A `CustomJob` of Google Vertex AI, in the REST form (`projects.locations.customJobs.create`).

The first worker pool has one replica by rule; the other nodes are the second pool. They do the
same: the node that comes first leads.
"""

from __future__ import annotations

from typing import Any

from holdfast.launch.owners.owner import LaunchRequest
from holdfast_platform.clouds.settings import ServiceSettings, job_name, join_line

SECRET_SOURCE_VARIABLE = "HOLDFAST_SECRET_FROM"
ACCELERATORS = {
    "H100": "NVIDIA_H100_80GB",
    "H200": "NVIDIA_H200_141GB",
    "A100-80": "NVIDIA_A100_80GB",
    "A100-40": "NVIDIA_TESLA_A100",
    "L4": "NVIDIA_L4",
    "T4": "NVIDIA_TESLA_T4",
    "V100": "NVIDIA_TESLA_V100",
}
_HOUR_S = 3600


def custom_job(request: LaunchRequest, settings: ServiceSettings) -> dict[str, Any]:
    scheduling: dict[str, Any] = {
        "timeout": f"{round(settings.hours * _HOUR_S)}s",
        "restartJobOnWorkerRestart": False,
    }
    if settings.spot:
        scheduling["strategy"] = "SPOT"
    pools = [_pool(request, settings, 1)]
    if request.all_nodes > 1:
        pools.append(_pool(request, settings, request.all_nodes - 1))
    spec: dict[str, Any] = {"workerPoolSpecs": pools, "scheduling": scheduling}
    if settings.role:
        spec["serviceAccount"] = settings.role
    return {"displayName": job_name(request), "jobSpec": spec}


def _pool(request: LaunchRequest, settings: ServiceSettings, replicas: int) -> dict[str, Any]:
    machine: dict[str, Any] = {"machineType": settings.machine}
    if settings.accelerator:
        machine["acceleratorType"] = ACCELERATORS.get(settings.accelerator, settings.accelerator)
        machine["acceleratorCount"] = settings.count or 1
    source = {"name": SECRET_SOURCE_VARIABLE, "value": f"google:{settings.secret}"}
    return {
        "machineSpec": machine,
        "replicaCount": str(replicas),
        "diskSpec": {"bootDiskType": "pd-ssd", "bootDiskSizeGb": settings.disk_gb},
        "containerSpec": {
            "imageUri": settings.image,
            "command": ["sh", "-c", join_line(request, "$(hostname)")],
            "env": [source],
        },
    }
