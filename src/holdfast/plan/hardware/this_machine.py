"""This machine as a cluster of one node, with what `holdfast calibrate` has measured here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from holdfast.core.transports import NodeLinks
from holdfast.errors import DataError
from holdfast.machine.hardware import HardwareInfo, detect_hardware
from holdfast.machine.links import detect_links
from holdfast.plan.hardware.calibration import Calibration, calibration_path, read_calibration
from holdfast.plan.hardware.cluster import Cluster, NodePool
from holdfast.plan.hardware.devices import CPU, DeviceType, StepCosts, device_reported, load_devices
from holdfast.plan.hardware.link import Link, load_links


@dataclass(frozen=True)
class LocalMachine:
    """This machine, as a planner knows it."""

    cluster: Cluster  # of one node
    devices: Mapping[str, DeviceType]  # the table, with this machine's numbers in it
    calibration: Calibration | None  # None: nothing was measured here


def this_machine() -> Cluster:
    """This machine as a cluster: its accelerators, or its CPU's cores as devices named cpu."""
    return detect_machine().cluster


HOST_STEPS = StepCosts(kernel_s=1e-5)
"""What a CPU that is not calibrated takes for each kernel. Assumed: 5 to 8 us of processor time for
a kernel of a few elements and its backward, with torch 2 in one thread."""


def detect_machine() -> LocalMachine:
    """Look at this machine, and read its calibration."""
    hardware = detect_hardware()
    return describe_machine(
        hardware, detect_links(), read_calibration(calibration_path(hardware.node))
    )


def describe_machine(
    hardware: HardwareInfo, links: NodeLinks, calibration: Calibration | None
) -> LocalMachine:
    """The cluster of this hardware. Pure. Raises DataError for an accelerator that neither the
    table nor the calibration has."""
    devices = load_devices()
    counts: dict[str, int] = {}
    for each in hardware.accelerators:
        found = device_reported(each.name, each.memory_bytes, devices)
        if found is None:
            name = each.name
            if calibration is None or calibration.device != name:
                raise DataError(
                    f"the accelerator {name!r} is not in the table of devices",
                    where="this machine",
                    remedy="measure it with: holdfast calibrate",
                )
            found = DeviceType(
                name,
                calibration.flops,
                each.memory_bytes,
                calibration.bandwidth,
                0.0,
                0.0,
                0.0,
                usable_bytes=each.memory_bytes,
                host_link="pcie3",
                network_link="ethernet-10",
                source="holdfast calibrate; its power is not known",
            )
            devices[found.name] = found
        counts[found.name] = counts.get(found.name, 0) + 1
    if not counts:
        counts = {CPU: hardware.cores}
        memory = hardware.memory_bytes / hardware.cores
        devices[CPU] = replace(
            devices[CPU], memory_bytes=memory, usable_bytes=memory, steps=HOST_STEPS
        )
    if calibration is not None and calibration.device in devices:
        measured = calibration.applied_to(devices[calibration.device])
        devices[calibration.device] = measured
    pools = tuple(_pool(devices[name], count, links, calibration) for name, count in counts.items())
    used = calibration if calibration and calibration.device in counts else None
    return LocalMachine(Cluster(pools), devices, used)


def _pool(
    device: DeviceType, count: int, links: NodeLinks, calibration: Calibration | None
) -> NodePool:
    types = load_links()
    fast = device.scale_up_link and (links.cards or device.name == CPU)
    inside = types[device.scale_up_link if fast else device.host_link].link
    ways: tuple[tuple[str, Link], ...] = ()
    if calibration is not None and calibration.device == device.name and calibration.inside:
        inside, ways = calibration.inside, calibration.ways
    outside = types[device.network_link].link
    return NodePool(device.name, 1, count, device.name, inside, outside, ways=ways)
