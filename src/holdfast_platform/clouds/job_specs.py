"""Jobs of managed services that start a run's nodes, as each service's own tool reads them. Pure.

Each node runs `holdfast join` and finds the other nodes by the run store.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.launch.owners.owner import LaunchRequest
from holdfast.wire.secret import SECRET_FILE_VARIABLE

SECRET_PATH = "/run/holdfast/secret"
SECRET_SOURCE_VARIABLE = "HOLDFAST_SECRET_FROM"
_HOUR_S = 3600


@dataclass(frozen=True)
class ServiceSettings:
    """Settings of a service's job.

    image: container image with Holdfast. machine: the service's own name of a type of node.
    accelerator, count: of a node; "" and 0 for CPUs. region, role: "" leaves them to the service's
    defaults. spot: machines that may be taken back. hours: after which the service ends the job.
    secret: name of the run's secret in the cloud's own manager of secrets. disk_gb: of a node.
    """

    image: str
    machine: str = ""
    accelerator: str = ""
    count: int = 0
    region: str = ""
    role: str = ""
    spot: bool = False
    hours: float = 24.0
    secret: str = ""
    disk_gb: int = 100


def join_line(request: LaunchRequest, node: str) -> str:
    """Return the shell line with which a node takes part. node: its name, as the shell fills it
    in."""
    name = "NODE-NAME"
    words = shlex.join(["holdfast", *request.join_arguments(name)])
    return f"exec {words}".replace(name, f'"{node}"')


def job_name(request: LaunchRequest) -> str:
    """The run's name as all services accept it: letters, digits and hyphens."""
    name = "".join(c if c.isascii() and c.isalnum() else "-" for c in request.name).strip("-")
    return f"holdfast-{name}"[:60].rstrip("-")


# --- SkyPilot -------------------------------------------------------------------------------------
def skypilot_task(request: LaunchRequest, settings: ServiceSettings) -> dict[str, Any]:
    """A task file of SkyPilot (`sky launch`, or `sky jobs launch` for one that is started again).

    Read: sky/utils/schemas.py of SkyPilot 0.14. SkyPilot finds the cheapest cloud that has the
    machines; `--region` and `--machine` narrow its choice.
    """
    resources: dict[str, Any] = {
        "image_id": f"docker:{settings.image}",
        "use_spot": settings.spot,
        "disk_size": settings.disk_gb,
    }
    if settings.accelerator:
        resources["accelerators"] = {settings.accelerator: settings.count or 1}
    if settings.machine:
        resources["instance_type"] = settings.machine
    if settings.region:
        resources["region"] = settings.region
    return {
        "name": job_name(request),
        "num_nodes": request.all_nodes,
        "resources": resources,
        "file_mounts": {SECRET_PATH: str(request.secret_file)},
        "envs": {SECRET_FILE_VARIABLE: SECRET_PATH},
        "run": f"chmod 600 {SECRET_PATH}\n{join_line(request, 'node-$SKYPILOT_NODE_RANK')}\n",
    }


# --- SageMaker ------------------------------------------------------------------------------------
_SAGEMAKER_NODE = (
    'node=$(python3 -c "import json; '
    "print(json.load(open('/opt/ml/input/config/resourceconfig.json'))['current_host'])\")"
)
"""SageMaker fills in `SM_CURRENT_HOST` only for its own toolkit, so a file tells the name."""


def sagemaker_job(request: LaunchRequest, settings: ServiceSettings) -> dict[str, Any]:
    """A request `CreateTrainingJob` of Amazon SageMaker, as `aws sagemaker create-training-job
    --cli-input-json` takes it.

    SageMaker takes back all spot nodes of a job at once and starts the job again: the run resumes
    from its bucket. The job writes into the run's bucket itself; SageMaker demands a place for an
    archive of its own, too.
    """
    runtime = round(settings.hours * _HOUR_S)
    stopping = {"MaxRuntimeInSeconds": runtime}
    if settings.spot:
        stopping["MaxWaitTimeInSeconds"] = 2 * runtime
    bucket = request.location.partition("?")[0].rstrip("/")
    line = f"{_SAGEMAKER_NODE}; {join_line(request, '$node')}"
    return {
        "TrainingJobName": job_name(request),
        "RoleArn": settings.role,
        "AlgorithmSpecification": {
            "TrainingImage": settings.image,
            "TrainingInputMode": "File",
            "ContainerEntrypoint": ["sh", "-c", line],
        },
        "OutputDataConfig": {"S3OutputPath": f"{bucket}/sagemaker"},
        "ResourceConfig": {
            "InstanceType": settings.machine,
            "InstanceCount": request.all_nodes,
            "VolumeSizeInGB": settings.disk_gb,
        },
        "EnableManagedSpotTraining": settings.spot,
        "StoppingCondition": stopping,
        "Environment": {SECRET_SOURCE_VARIABLE: f"aws:{settings.secret}"},
    }


# --- Vertex AI ------------------------------------------------------------------------------------
_VERTEX_ACCELERATORS = {
    "H100": "NVIDIA_H100_80GB",
    "H200": "NVIDIA_H200_141GB",
    "A100-80": "NVIDIA_A100_80GB",
    "A100-40": "NVIDIA_TESLA_A100",
    "L4": "NVIDIA_L4",
    "T4": "NVIDIA_TESLA_T4",
    "V100": "NVIDIA_TESLA_V100",
}


