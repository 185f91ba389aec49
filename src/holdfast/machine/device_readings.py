"""What the vendors' tools read from the accelerators of this machine, now.

`nvidia-smi` (NVML's command), `rocm-smi` and `xpu-smi` come with the drivers, so nothing has to be
installed for them. All three print CSV. The columns of a device that the tool does not know, such
as `[N/A]`, are left out. The tools read every device of the machine, also those that other jobs
use: a node's numbers then explain each other.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast.machine.kernel_files import ask_tool

_MIB = 2.0**20


@dataclass(frozen=True)
class DeviceReading:
    """One device, as the driver counts it. None: the tool does not tell."""

    index: str
    name: str
    utilisation: float | None = None  # share of the last sample period in which a kernel ran
    memory_used_bytes: float | None = None
    memory_total_bytes: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None  # degrees Celsius
    uncorrected_errors: float | None = None  # of the memory (ECC), since the driver was loaded


@dataclass(frozen=True)
class _Tool:
    """columns: a field of `DeviceReading` to (column, factor); the first known column counts."""

    command: tuple[str, ...]
    columns: Mapping[str, Sequence[tuple[str, float]]]


_QUERY = {
    "index": [("index", 1.0)],
    "name": [("name", 1.0)],
    "utilisation": [("utilization.gpu", 0.01)],
    "memory_used_bytes": [("memory.used", _MIB)],
    "memory_total_bytes": [("memory.total", _MIB)],
    "power_w": [("power.draw", 1.0)],
    "temperature_c": [("temperature.gpu", 1.0)],
}
_ECC = "ecc.errors.uncorrected.volatile.total"
_NVIDIA = {**_QUERY, "uncorrected_errors": [(_ECC, 1.0)]}
_ROCM = {
    "index": [("device", 1.0)],
    "name": [("Card Series", 1.0), ("Card series", 1.0), ("Card SKU", 1.0)],
    "utilisation": [("GPU use (%)", 0.01)],
    "memory_used_bytes": [("VRAM Total Used Memory (B)", 1.0)],
    "memory_total_bytes": [("VRAM Total Memory (B)", 1.0)],
    "power_w": [
        ("Current Socket Graphics Package Power (W)", 1.0),
        ("Average Graphics Package Power (W)", 1.0),
    ],
    "temperature_c": [
        ("Temperature (Sensor junction) (C)", 1.0),
        ("Temperature (Sensor edge) (C)", 1.0),
    ],
}


def _by_query(tool: str, columns: Mapping[str, Sequence[tuple[str, float]]]) -> _Tool:
    fields = ",".join(names[0][0] for names in columns.values())
    return _Tool((tool, f"--query-gpu={fields}", "--format=csv,nounits"), columns)


_TOOLS = (
    _by_query("nvidia-smi", _NVIDIA),
    _Tool(
        (
            *("rocm-smi", "--showproductname", "--showuse", "--showmeminfo", "vram"),
            *("--showpower", "--showtemp", "--csv"),
        ),
        _ROCM,
    ),
    _by_query("xpu-smi", _QUERY),
)


def read_devices(timeout_s: float = 20.0) -> list[DeviceReading]:
    """Ask the first tool that this machine has; empty without one, or where it fails or hangs."""
    answers = ((ask_tool(tool.command, timeout_s), tool.columns) for tool in _TOOLS)
    return next((parse_readings(text, columns) for text, columns in answers if text), [])


def parse_readings(
    text: str, columns: Mapping[str, Sequence[tuple[str, float]]]
) -> list[DeviceReading]:
    """The devices of a tool's CSV `text`, whose first line names the columns."""
    lines = [line for line in text.splitlines() if "," in line]
    found = []
    for row in csv.DictReader(lines, skipinitialspace=True):
        # nvidia-smi adds the unit to the title of a column: "memory.used [MiB]".
        cells = {str(title).partition(" [")[0]: cell or "" for title, cell in row.items()}
        texts = {
            field: next((cells[name].strip() for name, _ in columns[field] if name in cells), "")
            for field in ("index", "name")
        }
        numbers = {
            field: _number(cells, names) for field, names in columns.items() if field not in texts
        }
        found.append(DeviceReading(texts["index"].removeprefix("card"), texts["name"], **numbers))
    return found


def _number(cells: Mapping[str, str], names: Sequence[tuple[str, float]]) -> float | None:
    for name, factor in names:
        try:
            return float(cells[name]) * factor
        except (KeyError, ValueError):
            continue
    return None
