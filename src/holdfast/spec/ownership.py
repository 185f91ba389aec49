"""Who saves what, when several ranks hold the same bytes.

Every element of every tensor is owned by exactly one rank, so that a capture copies, and a
checkpoint stores, nothing twice. What is held by several ranks is shared out evenly by bytes:
the holders' tensors are laid end to end and cut at equal byte positions, rounded to rows of
dim 0. So a large embedding does not fall to one rank, and no rank owns more than one row range
of a tensor (Orbax calls the same idea replica-parallel saving).

The function is part of the checkpoint format: manifests do not list boxes, readers derive them
from (topology, table). Changing it means a new format version.
"""

from __future__ import annotations

from itertools import product

from holdfast.layout import AXES, Coordinate, Replica, Topology, ravel
from holdfast.spec.boxes import Box
from holdfast.spec.sharding import tp_part
from holdfast.spec.state import ITEM_BYTES, StateTable, TensorSpec, mesh_box, stages_of


def owned_boxes(topology: Topology, table: StateTable, rank: int) -> tuple[Box, ...]:
    """The boxes that `rank` saves, none empty, at most one per tensor, in the table's order.

    Replicas of different kinds hold boxes that do not match; then the replicas of the most
    common kind save, and the others own nothing.
    """
    savers = saving_replicas(topology)
    replica = topology.replica_of(rank)
    if replica not in savers:
        return ()
    coordinate = topology.coordinate(rank)
    groups: dict[_Places, list[int]] = {}
    for number, spec in enumerate(table):
        groups.setdefault(_places(spec, replica, coordinate), []).append(number)
    owned: dict[int, Box] = {}
    for places, rows in groups.items():
        if coordinate.pp not in places[0]:
            continue
        holders = [saver.ranks[place] for saver in savers for place in _mesh_ranks(places, replica)]
        share = holders.index(rank)
        boxes = [mesh_box(table[row], replica, coordinate) for row in rows]
        sizes = [ITEM_BYTES[table[row].dtype] for row in rows]
        for row, box in zip(rows, _share_out(boxes, sizes, share, len(holders)), strict=True):
            if box.size:
                owned[row] = box
    return tuple(owned[row] for row in sorted(owned))


def saving_replicas(topology: Topology) -> tuple[Replica, ...]:
    """The replicas of the most common kind; of two equally common ones, the first replica's."""
    kinds = [replica.kind for replica in topology.replicas]
    best = max(topology.kinds, key=kinds.count)  # max takes the first of equals
    return tuple(r for r in topology.replicas if r.kind == best)


_Places = tuple[tuple[int, ...], ...]
"""Per mesh axis, the indices at which the ranks hold the same box of a tensor."""


def _places(spec: TensorSpec, replica: Replica, coordinate: Coordinate) -> _Places:
    """Where in the mesh the box lies that the rank at `coordinate` holds of a tensor."""
    every = {axis: tuple(range(replica.degree(axis))) for axis in AXES}
    tp, dp_shard = every["tp"], every["dp_shard"]
    if spec.tp_dim is not None:
        mine = tp_part(spec.tp_units, len(tp), coordinate.tp)
        tp = tuple(i for i in tp if tp_part(spec.tp_units, len(tp), i) == mine)
    if spec.shard_dim is not None:
        dp_shard = (coordinate.dp_shard,)
    return stages_of(spec, replica), dp_shard, every["cp"], tp


def _mesh_ranks(places: _Places, replica: Replica) -> list[int]:
    """The mesh ranks at these places, rising."""
    return [ravel(at, replica.mesh_shape) for at in product(*places)]


def _share_out(boxes: list[Box], item_bytes: list[int], share: int, shares: int) -> list[Box]:
    """Part `share` of `shares` of the boxes laid end to end; an empty box where it has no row."""
    totals = [box.size * item for box, item in zip(boxes, item_bytes, strict=True)]
    total = sum(totals)
    first, last = total * share // shares, total * (share + 1) // shares
    out: list[Box] = []
    start = 0
    for box, size in zip(boxes, totals, strict=True):
        rows = box.lengths[0] if box.lengths else 1
        low, high = (_row(cut - start, size, rows) for cut in (first, last))
        if box.lengths:
            offsets = (box.offsets[0] + low, *box.offsets[1:])
            out.append(Box(box.name, offsets, (high - low, *box.lengths[1:])))
        elif high > low:
            out.append(box)
        else:  # a scalar has no dim that could be empty
            out.append(Box(box.name, (0,), (0,)))
        start += size
    return out


def _row(position: int, size: int, rows: int) -> int:
    """The row boundary nearest to byte `position` of a tensor of `size` bytes, ends clamped."""
    if position <= 0 or size == 0:
        return 0
    if position >= size:
        return rows
    return (2 * position * rows + size) // (2 * size)
