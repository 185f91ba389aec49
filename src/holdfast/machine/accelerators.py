"""The accelerators of this machine, counted without torch, and the peak speed of each.

    NVIDIA   `nvidia-smi`, which comes with the driver
    AMD      the kernel's list of compute nodes, if torch was built for ROCm
    Intel    the kernel's list of graphics cards, if torch was built for XPU
    Apple    every machine with an Apple processor has one

Only the first has run on a machine with such devices.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.core.flops import dense_peak
from holdfast.machine.kernel_files import ask_tool, read_property, read_text
from holdfast.machine.limits import usable_memory

_INTEL = "0x8086"
_SYSTEM = Path("/sys")
_CARD = re.compile(r"card\d+")


@dataclass(frozen=True)
class Accelerator:
    """One device. kind: torch's name of its kind. memory_bytes: 0 if it is not known."""

    index: int
    name: str
    memory_bytes: int
    kind: str = "cuda"

    def peak_flops(self, precision: str) -> float | None:
        return peak_flops(self.name, precision)


def peak_flops(device: str, precision: str) -> float | None:
    """Return a device's peak FLOP/s by its name, or None if no data sheet is known. Then no
    utilisation is shown, rather than one against a guess. (The table is in `core.flops`.)"""
    return dense_peak(device, precision)


def detect_accelerators(
    environment: Mapping[str, str], build: str = "", system: Path = _SYSTEM
) -> tuple[Accelerator, ...]:
    """Return the devices that a process with this environment would see, in its order.

    build: what torch was built for, as `hardware.torch_build_target` says it. system: where the
    kernel lists devices.
    """
    if build.startswith("ROCm"):
        # Compute nodes with vector units are GPUs; the memory is what their banks have.
        found: list[tuple[str, int]] = []
        nodes = system / "class" / "kfd" / "kfd" / "topology" / "nodes"
        for node in sorted(_folders(nodes), key=lambda each: _number(each.name)):
            if read_property(node / "properties", "simd_count") == 0:
                continue
            banks = _folders(node / "mem_banks")
            memory = sum(read_property(bank / "properties", "size_in_bytes") for bank in banks)
            found.append((read_text(node / "name") or "AMD GPU", memory))
        for variable in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
            found = _chosen(found, environment.get(variable))
        return tuple(Accelerator(i, name, size, "cuda") for i, (name, size) in enumerate(found))
    if build.startswith("XPU"):
        cards = [each for each in _folders(system / "class" / "drm") if _CARD.fullmatch(each.name)]
        found = [
            ("Intel GPU", 0)
            for card in sorted(cards, key=lambda each: _number(each.name))
            if read_text(card / "device" / "vendor") == _INTEL
        ]
        found = _chosen(found, environment.get("ZE_AFFINITY_MASK"))
        return tuple(Accelerator(i, name, size, "xpu") for i, (name, size) in enumerate(found))
    if platform.system() == "Darwin" and platform.machine() == "arm64":
        return (Accelerator(0, "Apple GPU", usable_memory(), "mps"),)
    listing = _ask_nvidia("index,uuid,name,memory.total")
    return visible_accelerators(listing, environment.get("CUDA_VISIBLE_DEVICES"))


def compute_capabilities() -> tuple[tuple[str, tuple[int, ...]], ...]:
    """(name, compute capability) of each NVIDIA device, as (8, 9). Those that an old driver does
    not tell are missing."""
    listing = _ask_nvidia("name,compute_cap")
    rows = [[cell.strip() for cell in line.split(",")] for line in listing.splitlines()]
    return tuple(
        (name, tuple(int(n) for n in found.split(".")))
        for name, found in (row for row in rows if len(row) == 2)
        if re.fullmatch(r"\d+\.\d+", found)
    )


def _ask_nvidia(what: str) -> str:
    """Return a line for each device, "" if the driver does not answer."""
    query = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    return ask_tool(query, timeout_s=20)


def visible_accelerators(listing: str, chosen: str | None) -> tuple[Accelerator, ...]:
    """The lines of nvidia-smi's `listing` that the variable's value `chosen` leaves visible.

    The value may name indices or UUIDs; as in CUDA, an entry that does not exist ends the list.
    """
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


def _chosen(found: Sequence[tuple[str, int]], value: str | None) -> list[tuple[str, int]]:
    """Return the devices that a list of indices names. An entry that is no index ends the list."""
    if value is None:
        return list(found)
    kept = []
    for entry in value.split(","):
        index = entry.strip().partition(".")[0]
        if not index.isdigit() or int(index) >= len(found):
            break
        kept.append(found[int(index)])
    return kept


def _folders(parent: Path) -> list[Path]:
    try:
        return [each for each in parent.iterdir() if each.is_dir()]
    except OSError:
        return []


def _number(name: str) -> int:
    return int("".join(c for c in name if c.isdigit()) or 0)
