"""Ownership: the rank that saves each box, when several ranks hold the same bytes.

Every element of every tensor is owned by exactly one rank, so that a capture copies, and a
checkpoint stores, nothing twice. Boxes that several ranks hold are shared out evenly by bytes. The
holders' tensors are laid end to end and cut at equal byte positions, rounded to rows of dim 0. So a
large embedding does not fall to one rank. No rank owns more than one row range of a tensor (Orbax
calls the same idea replica-parallel saving).

The rule is part of the checkpoint format: manifests do not list boxes, readers derive them from
(topology, table). Changing it means a new format version.

`Ownership` does for all ranks what `owned_boxes` does for one. Ranks at one place of the mesh share
one list of tensors, and the blocks of a stage are alike. So the work is in proportion to the owned
boxes, not to ranks times tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import prod

from holdfast.core.sharding.boxes import Box, coverage_problem
from holdfast.core.sharding.sharding_table import component_part
from holdfast.core.sharding.state_table import (
    ITEM_BYTES,
    StateTable,
    TensorSpec,
    cut_box,
    holders_along_cp,
    learner_box,
    stages_of,
)
from holdfast.layout import Replica, Topology, coordinates_of, index_of


def owned_boxes(topology: Topology, table: StateTable, rank: int) -> tuple[Box, ...]:
    """Return the boxes that `rank` saves: none empty, at most one per tensor, in the table's order.

    If replicas of different kinds hold boxes that do not match, the replicas of the most common
    kind save. The rest own nothing.
    """
    return Ownership(topology, table).boxes(rank)


def saving_replicas(topology: Topology) -> tuple[Replica, ...]:
    """The replicas of the most common kind; of two equally common ones, the first replica's."""
    kinds = [replica.kind for replica in topology.replicas]
    best = max(topology.kinds, key=kinds.count)  # max takes the first of equals
    return tuple(r for r in topology.replicas if r.kind == best)


_Places = tuple[tuple[int, ...], ...]
"""Per mesh axis, the indices at which the ranks hold the same box of a tensor."""

_HolderKey = tuple[tuple[int, ...], bool, int, int, int]
"""How a tensor lies on the mesh: its stages, whether dp_shard cuts it, the units that tp cuts it
into (0: it does not). The last are `ep` and `tp_degree` of its row."""

_Cut = tuple[tuple[int, ...], str, int | None, int | None, int, int, int]
"""What decides a tensor's box at a place: shape, dtype, and the fields of its row."""

_Share = tuple[int, int, int, int]
"""(number of the row in its group, share, first row of dim 0 in the box, rows)."""


