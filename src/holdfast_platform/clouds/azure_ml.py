"""A command job of Azure Machine Learning (`az ml job create --file`), in its YAML form.

With `type: pytorch`, Azure starts one process on each node and tells it NODE_RANK. `join` does not
read what Azure tells torch, too: it finds the other nodes by the run store.
"""

from __future__ import annotations

from typing import Any

from holdfast.launch.owners.owner import LaunchRequest
from holdfast_platform.clouds.settings import ServiceSettings, job_name, join_line

SCHEMA = "https://azuremlschemas.azureedge.net/latest/commandJob.schema.json"
SECRET_SOURCE_VARIABLE = "HOLDFAST_SECRET_FROM"
_HOUR_S = 3600


def command_job(request: LaunchRequest, settings: ServiceSettings) -> dict[str, Any]:
    """Return the job. machine: the name of a compute cluster of the workspace, whose nodes are spot
    or not by its own tier."""
    return {
        "$schema": SCHEMA,
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
