"""Losses of nodes that a layout meets: how often, how many at once, and what recovery they need.

A need is a class of loss of the recovery ladder (`policy/recovery/ladder.py`).

Nodes are lost at a rate l each and return after a time T on average. If they are lost one by one,
each is absent with the probability lT / (1 + lT), independently: a binomial distribution. If an
interruption takes several, their number is taken as geometric with mean b. Absent nodes of such
batches that return one by one are negative binomial with r = v T / (1 - 1/b), for v interruptions a
second. (The generating function of the M^X/M/infinity queue: the integral of X(1 + (z - 1) y) - 1
over dy / y is -ln(1 - (b - 1)(z - 1)) / (1 - 1/b).)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, exp, lgamma, log, log1p

from holdfast.plan.cost.choice import Choice
from holdfast.plan.hardware.cluster import Cluster, NodePool
from holdfast.plan.placing.domains import FAILURES_PER_DAY
from holdfast.policy.recovery.ladder import chance_of_none, class_chances

LEAST_CHANCE = 1e-5
"""Numbers of absent nodes that are less likely than this are left out."""
MAX_BATCHES = 64
"""Sizes of interruptions that are counted one by one."""


def absent_share(losses_per_s: float, return_s: float) -> float:
    """Share of its time in which a node is absent."""
    return losses_per_s * return_s / (1 + losses_per_s * return_s)


def absent_chances(nodes: int, losses_per_s: float, return_s: float, burst: float) -> list[float]:
    """[k]: chance that k of the nodes are absent; the chances add up to 1."""
    share = absent_share(losses_per_s, return_s)
    if share <= 0 or nodes == 0:
        return [1.0]
    if burst <= 1:
        found = [exp(_log_binomial(nodes, k, share)) for k in range(nodes + 1)]
    else:
        quick = 1 - 1 / burst
        rate = nodes * (1 - share) * losses_per_s / burst
        found = [exp(_log_negative(k, rate * return_s / quick, burst)) for k in range(nodes + 1)]
    while len(found) > 1 and found[-1] < LEAST_CHANCE:
        found.pop()
    total = sum(found)
    return [chance / total for chance in found]


def batch_chances(burst: float, most: int) -> list[tuple[int, float]]:
    """(nodes that one interruption takes, chance): geometric, `most` at most."""
    if burst <= 1 or most <= 1:
        return [(1, 1.0)]
    stop, stay = 1 / burst, 1 - 1 / burst
    last = min(most, MAX_BATCHES)
    found = [(size, stop * stay ** (size - 1)) for size in range(1, last)]
    return [*found, (last, stay ** (last - 1))]


def losses_per_second(pool: NodePool) -> float:
    """Of one node."""
    return pool.losses_per_day / 86_400.0


def _log_binomial(nodes: int, k: int, share: float) -> float:
    ways = lgamma(nodes + 1) - lgamma(k + 1) - lgamma(nodes - k + 1)
    return ways + k * log(share) + (nodes - k) * log1p(-share)


def _log_negative(k: int, r: float, burst: float) -> float:
    """Of the negative binomial distribution with mean r (burst - 1)."""
    ways = lgamma(k + r) - lgamma(k + 1) - lgamma(r)
    return ways - r * log(burst) + k * log1p(-1 / burst)


@dataclass(frozen=True)
class Loss:
    """One kind of loss of nodes."""

    pool: str
    nodes: int
    rate: float  # a second
    needs: tuple[float, float, float]  # chance of each; together, that a rank is hit
    domain: str = ""  # rack, power or zone; "" for single nodes and bursts


def node_losses(pool: NodePool, choice: Choice, present: int) -> Iterator[Loss]:
    """Interruptions that take nodes of a pool of which so many are present."""
    used = min(present, _used(pool, choice))
    rate = present * losses_per_second(pool) / max(1.0, pool.burst)
    if not used or not rate:
        return
    replicas = _replicas_in(pool, choice)
    for size, chance in batch_chances(pool.burst, present):
        hit = 1 - chance_of_none(present, used, size)
        needs = class_chances(replicas, used, size)
        yield Loss(pool.name, size, rate * chance, (hit * needs[0], hit * needs[1], hit * needs[2]))


def domain_losses(cluster: Cluster, choice: Choice) -> Iterator[Loss]:
    """Losses of complete racks, power domains and zones that a layout uses, at the rates of
    the cluster file, or of `plan/placing/domains.py`."""
    zones: set[str] = set()
    per_day = {**FAILURES_PER_DAY, **cluster.domain_losses_per_day}
    for pool in cluster.pools:
        used = _used(pool, choice)
        if not used:
            continue
        for domain, nodes in domains_of(pool).items():
            number = ceil(used / nodes)
            rate = number * per_day[domain] / 86_400.0
            # replicas fill nodes in order: one that lies elsewhere continues
            survives = _has_replica_outside(choice, {pool.name})
            survives = survives or (number > 1 and choice.number_of_replicas > 1)
            yield Loss(pool.name, min(nodes, used), rate, _NEEDS[survives], domain)
        if pool.zone and pool.zone not in zones:
            zones.add(pool.zone)
            rate = per_day["zone"] / 86_400.0
            same = {each.name for each in cluster.pools if each.zone == pool.zone}
            needs = _NEEDS[_has_replica_outside(choice, same)]
            yield Loss(pool.name, pool.nodes, rate, needs, "zone")


def domains_of(pool: NodePool) -> dict[str, int]:
    """Nodes of each kind of domain of a pool that is known, and smaller than the pool."""
    found = {"rack": pool.nodes_per_rack, "power": pool.nodes_per_power_domain}
    return {domain: nodes for domain, nodes in found.items() if 1 < nodes < pool.nodes}


_NEEDS = {True: (1.0, 0.0, 0.0), False: (0.0, 0.0, 1.0)}
"""Of the loss of a domain, by whether a replica survives it."""


def _has_replica_outside(choice: Choice, pools: set[str]) -> bool:
    return any(pools.isdisjoint(group.devices_by_pool) for group in choice.replicas)


def _used(pool: NodePool, choice: Choice) -> int:
    return ceil(choice.devices_by_pool.get(pool.name, 0) / pool.devices)


def _replicas_in(pool: NodePool, choice: Choice) -> list[tuple[int, int]] | None:
    """Return the replicas in a pool, for `class_chances`. Those that share a node are lost
    together. None: a replica has no device in the pool."""
    found: list[tuple[int, int]] = []
    for group in choice.replicas:
        devices, count = group.devices_by_pool.get(pool.name, 0), group.dp_replicate
        if not devices:
            return None
        groups = count if devices >= pool.devices else ceil(count * devices / pool.devices)
        found.append((max(1, groups), max(1, ceil(devices / pool.devices))))
    return found
