"""The sources of a checkpoint's bytes: every tier is ranged reads over named blobs.

`Mixed` asks the sources in order, cheapest first, and hands out no byte whose extent does not have
its checksum. If a source lacks an extent or has it corrupt, the next one is read. Only if no source
has an extent intact is the checkpoint broken.

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
from typing import Protocol

from xxhash import xxh3_128, xxh3_128_hexdigest

from holdfast.checkpoint.memory.arena import Arena, SlotHeader
from holdfast.checkpoint.memory.snapshot_store import Held, Shelf
from holdfast.checkpoint.restore.read_plan import Stretch, copy_into, copy_out
from holdfast.core.format.manifest import Blob, Extent, parse_save_key
from holdfast.core.sharding.state_table import StateTable
from holdfast.errors import CorruptError, HoldfastError
from holdfast.layout import Topology
from holdfast.wire.store.run_store import NEAR, MissingKeyError, Reads, Scattering
from holdfast.wire.store.vectored_io import read_at

MAPPED = Reads(2, 2**20)
"""Small pieces, so that they are checked while in the processor's cache. Two threads take less time
if a core is free."""

Scatter = Callable[[str, int, Sequence[memoryview]], None]


class Source(Protocol):
    """Named blobs that can be read by range. The bytes are not checked yet."""

    @property
    def name(self) -> str:
        """For people: "memory", "peer node1", "run store"."""
        ...

    @property
    def reads(self) -> Reads:
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


class MemorySource(Source, Protocol):
    """A shelf, here or on another machine: it also says what it holds."""

    def inventory(self) -> list[Held]: ...

    def plan(self, generation: int) -> tuple[Topology, StateTable]:
        """Raises KeyError for a generation that it does not know."""
        ...


class Readable(Protocol):
    """The part of a RunStore that a restore needs."""

    def read_into(self, key: str, start: int, out: memoryview) -> None: ...


class StoreSource:
    """The run store: it may be asked for anything."""

    def __init__(self, store: Readable, name: str = "run store") -> None:
        self.name = name
        self.reads: Reads = getattr(store, "reads", NEAR)
        self.scatter: Scatter | None = store.scatter if isinstance(store, Scattering) else None
        self._store = store

    def has(self, key: str) -> bool:
        return True

    def data(self, key: str, start: int, length: int, buffer: memoryview) -> memoryview:
        view = buffer[:length]
        self._store.read_into(key, start, view)
        return view


class ShelfSource:
    """A shelf of this process."""

    name = "memory"
    reads = NEAR
    scatter: Scatter | None = None

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf

    def inventory(self) -> list[Held]:
        return self._shelf.inventory()

    def plan(self, generation: int) -> tuple[Topology, StateTable]:
        return self._shelf.plan(generation)

    def has(self, key: str) -> bool:
        return parse_save_key(key) is not None

    def data(self, key: str, start: int, length: int, buffer: memoryview) -> memoryview:
        view = buffer[:length]
        self._shelf.read_into(*_parts_of(key), start, view)
        return view


class MappedSource:
    """Slots of arenas that a mover shares with this process, mapped to be read only.

    A memory file is mapped when its first byte is requested. `scatter` reads from the file, which
    spares the page faults. The mover keeps the slots until the generation has a snapshot of its
    own. `confirm` checks that this held.
    """

    name = "memory"
    reads = MAPPED

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
        arena = self._checked(key, start + length)
        return arena.data(slot, header.length)[start : start + length]

    def scatter(self, key: str, start: int, outs: Sequence[memoryview]) -> None:
        fd, slot, _ = self._slots[key]
        stop = start + sum(map(len, outs))
        done = read_at(fd, self._checked(key, stop).data_offset(slot) + start, outs)
        if start + done < stop:
            raise CorruptError(f"{key} ends at byte {start + done}, {stop} were expected")

    def _checked(self, key: str, stop: int) -> Arena:
        """The arena of a blob that is there, and has bytes up to `stop`."""
        fd, slot, header = self._slots[key]
        arena = self._arena(fd)
        if arena.header(slot) != header:
            raise MissingKeyError(f"{key} is no longer in memory")
        if stop > header.length:
            raise CorruptError(f"{key} has {header.length} bytes, {stop} were expected")
        return arena

    def confirm(self) -> None:
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

    def _arena(self, fd: int) -> Arena:
        with self._lock:
            if fd not in self._arenas:
                self._arenas[fd] = Arena(fd, write=False)
            return self._arenas[fd]


@dataclass
class Tally:
    """The cost of reading, summed over all threads: seconds by phase, bytes by source."""

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    bytes: Counter[str] = field(default_factory=Counter)
    problems: list[tuple[str, str, str]] = field(default_factory=list)
    """(source, blob's key, reason) of what one source had damaged and another gave."""


class Mixed:
    """Several sources as one, in order of preference. Safe to use from any thread."""

    def __init__(
        self, sources: Sequence[Source], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.tally = Tally()
        self._sources = tuple(sources)
        self._clock = clock
        self._lock = threading.Lock()

    def extents(
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
            data = self._ask(rest[0], blob, start, length, buffer, errors)
            if data is None:
                rest.pop(0)
        if data is None:
            raise _reason(blob, wanted[0], errors)
        seconds = 0.0
        for extent in wanted:
            view = data[extent.offset - start : extent.offset - start + extent.length]
            begun = self._clock()
            good = xxh3_128_hexdigest(view) == extent.xxh3
            seconds += self._clock() - begun
            yield extent, view if good else self._elsewhere(blob, extent, rest)
        self.spent("verify", seconds)

    def fill(self, stretch: Stretch, buffer: memoryview) -> None:
        """Every byte that is wanted of a stretch, to its place, and each extent checked. `buffer`
        has room for the stretch.

        Raises as `extents` does; the targets are then worthless.
        """
        blob, start = stretch.blob, stretch.start
        places = stretch.places(buffer)
        rest = [source for source in self._sources if source.has(blob.key)]
        errors: list[HoldfastError] = []
        while rest:
            scatter = rest[0].scatter if places is not None else None
            if places is not None and scatter is not None:
                if self._scatter(rest[0], scatter, blob, start, places, stretch.length, errors):
                    self._check_places(stretch, places, rest)
                    return
            else:
                data = self._ask(rest[0], blob, start, stretch.length, buffer, errors)
                if data is not None:
                    self._copy_checked(stretch, data, rest)
                    return
            rest.pop(0)
        raise _reason(blob, blob.extent(stretch.first), errors)

    def best(self, key: str) -> Reads:
        """How the first source that has a blob is best read."""
        return next((s.reads for s in self._sources if s.has(key)), NEAR)

    def spent(self, phase: str, seconds: float) -> None:
        with self._lock:
            self.tally.seconds[phase] += seconds

    def confirm(self) -> None:
        """To be called after the last byte was copied. Raises CorruptError when memory that was
        read in place has been written again meanwhile."""
        for source in self._sources:
            if isinstance(source, MappedSource):
                source.confirm()

    def _ask(
        self, source: Source, blob: Blob, start: int, length: int, buffer: memoryview,
        errors: list[HoldfastError],
    ) -> memoryview | None:  # fmt: skip
        begun = self._clock()
        try:
            data = source.data(blob.key, start, length, buffer)
        except HoldfastError as error:
            self._note(source, blob, error)
            errors.append(error)
            return None
        with self._lock:
            self.tally.seconds["read"] += self._clock() - begun
            self.tally.bytes[source.name] += length
        return data

    def _scatter(
        self, source: Source, scatter: Scatter, blob: Blob, start: int,
        places: Sequence[memoryview], length: int, errors: list[HoldfastError],
    ) -> bool:  # fmt: skip
        begun = self._clock()
        try:
            scatter(blob.key, start, places)
        except HoldfastError as error:
            self._note(source, blob, error)
            errors.append(error)
            return False
        with self._lock:
            self.tally.seconds["read"] += self._clock() - begun
            self.tally.bytes[source.name] += length
        return True

    def _check_places(
        self, stretch: Stretch, places: Sequence[memoryview], sources: Sequence[Source]
    ) -> None:
        """Check a stretch in place; overwrite a corrupt extent from another source."""
        bad = self._check(stretch, places)
        for number in bad:
            extent = stretch.blob.extent(number)
            view = self._elsewhere(stretch.blob, extent, sources)
            copy_into(places, extent.offset - stretch.start, view)

    def _copy_checked(self, stretch: Stretch, data: memoryview, sources: Sequence[Source]) -> None:
        """Check a stretch in `data`, and copy what is wanted of it."""
        bad = self._check(stretch, [data])
        begun = self._clock()
        copy_out(stretch.start, data, stretch.moves)
        self.spent("copy", self._clock() - begun)
        for number in bad:
            extent = stretch.blob.extent(number)
            copy_out(extent.offset, self._elsewhere(stretch.blob, extent, sources), stretch.moves)

    def _check(self, stretch: Stretch, places: Sequence[memoryview]) -> list[int]:
        """The extents that are not as they were written."""
        begun = self._clock()
        bad = _rotten_places(stretch, places)
        self.spent("verify", self._clock() - begun)
        return bad

    def _elsewhere(self, blob: Blob, extent: Extent, sources: Sequence[Source]) -> memoryview:
        """Return an extent that is corrupt in the first of `sources`."""
        errors: list[HoldfastError] = [self._rotten(sources[0], blob, extent)]
        for source in sources[1:]:
            buffer = memoryview(bytearray(extent.length))
            view = self._ask(source, blob, extent.offset, extent.length, buffer, errors)
            if view is not None:
                if xxh3_128_hexdigest(view) == extent.xxh3:
                    return view
                errors.append(self._rotten(source, blob, extent))
        raise _reason(blob, extent, errors)

    def _rotten(self, source: Source, blob: Blob, extent: Extent) -> HoldfastError:
        error = CorruptError(
            f"{blob.key}: checksum does not match in bytes "
            f"[{extent.offset}, {extent.offset + extent.length})"
        )
        self._note(source, blob, error)
        return error

    def _note(self, source: Source, blob: Blob, error: HoldfastError) -> None:
        with self._lock:
            self.tally.problems.append((source.name, blob.key, str(error)))


def _rotten_places(stretch: Stretch, places: Sequence[memoryview]) -> list[int]:
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
    due = stretch.blob.checksums[stretch.first : stretch.last]
    if found == list(due):
        return []
    pairs = enumerate(zip(found, due, strict=True), stretch.first)
    return [number for number, (a, b) in pairs if a != b]


def _reason(blob: Blob, extent: Extent, errors: Sequence[HoldfastError]) -> HoldfastError:
    """Return why no source gave an extent. One that may be intact but cannot be read is not
    corrupt."""
    if not errors:
        return MissingKeyError(f"nobody has {blob.key}")
    unread = [e for e in errors if not isinstance(e, CorruptError | MissingKeyError)]
    if unread or len(errors) == 1:
        return (unread or list(errors))[-1]
    return CorruptError("; ".join(dict.fromkeys(map(str, errors))))


def _parts_of(key: str) -> tuple[int, int, int]:
    """(generation, step, rank) of a blob's key. Raises MissingKeyError for another key."""
    position = parse_save_key(key)
    number = key.rpartition("-rank")[2].partition("-")[0]
    if position is None or not number.isdecimal():
        raise MissingKeyError(f"{key} is not a blob's key")
    return position[1], position[0], int(number)
