"""The section `launch.ssh:`: hosts on which `holdfast launch` starts nodes."""

from __future__ import annotations

import re

from pydantic import Field, field_validator

from holdfast.config.sections.base import Section


def is_host(text: str) -> bool:
    """Return True for a host's name or address, or USER@HOST. An option of ssh is none."""
    return bool(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._:@-]*", text))


class SshConfig(Section):
    hosts: tuple[str, ...] = ()
    """hosts of the nodes, each as HOST or USER@HOST; each gets one node"""
    hosts_file: str = ""
    """path of a file with one host a line, in place of hosts; `HOST slots=N`, as for mpirun, sets
    cluster.places of that node"""
    user: str = Field("", pattern=r"^[A-Za-z0-9_.-]*$")
    """user on hosts that name none; empty: ssh's"""
    python: str = ""
    """Python on the hosts that has Holdfast; empty: the path of the Python that runs this
    command"""
    folder: str = Field(".holdfast", min_length=1)
    """folder on the hosts for logs and secrets of nodes; it starts at the home"""
    options: tuple[str, ...] = Field((), description='further options of ssh, as ["-p", "2222"]')

    @field_validator("hosts")
    @classmethod
    def _are_hosts(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        for host in hosts:
            if not is_host(host):
                raise ValueError(f"{host!r} is no host: use HOST or USER@HOST, such as gpu-1")
        return hosts
