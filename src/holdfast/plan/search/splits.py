"""Blocks to pipeline stages: the splits that a search tries.

Of a small model, those are all. Otherwise they are an even one, and the one whose slowest stage is
fastest. A stage that holds more blocks takes longer. So under a limit each stage takes as many
blocks as it may, from the last stage to the first. The least limit that works is sought.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations, pairwise
from math import comb
from sys import float_info

ALL_SPLITS = 24
"""Splits up to which each is tried."""
BALANCED = 1e-4
"""Share by which another split may be better than a balanced one."""
_LIMITS = 40

Stages = tuple[int, ...]
StageCost = Callable[[int, int, int], float]
"""(stage, first block, block after the last) -> what the stage costs; more with more blocks."""


def every_split(blocks: int, stages: int) -> Iterator[Stages]:
    for cuts in combinations(range(1, blocks), stages - 1):
        edges = (0, *cuts, blocks)
        yield tuple(b - a for a, b in pairwise(edges))


def can_try_all(blocks: int, stages: int) -> bool:
    return comb(blocks - 1, stages - 1) <= ALL_SPLITS


def even_split(blocks: int, stages: int) -> Stages:
    """The last stages have one more where the number does not divide."""
    each, more = divmod(blocks, stages)
    return tuple(each + (stage >= stages - more) for stage in range(stages))


def fitting_split(blocks: int, stages: int, cost: StageCost) -> Stages:
    """Return a split without an infinite cost; () if there is none."""
    return _within(blocks, stages, cost, float_info.max) or ()


def balanced_split(blocks: int, stages: int, cost: StageCost, first: Stages = ()) -> Stages:
    """Return a split whose most costly stage is as cheap as can be. Among those, the first stages
    have the fewest blocks, for they keep the most microbatches. first: a split to begin with."""
    best = first or even_split(blocks, stages)
    low, high = 0.0, most_costly(best, cost)
    for _ in range(_LIMITS):
        limit = (low + high) / 2
        found = _within(blocks, stages, cost, limit)
        if found is None:
            low = limit
        else:
            best, high = found, most_costly(found, cost)
        if high - low <= BALANCED * high:
            break
    return best


def most_costly(split: Stages, cost: StageCost) -> float:
    """Return the cost of the most costly stage."""
    start, most = 0, 0.0
    for stage, number in enumerate(split):
        most = max(most, cost(stage, start, start + number))
        start += number
    return most


def _within(blocks: int, stages: int, cost: StageCost, limit: float) -> Stages | None:
    """The split under a limit that gives the last stages as much as they may have."""
    found, stop = [0] * stages, blocks
    for stage in range(stages - 1, -1, -1):
        low, high = stage, stop - 1  # each stage before it has a block
        if high < low or cost(stage, high, stop) > limit:
            return None
        while low < high:  # to the earliest first block with which it is within the limit
            middle = (low + high) // 2
            if cost(stage, middle, stop) <= limit:
                high = middle
            else:
                low = middle + 1
        found[stage], stop = stop - low, low
    return tuple(found) if stop == 0 else None
