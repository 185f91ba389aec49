"""What a managed service has to know of a run's nodes, whichever service it is."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from holdfast.launch.owners.owner import LaunchRequest

SECRET_PATH = "/run/holdfast/secret"


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
