"""A check of the state across ranks: ranks that should hold the same bytes must hold them.

Replicas are bit-equal, so all ranks with the same box of a parameter or a moment must agree to the
last bit. A bit that flipped in memory, or a device that computes wrongly, shows here long before
it shows in the loss. Boxes are the common refinement of what all ranks hold, as in
`core/sharding/reduction_cells.py`, so replicas of unlike shapes are compared too. All boxes that
the same ranks hold make one hash, and an exchange of a few words a rank tells all ranks the same:

    ranks 0 and 1, of a replica with tp 2       0: norms, first heads     1: norms, last heads
    rank 2, a replica alone                     2: everything
    hashes                                      {0 1 2}: norms   {0 2}: first heads   {1 2}: last

The majority is right, and names the odd one out; with two, or an even split, all are named. Then,
and only then, each box is hashed alone, so that the tensor is named too.

The hash is xxh3, 64 bits, which fit an int64 exchange: two unlike states pass for alike once in
2^64 checks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import TypeVar

import torch
from torch import Tensor
from xxhash import xxh3_64

from holdfast.config.run import RunConfig
from holdfast.core.sharding.boxes import Box
from holdfast.core.sharding.run_table import run_state_table
from holdfast.core.sharding.state_table import StateTable, TensorSpec, mesh_box, stages_of
from holdfast.errors import TaskError
from holdfast.layout import Coordinate, Topology, coordinates_of
from holdfast.parallel.axes.process_groups import ProcessGroups
from holdfast.parallel.comm.transport import exchange
from holdfast.training.engine.state import LocalTensor

_TAG, _TAG_EACH = 11, 12
_HALF, _WHOLE = 1 << 63, 1 << 64

Holders = tuple[int, ...]
"""Ranks, rising."""


@dataclass(frozen=True)
class ReplicaMismatch:
    """ranks: who differs from the majority, or all of `holders` where there is none. tensors: of
    which they hold other bytes."""

    ranks: Holders
    holders: Holders
    tensors: tuple[str, ...]


class ReplicaChecker:
    """What is compared in one topology: derived once, used at any step.

    shared_boxes: by who holds them, the boxes that are held more than once, in the table's order.
    """

    def __init__(self, topology: Topology, table: StateTable):
        found: dict[Holders, list[Box]] = {}
        known: dict[object, list[tuple[Holders, Box]]] = {}
        for spec in table:
            if spec.of_learners:
                continue  # each is held once
            stages = tuple(stages_of(spec, replica) for replica in topology.replicas)
            like = (replace(spec, name="", positions=()), stages)
            if like not in known:  # the blocks of a stage are all alike
                known[like] = list(_shared(topology, spec))
            for holders, box in known[like]:
                found.setdefault(holders, []).append(box._replace(name=spec.name))
        self.shared_boxes = {holders: tuple(found[holders]) for holders in sorted(found)}
        self._holder_sets = {
            rank: [holders for holders in self.shared_boxes if rank in holders]
            for rank in range(topology.world_size)
        }

    def hashes(self, rank: int, state: Iterable[LocalTensor]) -> list[int]:
        """This rank's hashes: one for each set of holders that it is in."""
        held = {local.name: local for local in state}
        return [_hash(held, self.shared_boxes[holders]) for holders in self._holder_sets[rank]]

    def check(
        self, groups: ProcessGroups, state: Sequence[LocalTensor]
    ) -> tuple[ReplicaMismatch, ...]:
        """Compare the state of all ranks; all get the same result. Collective, between two steps.

        Names no rank if all agree. Raises PeerLostError.
        """
        mine = self.hashes(groups.rank, state)
        odd = _find_outliers(groups, self._holder_sets, mine, _TAG)
        if not odd:
            return ()
        # Every rank knows that the state differs. To know where, compare once more, box by box.
        boxes = {
            rank: [(h, box) for h in sets if h in odd for box in self.shared_boxes[h]]
            for rank, sets in self._holder_sets.items()
        }
        held = {local.name: local for local in state}
        mine = [_hash(held, [box]) for _, box in boxes[groups.rank]]
        names: dict[Holders, dict[str, None]] = {holders: {} for holders in odd}
        for holders, box in _find_outliers(groups, boxes, mine, _TAG_EACH):
            names[holders][box.name] = None
        return tuple(ReplicaMismatch(odd[h], h, tuple(names[h])) for h in sorted(odd))


