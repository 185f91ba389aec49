"""The machines that a run's layout is planned for: those of `plan.cluster`, or this one."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

from holdfast.config.run import RunConfig
from holdfast.core.transports import NodeLinks
from holdfast.machine.hardware import HardwareInfo
from holdfast.machine.links import detect_links
from holdfast.plan.hardware.calibration import Calibration, calibration_path, read_calibration
from holdfast.plan.hardware.cluster import Cluster, NodePool
from holdfast.plan.hardware.cluster_file import HERE, read_cluster
from holdfast.plan.hardware.devices import CPU, DeviceType, device_named, load_devices
from holdfast.plan.hardware.link import load_links
from holdfast.plan.hardware.this_machine import describe_machine

MOST_CPU_WORKERS = 8
"""Workers that are tried on a CPU: each is a process with a torch of its own."""


@dataclass(frozen=True)
class Machines:
    """The cluster that a run may use."""

    cluster: Cluster
    devices: Mapping[str, DeviceType]
    name: str  # of its file, or of this machine
    cores: int = 0  # of this machine if its CPU trains, which workers share; otherwise 0

    def worker_counts(self, given: int, *degrees: int) -> tuple[int, ...]:
        """Numbers of workers to plan for. given: by the run file; 0: free, like each of degrees."""
        if given:
            return (given,)
        if not self.cores:
            return (self.cluster.size,)
        least = prod(degree or 1 for degree in degrees)
        most = 1 if platform.system() == "Darwin" else min(self.cores, MOST_CPU_WORKERS) // least
        powers = {2**n for n in range(most.bit_length())} or {1}
        return tuple(least * number for number in sorted(powers))

    def with_workers(self, workers: int) -> Machines:
        """The part of the machines that so many workers use. On a CPU they share its cores."""
        if self.cores:
            device = _core_share(device_named(CPU, self.devices), self.cores / workers)
            pool = replace(self.cluster.pools[0], devices=workers)
            devices = {**self.devices, CPU: device}
            return replace(self, cluster=Cluster((pool,)), devices=devices)
        pools = tuple(_first_devices(self.cluster.pools, workers))
        return replace(self, cluster=replace(self.cluster, pools=pools))


def machines_of(config: RunConfig, hardware: HardwareInfo, cluster: str = "") -> Machines:
    """Read the cluster file, or describe this machine. cluster: in place of `plan.cluster`.

    Raises ConfigError or DataError for what the file has wrong, and for unknown devices."""
    text = cluster or config.plan.cluster
    if text and text != HERE:
        read = Machines(read_cluster(text), load_devices(), text)
        return _shared(read, config.cluster.workers_per_device)
    calibration = read_calibration(calibration_path(hardware.node))
    return here(config, hardware, detect_links(), calibration)


def here(
    config: RunConfig, hardware: HardwareInfo, links: NodeLinks, calibration: Calibration | None
) -> Machines:
    """This machine with the devices of the kind that the run's `device` names. Pure."""
    used = tuple(a for a in hardware.accelerators if config.device in ("auto", a.kind))
    found = describe_machine(replace(hardware, accelerators=used), links, calibration)
    cores = 0 if used else hardware.cores
    machines = Machines(found.cluster, found.devices, f"this machine ({hardware.node})", cores)
    return _shared(machines, 1 if cores else config.cluster.workers_per_device)


def _shared(machines: Machines, workers: int) -> Machines:
    """The machines with so many workers on each device. Each of them counts as a device with its
    part of the memory and of the speed. They exchange data through the host's memory."""
    if workers == 1:
        return machines
    devices, pools, types = dict(machines.devices), list[NodePool](), load_links()
    for pool in machines.cluster.pools:
        device = pool.device_type(machines.devices)
        name = f"{pool.device.replace('@', ' at ')}/{workers}"
        devices[name] = replace(_core_share(device, 1 / workers), name=name)
        inside = types[device.host_link].link if device.host_link else pool.inside
        pools.append(
            replace(
                pool,
                device=name,
                devices=pool.devices * workers,
                inside=inside.shared_by(workers),
                outside=pool.outside.shared_by(workers),
                ways=(),
            )
        )
    return replace(machines, cluster=replace(machines.cluster, pools=tuple(pools)), devices=devices)


FURTHER_CORE = 0.5
"""What a further core adds to the speed of a worker, as a share of the first. Operations of a small
model hardly share out. 40 steps of the quickstart took 16 s with one worker of two threads. They
took 9 s with two workers (`holdfast train run.yaml layout.workers=1`, and 2)."""


REPORT_S = 5e-3
"""Processor seconds of a step that a worker's reporter and loader and its agent take. A core
without a worker takes them meanwhile. Assumed: 14 ms were measured on two cores that were busy
seven times over."""


def _core_share(core: DeviceType, cores: float) -> DeviceType:
    """The device of a worker that has so many cores."""
    speed = 1 + FURTHER_CORE * (cores - 1) if cores > 1 else cores
    steps, waits = core.steps, max(1.0, 1 / cores)  # Python runs on one core, or on a part of it
    if core.name == CPU:
        steps = replace(
            steps,
            kernel_s=steps.kernel_s * waits,
            microbatch_s=steps.microbatch_s * waits,
            step_s=steps.step_s * waits + (REPORT_S * waits if cores <= 1 else 0.0),
        )
    return replace(
        core,
        steps=steps,
        flops={precision: peak * speed for precision, peak in core.flops.items()},
        bandwidth=core.bandwidth * speed,
        memory_bytes=core.memory_bytes * cores,
        usable_bytes=core.usable_bytes * cores,
        power_w=core.power_w * cores,
        idle_w=core.idle_w * cores,
    )


def _first_devices(pools: tuple[NodePool, ...], workers: int) -> Iterator[NodePool]:
    """Pools, filled in their order, until all workers have a device."""
    for pool in pools:
        if workers <= 0:
            return
        if workers < pool.devices:
            yield replace(pool, nodes=1, devices=workers)
        else:
            yield replace(pool, nodes=min(pool.nodes, workers // pool.devices))
        workers -= min(workers, pool.size)