class Ownership:
    """The boxes that every rank of a topology owns. They are derived on request; `boxes` and `at`
    remember the shapes of shares, which are few, and no boxes."""

    def __init__(self, topology: Topology, table: StateTable) -> None:
        self.topology, self.table = topology, table
        self.saving_replicas = saving_replicas(topology)
        self._kind = self.saving_replicas[0]
        self._at = {
            rank: mesh_rank
            for saver in self.saving_replicas
            for mesh_rank, rank in enumerate(saver.ranks)
        }
        self._rows: dict[_HolderKey, list[int]] = {}
        self._learner_rows = [number for number, spec in enumerate(table) if spec.of_learners]
        for number, spec in enumerate(table):
            if spec.of_learners:
                continue  # its replicas hold unlike parts, each of which has one owner
            self._rows.setdefault(self._holder_key(spec), []).append(number)
        self._merged: dict[tuple[_HolderKey, ...], list[int]] = {}
        self._cuts: dict[tuple[_Cut, int, int, int], Box] = {}
        self._touched: dict[object, tuple[int, ...]] = {}
        self._patterns: dict[object, tuple[_Share, ...]] = {}

    def boxes(self, rank: int) -> tuple[Box, ...]:
        """The boxes that `rank` saves, none empty, at most one per tensor, in the table's order."""
        mesh_rank = self._at.get(rank)
        if mesh_rank is None:
            self.topology.replica_of(rank)  # raises for a rank that is in no replica
            return ()
        owned: dict[int, Box] = {}
        for places, rows in self._groups(mesh_rank):
            share = self._holders(places).index(rank)
            for row, owner, box in self._shares_of(places, rows):
                if owner == share:
                    owned[row] = box
        owned.update(self._learner_boxes(rank))
        return tuple(owned[row] for row in sorted(owned))

    def by_rank(self) -> Iterator[tuple[int, tuple[Box, ...]]]:
        """(rank, its boxes) of every rank that owns something, in no particular order."""
        owned: dict[int, dict[int, Box]] = {}
        done: set[_Places] = set()
        for mesh_rank in range(len(self._kind.ranks)):
            for places, rows in self._groups(mesh_rank):
                if places in done:
                    continue
                done.add(places)
                holders = self._holders(places)
                for row, owner, box in self._shares_of(places, rows):
                    owned.setdefault(holders[owner], {})[row] = box
        for rank in self._at if self._learner_rows else ():
            owned.setdefault(rank, {}).update(self._learner_boxes(rank))
        for rank, rows_of in owned.items():
            yield rank, tuple(rows_of[row] for row in sorted(rows_of))

    def owners(self, box: Box, spec: TensorSpec) -> tuple[int, ...]:
        """The ranks whose shares could touch a box of a tensor: a few too many, none too few."""
        if spec.of_learners:
            return tuple(
                rank for rank in sorted(self._at) if self._learner_box(spec, rank).overlaps(box)
            )
        stages = stages_of(spec, self._kind)
        key = (stages, _cut_of(spec), box.offsets, box.lengths)
        if key not in self._touched:  # the blocks of a model are alike
            self._touched[key] = self._owners(box, spec, stages)
        return self._touched[key]

    def _learner_box(self, spec: TensorSpec, rank: int) -> Box:
        return learner_box(spec, self.topology, self.topology.replica_of(rank).index)

    def _learner_boxes(self, rank: int) -> dict[int, Box]:
        """What a rank owns of the rows `of_learners`, by row: all that it holds."""
        boxes = {row: self._learner_box(self.table[row], rank) for row in self._learner_rows}
        return {row: box for row, box in boxes.items() if box.size}

    def _owners(self, box: Box, spec: TensorSpec, stages: tuple[int, ...]) -> tuple[int, ...]:
        found: set[int] = set()
        shape = self._kind.mesh_shape
        for dp_shard, cp, tp in product(*map(range, shape[1:])):
            there = self._cut(spec, dp_shard, cp, tp)
            if Box(box.name, there.offsets, there.lengths).overlaps(box):
                at = product(stages, (dp_shard,), (cp,), (tp,))
                mesh_ranks = [index_of(place, shape) for place in at]
                found.update(saver.ranks[m] for saver in self.saving_replicas for m in mesh_ranks)
        return tuple(sorted(found))

    def coverage_problem(self) -> str | None:
        """Return None if the boxes of every tensor cover it exactly once, and the problem
        otherwise.

        The boxes at the places of the mesh are checked once for each way of cutting. A place's box
        is shared out row after row, from its first to its last.
        """
        seen: set[tuple[_HolderKey, _Cut]] = set()
        for spec in self.table:
            if spec.of_learners:
                continue  # dealt without a gap
            kind = (self._holder_key(spec), _cut_of(spec))
            if kind in seen:
                continue
            seen.add(kind)
            places = {
                self._places(spec, at)[1:]: self._cut(spec, *at)
                for at in product(*map(range, self._kind.mesh_shape[1:]))
            }
            if problem := coverage_problem(spec.shape, places.values()):
                return f"{spec.name}: {problem}"
        return None

    # --- places -----------------------------------------------------------------------------
    def _holder_key(self, spec: TensorSpec) -> _HolderKey:
        return (
            stages_of(spec, self._kind),
            spec.shard_dim is not None,
            spec.tp_units if spec.tp_dim is not None else 0,
            spec.ep,
            spec.tp_degree,
        )

    def _places(self, spec: TensorSpec, at: tuple[int, ...]) -> _Places:
        """Return the places in the mesh of the box that is held at these indices on dp_shard, cp
        and tp."""
        dp_shard, cp, tp = at
        stages, sharded, units, _, component = self._holder_key(spec)
        degree = self._kind.degree("tp")
        tps = tuple(range(degree))
        if units:
            mine = component_part(units, component, degree, tp)
            tps = tuple(i for i in tps if component_part(units, component, degree, i) == mine)
        shards = (dp_shard,) if sharded else tuple(range(self._kind.degree("dp_shard")))
        return stages, shards, holders_along_cp(spec, self._kind, cp), tps

    def _groups(self, mesh_rank: int) -> Iterator[tuple[_Places, list[int]]]:
        """(places, rows of the table) of what is held at a mesh rank, by who holds it too."""
        pp, *at = coordinates_of(mesh_rank, self._kind.mesh_shape)
        groups: dict[_Places, list[_HolderKey]] = {}
        for held, rows in self._rows.items():
            if pp in held[0]:
                places = self._places(self.table[rows[0]], tuple(at))
                groups.setdefault(places, []).append(held)
        for places, helds in groups.items():
            key = tuple(helds)
            if key not in self._merged:
                self._merged[key] = sorted(row for held in key for row in self._rows[held])
            yield places, self._merged[key]

    def _holders(self, places: _Places) -> list[int]:
        """The ranks at these places, replica by replica, in mesh order."""
        mesh_ranks = [index_of(at, self._kind.mesh_shape) for at in product(*places)]
        return [
            saver.ranks[mesh_rank] for saver in self.saving_replicas for mesh_rank in mesh_ranks
        ]

    def _cut(self, spec: TensorSpec, dp_shard: int, cp: int, tp: int) -> Box:
        """What is held at these indices of a tensor of this shape; the name may be another's."""
        key = (_cut_of(spec), dp_shard, cp, tp)
        if key not in self._cuts:
            self._cuts[key] = cut_box(spec, self._kind, dp_shard, cp, tp)
        return self._cuts[key]

    # --- shares -----------------------------------------------------------------------------
    def _shares_of(self, places: _Places, rows: Sequence[int]) -> Iterator[tuple[int, int, Box]]:
        """(row of the table, share, box) of everything in a group that is not empty."""
        specs = [self.table[row] for row in rows]
        at = (places[1][0], places[2][0], places[3][0])
        boxes = [self._cut(spec, *at) for spec in specs]
        items = tuple(ITEM_BYTES[spec.dtype] for spec in specs)
        shares = prod(map(len, places)) * len(self.saving_replicas)
        key = (tuple(box.lengths for box in boxes), items, shares)
        if key not in self._patterns:
            self._patterns[key] = tuple(_share_out(boxes, items, shares))
        for number, share, first, count in self._patterns[key]:
            box = boxes[number]
            name, offsets, lengths = specs[number].name, box.offsets, box.lengths
            if lengths:
                offsets = (offsets[0] + first, *offsets[1:])
                lengths = (count, *lengths[1:])
            yield rows[number], share, Box(name, offsets, lengths)


