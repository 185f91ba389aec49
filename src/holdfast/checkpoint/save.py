"""Durable writing: a snapshot's bytes become a blob, a part manifest and, with the parts of all
other writers, a checkpoint.

Order makes it safe: blob, then part, then commit object, each created only if absent and durable
before the next. Whatever is killed in between leaves bytes that no commit names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.checkpoint.blob import Bytes, ExtentHasher
from holdfast.errors import CorruptError, FencedError
from holdfast.layout import Topology
from holdfast.spec.manifest import (
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
from holdfast.spec.state import StateTable
from holdfast.wire.runstore import AlreadyExistsError, RunStore
from holdfast.wire.term import newest_generation

CHUNK_BYTES = 4 * 2**20
"""Bytes hashed and then written at a time: small enough to stay in cache between the two."""


@dataclass(frozen=True)
class Plan:
    """What every checkpoint of one generation has in common."""

    generation: int
    topology: Topology
    table: StateTable
    config_hash: str
    dataset_version: str
    extent_bytes: int


def pieces(data: memoryview) -> Iterator[memoryview]:
    """A large view in chunks."""
    for start in range(0, len(data), CHUNK_BYTES):
        yield data[start : start + CHUNK_BYTES]


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
    try:
        store.create(part_key(plan.generation, step, writer), part.to_bytes())
    except Exception:
        store.delete(key)  # a blob without a manifest serves nobody
        raise
    return part


def try_commit(store: RunStore, plan: Plan, step: int) -> Commit | None:
    """Commit `step` when the parts of all its writers are there; None when some are not yet.

    Whoever writes the last part finds all of them, on whichever node, so nobody needs to be
    told. Raises FencedError when a newer generation exists, CheckpointError when the parts do
    not make a whole checkpoint, CorruptError when one of them is broken.
    """
    prefix = part_prefix(plan.generation, step)
    keys = store.list(prefix)
    if len(keys) < plan.topology.world_size:
        return None
    parts: dict[int, tuple[Part, bytes]] = {}
    for key in keys:
        stored = store.get(key)
        part = Part.from_bytes(stored, key)
        parts[part.rank] = (part, stored)
    for part, _ in parts.values():
        if store.size(part.blob.key) != part.blob.size:
            raise CorruptError(f"{part.blob.key} has changed since it was written")
    commit = merge(parts, plan.topology, plan.table, plan.config_hash, plan.dataset_version)
    check_fence(store, plan.generation)
    try:
        store.create(commit_key(plan.generation, step), commit.to_bytes())
    except AlreadyExistsError:
        return Commit.from_bytes(store.get(commit.key), commit.key)  # another node was first
    return commit


def check_fence(store: RunStore, generation: int) -> None:
    """Raises FencedError when the run store knows a generation newer than `generation`."""
    newest = newest_generation(store)
    if newest > generation:
        raise FencedError(f"generation {newest} has begun; generation {generation} may not write")
