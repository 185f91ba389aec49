"""Computes which bytes of which blobs fill the wanted boxes; reads nothing.

Wanted boxes are intersected with the stored ones into moves (contiguous runs of bytes). The extents
that moves touch are joined with their neighbours into stretches, each of which is read at once. So
an extent that no wanted box touches is never read, and none is read twice, however many boxes lie
in it. The cost is one of moves and stretches, not of extents.

A stretch whose bytes go to few places is read straight into them (`ReadRange.places`), without a
copy. The unwanted bytes of its first and last extent go to a buffer, because checksums cover them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from holdfast.core.format.manifest import Blob, PlacedBox
from holdfast.core.sharding.boxes import Box, copy_runs

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

FEW, MIN_PLACE_BYTES = 8, 32 * 2**10
"""A stretch is read straight into its places when they are few, or hold so many bytes on average.
Every place adds to a request's cost; every byte that is read elsewhere first costs a copy."""

ByteArray: TypeAlias = "npt.NDArray[np.uint8]"


class ByteMove(NamedTuple):
    """`length` bytes from byte `start` of a blob to byte `target_offset` of a target."""

    start: int
    length: int
    target: ByteArray
    target_offset: int


@dataclass(frozen=True, slots=True)
class StoredBox:
    """One stored box: where its first byte lies."""

    placed: PlacedBox
    blob: Blob

    @property
    def start(self) -> int:
        return self.blob.data_start + self.placed.start


@dataclass(slots=True)
class ReadRange:
    """Extents [first, last) of a blob, and what is wanted of them, in the order of its bytes."""

    blob: Blob
    first_extent: int
    end_extent: int
    moves: list[ByteMove] = field(default_factory=list)

    @property
    def start(self) -> int:
        return self.first_extent * self.blob.extent_bytes

    @property
    def stop(self) -> int:
        return min(self.end_extent * self.blob.extent_bytes, self.blob.size)

    @property
    def length(self) -> int:
        return self.stop - self.start

    @property
    def is_direct(self) -> bool:
        """True if its places are few, or long, enough to be read into."""
        return len(self.moves) <= max(FEW, self.length // MIN_PLACE_BYTES)

    def places(self, buffer: memoryview) -> list[memoryview] | None:
        """Return the places that the bytes go to, in order; unwanted bytes have one in `buffer`.
        None when that would be many small places, or when two want the same byte."""
        if not self.is_direct:
            return None
        start, stop = self.start, self.stop
        places: list[memoryview] = []
        at, used = start, 0  # unwanted bytes lie close together: few pages, soon cached
        for begin, length, target, low in self.moves:
            if begin < at:
                return None
            if begin > at:
                places.append(buffer[used : used + begin - at])
                used += begin - at
            places.append(target.data[low : low + length])
            at = begin + length
        if at < stop:
            places.append(buffer[used : used + stop - at])
        return places


def moves_into(
    box: Box, item: int, target: ByteArray, stored: Sequence[StoredBox]
) -> tuple[list[tuple[Blob, ByteMove]], int]:
    """Return reads that fill `target` with the box's elements of `item` bytes, and the number of
    elements."""
    found: list[tuple[Blob, ByteMove]] = []
    count = 0
    for held in stored:
        for run in copy_runs(held.placed.box, box):
            start = held.start + run.source * item
            found.append((held.blob, ByteMove(start, run.length * item, target, run.target * item)))
            count += run.length
    return found, count


def plan_ranges(
    moves: Sequence[tuple[Blob, ByteMove]], max_bytes: Callable[[Blob], int]
) -> list[ReadRange]:
    """All moves in stretches of at most `max_bytes` bytes (or one extent), in the order of the
    bytes of each blob."""
    blobs: dict[str, Blob] = {}
    by_blob: defaultdict[str, list[ByteMove]] = defaultdict(list)
    for blob, move in moves:
        blobs[blob.key] = blob
        by_blob[blob.key].append(move)
    out: list[ReadRange] = []
    for key in sorted(by_blob):
        blob, wanted = blobs[key], sorted(by_blob[key], key=itemgetter(0))
        out += _ranges_of_blob(blob, wanted, max(1, max_bytes(blob) // blob.extent_bytes))
    return out


def split_buffered(ranges: Sequence[ReadRange], max_bytes: int) -> list[ReadRange]:
    """The same, but those that go through a buffer have at most `max_bytes` bytes (or one
    extent)."""
    out: list[ReadRange] = []
    for stretch in ranges:
        size = stretch.blob.extent_bytes
        if stretch.is_direct or stretch.length <= max(max_bytes, size):
            out.append(stretch)
        else:
            out += _ranges_of_blob(stretch.blob, stretch.moves, max(1, max_bytes // size))
    return out


def _ranges_of_blob(blob: Blob, moves: Sequence[ByteMove], max_extents: int) -> list[ReadRange]:
    """`moves` in the order of their starts; at most `max_extents` extents in a stretch."""
    size = blob.extent_bytes
    spans: list[tuple[int, int]] = []
    for start, length, _, _ in moves:
        first, last = start // size, -(-(start + length) // size)
        if spans and first <= spans[-1][1]:
            first, last = spans[-1][0], max(last, spans[-1][1])
            spans.pop()
        spans.append((first, last))
    cut = [
        ReadRange(blob, low, min(low + max_extents, last))
        for first, last in spans
        for low in range(first, last, max_extents)
    ]
    starts = [stretch.start for stretch in cut]
    for move in moves:
        number, stop = bisect_right(starts, move.start) - 1, move.start + move.length
        while number < len(cut) and starts[number] < stop:
            stretch = cut[number]
            stretch.moves.append(clip_move(move, stretch.start, stretch.stop))
            number += 1
    return cut


def clip_move(move: ByteMove, start: int, stop: int) -> ByteMove:
    """The part of a move that lies in bytes [start, stop) of the blob."""
    if start <= move.start and move.start + move.length <= stop:
        return move
    low, high = max(move.start, start), min(move.start + move.length, stop)
    return ByteMove(low, high - low, move.target, move.target_offset + low - move.start)


def copy_to_targets(offset: int, view: memoryview, moves: Sequence[ByteMove]) -> None:
    """Copy what moves want of `view`, which holds a blob's bytes from `offset` on."""
    import numpy as np  # a mover starts in a third less without it, and few ever copy

    source = np.frombuffer(view, np.uint8)
    stop = offset + len(source)
    for move in moves:
        start, length, target, at = clip_move(move, offset, stop)
        if length > 0:
            target[at : at + length] = source[start - offset : start - offset + length]


def copy_into_places(places: Sequence[memoryview], offset: int, view: memoryview) -> None:
    """Write `view` over the places, from byte `offset` of them all on."""
    done = 0
    for place in places:
        low = offset + done
        count = min(len(place) - low, len(view) - done) if low < len(place) else 0
        if count > 0:
            place[low : low + count] = view[done : done + count]
            done += count
        offset -= len(place)


def as_byte_array(out: Any) -> ByteArray:
    """A writable buffer as bytes, without copying."""
    import numpy as np

    return np.frombuffer(memoryview(out).cast("B"), np.uint8)
