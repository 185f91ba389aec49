"""From memory to the run store: captures become blobs, parts and, together, a checkpoint.

Saves run on a few threads of their own. A blob is written while the capture is being hashed
(`writing.py`), its part when both are done. A save never stops training: every failure is an
outcome, and nothing is left behind. Where a generation began from a step that lies in memory alone,
that step is made durable first of all ("promoted"): under the authority of the new generation,
because its own is fenced.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial

from holdfast.checkpoint import cleaning, restore
from holdfast.checkpoint.choosing import Choice
from holdfast.checkpoint.outcomes import Outcomes, Save
from holdfast.checkpoint.promoting import checked, parts_held
from holdfast.checkpoint.save import (
    Plan,
    check_sealed,
    commit_sealed,
    pieces,
    store_part,
    try_commit,
    write_sealed,
)
from holdfast.checkpoint.snapshots import Shelf, Snapshot
from holdfast.checkpoint.sources import MemorySource
from holdfast.checkpoint.writing import Writing
from holdfast.errors import HoldfastError
from holdfast.events import CheckpointRemoved
from holdfast.spec.manifest import part_prefix
from holdfast.wire.runstore import MissingKeyError, RunStore

SAVE_THREADS = 2
PROMOTE_SECONDS = 600.0
"""How long a promotion waits for the fenced save of the same step to end."""


class Saves:
    """The durable saves of one mover. Safe to use from any thread."""

    def __init__(
        self,
        store: RunStore,
        shelf: Shelf,
        outcomes: Outcomes,
        change: threading.Condition,
        keep: cleaning.Keep,
        memories: Sequence[MemorySource] = (),
    ) -> None:
        """`change` guards `pending` and is notified when a save has ended; `memories` are asked for
        what a promotion does not find on the shelf."""
        self.pending: Counter[Save] = Counter()  # handed over by ranks, and not ended
        self.verified: set[int] = set()  # steps of checkpoints that were read back in full
        self.spared: Callable[[], Collection[str]] = tuple  # keys that somebody reads just now
        self.rejected: dict[str, str] = {}  # keys of those that were passed over, and why
        self._store, self._shelf, self._outcomes = store, shelf, outcomes
        self._change, self._keep, self._memories = change, keep, memories
        outcomes.underway = lambda save: self.pending[save] > 0
        self._committing = threading.Lock()
        self._newest: Save | None = None  # that was committed, under `_committing`
        self._begun: tuple[int, int | None] = (0, None)  # generation, and the step it began from
        self._swept = threading.Event()  # what older generations left is gone
        self._swept.set()
        self._threads = ThreadPoolExecutor(SAVE_THREADS, "save")

    def begin(self, generation: int, start: int | None = None) -> None:
        """Remove what older generations left unfinished, behind the answer: a store may take long
        to be swept. What `generation` writes waits for that."""
        swept = threading.Event()
        self._begun, self._swept = (generation, start), swept
        self._threads.submit(self._sweep, generation, swept)

    def expect(self, save: Save) -> None:
        """A rank has handed over its part of a save."""
        with self._change:
            self.pending[save] += 1
        self._outcomes.captured(save)

    def submit(self, plan: Plan, writing: Writing) -> None:
        """Save what was handed over, and will be shelved, pinned, or given up."""
        self._threads.submit(self._save, plan, writing, self._swept)

    def promote(self, generation: int, choice: Choice) -> None:
        """Make durable what `generation` began from and only memory holds. Its slots are kept
        until that is done."""
        pins = ExitStack()
        at = choice.commit.generation, choice.commit.step
        snapshots: list[Snapshot] = []
        for writer in choice.commit.writers:
            with suppress(MissingKeyError):  # a part of it is in the memory of another machine
                snapshots.append(pins.enter_context(self._shelf.pin(*at, writer.rank)))
        self._outcomes.again(at)
        self._threads.submit(self._promote, generation, choice, snapshots, pins, self._swept)

    def close(self) -> None:
        self._threads.shutdown(wait=True)

    def _sweep(self, generation: int, swept: threading.Event) -> None:
        try:
            with self._committing:
                cleaning.sweep(self._store, generation)
        except Exception as error:  # what is left takes room, and no more
            self._outcomes.warn(f"what older generations left could not be removed: {error}")
        finally:
            swept.set()

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
            if not self._outcomes.committed(save):
                self._discard(save)

    def end(self, save: Save) -> None:
        with self._change:
            self.pending[save] -= 1
            self.pending += Counter()  # drops what has come to zero
            self._change.notify_all()

    def _commit(self, plan: Plan, step: int) -> None:
        save = (plan.generation, step)
        with self._committing:
            if self._outcomes.failure(save) is not None:
                cleaning.discard(self._store, plan.generation, step)
                return
            if self._outcomes.committed(save):
                return
            commit = try_commit(self._store, plan, step)
            if commit is None:
                return
            self._outcomes.succeed(save, commit.key, commit.nbytes)
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
        self, generation: int, choice: Choice, snapshots: list[Snapshot], pins: ExitStack,
        swept: threading.Event,
    ) -> None:  # fmt: skip
        save = choice.commit.generation, choice.commit.step
        with self._change:
            self._change.wait_for(lambda: not self.pending[save], PROMOTE_SECONDS)
        swept.wait()  # the keys are those of an older generation, which are being swept
        try:
            with pins:
                for snapshot in snapshots:
                    check_sealed(snapshot)  # it has lain there: no rot may become durable
                    self._write(generation, snapshot)
            self._write_others(generation, choice, snapshots)
            with self._committing:
                commit_sealed(self._store, generation, choice.commit)
                self._outcomes.succeed(save, choice.key, choice.commit.nbytes)
                self._retain()
        except Exception as error:
            self._outcomes.gave_up(save, f"step {save[1]} stays in memory only: {error}")
            with self._committing:
                self._discard(save)

    def _write_others(self, generation: int, choice: Choice, snapshots: Sequence[Snapshot]) -> None:
        """The parts that are not on the shelf, from whoever has them in memory."""
        ranks = {w.rank for w in choice.commit.writers} - {s.part.rank for s in snapshots}
        for part, stored in parts_held(self._memories, choice.commit, ranks):
            content = checked(self._memories, part.blob)
            write_sealed(self._store, generation, part, stored, content)

    def _abandon(self, plan: Plan, committed: int) -> None:
        """Give up older steps that lack a rank: each rank hands its steps over in order, so
        whoever has handed over `committed` and not an older step has skipped that one."""
        for step in self._outcomes.open_steps(plan.generation):
            with self._change:
                busy = self.pending[plan.generation, step] > 0
            if step < committed and not busy:
                found = self._store.list(part_prefix(plan.generation, step))
                parts = [key for key in found if key.endswith(".json")]
                if len(parts) < plan.topology.world_size:  # else another node is committing it
                    cleaning.discard(self._store, plan.generation, step)  # before it is told
                    self._outcomes.fail((plan.generation, step), "not every rank captured it")

    def _retain(self) -> None:
        try:
            # A step that this generation has left behind counts for nothing, whenever it came.
            left = cleaning.left_behind(self._store, *self._begun)
            for key in cleaning.retain(
                self._store, self._keep, self.verified, {*self.rejected, *left}, self.spared()
            ):
                self._outcomes.add(CheckpointRemoved(key, step=restore.step_of(key)))
        except HoldfastError as error:
            self._outcomes.warn(f"old checkpoints could not be removed: {error}")

    def _discard(self, save: Save) -> None:
        """Half a checkpoint takes room and serves nobody."""
        try:
            cleaning.discard(self._store, *save)
        except HoldfastError as error:
            self._outcomes.warn(f"an unfinished checkpoint could not be removed: {error}")
