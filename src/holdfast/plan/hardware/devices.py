"""What devices can do: peaks, memory, bandwidth, and the share of them that kernels reach.

`devices.csv` has a row for each type, with the source of its numbers. `efficiency.csv` has the
shares that were fitted to measurements. `holdfast calibrate` measures the devices at hand
(`calibration.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from holdfast.core.json_parsing import JsonMessage
from holdfast.errors import DataError, nearest_of, unknown_name, use_one_of
from holdfast.plan.hardware.link import LinkType, load_links
from holdfast.plan.hardware.tables import read_rows

DEVICES_FILE = Path(__file__).with_name("devices.csv")
EFFICIENCY_FILE = Path(__file__).with_name("efficiency.csv")
GIB = 2**30
CPU = "cpu"
"""Name of the pool and of the device of a machine whose CPU trains."""

PRECISIONS = ("fp32", "bf16", "fp8", "fp4")


@dataclass(frozen=True)
class Efficiency(JsonMessage):
    """How much of a device's peak its kernels reach: constants for a device and precision.

    A product of f FLOPs takes ramp_s + f / (compute x peak), so small products are slower.
    """

    compute: float = 0.7  # share of the peak FLOP/s that a large matrix product reaches
    memory: float = 0.8  # share of the peak bandwidth that element-wise kernels reach
    ramp_s: float = 20e-6  # seconds that one product takes beyond its share of the peak
    launch_s: float = 5e-6  # least seconds of any kernel
    attention: float = 0.0  # share of the 16-bit peak; 0: a share of `compute` (`layer_times.py`)


ASSUMED = Efficiency()


@dataclass(frozen=True)
class StepCosts(JsonMessage):
    """What a step takes beyond its products, its attention and the bytes of fused kernels.

    Constants of one kind of device and its host. `holdfast calibrate` measures steps of small
    models and fits them (`plan/probing`). The defaults change nothing.

    kernel_s: host seconds of each kernel of a pass: Python, dispatch, bookkeeping of gradients. On
        an accelerator they pass while the device computes. A CPU computes nothing meanwhile.
    products: how many times as long products take in a step as alone: there a cache has lost their
        operands, and some are transposed.
    moves: elements that kernels of blocks that are not compiled move, for each one of fused kernels
        (`Layer.whole_moved`).
    """

    kernel_s: float = 0.0
    microbatch_s: float = 0.0  # of the passes of a microbatch through a stage, whatever it holds
    step_s: float = 0.0  # of a step, whatever it computes
    products: float = 1.0
    moves: float = 1.0
    gradient_moves: float = 0.0  # times that a microbatch's gradients are moved to be summed
    update_moves: float = 1.0  # times that the update, with the norm of gradients, moves its bytes


NOT_MEASURED = StepCosts()


@dataclass(frozen=True)
class DeviceType:
    """One type of device. The links are names of `links.csv`."""

    name: str
    flops: Mapping[str, float]  # dense peak FLOP/s by precision
    memory_bytes: float  # nominal
    bandwidth: float  # bytes a second of its memory
    scale_up: float  # bytes a second, one way, to other devices of its node (0: none but PCIe)
    power_w: float  # the board's limit
    idle_w: float  # watts without work
    efficiency: Mapping[str, Efficiency] = field(default_factory=dict)  # by precision
    usable_bytes: float = 0.0  # what a process finds, below the nominal size
    scale_up_link: str = ""
    host_link: str = ""
    network_link: str = ""
    reported: tuple[str, ...] = ()  # words of the driver's name of it
    aliases: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()  # columns without a source
    source: str = ""
    measured: str = ""  # date if `holdfast calibrate` measured it
    hides: float = 1.0  # share of a message's time that computing may hide; 0: the same cores do
    steps: StepCosts = NOT_MEASURED
    has_bf16: bool = True  # False: what `flops` has for bf16 is of fp16
    host_bytes_s: float = 0.0  # a second, one way, to the host's memory; 0 if it is the device's

    @property
    def found_bytes(self) -> float:
        """Memory that a process finds."""
        return min(self.usable_bytes or self.memory_bytes, self.memory_bytes)

    def peak(self, precision: str) -> float:
        """Dense peak FLOP/s. Raises DataError for a precision that the device does not have."""
        if precision not in self.flops:
            raise DataError(
                f"no peak is known for {precision}", where=self.name, remedy=use_one_of(self.flops)
            )
        return self.flops[precision]

    def touched_a_second(self, precision: str) -> float:
        """Bytes that element-wise kernels read and write in a second."""
        return self.bandwidth * self.reached(precision).memory

    def reached(self, precision: str) -> Efficiency:
        """The device's constants in this precision; `ASSUMED` where none were fitted."""
        return self.efficiency.get(precision, ASSUMED)


