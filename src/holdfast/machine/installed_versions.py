"""The versions of what an NVIDIA accelerator needs on this machine, read without torch.

driver          what `nvidia-smi` says: the version of the driver's libraries
driver_module   /sys/module/nvidia/version: the version that the kernel has loaded
compute         the lowest compute capability of the cards
cuda            what torch was built for
nccl            the package that torch installs
nccl_on_path    a libnccl.so.2 in LD_LIBRARY_PATH, which is loaded instead of the package's
ofed            `ofed_info -s`: Mellanox OFED or DOCA-OFED; none for the kernel's own drivers
kernel          `uname -r`
"""

from __future__ import annotations

import operator
import os
import platform
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from holdfast.machine.hardware import torch_build_target, torch_version_file
from holdfast.machine.kernel_files import read_text

TOOL_TIMEOUT_S = 10.0
NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
WATCHED_MODULES = ("nvidia_peermem", "nv_peer_mem")

Version = tuple[int, ...]
RunTool = Callable[[Sequence[str]], str]
"""Runs a command and returns what it prints, errors included; "" if it cannot be run."""


@dataclass(frozen=True)
class InstalledVersions:
    """What is installed."""

    known: Mapping[str, str]  # versions by the names above; what is not there is left out
    modules: frozenset[str] = frozenset()  # of the kernel, among those that matter
    tool_words: str = ""  # what `nvidia-smi` says if it fails

    @property
    def has_nvidia(self) -> bool:
        return bool({"driver", "driver_module"} & set(self.known)) or bool(self.tool_words)

    def version_of(self, name: str) -> Version | None:
        return parse_version(self.known.get(name, ""))


def parse_version(text: str) -> Version | None:
    """Return the numbers of a version: (5, 4, 1, 0) of 5.4-1.0. None if there are none."""
    found = re.search(r"\d+(?:[.-]\d+)*", text)
    return None if found is None else tuple(int(n) for n in re.split(r"[.-]", found[0]))


def read_installed_versions(
    environment: Mapping[str, str] | None = None,
    run: RunTool | None = None,
    system: Path = Path("/sys"),
    kernel: str = "",
    torch_version: str | None = None,
    nccl: str | None = None,
) -> InstalledVersions:
    """Look at this machine. Whatever is given stands in for what is there."""
    environ = os.environ if environment is None else environment
    run_tool = run_command if run is None else run
    smi = run_tool(
        ["nvidia-smi", "--query-gpu=driver_version,compute_cap", "--format=csv,noheader"]
    )
    rows = re.findall(r"^([0-9.]+), ([0-9.]+)$", smi, re.MULTILINE)
    text = torch_version_file() if torch_version is None else torch_version
    target = torch_build_target(text)
    found = {
        "driver": rows[0][0] if rows else "",
        "driver_module": read_text(system / "module/nvidia/version").strip(),
        "compute": min(
            (row[1] for row in rows), key=lambda each: parse_version(each) or (), default=""
        ),
        "cuda": target.removeprefix("CUDA ") if target.startswith("CUDA ") else "",
        "nccl": _nccl_package() if nccl is None else nccl,
        "nccl_on_path": _nccl_on_path(environ.get("LD_LIBRARY_PATH", "")),
        "ofed": _ofed(run_tool(["ofed_info", "-s"])),
        "kernel": kernel or platform.release(),
    }
    modules = frozenset(m for m in WATCHED_MODULES if (system / "module" / m).is_dir())
    words = "" if rows else smi.strip().partition("\n")[0][:200]
    return InstalledVersions({n: v for n, v in found.items() if v}, modules, words)


def run_command(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout or done.stderr


def _nccl_package() -> str:
    for package in NCCL_PACKAGES:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return ""


def _nccl_on_path(folders: str) -> str:
    """Return the version of the first libnccl.so.2; its file's own name says it."""
    for folder in filter(None, folders.split(":")):
        library = Path(folder) / "libnccl.so.2"
        if library.exists():
            return library.resolve().name.partition(".so.")[2]
    return ""


def _ofed(told: str) -> str:
    """Return 5.4-1.0.3.0 of "MLNX_OFED_LINUX-5.4-1.0.3.0:"."""
    found = re.search(r"OFED[A-Za-z_-]*-(?P<version>[0-9][0-9.-]*)", told)
    return "" if found is None else found["version"].rstrip("-.")


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
"""Versions that are known not to work together, in the order of their weight. The first row of a
culprit names the cause. Each row has its source and the date on which it was read. A row applies
only if every version that it names is known. `holdfast doctor` prints those that apply. Nothing of
the table has been tried on such machines."""


def find_conflicts(found: InstalledVersions, has_ports: bool) -> list[Conflict]:
    return [each for each in KNOWN_CONFLICTS if each.applies(found, has_ports)]
