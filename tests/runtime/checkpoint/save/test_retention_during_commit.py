"""A checkpoint that is being committed just as a newer generation begins: it stays with all that it
names, or goes with it. What follows, sweeps and fails meanwhile removes nothing of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.format.save_context import SaveContext
from holdfast.checkpoint.memory.snapshot_store import SnapshotStore
from holdfast.checkpoint.peers.config import Cohort, Peer
from holdfast.checkpoint.restore.catalog import list_commits
from holdfast.checkpoint.restore.verify import verify
from holdfast.checkpoint.save import commit_protocol, retention
from holdfast.checkpoint.save.retention import RetentionRules
from holdfast.checkpoint.save.save_manager import SaveManager
from holdfast.checkpoint.save.save_tracker import SaveTracker
from holdfast.checkpoint.save.writer import try_commit
from holdfast.core.format.manifest import commit_key
from holdfast.errors import FencedError, HoldfastError
from holdfast.policy.placement import Machine
from holdfast.wire.store.run_store import FolderStore
from holdfast.wire.term import create_generation
from tests.support.mover_process import TABLE, topology, write_noise
from tests.support.peer_nodes import SECRET

SAVE = (1, 10)
KEY = commit_key(*SAVE)


def plan(generation: int) -> SaveContext:
    return SaveContext(generation, topology(2, generation=generation), TABLE, "c", "d", 1024)


def stored(store: FolderStore) -> None:
    """The parts of both ranks."""
    create_generation(store, 1, {})
    made = plan(1)
    for rank in range(2):
        write_noise(store, made, SAVE[1], rank)


def left(store: FolderStore) -> int:
    return len([key for key in store.list("") if key.startswith(("data/", "parts/"))])


@pytest.fixture
def follower(tmp_path: Path) -> Iterator[SaveManager]:
    """The second node's, in generation 1; its leader answers nothing."""
    outcomes = SaveTracker(time.monotonic)
    saves = SaveManager(
        FolderStore(tmp_path), SnapshotStore(), outcomes, threading.Condition(), RetentionRules(3)
    )
    saves.commit_protocol.set_leader_access(SECRET, "", lambda generation: ())
    saves.begin_generation(plan(1), 0, _cohort())
    yield saves
    saves.close()


def _cohort() -> Cohort:
    leader = Peer(Machine("a"), "127.0.0.1:1")
    return Cohort("node0", (leader,), leader_peer=leader)


class _AtOnce(threading.Thread):
    """A thread that reports finished saves at once, before anything else happens."""

    def __init__(self, *, target: Callable[..., None], name: str, **given: Any) -> None:
        super().__init__(target=target, name=name, **given)
        self._at_once = _call_of(target, given) if name == "saves over" else None

    def start(self) -> None:
        if self._at_once is None:
            super().start()
        else:
            self._at_once()


def _call_of(target: Callable[..., None], given: dict[str, Any]) -> Callable[[], None]:
    return lambda: target(*given.get("args", ()))


def test_who_follows_removes_nothing_of_a_save_that_its_leader_may_be_committing(
    follower: SaveManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has said that its part is stored, and a newer generation begins before it is answered."""
    monkeypatch.setattr(commit_protocol.threading, "Thread", _AtOnce)
    store = FolderStore(tmp_path)
    stored(store)
    follower.commit_protocol.await_outcome(SAVE)
    follower.begin_generation(plan(2), 10, _cohort())
    assert follower._save_tracker.failure_reason(SAVE) is not None, (
        "it has heard that nobody answered"
    )
    assert left(store) == 4
    assert try_commit(store, plan(1), SAVE[1]) is not None
    assert verify(store, KEY) == []


def test_a_late_failure_removes_nothing_of_what_is_being_made_anew(tmp_path: Path) -> None:
    store, outcomes = FolderStore(tmp_path), SaveTracker(time.monotonic)
    saves = SaveManager(store, SnapshotStore(), outcomes, threading.Condition(), RetentionRules(3))
    stored(store)
    outcomes.restart(SAVE)
    saves.fail_save(SAVE, HoldfastError("generation 2 has begun"))
    assert left(store) == 4
    outcomes.abort(SAVE, "that failed too")
    saves.fail_save(SAVE, HoldfastError("that failed too"))
    assert left(store) == 0
    saves.close()


class _Meanwhile(FolderStore):
    """Something happens just before the first object that `when` knows is created or removed."""

    def __init__(self, folder: Path, when: str, then: Callable[[], object]) -> None:
        super().__init__(folder)
        self._when, self._then = when, then

    def create(self, key: str, content: Any) -> None:
        self._happen(key)
        super().create(key, content)

    def delete(self, key: str) -> None:
        self._happen(key)
        super().delete(key)

    def _happen(self, key: str) -> None:
        if key.startswith(self._when):
            then, self._then = self._then, lambda: None
            then()


def test_a_commit_object_that_is_made_during_a_sweep_goes_with_what_it_names(
    tmp_path: Path,
) -> None:
    store = FolderStore(tmp_path)
    stored(store)
    commit = _made(store, tmp_path)
    slow = _Meanwhile(tmp_path, "parts/", lambda: store.create(KEY, commit))
    assert retention.sweep_older_generations(slow, 2) == 5
    assert list_commits(store) == []
    assert left(store) == 0


def _made(store: FolderStore, folder: Path) -> bytes:
    """The commit object, which is taken away again."""
    commit = try_commit(store, plan(1), SAVE[1])
    assert commit is not None
    store.delete(KEY)
    return commit.to_bytes()


def test_who_commits_behind_a_sweep_takes_its_commit_object_back(tmp_path: Path) -> None:
    """It had looked at the fence before the newer generation was opened, and slept."""
    store = FolderStore(tmp_path)
    stored(store)

    def swept() -> None:
        create_generation(store, 2, {})
        assert retention.sweep_older_generations(store, 2) == 4

    with pytest.raises(FencedError, match="swept"):
        try_commit(_Meanwhile(tmp_path, "commits/", swept), plan(1), SAVE[1])
    assert list_commits(store) == []


def test_who_commits_before_a_sweep_has_committed(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    stored(store)
    slow = _Meanwhile(tmp_path, "commits/", lambda: create_generation(store, 2, {}))
    assert try_commit(slow, plan(1), SAVE[1]) is not None
    assert retention.sweep_older_generations(store, 2) == 0
    assert verify(store, KEY) == []
