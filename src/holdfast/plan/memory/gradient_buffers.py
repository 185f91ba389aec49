"""Bytes of the buffers that sum a rank's gradients, by the rules of `parallel/gradients`.

Each reduction cell of the rank has a flat buffer. It has more of them if the binary counter of
`core/sharding/reduction_tree.py` needs partial sums. Pieces of other ranks arrive in a buffer of
their own. A parameter that is cut among cells has its sum in one more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import prod

from holdfast.config.run import RunConfig
from holdfast.config.sections.memory import DEVICE
from holdfast.core.sharding.reduction_cells import Cell
from holdfast.core.sharding.reduction_tree import (
    LeafAction,
    ReductionTree,
    Shares,
    maximal_subtrees,
    plan_accumulation,
)
from holdfast.core.sharding.run_table import run_cells
from holdfast.core.sharding.state_table import ITEM_BYTES, MIXED, STATE_DTYPE
from holdfast.layout import Topology

SLICE_ELEMENTS, BUFFER_ELEMENTS = 16, 4096
"""What slices and buffers are rounded up to (`buckets.ALIGNMENT`, `grad_norm.NORM_BLOCK`)."""


@dataclass(frozen=True)
class GradientBuffers:
    """Bytes, whatever their place. staying: places in the rank's share, of microbatches whose
    gradients wait where they were computed for those of the next one."""

    sums: int  # the buffers of the sum, and of partial sums
    arrivals: int  # of pieces from other ranks
    staying: frozenset[int]


def gradient_buffers(
    config: RunConfig, topology: Topology, rank: int, shares: Shares
) -> GradientBuffers:
    """Return the buffers of one rank. shares: the dealing of the largest step."""
    item = ITEM_BYTES[STATE_DTYPE[config.train.precision]]
    is_cut = config.layout.zero_in_memory > 1
    by_unit = is_cut and any(replica.is_sharded for replica in topology.replicas)
    in_fsdp = is_cut and topology.replica_of(rank).is_sharded
    is_here = config.train.memory.gradients == DEVICE
    pairs = config.train.precision not in MIXED and not in_fsdp and is_here
    bucket = 0 if by_unit else int(config.layout.bucket_mb * 1e6) // item
    cells = run_cells(config, topology, rank)
    is_fast = config.layout.reduction == "fast" and len(cells) == 1
    # each member contributes and receives, one for each replica
    is_fast &= all(m.contributes and m.receives and m.part == 0 for m in cells[0].members)
    sums = arrivals = 0
    staying, received = frozenset[int](), list[tuple[str, int]]()
    tree = ReductionTree(sum(map(len, shares)))
    pieces = [len(maximal_subtrees(tree, share)) for share in shares]
    plan = cache(lambda replica: plan_accumulation(tree, shares[replica], pairs))
    for cell in cells:
        own = cell.member(rank)
        # Elements of each bucket (`buckets.arrange_boxes`). bucket: elements that fill one.
        buckets: list[int] = []
        held, block = bucket, ""
        for box in reversed(cell.boxes):
            name = ".".join(box.name.split(".")[:2]) if box.name.startswith("layers.") else ""
            if not buckets or (name != block if by_unit else held >= bucket):
                buckets.append(0)
                held, block = 0, name
            buckets[-1] += _round_up(prod(box.lengths), SLICE_ELEMENTS)
            held += box.size
        size = _round_up(sum(buckets), BUFFER_ELEMENTS)
        actions: Sequence[LeafAction] = ()
        if own.contributes and not is_fast:
            actions = plan(own.replica)
        kept = [action for action in actions if not action.stays_in_place]
        slots = {(0, 0), *((a.piece, 0) if a.depth == 0 else (0, a.depth) for a in kept)}
        staying |= {n for n, action in enumerate(actions) if action.stays_in_place}
        sums += item * size * len(slots)
        if own.receives:
            received += [(box.name, box.size) for box in cell.boxes]
        if not is_fast:
            arrivals += item * _arrivals(config, cell, rank, pieces, buckets)
    times = Counter(name for name, _ in received)
    sums += item * sum(size for name, size in received if times[name] > 1)
    return GradientBuffers(sums, arrivals, staying)


def _round_up(number: int, to: int) -> int:
    return -(-number // to) * to


def _arrivals(
    config: RunConfig, cell: Cell, rank: int, pieces: Sequence[int], buckets: Sequence[int]
) -> int:
    """Elements of the pieces that this rank adds up, and of the sums on their way."""
    if len(cell.members) == 1:
        return 0
    owners = sum(member.receives for member in cell.members)
    if not cell.member(rank).receives:
        return 0
    chunks = [_round_up(_round_up(size, owners) // owners, SLICE_ELEMENTS) for size in buckets]
    of_others = sum(pieces[m.replica] for m in cell.members if m.contributes and m.rank != rank)
    if config.layout.exchange != "gathered":
        return of_others * sum(min(c, b) for c, b in zip(chunks, buckets, strict=True))
    every = sum(pieces[m.replica] for m in cell.members if m.contributes)
    rooms = [max(chunks[parity::2], default=0) for parity in (0, 1)]
    uneven = any(size % (owners * SLICE_ELEMENTS) for size in buckets)
    return sum(room * (every + (owners + 1 if uneven else 0)) for room in rooms)
