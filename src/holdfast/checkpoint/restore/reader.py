"""Reading checkpoints: one read path, on any layout.

`Checkpoint.open` is one GET of the commit object; after that every read is a ranged read of some
blob. A wanted box is intersected with the boxes that are stored, and only the extents that hold
common bytes are read. Each is checked before a byte of it is used, and each byte is copied once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from functools import cached_property

from holdfast.checkpoint.format.box_index import BoxIndex
from holdfast.checkpoint.restore.read_plan import (
    ByteMove,
    ReadRange,
    StoredBox,
    as_byte_array,
    copy_to_targets,
    moves_into,
    plan_ranges,
    split_buffered,
)
from holdfast.checkpoint.restore.sources import FallbackReader, Readable, ReadStats, StoreSource
from holdfast.core.format.manifest import Blob, Commit, Extent
from holdfast.core.sharding.boxes import Box
from holdfast.core.sharding.state_table import ITEM_BYTES, TensorSpec
from holdfast.errors import CheckpointError, CorruptError
from holdfast.wire.store.run_store import RunStore

READ_RANGE_BYTES = 8 * 2**20
CACHE_BYTES = 256 * 2**20
OPENING_THREADS = 8

KEEP_ALIVE_INTERVAL_S = 1.0


class ReadPool:
    """Works stretches off, on `thread_count` threads with one buffer each. Reading, and hashing and
    copying more than a few kilobytes, leave the interpreter lock."""

    def __init__(self, reader: FallbackReader, thread_count: int) -> None:
        self._reader = reader
        self._thread_count = thread_count
        self._is_stopped = False

    def read(self, ranges: Sequence[ReadRange], keep_alive: Callable[[], None]) -> None:
        """Returns when every byte is checked and in place; calls `keep_alive` again and again
        meanwhile.

        Raises as `FallbackReader.fill_range` does; the targets are then worthless.
        """
        room = max((stretch.length for stretch in ranges), default=0)
        threads = min(self._thread_count, len(ranges)) or 1
        left = deque(ranges)
        with ThreadPoolExecutor(threads, "restore") as pool:
            waiting: set[Future[None]] = {
                pool.submit(self._read_until_empty, left, room) for _ in range(threads)
            }
            try:
                while waiting:
                    done, waiting = wait(waiting, KEEP_ALIVE_INTERVAL_S, FIRST_EXCEPTION)
                    keep_alive()
                    for future in done:
                        future.result()
            finally:
                self._is_stopped = True
        self._reader.confirm_unchanged()

    def _read_until_empty(self, remaining: deque[ReadRange], buffer_bytes: int) -> None:
        import numpy as np  # here, because movers import this and read by other ways

        # A bytearray would be written over with zeros; these pages come when they are first used,
        # and most reads go past the buffer.
        buffer = np.empty(buffer_bytes, np.uint8).data
        while not self._is_stopped:
            try:
                stretch = remaining.popleft()
            except IndexError:
                return
            self._reader.fill_range(stretch, buffer)


class Checkpoint:
    """The state after one step, readable by box.

    `read_all` fills many boxes in one pass and is what a restore uses. `read` fills one; recently
    read extents are kept for it, up to `cache_bytes`. The tensors of a sharded run lie side by side
    in every writer's blob, so reading them in turn comes back to the same extents.
    """

    def __init__(
        self, store: Readable | FallbackReader, commit: Commit, cache_bytes: int = CACHE_BYTES
    ) -> None:
        self.commit = commit
        self._reader = (
            store if isinstance(store, FallbackReader) else FallbackReader([StoreSource(store)])
        )
        self._specs = {spec.name: spec for spec in commit.table}
        self._cache_bytes = cache_bytes
        self._cache: dict[tuple[str, int], memoryview] = {}  # (blob, offset), oldest use first
        self._cached_bytes = 0

    @staticmethod
    def open(store: RunStore, key: str) -> Checkpoint:
        """Raises MissingKeyError, CorruptError, CheckpointError (a newer format)."""
        return Checkpoint(store, Commit.from_bytes(store.get(key), key))

    @property
    def step(self) -> int:
        return self.commit.step

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        return self.commit.table

    @property
    def bytes_read(self) -> int:
        return sum(self._reader.stats.bytes_by_source.values())

    @property
    def read_stats(self) -> ReadStats:
        """The cost of reading so far."""
        return self._reader.stats

    def spec(self, name: str) -> TensorSpec:
        """Raises CheckpointError for a name that is not in the checkpoint."""
        try:
            return self._specs[name]
        except KeyError:
            raise CheckpointError(
                f"there is no tensor {name}",
                where=self.commit.key,
                remedy="restore with the model of the run that wrote it",
            ) from None

    def read(self, box: Box, out: memoryview) -> None:
        """Fill `out` with the box's elements, row-major.

        Raises CheckpointError when the tensor is missing or the box leaves its shape. Raises
        CorruptError when an extent does not have its checksum; `out` is then worthless.
        """
        for stretch in plan_ranges(self._plan_moves(box, out), lambda blob: READ_RANGE_BYTES):
            blob = stretch.blob
            extents = list(blob.extents(stretch.start, stretch.stop))
            found = self._take_cached(blob, extents)
            missing = [extent for extent in extents if extent.offset not in found]
            found |= self._read_extents(blob, missing)
            for one in plan_ranges([(blob, move) for move in stretch.moves], lambda blob: 0):
                copy_to_targets(one.start, found[one.start], one.moves)
                self._cache_extent((blob.key, one.start), found[one.start])

    def read_all(
        self,
        wanted: Iterable[tuple[Box, memoryview]],
        keep_alive: Callable[[], None] = lambda: None,
        threads: int | None = None,
    ) -> None:
        """Fill every `out` with its box's elements. Each extent that holds some of them is read
        once, and checked before this returns. Memory apart from the targets is a few megabytes a
        thread. The default number of threads is that of the source that wants most requests under
        way. `keep_alive` is called every second or so. Raises as `read` does."""
        begun = time.perf_counter()
        moves = [move for box, out in wanted for move in self._plan_moves(box, out)]
        best = {key: self._reader.best_reads(key) for key in {blob.key for blob, _ in moves}}
        work = plan_ranges(moves, lambda blob: best[blob.key].bytes)
        work = split_buffered(work, READ_RANGE_BYTES)
        self._reader.add_seconds("plan", time.perf_counter() - begun)
        if threads is None:
            threads = max((reads.requests for reads in best.values()), default=1)
        ReadPool(self._reader, threads).read(work, keep_alive)

    def _plan_moves(self, box: Box, out: memoryview) -> list[tuple[Blob, ByteMove]]:
        spec = self.spec(box.name)
        item = ITEM_BYTES[spec.dtype]
        inside = len(box.offsets) == len(box.lengths) == len(spec.shape) and all(
            0 <= start <= stop <= size
            for start, stop, size in zip(box.offsets, box.stops, spec.shape, strict=True)
        )
        if not inside:
            raise CheckpointError(
                f"{box.name} has the shape {spec.shape} there, the box {box.lengths} at "
                f"{box.offsets} is outside",
                where=self.commit.key,
                remedy="restore with the model of the run that wrote it",
            )
        if out.nbytes != box.size * item:
            raise ValueError(f"{box.name}: {out.nbytes} bytes for {box.size} of {spec.dtype}")
        if not box.size:
            return []
        stored = [StoredBox(p, blob) for p, blob in self._index.find_stored(box)]
        moves, count = moves_into(box, item, as_byte_array(out), stored)
        if count != box.size:
            raise CorruptError(f"{self.commit.key}: {box.name} is not covered")
        return moves

    @cached_property
    def _index(self) -> BoxIndex:
        return BoxIndex(self.commit)

    def _take_cached(self, blob: Blob, extents: Sequence[Extent]) -> dict[int, memoryview]:
        """What is remembered of some extents, by offset; taken out, to be put back as newest."""
        found: dict[int, memoryview] = {}
        for extent in extents:
            view = self._cache.pop((blob.key, extent.offset), None)
            if view is not None:
                self._cached_bytes -= len(view)
                found[extent.offset] = view
        return found

    def _read_extents(self, blob: Blob, missing: Sequence[Extent]) -> dict[int, memoryview]:
        """Checked extents by offset, neighbours read together."""
        found: dict[int, memoryview] = {}
        while missing:
            count = 1
            while count < len(missing) and (
                missing[count].offset == missing[count - 1].offset + missing[count - 1].length
            ):
                count += 1
            length = sum(extent.length for extent in missing[:count])
            buffer = memoryview(bytearray(length))
            for extent, view in self._reader.read_extents(blob, missing[:count], buffer):
                own = view.obj is buffer.obj  # else it lies in memory that may be written again
                found[extent.offset] = view if own else memoryview(bytes(view))
            missing = missing[count:]
        self._reader.confirm_unchanged()
        return found

    def _cache_extent(self, place: tuple[str, int], view: memoryview) -> None:
        """Remember an extent; the longest unused ones make way."""
        self._cache[place] = view
        self._cached_bytes += len(view)
        while self._cache and self._cached_bytes > self._cache_bytes:
            self._cached_bytes -= len(self._cache.pop(next(iter(self._cache))))


def _adjacent_extents(blob: Blob) -> Iterator[list[Extent]]:
    """All extents of a blob, as many at a time as are read together."""
    together: list[Extent] = []
    for extent in blob.extents():
        if together and extent.offset + extent.length - together[0].offset > READ_RANGE_BYTES:
            yield together
            together = []
        together.append(extent)
    if together:
        yield together
