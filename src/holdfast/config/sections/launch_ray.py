"""The section `launch.ray:` of a run file: what each node takes of a Ray cluster."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from holdfast.config.sections.base import Section

ADDRESS = re.compile(
    r"(?:ray://)?[A-Za-z0-9][A-Za-z0-9.-]*:\d{1,5}|(?:ray://)?\[[0-9A-Fa-f:.]+\]:\d+"
)
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
"""Ray replaces these hosts with another address of the machine, and then waits without an end."""


class RayConfig(Section):
    address: str = ""
    """Ray's head as HOST:PORT, or ray://HOST:PORT of its client server for a machine outside the
    cluster; empty: RAY_ADDRESS"""
    cpus: float = Field(1, ge=0, description="CPUs that Ray gives each node")
    gpus: float = Field(0, ge=0, description="GPUs that Ray gives each node: as many as places")
    resources: dict[str, float] = Field({})
    """further resources of Ray that each node takes, as NAME: NUMBER"""
    groups: Literal["replica", "run"] = "replica"
    """replica: the nodes of a replica start together, once Ray has them; run: all nodes start
    together, each on a machine of its own"""
    autoscaler: bool = False
    """true: Ray's autoscaler brings machines that are not there yet, so it is no mistake if none
    has room for a node"""
    runtime_env: dict[str, Any] = Field({})
    """Ray's own runtime_env for each node: working_dir, env_vars, pip and so on"""

    @field_validator("address")
    @classmethod
    def _is_address(cls, address: str) -> str:
        if not address:
            return address
        if not ADDRESS.fullmatch(address):
            raise ValueError(
                f"{address!r} is no address of Ray's head: use HOST:PORT, as ray start --head "
                "prints it"
            )
        if address.removeprefix("ray://").rpartition(":")[0] in LOOPBACK:
            raise ValueError(
                f"Ray cannot be reached at {address}, because it replaces this host by another: "
                "use the address that ray start --head prints"
            )
        return address

    @model_validator(mode="after")
    def _takes_something(self) -> RayConfig:
        if not any(self.bundle.values()):
            raise ValueError("each node has to take something of Ray: set cpus to 1, for example")
        return self

    @property
    def bundle(self) -> dict[str, float]:
        """What one node takes, as Ray names it."""
        taken = {"CPU": self.cpus, "GPU": self.gpus, **self.resources}
        return {name: number for name, number in taken.items() if number}
