"""Durable checkpoints that several movers write into one run store. One commits, and all learn of
it. None removes what another may still need, also as a newer generation begins."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.format.save_context import SaveContext
from holdfast.checkpoint.memory.snapshot_store import SnapshotStore
from holdfast.checkpoint.peers.config import Cohort, Peer
from holdfast.checkpoint.restore.catalog import list_commits
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.checkpoint.restore.verify import verify
from holdfast.checkpoint.save import commit_protocol, retention
from holdfast.checkpoint.save.commit_protocol import SAVE_PATH, CommitProtocol
from holdfast.checkpoint.save.retention import RetentionRules
from holdfast.checkpoint.save.save_manager import SaveManager
from holdfast.checkpoint.save.save_tracker import SaveId, SaveTracker
from holdfast.checkpoint.save.writer import try_commit
from holdfast.core.format.manifest import commit_key
from holdfast.errors import FencedError, HoldfastError
from holdfast.events import CheckpointCommitted, CheckpointFailed, CheckpointRemoved
from holdfast.policy.placement import Machine
from holdfast.wire.store.run_store import FolderStore
from holdfast.wire.term import create_generation
from tests.runtime.checkpoint.peers.test_server import listening
from tests.support.mover_cluster import Nodes
from tests.support.mover_process import TABLE, Start, assert_holds, topology, write_noise
from tests.support.peer_nodes import SECRET
from tests.support.processes import stop
from tests.support.ranks import wait_until


def begun(start: Start, names: str, slots: int = 3, **settings: object) -> Nodes:
    nodes = Nodes(start, *names, mover=settings)
    topo = nodes.topology(1, names, dp_shard=len(names))
    nodes.open(1)
    nodes.begin(topo, start=0)
    nodes.equip(topo, slots)
    return nodes


def test_each_stores_its_ranks_one_commits_and_all_hear_of_it(start: Start) -> None:
    nodes = begun(start, "abc", keep_last=2)
    for step in (1, 2, 3):
        nodes.capture(step, durable=True)
        assert [rank.settle(step) for rank in nodes.ranks.values()] == [None] * 3
        assert_holds(Checkpoint.open(nodes.store, commit_key(1, step)), step, TABLE)
    told = nodes.heard(CheckpointCommitted)
    assert [(name, event.step) for name, event in told] == [("a", 1), ("a", 2), ("a", 3)]
    wait_until(lambda: nodes.heard(CheckpointRemoved))
    assert [(n, e.step) for n, e in nodes.heard(CheckpointRemoved)] == [("a", 1)]
    assert len(list_commits(nodes.store)) == 2
    assert nodes.heard(CheckpointFailed) == []


def test_a_part_that_one_node_cannot_store_ends_the_save_everywhere_once(start: Start) -> None:
    """The disk of a follower fails. Its save fails, the other nodes' parts are removed, the reason
    is reported once, and the next step is saved."""
    nodes = begun(start, "abc")
    blocked = nodes.folder / "data" / f"{1:010d}"
    blocked.mkdir(parents=True)
    # The blob of rank 1 cannot be made where a folder with its name is.
    stone = blocked / f"{1:010d}-rank00001-0.safetensors"
    stone.mkdir()
    nodes.capture(1, durable=True)
    reasons = [rank.settle(1) for rank in nodes.ranks.values()]
    assert None not in reasons
    assert [name for name, _ in nodes.heard(CheckpointFailed)] == ["b"]
    stone.rmdir()
    wait_until(lambda: not _files(nodes.folder, 1))
    nodes.capture(2, durable=True)
    assert [rank.settle(2) for rank in nodes.ranks.values()] == [None] * 3
    assert verify(nodes.store, commit_key(1, 2)) == []


def test_a_node_that_is_slow_to_store_an_older_step_is_waited_for(start: Start) -> None:
    """c is stopped before it has stored step 1, and continues when step 2 has been handed over.
    Both are committed, and the quicker movers remove no part of either."""
    nodes = begun(start, "abc")
    stop(nodes.movers["c"].process.pid)
    nodes.capture(1, durable=True, only=[0, 1])
    wait_until(lambda: len(_files(nodes.folder, 1, "parts")) == 2)
    os.kill(nodes.movers["c"].process.pid, signal.SIGCONT)
    nodes.capture(1, durable=True, only=[2])
    nodes.capture(2, durable=True)
    for step in (1, 2):
        assert [rank.settle(step) for rank in nodes.ranks.values()] == [None] * 3
        assert_holds(Checkpoint.open(nodes.store, commit_key(1, step)), step, TABLE)
    assert sorted(e.step for _, e in nodes.heard(CheckpointCommitted)) == [1, 2]


def test_the_leader_s_mover_is_replaced_and_commits_what_the_others_have_stored(
    start: Start,
) -> None:
    """What a's mover had under way is lost and said so; b has stored its part and learns it. Then
    the new one leads: what had been committed stays so, and the next step is committed."""
    nodes = begun(start, "ab")
    nodes.capture(1, durable=True)
    assert [rank.settle(1) for rank in nodes.ranks.values()] == [None] * 2
    nodes.capture(2, durable=True, only=[1])
    wait_until(lambda: len(_files(nodes.folder, 2, "parts")) == 1)
    nodes.kill("a")
    nodes.add("a")
    topo = nodes.topology(1, "ab", dp_shard=2)
    nodes.begin(topo, start=0)
    nodes.movers["a"].client(1).report_orphaned_saves(0, [1, 2])
    reason = nodes.ranks[1].settle(2)
    assert reason is not None
    assert "ended" in reason
    wait_until(lambda: not _files(nodes.folder, 2))
    nodes.equip(topo, only=[0])
    assert nodes.ranks[0].settle(1) is None, "it is known to be committed"
    nodes.capture(3, durable=True)
    assert [rank.settle(3) for rank in nodes.ranks.values()] == [None] * 2
    assert_holds(Checkpoint.open(nodes.store, commit_key(1, 3)), 3, TABLE)
    assert commit_key(1, 1) in list_commits(nodes.store)


def test_a_leader_that_dies_with_everything_stored_is_replaced_by_one_that_commits(
    start: Start,
) -> None:
    """Both parts are in the run store, and a's mover was stopped before it learned of it. The new
    mover finds its part and is notified of the other."""
    nodes = begun(start, "ab")
    nodes.capture(1, durable=True, only=[0])
    wait_until(lambda: len(_files(nodes.folder, 1, "parts")) == 1)
    stop(nodes.movers["a"].process.pid)
    nodes.capture(1, durable=True, only=[1])
    wait_until(lambda: len(_files(nodes.folder, 1, "parts")) == 2)
    nodes.movers.pop("a").kill()
    nodes.add("a")
    nodes.begin(nodes.topology(1, "ab", dp_shard=2), start=0)
    assert nodes.ranks[1].settle(1) is None
    assert_holds(Checkpoint.open(nodes.store, commit_key(1, 1)), 1, TABLE)


def test_what_only_memory_holds_is_made_durable_by_whoever_leads(start: Start) -> None:
    """b chooses, c leads the next generation and has nothing itself; all three sweep, and none
    removes what another one is writing."""
    nodes = begun(start, "ab")
    nodes.capture(1)
    nodes.add("c")
    newest = nodes.choose("b", 2, "ab")
    assert not newest.durable
    topo = nodes.topology(2, "cab", dp_shard=3)
    nodes.begin(topo, newest)
    assert newest.key is not None
    assert nodes.movers["b"].client(1).wait_until_committed(1, 60) is None
    assert [name for name, _ in nodes.heard(CheckpointCommitted)] == ["c"]
    assert_holds(Checkpoint.open(nodes.store, newest.key), 1, TABLE)
    nodes.equip(topo)
    nodes.capture(2, durable=True)
    assert [rank.settle(2) for rank in nodes.ranks.values()] == [None] * 3


def _files(folder: Path, step: int, kind: str = "") -> list[str]:
    found = (folder / kind if kind else folder).rglob(f"{step:010d}-rank*")
    return [str(path) for path in found if path.is_file()]


SAVES: list[SaveId] = [(1, 10), (1, 20), (1, 30)]


class Slow(FolderStore):
    """The first listing of it takes until it is released."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.asked, self.go_on = threading.Event(), threading.Event()

    def size(self, key: str) -> int:
        self.asked.set()
        assert self.go_on.wait(120)
        return super().size(key)


