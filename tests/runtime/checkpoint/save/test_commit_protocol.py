"""Durable checkpoints that several movers write into one run store: one commits, all learn of it,
and none removes what another may still need. Real movers, over a folder that all share."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from holdfast.checkpoint.restore.catalog import list_commits
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.checkpoint.restore.verify import verify
from holdfast.core.format.manifest import commit_key
from holdfast.events import CheckpointCommitted, CheckpointFailed, CheckpointRemoved
from tests.support.mover_cluster import Nodes
from tests.support.mover_process import TABLE, Start, assert_holds
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
