"""The mover's work, apart from listening: arenas, snapshots, saves and their outcomes.

One `MoverService` lives in one mover process. It serves one generation at a time: it refuses a
request of an older one, and `expect` of a newer one begins that. Hashing and saving run on their
own threads. So no answer waits for a disk, and no snapshot in memory for a save.

What a rank captured goes through named states, and every end is an event:

    captured --> hashed --> shelved --> complete              (in memory: all ranks are there)
       |           '-> failed   |                             (slot changed, fenced)
       |                        v
       '-------> writing ---> written --> committed           (if it is to be durable)
                   '-> failed   '-> failed                    (disk full; parts that do not fit)

A durable capture is hashed and written at the same time, its part manifest when both are done. If
one fails, the other is given up (`pending_blob.py`). The shelf decides when a slot may be written
again. Snapshots outlive worker and generation: the newest complete step's stay until the next
generation has one. If a restart began from a step in memory alone, it is made durable meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from holdfast.checkpoint.format.blob import blob_size
from holdfast.checkpoint.format.save_context import SaveContext, choose_extent_bytes
from holdfast.checkpoint.memory.arena import SlotHeader, identity_digest
from holdfast.checkpoint.memory.arena_pool import ArenaPool, RankArena
from holdfast.checkpoint.memory.snapshot_store import Snapshot, SnapshotStore
from holdfast.checkpoint.mover.messages import HoldingsReply, RestorePoint, StatusReply
from holdfast.checkpoint.mover.restore_search import RestoreSearch, collect_mapped_blobs
from holdfast.checkpoint.peers.config import Cohort
from holdfast.checkpoint.peers.source import BlobHolder
from holdfast.checkpoint.restore.fallback_store import LazyStore
from holdfast.checkpoint.restore.sources import MemorySource, SnapshotStoreSource
from holdfast.checkpoint.restore.start_records import record_start
from holdfast.checkpoint.save import retention
from holdfast.checkpoint.save.commit_protocol import CommitProtocol
from holdfast.checkpoint.save.pending_blob import PendingBlob
from holdfast.checkpoint.save.save_manager import SaveManager
from holdfast.checkpoint.save.save_tracker import MAX_SAVES_KEPT, SaveId, SaveTracker
from holdfast.checkpoint.save.writer import seal_part
from holdfast.core.format.manifest import commit_key, parse_commit_key
from holdfast.core.json_parsing import Json, JsonObject
from holdfast.core.sharding.state_table import StateTable
from holdfast.errors import CorruptError, FencedError, HoldfastError
from holdfast.events import SnapshotComplete, SnapshotDropped
from holdfast.layout import Topology
from holdfast.policy.saving.destinations import SaveDestinations
from holdfast.wire.store.location import open_store
from holdfast.wire.store.run_store import RunStore
from holdfast.wire.term import newest_generation

HASH_THREADS = 2


@dataclass(frozen=True)
class MoverSettings:
    """A mover's settings, given once at its start."""

    run: str
    config_hash: str
    dataset_version: str
    keep_last: int = 3
    keep_every: int = 0
    extent_bytes: int = 16 * 2**20
    bucket: str = ""  # location; "": no tier 3
    bucket_keep_last: int = 3
    last_step: int = 0  # of the run: its save waits for a run store that cannot take it; 0: none
    fallback: str = ""  # location that takes the last step's state then; "": none


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