def _cut_of(spec: TensorSpec) -> _Cut:
    cut = spec.shard_dim, spec.tp_dim, spec.tp_units, spec.ep, spec.tp_degree
    return spec.shape, spec.dtype, *cut


def _share_out(boxes: Sequence[Box], item_bytes: Iterable[int], shares: int) -> Iterator[_Share]:
    """The boxes laid end to end and cut at `shares` equal byte positions, rounded to rows."""
    sizes = [box.size * item for box, item in zip(boxes, item_bytes, strict=True)]
    total = sum(sizes)
    start = share = 0
    for number, (box, size) in enumerate(zip(boxes, sizes, strict=True)):
        if not size:
            continue
        rows = box.lengths[0] if box.lengths else 1
        while total * (share + 1) // shares <= start:
            share += 1
        low = 0
        while low < rows:
            end = total * (share + 1) // shares
            high = _nearest_row(end - start, size, rows)
            if high > low:
                yield number, share, low, high - low
            low = high
            if low < rows or end < start + size:
                share += 1
        start += size


def _nearest_row(position: int, size: int, rows: int) -> int:
    """The row boundary nearest to byte `position` of a tensor of `size` bytes, ends clamped."""
    if position <= 0 or size == 0:
        return 0
    if position >= size:
        return rows
    return (2 * position * rows + size) // (2 * size)
