"""Boxes: which part of a named tensor a piece of memory or of a blob holds.

A box is (name, offsets, lengths) in the tensor's global shape. Every layout yields boxes, and every
tier stores boxes. To restore on another layout, the wanted boxes are intersected with the stored
boxes. Elements of a box lie in row-major order, without gaps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import prod
from typing import NamedTuple


class Box(NamedTuple):
    """Elements [offset, offset + length) on each dim of the tensor `name`.

    A scalar has no dims and one element. A length of 0 makes the box empty, which is legal: a
    tensor of 3 rows over 4 ranks leaves the last one with none.
    """

    # A plain tuple that checks nothing, because a large layout has a million of them. Code that
    # reads boxes from outside compares them with the layout's own, or calls `coverage`.
    name: str
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.lengths)

    @property
    def stops(self) -> tuple[int, ...]:
        return tuple(o + n for o, n in zip(self.offsets, self.lengths, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """The common part; None when there is none, or when the names differ."""
        if self.name != other.name or len(self.offsets) != len(other.offsets):
            return None
        starts = tuple(map(max, self.offsets, other.offsets))
        lengths = tuple(
            min(a, b) - s for a, b, s in zip(self.stops, other.stops, starts, strict=True)
        )
        return Box(self.name, starts, lengths) if all(n > 0 for n in lengths) else None

    def overlaps(self, other: Box) -> bool:
        """Return True if there is a common part."""
        if self.name != other.name or len(self.offsets) != len(other.offsets):
            return False
        for a, n, b, m in zip(
            self.offsets, self.lengths, other.offsets, other.lengths, strict=True
        ):
            if a + n <= b or b + m <= a or not n or not m:
                return False
        return True

    def contains(self, other: Box) -> bool:
        """Return True if every element of `other` is in this box."""
        if self.name != other.name or len(self.offsets) != len(other.offsets):
            return False
        low = all(a <= b for a, b in zip(self.offsets, other.offsets, strict=True))
        return low and all(a >= b for a, b in zip(self.stops, other.stops, strict=True))


class CopyRun(NamedTuple):
    """`length` elements that are contiguous in both boxes; starts count from each box's first."""

    source: int
    target: int
    length: int


def whole_box(name: str, shape: Sequence[int]) -> Box:
    """The box that holds all of a tensor."""
    return Box(name, (0,) * len(shape), tuple(shape))


def copy_runs(source: Box, target: Box) -> Iterator[CopyRun]:
    """Yield the fewest contiguous runs that copy the common part of two boxes.

    Trailing dims that the common part fills in both boxes are merged into one run. So two row
    ranges of one matrix give a single run. Both starts rise from run to run.
    """
    if source.lengths[1:] == target.lengths[1:] and source.offsets[1:] == target.offsets[1:]:
        if source.overlaps(target):
            yield _row_run(source, target)
        return
    common = source.intersect(target)
    if common is None:
        return
    dims = len(common.lengths)
    fused = dims  # dims [fused:] are filled by the common part in both boxes
    while (
        fused
        and common.lengths[fused - 1] == source.lengths[fused - 1] == target.lengths[fused - 1]
    ):
        fused -= 1
    outer = max(fused - 1, 0)  # dims [outer:] make one run
    count = prod(common.lengths[outer:])
    source_strides, target_strides = _strides(source.lengths), _strides(target.lengths)
    source_start = _element_offset(common, source, source_strides)
    target_start = _element_offset(common, target, target_strides)
    if outer == 1:  # columns of a matrix: as many runs as it has rows
        for i in range(common.lengths[0]):
            yield CopyRun(
                source_start + i * source_strides[0], target_start + i * target_strides[0], count
            )
        return
    for index in product(*(range(n) for n in common.lengths[:outer])):
        yield CopyRun(
            source_start + sum(i * s for i, s in zip(index, source_strides, strict=False)),
            target_start + sum(i * s for i, s in zip(index, target_strides, strict=False)),
            count,
        )


