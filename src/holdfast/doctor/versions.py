"""The check of `holdfast doctor` for versions of driver, CUDA, NCCL, OFED and kernel."""

from __future__ import annotations

from holdfast.doctor.checks import Check
from holdfast.machine.installed_versions import (
    TABLE_DATE,
    InstalledVersions,
    find_conflicts,
    read_installed_versions,
)
from holdfast.machine.links import detect_links

NAME = "versions"
_LABELS = {
    "driver": "driver",
    "cuda": "CUDA of torch",
    "nccl": "NCCL",
    "nccl_on_path": "NCCL in LD_LIBRARY_PATH",
    "ofed": "OFED",
    "kernel": "kernel",
}


def run_version_checks() -> list[Check]:
    found = read_installed_versions()
    return check_versions(found, has_ports=found.has_nvidia and bool(detect_links().ports))


def check_versions(found: InstalledVersions, has_ports: bool) -> list[Check]:
    """Name what does not go together; nothing for a machine without NVIDIA's driver."""
    if not found.has_nvidia:
        return []
    if (broken := _broken_driver(found)) is not None:
        return [broken]
    told = ", ".join(
        f"{label} {found.known[n]}" for n, label in _LABELS.items() if n in found.known
    )
    conflicts = find_conflicts(found, has_ports)
    if not conflicts:
        return [Check(NAME, "good", f"{told}; no known conflict (table of {TABLE_DATE})")]
    return [
        Check(
            NAME,
            each.state,
            f"{each.effect} ({told}; {each.source}, read on {each.read_on})",
            each.remedy,
            each.culprit,
        )
        for each in conflicts
    ]


def _broken_driver(found: InstalledVersions) -> Check | None:
    """A driver whose libraries do not fit the loaded module, or that does not answer."""
    driver, module = found.known.get("driver", ""), found.known.get("driver_module", "")
    if "version mismatch" in found.tool_words or (driver and module and driver != module):
        loaded = f"the kernel has loaded driver {module or 'of another version'}"
        here = f"the libraries are {driver}" if driver else f"nvidia-smi says: {found.tool_words}"
        return Check(
            NAME,
            "fails",
            f"{loaded}, but {here}",
            "restart the machine, or load the new module: rmmod nvidia; modprobe nvidia",
            "driver",
        )
    if not driver and module:
        return Check(
            NAME,
            "fails",
            f"driver {module} is loaded, but nvidia-smi lists no card: {found.tool_words}",
            "in a container, start it with --gpus all or the runtime of NVIDIA's toolkit",
            "driver",
        )
    return None
