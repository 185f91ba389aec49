"""The fast links of a machine: a fake `nvidia-smi`, and a fake folder of the kernel's."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.core.transports import CardLink, NetworkPort, NodeLinks
from holdfast.machine.links import detect_links, parse_topology

EIGHT = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-51,104-155\t0\t\tN/A
GPU1\tNV18\t X \tNV4\tSYS\t0-51,104-155\t0\t\tN/A
GPU2\tSYS\tNV4\t X \tSYS\t52-103,156-207\t1\t\tN/A
NIC0\tPIX\tSYS\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
"""
ALONE = (
    "\t\x1b[4mGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\nGPU0\t X \t0-15\t0\t\tN/A\n"
)

TOOL = f"#!/bin/sh\n[ \"$*\" = 'topo --matrix' ] && cat <<'E'\n{EIGHT}E\n"


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def test_nvlinks_are_those_of_the_matrix() -> None:
    assert parse_topology(EIGHT) == (CardLink(0, 1, "NVLink NV18"), CardLink(1, 2, "NVLink NV4"))
    assert parse_topology(ALONE) == parse_topology("") == ()


def test_a_machine_with_nvlink_and_ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "bin" / "nvidia-smi"
    write(tool.parent, **{tool.name: TOOL})
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    ports = tmp_path / "sys/class/infiniband"
    rate = "400 Gb/sec (4X NDR)\n"
    write(ports / "mlx5_0/ports/1", state="4: ACTIVE\n", link_layer="InfiniBand\n", rate=rate)
    write(ports / "mlx5_1/ports/1", state="1: DOWN\n", link_layer="InfiniBand\n", rate=rate)
    write(ports / "mlx5_2/ports/1", state="4: ACTIVE\n", link_layer="Ethernet\n", rate=rate)
    found = detect_links(tmp_path / "sys")
    assert len(found.cards) == 2
    assert found.ports == (
        NetworkPort("mlx5_0", "InfiniBand", "400 Gb/sec"),
        NetworkPort("mlx5_2", "RoCE", "400 Gb/sec"),
    )
    assert (found.between(1, 0), found.between(0, 2)) == ("NVLink NV18", "")


def test_a_machine_with_xgmi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    nodes = tmp_path / "class/kfd/kfd/topology/nodes"
    write(nodes / "0", properties="simd_count 0\n")
    for number in (1, 2):
        write(nodes / str(number), properties="simd_count 304\n")
        link = f"type 11\nnode_from {number}\nnode_to {3 - number}\n"
        write(nodes / str(number) / "io_links/1", properties=link)
        write(
            nodes / str(number) / "io_links/0",
            properties=f"type 2\nnode_from {number}\nnode_to 0\n",
        )
    assert detect_links(tmp_path) == NodeLinks((CardLink(0, 1, "xGMI"),))
    assert detect_links(tmp_path / "none") == NodeLinks()
