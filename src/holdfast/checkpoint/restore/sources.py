"""The sources of a checkpoint's bytes: every tier is ranged reads over named blobs.

`FallbackReader` asks the sources in order, cheapest first, and hands out no byte whose extent does
not have its checksum. If a source lacks an extent or has it corrupt, the next one is read. Only if
no source has an extent intact is the checkpoint broken.

Long runs of bytes are read straight into their tensors (`Source.scatter`) and checked there. Other
bytes are read into a buffer, or seen where they are mapped, then checked and copied.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

from xxhash import xxh3_128, xxh3_128_hexdigest

from holdfast.checkpoint.memory.arena import Arena, SlotHeader
from holdfast.checkpoint.memory.snapshot_store import InventoryEntry, SnapshotStore
from holdfast.checkpoint.restore.read_plan import ReadRange, copy_into_places, copy_to_targets
from holdfast.core.format.manifest import Blob, Extent, parse_blob_key
from holdfast.core.sharding.state_table import StateTable
from holdfast.errors import CorruptError, HoldfastError
from holdfast.layout import Topology
from holdfast.wire.store.run_store import (
    NEARBY_READS,
    MissingKeyError,
    ReadPreference,
    VectoredStore,
)
from holdfast.wire.store.vectored_io import read_vectored

MAPPED_READS = ReadPreference(2, 2**20)
"""Small pieces, so that they are checked while in the processor's cache. Two threads take less time
if a core is free."""

_Read = TypeVar("_Read")
Scatter = Callable[[str, int, Sequence[memoryview]], None]


class BlobSource(Protocol):
    """Named blobs that can be read by range. The bytes are not checked yet."""

    @property
    def name(self) -> str:
        """For people: "memory", "peer node1", "run store"."""
        ...

    @property
    def reads(self) -> ReadPreference:
        """How it is best read."""
        ...

    @property
    def scatter(self) -> Scatter | None:
        """Fill several buffers in turn with a blob's bytes from a start on, in one request. None if
        unavailable. Raises as `data` does."""
        ...

    def has(self, key: str) -> bool:
        """Return True if the source may have the blob; must answer at once, without a request."""
        ...

    def data(self, key: str, start: int, length: int, buffer: memoryview) -> memoryview:
        """Bytes [start, start + length) of a blob: a view of where they lie, or `buffer`, filled.

        Raises MissingKeyError, CorruptError when the blob ends before, or why it cannot be read.
        """
        ...


class MemorySource(BlobSource, Protocol):
    """A shelf, here or on another machine: it also says what it holds."""

    def inventory(self) -> list[InventoryEntry]: ...

    def topology_and_table(self, generation: int) -> tuple[Topology, StateTable]:
        """Raises KeyError for a generation that it does not know."""
        ...


class Readable(Protocol):
    """The part of a RunStore that a restore needs."""

    def read_into(self, key: str, start: int, out: memoryview) -> None: ...


class StoreSource:
    """The run store: it may be asked for anything."""

    def __init__(self, store: Readable, name: str = "run store") -> None:
        self.name = name
        self.reads: ReadPreference = getattr(store, "reads", NEARBY_READS)
        self.scatter: Scatter | None = store.scatter if isinstance(store, VectoredStore) else None
        self._store = store

    def has(self, key: str) -> bool:
        return True

    def data(self, key: str, start: int, length: int, buffer: memoryview) -> memoryview:
        view = buffer[:length]
        self._store.read_into(key, start, view)
        return view


class SnapshotStoreSource:
    """A shelf of this process."""

    name = "memory"
    reads = NEARBY_READS
    scatter: Scatter | None = None

    def __init__(self, snapshot_store: SnapshotStore) -> None:
        self._snapshot_store = snapshot_store

    def inventory(self) -> list[InventoryEntry]:
        return self._snapshot_store.inventory()

    def topology_and_table(self, generation: int) -> tuple[Topology, StateTable]:
        return self._snapshot_store.topology_and_table(generation)

    def has(self, key: str) -> bool:
        return parse_blob_key(key) is not None

    def data(self, key: str, start: int, length: int, buffer: memoryview) -> memoryview:
        place, view = parse_blob_key(key), buffer[:length]
        if place is None:
            raise MissingKeyError(f"{key} is not a blob's key")
        self._snapshot_store.read_into(*place, start, view)
        return view


class MappedSource:
    """Slots of arenas that a mover shares with this process, mapped to be read only.

    A memory file is mapped when its first byte is requested. `scatter` reads from the file, which
    spares the page faults. The mover keeps the slots until the generation has a snapshot of its
    own. `confirm_unchanged` checks that this held.
    """

    name = "memory"
    reads = MAPPED_READS

    def __init__(self, slots: Mapping[str, tuple[int, int, SlotHeader]]) -> None:
        """`slots`: the key of a blob -> descriptor of the memory file, slot, what it must say. The
        descriptors are this object's from now on."""
        self._slots = dict(slots)
        self._arenas: dict[int, Arena] = {}
        self._lock = threading.Lock()

    def has(self, key: str) -> bool:
        return key in self._slots

    def data(self, key: str, start: int, length: int, buffer: memoryview) -> memoryview:
        _, slot, header = self._slots[key]
        arena = self._checked_arena(key, start + length)
        return arena.data(slot, header.length)[start : start + length]

    def scatter(self, key: str, start: int, outs: Sequence[memoryview]) -> None:
        fd, slot, _ = self._slots[key]
        stop = start + sum(map(len, outs))
        done = read_vectored(fd, self._checked_arena(key, stop).data_offset(slot) + start, outs)
        if start + done < stop:
            raise CorruptError(f"{key} ends at byte {start + done}, {stop} were expected")

    def _checked_arena(self, key: str, stop: int) -> Arena:
        """The arena of a blob that is there, and has bytes up to `stop`."""
        fd, slot, header = self._slots[key]
        arena = self._map_arena(fd)
        if arena.header(slot) != header:
            raise MissingKeyError(f"{key} is no longer in memory")
        if stop > header.length:
            raise CorruptError(f"{key} has {header.length} bytes, {stop} were expected")
        return arena

    def confirm_unchanged(self) -> None:
        """Raises CorruptError when a slot that was read from has changed since."""
        for key, (fd, slot, header) in self._slots.items():
            if fd in self._arenas and self._arenas[fd].header(slot) != header:
                raise CorruptError(f"{key} was overwritten while it was read")

    def close(self) -> None:
        """Give the memory back; what a view still shows goes with the view."""
        for arena in self._arenas.values():
            with suppress(BufferError):
                arena.close()
        self._arenas = {}
        for fd in {fd for fd, _, _ in self._slots.values()}:
            os.close(fd)
        self._slots = {}

    def _map_arena(self, fd: int) -> Arena:
        with self._lock:
            if fd not in self._arenas:
                self._arenas[fd] = Arena(fd, write=False)
            return self._arenas[fd]


