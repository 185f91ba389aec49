"""The section `launch.ssh:`: hosts that `holdfast launch --on ssh` starts nodes on."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from holdfast.config.base import Section

HOST_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9._:@-]*$"
"""A host's name or address, or user@host. It cannot be an option of ssh."""


class SshConfig(Section):
    hosts: tuple[Annotated[str, Field(pattern=HOST_PATTERN)], ...] = Field(
        (), description="hosts of the nodes, each as HOST or USER@HOST; each gets one node"
    )
    hosts_file: str = Field(
        "",
        description="file with one host a line, in place of hosts; `HOST slots=N`, as for mpirun, "
        "sets cluster.places of that node",
    )
    user: str = Field(
        "", pattern=r"^[A-Za-z0-9_.-]*$", description="user on hosts that name none; empty: ssh's"
    )
    python: str = Field(
        "",
        description="Python on the hosts that has Holdfast; empty: the path of the Python that "
        "runs this command",
    )
    folder: str = Field(
        ".holdfast",
        min_length=1,
        description="folder on the hosts for logs and secrets of nodes; it starts at the home",
    )
    options: tuple[str, ...] = Field((), description='further options of ssh, as ["-p", "2222"]')
