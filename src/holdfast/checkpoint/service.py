"""What the mover does, apart from listening: arenas, saves, and what became of them.

One `Service` lives in one mover process. It serves one generation at a time; a request of an
older one is refused, `expect` of a newer one begins it. Saves run on a few threads of their own,
so that answering never waits for a disk.

A save of one rank goes through named states, and every end is an event:

    captured -> writing -> written -> committed
                   |          '----> failed        (parts do not make a checkpoint, fenced)
                   '-> failed                      (disk full, slot changed, fenced)
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from holdfast.checkpoint import cleaning, restore
from holdfast.checkpoint.arena import Arena, SlotHeader, digest, slot_capacity
from holdfast.checkpoint.blob import header, total_size
from holdfast.checkpoint.outcomes import Outcomes, Save
from holdfast.checkpoint.save import Plan, pieces, try_commit, write_part
from holdfast.errors import CheckpointError, CorruptError, FencedError, HoldfastError
from holdfast.events import CheckpointRejected, CheckpointRemoved
from holdfast.layout import Topology
from holdfast.spec.manifest import Placed, part_prefix, placed
from holdfast.spec.ownership import owned_boxes
from holdfast.spec.state import StateTable
from holdfast.wire.runstore import RunStore

SAVE_THREADS = 2


@dataclass(frozen=True)
class Settings:
    """What a mover is told once, at its start."""

    run: str
    config_hash: str
    dataset_version: str
    keep_last: int = 3
    keep_every: int = 0
    extent_bytes: int = 16 * 2**20


@dataclass
class _Rank:
    """One rank's arena, and what its blobs look like."""

    fd: int
    arena: Arena
    head: bytes
    tensors: tuple[Placed, ...]
    saving: set[int] = field(default_factory=set)  # slots