class Ends:
    def __init__(self) -> None:
        self.told: dict[SaveId, str] = {}

    def all_parts_stored(self, save: SaveId) -> None:
        raise AssertionError("this one follows")

    part_failed = all_parts_stored  # type: ignore[assignment]

    def on_save_ended(self, save: SaveId, key: str | None, reason: str) -> None:
        self.told.setdefault(save, reason)


def plan(generation: int) -> SaveContext:
    return SaveContext(generation, topology(2, generation=generation), TABLE, "c", "d", 1024)


def test_a_late_answer_about_one_save_keeps_no_other_from_its_end(tmp_path: Path) -> None:
    asked, go_on = threading.Event(), threading.Event()

    def answer(generation: int, body: Mapping[str, Any]) -> dict[str, Any]:
        asked.set()
        assert go_on.wait(120)
        return {"ended": [[1, 10, None, "generation 2 began"]], "heard": True}

    store, ends = Slow(tmp_path), Ends()
    with listening() as (server, address):
        server.post_handlers[SAVE_PATH] = answer
        leader = Peer(Machine("a"), address)
        follower = CommitProtocol(SaveTracker(time.monotonic), store, ends)
        follower.set_leader_access(SECRET, "", lambda generation: ())
        follower.begin_generation(plan(1), Cohort("b", (leader,), leader_peer=leader))
        for save in SAVES:
            follower.await_outcome(save)
        assert asked.wait(120)
        follower.begin_generation(plan(2), Cohort("b", (leader,), leader_peer=leader))
        assert store.asked.wait(120)
        go_on.set()  # the leader's answer comes while the run store is looked into
        wait_until(lambda: (1, 10) in ends.told)
        store.go_on.set()
        wait_until(lambda: set(ends.told) == set(SAVES))
        follower.close()


SAVE = (1, 10)
KEY = commit_key(*SAVE)


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
