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
from holdfast.checkpoint.restore.fallback_store import Second, opened
from holdfast.checkpoint.restore.sources import MemorySource
from holdfast.checkpoint.restore.start_records import (
    _from_store,
    _start_of,
    given_up,
    newest_start,
    settle,
    starts,
)
from holdfast.core.format.manifest import COMMITS, Commit, Part, commit_key, merge, parse_commit_key
from holdfast.core.sharding.state_table import StateTable
from holdfast.errors import (
    CheckpointError,
    CorruptError,
    HoldfastError,
    RunFolderError,
    StoreError,
)
from holdfast.events import CheckpointCommitted
from holdfast.layout import Topology
from holdfast.wire.journal import parse
from holdfast.wire.store.run_store import PREFIX as JOURNAL
from holdfast.wire.store.run_store import MissingKeyError, RunStore

Reject = Callable[[str, str], None]
_Position = tuple[int, int]  # step, generation: as candidates are ordered


@dataclass(frozen=True)
class Choice:
    """A state to begin from."""

    commit: Commit
    durable: bool  # the run store has its commit object
    memory: bool  # its parts are in some mover's memory

    @property
    def key(self) -> str:
        return self.commit.key


def newest_past(store: RunStore) -> int | None:
    """Return the newest step that the run ever committed, or began from in the run store. The
    journal and the notes of starts tell it. None if there was none, or if the run has started from
    nothing since.

    Used when no checkpoint is left: a run that lost its checkpoints would look like a new one.
    """
    noted = starts(store, 0)
    nothing = max((generation for generation, step in noted.items() if step == 0), default=0)
    past, whole = 0, True
    for key in store.list(JOURNAL):
        generation = key.removeprefix(JOURNAL).partition("/")[0]
        if not generation.isdecimal() or int(generation) >= nothing:
            try:
                records, _ = parse(key, store.get(key))
            except CorruptError:
                whole = False
                continue
            committed = [r.event for r in records if isinstance(r.event, CheckpointCommitted)]
            past = max([past, *(event.step for event in committed)])
    for number, step in noted.items():
        # If a journal cannot be read, a generation that continued live may have had one too.
        if number >= nothing and (not whole or _from_store(store, number)):
            past = max(past, step)
    return past or None


@dataclass
class _Found:
    """The parts of one step that some memory holds, and who its writers are."""

    plan: tuple[Topology, StateTable]
    parts: dict[int, tuple[Part, bytes]]

    @property
    def complete(self) -> bool:
        return len(self.parts) == self.plan[0].world_size


