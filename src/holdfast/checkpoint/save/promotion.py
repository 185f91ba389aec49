"""Promotion: the step that a generation began from, and that only memory holds, is made durable.

What lies in an arena of this node is written from there. A generation may begin from a step that
neither the run store nor an arena of this node has. Its parts are then read from the peers, extent
by extent and each checked, straight into the run store.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, suppress

from xxhash import xxh3_128_hexdigest

from holdfast.checkpoint.memory.snapshot_store import Snapshot, SnapshotStore
from holdfast.checkpoint.restore.sources import FallbackReader, MemorySource
from holdfast.checkpoint.save.save_tracker import SaveId, SaveTracker
from holdfast.checkpoint.save.store_cleaner import PendingParts, StoreCleaner
from holdfast.checkpoint.save.writer import (
    check_snapshot,
    commit_sealed,
    split_into_chunks,
    write_sealed_part,
)
from holdfast.core.format.manifest import Blob, Commit, PartManifest
from holdfast.errors import HoldfastError
from holdfast.wire.store.run_store import MissingKeyError, RunStore

FENCED_SAVE_TIMEOUT_S = 600.0
"""Seconds that a promotion waits for the fenced save of the same step to end."""


class Promoter:
    """The promotions of one mover."""

    def __init__(
        self,
        store: RunStore,
        snapshot_store: SnapshotStore,
        memories: Sequence[MemorySource],
        save_tracker: SaveTracker,
        pending_parts: PendingParts,
        cleaner: StoreCleaner,
        commit_lock: threading.Lock,
    ) -> None:
        """`memories` are asked for what is not on the shelf; commit_lock: held while a commit
        object is made."""
        self._store, self._snapshot_store, self._memories = store, snapshot_store, memories
        self._save_tracker, self._pending_parts = save_tracker, pending_parts
        self._cleaner, self._commit_lock = cleaner, commit_lock

    def pin(self, save: SaveId) -> tuple[list[Snapshot], ExitStack]:
        """Return the snapshots of a step that lie here, and what keeps their slots."""
        pins = ExitStack()
        snapshots: list[Snapshot] = []
        for rank in self._snapshot_store.ranks_with_part(*save):
            with suppress(MissingKeyError):  # it is being overwritten
                snapshots.append(pins.enter_context(self._snapshot_store.pin(*save, rank)))
        return snapshots, pins

    def run(
        self,
        generation: int,
        save: SaveId,
        get_commit: Callable[[], Commit],
        snapshots: list[Snapshot],
        pins: ExitStack,
        sweep_done: threading.Event,
    ) -> None:
        """Save it, under the authority of `generation`; what keeps that from ending well is an
        outcome. get_commit: its commit object. snapshots: those of `pin`, whose slots are kept
        until they are written."""
        self._pending_parts.wait_until_ended(save, FENCED_SAVE_TIMEOUT_S)
        sweep_done.wait()  # the keys are those of an older generation, which are being swept
        try:
            with pins:
                commit = get_commit()
                for snapshot in snapshots:
                    check_snapshot(snapshot)  # it has lain there: no rot may become durable
                    self._write_snapshot(generation, snapshot)
            self._write_peer_parts(generation, commit, snapshots)
            with self._commit_lock:
                commit_sealed(self._store, generation, commit)
                self._save_tracker.record_commit(save, commit.key, commit.nbytes)
                self._cleaner.apply_retention()
        except Exception as error:
            self._save_tracker.abort(save, f"step {save[1]} stays in memory only: {error}")
            with self._commit_lock:
                self._cleaner.discard(save)

    def _write_snapshot(self, writing_generation: int, snapshot: Snapshot) -> None:
        with snapshot.memory.arena.reading(snapshot.slot, snapshot.header) as data:
            write_sealed_part(
                self._store,
                writing_generation,
                snapshot.part,
                snapshot.sealed_manifest,
                split_into_chunks(data),
            )

    def _write_peer_parts(
        self, generation: int, commit: Commit, snapshots: Sequence[Snapshot]
    ) -> None:
        """Write the parts that are not on the shelf, from a mover that has them in memory."""
        ranks = {w.rank for w in commit.writers} - {s.part.rank for s in snapshots}
        for part, stored in find_parts(self._memories, commit, ranks):
            content = read_checked(self._memories, part.blob)
            write_sealed_part(self._store, generation, part, stored, content)


def find_parts(
    memories: Sequence[MemorySource], commit: Commit, ranks: Collection[int]
) -> list[tuple[PartManifest, bytes]]:
    """The sealed manifests of these ranks, as some memory has them and the commit object names
    them. Raises MissingKeyError for a rank whose manifest no memory has."""
    if not ranks:
        return []
    due = {writer.part_xxh3: writer.rank for writer in commit.writers if writer.rank in ranks}
    found: dict[int, tuple[PartManifest, bytes]] = {}
    for memory in memories:
        try:
            lines = memory.inventory()
        except HoldfastError:
            continue  # that machine is out of reach
        for line in lines:
            rank = due.get(xxh3_128_hexdigest(line.sealed_manifest))
            if rank is not None:
                part = PartManifest.from_bytes(line.sealed_manifest, f"{memory.name}, rank {rank}")
                found.setdefault(rank, (part, line.sealed_manifest))
    missing = sorted(set(ranks) - set(found))
    if missing:
        raise MissingKeyError(f"no mover has the parts of ranks {missing} any more")
    return [found[rank] for rank in sorted(found)]


def read_checked(memories: Sequence[MemorySource], blob: Blob) -> Iterator[memoryview]:
    """A blob's bytes; each view holds until the next one is asked for. Raises as Mixed does."""
    mixed = FallbackReader(memories)
    buffer = memoryview(bytearray(min(blob.extent_bytes, blob.size)))
    for extent in blob.extents():
        for _, view in mixed.read_extents(blob, [extent], buffer):
            yield view
