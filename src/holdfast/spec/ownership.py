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

from math import prod

from holdfast.layout import AXES, Coordinate, Replica, Topology, unravel
from holdfast.spec.boxes import Box
from holdfast.spec.state import ITEM_BYTES, StateTable, TensorSpec, cuts, mesh_box


def owned_boxes(topology: Topology, table: StateTable, rank: int) -> tuple[Box, ...]:
    """The boxes that `rank` saves, none empty, at most one per tensor, in the table's order.

    Replicas of different mesh shapes hold boxes that do not match; then the replicas of the most
    common shape save, and the others own nothing.
    """
    savers = saving_replicas(topology)
    replica = topology.replica_of(rank)
    if replica not in savers:
        return ()
    coordinate = topology.coordinate(rank)
    groups: dict[tuple[str, ...], list[int]] = {}
    for number, spec in enumerate(table):
        groups.setdefault(_cutting_axes(spec, replica), []).append(number)
    owned: dict[int, Box] = {}
    for axes, rows in groups.items():
        holders = _holders(savers, coordinate, axes)
        share = holders.index(rank)
        boxes = [mesh_box(table[row], replica, coordinate) for row in rows]
        sizes = [ITEM_BYTES[table[row].dtype] for row in rows]
        for row, box in zip(rows, _share_out(boxes, sizes, share, len(holders)), strict=True):
            if box.size:
                owned[row] = box
    return tuple(owned[row] for row in sorted(owned))


def saving_replicas(topology: Topology) -> tuple[Replica, ...]:
    """The replicas of the most common mesh shape; of two equally common ones, the first's."""
    shapes = [replica.mesh_shape for replica in topology.replicas]
    best = max(shapes, key=lambda shape: (shapes.count(shape), -shapes.index(shape)))
    return tuple(r for r in topology.replicas if r.mesh_shape == best)


def _cutting_axes(spec: TensorSpec, replica: Replica) -> tuple[str, ...]:
    """The axes of degree above 1 that cut this tensor."""
    return tuple(axis for axis, _ in cuts(spec) if replica.mesh_shape[AXES.index(axis)] > 1)


def _holders(
    savers: tuple[Replica, ...], coordinate: Coordinate, axes: tuple[str, ...]
) -> list[int]:
    """The ranks that hold the same boxes: same index on every axis that cuts."""
    fixed = {AXES.index(axis): getattr(coordinate, axis) for axis in axes}
    shape = savers[0].mesh_shape
    same = [
        mesh_rank
        for mesh_rank in range(prod(shape))
        if all(unravel(mesh_rank, shape)[axis] == index for axis, index in fixed.items())
    ]
    return [replica.ranks[mesh_rank] for replica in savers for mesh_rank in same]


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
