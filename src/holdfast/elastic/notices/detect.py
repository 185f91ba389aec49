"""`cluster.notices: auto`: the sources that this machine has, by its files and environment.

Nothing is sent over a network, so the start is not slowed. Environment variables tell whether this
process is in a pod, a Slurm job or a Ray cluster. The firmware names the cloud that owns the
machine. If a detected source then does not answer, that is reported once, as for any source.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

AZURE_TAG = "7783-7084-3265-9085-8269-3286-77"
"""The chassis of every Azure machine; other machines on Hyper-V have the same vendor."""
CLUSTERS = (
    ("kubernetes", "KUBERNETES_SERVICE_HOST"),
    ("slurm", "SLURM_JOB_ID"),
    ("ray", "RAY_ADDRESS"),
)


class Choice(NamedTuple):
    """The detected sources. startup_message: one line for the user."""

    names: tuple[str, ...]
    told: str


def choose(environment: Mapping[str, str], root: Path) -> Choice:
    found = [(name, variable) for name, variable in CLUSTERS if environment.get(variable)]
    cloud = _cloud(root)
    if cloud is not None:
        found.append(cloud)
    if not found:
        return Choice((), "notices: auto found nobody to ask: no cloud's firmware, no cluster's "
                          "variables")  # fmt: skip
    because = ", ".join(f"{name} ({why})" for name, why in found)
    return Choice(tuple(name for name, _ in found), f"notices: auto asks {because}")


def _cloud(root: Path) -> tuple[str, str] | None:
    """Return the cloud that made this machine, and the evidence."""
    vendor = _firmware(root, "sys_vendor")
    if vendor.startswith("Amazon"):
        return "aws", f"made by {vendor}"
    product = _firmware(root, "product_name")
    if product.startswith("Google Compute Engine"):
        return "google", f"a {product}"
    if vendor == "Microsoft Corporation" and _firmware(root, "chassis_asset_tag") == AZURE_TAG:
        return "azure", "an Azure chassis"
    bios = _firmware(root, "bios_version")
    return ("aws", f"BIOS {bios}") if bios.endswith(".amazon") else None  # before Nitro


def _firmware(root: Path, name: str) -> str:
    try:
        return (root / "sys/class/dmi/id" / name).read_text("utf-8", "replace").strip()[:100]
    except OSError:
        return ""
