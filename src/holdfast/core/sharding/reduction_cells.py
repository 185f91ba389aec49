"""Cells: which ranks add up which gradients.

After a backward pass every rank has gradients of the boxes it holds. Each of these is either the
complete gradient of its replica's microbatches or a part of it. A **cell** is a set of boxes to
which the same ranks contribute and whose sum the same ranks receive. Its members exchange partial
gradients only among themselves. Cells are the common refinement of the boxes of all replicas, so
replicas of unlike shapes need no rule of their own:

    replica 0, tp 2      ranks 0, 1      rows of one matrix     0   1   2   3   4   5
    replica 1, tp 3      ranks 2, 3, 4   replica 0              0   0   0   1   1   1
                                         replica 1              2   2   3   3   4   4
                                         cells                 {0 2} {0 3}{1 3} {1 4}

Within one replica, the ranks that contribute to the same box have different **parts** of its
gradient, which are added in order:

    cp         each rank sees other tokens. Experts that ep spreads get the tokens of all ranks, and
               only ranks with the same ones have parts
    pp         a tied embedding: the first stage looks tokens up, the last one computes logits
    tp         key/value heads held by several ranks, norms of queries and keys, and under sequence
               parallelism all norms (`sharding_table.gradient_is_partial`). Components that
               fewer ranks than those of tp cut
    dp_shard   under ZeRO 1 (Rajbhandari et al. 2020): each rank has other samples and contributes
               complete boxes, and receives its shard. Under ZeRO 2 and 3, FSDP2 has added them up
               inside the replica already, and each rank contributes the box it holds

If instead several tp ranks of a replica have the same complete gradient (norms without sequence
parallelism), these are **copies**. If every replica has equally many, each copy is a cell of its
own. Otherwise one rank per replica contributes and all receive.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import NamedTuple

from holdfast.config.sections.model import ModelConfig
from holdfast.core.sharding.boxes import Box
from holdfast.core.sharding.parameters import decoder_parameters
from holdfast.core.sharding.sharding_table import gradient_is_partial, sharding_table
from holdfast.core.sharding.state_table import (
    NO_DEGREES,
    TensorSpec,
    cut_box,
    holders_along_cp,
    parameter_table,
    stages_of,
)
from holdfast.layout import Coordinate, Replica, Topology, index_of


@dataclass(frozen=True, slots=True)
class Member:
    """One rank of a cell.

    part: which part of its replica's gradient it contributes, from 0, by rising mesh rank; 0 for
        a member that contributes nothing.
    contributes: its gradient enters the sum. receives: it holds the parameters that the sum
        is applied to.
    """

    rank: int
    replica: int
    part: int
    contributes: bool
    receives: bool


@dataclass(frozen=True, slots=True)
class Cell:
    """Boxes whose gradients the same members add up.

    members: by replica, then by mesh rank. boxes: in the table's order, at most one of a parameter,
    under parameter names ("norm.weight"). copy: number of this one among the equal copies in each
    replica, which add up the same gradients. It is -1 for what has no part in the norm.
    """

    members: tuple[Member, ...]
    boxes: tuple[Box, ...]
    copy: int = 0

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(member.rank for member in self.members))

    @property
    def size(self) -> int:
        """Elements of all boxes."""
        return sum(box.size for box in self.boxes)

    @property
    def is_in_norm(self) -> bool:
        """Return False for what no norm counts, such as choices of experts."""
        return self.copy != _NOT_IN_NORM

    def member(self, rank: int) -> Member:
        return next(member for member in self.members if member.rank == rank)

    def answers_for_norm(self, rank: int) -> bool:
        """Return True if `rank` answers for this cell in its replica's gradient norm. Every element
        counts once: the first of the replica's receivers answers, in the first copy."""
        replica = self.member(rank).replica
        first = next(m.rank for m in self.members if m.replica == replica and m.receives)
        return self.copy == 0 and first == rank


class GradientRow(NamedTuple):
    """A parameter, and whether tp ranks with the same box of it have to add up their gradients.

    is_in_norm: its gradient counts in the gradient norm. The rest are in cells of their own."""

    spec: TensorSpec
    partial: bool
    is_in_norm: bool = True