class Chooser:
    """One search for the newest state: the generation that asks has been opened."""

    def __init__(
        self, store: RunStore, memories: Sequence[MemorySource], present: int,
        config_hash: str, dataset_version: str, rejected: Reject,
        second: Second | None = None, noted: Reject = lambda key, reason: None,
    ) -> None:  # fmt: skip
        """`rejected(key, reason)` is called for each candidate that is passed over. `second` is
        asked where the run store falls short; `noted(key, reason)` says that it gave something."""
        self._store, self._memories, self._present = store, memories, present
        self._about = (config_hash, dataset_version)
        self._rejected, self._second, self._noted = rejected, second, noted
        self._unread: HoldfastError | None = None

    def newest(self, skip: Collection[str]) -> Choice | None:
        """The newest state that can be begun from; None when there has never been one.

        skip: keys that were tried already. Raises CheckpointError when there are candidates and
        none can be trusted, and the store's own error when it is out of reach.
        """
        settle(self._store, self._present)
        held = self._in_memory()
        at_rest = _positions(self._store)
        waiting = sorted(held.keys() | at_rest)  # the newest last
        past = None if waiting else newest_past(self._store)
        short, asked = past is not None, self._second is None
        done: set[_Position] = set()
        over = 0  # candidates that a later generation has given up
        while waiting or (short and not asked):
            if short and not asked:
                asked = True
                more = self._elsewhere() - done
                at_rest |= more
                waiting = sorted({*waiting, *more})
                continue
            position = waiting.pop()
            done.add(position)
            key = commit_key(position[1], position[0])
            if key in skip:
                short = True
                continue
            try:
                choice = self._consider(key, position, held.get(position), position in at_rest)
            except (HoldfastError, ValueError) as error:
                self._unread = self._still_there(error) or self._unread
                self._rejected(key, str(error))
                short = True
                continue
            if choice is not None:
                return choice
            over += 1
            self._rejected(key, "a later generation began again from an older step")
        if self._unread is not None:
            raise self._unread  # it may be intact though unreadable: do not start over
        if done and not (over == len(done) and self._from_nothing()):
            raise CheckpointError(
                f"none of {len(done)} checkpoints can be trusted",
                where=COMMITS.rstrip("/"),
                remedy="see why with: holdfast checkpoint verify RUN, or start over with --fresh",
            )
        if past is not None and not done:
            raise _forgotten(past)
        return None

    def _elsewhere(self) -> set[_Position]:
        """What the second place has. One that is away may have what is needed."""
        assert self._second is not None, "whoever asks has looked"
        try:
            return _positions(self._second.store)
        except StoreError as error:
            self._unread = error
            return set()

    def _from_nothing(self) -> bool:
        """Return True if the last generation that has begun did so from initial weights. Then it
        gave up all that older ones left, and there is nothing newer."""
        newest = newest_start(self._store)
        return 0 < newest < self._present and _start_of(self._store, newest) == 0

    def _consider(
        self, key: str, position: _Position, held: _Found | None, at_rest: bool
    ) -> Choice | None:
        if self._left_behind(position, at_rest):
            return None
        if at_rest and held is None:
            return Choice(self._opened(key), durable=True, memory=False)
        assert held is not None, "a position comes from memory or from the run store"
        try:
            return Choice(merge(held.parts, *held.plan, *self._about), at_rest, memory=True)
        except HoldfastError:
            if not at_rest:
                raise
            return Choice(self._opened(key), durable=True, memory=False)

    def _left_behind(self, position: _Position, at_rest: bool) -> bool:
        """Return True if the run has given up a candidate. A commit object can be late too, if a
        mover passed its fence and slept before it wrote. If a note of a start cannot be read, this
        is unknown. Then a durable, complete candidate is trusted: it was made by the rules."""
        step, generation = position
        try:
            return given_up(self._store, self._present, generation, step)
        except HoldfastError:
            if not at_rest:
                raise
            catalog.listing(self._store)  # raises where the store is out of reach altogether
            return False

    def _opened(self, key: str) -> Commit:
        """Open a commit object; if the store fails, rather than the bytes, try once more."""
        try:
            return self._opened_once(key)
        except (RunFolderError, StoreError):
            return self._opened_once(key)

    def _opened_once(self, key: str) -> Commit:
        return opened(
            self._store, self._second, key, self._about[0],
            lambda reason: self._noted(key, reason),
        )  # fmt: skip

    def _still_there(self, error: Exception) -> HoldfastError | None:
        """Return the error if it is the store's own and not about the bytes. If the store cannot
        even be listed, raise that error: choosing an older checkpoint instead would lose work."""
        if not isinstance(error, RunFolderError | StoreError):
            return None
        catalog.listing(self._store)
        return error

    def _in_memory(self) -> dict[_Position, _Found]:
        """Return the complete steps that all memories together hold."""
        found = _gathered(self._memories)
        return {at: s for at, s in found.items() if s.complete and at[1] <= self._present}


def commit_of(
    store: RunStore, memories: Sequence[MemorySource], key: str, config_hash: str,
    dataset_version: str,
) -> Commit:  # fmt: skip
    """Return the commit object `key`, for a machine that did not choose it. It comes from the run
    store, or is assembled from all memories, with the same bytes everywhere.

    Raises MissingKeyError if it is complete nowhere, and as `merge` and the store do.
    """
    with suppress(MissingKeyError):
        return reader.Checkpoint.open(store, key).commit
    at = parse_commit_key(key)
    found = None if at is None else _gathered(memories, at).get(at)
    if found is None or not found.complete:
        raise MissingKeyError(f"{key} is neither in the run store nor complete in memory")
    return merge(found.parts, *found.plan, config_hash, dataset_version)


def _gathered(
    memories: Sequence[MemorySource], only: _Position | None = None
) -> dict[_Position, _Found]:
    """The parts that all memories hold, by step; of one step where `only` is given."""
    found: dict[_Position, _Found] = {}
    for memory in memories:
        try:
            inventory = memory.inventory()
        except HoldfastError:
            continue  # that machine is out of reach: what it holds is not there
        for line in inventory:
            at = (line.step, line.generation)
            if only not in (None, at):
                continue
            # A manifest that is broken, or whose plan is unknown, is as good as none.
            with suppress(HoldfastError, KeyError):
                part = Part.from_bytes(line.stored, f"{memory.name}, rank {line.rank}")
                step = found.setdefault(at, _Found(memory.plan(line.generation), {}))
                step.parts.setdefault(line.rank, (part, line.stored))
    return found


def _positions(store: RunStore) -> set[_Position]:
    return {at for key in catalog.listing(store) if (at := parse_commit_key(key))}


def _forgotten(past: int) -> CheckpointError:
    return CheckpointError(
        f"this run had a checkpoint of step {past}, and none is left", where=COMMITS.rstrip("/"),
        remedy="put the checkpoints back (what checkpoint.bucket names is asked), or start over "
        "with --fresh",
    )  # fmt: skip
