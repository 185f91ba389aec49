"""The part of the training state that a rank holds, and the bytes that ranks lack. Pure.

A part is counted by layers: the blocks of a stage, the share of `dp_shard`, the share of `tp`. It
needs no table of tensors. `core/sharding/reshard_plan.py` plans the transfers by tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from holdfast.core.sharding.state_table import StateTable
from holdfast.layout import MeshShape, Replica, Stages, Topology, coordinates_of


@dataclass(frozen=True)
class StateSizes:
    """Bytes of the training state by layer."""

    first: float = 0.0  # of the embedding
    blocks: tuple[float, ...] = ()  # of each decoder block
    last: float = 0.0  # of the last norm and the head

    @staticmethod
    def of_table(table: StateTable, count: int) -> StateSizes:
        """Count a run's own state. A tensor of several layers counts with the first of them.
        count: of the blocks."""
        blocks = [0.0] * count
        first = last = 0.0
        for row in table:
            position = row.positions[0] if row.positions else -1
            if position < 0:
                first += row.nbytes
            elif position < count:
                blocks[position] += row.nbytes
            else:
                last += row.nbytes
        return StateSizes(first, tuple(blocks), last)


@dataclass(frozen=True)
class StatePart:
    """The state that one rank holds."""

    blocks: frozenset[int]
    has_first: bool
    has_last: bool
    shard: tuple[int, int]  # index on dp_shard, and its degree
    tp: tuple[int, int]  # index on tp, and its degree

    def common_bytes(self, other: StatePart, sizes: StateSizes) -> float:
        """Return the bytes that both ranks hold."""
        share = overlap_share(self.shard, other.shard) * overlap_share(self.tp, other.tp)
        if not share:
            return 0.0
        size = sum(sizes.blocks[block] for block in self.blocks & other.blocks)
        size += sizes.first * (self.has_first and other.has_first)
        size += sizes.last * (self.has_last and other.has_last)
        return share * size


@lru_cache(maxsize=4096)
def _part(
    mesh_shape: MeshShape, stages: Stages, is_folded: bool, mesh_rank: int, blocks: int
) -> StatePart:
    pp, shard, _, tp = coordinates_of(mesh_rank, mesh_shape)
    degree = mesh_shape[0]
    shares = (shard, mesh_shape[1]), (tp, mesh_shape[3])
    if degree == 1:
        return StatePart(frozenset(range(blocks)), True, True, *shares)
    if not stages:  # not planned yet: equal ones
        ends = tuple(blocks * (stage + 1) // degree for stage in range(degree))
        held = range(ends[pp - 1] if pp else 0, ends[pp])
        return StatePart(frozenset(held), pp == 0, pp == degree - 1, *shares)
    replica = Replica(0, tuple(range(prod(mesh_shape))), mesh_shape, stages, 1, is_folded)
    mine = replica.stages_at(pp)
    found = frozenset(block for stage in mine for block in replica.stage_blocks(stage))
    return StatePart(found, 0 in mine, len(stages) - 1 in mine, *shares)


def bytes_to_move(
    sizes: StateSizes, before: Topology, after: Topology, came_from: Sequence[int | None]
) -> float:
    """Return the bytes that the ranks of `after` receive.

    Args:
        sizes: of the state.
        before: the topology of the state that is still there.
        after: the topology that receives it.
        came_from: rank of `before` whose part each rank has already; None: it has nothing.
    """
    blocks, total = len(sizes.blocks), 0.0
    old = _parts(before, blocks)
    for rank, part in _parts(after, blocks).items():
        total += part.common_bytes(part, sizes)
        was = came_from[rank]
        if was is not None:
            total -= part.common_bytes(old[was], sizes)
    return total


def _parts(topology: Topology, blocks: int) -> dict[int, StatePart]:
    # The part of a rank. blocks: of the model.
    return {
        rank: _part(replica.mesh_shape, replica.stages, replica.is_folded, mesh_rank, blocks)
        for replica in topology.replicas
        for mesh_rank, rank in enumerate(replica.ranks)
    }


def overlap_share(one: tuple[int, int], other: tuple[int, int]) -> float:
    """Return the common length of the `index`th of `degree` equal parts of the line 0 to 1."""
    (a, m), (b, n) = one, other
    return max(0.0, min((a + 1) / m, (b + 1) / n) - max(a / m, b / n))
