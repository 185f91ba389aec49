"""Check checkpoints against their checksums and find the newest intact one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from xxhash import xxh3_128_hexdigest

from holdfast.checkpoint.format.blob import parse_header
from holdfast.checkpoint.format.box_index import BoxIndex
from holdfast.checkpoint.restore.catalog import list_commits
from holdfast.checkpoint.restore.reader import (
    OPENING_THREADS,
    READ_RANGE_BYTES,
    Checkpoint,
    _adjacent_extents,
)
from holdfast.checkpoint.restore.sources import FallbackReader, StoreSource
from holdfast.core.format.manifest import (
    COMMITS_PREFIX,
    Commit,
    PartManifest,
    WriterShare,
    part_key,
    writer_name,
)
from holdfast.errors import START_OVER, CheckpointError, CorruptError, HoldfastError, StoreError
from holdfast.wire.store.run_store import MissingKeyError, RunStore


def find_newest_verified(
    store: RunStore, on_rejected: Callable[[str, str], None] = lambda key, reason: None
) -> Checkpoint | None:
    """The newest checkpoint whose every byte is as it was written; None when there is none at all.

    Walks from newest to oldest and calls `rejected(key, reason)` for each that is passed over.
    Raises CheckpointError when there are candidates but none is intact: a restart from the
    beginning is then a person's decision.
    """
    candidates = list_commits(store)
    for key in candidates:
        try:
            problems = verify(store, key, first_only=True)
        except CheckpointError as error:  # written by a newer version
            problems = [str(error)]
        if not problems:
            return Checkpoint.open(store, key)
        # raises where the store is out of reach: that says nothing of any of them
        list_commits(store)
        on_rejected(key, problems[0])
    if candidates:
        raise CheckpointError(
            f"none of {len(candidates)} checkpoints can be trusted",
            where=COMMITS_PREFIX.rstrip("/"),
            remedy=f"see why with: holdfast checkpoint verify RUN, or {START_OVER}",
        )
    return None


def open_commit(store: RunStore, key: str) -> Commit:
    """The commit object of a checkpoint whose blobs are there and begin as they must. Their extents
    are not checked here: the reader does that.

    Raises CorruptError, MissingKeyError, CheckpointError (a newer format).
    """
    commit = Checkpoint.open(store, key).commit
    index = BoxIndex(commit)
    with ThreadPoolExecutor(OPENING_THREADS, "open") as threads:
        for problem in threads.map(
            lambda writer: find_head_problem(store, index, writer), commit.writers
        ):
            if problem is not None:
                raise CorruptError(problem)
    return commit


def find_head_problem(store: RunStore, index: BoxIndex, writer: WriterShare) -> str | None:
    """Return the fault of a blob's size or header, or None. Raises MissingKeyError,
    CorruptError."""
    blob, due = writer.blob, index.boxes_of_rank(writer.rank)
    size = store.size(blob.key)
    if size != blob.size or size != blob.data_start + sum(p.nbytes for p in due):
        return f"{blob.key}: {size} bytes, {blob.size} were written"
    head = bytearray(blob.data_start)
    store.read_into(blob.key, 0, memoryview(head))
    if set(parse_header(bytes(head), blob.key)) != set(due):
        return f"{blob.key}: its header does not list what rank {writer.rank} owns"
    return None


def find_damage(store: RunStore, key: str) -> str | None:
    """Return why a checkpoint cannot be restored, by reading all of it; None when it can. Raises
    the store's own error when it is out of reach."""
    try:
        commit = Checkpoint.open(store, key).commit
        index = BoxIndex(commit)
        problems = (
            p for writer in commit.writers for p in _find_blob_problems(store, index, writer)
        )
        problem = next(problems, None)
    except (HoldfastError, MissingKeyError) as error:
        problem = str(error)
    if problem is not None:
        # raises where the store is out of reach: that says nothing of a checkpoint
        list_commits(store)
    return problem


def verify(store: RunStore, key: str, *, first_only: bool = False) -> list[str]:
    """Everything that is wrong with a checkpoint, one sentence each; empty when it is intact.

    Reads every extent of every blob, compares each blob's own header with what the commit object
    says, and checks the part manifests. Raises StoreError where a bucket is out of reach: that is
    nothing wrong with the checkpoint.
    """
    problems: list[str] = []
    for problem in _find_problems(store, key):
        problems.append(problem)
        if first_only:
            break
    return problems


def _find_problems(store: RunStore, key: str) -> Iterator[str]:
    try:
        commit = Checkpoint.open(store, key).commit
    except (CheckpointError, StoreError):
        raise
    except (HoldfastError, MissingKeyError) as error:
        yield str(error)
        return
    index = BoxIndex(commit)
    for writer in commit.writers:
        yield from _find_blob_problems(store, index, writer)
        name = part_key(commit.generation, commit.step, writer_name(writer.rank))
        try:
            stored = store.get(name)
            if xxh3_128_hexdigest(stored) != writer.part_xxh3:
                yield f"{name}: checksum does not match"
            else:
                PartManifest.from_bytes(stored, name)
        except StoreError:
            raise
        except HoldfastError as error:
            yield str(error)


def _find_blob_problems(store: RunStore, index: BoxIndex, writer: WriterShare) -> Iterator[str]:
    blob, due = writer.blob, index.boxes_of_rank(writer.rank)
    buffer = memoryview(bytearray(min(max(READ_RANGE_BYTES, blob.extent_bytes), blob.size)))
    try:
        size = store.size(blob.key)
        if size != blob.size or size != blob.data_start + sum(p.nbytes for p in due):
            yield f"{blob.key}: {size} bytes, {blob.size} were written"
            return
        head = bytearray(blob.data_start)
        source = FallbackReader([StoreSource(store)])
        for extents in _adjacent_extents(blob):
            for extent, view in source.read_extents(blob, extents, buffer):
                part = head[extent.offset : extent.offset + extent.length]
                head[extent.offset : extent.offset + len(part)] = view[: len(part)]
        if set(parse_header(bytes(head), blob.key)) != set(due):
            yield f"{blob.key}: its header does not list what rank {writer.rank} owns"
    except StoreError:
        raise
    except HoldfastError as error:
        yield str(error)