class Service:
    """The mover's state machine. Every public method is one verb and is safe to call from any
    thread; `generation` is the caller's."""

    def __init__(
        self, store: RunStore, settings: Settings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._settings = settings
        self._clock = clock
        self._change = threading.Condition()
        self._plan: Plan | None = None
        self._ranks: dict[int, _Rank] = {}
        self._verified: set[int] = set()
        self._rejected: dict[str, str] = {}
        self._committing = threading.Lock()
        self._pending: Counter[Save] = Counter()  # handed over by ranks, and not ended
        self._threads = ThreadPoolExecutor(SAVE_THREADS, "save")
        self.outcomes = Outcomes(clock)

    # --- generations ------------------------------------------------------------------------
    def expect(self, generation: int, topology: Topology, table: StateTable) -> None:
        """Begin a generation. Raises FencedError for one that is not newer than the present."""
        with self._change:
            if self._plan is not None and generation <= self._plan.generation:
                if self._plan.generation == generation and self._plan.topology == topology:
                    return  # asked again: the first answer was lost
                raise FencedError(f"generation {self._plan.generation} has begun already")
            self._plan = Plan(
                generation, topology, table, self._settings.config_hash,
                self._settings.dataset_version, self._settings.extent_bytes,
            )  # fmt: skip
            for old in self._ranks.values():
                os.close(old.fd)  # its memory goes when the last reader unmaps it
            self._ranks = {}
            self._change.notify_all()
        self.outcomes.wake()
        with self._committing:
            cleaning.sweep(self._store, generation)

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
    def arena(self, generation: int, rank: int, blob_bytes: int, slots: int) -> int:
        """The descriptor of a rank's arena, made at the first request; the caller closes it.

        A worker that asks again gets the same memory, so a slot being saved stays safe.
        """
        with self._change:  # no newer generation begins before this arena is there
            return self._arena(self._current(generation), rank, blob_bytes, slots)

    def _arena(self, plan: Plan, rank: int, blob_bytes: int, slots: int) -> int:
        if not 0 <= rank < plan.topology.world_size:
            raise CheckpointError(f"rank {rank} is not in a world of {plan.topology.world_size}")
        tensors = placed(owned_boxes(plan.topology, plan.table, rank), plan.table)
        head = header(tensors)
        due = slot_capacity(total_size(head, tensors))
        if blob_bytes != due or slots not in (2, 3):
            raise CheckpointError(
                f"rank {rank} asks for {slots} slots of {blob_bytes} bytes, its state needs "
                f"2 or 3 of {due}"
            )
        found = self._ranks.get(rank)
        if found is None:
            fd = Arena.create(f"holdfast-{plan.generation}-{rank}", slots, due)
            found = _Rank(fd, Arena(fd), head, tensors)
            self._ranks[rank] = found
        return os.dup(found.fd)

    def wait_free(
        self, generation: int, rank: int, wait: float, keep: Collection[int] = ()
    ) -> bool:
        """Whether a slot of the rank, none of `keep`, became free in time."""
        self._current(generation)
        with self._change:
            found = self._ranks.get(rank)
            if found is None:
                return False
            arena = found.arena
            return self._change.wait_for(lambda: arena.free_slot(keep) is not None, wait)

    # --- saving -----------------------------------------------------------------------------
    def captured(
        self,
        generation: int,
        rank: int,
        step: int,
        slot: int,
        sequence: int,
        meta: Mapping[str, Any],
    ) -> None:
        """Take over a snapshot and save it in the background; asked again, do nothing more.

        Raises CorruptError when the slot does not hold what the request says. Nothing is done to
        the slot then: a request that was held up must not give back what has come after it.
        """
        with self._change:
            plan = self._current(generation)
            found = self._ranks.get(rank)
            if found is None:
                raise HoldfastError(f"rank {rank} has no arena")
            seen = found.arena.header(slot)
            due = SlotHeader(
                digest(self._settings.run), generation, step, sequence,
                total_size(found.head, found.tensors), digest(found.head),
            )  # fmt: skip
            if seen != due:
                raise CorruptError(f"slot {slot} of rank {rank} does not hold step {step}")
            if slot in found.saving or not found.arena.held(slot):
                return  # its first answer was lost on the way
            found.saving.add(slot)
            self._pending[generation, step] += 1
        self.outcomes.captured((generation, step))
        self._threads.submit(self._save, plan, found, rank, slot, due, dict(meta))

    def _save(
        self, plan: Plan, owner: _Rank, rank: int, slot: int, due: SlotHeader, meta: dict[str, Any]
    ) -> None:
        """One rank's save, on a thread of its own; every failure becomes an outcome."""
        step = due.step
        save = (plan.generation, step)
        try:
            try:
                if reason := self.outcomes.failure(save):
                    raise HoldfastError(reason)  # another rank of this step failed: no use
                with owner.arena.reading(slot, due) as data:
                    write_part(
                        self._store, plan, step, rank, pieces(data), len(owner.head),
                        owner.tensors, meta,
                    )  # fmt: skip
            finally:
                with self._change:
                    owner.saving.discard(slot)
                    owner.arena.release(slot)
                    self._change.notify_all()
            self._commit(plan, step)
        except Exception as error:  # a failed save never stops training (decision 13)
            self._fail(plan, step, error)
        finally:
            with self._change:
                self._pending[save] -= 1
                self._pending += Counter()  # drops what has come to zero
                self._change.notify_all()

    def _commit(self, plan: Plan, step: int) -> None:
        save = (plan.generation, step)
        with self._committing:
            if self.outcomes.failure(save) is not None:
                cleaning.discard(self._store, plan.generation, step)
                return
            if self.outcomes.committed(save):
                return
            commit = try_commit(self._store, plan, step)
            if commit is None:
                return
            self.outcomes.succeed(save, commit.key, commit.nbytes)
            self._abandon(plan, step)
            self._retain()

    def _abandon(self, plan: Plan, committed: int) -> None:
        """Give up older steps that lack a rank: each rank hands its steps over in order, so
        whoever has handed over `committed` and not an older step has skipped that one."""
        for step in self.outcomes.open_steps(plan.generation):
            with self._change:
                busy = self._pending[plan.generation, step] > 0
            if step < committed and not busy:
                parts = self._store.list(part_prefix(plan.generation, step))
                if len(parts) < plan.topology.world_size:  # else another node is committing it
                    cleaning.discard(self._store, plan.generation, step)  # before it is told
                    self.outcomes.fail((plan.generation, step), "not every rank captured it")

    def _retain(self) -> None:
        keep = cleaning.Keep(self._settings.keep_last, self._settings.keep_every)
        try:
            for key in cleaning.retain(self._store, keep, self._verified, self._rejected):
                self.outcomes.add(CheckpointRemoved(key, step=restore.step_of(key)))
        except HoldfastError as error:
            self.outcomes.warn(f"old checkpoints could not be removed: {error}")

    def _fail(self, plan: Plan, step: int, error: Exception) -> None:
        save = (plan.generation, step)
        known = isinstance(error, HoldfastError)
        self.outcomes.fail(save, str(error) if known else f"{type(error).__name__}: {error}")
        try:  # half a checkpoint takes room and serves nobody
            with self._committing:
                if not self.outcomes.committed(save):
                    cleaning.discard(self._store, plan.generation, step)
        except HoldfastError as second:
            self.outcomes.warn(f"an unfinished checkpoint could not be removed: {second}")

    # --- questions --------------------------------------------------------------------------
    def drain(self, wait: float) -> bool:
        """Wait for the end of the saves under way; whether all have ended."""
        with self._change:
            return self._change.wait_for(lambda: not self._pending, wait)

    def newest(self, drain: float) -> dict[str, Any]:
        """The newest verified checkpoint, and every one that was passed over.

        First waits up to `drain` seconds for saves that are under way.

        Raises CheckpointError when there are some but none can be trusted.
        """
        self.drain(drain)
        rejected: list[tuple[str, str]] = []

        def reject(key: str, reason: str) -> None:
            rejected.append((key, reason))
            if key not in self._rejected:
                self._rejected[key] = reason
                self.outcomes.add(CheckpointRejected(key, reason, step=restore.step_of(key)))

        found = restore.newest_verified(self._store, reject)
        answer: dict[str, Any] = {"key": None, "step": 0, "generation": 0, "meta": {}}
        if found is not None:
            commit = found.commit
            self._verified.add(commit.step)
            answer = {
                "key": commit.key, "step": commit.step, "generation": commit.generation,
                "meta": dict(commit.meta),
            }  # fmt: skip
        return answer | {"rejected": rejected}

    def status(self) -> dict[str, Any]:
        with self._change:
            arenas = {
                str(rank): {
                    "slots": r.arena.slots,
                    "bytes": r.arena.slots * r.arena.capacity,
                    "saving": sorted(r.saving),
                    "held": [s for s in range(r.arena.slots) if r.arena.held(s)],
                }
                for rank, r in sorted(self._ranks.items())
            }
            generation = self._plan.generation if self._plan else 0
        return {"generation": generation, "arenas": arenas, "saves": self.outcomes.counts()}

    def close(self) -> None:
        """Finish what is being saved and stop."""
        self._threads.shutdown(wait=True)
