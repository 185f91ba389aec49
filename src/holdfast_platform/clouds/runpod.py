"""Bodies of `POST https://rest.runpod.io/v1/pods`, one for each node.

Pods of one data centre with global networking reach each other by 100 Mbit/s at most. That is
enough for the control and for small models; a faster network needs an Instant Cluster, which this
interface cannot order. Runpod has no manager of secrets for pods: it fills in its own secrets with
`{{ RUNPOD_SECRET_NAME }}` in the environment.
"""

from __future__ import annotations

from typing import Any

from holdfast.launch.owners.owner import LaunchRequest
from holdfast_platform.clouds.settings import ServiceSettings, job_name, join_line

GPU_TYPES = {
    "H100": "NVIDIA H100 80GB HBM3",
    "H200": "NVIDIA H200",
    "B200": "NVIDIA B200",
    "A100-80": "NVIDIA A100-SXM4-80GB",
    "L40S": "NVIDIA L40S",
    "L4": "NVIDIA L4",
    "MI300X": "AMD Instinct MI300X OAM",
}


def pods(request: LaunchRequest, settings: ServiceSettings) -> list[dict[str, Any]]:
    return [_pod(request, settings, number) for number in range(request.all_nodes)]


def _pod(request: LaunchRequest, settings: ServiceSettings, number: int) -> dict[str, Any]:
    node = f"node-{number}"
    body: dict[str, Any] = {
        "name": f"{job_name(request)}-{number}",
        "imageName": settings.image,
        "cloudType": "SECURE",
        "computeType": "GPU" if settings.accelerator else "CPU",
        "interruptible": settings.spot,
        "containerDiskInGb": settings.disk_gb,
        "globalNetworking": True,
        "ports": [],
        "dockerEntrypoint": ["sh", "-c"],
        "dockerStartCmd": [join_line(request, node)],
        "env": {"HOLDFAST_SECRET": f"{{{{ RUNPOD_SECRET_{settings.secret} }}}}"},
    }
    if settings.accelerator:
        body["gpuTypeIds"] = [GPU_TYPES.get(settings.accelerator, settings.accelerator)]
        body["gpuCount"] = settings.count or 1
    if settings.region:
        body["dataCenterIds"] = [settings.region]
    return body
