"""The nodes that a layout occupies, and what is left of it when nodes are lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import ceil

from holdfast.plan.cost.choice import Choice, ReplicaChoice
from holdfast.plan.hardware.cluster import Cluster
from holdfast.plan.search.splits import even_split

RECOMPUTE_WORDS = ("none", "selective", "full")
"""Values of `train.recompute`, from the most memory to the least."""
MAX_RESHAPED = 4
"""Other shapes that are costed for the nodes that are left. They are the largest that divide."""


def nodes_used(cluster: Cluster, choice: Choice) -> dict[str, int]:
    """Nodes in each pool that have a rank. A node with one rank counts."""
    return {
        name: ceil(number / cluster.pool(name).devices)
        for name, number in choice.devices_by_pool.items()
    }


def with_replicas(choice: Choice, counts: tuple[int, ...]) -> Choice | None:
    """The layout with fewer replicas of each kind, which share all microbatches of the step."""
    if counts == tuple(group.dp_replicate for group in choice.replicas):
        return choice
    left = [
        replace(group, dp_replicate=count)
        for group, count in zip(choice.replicas, counts, strict=True)
        if count
    ]
    if not left:
        return None
    return replace(choice, replicas=tuple(dealt(left, choice.microbatches)))


def dealt(groups: list[ReplicaChoice], microbatches: int) -> list[ReplicaChoice]:
    """Share a step's microbatches out in proportion to those that the groups have now. What does
    not divide makes some replicas of a group do one more."""
    now = sum(group.dp_replicate * group.microbatches for group in groups)
    found, rest = [], microbatches
    for group in groups:
        each = microbatches * group.microbatches // now
        found.append(replace(group, microbatches=each))
        rest -= group.dp_replicate * each
    out = []
    for group in found:
        more = min(rest, group.dp_replicate)
        rest -= more
        if more:
            out.append(replace(group, dp_replicate=more, microbatches=group.microbatches + 1))
        if group.dp_replicate > more:
            out.append(replace(group, dp_replicate=group.dp_replicate - more))
    return out


def reshaped(cluster: Cluster, choice: Choice, nodes: Mapping[str, int]) -> Iterator[Choice]:
    """Equal replicas of other shapes on the nodes that are left of one pool: shorter pipelines, and
    fewer shards. The largest come first."""
    for name in sorted(nodes):
        groups = [g for g in choice.replicas if g.pools == (name,)]
        if not groups or not nodes[name]:
            continue
        devices = nodes[name] * cluster.pool(name).devices
        found = sorted(
            _shapes(groups[0], choice, devices),
            key=lambda each: (-each.world_size, -each.replica_size),
        )
        for group in found[:MAX_RESHAPED]:
            yield replace(choice, replicas=tuple(dealt([group], choice.microbatches)))


def _shapes(group: ReplicaChoice, choice: Choice, devices: int) -> Iterator[ReplicaChoice]:
    blocks = sum(group.stages)
    shards = [d for d in range(1, group.dp_shard + 1) if choice.microbatch % d == 0]
    for pp in range(1, group.pp + 1):
        for dp_shard in shards:
            size = pp * dp_shard * group.cp * group.tp
            count = min(devices // size, choice.microbatches // pp)
            is_same = (pp, dp_shard) == (group.pp, group.dp_shard)
            divides = (dp_shard * group.cp) % choice.ep == 0
            if count < 1 or is_same or not divides:
                continue
            stages = even_split(blocks, pp * choice.virtual) if pp > 1 else ()
            word = (max(group.recompute, key=RECOMPUTE_WORDS.index),)
            yield replace(
                group,
                dp_replicate=count,
                pp=pp,
                dp_shard=dp_shard,
                stages=stages,
                microbatches=max(1, choice.microbatches // count),
                recompute=word,
            )


def with_recompute(choice: Choice, word: str) -> Choice:
    """The layout with at least so much recomputation on each stage."""
    groups = list[ReplicaChoice]()
    for group in choice.replicas:
        words = tuple(max(word, own, key=RECOMPUTE_WORDS.index) for own in group.recompute)
        groups.append(replace(group, recompute=words))
    return replace(choice, replicas=tuple(groups))
