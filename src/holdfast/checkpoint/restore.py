"""Reading checkpoints: one read path, on any layout.

`Checkpoint.open` is one GET of the commit object; after that every read is a ranged read of some
blob. A wanted box is intersected with the boxes that are stored, only the extents that hold
common bytes are read, each is checked before a byte of it is used, and each byte is copied once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

from xxhash import xxh3_128_hexdigest

from holdfast.checkpoint.blob import parse_header
from holdfast.checkpoint.index import Index
from holdfast.checkpoint.reading import Reader
from holdfast.checkpoint.sources import Mixed, Readable, StoreSource, Tally
from holdfast.checkpoint.stretches import (
    Move,
    StoredBox,
    copy_out,
    flat,
    moves_into,
    shortened,
    stretches,
)
from holdfast.errors import CheckpointError, CorruptError, HoldfastError, StoreError
from holdfast.spec.boxes import Box
from holdfast.spec.manifest import (
    COMMITS,
    Blob,
    Commit,
    Extent,
    Part,
    Writer,
    parse_commit_key,
    part_key,
    writer_name,
)
from holdfast.spec.state import ITEM_BYTES, TensorSpec
from holdfast.wire.runstore import MissingKeyError, RunStore

STRETCH_BYTES = 8 * 2**20
CACHE_BYTES = 256 * 2**20
OPENING_THREADS = 8


class Checkpoint:
    """The state after one step, readable by box.

    `read_all` fills many boxes in one pass and is what a restore uses. `read` fills one; recently
    read extents are kept for it, up to `cache_bytes`: the tensors of a sharded run lie side by
    side in every writer's blob, so that reading them one after the other comes back to the same
    extents.
    """

    def __init__(
        self, store: Readable | Mixed, commit: Commit, cache_bytes: int = CACHE_BYTES
    ) -> None:
        self.commit = commit
        self._mixed = store if isinstance(store, Mixed) else Mixed([StoreSource(store)])
        self._specs = {spec.name: spec for spec in commit.table}
        self._cache_bytes = cache_bytes
        self._cache: dict[tuple[str, int], memoryview] = {}  # (blob, offset), oldest use first
        self._cached = 0

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
        return sum(self._mixed.tally.bytes.values())

    @property
    def tally(self) -> Tally:
        """What reading has cost so far."""
        return self._mixed.tally

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
        for stretch in stretches(self._moves(box, out), lambda blob: STRETCH_BYTES):
            blob = stretch.blob
            extents = list(blob.extents(stretch.start, stretch.stop))
            found = self._remembered(blob, extents)
            missing = [extent for extent in extents if extent.offset not in found]
            found |= self._fetch(blob, missing)
            for one in stretches([(blob, move) for move in stretch.moves], lambda blob: 0):
                copy_out(one.start, found[one.start], one.moves)
                self._keep((blob.key, one.start), found[one.start])

    def read_all(
        self,
        wanted: Iterable[tuple[Box, memoryview]],
        alive: Callable[[], None] = lambda: None,
        threads: int | None = None,
    ) -> None:
        """Fill every `out` with its box's elements: each extent that holds some of them is read
        once, and checked before this returns. Memory beside the targets is a few megabytes a
        thread; by default there are as many threads as the source that wants most requests under
        way. `alive` is called every second or so. Raises as `read` does."""
        begun = time.perf_counter()
        moves = [move for box, out in wanted for move in self._moves(box, out)]
        best = {key: self._mixed.best(key) for key in {blob.key for blob, _ in moves}}
        work = stretches(moves, lambda blob: best[blob.key].bytes)
        work = shortened(work, STRETCH_BYTES)
        self._mixed.spent("plan", time.perf_counter() - begun)
        if threads is None:
            threads = max((reads.requests for reads in best.values()), default=1)
        Reader(self._mixed, threads).read(work, alive)

    def _moves(self, box: Box, out: memoryview) -> list[tuple[Blob, Move]]:
        spec = self.spec(box.name)
        item = ITEM_BYTES[spec.dtype]
        inside = len(box.offsets) == len(box.lengths) == len(spec.shape) and all(
            0 <= start <= stop <= size
            for start, stop, size in zip(box.offsets, box.stops, spec.shape, strict=True)
        )
        if not inside:
            raise CheckpointError(
                f"{box.name} has the shape {spec.shape} there, the box {box.lengths} at "
                f"{box.offsets} is outside", where=self.commit.key,
                remedy="restore with the model of the run that wrote it",
            )  # fmt: skip
        if out.nbytes != box.size * item:
            raise ValueError(f"{box.name}: {out.nbytes} bytes for {box.size} of {spec.dtype}")
        if not box.size:
            return []
        stored = [StoredBox(p, blob) for p, blob in self._index.of(box)]
        moves, count = moves_into(box, item, flat(out), stored)
        if count != box.size:
            raise CorruptError(f"{self.commit.key}: {box.name} is not covered")
        return moves

    @cached_property
    def _index(self) -> Index:
        return Index(self.commit)

    def _remembered(self, blob: Blob, extents: Sequence[Extent]) -> dict[int, memoryview]:
        """What is remembered of some extents, by offset; taken out, to be put back as newest."""
        found: dict[int, memoryview] = {}
        for extent in extents:
            view = self._cache.pop((blob.key, extent.offset), None)
            if view is not None:
                self._cached -= len(view)
                found[extent.offset] = view
        return found

    def _fetch(self, blob: Blob, missing: Sequence[Extent]) -> dict[int, memoryview]:
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
            for extent, view in self._mixed.extents(blob, missing[:count], buffer):
                own = view.obj is buffer.obj  # else it lies in memory that may be written again
                found[extent.offset] = view if own else memoryview(bytes(view))
            missing = missing[count:]
        self._mixed.confirm()
        return found

    def _keep(self, place: tuple[str, int], view: memoryview) -> None:
        """Remember an extent; the longest unused ones make way."""
        self._cache[place] = view
        self._cached += len(view)
        while self._cache and self._cached > self._cache_bytes:
            self._cached -= len(self._cache.pop(next(iter(self._cache))))


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
        listing(store)  # raises where the store is out of reach: that says nothing of any of them
        rejected(key, problems[0])
    if candidates:
        raise CheckpointError(
            f"none of {len(candidates)} checkpoints can be trusted",
            where=COMMITS.rstrip("/"),
            remedy="see why with: holdfast checkpoint verify RUN, or start over with --fresh",
        )
    return None


def opened(store: RunStore, key: str) -> Commit:
    """The commit object of a checkpoint whose blobs are there and begin as they must. What its
    extents hold is not looked at: whoever reads them checks them.

    Raises CorruptError, MissingKeyError, CheckpointError (a newer format).
    """
    commit = Checkpoint.open(store, key).commit
    index = Index(commit)
    with ThreadPoolExecutor(OPENING_THREADS, "open") as threads:
        for problem in threads.map(
            lambda writer: head_problem(store, index, writer), commit.writers
        ):
            if problem is not None:
                raise CorruptError(problem)
    return commit


def head_problem(store: RunStore, index: Index, writer: Writer) -> str | None:
    """What is wrong with a blob's size or header. Raises MissingKeyError, CorruptError."""
    blob, due = writer.blob, index.due(writer.rank)
    size = store.size(blob.key)
    if size != blob.size or size != blob.data_start + sum(p.nbytes for p in due):
        return f"{blob.key}: {size} bytes, {blob.size} were written"
    head = bytearray(blob.data_start)
    store.read_into(blob.key, 0, memoryview(head))
    if set(parse_header(bytes(head), blob.key)) != set(due):
        return f"{blob.key}: its header does not list what rank {writer.rank} owns"
    return None


