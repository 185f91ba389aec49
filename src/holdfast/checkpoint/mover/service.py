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

import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from holdfast.checkpoint.format.blob import total_size
from holdfast.checkpoint.format.save_context import Plan, fitting_extent
from holdfast.checkpoint.memory.arena import SlotHeader, digest
from holdfast.checkpoint.memory.arena_pool import Arenas, RankArena
from holdfast.checkpoint.memory.snapshot_store import Shelf, Snapshot, header_to_json
from holdfast.checkpoint.peers.config import Cohort
from holdfast.checkpoint.restore import catalog, verify
from holdfast.checkpoint.restore.fallback_store import Second
from holdfast.checkpoint.restore.restore_point import Choice, Chooser, commit_of
from holdfast.checkpoint.restore.sources import MemorySource, ShelfSource
from holdfast.checkpoint.restore.start_records import note_start
from holdfast.checkpoint.save import retention
from holdfast.checkpoint.save.commit_protocol import Together
from holdfast.checkpoint.save.pending_blob import Writing
from holdfast.checkpoint.save.save_manager import Saves
from holdfast.checkpoint.save.save_tracker import SAVES_KEPT, Outcomes, Save
from holdfast.checkpoint.save.writer import seal_part
from holdfast.core.format.manifest import Commit, parse_commit_key
from holdfast.core.sharding.state_table import StateTable
from holdfast.errors import CorruptError, FencedError, HoldfastError
from holdfast.events import CheckpointRejected, SnapshotComplete, SnapshotDropped, SourceRejected
from holdfast.layout import Topology
from holdfast.policy.saving.destinations import Into
from holdfast.wire.store.location import open_store
from holdfast.wire.store.run_store import MissingKeyError, RunStore

HASH_THREADS = 2
DESCRIPTORS = 200
"""Descriptors that one answer may carry; the kernel allows 253."""


_Ordered = TypeVar("_Ordered", int, Save)


def _add(known: set[_Ordered], new: _Ordered) -> None:
    """Add one; if there are too many, drop the oldest: it ended long ago and was never
    requested."""
    known.add(new)
    if len(known) > SAVES_KEPT:
        known.remove(min(known))


@dataclass(frozen=True)
class Settings:
    """A mover's settings, given once at its start."""

    run: str
    config_hash: str
    dataset_version: str
    keep_last: int = 3
    keep_every: int = 0
    extent_bytes: int = 16 * 2**20
    bucket: str = ""  # location; "": no tier 3
    bucket_keep_last: int = 3


@dataclass(frozen=True)
class _Capture:
    """A capture that a rank handed over."""

    plan: Plan
    owner: RankArena
    rank: int
    slot: int
    due: SlotHeader
    meta: dict[str, Any]
    into: Into
    writing: Writing | None  # its blob; None: it stays in memory


