"""Bytes of state that devices receive when a run moves from one layout to another.

Ranks fill the devices of a pool in order, replica after replica. A device keeps what its old and
its new part have in common: layers of its stage, its shard, its part by tp. It
receives the rest. The runtime plans transfers by tensor (`core/sharding/reshard_plan.py`), and
places ranks to keep more. So these are bytes of a plain placement.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from holdfast.layout import stages_at
from holdfast.plan.cost.choice import Choice, ReplicaChoice
from holdfast.plan.cost.workload import Workload
from holdfast.plan.hardware.cluster import Cluster

Device = tuple[str, int, int]
"""(pool, node, place in the node)."""


@dataclass(frozen=True)
class Held:
    """What a device holds. blocks: of the model; ends: embedding, head. shard, tp: (index, of)."""

    blocks: frozenset[int]
    has_first: bool
    has_last: bool
    shard: tuple[int, int]
    tp: tuple[int, int]

    def common(self, other: Held, bytes_of: _Bytes) -> float:
        """Bytes that both hold."""
        share = _overlap(self.shard, other.shard) * _overlap(self.tp, other.tp)
        size = sum(bytes_of.blocks[block] for block in self.blocks & other.blocks)
        size += bytes_of.first * (self.has_first and other.has_first)
        size += bytes_of.last * (self.has_last and other.has_last)
        return share * size


@dataclass(frozen=True)
class _Bytes:
    """Bytes of state of each layer."""

    first: float
    blocks: tuple[float, ...]
    last: float


def moved_bytes(
    workload: Workload,
    cluster: Cluster,
    old: Choice,
    new: Choice,
    lost: Mapping[str, int],
) -> float:
    """Bytes received by all devices of `new`, after the first nodes of each pool were lost."""
    each = workload.state.optimizer
    first, *blocks, last = (each * layer.parameters for layer in workload.layers)
    bytes_of = _Bytes(first, tuple(blocks), 0.0 if workload.is_tied else last)
    before = dict(held(cluster, old, workload, {}))
    total = 0.0
    for device, part in held(cluster, new, workload, lost):
        kept = part.common(before[device], bytes_of) if device in before else 0.0
        total += part.common(part, bytes_of) - kept
    return total


def held(
    cluster: Cluster, choice: Choice, workload: Workload, lost: Mapping[str, int]
) -> Iterator[tuple[Device, Held]]:
    """Each device with a rank, and what it holds."""
    free = {pool.name: lost.get(pool.name, 0) * pool.devices for pool in cluster.pools}
    for group in choice.replicas:
        for _ in range(group.dp_replicate):
            for index, part in _parts(choice, group, len(workload.blocks)):
                name = group.pool_at(index)
                node, place = divmod(free[name], cluster.pool(name).devices)
                free[name] += 1
                yield (name, node, place), part


def _parts(choice: Choice, group: ReplicaChoice, blocks: int) -> Iterator[tuple[int, Held]]:
    """(index on pp, what the rank holds) of each rank of a replica."""
    chunks = len(group.stages) if group.pp > 1 else 1
    starts = [sum(group.stages[:chunk]) for chunk in range(chunks)]
    _, shards, _, parts = group.mesh_shape
    for index, shard, _, tp in product(*map(range, group.mesh_shape)):
        mine: tuple[int, ...] = (0,)
        own = list(range(blocks))
        if group.pp > 1:
            mine = stages_at(index, group.pp, chunks, choice.is_folded)
            own = [b for c in mine for b in range(starts[c], starts[c] + group.stages[c])]
        yield (
            index,
            Held(
                frozenset(own),
                0 in mine,
                chunks - 1 in mine,
                (shard, shards),
                (tp, parts),
            ),
        )


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> float:
    """Common part of the `index`th of `of` equal parts of the line from 0 to 1."""
    (a, m), (b, n) = one, other
    return max(0.0, min((a + 1) / m, (b + 1) / n) - max(a / m, b / n))
