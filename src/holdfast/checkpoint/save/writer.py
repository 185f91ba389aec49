"""Durable writing: a snapshot's bytes become a blob, a part manifest and, with the parts of all
other writers, a checkpoint.

Order makes it safe: blob, then part, then commit object, each created only if absent and durable
before the next. A writer killed in between leaves bytes that no commit names.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TypeVar

from xxhash import xxh3_128_hexdigest

from holdfast.checkpoint.format.blob import Bytes, ExtentHasher
from holdfast.checkpoint.format.save_context import SaveContext
from holdfast.checkpoint.memory.snapshot_store import Snapshot
from holdfast.core.format.manifest import (
    Blob,
    Commit,
    PartManifest,
    PlacedBox,
    blob_key,
    commit_key,
    merge_parts,
    part_key,
    part_prefix,
    writer_name,
)
from holdfast.core.json_parsing import Json
from holdfast.errors import CorruptError, FencedError, RunFolderError
from holdfast.wire.store.run_store import (
    NEARBY_READS,
    AlreadyExistsError,
    MissingKeyError,
    ReadPreference,
    RunStore,
)
from holdfast.wire.term import newest_generation

WRITE_CHUNK_BYTES = 64 * 2**20
"""Bytes written at a time. Between two direct writes the disk is idle until the thread runs again.
The busier training keeps the processor, the longer that takes."""

MAX_SEQUENTIAL_KEYS = 16

T = TypeVar("T")


def split_into_chunks(data: memoryview) -> Iterator[memoryview]:
    """A large view in chunks."""
    for start in range(0, len(data), WRITE_CHUNK_BYTES):
        yield data[start : start + WRITE_CHUNK_BYTES]


def seal_part(
    context: SaveContext,
    step: int,
    rank: int,
    data: memoryview,
    data_start: int,
    tensors: tuple[PlacedBox, ...],
    meta: Mapping[str, Json],
) -> PartManifest:
    """The part manifest of a blob that lies in memory."""
    size = context.extent_bytes
    checksums = tuple(
        xxh3_128_hexdigest(data[start : start + size]) for start in range(0, len(data), size)
    )
    key = blob_key(context.generation, step, writer_name(rank))
    blob = Blob(key, len(data), data_start, size, checksums)
    return PartManifest(context.generation, step, rank, blob, tensors, meta)


def write_sealed_part(
    store: RunStore,
    writing_generation: int,
    part: PartManifest,
    sealed_manifest: bytes,
    content: Iterable[Bytes],
) -> None:
    """Write the blob that a sealed part describes, then the part. `writing_generation` is the
    generation that writes: the part's own, or a newer one that began from it.

    Raises as `write_part` does.
    """
    write_blob(store, writing_generation, part.blob.key, content)
    store_part(store, part, sealed_manifest)


def write_blob(
    store: RunStore, writing_generation: int, key: str, content: Iterable[Bytes]
) -> None:
    """Write a blob that no part names yet. Raises as `write_part` does."""
    check_fence(store, writing_generation)
    store.create(key, content)


def store_part(store: RunStore, part: PartManifest, sealed_manifest: bytes) -> None:
    """After the blob: the manifest that names it. A bucket takes up the blob of a writer that was
    killed; that one's manifest may be there too, and then names the same bytes."""
    name = part_key(part.generation, part.step, part.writer)
    try:
        store.create(name, sealed_manifest)
    except AlreadyExistsError:
        if store.get(name) != sealed_manifest:
            raise  # the blob is another writer's, and perhaps a checkpoint's: not ours to remove
    except Exception:
        store.delete(part.blob.key)  # a blob without a manifest is of no use
        raise


def check_snapshot(snapshot: Snapshot) -> None:
    """Raises CorruptError when a snapshot's bytes are not those that were hashed."""
    blob = snapshot.part.blob
    with snapshot.memory.arena.reading(snapshot.slot, snapshot.header) as data:
        for extent in blob.extents():
            view = data[extent.offset : extent.offset + extent.length]
            if xxh3_128_hexdigest(view) != extent.xxh3:
                raise CorruptError(f"{blob.key}: memory has changed since it was hashed")


def commit_sealed(store: RunStore, writing_generation: int, commit: Commit) -> None:
    """Commit what `write_sealed_part` wrote under the same authority. Raises FencedError."""
    check_fence(store, writing_generation)
    with suppress(AlreadyExistsError):
        store.create(commit.key, commit.to_bytes())
        _recheck_fence(store, writing_generation, commit)


