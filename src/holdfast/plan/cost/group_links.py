"""The link that each group of ranks of a layout crosses.

Ranks stand in mesh order (pp, dp_shard, cp, tp), with tp innermost, and fill node after node. So a
group of n ranks at a distance of s spans n x s neighbouring ranks. It stays inside a node if a
node's devices are a multiple of that, inside a rack likewise.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

from holdfast.plan.cost.choice import ReplicaChoice
from holdfast.plan.hardware.cluster import Cluster, NodePool
from holdfast.plan.hardware.link import Link


@dataclass(frozen=True)
class GroupLinks:
    """Of one replica's stage: the link of each axis, and of gradients between replicas. pp: to the
    next stage. shards: of dp_shard and cp together, which share parameters."""

    tp: Link
    cp: Link
    shards: Link
    pp: Link
    replicas: Link


def group_links(
    cluster: Cluster, group: ReplicaChoice, index: int, number_of_replicas: int
) -> GroupLinks:
    """Return the links of the stage at `index` on pp of a kind of replica."""
    pool = cluster.pool(group.pool_at(index))
    stage = group.tp * group.cp * group.dp_shard
    following = cluster.pool(group.pool_at(min(index + 1, group.pp - 1)))
    to_next = (
        _spanning(pool, 2 * stage) if following == pool else cluster.link_between(pool, following)
    )
    return GroupLinks(
        tp=_spanning(pool, group.tp),
        cp=_spanning(pool, group.tp * group.cp),
        shards=_spanning(pool, stage),
        pp=to_next,
        replicas=_between_replicas(cluster, pool, group, number_of_replicas),
    )


def _between_replicas(
    cluster: Cluster, pool: NodePool, group: ReplicaChoice, number_of_replicas: int
) -> Link:
    inside = _spanning(pool, group.size * min(number_of_replicas, max(1, group.count)))
    zones = [each for each in cluster.pools if each.zone != pool.zone]
    if number_of_replicas <= group.count or not zones:
        return inside
    return reduce(
        lambda a, b: a if a.bandwidth <= b.bandwidth else b,
        (cluster.link_between(pool, other) for other in zones),
        inside,
    )


def _spanning(pool: NodePool, ranks: int) -> Link:
    """The slowest link among so many neighbouring ranks."""
    if ranks <= pool.devices and pool.devices % ranks == 0:
        return pool.inside
    rack = pool.nodes_per_rack * pool.devices
    if rack and pool.across_racks is not None and (ranks > rack or rack % ranks):
        return pool.across_racks
    return pool.outside
