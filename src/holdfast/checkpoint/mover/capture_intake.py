"""What a mover does with the captures that its ranks hand over: hash them, shelve them, and have
them saved. The states that a capture goes through are in `service.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from holdfast.checkpoint.format.blob import blob_size
from holdfast.checkpoint.format.save_context import SaveContext
from holdfast.checkpoint.memory.arena import SlotHeader, identity_digest
from holdfast.checkpoint.memory.arena_pool import ArenaPool, RankArena
from holdfast.checkpoint.memory.snapshot_store import Snapshot, SnapshotStore
from holdfast.checkpoint.mover.restore_search import RestoreSearch
from holdfast.checkpoint.mover.served_generation import ServedGeneration
from holdfast.checkpoint.save.pending_blob import PendingBlob
from holdfast.checkpoint.save.save_manager import SaveManager
from holdfast.checkpoint.save.save_tracker import MAX_SAVES_KEPT, SaveId, SaveTracker
from holdfast.checkpoint.save.writer import seal_part
from holdfast.core.format.manifest import parse_commit_key
from holdfast.core.json_parsing import Json, JsonObject
from holdfast.errors import CorruptError, FencedError, HoldfastError
from holdfast.events import SnapshotComplete, SnapshotDropped
from holdfast.policy.saving.destinations import SaveDestinations

HASH_THREADS = 2


_Ordered = TypeVar("_Ordered", int, SaveId)


def _add_bounded(known: set[_Ordered], new: _Ordered) -> None:
    """Add one; if there are too many, drop the oldest: it ended long ago and was never
    requested."""
    known.add(new)
    if len(known) > MAX_SAVES_KEPT:
        known.remove(min(known))


@dataclass(frozen=True)
class _Capture:
    """A capture that a rank handed over."""

    context: SaveContext
    rank_arena: RankArena
    rank: int
    slot: int
    expected_header: SlotHeader
    meta: JsonObject
    destinations: SaveDestinations
    pending_blob: PendingBlob | None  # its blob; None: it stays in memory


class CaptureIntake:
    """The captures of one mover, from the hand-over to the shelf. Safe to use from any thread."""

    def __init__(
        self,
        run: str,
        served: ServedGeneration,
        snapshot_store: SnapshotStore,
        save_manager: SaveManager,
        save_tracker: SaveTracker,
        restore_search: RestoreSearch,
        clock: Callable[[], float],
    ) -> None:
        """restore_search: says what the ranks have read when they complete a step."""
        self.listeners: list[Callable[[Snapshot, bool], None]] = []
        self.arena_pool = ArenaPool(
            snapshot_store,
            served.change,
            served.require,
            lambda: self._hashing_count + self._failed_reading_count > 0,
            lambda step, why: save_tracker.emit(SnapshotDropped(why, step=step)),
        )
        self._run, self._served, self._change = run, served, served.change
        self._snapshot_store, self._save_manager = snapshot_store, save_manager
        self._save_tracker, self._restore_search, self._clock = save_tracker, restore_search, clock
        # step -> rank -> when it was handed over
        self._handed_over_at: dict[int, dict[int, float]] = {}
        # steps of this generation that lack a rank for good
        self._incomplete_steps: set[int] = set()
        self._not_to_upload: set[SaveId] = set()  # what does not go into the bucket
        self._hashing_count = 0
        # slots of captures that failed, while a disk may still read them
        self._failed_reading_count = 0
        self._hash_threads = ThreadPoolExecutor(HASH_THREADS, "hash")

    def begin_generation(self) -> None:
        """A generation begins; who calls this holds its lock."""
        self.arena_pool.begin_generation()
        self._handed_over_at, self._incomplete_steps = {}, set()

    def accept(
        self,
        generation: int,
        rank: int,
        step: int,
        slot: int,
        sequence: int,
        meta: Mapping[str, Json],
        destinations: SaveDestinations,
    ) -> None:
        """As `MoverService.accept_capture`."""
        with self._change:
            plan = self._served.require(generation)
            found = self.arena_pool.ranks.get(rank)
            if found is None:
                raise HoldfastError(f"rank {rank} has no arena")
            due = SlotHeader(
                identity_digest(self._run),
                generation,
                step,
                sequence,
                blob_size(found.blob_header, found.tensors),
                identity_digest(found.blob_header),
            )
            if found.arena.header(slot) != due:
                raise CorruptError(f"slot {slot} of rank {rank} does not hold step {step}")
            if found.taken_sequences.get(slot) == sequence or not found.arena.is_held(slot):
                return  # its first answer was lost on the way
            found.taken_sequences[slot] = sequence
            skipped = self._record_hand_over(rank, step)
            self._hashing_count += 1
            if destinations.is_durable:
                self._save_manager.add_pending((generation, step))
                if not destinations.to_bucket:
                    _add_bounded(self._not_to_upload, (generation, step))
        for older in skipped:
            self._snapshot_store.drop(generation, older)
            self._save_manager.on_rank_skipped((generation, older))
        writing = PendingBlob(found.memory, slot, due, rank) if destinations.is_durable else None
        capture = _Capture(plan, found, rank, slot, due, dict(meta), destinations, writing)
        self._hash_threads.submit(self._hash_and_store, capture)
        if writing is not None:
            self._save_manager.submit(plan, writing)

    def should_upload(self, key: str) -> bool:
        """Return True if a committed checkpoint goes into the bucket too. Called once for each."""
        step, generation = parse_commit_key(key) or (0, 0)
        with self._change:
            kept_back = (generation, step) in self._not_to_upload
            self._not_to_upload.discard((generation, step))
        return not kept_back

    def drain(self, wait: float, durable: bool = True) -> bool:
        """As `MoverService.drain`."""

        def ended() -> bool:
            # generation -> step
            newest = dict(reversed(self._snapshot_store.complete_steps(own_ranks_only=True)))
            waiting = [
                save
                for save in self._save_manager.pending_parts.saves()
                if durable or save[1] > newest.get(save[0], -1)
            ]
            return not self._hashing_count and not waiting

        with self._change:
            return self._change.wait_for(ended, wait)

    def close(self) -> None:
        """Finish what is being hashed."""
        self._hash_threads.shutdown(wait=True)

    def give_up_step(self, generation: int, step: int) -> None:
        with self._change:
            _add_bounded(self._incomplete_steps, step)
        self._snapshot_store.drop(generation, step)

    def _record_hand_over(self, rank: int, step: int) -> list[int]:
        """Note that a rank handed over a step; return the older steps that can no longer be
        complete in memory. Each rank hands its steps over in order, so it has skipped those."""
        self._handed_over_at.setdefault(step, {})[rank] = self._clock()
        skipped = [s for s, ranks in self._handed_over_at.items() if s < step and rank not in ranks]
        for older in skipped:
            self._handed_over_at[older] = {}  # whatever is still being hashed of it comes too late
        for old in sorted(self._handed_over_at)[:-8]:
            del self._handed_over_at[old]
        return skipped

    def _hash_and_store(self, capture: _Capture) -> None:
        """One rank's snapshot, on a thread of its own; every failure becomes an outcome."""
        plan, owner, slot, due = (
            capture.context,
            capture.rank_arena,
            capture.slot,
            capture.expected_header,
        )
        try:
            with owner.arena.reading(slot, due) as data:
                part = seal_part(
                    plan,
                    due.step,
                    capture.rank,
                    data,
                    len(owner.blob_header),
                    owner.tensors,
                    capture.meta,
                )
            snapshot = Snapshot(part, part.to_bytes(), owner.memory, slot, due)
            complete = self._store_snapshot(snapshot, capture.pending_blob is not None)
        except Exception as error:  # a failed save never stops training
            with self._change:
                self._failed_reading_count += 1
            if capture.pending_blob is not None:
                capture.pending_blob.give_up(error, partial(self._release_capture, capture))
            else:
                self._release_capture(capture)
            if capture.pending_blob is None and not isinstance(error, FencedError):
                self._save_tracker.warn(f"step {due.step} of rank {capture.rank}: {error}")
            self.give_up_step(plan.generation, due.step)
        else:
            if complete:
                self._on_step_complete(plan, due.step)
            if capture.pending_blob is not None:
                capture.pending_blob.set_sealed(snapshot)
            for listener in self.listeners if capture.destinations.to_peers is not False else ():
                listener(snapshot, bool(capture.destinations.to_peers))
        finally:
            with self._change:
                self._hashing_count -= 1
                self._change.notify_all()

    def _release_capture(self, capture: _Capture) -> None:
        """Give back the slot of a capture that was not shelved."""
        # else a newer one's
        if capture.rank_arena.arena.header(capture.slot) in (capture.expected_header, None):
            capture.rank_arena.arena.release(capture.slot)
        with self._change:
            self._failed_reading_count -= 1
            self._change.notify_all()

    def _store_snapshot(self, snapshot: Snapshot, is_durable: bool) -> bool:
        """Shelve; whether the step is complete. Raises FencedError when its generation is over:
        what the next one begins from has been chosen."""
        part = snapshot.part
        with self._change:
            self._served.require(part.generation)
            late = part.step in self._incomplete_steps
            late = late or part.rank not in self._handed_over_at.get(part.step, {})
            complete = self._snapshot_store.put(snapshot, pin_slot=is_durable)
        if late:  # another rank skipped the step: it is of no use in memory
            self._snapshot_store.drop(part.generation, part.step)
        return complete and not late

    def _on_step_complete(self, context: SaveContext, step: int) -> None:
        """Every rank's snapshot of a step is in memory."""
        with self._change:
            handed = self._handed_over_at.get(step, {}).values()
            seconds = self._clock() - min(handed, default=self._clock())
        nbytes = sum(
            h.nbytes
            for h in self._snapshot_store.inventory()
            if h[:2] == (context.generation, step)
        )
        self._save_tracker.emit(SnapshotComplete(nbytes, seconds, step=step))
        verified = self._restore_search.step_read_from_store
        if verified is not None:
            # All ranks have read and checked it.
            self._save_manager.cleaner.verified_steps.add(verified)