def element_range(box: Box, start: int, stop: int) -> Iterator[Box]:
    """Yield the fewest boxes that hold the elements `start` to `stop` - 1 of a box, in order."""
    if start >= stop:
        return
    if start == 0 and stop == box.size:
        yield box
        return
    # Now there are dims, and `row` is not 0.
    name, (offset, *offsets), (_, *lengths) = box
    row = prod(lengths)
    inner = Box(name, tuple(offsets), tuple(lengths))

    def part(index: int, first: int, last: int) -> Iterator[Box]:
        for b in element_range(inner, first, last):
            yield Box(name, (offset + index, *b.offsets), (1, *b.lengths))

    (low, head), (high, tail) = divmod(start, row), divmod(stop, row)
    if low == high:
        yield from part(low, head, tail)
        return
    if head:
        yield from part(low, head, row)
        low += 1
    if low < high:
        yield Box(name, (offset + low, *offsets), (high - low, *lengths))
    yield from part(high, 0, tail)


def _row_run(source: Box, target: Box) -> CopyRun:
    """The one run of two boxes that differ at most in their rows, which most do: quick."""
    if not source.lengths:
        return CopyRun(0, 0, 1)
    a, b = source.offsets[0], target.offsets[0]
    first = max(a, b)
    count = min(a + source.lengths[0], b + target.lengths[0]) - first
    row = prod(source.lengths[1:])
    return CopyRun((first - a) * row, (first - b) * row, count * row)


def coverage_problem(shape: Sequence[int], boxes: Iterable[Box]) -> str | None:
    """Return None if the boxes hold every element of a tensor exactly once, or what is wrong.

    Boxes that lie inside the shape, do not overlap, and have as many elements together as the
    tensor, cover it. Overlaps are looked for by a sweep along dim 0.
    """
    boxes = list(boxes)
    for box in boxes:
        if problem := _why_outside(box, shape):
            return problem
    full = whole_box("", shape)
    held = sorted((b for b in boxes if b.size), key=lambda b: (b.offsets, b.lengths))
    active: list[Box] = []
    for box in held:
        active = [a for a in active if not shape or a.stops[0] > box.offsets[0]]
        for other in active:
            if other.intersect(box):
                return f"{box.name} is held twice: {_format_box(other)} and {_format_box(box)}"
        active.append(box)
    total = sum(b.size for b in held)
    if total != full.size:
        return f"{full.size - total} of {full.size} elements are missing"
    return None


def _why_outside(box: Box, shape: Sequence[int]) -> str | None:
    """Return why a box from any source is no part of a tensor of this shape."""
    if not len(box.offsets) == len(box.lengths) == len(shape):
        return f"{box.name}: {box.offsets} and {box.lengths} have not the dims of {tuple(shape)}"
    numbers = (*box.offsets, *box.lengths, *shape)
    if not all(type(n) is int and n >= 0 for n in numbers):
        return f"{box.name}: {box.offsets} and {box.lengths} in {tuple(shape)} are no places"
    if any(stop > size for stop, size in zip(box.stops, shape, strict=True)):
        return f"{box.name} {_format_box(box)} lies outside the shape {tuple(shape)}"
    return None


def _strides(lengths: Sequence[int]) -> tuple[int, ...]:
    """Elements between neighbours on each dim, row-major."""
    return tuple(prod(lengths[dim + 1 :]) for dim in range(len(lengths)))


def _element_offset(inner: Box, outer: Box, strides: Sequence[int]) -> int:
    """Return the place of the first element of `inner` in `outer`."""
    deltas = (a - b for a, b in zip(inner.offsets, outer.offsets, strict=True))
    return sum(d * s for d, s in zip(deltas, strides, strict=True))


def _format_box(box: Box) -> str:
    return "[" + ", ".join(f"{a}:{b}" for a, b in zip(box.offsets, box.stops, strict=True)) + "]"
