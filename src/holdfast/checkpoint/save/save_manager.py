"""From memory to the run store: captures become blobs, parts and, together, a checkpoint.

Saves run on a few threads of their own. A blob is written while the capture is being hashed
(`pending_blob.py`), its part when both are done. A save never stops training: every failure is an
outcome, and nothing is left behind. If a generation began from a step that lies in memory alone,
that step is made durable first ("promoted"). Its bytes come from an arena of this node or from the
peers. The new generation's authority covers it, because its own generation is fenced. Of several
movers, each does this for its own ranks, and one commits (`commit_protocol.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial

from xxhash import xxh3_128_hexdigest

from holdfast.checkpoint.format.save_context import SaveContext
from holdfast.checkpoint.memory.snapshot_store import Snapshot, SnapshotStore
from holdfast.checkpoint.peers.config import Cohort
from holdfast.checkpoint.restore import catalog, reader
from holdfast.checkpoint.restore.restore_point import resolve_commit
from holdfast.checkpoint.restore.sources import FallbackReader, MemorySource
from holdfast.checkpoint.save import retention
from holdfast.checkpoint.save.commit_protocol import CommitProtocol
from holdfast.checkpoint.save.held_save import HeldSave
from holdfast.checkpoint.save.pending_blob import PendingBlob
from holdfast.checkpoint.save.save_tracker import SaveId, SaveTracker
from holdfast.checkpoint.save.store_cleaner import PendingParts, StoreCleaner
from holdfast.checkpoint.save.writer import (
    check_snapshot,
    commit_sealed,
    split_into_chunks,
    store_part,
    try_commit,
    write_sealed_part,
)
from holdfast.core.format.manifest import (
    Blob,
    Commit,
    PartManifest,
    commit_key,
    parse_commit_key,
    parse_save_key,
    part_key,
    writer_name,
)
from holdfast.errors import FencedError, HoldfastError
from holdfast.wire.store.location import open_store, second_place
from holdfast.wire.store.run_store import MissingKeyError, RunStore, free_bytes

SAVE_THREADS = 2
FENCED_SAVE_TIMEOUT_S = 600.0
"""Seconds that a promotion waits for the fenced save of the same step to end."""


class SaveManager:
    """The durable saves of one mover. Safe to use from any thread."""

    def __init__(
        self,
        store: RunStore,
        snapshot_store: SnapshotStore,
        save_tracker: SaveTracker,
        change: threading.Condition,
        retention: retention.RetentionRules,
        memories: Sequence[MemorySource] = (),
        last_step: int = 0,
        fallback: str = "",
    ) -> None:
        """`change` guards `pending_parts` and is notified when a save has ended; `memories` are
        asked for what a promotion does not find on the shelf. last_step: as in `HeldSave`.
        fallback: location of the second place, if one is named."""
        self._fallback = fallback
        self.pending_parts = PendingParts(change)
        self._store, self._snapshot_store, self._save_tracker = store, snapshot_store, save_tracker
        self._change, self._memories = change, memories
        save_tracker.is_under_way = self.pending_parts.__contains__
        self.commit_protocol = CommitProtocol(save_tracker, store, self)
        self._commit_lock = threading.Lock()
        self._newest_committed: SaveId | None = None  # that was committed, under `_committing`
        self.cleaner = StoreCleaner(store, retention, save_tracker, self.commit_protocol)
        self._held_save = HeldSave(
            store,
            last_step,
            save_tracker,
            self._make_room,
            lambda: self.cleaner.removed_count,
            lambda: self.cleaner.started_from[0],
            self._save_elsewhere,
        )
        self._fenced_saves: set[SaveId] = set()  # that a newer generation has ended
        self._sweep_done = threading.Event()  # what older generations left was removed
        self._sweep_done.set()
        self._threads = ThreadPoolExecutor(SAVE_THREADS, "save")

    def begin_generation(
        self, context: SaveContext, start_step: int | None = None, cohort: Cohort | None = None
    ) -> None:
        """Remove what older generations left unfinished, after the answer: a sweep may take long.
        The generation's own writes wait for it. Of several movers, the leader sweeps. The other
        movers do not wait: they write under a newer generation."""
        generation, before = context.generation, self.cleaner.started_from[0]
        # otherwise no rank asks for their end
        if self.commit_protocol.is_leader and not self.commit_protocol.is_alone:
            for step in self._save_tracker.open_steps(before):
                is_restarted = self._save_tracker.is_restarted((before, step))
                if (before, step) not in self.pending_parts and not is_restarted:
                    reason = "the workers changed before all of them had stored their part"
                    self._save_tracker.record_failure((before, step), reason)
        swept = threading.Event()
        # From here on, reports about older saves remove nothing: their leader may be committing.
        self.cleaner.started_from, self._sweep_done = (generation, start_step), swept
        self.commit_protocol.begin_generation(context, cohort)
        with self._change:
            self.cleaner.context = context
        self._threads.submit(self._sweep_and_adopt, context, swept)

    def restart_fenced_save(self, start_step: int) -> SaveId | None:
        """Choose the newest save of the present generation that a newer one, which continues from
        the state after `start_step`, leaves unfinished. `promote` finishes it.

        Return None if there is none whose snapshot is complete on this node.
        """
        before = self.cleaner.started_from[0]
        unfinished = {(before, step) for step in self._save_tracker.open_steps(before)}
        known = self._snapshot_store.complete_steps(own_ranks_only=True)
        found = [
            save
            for save in (unfinished | self._fenced_saves).intersection(known)
            if save[0] == before and save[1] <= start_step
        ]
        self._fenced_saves.clear()
        if not found:
            return None
        self._save_tracker.restart(max(found))
        return max(found)

    def add_pending(self, save: SaveId) -> None:
        """A rank has handed over its part of a save."""
        self.pending_parts.add(save)
        self._save_tracker.begin_save(save)

    def submit(self, context: SaveContext, blob: PendingBlob) -> None:
        """Save what was handed over, and will be shelved, pinned, or given up."""
        self._threads.submit(self._save_part, context, blob, self._sweep_done)

    def promote(self, generation: int, save: SaveId, get_commit: Callable[[], Commit]) -> None:
        """Make durable what `generation` began from and only memory holds. Its slots are kept
        until that is done. get_commit: its commit object, asked for behind the answer."""
        pins = ExitStack()
        snapshots: list[Snapshot] = []
        for rank in self._snapshot_store.ranks_with_part(*save):
            with suppress(MissingKeyError):  # it is being overwritten
                snapshots.append(pins.enter_context(self._snapshot_store.pin(*save, rank)))
        self._save_tracker.restart(save)
        self._threads.submit(
            self._promote, generation, save, get_commit, snapshots, pins, self._sweep_done
        )

    def await_promotion(self, save: SaveId) -> None:
        """Another mover makes it durable: learn what comes of it."""
        self._save_tracker.restart(save)
        self.commit_protocol.await_outcome(save)

    def close(self) -> None:
        self.commit_protocol.close()
        self._held_save.close()
        self._threads.shutdown(wait=True)

    def _sweep_and_adopt(self, plan: SaveContext, sweep_done: threading.Event) -> None:
        """Before anything is written: what older generations left goes, and what a mover left that
        had this node's place in this generation is taken up."""
        try:
            if self.commit_protocol.is_leader:
                with self._commit_lock:
                    retention.sweep_older_generations(self._store, plan.generation)
            self._adopt_unfinished_saves(plan)
        except Exception as error:  # what is left takes room, and no more
            self._save_tracker.warn(f"unfinished saves could not be searched: {error}")
        finally:
            sweep_done.set()

    def _adopt_unfinished_saves(self, plan: SaveContext) -> None:
        """The saves of this generation that a former mover of this node had under way. What lacks a
        part of one of our ranks has lost it with that mover."""
        if self.commit_protocol.is_alone:
            return  # the ranks report what they handed over (`unheard`)
        generation, ours = plan.generation, self.commit_protocol.own_ranks(plan)
        committed = [p for key in catalog.list_commits(self._store) if (p := parse_commit_key(key))]
        steps = sorted(step for step, g in committed if g == generation)
        for step in steps[:-1]:
            self._save_tracker.record_remote_commit(
                (generation, step), commit_key(generation, step)
            )
        if steps and self.commit_protocol.is_leader:
            commit = reader.Checkpoint.open(self._store, commit_key(generation, steps[-1])).commit
            self._save_tracker.record_commit((generation, steps[-1]), commit.key, commit.nbytes)
        found: dict[int, set[int]] = {}
        for key in self._store.list(f"parts/{generation:010d}/"):
            position, rank = parse_save_key(key), _rank_of(key)
            if position is not None and position not in committed and rank is not None:
                found.setdefault(position[0], set()).add(rank)
        for step, ranks in sorted(found.items()):
            save = generation, step
            self._save_tracker.begin_save(save)
            if not ranks >= ours:
                self.fail_save(save, HoldfastError("the mover that was saving it ended"))
                continue
            for rank in ours:
                if self.commit_protocol.record_stored(save, rank):  # true of the last one at most
                    self._commit(plan, step)

    # --- one save -----------------------------------------------------------------------------
    def _save_part(self, plan: SaveContext, blob: PendingBlob, sweep_done: threading.Event) -> None:
        """One rank's part of a save; every failure becomes an outcome. It waits for the sweep that
        was queued before it: a later one is queued behind it, perhaps for this very thread."""
        save = blob.save
        try:
            try:  # a save that another rank's failure has made useless ends there
                sweep_done.wait()
                self._make_room_ahead(plan, save[1])
                write = partial(self._store_blob_and_part, blob)
                self._held_save.attempt(save, blob.nbytes, write)
            finally:
                snapshot = blob.wait_sealed()
                self._snapshot_store.unpin(snapshot)
            if (reason := self._save_tracker.failure_reason(save)) is not None:
                raise HoldfastError(reason)  # meanwhile, of another rank's part
            if self.commit_protocol.record_stored(save, snapshot.part.rank):
                self._held_save.attempt(save, 0, partial(self._commit, plan, save[1]))
        except Exception as error:
            self.fail_save(save, error)
        finally:
            self.pending_parts.remove(save)
            self._abandon_overtaken(plan)

    def _store_blob_and_part(self, blob: PendingBlob) -> None:
        if blob.has_been_tried:  # a disk that fails may have kept half of it
            retention.discard_rank_parts(self._store, *blob.save, [blob.rank])
        blob.write(self._store, partial(self._save_tracker.failure_reason, blob.save))
        snapshot = blob.wait_sealed()
        store_part(self._store, snapshot.part, snapshot.sealed_manifest)

    def _make_room_ahead(self, plan: SaveContext, step: int) -> None:
        """Make room for a step before it is written: other nodes' parts need it, too."""
        free, wanted = free_bytes(self._store), sum(spec.nbytes for spec in plan.table)
        if free is not None and free < wanted:
            self._make_room(step)

    def _make_room(self, step: int) -> None:
        """Remove what retention would remove once `step` is committed, but for the newest good
        checkpoint."""
        if self.commit_protocol.is_leader:
            with self._commit_lock:
                self.cleaner.apply_retention(step)

    def _save_elsewhere(self, save: SaveId) -> bool:
        """Save the last step from memory in the second place; return True once the save has ended.
        Of several movers the leader does it, for all ranks."""
        place, plan = second_place(self._store, self._fallback), self.cleaner.context
        if not place or plan is None or not self.commit_protocol.is_leader:
            self.commit_protocol.await_outcome(save)
            return self._save_tracker.is_committed(save)
        with self._commit_lock:
            if self._save_tracker.is_committed(save):
                return True
            target, key = open_store(place), commit_key(*save)
            if hasattr(self._store, "inner") and not hasattr(target, "inner"):
                raise HoldfastError("checkpoints of this run are sealed; name its key with ?seal=")
            commit = resolve_commit(
                self._store, self._memories, key, plan.config_hash, plan.dataset_version
            )
            if key not in catalog.list_commits(target):
                ranks = {writer.rank for writer in commit.writers}
                try:
                    retention.discard_uncommitted(target, *save)
                    for part, stored in find_parts(self._memories, commit, ranks):
                        content = read_checked(self._memories, part.blob)
                        write_sealed_part(target, save[0], part, stored, content)
                    commit_sealed(target, save[0], commit)
                except HoldfastError:
                    retention.discard_uncommitted(target, *save)
                    raise
            elif target.get(key) != commit.to_bytes():
                raise HoldfastError(f"{place} has another run's checkpoint of this step")
            self._save_tracker.record_commit(save, key, commit.nbytes, place)
            return True

    def _promote(
        self,
        generation: int,
        save: SaveId,
        get_commit: Callable[[], Commit],
        snapshots: list[Snapshot],
        pins: ExitStack,
        sweep_done: threading.Event,
    ) -> None:
        """Save a step under the authority of `generation`: from the arenas of this node, and what
        these lack from the peers, extent by extent. A failure becomes an outcome."""
        self.pending_parts.wait_until_ended(save, FENCED_SAVE_TIMEOUT_S)
        sweep_done.wait()  # the keys are those of an older generation, which are being swept
        try:
            with pins:
                retention.discard_uncommitted(self._store, *save)  # a fenced save left it
                commit = get_commit()
                for snapshot in snapshots:
                    check_snapshot(snapshot)  # it has lain there: no rot may become durable
                    with snapshot.memory.arena.reading(snapshot.slot, snapshot.header) as data:
                        chunks = split_into_chunks(data)
                        write_sealed_part(
                            self._store, generation, snapshot.part, snapshot.sealed_manifest, chunks
                        )
            missing = {w.rank for w in commit.writers} - {s.part.rank for s in snapshots}
            for part, stored in find_parts(self._memories, commit, missing):
                content = read_checked(self._memories, part.blob)
                write_sealed_part(self._store, generation, part, stored, content)
            with self._commit_lock:
                commit_sealed(self._store, generation, commit)
                self._save_tracker.record_commit(save, commit.key, commit.nbytes)
                self.cleaner.apply_retention()
        except Exception as error:
            fenced = isinstance(error, FencedError)  # the next generation has the say
            reason = f"it stays in memory only: {error}"
            self._save_tracker.abort(save, reason, emit_event=not fenced)
            with self._commit_lock:
                self.cleaner.discard(save)

    def fail_save(self, save: SaveId, error: Exception) -> None:
        known, fenced = isinstance(error, HoldfastError), isinstance(error, FencedError)
        if fenced:
            self._fenced_saves.add(save)
        self._save_tracker.record_failure(
            save, str(error) if known else f"{type(error).__name__}: {error}", emit_event=not fenced
        )
        with self._commit_lock:
            if not (self._save_tracker.is_committed(save) or self._save_tracker.is_restarted(save)):
                self.cleaner.discard(save)

    # --- with other movers --------------------------------------------------------------------
    def all_parts_stored(self, save: SaveId) -> None:
        with self._change:
            plan = self.cleaner.context
        if plan is not None and plan.generation == save[0]:
            self._threads.submit(self._commit_or_fail, plan, save)

    def part_failed(self, save: SaveId, reason: str) -> None:
        # the node that lost it has reported it
        self._save_tracker.record_failure(save, reason, emit_event=False)
        self._threads.submit(self.fail_save, save, HoldfastError(reason))

    def on_save_ended(self, save: SaveId, key: str | None, reason: str) -> None:
        if key is not None:
            self._save_tracker.record_remote_commit(save, key)
            self._release_older_snapshots(save)
            return
        self._save_tracker.abort(save, reason, emit_event=False)
        if save[0] == self.cleaner.started_from[0]:  # otherwise the present leader sweeps it
            self.cleaner.discard(save)

    def on_rank_skipped(self, save: SaveId) -> None:
        """Fail a step that a rank of this node has skipped."""
        if not self.commit_protocol.is_alone and save[1] in self._save_tracker.open_steps(save[0]):
            self._threads.submit(self.fail_save, save, HoldfastError("not every rank captured it"))

    def resolve_orphaned_save(self, save: SaveId, rank: int) -> None:
        """A rank had handed a save over to the mover before this one."""
        found = [p for key in catalog.list_commits(self._store) if (p := parse_commit_key(key))]
        committed = [step for step, generation in found if generation == save[0]]
        if save[1] in committed:
            self._save_tracker.record_remote_commit(save, commit_key(*save))
            return
        if save[1] < max(committed, default=0):
            return  # retention may have removed it
        stored = self._store.list(part_key(*save, writer_name(rank)))
        if stored and not self.commit_protocol.is_alone:
            return  # the leader may be committing it: it is taken up
        if stored and self.cleaner.context is not None:
            self._commit_or_fail(self.cleaner.context, save)
        if not self._save_tracker.is_committed(save):
            self.fail_save(save, HoldfastError("the mover that was saving it ended"))

    def _commit_or_fail(self, plan: SaveContext, save: SaveId) -> None:
        try:
            self._held_save.attempt(save, 0, partial(self._commit, plan, save[1]))
        except Exception as error:
            self.fail_save(save, error)

    def _release_older_snapshots(self, save: SaveId) -> None:
        """A state of its generation is durable: what memory holds of older ones may go."""
        if save[0] == self.cleaner.started_from[0]:
            self._snapshot_store.drop_older_than(save[0])

    def _commit(self, plan: SaveContext, step: int) -> None:
        save = (plan.generation, step)
        with self._commit_lock:
            if self._save_tracker.failure_reason(save) is not None:
                self.cleaner.discard(save)
                return
            if self._save_tracker.is_committed(save):
                return
            commit = try_commit(self._store, plan, step)
            if commit is None:
                return
            self._save_tracker.record_commit(save, commit.key, commit.nbytes)
            self.commit_protocol.forget(save)
            self._release_older_snapshots(save)
            self._newest_committed = max(save, self._newest_committed or save)
            self.cleaner.abandon_older(plan, step, self.pending_parts)
            self.cleaner.apply_retention()

    def _abandon_overtaken(self, plan: SaveContext) -> None:
        """The save that ended now may be of a step that was busy when a later one was committed."""
        with self._commit_lock:
            if self._newest_committed is None or self._newest_committed[0] != plan.generation:
                return
            try:
                self.cleaner.abandon_older(plan, self._newest_committed[1], self.pending_parts)
            except HoldfastError as error:
                self._save_tracker.warn(
                    f"what is left of older saves could not be removed: {error}"
                )


def _rank_of(key: str) -> int | None:
    """Return the rank whose part manifest this is."""
    number = key.rpartition("-rank")[2].removesuffix(".json")
    return int(number) if number.isdecimal() else None


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
