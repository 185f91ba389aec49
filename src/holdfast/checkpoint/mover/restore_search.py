"""A mover's search for the state that a generation begins from.

It finds the newest state and answers the workers' questions about its commit object.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from holdfast.checkpoint.memory.snapshot_store import SnapshotStore
from holdfast.checkpoint.mover.messages import MappedBlob, RestorePoint
from holdfast.checkpoint.restore import catalog, verify
from holdfast.checkpoint.restore.fallback_store import LazyStore
from holdfast.checkpoint.restore.restore_point import (
    ChosenRestorePoint,
    RestorePointFinder,
    resolve_commit,
)
from holdfast.checkpoint.restore.sources import MemorySource
from holdfast.checkpoint.save.save_manager import SaveManager
from holdfast.checkpoint.save.save_tracker import SaveTracker
from holdfast.core.format.manifest import Commit, parse_commit_key
from holdfast.errors import HoldfastError
from holdfast.events import CheckpointRejected, SourceRejected
from holdfast.wire.store.run_store import MissingKeyError, RunStore

MAX_ANSWER_DESCRIPTORS = 200
"""Descriptors that one answer may carry; the kernel allows 253."""


class RestoreSearch:
    """The state that a restart begins from. This mover chooses it, or the agent names it. Safe to
    use from any thread."""

    def __init__(
        self,
        store: RunStore,
        fallback_store: LazyStore | None,
        memories: Sequence[MemorySource],
        snapshot_store: SnapshotStore,
        save_tracker: SaveTracker,
        save_manager: SaveManager,
        config_hash: str,
        dataset_version: str,
        clock: Callable[[], float],
    ) -> None:
        self._save_manager = save_manager
        self._store, self._fallback_store, self._memories = store, fallback_store, memories
        self._snapshot_store, self._save_tracker, self._clock = snapshot_store, save_tracker, clock
        self._config_hash, self._dataset_version = config_hash, dataset_version
        self._restore_point: ChosenRestorePoint | None = None
        self._restore_point_generation = 0  # the generation that it was made for
        self._resolved_commit: Commit | None = None  # what another mover chose
        self._resolve_lock = threading.Lock()

    def make_durable(
        self, generation: int, start_step: int | None, restore_key: str | None
    ) -> None:
        """Have a generation's starting state saved if only memory holds it: chosen here, or
        `restore_key`."""
        # What was chosen here for a generation; None if another mover chose it.
        choice = self._restore_point if self._restore_point_generation == generation else None
        if choice is not None and not choice.is_durable and choice.commit.step == start_step:
            restore_key = choice.key
        at = parse_commit_key(restore_key or "")
        if restore_key is None or at is None or at[0] != start_step:
            return
        if self._save_manager.commit_protocol.is_leader:
            self._save_manager.promote(
                generation, (at[1], at[0]), partial(self.resolve_commit, restore_key)
            )
        elif choice is not None:  # the leader promotes it; wait for its result
            self._save_manager.await_promotion((at[1], at[0]))

    @property
    def step_read_from_store(self) -> int | None:
        """The step of what was chosen here, if the ranks had to read it from the run store."""
        choice = self._restore_point
        if choice is not None and choice.is_durable and not choice.is_in_memory:
            return choice.commit.step
        return None

    def find(self, generation: int, tried: Mapping[str, str]) -> RestorePoint:
        """As `MoverService.find_restore_point`, once what was under way has ended."""
        rejected: list[tuple[str, str]] = []
        rejected_keys = self._save_manager.cleaner.rejected_keys

        def reject(key: str, reason: str) -> None:
            rejected.append((key, reason))
            if key not in rejected_keys:
                rejected_keys[key] = reason
                event = CheckpointRejected(key, reason, step=catalog.step_of(key))
                self._save_tracker.emit(event)

        rejected_keys |= tried  # the reader that found it has reported it
        for key, reason in tried.items():
            rejected.append((key, reason))
            if position := parse_commit_key(key):
                self._snapshot_store.drop(position[1], position[0])
        begun = self._clock()
        chooser = RestorePointFinder(
            self._store,
            self._memories,
            generation,
            self._config_hash,
            self._dataset_version,
            reject,
            self._fallback_store,
            lambda key, reason: self._save_tracker.emit(
                SourceRejected(-1, "run store", key, reason, step=catalog.step_of(key))
            ),
        )
        self._restore_point = choice = chooser.find_newest(tried)
        self._restore_point_generation = generation
        seconds = self._clock() - begun
        if choice is None:
            return RestorePoint(None, 0, 0, {}, tuple(rejected), seconds=seconds)
        commit = choice.commit
        return RestorePoint(
            commit.key,
            commit.step,
            commit.generation,
            commit.meta,
            tuple(rejected),
            choice.is_durable,
            seconds,
        )

    def find_damage(self, key: str) -> str | None:
        """Return why the checkpoint cannot be restored, or None; every byte of it is read."""
        problem = verify.find_damage(self._store, key)
        if problem is not None and self._fallback_store is not None:
            with suppress(HoldfastError):  # the folder's problem is what is said
                return verify.find_damage(self._fallback_store.store, key) and problem
        return problem

    def resolve_commit(self, key: str) -> Commit:
        """Return the starting state by its key: chosen here, or by another node's mover."""
        choice = self._restore_point
        if choice is not None and choice.key == key:
            return choice.commit
        with self._resolve_lock:  # every worker of the node asks
            if self._resolved_commit is None or self._resolved_commit.key != key:
                about = self._config_hash, self._dataset_version
                self._resolved_commit = resolve_commit(self._store, self._memories, key, *about)
            return self._resolved_commit


def collect_mapped_blobs(
    snapshot_store: SnapshotStore, commit: Commit
) -> tuple[tuple[MappedBlob, ...], list[int]]:
    """Return the blobs of a commit object that are in memory here, and the descriptors of their
    memory files. The caller closes these."""
    files: dict[int, int] = {}  # id of the memory file -> its place among the descriptors
    fds: list[int] = []
    blobs: list[MappedBlob] = []
    for writer in commit.writers:
        with suppress(MissingKeyError):
            found = snapshot_store.get(commit.generation, commit.step, writer.rank)
            if found.part.blob == writer.blob:
                if id(found.memory) not in files and len(fds) < MAX_ANSWER_DESCRIPTORS:
                    files[id(found.memory)] = len(fds)
                    fds.append(os.dup(found.memory.fd))
                if id(found.memory) in files:
                    file = files[id(found.memory)]
                    blobs.append(MappedBlob(writer.blob.key, file, found.slot, found.header))
    return tuple(blobs), fds
