"""The table of driver, CUDA, NCCL, OFED and kernel versions that are known not to work together.

Each row has its source and the date on which it was read. A row applies only if every version that
it names is known, so a machine about which little is known has no conflicts. `holdfast doctor`
prints those that apply. Nothing of the table has been tried on such machines.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from holdfast.machine.installed_versions import InstalledVersions, parse_version

TABLE_DATE = "2026-11-26"
_COMPARE: Mapping[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    ">=": operator.ge,
    "==": operator.eq,
}


@dataclass(frozen=True)
class Conflict:
    """Versions that do not work together."""

    culprit: str  # what is to be changed
    state: Literal["weak", "fails"]
    if_: Mapping[str, str]  # bounds by name; a version is cut to as many numbers as its bound
    effect: str
    remedy: str
    source: str
    read_on: str = TABLE_DATE
    module: str = ""  # of the kernel, that is loaded
    without_module: str = ""  # of the kernel, that is not
    needs_ports: bool = False

    def applies(self, found: InstalledVersions, has_ports: bool) -> bool:
        """has_ports: the machine has an active port of InfiniBand or RoCE."""
        if self.needs_ports and not has_ports:
            return False
        if self.module and self.module not in found.modules:
            return False
        if self.without_module and self.without_module in found.modules:
            return False
        return all(_holds(found, name, bounds) for name, bounds in self.if_.items())


def _holds(found: InstalledVersions, name: str, bounds: str) -> bool:
    version = found.version_of(name)
    if version is None:
        return False
    for bound in bounds.split(","):
        parts = re.fullmatch(r"(<|>=|==)(\S+)", bound.strip())
        assert parts is not None
        sign, text = parts.groups()
        wanted = parse_version(text)
        assert wanted is not None
        if not _COMPARE[sign](version[: len(wanted)], wanted):
            return False
    return True


_COMPATIBILITY = (
    "https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html"
)
_OFED_FIXES = "https://docs.nvidia.com/networking/display/MLNXOFEDv543030/Bug+Fixes+in+This+Version"
_PEERMEM = "https://docs.nvidia.com/networking/display/GPUDirectRDMAv18/Installing+GPUDirect+RDMA"
_NCCL_2_18 = "https://docs.nvidia.com/deeplearning/nccl/release-notes/rel_2-18-1.html"

KNOWN_CONFLICTS: tuple[Conflict, ...] = (
    Conflict(
        "driver",
        "fails",
        {"cuda": ">=13", "driver": "<580"},
        "torch for CUDA 13 needs driver 580 or newer",
        "update the driver, or install a torch for CUDA 12",
        _COMPATIBILITY,
    ),
    Conflict(
        "driver",
        "fails",
        {"cuda": ">=12,<13", "driver": "<525"},
        "torch for CUDA 12 needs driver 525 or newer",
        "update the driver",
        _COMPATIBILITY,
    ),
    Conflict(
        "torch",
        "fails",
        {"cuda": ">=12.8", "compute": "<7.5"},
        "torch for CUDA 12.8 and newer computes on no card with a compute capability below 7.5",
        "install a torch for CUDA 12.6, or leave older cards out with CUDA_VISIBLE_DEVICES",
        "https://github.com/pytorch/pytorch/issues/157517",
    ),
    Conflict(
        "NCCL",
        "weak",
        {"nccl": "==2.18.1"},
        "data can be corrupted if a network card shares its PCI switch with one accelerator only",
        "set NCCL_IB_PCI_RELAXED_ORDERING=0 or NCCL_PROTO=^LL128, or use a newer NCCL",
        _NCCL_2_18,
    ),
    Conflict(
        "NCCL",
        "weak",
        {"nccl_on_path": "==2.18.1"},
        "data can be corrupted if a network card shares its PCI switch with one accelerator only",
        "take the older libnccl.so.2 out of LD_LIBRARY_PATH",
        _NCCL_2_18,
    ),
    Conflict(
        "OFED",
        "fails",
        {"ofed": ">=5.4,<5.4.3", "kernel": ">=5.10"},
        "MLNX_OFED 5.4-1 supports no kernel from 5.10 on, and its modules do not load",
        "update OFED, or install it again with: mlnxofedinstall --add-kernel-support",
        "https://forums.developer.nvidia.com/t/support-for-kernel-5-10/206067",
    ),
    Conflict(
        "OFED",
        "weak",
        {"ofed": ">=5.4,<5.4.3", "driver": ">=470"},
        "releasing an accelerator's memory during GPUDirect RDMA can hang (bug 2696789)",
        "update MLNX_OFED to 5.4-3.0.3.0 or newer",
        _OFED_FIXES,
        module="nvidia_peermem",
    ),
    Conflict(
        "nv_peer_mem",
        "weak",
        {"driver": ">=470"},
        "this module is no longer maintained; the driver has nvidia_peermem instead",
        "remove it, and run: modprobe nvidia_peermem",
        _PEERMEM,
        module="nv_peer_mem",
    ),
    Conflict(
        "kernel",
        "weak",
        {"driver": ">=470", "kernel": "<5.12"},
        "without nvidia_peermem, and with a kernel before 5.12, network cards cannot read an "
        "accelerator's memory, so the CPU copies all data between nodes",
        "run: modprobe nvidia_peermem",
        "https://docs.nvidia.com/datacenter/cloud-native/gpu-operator/latest/gpu-operator-rdma.html",
        without_module="nvidia_peermem",
        needs_ports=True,
    ),
)
"""In the order of their weight. The first row of a culprit names the cause."""


def find_conflicts(found: InstalledVersions, has_ports: bool) -> list[Conflict]:
    return [each for each in KNOWN_CONFLICTS if each.applies(found, has_ports)]
