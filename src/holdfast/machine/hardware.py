"""This machine's hardware, found without torch."""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from holdfast.machine.accelerators import Accelerator, detect_accelerators
from holdfast.machine.limits import usable_cores, usable_memory


@dataclass(frozen=True)
class HardwareInfo:
    """This machine. torch_computes_on: "CUDA 13.0" or "ROCm 7.2" as torch was built, "XPU" for
    Intel's devices, "CPU" for a build without any, "" without torch."""

    node: str
    system: str
    cores: int  # that this process may use
    memory_bytes: int  # that this process may use
    shared_memory_bytes: int
    accelerators: tuple[Accelerator, ...] = ()
    torch_computes_on: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def detect_hardware(environment: Mapping[str, str] | None = None) -> HardwareInfo:
    """Look at this machine. `environment` is the process's (for CUDA_VISIBLE_DEVICES)."""
    build = torch_build_target(torch_version_file())
    return HardwareInfo(
        node=platform.node() or "localhost",
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cores=usable_cores(),
        memory_bytes=usable_memory(),
        shared_memory_bytes=_free_shared_memory(),
        accelerators=detect_accelerators(os.environ if environment is None else environment, build),
        torch_computes_on=build,
    )


def torch_build_target(version_file: str) -> str:
    """What the text of torch's `version.py` says that it was built for; see `HardwareInfo`."""
    for variable, name in (("cuda", "CUDA"), ("hip", "ROCm"), ("xpu", "XPU")):
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
