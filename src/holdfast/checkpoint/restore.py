"""Reading checkpoints: one read path, on any layout.

`Checkpoint.open` is one GET of the commit object; after that every read is a ranged read of some
blob. A wanted box is intersected with the boxes that are stored, only the extents that hold
common bytes are read, each is checked before a byte of it is used, and each byte is copied once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from xxhash import xxh3_128_hexdigest

from holdfast.checkpoint.blob import parse_header
from holdfast.errors import CheckpointError, CorruptError, HoldfastError
from holdfast.spec.boxes import Box, Run, runs
from holdfast.spec.manifest import (
    COMMITS,
    Blob,
    Commit,
    Extent,
    Part,
    Placed,
    Writer,
    parse_commit_key,
    part_key,
    placed,
    writer_name,
)
from holdfast.spec.ownership import owned_boxes
from holdfast.spec.state import ITEM_BYTES, TensorSpec
from holdfast.wire.runstore import MissingKeyError, RunStore

CACHE_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class _Held:
    """One stored box: where its first byte lies."""

    placed: Placed
    blob: Blob

    @property
    def start(self) -> int:
        return self.blob.data_start + self.placed.start


class Checkpoint:
    """The state after one step, readable by box.

    Recently read extents are kept, up to `cache_bytes`: the tensors of a sharded run lie side by
    side in every writer's blob, so that reading them one after the other comes back to the same
    extents.
    """

    def __init__(self, store: RunStore, commit: Commit, cache_bytes: int = CACHE_BYTES) -> None:
        self.commit = commit
        self.bytes_read = 0
        self._store = store
        self._specs = {spec.name: spec for spec in commit.table}
        self._cache_bytes = cache_bytes
        self._cache: dict[tuple[str, int], bytearray] = {}  # (blob, offset), oldest use first

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

    def spec(self, name: str) -> TensorSpec:
        """Raises CheckpointError for a name that is not in the checkpoint."""
        try:
            return self._specs[name]
        except KeyError:
            raise CheckpointError(
                f"there is no tensor {name}", where=self.commit.key,
                remedy="restore with the model of the run that wrote it",
            ) from None  # fmt: skip

    def read(self, box: Box, out: memoryview) -> None:
        """Fill `out` with the box's elements, row-major.

        Raises CheckpointError when the tensor is not there or the box leaves its shape, and
        CorruptError when an extent does not have its checksum; `out` is then worthless.
        """
        spec = self.spec(box.name)
        item = ITEM_BYTES[spec.dtype]
        target = out.cast("B")
        if len(target) != box.size * item:
            raise ValueError(f"{box.name}: {len(target)} bytes for {box.size} of {spec.dtype}")
        inside = len(box.lengths) == len(spec.shape) and all(
            stop <= size for stop, size in zip(box.stops, spec.shape, strict=True)
        )
        if not inside:
            raise CheckpointError(
                f"{box.name} has the shape {spec.shape} there, the box {box.lengths} at "
                f"{box.offsets} is outside", where=self.commit.key,
                remedy="restore with the model of the run that wrote it",
            )  # fmt: skip
        copied = 0
        for held in self._index.get(box.name, ()):
            for run in runs(held.placed.box, box):
                self._copy(held, run, item, target)
                copied += run.length
        if copied != box.size:
            raise CorruptError(f"{self.commit.key}: {box.name} is not covered")

    @cached_property
    def _index(self) -> dict[str, list[_Held]]:
        """name -> stored boxes, derived from the topology and the table."""
        index: dict[str, list[_Held]] = {}
        for writer in self.commit.writers:
            for p in _due(self.commit, writer):
                index.setdefault(p.box.name, []).append(_Held(p, writer.blob))
        return index

    def _copy(self, held: _Held, run: Run, item: int, target: memoryview) -> None:
        """Copy one contiguous run, extent by extent."""
        start = held.start + run.source * item
        stop = start + run.length * item
        to = run.target * item
        for extent in held.blob.extents(start, stop):
            view = self._extent(held.blob, extent)
            low = max(start, extent.offset)
            high = min(stop, extent.offset + extent.length)
            part = view[low - extent.offset : high - extent.offset]
            target[to + low - start : to + high - start] = part

    def _extent(self, blob: Blob, extent: Extent) -> memoryview:
        """A checked extent, read or remembered."""
        place = (blob.key, extent.offset)
        found = self._cache.pop(place, None)
        if found is None:
            found = self._room(extent.length)
            _read_extent(self._store, blob, extent, memoryview(found))
            self.bytes_read += extent.length
        self._cache[place] = found  # last: the most recently used
        return memoryview(found)

    def _room(self, length: int) -> bytearray:
        """A buffer for one more extent; the longest unused ones make way."""
        held = sum(map(len, self._cache.values()))
        while self._cache and held + length > self._cache_bytes:
            buffer = self._cache.pop(next(iter(self._cache)))
            held -= len(buffer)
            if len(buffer) == length:
                return buffer
        return bytearray(length)


def listing(store: RunStore) -> list[str]:
    """Keys of all commit objects: newest step first, of one step the newest generation first."""
    found = [(parse_commit_key(key), key) for key in store.list(COMMITS)]
    known = [(position, key) for position, key in found if position is not None]
    return [key for _, key in sorted(known, reverse=True)]


def newest_verified(
    store: RunStore, rejected: Callable[[str, str], None] = lambda key, reason: None
) -> Checkpoint | None:
    """The newest checkpoint whose every byte is as it was written; None when there is none at all.

    Walks from newest to oldest and calls `rejected(key, reason)` for each that is passed over.
    Raises CheckpointError when there are candidates but none is whole: to start again from the
    beginning then is a person's decision.
    """
    candidates = listing(store)
    for key in candidates:
        try:
            problems = verify(store, key, first_only=True)
        except CheckpointError as error:  # written by a newer version
            problems = [str(error)]
        if not problems:
            return Checkpoint.open(store, key)
        rejected(key, problems[0])
    if candidates:
        raise CheckpointError(
            f"none of {len(candidates)} checkpoints can be trusted",
            where=COMMITS.rstrip("/"),
            remedy="see why with: holdfast checkpoint verify RUN, or start over with --fresh",
        )
    return None


def verify(store: RunStore, key: str, *, first_only: bool = False) -> list[str]:
    """Everything that is wrong with a checkpoint, one sentence each; empty when it is whole.

    Reads every extent of every blob, compares each blob's own header with what the commit object
    says, and checks the part manifests.
    """
    problems: list[str] = []
    for problem in _problems(store, key):
        problems.append(problem)
        if first_only:
            break
    return problems


def _problems(store: RunStore, key: str) -> Iterator[str]:
    try:
        commit = Checkpoint.open(store, key).commit
    except CheckpointError:
        raise
    except (HoldfastError, MissingKeyError) as error:
        yield str(error)
        return
    for writer in commit.writers:
        yield from _blob_problems(store, commit, writer)
        name = part_key(commit.generation, commit.step, writer_name(writer.rank))
        try:
            stored = store.get(name)
            if xxh3_128_hexdigest(stored) != writer.part_xxh3:
                yield f"{name}: checksum does not match"
            else:
                Part.from_bytes(stored, name)
        except HoldfastError as error:
            yield str(error)


def _blob_problems(store: RunStore, commit: Commit, writer: Writer) -> Iterator[str]:
    blob = writer.blob
    due = _due(commit, writer)
    try:
        size = store.size(blob.key)
        if size != blob.size or size != blob.data_start + sum(p.nbytes for p in due):
            yield f"{blob.key}: {size} bytes, {blob.size} were written"
            return
        head = bytearray(blob.data_start)
        buffer = memoryview(bytearray(min(blob.extent_bytes, blob.size)))
        for extent in blob.extents():
            view = buffer[: extent.length]
            _read_extent(store, blob, extent, view)
            part = head[extent.offset : extent.offset + extent.length]
            head[extent.offset : extent.offset + len(part)] = view[: len(part)]
        if set(parse_header(bytes(head), blob.key)) != set(due):
            yield f"{blob.key}: its header does not list what rank {writer.rank} owns"
    except HoldfastError as error:
        yield str(error)


def _due(commit: Commit, writer: Writer) -> tuple[Placed, ...]:
    """What a writer's blob holds, and where."""
    boxes = owned_boxes(commit.topology, commit.table, writer.rank)
    return placed(boxes, commit.table)


def _read_extent(store: RunStore, blob: Blob, extent: Extent, view: memoryview) -> None:
    """Raises CorruptError when the bytes are not those that were written."""
    store.read_into(blob.key, extent.offset, view)
    if xxh3_128_hexdigest(view) != extent.xxh3:
        raise CorruptError(
            f"{blob.key}: checksum does not match in bytes "
            f"[{extent.offset}, {extent.offset + extent.length})"
        )


def step_of(key: str) -> int:
    """The step in a commit object's key; 0 for another key."""
    position = parse_commit_key(key)
    return position[0] if position else 0


def describe(store: RunStore, key: str) -> dict[str, Any]:
    """What `holdfast checkpoint list` prints of one checkpoint. Raises as `open` does."""
    commit = Checkpoint.open(store, key).commit
    return {
        "key": key,
        "step": commit.step,
        "generation": commit.generation,
        "bytes": commit.nbytes,
        "writers": len(commit.writers),
        "config_hash": commit.config_hash,
        "dataset_version": commit.dataset_version,
    }