class Service:
    """The mover's state machine. Every public method is one verb and is safe to call from any
    thread; `generation` is the caller's."""

    def __init__(
        self, store: RunStore, settings: Settings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.outcomes = Outcomes(clock)
        self.shelf = Shelf(self._slots_came_free)
        self.memories: list[MemorySource] = [ShelfSource(self.shelf)]
        """Memories that a restart searches for snapshots; peers are appended."""
        self.shelved: list[Callable[[Snapshot, bool], None]] = []
        """Called with each snapshot of this node's ranks that peers may have, on a thread that may
        block. The flag is True if peers must have it whatever their rule says."""
        self.elsewhere: Callable[[Collection[str]], list[dict[str, Any]]] = lambda keys: []
        """Return which blobs peers have in memory, as JSON (`PeerMemories.holders`)."""
        self._store = store
        self._settings = settings
        self._second = Second(lambda: open_store(settings.bucket)) if settings.bucket else None
        self._clock = clock
        self._change = threading.Condition()
        self._plan: Plan | None = None
        self._arenas = Arenas(
            self.shelf, self._change, self._current, lambda: self._hashing + self._reading > 0,
            lambda step, why: self.outcomes.add(SnapshotDropped(why, step=step)),
        )  # fmt: skip
        self._handed: dict[int, dict[int, float]] = {}  # step -> rank -> when it was handed over
        self._given_up: set[int] = set()  # steps of this generation that lack a rank for good
        self._kept_back: set[Save] = set()  # what does not go into the bucket
        self._choice: Choice | None = None
        self._chosen_for = 0  # the generation that it was made for
        self._told: Commit | None = None  # what another mover chose
        self._looking = threading.Lock()
        self._hashing = 0
        self._reading = 0  # slots of captures that failed, while a disk may still read them
        self._hashers = ThreadPoolExecutor(HASH_THREADS, "hash")
        self._saves = Saves(
            store, self.shelf, self.outcomes, self._change,
            retention.Keep(settings.keep_last, settings.keep_every), self.memories,
        )  # fmt: skip

    # --- generations ------------------------------------------------------------------------
    def expect(
        self, generation: int, topology: Topology, table: StateTable, start: int | None = None,
        cohort: Cohort | None = None, begun: str | None = None, stored: bool = True,
    ) -> None:  # fmt: skip
        """Begin a generation, from the state after `start` where that is said: then snapshots of
        later steps are given up. cohort: the movers that take part, where there are several; asked
        again of the same generation, the newest list counts. begun: what only memory holds of what
        another mover chose. stored: as in `note_start`. Raises FencedError for a generation that
        is not newer than the present."""
        if start is not None:
            note_start(self._store, generation, start, stored)
        with self._change:
            if self._plan is not None and generation <= self._plan.generation:
                if self._plan.generation == generation and self._plan.topology == topology:
                    self._saves.together.begin(self._plan, cohort)
                    return  # asked again: the first answer was lost, or a mover was replaced
                raise FencedError(f"generation {self._plan.generation} has begun already")
            extent = fitting_extent(self._settings.extent_bytes, sum(spec.nbytes for spec in table))
            self._plan = Plan(
                generation, topology, table, self._settings.config_hash,
                self._settings.dataset_version, extent,
            )  # fmt: skip
            self._arenas.begin()
            self._handed, self._given_up = {}, set()
            self._change.notify_all()
        self.outcomes.wake()
        complete = set(self.shelf.complete(ours=True))

        def gone(older: int, step: int) -> bool:
            """Return True for an incomplete step, unless other nodes hold the rest of the starting
            state."""
            late = start is not None and step > start
            return older < generation and (
                late or ((older, step) not in complete and step != start)
            )

        self.shelf.drop_where(gone)
        ours = None if cohort is None else cohort.ranks(topology.nodes)
        self.shelf.open(generation, topology, table, ours)
        self._saves.begin(self._current(generation), start, cohort)
        self._make_durable(generation, start, begun)

    def _make_durable(self, generation: int, start: int | None, begun: str | None) -> None:
        """Return a generation's starting state if only memory holds it: chosen here, or `begun`."""
        choice = self._choice if self._chosen_for == generation else None
        if choice is not None and not choice.durable and choice.commit.step == start:
            begun = choice.key
        at = parse_commit_key(begun or "")
        if begun is None or at is None or at[0] != start:
            return
        if self._saves.together.leads:
            self._saves.promote(generation, (at[1], at[0]), partial(self._commit_of, begun))
        elif choice is not None:  # the leader promotes it; wait for its result
            self._saves.await_promotion((at[1], at[0]))

    @property
    def leads(self) -> bool:
        """True if this mover commits, and no other."""
        return self._saves.together.leads

    @property
    def together(self) -> Together:
        return self._saves.together

    def _begun(self, generation: int) -> bool:
        """Return True if the generation, or a newer one, is served."""
        return self._plan is not None and self._plan.generation >= generation

    def _current(self, generation: int) -> Plan:
        plan = self._plan
        if plan is None:
            raise HoldfastError("no generation has begun: the agent sends `expect` first")
        if generation != plan.generation:
            raise FencedError(
                f"generation {plan.generation} is served, the request is of {generation}"
            )
        return plan

    # --- arenas -----------------------------------------------------------------------------
    def arena(
        self, generation: int, rank: int, blob_bytes: int, slots: int,
        process: int | None = None, let_go: bool = False, patience: float = 0.0,
    ) -> int:  # fmt: skip
        """As `Arenas.get`. patience: seconds that the agent may still need to announce
        `generation`; its workers learn of it at the same time."""
        with self._change:
            self._change.wait_for(lambda: self._begun(generation), patience)
        return self._arenas.get(generation, rank, blob_bytes, slots, process, let_go)

    def spare(self, keys: Callable[[], Collection[str]]) -> None:
        """Checkpoints that retention leaves alone for now, asked each time."""
        self._saves.spared = keys

    def wait_free(self, generation: int, rank: int, wait: float) -> bool:
        """Return True if a slot of the rank became free in time."""
        self._current(generation)
        with self._change:
            found = self._arenas.ranks.get(rank)
            if found is None:
                return False
            arena = found.arena
            return self._change.wait_for(lambda: arena.free_slot() is not None, wait)

    def _slots_came_free(self) -> None:
        with self._change:
            self._change.notify_all()

    # --- snapshots --------------------------------------------------------------------------
    def captured(
        self,
        generation: int,
        rank: int,
        step: int,
        slot: int,
        sequence: int,
        meta: Mapping[str, Any],
        durable: bool = True,
        copied: bool | None = None,
        uploaded: bool = True,
    ) -> None:
        """Take over a snapshot: hash and shelve it in the background, and save it if it is to be
        durable; asked again, do nothing more. copied, uploaded: as in
        `policy.saving.destinations.Into`.

        Raises CorruptError when the slot does not hold what the request says. Nothing is done to
        the slot then: a request that was held up must not give back what has come after it.
        """
        with self._change:
            plan = self._current(generation)
            found = self._arenas.ranks.get(rank)
            if found is None:
                raise HoldfastError(f"rank {rank} has no arena")
            due = SlotHeader(
                digest(self._settings.run), generation, step, sequence,
                total_size(found.head, found.tensors), digest(found.head),
            )  # fmt: skip
            if found.arena.header(slot) != due:
                raise CorruptError(f"slot {slot} of rank {rank} does not hold step {step}")
            if found.taken.get(slot) == sequence or not found.arena.held(slot):
                return  # its first answer was lost on the way
            found.taken[slot] = sequence
            skipped = self._note(rank, step)
            self._hashing += 1
            if durable:
                self._saves.expect((generation, step))
                if not uploaded:
                    _add(self._kept_back, (generation, step))
        for older in skipped:
            self.shelf.drop(generation, older)
            self._saves.skipped((generation, older))
        into = Into(durable, copied, uploaded)
        writing = Writing(found.memory, slot, due, rank) if durable else None
        capture = _Capture(plan, found, rank, slot, due, dict(meta), into, writing)
        self._hashers.submit(self._shelve, capture)
        if writing is not None:
            self._saves.submit(plan, writing)

    def writing(self, generation: int) -> list[int]:
        """The steps of a generation that are being made durable here."""
        with self._change:
            return [step for g, step in self._saves.pending if g == generation]

    def uploads(self, key: str) -> bool:
        """Return True if a committed checkpoint goes into the bucket too. Called once for each."""
        step, generation = parse_commit_key(key) or (0, 0)
        with self._change:
            kept_back = (generation, step) in self._kept_back
            self._kept_back.discard((generation, step))
        return not kept_back

    def skipped(self, generation: int, rank: int, step: int, reason: str) -> None:
        """Fail a step that a rank did not capture, so that no other rank's slot waits for it."""
        with self._change:
            self._current(generation)
        self.outcomes.fail((generation, step), f"rank {rank}: {reason}")
        self._give_up(generation, step)

    def unheard(self, generation: int, rank: int, steps: Sequence[int]) -> None:
        """Resolve saves that the previous mover had accepted from a rank before it died, and wake
        their waiters."""
        with self._change:
            self._current(generation)
        for step in steps:
            self._saves.unheard((generation, step), rank)

    def _give_up(self, generation: int, step: int) -> None:
        with self._change:
            _add(self._given_up, step)
        self.shelf.drop(generation, step)

    def _note(self, rank: int, step: int) -> list[int]:
        """Note that a rank handed over a step; return the older steps that can no longer be
        complete in memory. Each rank hands its steps over in order, so it has skipped those."""
        self._handed.setdefault(step, {})[rank] = self._clock()
        skipped = [s for s, ranks in self._handed.items() if s < step and rank not in ranks]
        for older in skipped:
            self._handed[older] = {}  # whatever is still being hashed of it comes too late
        for old in sorted(self._handed)[:-8]:
            del self._handed[old]
        return skipped

    def _shelve(self, capture: _Capture) -> None:
        """One rank's snapshot, on a thread of its own; every failure becomes an outcome."""
        plan, owner, slot, due = capture.plan, capture.owner, capture.slot, capture.due
        try:
            with owner.arena.reading(slot, due) as data:
                part = seal_part(
                    plan, due.step, capture.rank, data, len(owner.head), owner.tensors,
                    capture.meta,
                )  # fmt: skip
            snapshot = Snapshot(part, part.to_bytes(), owner.memory, slot, due)
            complete = self._put(snapshot, capture.writing is not None)
        except Exception as error:  # a failed save never stops training
            with self._change:
                self._reading += 1
            if capture.writing is not None:
                capture.writing.give_up(error, partial(self._release, capture))
            else:
                self._release(capture)
            if capture.writing is None and not isinstance(error, FencedError):
                self.outcomes.warn(f"step {due.step} of rank {capture.rank}: {error}")
            self._give_up(plan.generation, due.step)
        else:
            if complete:
                self._complete(plan, due.step)
            if capture.writing is not None:
                capture.writing.sealed(snapshot)
            for listener in self.shelved if capture.into.copied is not False else ():
                listener(snapshot, bool(capture.into.copied))
        finally:
            with self._change:
                self._hashing -= 1
                self._change.notify_all()

    def _release(self, capture: _Capture) -> None:
        """Give back the slot of a capture that was not shelved."""
        if capture.owner.arena.header(capture.slot) in (capture.due, None):  # else a newer one's
            capture.owner.arena.release(capture.slot)
        with self._change:
            self._reading -= 1
            self._change.notify_all()

    def _put(self, snapshot: Snapshot, durable: bool) -> bool:
        """Shelve; whether the step is complete. Raises FencedError when its generation is over:
        what the next one begins from has been chosen."""
        part = snapshot.part
        with self._change:
            self._current(part.generation)
            late = part.step in self._given_up
            late = late or part.rank not in self._handed.get(part.step, {})
            complete = self.shelf.put(snapshot, pinned=durable)
        if late:  # another rank skipped the step: it is of no use in memory
            self.shelf.drop(part.generation, part.step)
        return complete and not late

    def _complete(self, plan: Plan, step: int) -> None:
        """Every rank's snapshot of a step is in memory."""
        with self._change:
            handed = self._handed.get(step, {}).values()
            seconds = self._clock() - min(handed, default=self._clock())
        nbytes = sum(h.bytes for h in self.shelf.inventory() if h[:2] == (plan.generation, step))
        self.outcomes.add(SnapshotComplete(nbytes, seconds, step=step))
        choice = self._choice
        if choice is not None and choice.durable and not choice.memory:
            self._saves.verified.add(choice.commit.step)  # all ranks have read and checked it

    # --- questions --------------------------------------------------------------------------
    def drain(self, wait: float, durable: bool = True) -> bool:
        """Wait for the end of what is under way; whether all has ended. Without `durable`, a save
        whose step is complete in memory is not waited for: nothing is lost with it."""

        def ended() -> bool:
            newest = dict(reversed(self.shelf.complete(ours=True)))  # generation -> step
            waiting = [
                save for save in self._saves.pending
                if durable or save[1] > newest.get(save[0], -1)
            ]  # fmt: skip
            return not self._hashing and not waiting

        with self._change:
            return self._change.wait_for(ended, wait)

    def newest(
        self, generation: int, drain: float, tried: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Choose what `generation`, which has been opened, begins from; list what was passed over.

        First waits up to `drain` seconds for what is under way. tried: keys that readers found
        corrupt, and why. Raises CheckpointError when there are candidates but none can be trusted.
        """
        self.drain(drain, durable=False)
        rejected: list[tuple[str, str]] = []

        def reject(key: str, reason: str) -> None:
            rejected.append((key, reason))
            if key not in self._saves.rejected:
                self._saves.rejected[key] = reason
                event = CheckpointRejected(key, reason, step=catalog.step_of(key))
                self.outcomes.add(event)

        tried = tried or {}
        self._saves.rejected |= tried  # the reader that found it has reported it
        for key, reason in tried.items():
            rejected.append((key, reason))
            if position := parse_commit_key(key):
                self.shelf.drop(position[1], position[0])
        begun = self._clock()
        chooser = Chooser(
            self._store, self.memories, generation, self._settings.config_hash,
            self._settings.dataset_version, reject, self._second,
            lambda key, reason: self.outcomes.add(
                SourceRejected(-1, "run store", key, reason, step=catalog.step_of(key))
            ),
        )  # fmt: skip
        self._choice = choice = chooser.newest(tried)
        self._chosen_for = generation
        answer: dict[str, Any] = {"key": None, "step": 0, "generation": 0, "meta": {}}
        if choice is not None:
            commit = choice.commit
            answer = {
                "key": commit.key, "step": commit.step, "generation": commit.generation,
                "meta": dict(commit.meta), "durable": choice.durable,
            }  # fmt: skip
        return answer | {"rejected": rejected, "seconds": self._clock() - begun}

    def rejected(self) -> tuple[str, ...]:
        """Keys of the checkpoints that were passed over."""
        return tuple(self._saves.rejected)

    def damage(self, generation: int, key: str) -> str | None:
        """Return why the checkpoint cannot be restored, or None; every byte of it is read."""
        self._current(generation)
        problem = verify.damage(self._store, key)
        if problem is not None and self._second is not None:
            with suppress(HoldfastError):  # the folder's problem is what is said
                return verify.damage(self._second.store, key) and problem
        return problem

    def holdings(self, generation: int, key: str) -> tuple[dict[str, Any], list[int]]:
        """Return the commit object `key`, its blobs in this mover's memory, and the descriptors of
        their memory files. The caller closes these. Raises as the store does."""
        self._current(generation)
        commit = self._commit_of(key)
        files: dict[int, int] = {}  # id of the memory file -> its place among the descriptors
        fds: list[int] = []
        held: list[dict[str, Any]] = []
        for writer in commit.writers:
            with suppress(MissingKeyError):
                found = self.shelf.get(commit.generation, commit.step, writer.rank)
                if found.part.blob == writer.blob:
                    if id(found.memory) not in files and len(fds) < DESCRIPTORS:
                        files[id(found.memory)] = len(fds)
                        fds.append(os.dup(found.memory.fd))
                    if id(found.memory) in files:
                        held.append({
                            "key": writer.blob.key, "file": files[id(found.memory)],
                            "slot": found.slot, "header": header_to_json(found.header),
                        })  # fmt: skip
        missing = {writer.blob.key for writer in commit.writers} - {h["key"] for h in held}
        peers = self.elsewhere(missing) if missing else []
        return {"commit": commit.to_bytes().decode(), "held": held, "peers": peers}, fds

    def holders(self, generation: int, keys: Sequence[str]) -> list[dict[str, Any]]:
        """Return the peers whose memory has these blobs, as `peers` of `holdings` does. It includes
        blobs held here, for a caller that found those corrupt."""
        self._current(generation)
        return self.elsewhere(frozenset(keys))

    def _commit_of(self, key: str) -> Commit:
        """Return the starting state by its key: chosen here, or by another node's mover."""
        choice = self._choice
        if choice is not None and choice.key == key:
            return choice.commit
        with self._looking:  # every worker of the node asks
            if self._told is None or self._told.key != key:
                about = self._settings.config_hash, self._settings.dataset_version
                self._told = commit_of(self._store, self.memories, key, *about)
            return self._told

    def status(self) -> dict[str, Any]:
        with self._change:
            arenas = {
                str(rank): {
                    "slots": r.arena.slots,
                    "bytes": r.memory.nbytes,
                    "held": [s for s in range(r.arena.slots) if r.arena.held(s)],
                }
                for rank, r in sorted(self._arenas.ranks.items())
            }
            generation = self._plan.generation if self._plan else 0
        return {
            "generation": generation, "arenas": arenas, "saves": self.outcomes.counts(),
            "memory": self.shelf.complete(),
        }  # fmt: skip

    def close(self) -> None:
        """Finish what is being saved and stop."""
        self._hashers.shutdown(wait=True)
        self._saves.close()
