"""The state that a restart begins from: the newest complete step in memory or the run store.

Candidates are ordered by step, then by generation. A candidate that lies in memory alone is trusted
under two conditions. The parts of every writer of its generation exist, and no later generation
began from an older step. The second condition guards against two branches: a machine that was cut
off may return with snapshots that the run has given up. So before its workers exist, each
generation notes in the run store the step that it begins from (`starts/<generation>.json`). A
snapshot or a late commit object is given up once a later generation began from an older step. The
caller has opened its own generation before, which fences all older ones. Their later captures
belong to steps that are never requested.

Choosing reads little: the commit object, and each blob's size and header. Readers check the extents
while they read. If a checkpoint turns out to be corrupt, `skip` names its key the next time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

from holdfast.checkpoint.restore import catalog, reader
from holdfast.checkpoint.restore.fallback_store import LazyStore, open_commit_with_fallback
from holdfast.checkpoint.restore.sources import MemorySource
from holdfast.checkpoint.restore.start_records import (
    _began_from_store,
    _read_start,
    close_unstarted,
    is_superseded,
    newest_started_generation,
    read_starts,
)
from holdfast.core.format.manifest import (
    COMMITS_PREFIX,
    Commit,
    PartManifest,
    commit_key,
    merge_parts,
    parse_commit_key,
)
from holdfast.core.sharding.state_table import StateTable
from holdfast.errors import START_OVER, CheckpointError, HoldfastError, RunFolderError, StoreError
from holdfast.events import CheckpointCommitted, RunBranched
from holdfast.layout import Topology
from holdfast.wire.journal import parse_segment
from holdfast.wire.store.run_store import JOURNAL_PREFIX as JOURNAL
from holdfast.wire.store.run_store import MissingKeyError, RunStore

OnRejected = Callable[[str, str], None]
_Position = tuple[int, int]  # step, generation: as candidates are ordered


@dataclass(frozen=True)
class ChosenRestorePoint:
    """A state to begin from."""

    commit: Commit
    is_durable: bool  # the run store has its commit object
    is_in_memory: bool  # its parts are in some mover's memory

    @property
    def key(self) -> str:
        return self.commit.key


def newest_recorded_step(store: RunStore) -> int | None:
    """Return the newest step that the run ever committed, or began from in the run store. The
    journal and the notes of starts tell it. None if there was none, or if the run has started from
    nothing since.

    Used when no checkpoint is left: a run that lost its checkpoints would look like a new one.
    """
    noted = read_starts(store, 0)
    nothing = max((generation for generation, step in noted.items() if step == 0), default=0)
    past, whole = 0, True
    for key in store.list(JOURNAL):
        generation = key.removeprefix(JOURNAL).partition("/")[0]
        if not generation.isdecimal() or int(generation) >= nothing:
            segment = parse_segment(key, store.get(key))
            whole = whole and not segment.unreadable
            events = (record.event for record in segment.records)
            had = CheckpointCommitted | RunBranched
            committed = [event for event in events if isinstance(event, had)]
            past = max([past, *(event.step for event in committed)])
    for number, step in noted.items():
        # If a journal cannot be read, a generation that continued live may have had one too.
        if number >= nothing and (not whole or _began_from_store(store, number)):
            past = max(past, step)
    return past or None


@dataclass
class _StepParts:
    """The parts of one step that some memory holds, and who its writers are."""

    topology_and_table: tuple[Topology, StateTable]
    parts: dict[int, tuple[PartManifest, bytes]]

    @property
    def is_complete(self) -> bool:
        return len(self.parts) == self.topology_and_table[0].world_size


class RestorePointFinder:
    """One search for the newest state: the generation that asks has been opened."""

    def __init__(
        self,
        store: RunStore,
        memories: Sequence[MemorySource],
        current_generation: int,
        config_hash: str,
        dataset_version: str,
        on_rejected: OnRejected,
        fallback_store: LazyStore | None = None,
        on_fallback_used: OnRejected = lambda key, reason: None,
    ) -> None:
        """`rejected(key, reason)` is called for each candidate that is passed over.
        `fallback_store` is asked where the run store falls short; `noted(key, reason)` says that it
        gave something."""
        self._store, self._memories, self._current_generation = store, memories, current_generation
        self._run_identity = (config_hash, dataset_version)
        self._on_rejected, self._fallback_store, self._on_fallback_used = (
            on_rejected,
            fallback_store,
            on_fallback_used,
        )
        self._store_error: HoldfastError | None = None

    def find_newest(self, skip_keys: Collection[str]) -> ChosenRestorePoint | None:
        """The newest state that can be begun from; None when there has never been one.

        skip_keys: keys that were tried already. Raises CheckpointError when there are candidates
        and none can be trusted, and the store's own error when it is out of reach.
        """
        close_unstarted(self._store, self._current_generation)
        # The complete steps that all memories together hold.
        found = _gather_parts(self._memories)
        held = {
            at: s for at, s in found.items() if s.is_complete and at[1] <= self._current_generation
        }
        at_rest = _committed_positions(self._store)
        waiting = sorted(held.keys() | at_rest)  # the newest last
        past = None if waiting else newest_recorded_step(self._store)
        short, asked = past is not None, self._fallback_store is None
        done: set[_Position] = set()
        over = 0  # candidates that a later generation has given up
        while waiting or (short and not asked):
            if short and not asked:
                asked = True
                more = self._fallback_positions() - done
                at_rest |= more
                waiting = sorted({*waiting, *more})
                continue
            position = waiting.pop()
            done.add(position)
            key = commit_key(position[1], position[0])
            if key in skip_keys:
                short = True
                continue
            try:
                choice = self._consider(key, position, held.get(position), position in at_rest)
            except (HoldfastError, ValueError) as error:
                self._store_error = self._as_store_error(error) or self._store_error
                self._on_rejected(key, str(error))
                short = True
                continue
            if choice is not None:
                return choice
            over += 1
            self._on_rejected(key, "a later generation began again from an older step")
        if self._store_error is not None:
            raise self._store_error  # it may be intact though unreadable: do not start over
        if done and not (over == len(done) and self._last_start_was_fresh()):
            raise CheckpointError(
                f"none of {len(done)} checkpoints can be trusted",
                where=COMMITS_PREFIX.rstrip("/"),
                remedy=f"see why with: holdfast checkpoint verify RUN, or {START_OVER}",
            )
        if past is not None and not done:
            raise CheckpointError(
                f"this run had a checkpoint of step {past}, and none is left",
                where=COMMITS_PREFIX.rstrip("/"),
                remedy="put the checkpoints back (what checkpoint.bucket names is asked), or "
                f"{START_OVER}",
            )
        return None

    def _fallback_positions(self) -> set[_Position]:
        """What the second place has. One that is away may have what is needed."""
        assert self._fallback_store is not None, "the caller has checked this"
        try:
            return _committed_positions(self._fallback_store.store)
        except StoreError as error:
            self._store_error = error
            return set()

    def _last_start_was_fresh(self) -> bool:
        """Return True if the last generation that has begun did so from initial weights. Then it
        gave up all that older ones left, and there is nothing newer."""
        newest = newest_started_generation(self._store)
        return 0 < newest < self._current_generation and _read_start(self._store, newest) == 0

    def _consider(
        self, key: str, position: _Position, memory_parts: _StepParts | None, is_committed: bool
    ) -> ChosenRestorePoint | None:
        if self._is_superseded(position, is_committed):
            return None
        if is_committed and memory_parts is None:
            return ChosenRestorePoint(self._open_commit(key), is_durable=True, is_in_memory=False)
        assert memory_parts is not None, "a position comes from memory or from the run store"
        try:
            return ChosenRestorePoint(
                merge_parts(
                    memory_parts.parts, *memory_parts.topology_and_table, *self._run_identity
                ),
                is_committed,
                is_in_memory=True,
            )
        except HoldfastError:
            if not is_committed:
                raise
            return ChosenRestorePoint(self._open_commit(key), is_durable=True, is_in_memory=False)

    def _is_superseded(self, position: _Position, is_committed: bool) -> bool:
        """Return True if the run has given up a candidate. A commit object can be late too, if a
        mover passed its fence and slept before it wrote. If a note of a start cannot be read, this
        is unknown. Then a durable, complete candidate is trusted: it was made by the rules."""
        step, generation = position
        try:
            return is_superseded(self._store, self._current_generation, generation, step)
        except HoldfastError:
            if not is_committed:
                raise
            catalog.list_commits(self._store)  # raises where the store is out of reach altogether
            return False

    def _open_commit(self, key: str) -> Commit:
        """Open a commit object; if the store fails, rather than the bytes, try once more."""
        try:
            return self._open_commit_once(key)
        except (RunFolderError, StoreError):
            return self._open_commit_once(key)

    def _open_commit_once(self, key: str) -> Commit:
        return open_commit_with_fallback(
            self._store,
            self._fallback_store,
            key,
            self._run_identity[0],
            lambda reason: self._on_fallback_used(key, reason),
        )

    def _as_store_error(self, error: Exception) -> HoldfastError | None:
        """Return the error if it is the store's own and not about the bytes. If the store cannot
        even be listed, raise that error: choosing an older checkpoint instead would lose work."""
        if not isinstance(error, RunFolderError | StoreError):
            return None
        catalog.list_commits(self._store)
        return error


def resolve_commit(
    store: RunStore,
    memories: Sequence[MemorySource],
    key: str,
    config_hash: str,
    dataset_version: str,
) -> Commit:
    """Return the commit object `key`, for a machine that did not choose it. It comes from the run
    store, or is assembled from all memories, with the same bytes everywhere.

    Raises MissingKeyError if it is complete nowhere, and as `merge` and the store do.
    """
    with suppress(MissingKeyError):
        return reader.Checkpoint.open(store, key).commit
    at = parse_commit_key(key)
    found = None if at is None else _gather_parts(memories, at).get(at)
    if found is None or not found.is_complete:
        raise MissingKeyError(f"{key} is neither in the run store nor complete in memory")
    return merge_parts(found.parts, *found.topology_and_table, config_hash, dataset_version)


def _gather_parts(
    memories: Sequence[MemorySource], only_position: _Position | None = None
) -> dict[_Position, _StepParts]:
    """The parts that all memories hold, by step; of one step where `only_position` is given."""
    found: dict[_Position, _StepParts] = {}
    for memory in memories:
        try:
            inventory = memory.inventory()
        except HoldfastError:
            continue  # that machine is out of reach: what it holds is not there
        for line in inventory:
            at = (line.step, line.generation)
            if only_position not in (None, at):
                continue
            # A manifest that is broken, or whose plan is unknown, is as good as none.
            with suppress(HoldfastError, KeyError):
                part = PartManifest.from_bytes(
                    line.sealed_manifest, f"{memory.name}, rank {line.rank}"
                )
                step = found.setdefault(
                    at, _StepParts(memory.topology_and_table(line.generation), {})
                )
                step.parts.setdefault(line.rank, (part, line.sealed_manifest))
    return found


def _committed_positions(store: RunStore) -> set[_Position]:
    return {at for key in catalog.list_commits(store) if (at := parse_commit_key(key))}