@dataclass
class ReadStats:
    """The cost of reading, summed over all threads: seconds by phase, bytes by source."""

    seconds_by_phase: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    bytes_by_source: Counter[str] = field(default_factory=Counter)
    problems: list[tuple[str, str, str]] = field(default_factory=list)
    """(source, blob's key, reason) of what one source had damaged and another gave."""


class FallbackReader:
    """Several sources as one, in order of preference. Safe to use from any thread."""

    def __init__(
        self, sources: Sequence[BlobSource], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.stats = ReadStats()
        self._sources = tuple(sources)
        self._clock = clock
        self._lock = threading.Lock()

    def read_extents(
        self, blob: Blob, wanted: Sequence[Extent], buffer: memoryview
    ) -> Iterator[tuple[Extent, memoryview]]:
        """Consecutive extents of a blob, each with its checked bytes, which hold until the next
        one is asked for. `buffer` has room for all of them.

        Raises CorruptError or MissingKeyError when no source has one intact. Raises a source's own
        error if its bytes may be intact but could not be read.
        """
        start = wanted[0].offset
        length = wanted[-1].offset + wanted[-1].length - start
        rest = [source for source in self._sources if source.has(blob.key)]
        errors: list[HoldfastError] = []
        data = None
        while rest and data is None:
            read = partial(rest[0].data, blob.key, start, length, buffer)
            data = self._try_source(rest[0], blob, length, errors, read)
            if data is None:
                rest.pop(0)
        if data is None:
            raise _read_failure(blob, wanted[0], errors)
        seconds = 0.0
        for extent in wanted:
            view = data[extent.offset - start : extent.offset - start + extent.length]
            begun = self._clock()
            good = xxh3_128_hexdigest(view) == extent.xxh3
            seconds += self._clock() - begun
            yield extent, view if good else self._read_from_next(blob, extent, rest)
        self.add_seconds("verify", seconds)

    def fill_range(self, stretch: ReadRange, buffer: memoryview) -> None:
        """Every byte that is wanted of a stretch, to its place, and each extent checked. `buffer`
        has room for the stretch.

        Raises as `read_extents` does; the targets are then worthless.
        """
        blob, start = stretch.blob, stretch.start
        places = stretch.places(buffer)
        rest = [source for source in self._sources if source.has(blob.key)]
        errors: list[HoldfastError] = []
        while rest:
            source = rest[0]
            if places is not None and source.scatter is not None:
                fill = partial(_fill, source.scatter, blob.key, start, places)
                if self._try_source(source, blob, stretch.length, errors, fill):
                    for number in self._find_corrupt(stretch, places):
                        extent = blob.extent(number)
                        view = self._read_from_next(blob, extent, rest)
                        copy_into_places(places, extent.offset - start, view)
                    return
            else:
                read = partial(source.data, blob.key, start, stretch.length, buffer)
                data = self._try_source(source, blob, stretch.length, errors, read)
                if data is not None:
                    self._copy_checked(stretch, data, rest)
                    return
            rest.pop(0)
        raise _read_failure(blob, blob.extent(stretch.first_extent), errors)

    def best_reads(self, key: str) -> ReadPreference:
        """How the first source that has a blob is best read."""
        return next((s.reads for s in self._sources if s.has(key)), NEARBY_READS)

    def add_seconds(self, phase: str, seconds: float) -> None:
        with self._lock:
            self.stats.seconds_by_phase[phase] += seconds

    def confirm_unchanged(self) -> None:
        """To be called after the last byte was copied. Raises CorruptError when memory that was
        read in place has been written again meanwhile."""
        for source in self._sources:
            if isinstance(source, MappedSource):
                source.confirm_unchanged()

    def _try_source(
        self,
        source: BlobSource,
        blob: Blob,
        length: int,
        errors: list[HoldfastError],
        read: Callable[[], _Read],
    ) -> _Read | None:
        """Read `length` bytes of a blob from a source; None if that fails, which `errors` gets."""
        begun = self._clock()
        try:
            result = read()
        except HoldfastError as error:
            self._record_problem(source, blob, error)
            errors.append(error)
            return None
        with self._lock:
            self.stats.seconds_by_phase["read"] += self._clock() - begun
            self.stats.bytes_by_source[source.name] += length
        return result

    def _copy_checked(
        self, stretch: ReadRange, data: memoryview, sources: Sequence[BlobSource]
    ) -> None:
        """Check a stretch in `data`, and copy what is wanted of it."""
        bad = self._find_corrupt(stretch, [data])
        begun = self._clock()
        copy_to_targets(stretch.start, data, stretch.moves)
        self.add_seconds("copy", self._clock() - begun)
        for number in bad:
            extent = stretch.blob.extent(number)
            copy_to_targets(
                extent.offset, self._read_from_next(stretch.blob, extent, sources), stretch.moves
            )

    def _find_corrupt(self, stretch: ReadRange, places: Sequence[memoryview]) -> list[int]:
        begun = self._clock()
        bad = _corrupt_extents(stretch, places)
        self.add_seconds("verify", self._clock() - begun)
        return bad

    def _read_from_next(
        self, blob: Blob, extent: Extent, sources: Sequence[BlobSource]
    ) -> memoryview:
        """Return an extent that is corrupt in the first of `sources`."""
        errors: list[HoldfastError] = [self._corrupt_error(sources[0], blob, extent)]
        for source in sources[1:]:
            buffer = memoryview(bytearray(extent.length))
            read = partial(source.data, blob.key, extent.offset, extent.length, buffer)
            view = self._try_source(source, blob, extent.length, errors, read)
            if view is not None:
                if xxh3_128_hexdigest(view) == extent.xxh3:
                    return view
                errors.append(self._corrupt_error(source, blob, extent))
        raise _read_failure(blob, extent, errors)

    def _corrupt_error(self, source: BlobSource, blob: Blob, extent: Extent) -> HoldfastError:
        error = CorruptError(
            f"{blob.key}: checksum does not match in bytes "
            f"[{extent.offset}, {extent.offset + extent.length})"
        )
        self._record_problem(source, blob, error)
        return error

    def _record_problem(self, source: BlobSource, blob: Blob, error: HoldfastError) -> None:
        with self._lock:
            self.stats.problems.append((source.name, blob.key, str(error)))


def _corrupt_extents(stretch: ReadRange, places: Sequence[memoryview]) -> list[int]:
    """The extents of a stretch, whose bytes lie in `places` one after the other, that are not as
    they were written."""
    size = stretch.blob.extent_bytes
    found: list[str] = []
    left, begun = min(size, stretch.length), None  # bytes due of an extent, and its hash so far
    for place in places:
        at = 0
        if begun is not None:
            at = min(left, len(place))
            begun.update(place[:at])
            left -= at
            if left:
                continue
            found.append(begun.hexdigest())
            begun = None
        # Python's cost for each extent is what restores are made of: nothing more in this loop.
        whole = (len(place) - at) // size * size
        found += [
            xxh3_128_hexdigest(place[low : low + size]) for low in range(at, at + whole, size)
        ]
        at += whole
        left = min(size, stretch.length - len(found) * size)
        if 0 < left == len(place) - at:  # the last one, which is shorter
            found.append(xxh3_128_hexdigest(place[at:]))
        elif at < len(place):
            begun = xxh3_128(place[at:])
            left -= len(place) - at
    due = stretch.blob.checksums[stretch.first_extent : stretch.end_extent]
    if found == list(due):
        return []
    pairs = enumerate(zip(found, due, strict=True), stretch.first_extent)
    return [number for number, (a, b) in pairs if a != b]


def _fill(scatter: Scatter, key: str, start: int, places: Sequence[memoryview]) -> bool:
    scatter(key, start, places)
    return True


def _read_failure(blob: Blob, extent: Extent, errors: Sequence[HoldfastError]) -> HoldfastError:
    """Return why no source gave an extent. One that may be intact but cannot be read is not
    corrupt."""
    if not errors:
        return MissingKeyError(f"nobody has {blob.key}")
    unread = [e for e in errors if not isinstance(e, CorruptError | MissingKeyError)]
    if unread or len(errors) == 1:
        return (unread or list(errors))[-1]
    return CorruptError("; ".join(dict.fromkeys(map(str, errors))))
