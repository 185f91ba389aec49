"""Removal from the run store of what one mover's saves leave there. `retention.py` says which
objects those are; here is who may remove them, and when.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection

from holdfast.checkpoint.format.save_context import SaveContext
from holdfast.checkpoint.restore import catalog
from holdfast.checkpoint.save import retention
from holdfast.checkpoint.save.commit_protocol import CommitProtocol
from holdfast.checkpoint.save.save_tracker import SaveId, SaveTracker
from holdfast.core.format.manifest import part_prefix
from holdfast.errors import HoldfastError
from holdfast.events import CheckpointRemoved
from holdfast.wire.store.run_store import RunStore


class PendingParts:
    """The parts that ranks have handed over, and whose writing has not ended. `change` guards them
    and is notified when one has ended."""

    def __init__(self, change: threading.Condition) -> None:
        self.change = change
        self._parts: Counter[SaveId] = Counter()

    def add(self, save: SaveId) -> None:
        with self.change:
            self._parts[save] += 1

    def remove(self, save: SaveId) -> None:
        with self.change:
            self._parts[save] -= 1
            self._parts += Counter()  # drops what has come to zero
            self.change.notify_all()

    def __contains__(self, save: object) -> bool:
        return self._parts[save] > 0  # type: ignore[index]

    def wait_until_ended(self, save: SaveId, timeout_s: float) -> None:
        """Wait until no part of a save is being written."""
        with self.change:
            self.change.wait_for(lambda: save not in self, timeout_s)

    def saves(self) -> list[SaveId]:
        """The saves with such a part; who asks holds `change`."""
        return list(self._parts)


class StoreCleaner:
    """Removes old checkpoints, and what was never committed. A failure is a warning: what is left
    takes room, and no more."""

    def __init__(
        self,
        store: RunStore,
        rules: retention.RetentionRules,
        save_tracker: SaveTracker,
        commit_protocol: CommitProtocol,
    ) -> None:
        self.verified_steps: set[int] = set()  # steps of checkpoints that were read back in full
        self.in_use_keys: Callable[[], Collection[str]] = tuple  # keys that a reader uses just now
        self.removed_count = 0  # checkpoints that retention has removed
        self.rejected_keys: dict[str, str] = {}  # keys of those that were passed over, and why
        self._store, self._rules, self._save_tracker = store, rules, save_tracker
        self._commit_protocol = commit_protocol
        self.context: SaveContext | None = None  # of the present generation
        # The present generation, and the step that it began from.
        self.started_from: tuple[int, int | None] = (0, None)

    def apply_retention(self, coming_step: int | None = None) -> None:
        """Remove the checkpoints that need not be kept. coming_step: as if it had a checkpoint
        already, which needs their room."""
        try:
            # A step that this generation has left behind counts for nothing, whenever it came.
            left = retention.superseded_commits(self._store, *self.started_from)
            for key in retention.apply_retention(
                self._store,
                self._rules,
                self.verified_steps,
                {*self.rejected_keys, *left},
                self.in_use_keys(),
                coming_step,
            ):
                self.removed_count += 1
                self._save_tracker.emit(CheckpointRemoved(key, step=catalog.step_of(key)))
        except HoldfastError as error:
            self._save_tracker.warn(f"old checkpoints could not be removed: {error}")

    def abandon_older(self, plan: SaveContext, committed_step: int, pending: PendingParts) -> None:
        """Give up older steps that lack a rank. Each rank hands its steps over in order: a rank
        that handed over `committed_step` and not an older step has skipped that step."""
        for step in self._save_tracker.open_steps(plan.generation):
            with pending.change:
                busy = (plan.generation, step) in pending
                busy = busy or self._commit_protocol.is_busy_elsewhere(step)
            if step < committed_step and not busy:
                found = self._store.list(part_prefix(plan.generation, step))
                parts = [key for key in found if key.endswith(".json")]
                if len(parts) < plan.topology.world_size:  # otherwise another node is committing it
                    # before ranks learn it
                    retention.discard_uncommitted(self._store, plan.generation, step)
                    self._save_tracker.record_failure(
                        (plan.generation, step), "not every rank captured it"
                    )

    def discard(self, save: SaveId) -> None:
        """Remove half a checkpoint, which takes room and is of no use. The leader may remove all of
        it, another mover only its own objects."""
        try:
            if self._commit_protocol.is_leader:
                self._commit_protocol.forget(save)
                retention.discard_uncommitted(self._store, *save)
            elif self.context is not None:
                retention.discard_rank_parts(
                    self._store, *save, self._commit_protocol.own_ranks(self.context)
                )
        except HoldfastError as error:
            self._save_tracker.warn(f"an unfinished checkpoint could not be removed: {error}")