def vertex_job(request: LaunchRequest, settings: ServiceSettings) -> dict[str, Any]:
    """A `CustomJob` of Google Vertex AI, in the REST form (`projects.locations.customJobs.create`).

    The first worker pool has one replica by rule; the other nodes are the second pool. They do the
    same: the node that comes first leads.
    """
    scheduling: dict[str, Any] = {
        "timeout": f"{round(settings.hours * _HOUR_S)}s",
        "restartJobOnWorkerRestart": False,
    }
    if settings.spot:
        scheduling["strategy"] = "SPOT"
    sizes = (1, request.all_nodes - 1) if request.all_nodes > 1 else (1,)
    pools = [_vertex_pool(request, settings, size) for size in sizes]
    spec: dict[str, Any] = {"workerPoolSpecs": pools, "scheduling": scheduling}
    if settings.role:
        spec["serviceAccount"] = settings.role
    return {"displayName": job_name(request), "jobSpec": spec}


def _vertex_pool(
    request: LaunchRequest, settings: ServiceSettings, replicas: int
) -> dict[str, Any]:
    machine: dict[str, Any] = {"machineType": settings.machine}
    if kind := settings.accelerator:
        machine["acceleratorType"] = _VERTEX_ACCELERATORS.get(kind, kind)
        machine["acceleratorCount"] = settings.count or 1
    return {
        "machineSpec": machine,
        "replicaCount": str(replicas),
        "diskSpec": {"bootDiskType": "pd-ssd", "bootDiskSizeGb": settings.disk_gb},
        "containerSpec": {
            "imageUri": settings.image,
            "command": ["sh", "-c", join_line(request, "$(hostname)")],
            "env": [{"name": SECRET_SOURCE_VARIABLE, "value": f"google:{settings.secret}"}],
        },
    }


# --- Azure ML -------------------------------------------------------------------------------------
def azure_ml_job(request: LaunchRequest, settings: ServiceSettings) -> dict[str, Any]:
    """A command job of Azure Machine Learning (`az ml job create --file`), in its YAML form.

    With `type: pytorch`, Azure starts one process on each node and tells it NODE_RANK. `join` does
    not read what Azure tells torch, too. machine: the name of a compute cluster of the workspace,
    whose nodes are spot or not by its own tier.
    """
    return {
        "$schema": "https://azuremlschemas.azureedge.net/latest/commandJob.schema.json",
        "type": "command",
        "name": job_name(request),
        "display_name": request.name,
        "experiment_name": "holdfast",
        "command": join_line(request, "node-$NODE_RANK"),
        "environment": {"image": settings.image},
        "compute": f"azureml:{settings.machine}",
        "resources": {"instance_count": request.all_nodes, "shm_size": "64g"},
        "distribution": {"type": "pytorch", "process_count_per_instance": 1},
        "environment_variables": {SECRET_SOURCE_VARIABLE: f"azure:{settings.secret}"},
        "limits": {"timeout": round(settings.hours * _HOUR_S)},
    }


# --- Runpod ---------------------------------------------------------------------------------------
_RUNPOD_GPU_TYPES = {
    "H100": "NVIDIA H100 80GB HBM3",
    "H200": "NVIDIA H200",
    "B200": "NVIDIA B200",
    "A100-80": "NVIDIA A100-SXM4-80GB",
    "L40S": "NVIDIA L40S",
    "L4": "NVIDIA L4",
    "MI300X": "AMD Instinct MI300X OAM",
}


def runpod_pods(request: LaunchRequest, settings: ServiceSettings) -> list[dict[str, Any]]:
    """Bodies of `POST https://rest.runpod.io/v1/pods`, one for each node.

    Pods of one data centre with global networking reach each other by 100 Mbit/s at most. That is
    enough for the control and for small models; a faster network needs an Instant Cluster, which
    this interface cannot order. Runpod has no manager of secrets for pods: it fills in its own
    secrets with `{{ RUNPOD_SECRET_NAME }}` in the environment.
    """
    shared: dict[str, Any] = {
        "imageName": settings.image,
        "cloudType": "SECURE",
        "computeType": "GPU" if settings.accelerator else "CPU",
        "interruptible": settings.spot,
        "containerDiskInGb": settings.disk_gb,
        "globalNetworking": True,
        "ports": [],
        "dockerEntrypoint": ["sh", "-c"],
    }
    more: dict[str, Any] = {
        "env": {"HOLDFAST_SECRET": f"{{{{ RUNPOD_SECRET_{settings.secret} }}}}"}
    }
    if kind := settings.accelerator:
        more |= {"gpuTypeIds": [_RUNPOD_GPU_TYPES.get(kind, kind)], "gpuCount": settings.count or 1}
    if settings.region:
        more["dataCenterIds"] = [settings.region]
    return [
        {"name": f"{job_name(request)}-{number}"}
        | shared
        | {"dockerStartCmd": [join_line(request, f"node-{number}")]}
        | more
        for number in range(request.all_nodes)
    ]


JOBS: Mapping[
    str, Callable[[LaunchRequest, ServiceSettings], dict[str, Any] | list[dict[str, Any]]]
] = {
    "skypilot": skypilot_task,
    "sagemaker": sagemaker_job,
    "vertex": vertex_job,
    "azure-ml": azure_ml_job,
    "runpod": runpod_pods,
}
"""By the name of the service."""
