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

from holdfast.layout import Layout
from holdfast.plan.placing.replica_shapes import AllowedShapes

_MAX_REPLICAS_DROPPED = 8  # smaller numbers to try if workers would be idle


@dataclass(frozen=True)
class ReplicaCounts:
    """The chosen replicas."""

    full_replicas: Counter[Layout]  # how many of each of the run file's kinds
    kept_replicas: tuple[int, ...] = ()  # indices, in the list, of smaller ones that stay
    new_shapes: tuple[Layout, ...] = ()  # of smaller ones to be made
    workers: int = 0

    @property
    def score(self) -> tuple[int, int, int, int]:
        full = self.full_replicas.total()
        return self.workers, full, len(self.kept_replicas), -len(self.new_shapes)


def choose_replicas(
    shapes: AllowedShapes,
    workers: int,
    microbatches: int,
    present: Counter[Layout],
    smaller: Sequence[Layout],
) -> ReplicaCounts:
    """Return the best filling. present: complete replicas of the run file's kinds. smaller:
    existing smaller replicas that could stay."""
    layout = shapes.config.layout
    if layout.replicas:
        whole = _choose_unlike(shapes, workers, microbatches, present)
        return _fill_rest(shapes, whole, workers, microbatches, smaller)
    (shape,) = shapes.configured
    most = (
        min(workers // shape.replica_size, microbatches // shapes.min_microbatches(shape))
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
    shapes: AllowedShapes, workers: int, microbatches: int, present: Counter[Layout]
) -> Counter[Layout]:
    """Choose each unlike replica once, while they fit; existing replicas come first."""
    chosen: Counter[Layout] = Counter()
    have = present.copy()
    first: list[Layout] = []
    later: list[Layout] = []
    for shape in shapes.configured:
        (first if have[shape] > 0 else later).append(shape)
        have[shape] -= 1
    for shape in (*first, *later):
        if (
            shape.replica_size <= workers
            and shapes.min_microbatches(shape) <= microbatches
            and shapes.fits_memory(shape)
        ):
            chosen[shape] += 1
            workers -= shape.replica_size
            microbatches -= shapes.min_microbatches(shape)
    return chosen


def _fill_rest(
    shapes: AllowedShapes,
    whole: Counter[Layout],
    workers: int,
    microbatches: int,
    smaller: Sequence[Layout],
) -> ReplicaCounts:
    used = sum(shape.replica_size * n for shape, n in whole.items())
    budget = microbatches - sum(shapes.min_microbatches(shape) * n for shape, n in whole.items())
    new = [shape for shape in shapes.smaller_shapes if shapes.min_microbatches(shape) <= budget]
    largest = max((shape.replica_size for shape in (*new, *smaller)), default=0)
    rest = min(workers - used, budget * largest)
    if rest <= 0 or not largest:
        return ReplicaCounts(whole, workers=used)
    entry = _RestPacker(shapes, rest, smaller, new).best(budget)
    kept, made = entry.chosen() if entry is not None else ((), ())
    size = sum(smaller[i].replica_size for i in kept) + sum(shape.replica_size for shape in made)
    return ReplicaCounts(whole, kept, made, used + size)


class _PackingOption(NamedTuple):
    """One way to use some number of workers; `item` was added to `before`: a number among the
    replicas that are there, or a new shape."""

    kept: int
    number: int
    least: int
    before: _PackingOption | None = None
    item: int | Layout | None = None

    def chosen(self) -> tuple[tuple[int, ...], tuple[Layout, ...]]:
        kept: list[int] = []
        made: list[Layout] = []
        at: _PackingOption | None = self
        while at is not None and at.item is not None:
            if isinstance(at.item, int):
                kept.append(at.item)
            else:
                made.append(at.item)
            at = at.before
        made.sort(key=lambda shape: (-shape.replica_size, shape.mesh_shape))
        return tuple(sorted(kept)), tuple(made)


_Better = Callable[[_PackingOption], tuple[int, ...]]


class _RestPacker:
    """Every number of workers up to `size`, by dynamic programming over what may be added."""

    def __init__(
        self, shapes: AllowedShapes, size: int, present: Sequence[Layout], new: Sequence[Layout]
    ):
        self._size, self._there, self._new = size, present, new
        self._min_microbatches = shapes.min_microbatches

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

        def offer(size: int, each: int, least: int, item: int | Layout) -> None:
            before, now = best[size - each], best[size]
            if before is None:
                return
            kept = before.kept + isinstance(item, int)
            entry = _PackingOption(kept, before.number + 1, before.least + least, before, item)
            if now is None or better(entry) > better(now):
                best[size] = entry

        for number, shape in enumerate(self._there):
            each, least = shape.replica_size, self._min_microbatches(shape)
            for size in range(self._size, each - 1, -1):
                offer(size, each, least, number)
        for shape in self._new:
            each, least = shape.replica_size, self._min_microbatches(shape)
            for size in range(each, self._size + 1):
                offer(size, each, least, shape)
        return best
