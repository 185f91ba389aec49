"""A request `CreateTrainingJob` of Amazon SageMaker, as `aws sagemaker create-training-job
--cli-input-json` takes it.

SageMaker takes back all spot nodes of a job at once and starts the job again: the run resumes from
its bucket. It fills in `SM_CURRENT_HOST` only for its own toolkit, so the name comes from its file
`resourceconfig.json`.
"""

from __future__ import annotations

from typing import Any

from holdfast.launch.owners.owner import LaunchRequest
from holdfast_platform.clouds.settings import ServiceSettings, job_name, join_line

SECRET_SOURCE_VARIABLE = "HOLDFAST_SECRET_FROM"
_RESOURCES = "/opt/ml/input/config/resourceconfig.json"
_NODE = (
    "node=$(python3 -c \"import json; print(json.load(open('"
    + _RESOURCES
    + "'))['current_host'])\")"
)
_HOUR_S = 3600


def training_job(request: LaunchRequest, settings: ServiceSettings) -> dict[str, Any]:
    """Return the request. The job writes into the run's bucket itself; SageMaker demands a place
    for an archive of its own, too."""
    runtime = round(settings.hours * _HOUR_S)
    stopping = {"MaxRuntimeInSeconds": runtime}
    if settings.spot:
        stopping["MaxWaitTimeInSeconds"] = 2 * runtime
    return {
        "TrainingJobName": job_name(request),
        "RoleArn": settings.role,
        "AlgorithmSpecification": {
            "TrainingImage": settings.image,
            "TrainingInputMode": "File",
            "ContainerEntrypoint": ["sh", "-c", f"{_NODE}; {join_line(request, '$node')}"],
        },
        "OutputDataConfig": {
            "S3OutputPath": request.location.partition("?")[0].rstrip("/") + "/sagemaker"
        },
        "ResourceConfig": {
            "InstanceType": settings.machine,
            "InstanceCount": request.all_nodes,
            "VolumeSizeInGB": settings.disk_gb,
        },
        "EnableManagedSpotTraining": settings.spot,
        "StoppingCondition": stopping,
        "Environment": {SECRET_SOURCE_VARIABLE: f"aws:{settings.secret}"},
    }