def reduction_cells(
    topology: Topology, model: ModelConfig, rank: int, *, sequence_parallel: bool, zero: int = 3
) -> tuple[Cell, ...]:
    """The cells of the decoder that `rank` is a member of."""
    return cells_of_rows(topology, decoder_rows(model, sequence_parallel), rank, zero=zero)


def decoder_rows(
    model: ModelConfig,
    sequence_parallel: bool,
    ep: int = 1,
    degrees: Mapping[str, int] = NO_DEGREES,
) -> list[GradientRow]:
    """The decoder's parameters, with the kind of their gradients. ep, degrees: as for
    `parameter_table`."""
    sharding, table = sharding_table(model), parameter_table(model, ep=ep, degrees=degrees)
    return [
        GradientRow(
            spec, gradient_is_partial(sharding[spec.name], sequence_parallel), not row.merge
        )
        for spec, row in zip(table, decoder_parameters(model), strict=True)
    ]


def cells_of_rows(
    topology: Topology, rows: Iterable[GradientRow], rank: int, *, zero: int = 3
) -> tuple[Cell, ...]:
    """The cells that `rank` is a member of.

    Any two members compute the same cell and, of the cells they share, the same order: by the
    cell's first box. Every element of what the rank contributes to or holds is in one cell of it.
    `zero` is the mode of `dp_shard`: 1, 2 or 3.
    """
    view = _RankView(
        tuple(next(r for r in topology.replicas if r.kind == kind) for kind in topology.kinds),
        topology.replica_of(rank),
        topology.coordinate(rank),
        zero == 1,
    )
    known: dict[_Class, tuple[tuple[Box, _Signature], ...]] = {}
    found: dict[_Signature, list[Box]] = {}
    for spec, partial, is_in_norm in rows:
        stages = tuple(stages_of(spec, kind) for kind in view.kinds)
        if view.coordinate.pp not in stages_of(spec, view.replica):
            continue
        cut = spec.tp_dim, spec.tp_units, spec.ep, spec.tp_degree
        alike = (spec.shape, cut, partial, stages)
        if alike not in known:  # the blocks of a stage are all alike
            known[alike] = tuple(_regions(view, spec, partial, stages))
        for box, normal in known[alike]:
            signature = normal if is_in_norm else normal._replace(copy=_NOT_IN_NORM)
            found.setdefault(signature, []).append(Box(spec.name, box.offsets, box.lengths))
    return tuple(
        Cell(tuple(_members(topology, signature)), tuple(boxes), signature.copy)
        for signature, boxes in found.items()
    )


_NOT_IN_NORM = -1  # the copy of a cell that no rank answers for


@dataclass(frozen=True)
class _RankView:
    """The inputs of one rank's cells: a replica of each kind, its own place, and ZeRO 1."""

    kinds: tuple[Replica, ...]
    replica: Replica
    coordinate: Coordinate
    is_zero_1: bool

    @property
    def own_kind(self) -> Replica:
        """The replica that stands for the rank's own kind."""
        return next(kind for kind in self.kinds if kind.kind == self.replica.kind)


class _MemberPlace(NamedTuple):
    """A Member in any replica of one kind."""

    mesh_rank: int
    part: int
    contributes: bool
    receives: bool


class _Signature(NamedTuple):
    """The identity of a cell: the members in each kind of replica, and the copy."""

    places: tuple[tuple[_MemberPlace, ...], ...]
    copy: int


_Stages = tuple[tuple[int, ...], ...]
_Class = tuple[tuple[int, ...], tuple[int | None, int, int, int], bool, _Stages]
"""Parameters of one class have the same regions: shape, (tp_dim, tp_units, ep, tp_degree), partial,
stages."""


