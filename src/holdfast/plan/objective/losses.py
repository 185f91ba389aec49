"""Losses of nodes that a layout meets: how often, how many at once, and what recovery they need.

A need is a class of loss of the recovery ladder (`policy/recovery/ladder.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from holdfast.plan.cost.choice import Choice
from holdfast.plan.hardware.cluster import Cluster, NodePool
from holdfast.plan.objective.absent_nodes import batch_chances, losses_per_second
from holdfast.plan.objective.occupancy import devices_by_pool
from holdfast.plan.placing.domains import FAILURES_PER_DAY
from holdfast.policy.recovery.loss_chances import chance_of_none, class_chances


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
    replicas = _replicas_in(pool, choice, counts)
    for size, chance in batch_chances(pool.burst, present):
        hit = 1 - chance_of_none(present, used, size)
        needs = class_chances(replicas, used, size)
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


def _replicas_in(
    pool: NodePool, choice: Choice, counts: tuple[int, ...]
) -> list[tuple[int, int]] | None:
    """Return the replicas in a pool, for `class_chances`. Those that share a node are lost
    together. None: a replica has no device in the pool."""
    found: list[tuple[int, int]] = []
    for group, count in zip(choice.replicas, counts, strict=True):
        if not count:
            continue
        devices = devices_by_pool(group).get(pool.name, 0)
        if not devices:
            return None
        groups = count if devices >= pool.devices else ceil(count * devices / pool.devices)
        found.append((max(1, groups), max(1, ceil(devices / pool.devices))))
    return found
