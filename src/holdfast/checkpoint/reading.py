"""Which bytes of which blobs fill the wanted boxes, and how they get there.

Wanted boxes are intersected with the stored ones into moves (contiguous runs of bytes), moves are
sorted by extent, and neighbouring extents make a stretch: one read, at most `STRETCH_BYTES`. So an
extent that no wanted box touches is never read, and none is read twice, however many boxes lie in
it. A few threads work the stretches off; hashing, reading and copying leave the interpreter lock.
"""

from __future__ import annotations

import queue
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from holdfast.checkpoint.sources import Mixed
from holdfast.spec.boxes import Box, runs
from holdfast.spec.manifest import Blob, Extent, Placed

STRETCH_BYTES = 8 * 2**20
THREADS = 2
ALIVE_SECONDS = 1.0

Bytes = npt.NDArray[np.uint8]


class Move(NamedTuple):
    """`length` bytes from byte `start` of a blob to byte `at` of a target."""

    start: int
    length: int
    target: Bytes
    at: int


@dataclass(frozen=True, slots=True)
class StoredBox:
    """One stored box: where its first byte lies."""

    placed: Placed
    blob: Blob

    @property
    def start(self) -> int:
        return self.blob.data_start + self.placed.start


@dataclass
class Stretch:
    """Neighbouring extents of a blob, and what is copied out of each."""

    blob: Blob
    extents: list[Extent] = field(default_factory=list)
    moves: list[list[Move]] = field(default_factory=list)

    @property
    def length(self) -> int:
        last = self.extents[-1]
        return last.offset + last.length - self.extents[0].offset


def moves_into(box: Box, item: int, target: Bytes, stored: Sequence[StoredBox]) -> tuple[
    list[tuple[Blob, Move]], int
]:  # fmt: skip
    """What fills `target` with the box's elements of `item` bytes, and how many elements come."""
    found: list[tuple[Blob, Move]] = []
    count = 0
    for held in stored:
        for run in runs(held.placed.box, box):
            start = held.start + run.source * item
            found.append((held.blob, Move(start, run.length * item, target, run.target * item)))
            count += run.length
    return found, count


def stretches(moves: Sequence[tuple[Blob, Move]]) -> list[Stretch]:
    """All moves, by extent, in the order of the bytes of each blob."""
    blobs = {blob.key: blob for blob, _ in moves}
    by_extent: dict[str, dict[int, list[Move]]] = defaultdict(lambda: defaultdict(list))
    for blob, move in moves:
        size = blob.extent_bytes
        for number in range(move.start // size, -(-(move.start + move.length) // size)):
            by_extent[blob.key][number].append(_inside(move, number * size, size))
    out: list[Stretch] = []
    for key in sorted(by_extent):
        previous = -2
        for number in sorted(by_extent[key]):
            extent = blobs[key].extent(number)
            apart = number != previous + 1
            if apart or out[-1].length + extent.length > STRETCH_BYTES:
                out.append(Stretch(blobs[key]))
            out[-1].extents.append(extent)
            out[-1].moves.append(by_extent[key][number])
            previous = number
    return out


def _inside(move: Move, offset: int, length: int) -> Move:
    """The part of a move that lies in one extent."""
    start = max(move.start, offset)
    stop = min(move.start + move.length, offset + length)
    return Move(start, stop - start, move.target, move.at + start - move.start)


def copy_out(extent: Extent, view: memoryview, moves: Sequence[Move]) -> None:
    source = np.frombuffer(view, np.uint8)
    for start, length, target, at in moves:
        low = start - extent.offset
        target[at : at + length] = source[low : low + length]


class Reader:
    """Works stretches off on a few threads, with one buffer each."""

    def __init__(self, mixed: Mixed, clock: Callable[[], float], threads: int = THREADS) -> None:
        self._mixed = mixed
        self._clock = clock
        self._threads = threads
        self._stop = False
        self._buffers: queue.SimpleQueue[memoryview] = queue.SimpleQueue()

    def read(self, work: Sequence[Stretch], alive: Callable[[], None]) -> None:
        """Returns when every byte is checked and copied; calls `alive` again and again meanwhile.

        Raises as `Mixed.extents` does; the targets are then worthless.
        """
        room = max((stretch.length for stretch in work), default=0)
        threads = min(self._threads, len(work)) or 1
        for _ in range(threads):
            self._buffers.put(memoryview(bytearray(room)))
        with ThreadPoolExecutor(threads, "restore") as pool:
            waiting: set[Future[None]] = {pool.submit(self._one, stretch) for stretch in work}
            try:
                while waiting:
                    done, waiting = wait(waiting, ALIVE_SECONDS, FIRST_EXCEPTION)
                    alive()
                    for future in done:
                        future.result()
            finally:
                self._stop = True
        self._mixed.confirm()

    def _one(self, stretch: Stretch) -> None:
        if self._stop:
            return
        buffer = self._buffers.get()
        copying = 0.0
        try:
            checked = self._mixed.extents(stretch.blob, stretch.extents, buffer)
            for (extent, view), moves in zip(checked, stretch.moves, strict=True):
                begun = self._clock()
                copy_out(extent, view, moves)
                copying += self._clock() - begun
        finally:
            self._buffers.put(buffer)
        self._mixed.spent("copy", copying)


def flat(out: Any) -> Bytes:
    """A writable buffer as bytes, without copying."""
    return np.frombuffer(memoryview(out).cast("B"), np.uint8)
