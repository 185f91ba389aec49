"""What a plan cannot know, and what is odd about it: one sentence each."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.plan.auto.machines import Machines
from holdfast.plan.cost.evaluate import Problem
from holdfast.plan.cost.group_links import group_links
from holdfast.plan.hardware.cluster import ACROSS_ZONES
from holdfast.plan.hardware.devices import device_named
from holdfast.plan.objective.energy import pools_without_price
from holdfast.plan.search.search import Found

_SMALL_SHARE = 0.5
"""Of the time of a step that is spent on work that grows with the layout, not with the batch."""


def warnings_of(problem: Problem, machines: Machines, found: Found, gap: float = 0.0) -> list[str]:
    """One sentence for each thing that a reader of the plan must know. gap: of the search."""
    return [
        *_assumed(problem),
        *_zones(problem),
        *_prices(problem, found),
        *_slow_links(problem, found),
        *_small(found),
        *_idle(problem, found, gap),
    ]


def _assumed(problem: Problem) -> Iterator[str]:
    for name in dict.fromkeys(pool.device for pool in problem.cluster.pools):
        device, precision = device_named(name, problem.devices), problem.workload.precision
        if device.measured:
            yield f"the numbers of {name} were measured here on {device.measured}"
            continue
        if precision not in device.efficiency:
            yield (
                f"the speed of {name} in {precision} is assumed, not measured: run 'holdfast "
                "calibrate' there"
            )
        if device.assumed:
            yield f"of {name} no source is known for {', '.join(device.assumed)}"


def _zones(problem: Problem) -> Iterator[str]:
    if pairs := problem.cluster.zones_without_link():
        yield (
            f"no link is given between the zones {' and '.join(pairs[0])}"
            f"{f' and {len(pairs) - 1} other pairs' if len(pairs) > 1 else ''}: "
            f"{ACROSS_ZONES.bandwidth / 1e9:.2g} GB/s of a device is assumed"
        )


def _prices(problem: Problem, found: Found) -> Iterator[str]:
    unknown, pools = pools_without_price(problem.cluster), found.choice.devices_by_pool
    if free := [name for name in pools if problem.cluster.pool(name).usd_per_hour == 0]:
        rest = ": this layout costs nothing" if len(free) == len(pools) else ""
        yield f"usd_per_hour of {', '.join(free)} is 0{rest}"
    if any(problem.cluster.usd_per_gb.values()) and len(pools) > 1:
        yield "usd_per_gb is not counted: no cost here has the traffic between zones"
    if unknown and len(unknown) < len(problem.cluster.pools):
        yield (
            f"the price of {', '.join(unknown)} is unknown, so no cost is shown: give "
            "usd_per_hour in the cluster file"
        )


def _slow_links(problem: Problem, found: Found) -> Iterator[str]:
    """tp sends in each layer, so a link between nodes makes every layer wait."""
    for group in found.choice.replicas:
        pool = problem.cluster.pool(group.pool_at(0))
        links = group_links(problem.cluster, group, 0, found.choice.number_of_replicas)
        if group.tp > 1 and links.tp.bandwidth < pool.inside.bandwidth:
            yield (
                f"tp {group.tp} crosses nodes of {pool.devices} devices, and their link has "
                f"{links.tp.bandwidth / pool.inside.bandwidth:.0%} of the bandwidth inside a node"
            )


def _idle(problem: Problem, found: Found, gap: float) -> Iterator[str]:
    used, there = found.choice.devices, problem.cluster.size
    if used < there:
        better = "that the search looked at is better" if gap else "is better"
        yield f"{there - used} of {there} devices stay idle: no layout with them {better}"


def _small(found: Found) -> Iterator[str]:
    parts = found.cost.parts
    idle = parts.get("bubble", 0.0) + parts.get("gradients", 0.0) + parts.get("update", 0.0)
    if idle > _SMALL_SHARE * found.cost.step_s:
        yield (
            f"{idle / found.cost.step_s:.0%} of a step is bubble, gradients and update: a larger "
            "train.batch_size, or fewer devices, would use them better"
        )
