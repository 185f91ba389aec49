"""Losses of nodes that a layout meets: how often, how many at once, and what recovery they need.

A need is 0 if another complete replica continues at once. It is 1 if the state comes from the
memory of the remaining nodes, and 2 if it comes from the run store. Needs are classes of
`policy/saving/failure_classes.py`, counted from a layout instead of a run's history.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, exp, lgamma

from holdfast.plan.cost.choice import Choice
from holdfast.plan.hardware.cluster import Cluster, NodePool
from holdfast.plan.objective.absent_nodes import batch_chances, losses_per_second
from holdfast.plan.objective.occupancy import devices_by_pool
from holdfast.plan.placing.domains import FAILURES_PER_DAY

CONTINUES, FROM_MEMORY, FROM_STORE = 0, 1, 2


@dataclass(frozen=True)
class Loss:
    """rate: a second. pool: where; nodes: how many. needs: chance of each need; they add up to the
    chance that a rank is hit. domain: rack, power or zone; "" for single nodes and bursts."""

    pool: str
    nodes: int
    rate: float
    needs: tuple[float, float, float]
    domain: str = ""


def node_losses(
    pool: NodePool, cluster: Cluster, choice: Choice, counts: tuple[int, ...], present: int
) -> Iterator[Loss]:
    """Interruptions that take nodes of a pool of which so many are present. counts: complete
    replicas of each kind that run."""
    used = min(present, _used(pool, choice, counts))
    rate = present * losses_per_second(pool) / max(1.0, pool.burst)
    if not used or not rate:
        return
    for size, chance in batch_chances(pool.burst, present):
        hit = 1 - _misses(present, used, size)
        needs = _needs(pool, choice, counts, used, size)
        yield Loss(pool.name, size, rate * chance, (hit * needs[0], hit * needs[1], hit * needs[2]))


def domain_losses(cluster: Cluster, choice: Choice, counts: tuple[int, ...]) -> Iterator[Loss]:
    """Losses of complete racks, power domains and zones that a layout uses, at the rates of
    `plan/placing/domains.py`."""
    zones: set[str] = set()
    for pool in cluster.pools:
        used = _used(pool, choice, counts)
        if not used:
            continue
        for domain, nodes in domains_of(pool).items():
            number = ceil(used / nodes)
            rate = number * FAILURES_PER_DAY[domain] / 86_400.0
            needs = _of_domain(pool.name, choice, counts, everything=number == 1)
            yield Loss(pool.name, min(nodes, used), rate, needs, domain)
        if pool.zone and pool.zone not in zones:
            zones.add(pool.zone)
            rate = FAILURES_PER_DAY["zone"] / 86_400.0
            same = {each.name for each in cluster.pools if each.zone == pool.zone}
            survives = any(
                count and not same.intersection(devices_by_pool(group))
                for group, count in zip(choice.replicas, counts, strict=True)
            )
            needs = (1.0, 0.0, 0.0) if survives else (0.0, 0.0, 1.0)
            yield Loss(pool.name, pool.nodes, rate, needs, "zone")


def domains_of(pool: NodePool) -> dict[str, int]:
    """Nodes of each kind of domain of a pool that is known, and smaller than the pool."""
    found = {"rack": pool.nodes_per_rack, "power": pool.nodes_per_power_domain}
    return {domain: nodes for domain, nodes in found.items() if 1 < nodes < pool.nodes}


def _of_domain(
    pool: str, choice: Choice, counts: tuple[int, ...], everything: bool
) -> tuple[float, float, float]:
    """A rack or power domain. Replicas fill nodes in order: one that lies elsewhere continues."""
    elsewhere = any(
        count and pool not in devices_by_pool(group)
        for group, count in zip(choice.replicas, counts, strict=True)
    )
    if elsewhere or (not everything and sum(counts) > 1):
        return 1.0, 0.0, 0.0
    return 0.0, 0.0, 1.0


def _used(pool: NodePool, choice: Choice, counts: tuple[int, ...]) -> int:
    devices = sum(
        count * devices_by_pool(group).get(pool.name, 0)
        for group, count in zip(choice.replicas, counts, strict=True)
    )
    return ceil(devices / pool.devices)


def _needs(
    pool: NodePool, choice: Choice, counts: tuple[int, ...], used: int, size: int
) -> tuple[float, float, float]:
    """Chances of each need if `size` of the `used` nodes of a pool are lost at random."""
    broken = 1.0  # chance that no replica stays complete
    for group, count in zip(choice.replicas, counts, strict=True):
        if not count:
            continue
        devices = devices_by_pool(group).get(pool.name, 0)
        if not devices:
            broken = 0.0
            break
        # replicas that share a node are lost together
        blocks = max(1, count if devices >= pool.devices else ceil(count * devices / pool.devices))
        nodes = max(1, ceil(devices / pool.devices))
        hit = 1 - _misses(used, min(nodes, used), size)
        broken *= 0.0 if size < blocks else hit**blocks
    memory = _peers_survive(used, size)
    return 1 - broken, broken * memory, broken * (1 - memory)


def _peers_survive(used: int, size: int) -> float:
    """Chance that each lost node's copy lies on a node that is left: one copy, on another node."""
    if size >= used:
        return 0.0
    return (1 - (size - 1) / (used - 1)) ** size if used > 1 else 0.0


def _misses(nodes: int, marked: int, drawn: int) -> float:
    """Chance that none of the marked nodes is drawn."""
    if drawn > nodes - marked:
        return 0.0
    return exp(_log_ways(nodes - marked, drawn) - _log_ways(nodes, drawn))


def _log_ways(n: int, k: int) -> float:
    return lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)
