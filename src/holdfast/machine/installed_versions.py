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

import os
import platform
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

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
