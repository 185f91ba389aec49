"""Reads the signals of this machine: devices by the driver's tool, memory also by the kernel."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from holdfast.machine.device_readings import read_devices
from holdfast.machine.kernel_files import ask_tool, read_text
from holdfast.policy.prediction.signals import SignalReading

_EDAC = Path("/sys/devices/system/edac/mc")
_REASONS = ("clocks_event_reasons", "clocks_throttle_reasons")
"""What nvidia-smi calls the causes of a slow device, by its age. It answers nothing to a query with
a name that it does not know, so these are no part of the query of `device_readings`."""
_TIMEOUT_S = 20.0


def read_signals(edac: Path = _EDAC) -> SignalReading:
    """Ask the driver and the kernel. It takes up to a minute if a tool hangs. edac: one folder a
    memory controller (kernel documentation, "Reliability, Availability and Serviceability")."""
    counts = [read_text(file) for file in sorted(edac.glob("mc*/ue_count"))]
    host = [float(text) for text in counts if text.isdigit()]
    devices = [device.uncorrected_errors for device in read_devices(_TIMEOUT_S)]
    errors = [*host, *(count for count in devices if count is not None)]
    is_hot, is_braked = _read_slowdowns()
    return SignalReading(sum(errors) if errors else None, is_hot, is_braked)


def _read_slowdowns() -> tuple[bool | None, bool | None]:
    """Whether a device slows down by heat, and by a power brake; None: no driver says it."""
    for name in _REASONS:
        query = ",".join(f"{name}.hw_{cause}_slowdown" for cause in ("thermal", "power_brake"))
        command = ("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader")
        lines = ask_tool(command, _TIMEOUT_S).splitlines()
        rows = [cells for line in lines if len(cells := line.split(", ")) == 2]
        if rows:
            return _is_any_active(row[0] for row in rows), _is_any_active(row[1] for row in rows)
    return None, None


def _is_any_active(cells: Iterable[str]) -> bool | None:
    """None if no device says it."""
    known = [cell.strip() for cell in cells if cell.strip() in ("Active", "Not Active")]
    return "Active" in known if known else None
