"""Reads the signals of this machine: devices by the drivers' tools, memory by the kernel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from holdfast.machine.device_readings import read_devices
from holdfast.machine.kernel_files import read_text
from holdfast.policy.prediction.signals import SignalReading

_EDAC = Path("/sys/devices/system/edac/mc")


def read_signals(edac: Path = _EDAC) -> SignalReading:
    """Ask the drivers and the kernel. It takes up to 20 s if a tool hangs. edac: one folder a
    memory controller (kernel documentation, "RAS: Error Detection And Correction")."""
    devices = read_devices()
    counts = [read_text(file) for file in sorted(edac.glob("mc*/ue_count"))]
    host = [float(text) for text in counts if text.isdigit()]
    errors = [*host, *(d.uncorrected_errors for d in devices if d.uncorrected_errors is not None)]
    return SignalReading(
        sum(errors) if errors else None,
        _any(device.is_hot for device in devices),
        _any(device.is_braked for device in devices),
    )


def _any(states: Iterable[bool | None]) -> bool | None:
    """True if one is; None if nothing tells it."""
    told: Sequence[bool] = [state for state in states if state is not None]
    return any(told) if told else None
