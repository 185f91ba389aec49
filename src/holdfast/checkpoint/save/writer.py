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
from typing import Any, TypeVar

from xxhash import xxh3_128_hexdigest

from holdfast.checkpoint.format.blob import Bytes, ExtentHasher
from holdfast.checkpoint.format.save_context import Plan
from holdfast.checkpoint.memory.snapshot_store import Snapshot
from holdfast.core.format.manifest import (
    Blob,
    Commit,
    Part,
    Placed,
    blob_key,
    commit_key,
    merge,
    part_key,
    part_prefix,
    writer_name,
)
from holdfast.errors import CorruptError, FencedError
from holdfast.wire.store.run_store import NEAR, AlreadyExistsError, MissingKeyError, Reads, RunStore
from holdfast.wire.term import newest_generation

CHUNK_BYTES = 64 * 2**20
"""Bytes written at a time. Between two direct writes the disk is idle until the thread runs again.
The busier training keeps the processor, the longer that takes."""

FEW_KEYS = 16

T = TypeVar("T")


def pieces(data: memoryview) -> Iterator[memoryview]:
    """A large view in chunks."""
    for start in range(0, len(data), CHUNK_BYTES):
        yield data[start : start + CHUNK_BYTES]


def seal_part(
    plan: Plan, step: int, rank: int, data: memoryview, data_start: int,
    tensors: tuple[Placed, ...], meta: Mapping[str, Any],
) -> Part:  # fmt: skip
    """The part manifest of a blob that lies in memory."""
    size = plan.extent_bytes
    checksums = tuple(
        xxh3_128_hexdigest(data[start : start + size]) for start in range(0, len(data), size)
    )
    key = blob_key(plan.generation, step, writer_name(rank))
    blob = Blob(key, len(data), data_start, size, checksums)
    return Part(plan.generation, step, rank, blob, tensors, meta)


def write_sealed(
    store: RunStore, authority: int, part: Part, stored: bytes, content: Iterable[Bytes]
) -> None:
    """Write the blob that a sealed part describes, then the part. `authority` is the generation
    that writes: the part's own, or a newer one that began from it.

    Raises as `write_part` does.
    """
    write_blob(store, authority, part.blob.key, content)
    store_part(store, part, stored)


def write_blob(store: RunStore, authority: int, key: str, content: Iterable[Bytes]) -> None:
    """Write a blob that no part names yet. Raises as `write_part` does."""
    check_fence(store, authority)
    store.create(key, content)


def store_part(store: RunStore, part: Part, stored: bytes) -> None:
    """After the blob: the manifest that names it. A bucket takes up the blob of a writer that was
    killed; that one's manifest may be there too, and then names the same bytes."""
    name = part_key(part.generation, part.step, part.writer)
    try:
        store.create(name, stored)
    except AlreadyExistsError:
        if store.get(name) != stored:
            raise  # the blob is another writer's, and perhaps a checkpoint's: not ours to remove
    except Exception:
        store.delete(part.blob.key)  # a blob without a manifest is of no use
        raise


def check_sealed(snapshot: Snapshot) -> None:
    """Raises CorruptError when a snapshot's bytes are not those that were hashed."""
    blob = snapshot.part.blob
    with snapshot.memory.arena.reading(snapshot.slot, snapshot.header) as data:
        for extent in blob.extents():
            view = data[extent.offset : extent.offset + extent.length]
            if xxh3_128_hexdigest(view) != extent.xxh3:
                raise CorruptError(f"{blob.key}: memory has changed since it was hashed")


def commit_sealed(store: RunStore, authority: int, commit: Commit) -> None:
    """Commit what `write_sealed` wrote under the same authority. Raises FencedError."""
    check_fence(store, authority)
    with suppress(AlreadyExistsError):
        store.create(commit.key, commit.to_bytes())
        _still_whole(store, authority, commit)


def write_part(
    store: RunStore,
    plan: Plan,
    step: int,
    rank: int,
    content: Iterable[Bytes],
    data_start: int,
    tensors: tuple[Placed, ...],
    meta: Mapping[str, Any],
) -> Part:
    """Write one writer's blob, hashed as it streams by, then its manifest.

    Raises OutOfSpaceError and whatever else the store raises; nothing of the blob is then left.
    """
    check_fence(store, plan.generation)
    writer = writer_name(rank)
    key = blob_key(plan.generation, step, writer)
    hasher = ExtentHasher(plan.extent_bytes)
    store.create(key, hasher.feed(content))
    part = Part(plan.generation, step, rank, hasher.blob(key, data_start), tensors, meta)
    store_part(store, part, part.to_bytes())
    return part


def try_commit(store: RunStore, plan: Plan, step: int) -> Commit | None:
    """Commit `step` when the parts of all its writers are there; None when some are not yet.

    The writer of the last part finds all of them, on whichever node, so no notice is needed. Raises
    FencedError when a newer generation exists, CheckpointError when the parts do not make a
    complete checkpoint, CorruptError when one of them is broken.
    """
    prefix = part_prefix(plan.generation, step)
    keys = [key for key in store.list(prefix) if key.endswith(".json")]  # but for a copy's claim
    if len(keys) < plan.topology.world_size:
        return None
    commit = _merged(store, keys, plan)
    check_fence(store, plan.generation)
    try:
        store.create(commit_key(plan.generation, step), commit.to_bytes())
    except AlreadyExistsError:
        return Commit.from_bytes(store.get(commit.key), commit.key)  # another node was first
    _still_whole(store, plan.generation, commit)
    return commit


def _still_whole(store: RunStore, authority: int, commit: Commit) -> None:
    """Check the fence once more, after a commit object. If a newer generation was opened after the
    last check, its sweep may have removed what the object names. Then remove the object too, and
    raise FencedError."""
    try:
        check_fence(store, authority)
    except FencedError:
        try:
            for writer in commit.writers:
                store.size(part_key(commit.generation, commit.step, writer_name(writer.rank)))
                store.size(writer.blob.key)
        except MissingKeyError:
            store.delete(commit.key)
            raise FencedError(f"step {commit.step} was swept by a newer generation") from None


def _merged(store: RunStore, keys: Sequence[str], plan: Plan) -> Commit:
    """The commit object of the parts under `keys`, whose blobs are there."""
    found = list(_each(store, store.get, keys))
    with acyclic():
        read = [
            (Part.from_bytes(stored, key), stored) for key, stored in zip(keys, found, strict=True)
        ]
    blobs = [part.blob for part, _ in read]
    for blob, size in zip(blobs, _each(store, store.size, [b.key for b in blobs]), strict=True):
        if size != blob.size:
            raise CorruptError(f"{blob.key} has changed since it was written")
    with acyclic():
        parts = {part.rank: (part, stored) for part, stored in read}
        return merge(parts, plan.topology, plan.table, plan.config_hash, plan.dataset_version)


def _each(store: RunStore, ask: Callable[[str], T], keys: Sequence[str]) -> Iterator[T]:
    """One answer a key, in order; of many keys, as many at a time as the store is best asked."""
    if len(keys) <= FEW_KEYS:
        yield from map(ask, keys)
        return
    reads: Reads = getattr(store, "reads", NEAR)
    with ThreadPoolExecutor(reads.requests, "parts") as threads:
        yield from threads.map(ask, keys)


@contextmanager
def acyclic() -> Iterator[None]:
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


def check_fence(store: RunStore, generation: int) -> None:
    """Raises FencedError when the run store knows a generation newer than `generation`."""
    newest = newest_generation(store)
    if newest > generation:
        raise FencedError(f"generation {newest} has begun; generation {generation} may not write")
