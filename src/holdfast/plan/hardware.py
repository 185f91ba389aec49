"""This machine's hardware, found without torch, and the peak speed of its accelerators."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from holdfast.core.flops import dense_peak
from holdfast.plan.limits import usable_cores, usable_memory


@dataclass(frozen=True)
class Accelerator:
    index: int
    name: str
    memory_bytes: int

    def peak_flops(self, precision: str) -> float | None:
        return peak_flops(self.name, precision)


@dataclass(frozen=True)
class HardwareInfo:
    """`cores` and `memory_bytes` are what this process may use. torch_computes_on: "CUDA 13.0" or
    "ROCm 7.2" as torch was built, "CPU" for a build without either, "" without torch."""

    node: str
    system: str
    cores: int
    memory_bytes: int
    shared_memory_bytes: int
    accelerators: tuple[Accelerator, ...] = ()
    torch_computes_on: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def detect_hardware(environment: Mapping[str, str] | None = None) -> HardwareInfo:
    """Look at this machine. `environment` is the process's (for CUDA_VISIBLE_DEVICES)."""
    return HardwareInfo(
        node=platform.node() or "localhost",
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cores=usable_cores(),
        memory_bytes=usable_memory(),
        shared_memory_bytes=_free_shared_memory(),
        accelerators=detect_accelerators(os.environ if environment is None else environment),
        torch_computes_on=torch_build_target(torch_version_file()),
    )


def torch_build_target(version_file: str) -> str:
    """What the text of torch's `version.py` says that it was built for; see `HardwareInfo`."""
    for variable, name in (("cuda", "CUDA"), ("hip", "ROCm")):
        found = re.search(rf"^{variable}\b[^=]*=\s*'([^']+)'", version_file, re.MULTILINE)
        if found is not None:
            return f"{name} {found[1]}"
    return "CPU" if version_file else ""


def torch_version_file() -> str:
    """The text of torch's `version.py`, which names its build. torch itself is not imported."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        return ""
    try:
        return (Path(found.origin).parent / "version.py").read_text("utf-8")
    except OSError:
        return ""


def _free_shared_memory() -> int:
    try:
        status = os.statvfs("/dev/shm")
    except OSError:
        return 0
    return status.f_bavail * status.f_frsize


def cpp_compiler(environment: Mapping[str, str]) -> str | None:
    """Path of the C++ compiler that torch.compile would use on the CPU, None where it has none."""
    default = "clang++" if platform.system() == "Darwin" else "g++"
    return shutil.which(environment.get("CXX", default), path=environment.get("PATH"))


def detect_accelerators(environment: Mapping[str, str]) -> tuple[Accelerator, ...]:
    """NVIDIA devices that a process with this environment would see, in its order.

    Asked of `nvidia-smi`, which comes with the driver. The visible list may name indices or
    UUIDs; as in CUDA, an entry that does not exist ends the list.
    """
    query = [
        "nvidia-smi",
        "--query-gpu=index,uuid,name,memory.total",
        "--format=csv,noheader,nounits",
    ]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return visible_accelerators(answer.stdout, environment.get("CUDA_VISIBLE_DEVICES"))


def visible_accelerators(listing: str, chosen: str | None) -> tuple[Accelerator, ...]:
    """The lines of nvidia-smi's `listing` that the variable's value `chosen` leaves visible."""
    rows = [[cell.strip() for cell in line.split(",")] for line in listing.splitlines()]
    rows = [row for row in rows if len(row) == 4 and row[0].isdigit()]
    if chosen is not None:
        kept = []
        for entry in (e.strip() for e in chosen.split(",")):
            match = [r for r in rows if entry and (r[0] == entry or r[1].startswith(entry))]
            if not match:
                break
            kept.append(match[0])
        rows = kept
    return tuple(
        Accelerator(index, row[2], int(float(row[3])) * 2**20 if row[3][:1].isdigit() else 0)
        for index, row in enumerate(rows)
    )


def peak_flops(device: str, precision: str) -> float | None:
    """Return a device's peak FLOP/s by its name, or None if no data sheet is known. Then no
    utilisation is shown, rather than one against a guess. (The table is in `core.flops`.)"""
    return dense_peak(device, precision)
