"""From memory to the run store: captures become blobs, parts and, together, a checkpoint.

Saves run on a few threads of their own. A blob is written while the capture is being hashed
(`pending_blob.py`), its part when both are done. A save never stops training: every failure is an
outcome, and nothing is left behind. If a generation began from a step that lies in memory alone,
that step is made durable first ("promoted"). The new generation's authority covers it, because its
own generation is fenced. Of several movers, each does this for its own ranks, and one commits
(`commit_protocol.py`).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial

from holdfast.checkpoint.format.save_context import Plan
from holdfast.checkpoint.memory.snapshot_store import Shelf, Snapshot
from holdfast.checkpoint.peers.config import Cohort
from holdfast.checkpoint.restore import catalog, reader
from holdfast.checkpoint.restore.sources import MemorySource
from holdfast.checkpoint.save import retention
from holdfast.checkpoint.save.commit_protocol import Together
from holdfast.checkpoint.save.pending_blob import Writing
from holdfast.checkpoint.save.promotion import checked, parts_held
from holdfast.checkpoint.save.save_tracker import Outcomes, Save
from holdfast.checkpoint.save.writer import (
    check_sealed,
    commit_sealed,
    pieces,
    store_part,
    try_commit,
    write_sealed,
)
from holdfast.core.format.manifest import (
    Commit,
    commit_key,
    parse_commit_key,
    parse_save_key,
    part_key,
    part_prefix,
    writer_name,
)
from holdfast.errors import HoldfastError
from holdfast.events import CheckpointRemoved
from holdfast.wire.store.run_store import MissingKeyError, RunStore

SAVE_THREADS = 2
PROMOTE_SECONDS = 600.0
"""Seconds that a promotion waits for the fenced save of the same step to end."""


class Saves:
    """The durable saves of one mover. Safe to use from any thread."""

    def __init__(
        self,
        store: RunStore,
        shelf: Shelf,
        outcomes: Outcomes,
        change: threading.Condition,
        keep: retention.Keep,
        memories: Sequence[MemorySource] = (),
    ) -> None:
        """`change` guards `pending` and is notified when a save has ended; `memories` are asked for
        what a promotion does not find on the shelf."""
        self.pending: Counter[Save] = Counter()  # handed over by ranks, and not ended
        self.verified: set[int] = set()  # steps of checkpoints that were read back in full
        self.spared: Callable[[], Collection[str]] = tuple  # keys that a reader uses just now
        self.rejected: dict[str, str] = {}  # keys of those that were passed over, and why
        self._store, self._shelf, self._outcomes = store, shelf, outcomes
        self._change, self._keep, self._memories = change, keep, memories
        outcomes.underway = lambda save: self.pending[save] > 0
        self.together = Together(outcomes, store, self)
        self._committing = threading.Lock()
        self._newest: Save | None = None  # that was committed, under `_committing`
        self._plan: Plan | None = None  # of the present generation
        self._begun: tuple[int, int | None] = (0, None)  # generation, and the step it began from
        self._swept = threading.Event()  # what older generations left was removed
        self._swept.set()
        self._threads = ThreadPoolExecutor(SAVE_THREADS, "save")

    def begin(self, plan: Plan, start: int | None = None, cohort: Cohort | None = None) -> None:
        """Remove what older generations left unfinished, after the answer: a sweep may take long.
        The generation's own writes wait for it. Of several movers, the leader sweeps. The other
        movers do not wait: they write under a newer generation."""
        generation, before = plan.generation, self._begun[0]
        if self.together.leads and not self.together.alone:  # otherwise no rank asks for their end
            for step in self._outcomes.open_steps(before):
                if not self.pending[before, step]:
                    reason = f"generation {generation} began before every part was there"
                    self._outcomes.fail((before, step), reason)
        swept = threading.Event()
        # From here on, reports about older saves remove nothing: their leader may be committing.
        self._begun, self._swept = (generation, start), swept
        self.together.begin(plan, cohort)
        with self._change:
            self._plan = plan
        self._threads.submit(self._look_around, plan, swept)

    def expect(self, save: Save) -> None:
        """A rank has handed over its part of a save."""
        with self._change:
            self.pending[save] += 1
        self._outcomes.captured(save)

    def submit(self, plan: Plan, writing: Writing) -> None:
        """Save what was handed over, and will be shelved, pinned, or given up."""
        self._threads.submit(self._save, plan, writing, self._swept)

    def promote(self, generation: int, at: Save, commit: Callable[[], Commit]) -> None:
        """Make durable what `generation` began from and only memory holds. Its slots are kept
        until that is done. commit: its commit object, asked for behind the answer."""
        pins = ExitStack()
        snapshots: list[Snapshot] = []
        for rank in self._shelf.ranks(*at):
            with suppress(MissingKeyError):  # it is being overwritten
                snapshots.append(pins.enter_context(self._shelf.pin(*at, rank)))
        self._outcomes.again(at)
        self._threads.submit(self._promote, generation, at, commit, snapshots, pins, self._swept)

    def await_promotion(self, at: Save) -> None:
        """Another mover makes it durable: learn what comes of it."""
        self._outcomes.again(at)
        self.together.ask(at)

    def close(self) -> None:
        self.together.close()
        self._threads.shutdown(wait=True)

    def _look_around(self, plan: Plan, swept: threading.Event) -> None:
        """Before anything is written: what older generations left goes, and what a mover left that
        had this node's place in this generation is taken up."""
        try:
            if self.together.leads:
                with self._committing:
                    retention.sweep(self._store, plan.generation)
            self._take_up(plan)
        except Exception as error:  # what is left takes room, and no more
            self._outcomes.warn(f"unfinished saves could not be searched: {error}")
        finally:
            swept.set()

    def _take_up(self, plan: Plan) -> None:
        """The saves of this generation that a former mover of this node had under way. What lacks a
        part of one of our ranks has lost it with that mover."""
        if self.together.alone:
            return  # the ranks report what they handed over (`unheard`)
        generation, ours = plan.generation, self.together.ours(plan)
        committed = [p for key in catalog.listing(self._store) if (p := parse_commit_key(key))]
        steps = sorted(step for step, g in committed if g == generation)
        for step in steps[:-1]:
            self._outcomes.learn((generation, step), commit_key(generation, step))
        if steps and self.together.leads:
            commit = reader.Checkpoint.open(self._store, commit_key(generation, steps[-1])).commit
            self._outcomes.succeed((generation, steps[-1]), commit.key, commit.nbytes)
        found: dict[int, set[int]] = {}
        for key in self._store.list(f"parts/{generation:010d}/"):
            position, rank = parse_save_key(key), _rank_of(key)
            if position is not None and position not in committed and rank is not None:
                found.setdefault(position[0], set()).add(rank)
        for step, ranks in sorted(found.items()):
            save = generation, step
            self._outcomes.captured(save)
            if not ranks >= ours:
                self.fail(save, HoldfastError("the mover that was saving it ended"))
                continue
            for rank in ours:
                if self.together.stored(save, rank):  # true of the last one at most
                    self._commit(plan, step)

    # --- one save -----------------------------------------------------------------------------
    def _save(self, plan: Plan, writing: Writing, swept: threading.Event) -> None:
        """One rank's part of a save; every failure becomes an outcome. It waits for the sweep that
        was queued before it: a later one is queued behind it, perhaps for this very thread."""
        save = writing.save
        try:
            try:  # a save that another rank's failure has made useless ends there
                swept.wait()
                writing.write(self._store, partial(self._outcomes.failure, save))
            finally:
                snapshot = writing.snapshot()
                self._shelf.unpin(snapshot)
            store_part(self._store, snapshot.part, snapshot.stored)
            if (reason := self._outcomes.failure(save)) is not None:
                raise HoldfastError(reason)  # meanwhile, of another rank's part
            if self.together.stored(save, snapshot.part.rank):
                self._commit(plan, save[1])
        except Exception as error:
            self.fail(save, error)
        finally:
            self.end(save)
            self._look_back(plan)

    def _write(self, authority: int, snapshot: Snapshot) -> None:
        with snapshot.memory.arena.reading(snapshot.slot, snapshot.header) as data:
            write_sealed(self._store, authority, snapshot.part, snapshot.stored, pieces(data))

    def fail(self, save: Save, error: Exception) -> None:
        known = isinstance(error, HoldfastError)
        self._outcomes.fail(save, str(error) if known else f"{type(error).__name__}: {error}")
        with self._committing:
            if not (self._outcomes.committed(save) or self._outcomes.made_anew(save)):
                self._discard(save)

    # --- with other movers --------------------------------------------------------------------
    def whole(self, save: Save) -> None:
        with self._change:
            plan = self._plan
        if plan is not None and plan.generation == save[0]:
            self._threads.submit(self._commit_theirs, plan, save)

    def lost(self, save: Save, reason: str) -> None:
        self._outcomes.fail(save, reason, tell=False)  # the node that lost it has reported it
        self._threads.submit(self.fail, save, HoldfastError(reason))

    def ended(self, save: Save, key: str | None, reason: str) -> None:
        if key is not None:
            self._outcomes.learn(save, key)
            self._served(save)
            return
        self._outcomes.gave_up(save, reason, tell=False)
        if save[0] == self._begun[0]:  # otherwise the present leader sweeps it
            self._discard(save)

    def skipped(self, save: Save) -> None:
        """Fail a step that a rank of this node has skipped."""
        if not self.together.alone and save[1] in self._outcomes.open_steps(save[0]):
            self._threads.submit(self.fail, save, HoldfastError("not every rank captured it"))

    def unheard(self, save: Save, rank: int) -> None:
        """A rank had handed a save over to the mover before this one."""
        found = [p for key in catalog.listing(self._store) if (p := parse_commit_key(key))]
        committed = [step for step, generation in found if generation == save[0]]
        if save[1] in committed:
            self._outcomes.learn(save, commit_key(*save))
            return
        if save[1] < max(committed, default=0):
            return  # retention may have removed it
        stored = self._store.list(part_key(*save, writer_name(rank)))
        if stored and not self.together.alone:
            return  # the leader may be committing it: it is taken up
        if stored and self._plan is not None:
            self._commit_theirs(self._plan, save)
        if not self._outcomes.committed(save):
            self.fail(save, HoldfastError("the mover that was saving it ended"))

    def _commit_theirs(self, plan: Plan, save: Save) -> None:
        try:
            self._commit(plan, save[1])
        except Exception as error:
            self.fail(save, error)

    def _served(self, save: Save) -> None:
        """A state of its generation is durable: what memory holds of older ones may go."""
        if save[0] == self._begun[0]:
            self._shelf.outlived(save[0])

    def end(self, save: Save) -> None:
        with self._change:
            self.pending[save] -= 1
            self.pending += Counter()  # drops what has come to zero
            self._change.notify_all()

    def _commit(self, plan: Plan, step: int) -> None:
        save = (plan.generation, step)
        with self._committing:
            if self._outcomes.failure(save) is not None:
                self._discard(save)
                return
            if self._outcomes.committed(save):
                return
            commit = try_commit(self._store, plan, step)
            if commit is None:
                return
            self._outcomes.succeed(save, commit.key, commit.nbytes)
            self.together.forget(save)
            self._served(save)
            self._newest = max(save, self._newest or save)
            self._abandon(plan, step)
            self._retain()

    def _look_back(self, plan: Plan) -> None:
        """The save that ended now may be of a step that was busy when a later one was committed."""
        with self._committing:
            if self._newest is None or self._newest[0] != plan.generation:
                return
            try:
                self._abandon(plan, self._newest[1])
            except HoldfastError as error:
                self._outcomes.warn(f"what is left of older saves could not be removed: {error}")

    def _promote(
        self, generation: int, save: Save, asked: Callable[[], Commit],
        snapshots: list[Snapshot], pins: ExitStack, swept: threading.Event,
    ) -> None:  # fmt: skip
        with self._change:
            self._change.wait_for(lambda: not self.pending[save], PROMOTE_SECONDS)
        swept.wait()  # the keys are those of an older generation, which are being swept
        try:
            with pins:
                commit = asked()
                for snapshot in snapshots:
                    check_sealed(snapshot)  # it has lain there: no rot may become durable
                    self._write(generation, snapshot)
            self._write_others(generation, commit, snapshots)
            with self._committing:
                commit_sealed(self._store, generation, commit)
                self._outcomes.succeed(save, commit.key, commit.nbytes)
                self._retain()
        except Exception as error:
            self._outcomes.gave_up(save, f"step {save[1]} stays in memory only: {error}")
            with self._committing:
                self._discard(save)

    def _write_others(self, generation: int, commit: Commit, snapshots: Sequence[Snapshot]) -> None:
        """Write the parts that are not on the shelf, from a mover that has them in memory."""
        ranks = {w.rank for w in commit.writers} - {s.part.rank for s in snapshots}
        for part, stored in parts_held(self._memories, commit, ranks):
            content = checked(self._memories, part.blob)
            write_sealed(self._store, generation, part, stored, content)

    def _abandon(self, plan: Plan, committed: int) -> None:
        """Give up older steps that lack a rank. Each rank hands its steps over in order: a rank
        that handed over `committed` and not an older step has skipped that step."""
        for step in self._outcomes.open_steps(plan.generation):
            with self._change:
                busy = self.pending[plan.generation, step] > 0 or self.together.busy(step)
            if step < committed and not busy:
                found = self._store.list(part_prefix(plan.generation, step))
                parts = [key for key in found if key.endswith(".json")]
                if len(parts) < plan.topology.world_size:  # otherwise another node is committing it
                    retention.discard(self._store, plan.generation, step)  # before ranks learn it
                    self._outcomes.fail((plan.generation, step), "not every rank captured it")

    def _retain(self) -> None:
        try:
            # A step that this generation has left behind counts for nothing, whenever it came.
            left = retention.left_behind(self._store, *self._begun)
            for key in retention.retain(
                self._store, self._keep, self.verified, {*self.rejected, *left}, self.spared()
            ):
                self._outcomes.add(CheckpointRemoved(key, step=catalog.step_of(key)))
        except HoldfastError as error:
            self._outcomes.warn(f"old checkpoints could not be removed: {error}")

    def _discard(self, save: Save) -> None:
        """Remove half a checkpoint, which takes room and is of no use. The leader may remove all of
        it, another mover only its own objects."""
        try:
            if self.together.leads:
                self.together.forget(save)
                retention.discard(self._store, *save)
            elif self._plan is not None:
                retention.discard_parts(self._store, *save, self.together.ours(self._plan))
        except HoldfastError as error:
            self._outcomes.warn(f"an unfinished checkpoint could not be removed: {error}")


def _rank_of(key: str) -> int | None:
    """Return the rank whose part manifest this is."""
    number = key.rpartition("-rank")[2].removesuffix(".json")
    return int(number) if number.isdecimal() else None
