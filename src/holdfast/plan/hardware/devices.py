"""What devices can do: peaks, memory, bandwidth, and the share of them that kernels reach.

`devices.csv` has a row for each type, with the source of its numbers. `holdfast calibrate` measures
the devices at hand, and its file replaces the assumed shares (`Efficiency`).
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

from holdfast.errors import DataError

DEVICES_FILE = Path(__file__).with_name("devices.csv")
PRECISIONS = ("fp32", "bf16", "fp8", "fp4")


@dataclass(frozen=True)
class Efficiency:
    """How much of a device's peak its kernels reach: four constants for a device and precision.

    compute: share of the peak FLOP/s that a large matrix product reaches.
    memory: share of the peak bandwidth that element-wise kernels reach.
    ramp_s: seconds that one product takes beyond its share of the peak. It makes small products
        slower: a product of f FLOPs takes ramp_s + f / (compute x peak).
    launch_s: least seconds of any kernel.
    """

    compute: float = 0.7
    memory: float = 0.8
    ramp_s: float = 20e-6
    launch_s: float = 5e-6


ASSUMED = Efficiency()


@dataclass(frozen=True)
class DeviceType:
    """One type of device. flops: dense peak FLOP/s by precision. bandwidth: bytes a second of its
    memory. scale_up: bytes a second, one way, to other devices of its node (0: none but PCIe).
    power_w, idle_w: watts of one device, busy and idle. efficiency: by precision."""

    name: str
    flops: Mapping[str, float]
    memory_bytes: float
    bandwidth: float
    scale_up: float
    power_w: float
    idle_w: float
    efficiency: Mapping[str, Efficiency] = field(default_factory=dict)

    def peak(self, precision: str) -> float:
        """Dense peak FLOP/s. Raises DataError for a precision that the device does not have."""
        if precision not in self.flops:
            raise DataError(
                f"no peak is known for {precision}",
                where=self.name,
                remedy=f"use one of {', '.join(self.flops)}",
            )
        return self.flops[precision]

    def reached(self, precision: str) -> Efficiency:
        """The device's constants in this precision; `ASSUMED` where none were fitted."""
        return self.efficiency.get(precision, ASSUMED)


def load_devices(path: Path = DEVICES_FILE) -> dict[str, DeviceType]:
    """Devices of the table by name."""
    lines = [
        line for line in path.read_text("utf-8").splitlines() if line and not line.startswith("#")
    ]
    found = [_device(row) for row in csv.DictReader(lines)]
    return {device.name: device for device in found}


def device_named(name: str, devices: Mapping[str, DeviceType]) -> DeviceType:
    """Raises DataError, with the nearest name, for a device that the table does not have."""
    if name in devices:
        return devices[name]
    near = get_close_matches(name, devices, n=1, cutoff=0.3)
    raise DataError(
        f"the device {name!r} is not in the table",
        where="cluster",
        remedy=f"use {near[0] if near else 'one of ' + ', '.join(devices)}",
    )


def _device(row: dict[str, str]) -> DeviceType:
    flops = {each: float(row[each]) * 1e12 for each in PRECISIONS if row[each]}
    return DeviceType(
        row["name"],
        flops,
        float(row["memory_gb"]) * 1e9,
        float(row["bandwidth_gb_s"]) * 1e9,
        float(row["scale_up_gb_s"] or 0) * 1e9,
        float(row["power_w"]),
        float(row["idle_w"]),
    )