def write_part(
    store: RunStore,
    context: SaveContext,
    step: int,
    rank: int,
    content: Iterable[Bytes],
    data_start: int,
    tensors: tuple[PlacedBox, ...],
    meta: Mapping[str, Json],
) -> PartManifest:
    """Write one writer's blob, hashed as it streams by, then its manifest.

    Raises OutOfSpaceError and whatever else the store raises; nothing of the blob is then left.
    """
    check_fence(store, context.generation, context.has_record)
    writer = writer_name(rank)
    key = blob_key(context.generation, step, writer)
    hasher = ExtentHasher(context.extent_bytes)
    store.create(key, hasher.pass_through(content))
    part = PartManifest(
        context.generation, step, rank, hasher.finish(key, data_start), tensors, meta
    )
    store_part(store, part, part.to_bytes())
    return part


def try_commit(store: RunStore, context: SaveContext, step: int) -> Commit | None:
    """Commit `step` when the parts of all its writers are there; None when some are not yet.

    The writer of the last part finds all of them, on whichever node, so no notice is needed. Raises
    FencedError when a newer generation exists, CheckpointError when the parts do not make a
    complete checkpoint, CorruptError when one of them is broken.
    """
    prefix = part_prefix(context.generation, step)
    keys = [key for key in store.list(prefix) if key.endswith(".json")]  # but for a copy's claim
    if len(keys) < context.topology.world_size:
        return None
    commit = _merge_parts(store, keys, context)
    check_fence(store, context.generation, context.has_record)
    try:
        store.create(commit_key(context.generation, step), commit.to_bytes())
    except AlreadyExistsError:
        return Commit.from_bytes(store.get(commit.key), commit.key)  # another node was first
    _recheck_fence(store, context.generation, commit, context.has_record)
    return commit


def _recheck_fence(
    store: RunStore, writing_generation: int, commit: Commit, has_record: bool = False
) -> None:
    """Check the fence once more, after a commit object. If a newer generation was opened after the
    last check, its sweep may have removed what the object names. Then remove the object too, and
    raise FencedError."""
    try:
        check_fence(store, writing_generation, has_record)
    except FencedError:
        try:
            for writer in commit.writers:
                store.size(part_key(commit.generation, commit.step, writer_name(writer.rank)))
                store.size(writer.blob.key)
        except MissingKeyError:
            store.delete(commit.key)
            raise FencedError(f"step {commit.step} was swept by a newer generation") from None


def _merge_parts(store: RunStore, keys: Sequence[str], context: SaveContext) -> Commit:
    """The commit object of the parts under `keys`, whose blobs are there."""
    found = list(_map_keys(store, store.get, keys))
    with gc_paused():
        read = [
            (PartManifest.from_bytes(stored, key), stored)
            for key, stored in zip(keys, found, strict=True)
        ]
    blobs = [part.blob for part, _ in read]
    for blob, size in zip(blobs, _map_keys(store, store.size, [b.key for b in blobs]), strict=True):
        if size != blob.size:
            raise CorruptError(f"{blob.key} has changed since it was written")
    with gc_paused():
        parts = {part.rank: (part, stored) for part, stored in read}
        return merge_parts(
            parts, context.topology, context.table, context.config_hash, context.dataset_version
        )


def _map_keys(store: RunStore, ask: Callable[[str], T], keys: Sequence[str]) -> Iterator[T]:
    """One answer a key, in order; of many keys, as many at a time as the store is best asked."""
    if len(keys) <= MAX_SEQUENTIAL_KEYS:
        yield from map(ask, keys)
        return
    reads: ReadPreference = getattr(store, "reads", NEARBY_READS)
    with ThreadPoolExecutor(reads.requests, "parts") as threads:
        yield from threads.map(ask, keys)


@contextmanager
def gc_paused() -> Iterator[None]:
    """Make many objects without garbage collection. The manifests of thousands of ranks are
    millions of tuples, which the collector would walk again and again. Not for code that waits for
    a store. Of two threads in here, the first to leave switches it on again for both."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def check_fence(store: RunStore, generation: int, has_record: bool = False) -> None:
    """Raises FencedError when the run store knows a generation newer than `generation`.

    has_record: it had the object of `generation`. Raises RunFolderError if it has lost it: the
    store was emptied or replaced, and nothing that is written there belongs to the run."""
    newest = newest_generation(store)
    if has_record and newest < generation:
        raise RunFolderError(
            f"the run store was emptied or replaced: generation {generation} is not in it",
            remedy="put back what was there, or start another run",
        )
    if newest > generation:
        raise FencedError(f"generation {newest} has begun; generation {generation} may not write")