class MoverService:
    """The mover's state machine. Every public method is one verb and is safe to call from any
    thread; `generation` is the caller's."""

    def __init__(
        self, store: RunStore, settings: MoverSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.save_tracker = SaveTracker(clock)
        self._change = (
            threading.Condition()
        )  # guards what belongs to the generation, also elsewhere
        self._context: SaveContext | None = None  # of the generation that is served
        self.snapshot_store = SnapshotStore(self._notify)
        self.memories: list[MemorySource] = [SnapshotStoreSource(self.snapshot_store)]
        """Memories that a restart searches for snapshots; peers are appended."""
        self.locate_on_peers: Callable[[Collection[str]], tuple[BlobHolder, ...]] = lambda keys: ()
        """Return which blobs peers have in memory (`PeerMemories.locate_blobs`)."""
        self._store = store
        self._settings = settings
        self._clock = clock
        self._save_manager = SaveManager(
            store,
            self.snapshot_store,
            self.save_tracker,
            self._change,
            retention.RetentionRules(settings.keep_last, settings.keep_every),
            self.memories,
            settings.last_step,
            settings.fallback,
        )
        self._restore_search = RestoreSearch(
            store,
            LazyStore(lambda: open_store(settings.bucket)) if settings.bucket else None,
            self.memories,
            self.snapshot_store,
            self.save_tracker,
            self._save_manager,
            settings.config_hash,
            settings.dataset_version,
            clock,
        )
        self._arena_pool = ArenaPool(
            self.snapshot_store,
            self._change,
            self._require,
            lambda: self._hashing_count + self._failed_reading_count > 0,
            lambda step, why: self.save_tracker.emit(SnapshotDropped(why, step=step)),
        )
        # step -> rank -> when it was handed over
        self._handed_over_at: dict[int, dict[int, float]] = {}
        # steps of this generation that lack a rank for good
        self._incomplete_steps: set[int] = set()
        self._not_to_upload: set[SaveId] = set()  # what does not go into the bucket
        self._hashing_count = 0
        # slots of captures that failed, while a disk may still read them
        self._failed_reading_count = 0
        self._hash_threads = ThreadPoolExecutor(HASH_THREADS, "hash")
        self.snapshot_listeners: list[Callable[[Snapshot, bool], None]] = []
        """Called with each snapshot of this node's ranks that peers may have, on a thread that may
        block. The flag is True if peers must have it whatever their rule says."""

    # --- generations ------------------------------------------------------------------------
    def expect(
        self,
        generation: int,
        topology: Topology,
        table: StateTable,
        start_step: int | None = None,
        cohort: Cohort | None = None,
        restore_key: str | None = None,
        is_from_store: bool = True,
    ) -> None:
        """Begin a generation, from the state after `start_step` where that is said: then snapshots
        of later steps are given up. cohort: the movers that take part, where there are several;
        asked again of the same generation, the newest list counts. restore_key: what only memory
        holds of what another mover chose. is_from_store: as in `record_start`. Raises FencedError
        for a generation that is not newer than the present."""
        if start_step is not None:
            record_start(self._store, generation, start_step, is_from_store)
        extent = choose_extent_bytes(
            self._settings.extent_bytes, sum(spec.nbytes for spec in table)
        )
        about = self._settings.config_hash, self._settings.dataset_version
        has_record = newest_generation(self._store) >= generation
        context = SaveContext(generation, topology, table, *about, extent, has_record)
        with self._change:
            present = self._context
            if present is not None and generation <= present.generation:
                if (present.generation, present.topology) != (generation, topology):
                    raise FencedError(f"generation {present.generation} has begun already")
                self.commit_protocol.begin_generation(present, cohort)
                return  # asked again: the first answer was lost, or a mover was replaced
            self._context = context
            self._change.notify_all()
            self._arena_pool.begin_generation()
            self._handed_over_at, self._incomplete_steps = {}, set()
        self.save_tracker.wake_event_waiters()
        leads = cohort is None or cohort.leader_peer is None
        fenced = None
        if leads and restore_key is None and start_step is not None:  # the workers have the state
            fenced = self._save_manager.restart_fenced_save(start_step)
        _drop_left_behind(self.snapshot_store, generation, start_step)
        ours = None if cohort is None else cohort.own_ranks(topology.nodes)
        self.snapshot_store.open_generation(generation, topology, table, ours)
        self._save_manager.begin_generation(self._require(generation), start_step, cohort)
        self._restore_search.make_durable(generation, start_step, restore_key)
        if fenced is not None:
            get_commit = partial(self._restore_search.resolve_commit, commit_key(*fenced))
            self._save_manager.promote(generation, fenced, get_commit)

    @property
    def is_leader(self) -> bool:
        """True if this mover commits, and no other."""
        return self.commit_protocol.is_leader

    @property
    def commit_protocol(self) -> CommitProtocol:
        return self._save_manager.commit_protocol

    # --- arenas -----------------------------------------------------------------------------
    def get_arena(
        self,
        generation: int,
        rank: int,
        blob_bytes: int,
        slots: int,
        process: int | None = None,
        let_go: bool = False,
        patience: float = 0.0,
        numa_node: int | None = None,
    ) -> int:
        """As `ArenaPool.get`. patience: seconds that the agent may still need to announce
        `generation`; its workers learn of it at the same time."""
        with self._change:
            self._change.wait_for(lambda: self._served_generation >= generation, patience)
        return self._arena_pool.get(
            generation, rank, blob_bytes, slots, process, let_go, numa_node=numa_node
        )

    def set_in_use_keys(self, keys: Callable[[], Collection[str]]) -> None:
        """Checkpoints that retention leaves alone for now, asked each time."""
        self._save_manager.cleaner.in_use_keys = keys

    def wait_for_free_slot(self, generation: int, rank: int, wait: float) -> bool:
        """Return True if a slot of the rank became free in time."""
        self._require(generation)
        return self._arena_pool.wait_for_free_slot(rank, wait)

    # --- snapshots --------------------------------------------------------------------------
    def accept_capture(
        self,
        generation: int,
        rank: int,
        step: int,
        slot: int,
        sequence: int,
        meta: Mapping[str, Json],
        durable: bool = True,
        copied: bool | None = None,
        uploaded: bool = True,
    ) -> None:
        """Take over a snapshot: hash and shelve it in the background, and save it if it is to be
        durable; asked again, do nothing more. copied, uploaded: as in
        `policy.saving.destinations.SaveDestinations`.

        Raises CorruptError when the slot does not hold what the request says. Nothing is done to
        the slot then: a request that was held up must not give back what has come after it.
        """
        with self._change:
            plan = self._require(generation)
            found = self._arena_pool.ranks.get(rank)
            if found is None:
                raise HoldfastError(f"rank {rank} has no arena")
            due = SlotHeader(
                identity_digest(self._settings.run),
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
            if durable:
                self._save_manager.add_pending((generation, step))
                if not uploaded:
                    _add_bounded(self._not_to_upload, (generation, step))
        for older in skipped:
            self.snapshot_store.drop(generation, older)
            self._save_manager.on_rank_skipped((generation, older))
        writing = PendingBlob(found.memory, slot, due, rank) if durable else None
        capture = _Capture(
            plan,
            found,
            rank,
            slot,
            due,
            dict(meta),
            SaveDestinations(durable, copied, uploaded),
            writing,
        )
        self._hash_threads.submit(self._hash_and_store, capture)
        if writing is not None:
            self._save_manager.submit(plan, writing)

    def steps_being_written(self, generation: int) -> list[int]:
        """The steps of a generation that are being made durable here."""
        with self._change:
            return [step for g, step in self._save_manager.pending_parts.saves() if g == generation]

    def should_upload(self, key: str) -> bool:
        """Return True if a committed checkpoint goes into the bucket too. Called once for each."""
        step, generation = parse_commit_key(key) or (0, 0)
        with self._change:
            kept_back = (generation, step) in self._not_to_upload
            self._not_to_upload.discard((generation, step))
        return not kept_back

    def accept_skip(self, generation: int, rank: int, step: int, reason: str) -> None:
        """Fail a step that a rank did not capture, so that no other rank's slot waits for it."""
        with self._change:
            self._require(generation)
        names_rank = reason.startswith(f"rank {rank} ")
        words = reason if names_rank else f"rank {rank}: {reason}"
        self.save_tracker.record_failure((generation, step), words)
        self._give_up_step(generation, step)

    def report_orphaned_saves(self, generation: int, rank: int, steps: Sequence[int]) -> None:
        """Resolve saves that the previous mover had accepted from a rank before it died, and wake
        their waiters."""
        with self._change:
            self._require(generation)
        for step in steps:
            self._save_manager.resolve_orphaned_save((generation, step), rank)

    # --- questions --------------------------------------------------------------------------
    def drain(self, wait: float, durable: bool = True) -> bool:
        """Wait for the end of what is under way; whether all has ended. Without `durable`, a save
        whose step is complete in memory is not waited for: nothing is lost with it."""

        def ended() -> bool:
            # generation -> step
            newest = dict(reversed(self.snapshot_store.complete_steps(own_ranks_only=True)))
            waiting = [
                save
                for save in self._save_manager.pending_parts.saves()
                if durable or save[1] > newest.get(save[0], -1)
            ]
            return not self._hashing_count and not waiting

        with self._change:
            return self._change.wait_for(ended, wait)

    def find_restore_point(
        self, generation: int, drain: float, tried: Mapping[str, str] | None = None
    ) -> RestorePoint:
        """Choose what `generation`, which has been opened, begins from; list what was passed over.

        First waits up to `drain` seconds for what is under way. tried: keys that readers found
        corrupt, and why. Raises CheckpointError when there are candidates but none can be trusted.
        """
        self.drain(drain, durable=False)
        return self._restore_search.find(generation, tried or {})

    def rejected_keys(self) -> tuple[str, ...]:
        """Keys of the checkpoints that were passed over."""
        return tuple(self._save_manager.cleaner.rejected_keys)

    def find_damage(self, generation: int, key: str) -> str | None:
        """Return why the checkpoint cannot be restored, or None; every byte of it is read."""
        self._require(generation)
        return self._restore_search.find_damage(key)

    def holdings(self, generation: int, key: str) -> tuple[HoldingsReply, list[int]]:
        """Return the commit object `key`, its blobs in this mover's memory, and the descriptors of
        their memory files. The caller closes these. Raises as the store does."""
        self._require(generation)
        commit = self._restore_search.resolve_commit(key)
        blobs, fds = collect_mapped_blobs(self.snapshot_store, commit)
        missing = {writer.blob.key for writer in commit.writers} - {blob.key for blob in blobs}
        peers = self.locate_on_peers(missing) if missing else ()
        return HoldingsReply(commit.to_bytes().decode(), blobs, peers), fds

    def holders(self, generation: int, keys: Sequence[str]) -> tuple[BlobHolder, ...]:
        """Return the peers whose memory has these blobs, as `peers` of `holdings` does. It includes
        blobs held here, for a caller that found those corrupt."""
        self._require(generation)
        return self.locate_on_peers(frozenset(keys))

    def status(self, peers: JsonObject | None = None) -> StatusReply:
        with self._change:
            arenas = self._arena_pool.status()
            generation = self._served_generation
        memory = list(self.snapshot_store.complete_steps())
        return StatusReply(generation, arenas, self.save_tracker.counts(), memory, peers)

    def close(self) -> None:
        """Finish what is being saved and stop."""
        self._hash_threads.shutdown(wait=True)
        self._save_manager.close()

    # --- the generation, and its captures ---------------------------------------------------
    def _notify(self) -> None:
        with self._change:
            self._change.notify_all()

    @property
    def _served_generation(self) -> int:
        return 0 if self._context is None else self._context.generation

    def _require(self, generation: int) -> SaveContext:
        """Return the context of a generation. Raises FencedError when another one is served, and
        HoldfastError before the first."""
        plan = self._context
        if plan is None:
            raise HoldfastError("no generation has begun: the agent sends `expect` first")
        if generation != plan.generation:
            raise FencedError(
                f"generation {plan.generation} is served, the request is of {generation}"
            )
        return plan

    def _give_up_step(self, generation: int, step: int) -> None:
        with self._change:
            _add_bounded(self._incomplete_steps, step)
        self.snapshot_store.drop(generation, step)

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
        plan, owner, due = capture.context, capture.rank_arena, capture.expected_header
        head_bytes, slot = len(owner.blob_header), capture.slot
        try:
            with owner.arena.reading(slot, due) as data:
                part = seal_part(
                    plan, due.step, capture.rank, data, head_bytes, owner.tensors, capture.meta
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
                self.save_tracker.warn(f"step {due.step} of rank {capture.rank}: {error}")
            self._give_up_step(plan.generation, due.step)
        else:
            if complete:
                self._on_step_complete(plan, due.step)
            if capture.pending_blob is not None:
                capture.pending_blob.set_sealed(snapshot)
            for listener in (
                self.snapshot_listeners if capture.destinations.to_peers is not False else ()
            ):
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
            self._require(part.generation)
            late = part.step in self._incomplete_steps
            late = late or part.rank not in self._handed_over_at.get(part.step, {})
            complete = self.snapshot_store.put(snapshot, pin_slot=is_durable)
        if late:  # another rank skipped the step: it is of no use in memory
            self.snapshot_store.drop(part.generation, part.step)
        return complete and not late

    def _on_step_complete(self, context: SaveContext, step: int) -> None:
        """Every rank's snapshot of a step is in memory."""
        with self._change:
            handed = self._handed_over_at.get(step, {}).values()
            seconds = self._clock() - min(handed, default=self._clock())
        nbytes = sum(
            h.nbytes for h in self.snapshot_store.inventory() if h[:2] == (context.generation, step)
        )
        self.save_tracker.emit(SnapshotComplete(nbytes, seconds, step=step))
        verified = self._restore_search.step_read_from_store
        if verified is not None:
            # All ranks have read and checked it.
            self._save_manager.cleaner.verified_steps.add(verified)


def _drop_left_behind(
    snapshot_store: SnapshotStore, generation: int, start_step: int | None
) -> None:
    """Drop what older generations hold of steps that are later than the start of a new one, or
    incomplete."""
    complete = set(snapshot_store.complete_steps(own_ranks_only=True))

    def gone(older: int, step: int) -> bool:
        """Return True for an incomplete step, unless other nodes hold the rest of the starting
        state."""
        late = start_step is not None and step > start_step
        return older < generation and (
            late or ((older, step) not in complete and step != start_step)
        )

    snapshot_store.drop_where(gone)
