"""Dollars, energy and CO2 of the nodes that a layout occupies.

A device takes its busy power while it computes, its idle power while it waits, and something in
between while it communicates. Only devices count: no host, no cooling, no network. A price that is
not known is refused; 0 is a price.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.errors import ConfigError
from holdfast.plan.cost.choice import Choice
from holdfast.plan.cost.evaluate import GroupCost, Problem, StepCost
from holdfast.plan.hardware.cluster import Cluster
from holdfast.plan.hardware.devices import DeviceType
from holdfast.plan.objective.occupancy import nodes_used

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
        energy / JOULES_PER_KWH * (problem.cluster.pool(name).grams_co2_per_kwh or 0.0) / 1e3
        for name, energy in joules.items()
    )


def idle_watts(problem: Problem, choice: Choice) -> dict[str, float]:
    """Of all devices of a layout, by pool, while they do nothing."""
    return {
        name: number * problem.cluster.pool(name).device_type(problem.devices).idle_w
        for name, number in choice.devices_by_pool.items()
    }


def pools_without_price(cluster: Cluster) -> tuple[str, ...]:
    return tuple(pool.name for pool in cluster.pools if pool.usd_per_hour is None)


def refuse_without(key: str, cluster: Cluster, objective: str) -> None:
    """Raises ConfigError if a pool does not give a key: its price, or the CO2 of its power."""
    if pools := [pool.name for pool in cluster.pools if getattr(pool, key) is None]:
        raise ConfigError(
            f"the objective {objective} needs {key}, which the cluster does not have for "
            f"{', '.join(pools)}",
            where=f"pools.{pools[0]}.{key}",
            remedy=f"give each pool its {key}, or use plan.objective=time",
        )


def usd_per_hour(
    cluster: Cluster, choice: Choice, present: Mapping[str, float] | None = None
) -> float:
    """Of the nodes that have a rank. present: share of its time in which a node of the pool is
    there; a node that is lost is not paid for."""
    return sum(
        number * (cluster.pool(name).usd_per_hour or 0.0) * (present or {}).get(name, 1.0)
        for name, number in nodes_used(cluster, choice).items()
    )
