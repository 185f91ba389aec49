"""The link that each group of ranks of a layout crosses, as one of its ranks sees it.

Ranks stand in mesh order, with tp innermost, and fill node after node. A
group of n ranks at a distance of s spans n x s neighbouring ranks. It stays inside a node if a
node's devices are a multiple of that, inside a rack likewise.

Several ranks of a group in one node send over several network cards. So a ring across nodes is as
fast as their cards together, and at most as fast as the links inside. Groups that stand across each
other share a node's cards, and each has its own devices' part. Measured on two nodes of 8: rings of
16, 8, 4 and 2 ranks reach 45, 21, 16 and 8 GB/s (Galvatron).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdfast.layout import component_degree
from holdfast.plan.cost.choice import ReplicaChoice
from holdfast.plan.cost.collectives import Exchange
from holdfast.plan.cost.workload import TpDegrees
from holdfast.plan.hardware.cluster import Cluster, NodePool
from holdfast.plan.hardware.link import Link


@dataclass(frozen=True)
class GroupLinks:
    """Of one replica's stage: the link of each axis, and of gradients between replicas."""

    tp: Link
    cp: Link
    shards: Link  # of the ranks that share parameters and tokens
    pp: Link  # to the next stage
    replicas: Link  # of ranks that sum gradients, those of cp and of all replicas
    experts: Exchange  # of the all-to-all of ep
    copies: Link  # of ranks with the same experts
    parts: tuple[tuple[Link, Link], ...] = ()  # with degrees for parts of a block: of the ranks
    # that share a part, and of those that hold the same of it


@dataclass(frozen=True)
class Ways:
    """How a run's ranks exchange data: names of `NodePool.ways`."""

    cp: str = ""
    shards: str = ""

    @staticmethod
    def of(zero: int, cp_method: str) -> Ways:
        return Ways(f"cp {cp_method}", f"zero {zero}")


def group_links(
    cluster: Cluster,
    group: ReplicaChoice,
    index: int,
    number_of_replicas: int,
    ep: int = 1,
    ways: Ways = Ways(),
    part_tp: TpDegrees = (),
) -> GroupLinks:
    """Return the links of the stage at `index` on pp of a kind of replica."""
    pool = cluster.pool(group.pool_at(index))
    stage = group.tp * group.token_shares
    following = cluster.pool(group.pool_at(min(index + 1, group.pp - 1)))
    to_next = (
        _farthest(pool, 2 * stage) if following == pool else cluster.link_between(pool, following)
    )
    known = dict(pool.ways)

    def seen(link: Link, way: str) -> Link:
        return known.get(way, link) if link == pool.inside else link

    experts = exchange_links(pool, ep, group.tp)
    return GroupLinks(
        tp=seen(ring_link(pool, group.tp, 1), "tp"),
        cp=seen(ring_link(pool, group.cp, group.tp), ways.cp),
        shards=seen(ring_link(pool, group.token_shares, group.tp), ways.shards),
        pp=seen(to_next, "pp"),
        replicas=seen(_between_replicas(cluster, pool, group, number_of_replicas), "replicas"),
        experts=replace(experts, inside=known.get("ep", experts.inside)),
        copies=ring_link(pool, max(1, group.token_shares // ep), group.tp * ep),
        parts=tuple(
            (seen(ring_link(pool, n, 1), "tp"), seen(ring_link(pool, group.tp // n, n), "tp"))
            for n in (component_degree(degree, group.tp) for degree in part_tp)
        ),
    )


def ring_link(pool: NodePool, ranks: int, distance: int) -> Link:
    """Return the link that a ring of so many ranks sees, each at a distance from the one before."""
    farthest = _farthest(pool, ranks * distance)
    if farthest == pool.inside:
        return farthest
    together = farthest.bandwidth * _in_a_node(pool, ranks, distance)
    return Link(farthest.latency_s, min(together, max(pool.inside.bandwidth, farthest.bandwidth)))


def exchange_links(pool: NodePool, ranks: int, distance: int) -> Exchange:
    """Return the links of an all-to-all of so many ranks at a distance from each other."""
    farthest = _farthest(pool, ranks * distance)
    near = ranks if farthest == pool.inside else _in_a_node(pool, ranks, distance)
    return Exchange(ranks, near, pool.inside, farthest)


def _in_a_node(pool: NodePool, ranks: int, distance: int) -> int:
    return max(1, min(ranks, pool.devices // distance))


def _between_replicas(
    cluster: Cluster, pool: NodePool, group: ReplicaChoice, number_of_replicas: int
) -> Link:
    if number_of_replicas == 1:
        return ring_link(pool, group.cp, group.tp)
    count = min(number_of_replicas, max(1, group.dp_replicate))
    links = [ring_link(pool, count, group.replica_size)]
    if number_of_replicas > group.dp_replicate:
        zones = (each for each in cluster.pools if each.zone != pool.zone)
        links += [cluster.link_between(pool, other) for other in zones]
    return min(links, key=lambda link: link.bandwidth)


def _farthest(pool: NodePool, ranks: int) -> Link:
    """Return the slowest link among so many neighbouring ranks."""
    if ranks <= pool.devices and pool.devices % ranks == 0:
        return pool.inside
    rack = pool.nodes_per_rack * pool.devices
    if rack and pool.across_racks is not None and (ranks > rack or rack % ranks):
        return pool.across_racks
    return pool.outside
