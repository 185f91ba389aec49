"""Decides how many replicas of which shape there are. As many workers as possible are used. The run
file's replicas come first, and smaller replicas use the remaining workers.

A choice is ranked by, in this order: used workers; complete replicas of the run file; existing
smaller replicas that stay; few replicas. The node of a worker does not matter here, because a
replica may be on any nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from holdfast.plan.placing.replica_shapes import AllowedShapes, ReplicaShape

_MAX_REPLICAS_DROPPED = 8  # smaller numbers to try if workers would be idle


@dataclass(frozen=True)
class ReplicaCounts:
    """The chosen replicas. `full_replicas`: how many of each of the run file's kinds.
    kept_replicas: indices, in the given list, of the smaller replicas that stay. new_shapes: shapes
    of smaller ones to be made."""

    full_replicas: Counter[ReplicaShape]
    kept_replicas: tuple[int, ...] = ()
    new_shapes: tuple[ReplicaShape, ...] = ()
    workers: int = 0

    @property
    def score(self) -> tuple[int, int, int, int]:
        return (
            self.workers,
            self.full_replicas.total(),
            len(self.kept_replicas),
            -len(self.new_shapes),
        )


def choose_replicas(
    shapes: AllowedShapes,
    workers: int,
    microbatches: int,
    present: Counter[ReplicaShape],
    smaller: Sequence[ReplicaShape],
) -> ReplicaCounts:
    """Return the best filling. present: complete replicas of the run file's kinds. smaller:
    existing smaller replicas that could stay."""
    layout = shapes.config.layout
    if layout.replicas:
        whole = _choose_unlike(shapes, workers, microbatches, present)
        return _fill_rest(shapes, whole, workers, microbatches, smaller)
    (shape,) = shapes.configured
    most = (
        min(workers // shape.size, microbatches // shape.min_microbatches)
        if shapes.fits_memory(shape)
        else 0
    )
    best: ReplicaCounts | None = None
    for number in range(most, max(0, most - _MAX_REPLICAS_DROPPED) - 1, -1):
        whole = Counter({shape: number})
        found = _fill_rest(shapes, whole, workers, microbatches, smaller)
        if best is None or found.score > best.score:
            best = found
        if best.workers == workers:
            break
    assert best is not None
    return best


def _choose_unlike(
    shapes: AllowedShapes, workers: int, microbatches: int, present: Counter[ReplicaShape]
) -> Counter[ReplicaShape]:
    """Choose each unlike replica once, while they fit; existing replicas come first."""
    chosen: Counter[ReplicaShape] = Counter()
    have = present.copy()
    first: list[ReplicaShape] = []
    later: list[ReplicaShape] = []
    for shape in shapes.configured:
        (first if have[shape] > 0 else later).append(shape)
        have[shape] -= 1
    for shape in (*first, *later):
        if (
            shape.size <= workers
            and shape.min_microbatches <= microbatches
            and shapes.fits_memory(shape)
        ):
            chosen[shape] += 1
            workers -= shape.size
            microbatches -= shape.min_microbatches
    return chosen


def _fill_rest(
    shapes: AllowedShapes,
    whole: Counter[ReplicaShape],
    workers: int,
    microbatches: int,
    smaller: Sequence[ReplicaShape],
) -> ReplicaCounts:
    used = sum(shape.size * n for shape, n in whole.items())
    budget = microbatches - sum(shape.min_microbatches * n for shape, n in whole.items())
    new = [shape for shape in shapes.smaller_shapes if shape.min_microbatches <= budget]
    largest = max((shape.size for shape in (*new, *smaller)), default=0)
    rest = min(workers - used, budget * largest)
    if rest <= 0 or not largest:
        return ReplicaCounts(whole, workers=used)
    entry = _RestPacker(rest, smaller, new).best(budget)
    kept, made = entry.chosen() if entry is not None else ((), ())
    size = sum(smaller[i].size for i in kept) + sum(shape.size for shape in made)
    return ReplicaCounts(whole, kept, made, used + size)


class _PackingOption(NamedTuple):
    """One way to use some number of workers; `item` was added to `before`: a number among the
    replicas that are there, or a new shape."""

    kept: int
    number: int
    least: int
    before: _PackingOption | None = None
    item: int | ReplicaShape | None = None

    def chosen(self) -> tuple[tuple[int, ...], tuple[ReplicaShape, ...]]:
        kept: list[int] = []
        made: list[ReplicaShape] = []
        at: _PackingOption | None = self
        while at is not None and at.item is not None:
            if isinstance(at.item, int):
                kept.append(at.item)
            else:
                made.append(at.item)
            at = at.before
        return tuple(sorted(kept)), tuple(sorted(made, key=lambda s: (-s.size, s.mesh_shape)))


_Better = Callable[[_PackingOption], tuple[int, ...]]


class _RestPacker:
    """Every number of workers up to `size`, by dynamic programming over what may be added."""

    def __init__(self, size: int, present: Sequence[ReplicaShape], new: Sequence[ReplicaShape]):
        self._size, self._there, self._new = size, present, new

    def best(self, budget: int) -> _PackingOption | None:
        """Return the choice that uses the most workers with at most `budget` microbatches a
        step."""
        entry = self._table(lambda e: (e.kept, -e.number, -e.least))[self._size]
        if entry is not None and entry.least <= budget:
            return entry
        frugal = self._table(lambda e: (-e.least, e.kept, -e.number))
        return next((e for e in reversed(frugal) if e is not None and e.least <= budget), None)

    def _table(self, better: _Better) -> list[_PackingOption | None]:
        best: list[_PackingOption | None] = [_PackingOption(0, 0, 0), *[None] * self._size]

        def offer(size: int, shape: ReplicaShape, item: int | ReplicaShape) -> None:
            before, now = best[size - shape.size], best[size]
            if before is None:
                return
            kept = before.kept + isinstance(item, int)
            entry = _PackingOption(
                kept, before.number + 1, before.least + shape.min_microbatches, before, item
            )
            if now is None or better(entry) > better(now):
                best[size] = entry

        for number, shape in enumerate(self._there):
            for size in range(self._size, shape.size - 1, -1):
                offer(size, shape, number)
        for shape in self._new:
            for size in range(shape.size, self._size + 1):
                offer(size, shape, shape)
        return best
