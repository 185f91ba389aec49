"""`cluster.notices: auto`: the sources that this machine has, by its files and environment.

Nothing is sent over a network, so the start is not slowed. Environment variables tell whether this
process is in a pod, a Slurm job or a Ray cluster. The firmware names the cloud that owns the
machine. If a detected source then does not answer, that is reported once, as for any source.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

AZURE_CHASSIS_TAG = "7783-7084-3265-9085-8269-3286-77"
"""The chassis of every Azure machine; other machines on Hyper-V have the same vendor."""
CLUSTER_VARIABLES = (
    ("kubernetes", "KUBERNETES_SERVICE_HOST"),
    ("slurm", "SLURM_JOB_ID"),
    ("ray", "RAY_ADDRESS"),
)


class DetectedSources(NamedTuple):
    """The detected sources. startup_message: one line for the user."""

    source_names: tuple[str, ...]
    startup_message: str


def detect_sources(environment: Mapping[str, str], root: Path) -> DetectedSources:
    found = [(name, variable) for name, variable in CLUSTER_VARIABLES if environment.get(variable)]
    cloud = _detect_cloud(root)
    if cloud is not None:
        found.append(cloud)
    if not found:
        return DetectedSources(
            (), "notices: auto found nobody to ask: no cloud's firmware, no cluster's variables"
        )
    because = ", ".join(f"{name} ({why})" for name, why in found)
    return DetectedSources(tuple(name for name, _ in found), f"notices: auto asks {because}")


def _detect_cloud(root: Path) -> tuple[str, str] | None:
    """Return the cloud that made this machine, and the evidence."""
    vendor = _read_firmware(root, "sys_vendor")
    if vendor.startswith("Amazon"):
        return "aws", f"made by {vendor}"
    product = _read_firmware(root, "product_name")
    if product.startswith("Google Compute Engine"):
        return "google", f"a {product}"
    if (
        vendor == "Microsoft Corporation"
        and _read_firmware(root, "chassis_asset_tag") == AZURE_CHASSIS_TAG
    ):
        return "azure", "an Azure chassis"
    bios = _read_firmware(root, "bios_version")
    return ("aws", f"BIOS {bios}") if bios.endswith(".amazon") else None  # before Nitro


def _read_firmware(root: Path, name: str) -> str:
    try:
        return (root / "sys/class/dmi/id" / name).read_text("utf-8", "replace").strip()[:100]
    except OSError:
        return ""
