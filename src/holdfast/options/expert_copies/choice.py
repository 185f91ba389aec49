"""Which hot experts get copies in a block, for the tokens of one microbatch.

The choices of that microbatch decide, and nothing else. So a run that was killed, restored or
rebuilt makes the same copies, and no rank has to remember any. Every rank of the group computes the
same from the same numbers. (He et al. 2022, section 5.1, decide for each batch in this way.)

n ranks have E / n experts each, in order. A rank's load is the choices that it computes. In each
round the rank with the highest load gives rows of its hottest expert away. They go to the rank with
the lowest load that has no copy yet, until both loads are equal or no row is left. The rounds end
when that is less than a part of an even load (`LEAST_PART`). Without such a bound, every small
difference would send an expert's matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LEAST_PART = 8
"""A copy takes at least 1/8 of an even load off a rank."""


@dataclass(frozen=True)
class ExpertCopy:
    """Rows of an expert that another rank computes. rows: by the rank whose tokens they are; they
    are the last ones of that rank for this expert that no earlier copy has."""

    expert: int
    host: int
    rows: tuple[int, ...]


def owner_of(expert: int, experts: int, ranks: int) -> int:
    """The rank that has an expert."""
    return expert // (experts // ranks)


def rank_loads(counts: Sequence[Sequence[int]]) -> list[int]:
    """Choices that each rank would compute without copies. counts: by rank, and by expert."""
    ranks, experts = len(counts), len(counts[0])
    of_expert = [sum(column) for column in zip(*counts, strict=True)]
    local = experts // ranks
    return [sum(of_expert[rank * local : (rank + 1) * local]) for rank in range(ranks)]


def plan_copies(counts: Sequence[Sequence[int]]) -> tuple[ExpertCopy, ...]:
    """Return the copies, at most one a host. counts: choices by rank, and by expert."""
    ranks, local = len(counts), len(counts[0]) // len(counts)
    left, loads = [list(row) for row in counts], rank_loads(counts)
    even, free = sum(loads) / ranks, set(range(ranks))
    found: list[ExpertCopy] = []
    while True:
        busiest = max(range(ranks), key=lambda rank: (loads[rank], -rank))
        host = min(free - {busiest}, key=lambda rank: (loads[rank], rank), default=None)
        if host is None:
            return tuple(found)
        own = range(busiest * local, (busiest + 1) * local)
        rows_of = {expert: sum(row[expert] for row in left) for expert in own}
        hottest = max(own, key=lambda expert: (rows_of[expert], -expert))
        moved = min(rows_of[hottest], (loads[busiest] - loads[host]) // 2)
        if moved * LEAST_PART < even or not moved:
            return tuple(found)
        rows = _take(left, hottest, moved, host)
        loads[busiest] -= moved
        loads[host] += moved
        free.remove(host)
        found.append(ExpertCopy(hottest, host, rows))


def _take(left: list[list[int]], expert: int, moved: int, host: int) -> tuple[int, ...]:
    """Take rows of an expert for a host: its own tokens first, since they need not travel."""
    rows = [0] * len(left)
    for rank in (host, *(rank for rank in range(len(left)) if rank != host)):
        rows[rank] = min(left[rank][expert], moved)
        left[rank][expert] -= rows[rank]
        moved -= rows[rank]
    return tuple(rows)