def _regions(
    view: _RankView, spec: TensorSpec, partial: bool, stages: _Stages
) -> Iterator[tuple[Box, _Signature]]:
    """What this rank has of one parameter, cut wherever any replica cuts, by rising offsets."""
    # Equal copies of the complete gradient in each replica, by kind.
    whole = spec.tp_dim is None and not partial
    copies = {kind.degree("tp") if whole else 1 for kind in view.kinds}
    copy = view.coordinate.tp if whole and len(copies) == 1 else None
    held = [
        _holders_of(spec, kind, at, whole, copy)
        for kind, at in zip(view.kinds, stages, strict=True)
    ]
    row = replace(spec, shard_dim=None) if view.is_zero_1 else spec
    at = view.coordinate
    own = cut_box(row, view.replica, at.dp_shard, at.cp, at.tp)
    mine = view.kinds.index(view.own_kind)
    for box in _refine(own, (cut.box for kind in held for cut in kind)):
        places = tuple(
            _places(kind, cuts, box, view.is_zero_1)
            for kind, cuts in zip(view.kinds, held, strict=True)
        )
        # Under ZeRO 1, a copy that does not contribute has no part in the shards of other ranks.
        if any(place.mesh_rank == view.coordinate.mesh_rank for place in places[mine]):
            yield box, _Signature(places, copy or 0)


class _Holders(NamedTuple):
    """What the ranks of a replica at one (dp_shard, tp), and these indices on cp, hold of a
    parameter.

    box: what they hold; with_shards: together with the other ranks along dp_shard.
    """

    dp_shard: int
    contexts: tuple[int, ...]
    tp: int
    stages: tuple[int, ...]
    box: Box
    with_shards: Box
    contributes: bool


def _holders_of(
    spec: TensorSpec, kind: Replica, stages: tuple[int, ...], whole: bool, copy: int | None
) -> tuple[_Holders, ...]:
    """The holders of a parameter in a replica of this kind.

    copy: only this tp rank's copy; None: all tp ranks, of which only the first contributes if
    the gradient is `whole` on each.
    """
    out: list[_Holders] = []
    uncut = replace(spec, shard_dim=None)
    for tp in range(kind.degree("tp")) if copy is None else (copy,):
        contributes = copy is not None or not whole or tp == 0
        with_shards = cut_box(uncut, kind, 0, 0, tp)
        contexts = dict.fromkeys(holders_along_cp(spec, kind, i) for i in range(kind.degree("cp")))
        for dp_shard, along_cp in product(range(kind.degree("dp_shard")), contexts):
            box = cut_box(spec, kind, dp_shard, along_cp[0], tp)
            out.append(_Holders(dp_shard, along_cp, tp, stages, box, with_shards, contributes))
    return tuple(out)


def _refine(box: Box, others: Iterable[Box]) -> Iterator[Box]:
    """Cut `box` by a grid of the edges of the other boxes. No two pieces are in the same boxes. For
    tp and dp_shard cut tensors into ranges of dims, so every edge parts two holders all along."""
    edges = [{start, stop} for start, stop in zip(box.offsets, box.stops, strict=True)]
    for other in others:
        for dim, (low, high) in enumerate(zip(box.offsets, box.stops, strict=True)):
            edges[dim].update(e for e in (other.offsets[dim], other.stops[dim]) if low < e < high)
    if box.size:
        for spans in product(*(tuple(pairwise(sorted(e))) for e in edges)):
            starts, lengths = zip(*((a, b - a) for a, b in spans), strict=True)
            yield Box(box.name, starts, lengths)


def _places(
    kind: Replica, cuts: Iterable[_Holders], box: Box, zero_1: bool
) -> tuple[_MemberPlace, ...]:
    """Return the contributors to one box and its receivers in a replica of this kind, by mesh
    rank."""
    found: list[tuple[int, bool, bool]] = []
    for cut in cuts:
        if not cut.with_shards.contains(box):
            continue
        receives = cut.box.contains(box)
        contributes = cut.contributes and (zero_1 or receives)
        if contributes or receives:
            for pp, cp in product(cut.stages, cut.contexts):
                at = index_of((pp, cut.dp_shard, cp, cut.tp), kind.mesh_shape)
                found.append((at, contributes, receives))
    places: list[_MemberPlace] = []
    parts = 0
    for at, contributes, receives in sorted(found):
        places.append(_MemberPlace(at, parts if contributes else 0, contributes, receives))
        parts += contributes
    return tuple(places)


def _members(topology: Topology, signature: _Signature) -> Iterator[Member]:
    by_kind = dict(zip(topology.kinds, signature.places, strict=True))
    for replica in topology.replicas:
        for mesh_rank, part, contributes, receives in by_kind[replica.kind]:
            yield Member(replica.ranks[mesh_rank], replica.index, part, contributes, receives)