def damage(store: RunStore, key: str) -> str | None:
    """What keeps a checkpoint from being restored, found by reading all of it; None when nothing
    does. Raises the store's own error when it is out of reach."""
    try:
        commit = Checkpoint.open(store, key).commit
        index = Index(commit)
        problems = (p for writer in commit.writers for p in _blob_problems(store, index, writer))
        problem = next(problems, None)
    except (HoldfastError, MissingKeyError) as error:
        problem = str(error)
    if problem is not None:
        listing(store)  # raises where the store is out of reach: that says nothing of a checkpoint
    return problem


def verify(store: RunStore, key: str, *, first_only: bool = False) -> list[str]:
    """Everything that is wrong with a checkpoint, one sentence each; empty when it is whole.

    Reads every extent of every blob, compares each blob's own header with what the commit object
    says, and checks the part manifests. Raises StoreError where a bucket is out of reach: that is
    nothing wrong with the checkpoint.
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
    except (CheckpointError, StoreError):
        raise
    except (HoldfastError, MissingKeyError) as error:
        yield str(error)
        return
    index = Index(commit)
    for writer in commit.writers:
        yield from _blob_problems(store, index, writer)
        name = part_key(commit.generation, commit.step, writer_name(writer.rank))
        try:
            stored = store.get(name)
            if xxh3_128_hexdigest(stored) != writer.part_xxh3:
                yield f"{name}: checksum does not match"
            else:
                Part.from_bytes(stored, name)
        except StoreError:
            raise
        except HoldfastError as error:
            yield str(error)


def _blob_problems(store: RunStore, index: Index, writer: Writer) -> Iterator[str]:
    blob, due = writer.blob, index.due(writer.rank)
    buffer = memoryview(bytearray(min(max(STRETCH_BYTES, blob.extent_bytes), blob.size)))
    try:
        size = store.size(blob.key)
        if size != blob.size or size != blob.data_start + sum(p.nbytes for p in due):
            yield f"{blob.key}: {size} bytes, {blob.size} were written"
            return
        head = bytearray(blob.data_start)
        source = Mixed([StoreSource(store)])
        for extents in _neighbours(blob):
            for extent, view in source.extents(blob, extents, buffer):
                part = head[extent.offset : extent.offset + extent.length]
                head[extent.offset : extent.offset + len(part)] = view[: len(part)]
        if set(parse_header(bytes(head), blob.key)) != set(due):
            yield f"{blob.key}: its header does not list what rank {writer.rank} owns"
    except StoreError:
        raise
    except HoldfastError as error:
        yield str(error)


def _neighbours(blob: Blob) -> Iterator[list[Extent]]:
    """All extents of a blob, as many at a time as are read together."""
    together: list[Extent] = []
    for extent in blob.extents():
        if together and extent.offset + extent.length - together[0].offset > STRETCH_BYTES:
            yield together
            together = []
        together.append(extent)
    if together:
        yield together


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
