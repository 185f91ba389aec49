"""A task file of SkyPilot (`sky launch`, or `sky jobs launch` for one that is started again).

Read: sky/utils/schemas.py of SkyPilot 0.14. SkyPilot finds the cheapest cloud that has the
machines; `--region` and `--machine` narrow its choice.
"""

from __future__ import annotations

from typing import Any

from holdfast.launch.owners.owner import LaunchRequest
from holdfast.wire.secret import SECRET_FILE_VARIABLE
from holdfast_platform.clouds.settings import (
    SECRET_PATH,
    ServiceSettings,
    job_name,
    join_line,
)


def task(request: LaunchRequest, settings: ServiceSettings) -> dict[str, Any]:
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
