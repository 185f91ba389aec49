"""The mover's work, apart from listening: arenas, snapshots, saves and their outcomes.

One `Service` lives in one mover process. It serves one generation at a time: it refuses a request
of an older one, and `expect` of a newer one begins that. Hashing and saving run on their own
threads. So no answer waits for a disk, and no snapshot in memory for a save.

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

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from holdfast.checkpoint.format.save_context import SaveContext, choose_extent_bytes
from holdfast.checkpoint.memory.snapshot_store import SnapshotStore
from holdfast.checkpoint.mover.capture_intake import CaptureIntake
from holdfast.checkpoint.mover.messages import HoldingsReply, RestorePoint, StatusReply
from holdfast.checkpoint.mover.restore_search import RestoreSearch, collect_mapped_blobs
from holdfast.checkpoint.mover.served_generation import ServedGeneration
from holdfast.checkpoint.peers.config import Cohort
from holdfast.checkpoint.peers.source import BlobHolder
from holdfast.checkpoint.restore.fallback_store import LazyStore
from holdfast.checkpoint.restore.sources import MemorySource, SnapshotStoreSource
from holdfast.checkpoint.restore.start_records import record_start
from holdfast.checkpoint.save import retention
from holdfast.checkpoint.save.commit_protocol import CommitProtocol
from holdfast.checkpoint.save.save_manager import SaveManager
from holdfast.checkpoint.save.save_tracker import SaveTracker
from holdfast.core.json_parsing import Json, JsonObject
from holdfast.core.sharding.state_table import StateTable
from holdfast.layout import Topology
from holdfast.policy.saving.destinations import SaveDestinations
from holdfast.wire.store.location import open_store
from holdfast.wire.store.run_store import RunStore


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


class MoverService:
    """The mover's state machine. Every public method is one verb and is safe to call from any
    thread; `generation` is the caller's."""

    def __init__(
        self, store: RunStore, settings: MoverSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.save_tracker = SaveTracker(clock)
        self._served = ServedGeneration()
        self.snapshot_store = SnapshotStore(self._served.notify)
        self.memories: list[MemorySource] = [SnapshotStoreSource(self.snapshot_store)]
        """Memories that a restart searches for snapshots; peers are appended."""
        self.locate_on_peers: Callable[[Collection[str]], tuple[BlobHolder, ...]] = lambda keys: ()
        """Return which blobs peers have in memory (`PeerMemories.locate_blobs`)."""
        self._store = store
        self._settings = settings
        self._change = self._served.change
        self._save_manager = SaveManager(
            store,
            self.snapshot_store,
            self.save_tracker,
            self._change,
            retention.RetentionRules(settings.keep_last, settings.keep_every),
            self.memories,
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
        self._capture_intake = CaptureIntake(
            settings.run,
            self._served,
            self.snapshot_store,
            self._save_manager,
            self.save_tracker,
            self._restore_search,
            clock,
        )
        self._arena_pool = self._capture_intake.arena_pool
        self.snapshot_listeners = self._capture_intake.listeners
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
        context = SaveContext(generation, topology, table, *about, extent)
        with self._change:
            present = self._served.begin(context)
            if present is not context:
                self._save_manager.commit_protocol.begin_generation(present, cohort)
                return  # asked again: the first answer was lost, or a mover was replaced
            self._capture_intake.begin_generation()
        self.save_tracker.wake_event_waiters()
        _drop_left_behind(self.snapshot_store, generation, start_step)
        ours = None if cohort is None else cohort.own_ranks(topology.nodes)
        self.snapshot_store.open_generation(generation, topology, table, ours)
        self._save_manager.begin_generation(self._served.require(generation), start_step, cohort)
        self._restore_search.make_durable(generation, start_step, restore_key)

    @property
    def is_leader(self) -> bool:
        """True if this mover commits, and no other."""
        return self._save_manager.commit_protocol.is_leader

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
            self._change.wait_for(lambda: self._served.has_begun(generation), patience)
        return self._arena_pool.get(
            generation, rank, blob_bytes, slots, process, let_go, numa_node=numa_node
        )

    def set_in_use_keys(self, keys: Callable[[], Collection[str]]) -> None:
        """Checkpoints that retention leaves alone for now, asked each time."""
        self._save_manager.cleaner.in_use_keys = keys

    def wait_for_free_slot(self, generation: int, rank: int, wait: float) -> bool:
        """Return True if a slot of the rank became free in time."""
        self._served.require(generation)
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
        self._capture_intake.accept(
            generation,
            rank,
            step,
            slot,
            sequence,
            meta,
            SaveDestinations(durable, copied, uploaded),
        )

    def steps_being_written(self, generation: int) -> list[int]:
        """The steps of a generation that are being made durable here."""
        with self._change:
            return [step for g, step in self._save_manager.pending_parts.saves() if g == generation]

    def should_upload(self, key: str) -> bool:
        """Return True if a committed checkpoint goes into the bucket too. Called once for each."""
        return self._capture_intake.should_upload(key)

    def accept_skip(self, generation: int, rank: int, step: int, reason: str) -> None:
        """Fail a step that a rank did not capture, so that no other rank's slot waits for it."""
        with self._change:
            self._served.require(generation)
        names_rank = reason.startswith(f"rank {rank} ")
        words = reason if names_rank else f"rank {rank}: {reason}"
        self.save_tracker.record_failure((generation, step), words)
        self._capture_intake.give_up_step(generation, step)

    def report_orphaned_saves(self, generation: int, rank: int, steps: Sequence[int]) -> None:
        """Resolve saves that the previous mover had accepted from a rank before it died, and wake
        their waiters."""
        with self._change:
            self._served.require(generation)
        for step in steps:
            self._save_manager.resolve_orphaned_save((generation, step), rank)

    # --- questions --------------------------------------------------------------------------
    def drain(self, wait: float, durable: bool = True) -> bool:
        """Wait for the end of what is under way; whether all has ended. Without `durable`, a save
        whose step is complete in memory is not waited for: nothing is lost with it."""
        return self._capture_intake.drain(wait, durable)

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
        self._served.require(generation)
        return self._restore_search.find_damage(key)

    def holdings(self, generation: int, key: str) -> tuple[HoldingsReply, list[int]]:
        """Return the commit object `key`, its blobs in this mover's memory, and the descriptors of
        their memory files. The caller closes these. Raises as the store does."""
        self._served.require(generation)
        commit = self._restore_search.resolve_commit(key)
        blobs, fds = collect_mapped_blobs(self.snapshot_store, commit)
        missing = {writer.blob.key for writer in commit.writers} - {blob.key for blob in blobs}
        peers = self.locate_on_peers(missing) if missing else ()
        return HoldingsReply(commit.to_bytes().decode(), blobs, peers), fds

    def holders(self, generation: int, keys: Sequence[str]) -> tuple[BlobHolder, ...]:
        """Return the peers whose memory has these blobs, as `peers` of `holdings` does. It includes
        blobs held here, for a caller that found those corrupt."""
        self._served.require(generation)
        return self.locate_on_peers(frozenset(keys))

    def status(self, peers: JsonObject | None = None) -> StatusReply:
        with self._change:
            arenas = self._arena_pool.status()
            generation = self._served.context.generation if self._served.context else 0
        memory = list(self.snapshot_store.complete_steps())
        return StatusReply(generation, arenas, self.save_tracker.counts(), memory, peers)

    def close(self) -> None:
        """Finish what is being saved and stop."""
        self._capture_intake.close()
        self._save_manager.close()


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