def load_devices(
    path: Path = DEVICES_FILE, efficiency: Path = EFFICIENCY_FILE
) -> dict[str, DeviceType]:
    """Devices of the table by name, with the shares that were fitted for them, or for the device
    that they are like."""
    shares: dict[str, dict[str, Efficiency]] = {}
    for row in read_rows(efficiency):
        names = ("compute", "memory", "ramp_s", "launch_s", "attention")
        numbers = (float(row.get(each) or 0) for each in names)
        shares.setdefault(row["device"], {})[row["precision"]] = Efficiency(*numbers)
    links = load_links()
    found = [
        _device(row, shares.get(row["like"], {}) | shares.get(row["name"], {}), links)
        for row in read_rows(path)
    ]
    return {device.name: device for device in found}


def device_named(
    name: str, devices: Mapping[str, DeviceType], where: str = "cluster"
) -> DeviceType:
    """The device of this name or alias, with the limits that follow an @ ("A100-80@300W,70GiB").

    Raises DataError, with the nearest name, for what is not there.
    """
    name, at, limits = name.partition("@")
    found = devices.get(name) or next((d for d in devices.values() if name in d.aliases), None)
    if found is None:
        words = {word: d.name for d in devices.values() for word in (d.name, *d.aliases)}
        near = nearest_of(name, words)
        choices = [words[near]] if near else [*devices]
        raise unknown_name(DataError, "device", name, choices, where)
    return _limited(found, limits, where) if at else found


def limits_text(power_w: float, memory_gib: float) -> str:
    """What `device_named` reads after a name; 0: no limit."""
    given = [f"{power_w:g}W"] * (power_w > 0) + [f"{memory_gib:g}GiB"] * (memory_gib > 0)
    return "@" + ",".join(given) if given else ""


def _limited(device: DeviceType, limits: str, where: str) -> DeviceType:
    """Less power slows a device by the cube root: what a chip takes grows with its clock's cube."""
    for limit in limits.split(","):
        found = re.fullmatch(r"(\d+(?:\.\d+)?)(W|GiB)", limit)
        if found is None:
            raise DataError(
                f"{limit!r} is no limit of a device",
                where=where,
                remedy=f"write for example {device.name}@{device.power_w:g}W, or @70GiB",
            )
        value = float(found[1])
        if found[2] == "W":
            _check_limit("power", value, device.idle_w, device.power_w, device.name, where)
            slower = (value / device.power_w) ** (1 / 3)
            flops = {each: peak * slower for each, peak in device.flops.items()}
            device = replace(device, power_w=value, flops=flops)
        else:
            most = device.memory_bytes / GIB
            _check_limit("memory", value, 0.0, most, device.name, where)
            size = value * GIB
            usable = min(size, device.usable_bytes)
            device = replace(device, memory_bytes=size, usable_bytes=usable)
    return replace(device, name=f"{device.name}@{limits}")


def _check_limit(
    what: str, value: float, least: float, most: float, device: str, where: str
) -> None:
    if not least < value <= most:
        raise DataError(
            f"the limit of {what} is {value:g}, and {device} has {least:g} to {most:g}",
            where=where,
            remedy=f"use {most:g} or less, or remove the limit",
        )


def device_reported(
    reported: str, memory_bytes: float, devices: Mapping[str, DeviceType]
) -> DeviceType | None:
    """The device that a driver reports ("NVIDIA H100 80GB HBM3"). Of those whose words are all in
    the report: most words first, then the nearest memory. None if no row fits."""
    words = set(re.split(r"[^A-Za-z0-9]+", reported.lower()))
    fit = [
        device
        for device in devices.values()
        if device.reported and words >= {word.lower() for word in device.reported}
    ]
    return min(
        fit,
        key=lambda each: (-len(each.reported), abs(each.memory_bytes - memory_bytes)),
        default=None,
    )


def _device(
    row: dict[str, str], efficiency: Mapping[str, Efficiency], links: Mapping[str, LinkType]
) -> DeviceType:
    flops = {each: float(row[each]) * 1e12 for each in PRECISIONS if row[each]}
    host = links.get(row["host_link"])
    return DeviceType(
        row["name"],
        flops,
        float(row["memory_gib"]) * GIB,
        float(row["bandwidth_gb_s"]) * 1e9,
        float(row["scale_up_gb_s"] or 0) * 1e9,
        float(row["power_w"]),
        float(row["idle_w"]),
        efficiency,
        usable_bytes=float(row["usable_gib"]) * GIB,
        scale_up_link=row["scale_up_link"],
        host_link=row["host_link"],
        network_link=row["network_link"],
        reported=tuple(row["reported"].split()),
        aliases=tuple(row["aliases"].split()),
        assumed=tuple(row["assumed"].split()),
        source=row["source"],
        hides=float(row["hides"]) if row["hides"] else 1.0,
        host_bytes_s=host.link.bandwidth if host and host.kind == "host" else 0.0,
        has_bf16=row["half"] != "fp16",
    )