K = TypeVar("K", bound=Hashable)


def _find_outliers(
    groups: ProcessGroups, keys: Mapping[int, Sequence[K]], mine: list[int], tag: int
) -> dict[K, Holders]:
    """Return the ranks that differ, by key. keys: of each rank's words. mine: this rank's words."""
    lengths = [len(keys[rank]) for rank in groups.positions]
    records = exchange(groups.control, torch.tensor(mine, dtype=torch.int64), lengths, tag)
    said: dict[K, dict[int, int]] = {}
    for rank, record in zip(groups.positions, records, strict=True):
        for key, word in zip(keys[rank], record.tolist(), strict=True):
            said.setdefault(key, {})[rank] = word
    odd = {key: outliers(by_rank) for key, by_rank in said.items()}
    return {key: ranks for key, ranks in odd.items() if ranks}


def refuse_unequal_start(
    config: RunConfig, groups: ProcessGroups, state: Sequence[LocalTensor]
) -> None:
    """Raise TaskError on every rank if a user's module gave workers other initial values than
    the rest. Collective."""
    found = ReplicaChecker(groups.topology, run_state_table(config)).check(groups, state)
    if found:
        ranks = " and ".join(map(str, outlier_ranks(found)))
        raise TaskError(
            f"workers {ranks} begin with other values of {found[0].tensors[0]} than the rest",
            where="task",
            remedy="draw initial values from torch's generator alone, whose seed is set, or return "
            "them in initial()",
        )


def outliers(words: Mapping[int, int]) -> Holders:
    """Return the ranks without the word of more than half; all ranks if no word has so many."""
    counts = Counter(words.values())
    word, most = counts.most_common(1)[0]
    if most == len(words):
        return ()
    majority = 2 * most > len(words)
    return tuple(sorted(rank for rank, said in words.items() if not majority or said != word))


def outlier_ranks(findings: Iterable[ReplicaMismatch]) -> Holders:
    """Return the ranks that differ from a majority; if there are none, all that differ."""
    sure = {rank for f in findings if len(f.ranks) < len(f.holders) for rank in f.ranks}
    return tuple(sorted(sure or {rank for f in findings for rank in f.ranks}))


def _shared(topology: Topology, spec: TensorSpec) -> Iterator[tuple[Holders, Box]]:
    """The pieces of one tensor that more than one rank holds, cut wherever any rank's box ends."""
    held: dict[Box, list[int]] = {}
    for replica in topology.replicas:
        for mesh_rank, rank in enumerate(replica.ranks):
            place = mesh_rank, *coordinates_of(mesh_rank, replica.mesh_shape)
            box = mesh_box(spec, replica, Coordinate(replica.index, *place))
            if box.size:
                held.setdefault(box, []).append(rank)
    edges = [
        sorted({edge for box in held for edge in (box.offsets[dim], box.stops[dim])})
        for dim in range(len(spec.shape))
    ]
    for spans in product(*(tuple(pairwise(row)) for row in edges)):
        piece = Box(spec.name, tuple(a for a, _ in spans), tuple(b - a for a, b in spans))
        holders = [rank for box, ranks in held.items() if box.contains(piece) for rank in ranks]
        if len(holders) > 1:
            yield tuple(sorted(holders)), piece


def _hash(tensors: Mapping[str, LocalTensor], boxes: Iterable[Box]) -> int:
    """Of the bytes of these boxes one after another, as a signed number."""
    state = xxh3_64()
    for box in boxes:
        state.update(box_bytes(tensors[box.name], box))
    word = state.intdigest()
    return word - _WHOLE if word >= _HALF else word


@torch.no_grad()
def box_bytes(local: LocalTensor, box: Box) -> memoryview:
    """Of part of a tensor, in row-major order; nothing is copied where the part is contiguous."""
    part: Tensor = local.tensor
    for dim, (start, length) in enumerate(zip(box.offsets, box.lengths, strict=True)):
        part = part.narrow(dim, start - local.offsets[dim], length)
    host = part.detach().contiguous().cpu()
    return host.reshape(-1).view(torch.uint8).numpy().data
