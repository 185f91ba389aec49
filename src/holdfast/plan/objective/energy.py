"""Energy of a step, from what the devices do in each part of it.

A device takes its busy power while it computes, its idle power while it waits, and something in
between while it communicates. Only devices count: no host, no cooling, no network.
"""

from __future__ import annotations

from holdfast.plan.cost.choice import Choice
from holdfast.plan.cost.evaluate import GroupCost, Problem, StepCost
from holdfast.plan.hardware.devices import DeviceType

COMPUTING = ("compute", "recompute", "update")
WAITING = ("bubble",)
COMMUNICATION_SHARE = 0.5
"""Of the way from idle to busy power while a device communicates. Assumed."""
JOULES_PER_KWH = 3.6e6


def step_joules(problem: Problem, choice: Choice, cost: StepCost) -> dict[str, float]:
    """Joules of one step of all devices, by pool."""
    found: dict[str, float] = {}
    for group, each in zip(choice.replicas, cost.groups, strict=True):
        for name, devices in group.devices_by_pool.items():
            device = problem.cluster.pool(name).device_type(problem.devices)
            joules = group.dp_replicate * devices * _device_joules(device, each, cost.step_s)
            found[name] = found.get(name, 0.0) + joules
    return found


def _device_joules(device: DeviceType, cost: GroupCost, step_s: float) -> float:
    watts = {
        "busy": device.power_w,
        "sends": device.idle_w + COMMUNICATION_SHARE * (device.power_w - device.idle_w),
        "waits": device.idle_w,
    }
    parts = {**cost.pipeline.parts, **cost.tail}
    joules = sum(
        seconds * watts["busy" if part in COMPUTING else "waits" if part in WAITING else "sends"]
        for part, seconds in parts.items()
    )
    return joules + max(0.0, step_s - sum(parts.values())) * device.idle_w


def kwh_per_step(problem: Problem, choice: Choice, cost: StepCost) -> float:
    return sum(step_joules(problem, choice, cost).values()) / JOULES_PER_KWH


def co2_kg_per_step(problem: Problem, choice: Choice, cost: StepCost) -> float:
    """By the carbon intensity of each pool's power."""
    joules = step_joules(problem, choice, cost)
    return sum(
        energy / JOULES_PER_KWH * problem.cluster.pool(name).grams_co2_per_kwh / 1e3
        for name, energy in joules.items()
    )


def idle_watts(problem: Problem, choice: Choice) -> dict[str, float]:
    """Of all devices of a layout, by pool, while they do nothing."""
    return {
        name: number * problem.cluster.pool(name).device_type(problem.devices).idle_w
        for name, number in choice.devices_by_pool.items()
    }
