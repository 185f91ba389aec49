"""Which layers the ranks at each index on pp hold, as kinds with their number."""

from __future__ import annotations

from holdfast.layout import stages_at
from holdfast.plan.cost.choice import Choice, ReplicaChoice
from holdfast.plan.cost.workload import Workload

Counts = tuple[tuple[int, int], ...]
"""Kinds of layers, by their index in the workload, with their number."""


def counts_at(workload: Workload, choice: Choice, group: ReplicaChoice, index: int) -> Counts:
    """Layers of the ranks at `index` on pp."""
    chunks = chunks_of(choice, group, index)
    if len(chunks) == 1:
        return chunk_counts(workload, group, chunks[0])
    sums = dict[int, int]()
    for chunk in chunks:
        for kind, number in chunk_counts(workload, group, chunk):
            sums[kind] = sums.get(kind, 0) + number
    return tuple(sorted(sums.items()))


def chunk_counts(workload: Workload, group: ReplicaChoice, chunk: int) -> Counts:
    """Kinds of layers of one stage, with their number."""
    if group.pp == 1:
        return workload.counts_of(0, len(workload.blocks), True, True)
    first, last = group.bounds[chunk], group.bounds[chunk + 1]
    return workload.counts_of(first, last, chunk == 0, chunk == len(group.stages) - 1)


def chunks_of(choice: Choice, group: ReplicaChoice, index: int) -> tuple[int, ...]:
    """The stages of the ranks at `index` on pp."""
    if group.pp == 1:
        return (0,)
    return stages_at(index, group.pp, len(group.stages), choice.is_folded)
