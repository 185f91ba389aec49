"""A run on several nodes whose membership changes: the start of a generation, and the place of
copies of snapshots. Real movers, and SIGKILL for the lost ones."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.core.sharding.boxes import whole_box
from holdfast.elastic.worker.restore import restore
from holdfast.events import Event, PeerFailed, SourceRejected
from holdfast_lab.chaos.actions import flip_memory_bits
from tests.support.mover_cluster import Nodes
from tests.support.mover_process import DTYPE, TABLE, Start, state
from tests.support.peer_nodes import SECRET
from tests.support.ranks import wait_until


def test_what_lies_in_the_memory_of_three_nodes_is_begun_from_by_each_of_them(start: Start) -> None:
    """The workers are lost, the movers are not. No mover has all of the state, and no copy was
    made. A node that chose nothing itself finds it too."""
    nodes = Nodes(start, "a", "b", "c")
    topo = nodes.topology(1, "abc", dp_shard=3)
    nodes.open(1)
    for name in "abc":  # no machines are named: so nothing is copied
        nodes.movers[name].client(1).expect(topo, TABLE, 0)
    nodes.equip(topo)
    for step in (1, 2):
        nodes.capture(step)
    newest = nodes.choose("b", 2, "abc")
    assert (newest.step, newest.generation, newest.durable) == (2, 1, False)
    again = nodes.topology(2, "cab", dp_shard=3)
    nodes.begin(again, newest)
    assert newest.key is not None
    for name in "abc":
        others = {f"peer {other}" for other in "abc" if other != name}
        assert nodes.restored(name, 2, newest.key, 2) == {"memory"} | others


def test_a_lost_node_s_part_comes_from_its_copy_and_a_newcomer_chooses(start: Start) -> None:
    """b goes with its memory; d comes and has nothing. d is the one that chooses, and it does not
    wait for b. Copies of the next generation go to whom there is."""
    nodes = Nodes(start, "a", "b", "c")
    first = nodes.topology(1, "abc", dp_shard=3)
    nodes.open(1)
    nodes.begin(first, start=0)
    nodes.equip(first)
    nodes.capture(1)
    for name in "abc":
        nodes.until_kept(1, name)
    assert [rank for name in "abc" for _, rank in nodes.held(name)].count(1) == 1
    nodes.kill("b")
    nodes.add("d")
    newest = nodes.choose("d", 2, "ac")
    assert (newest.step, newest.durable) == (1, False)
    assert nodes.heard(PeerFailed) == []
    second = nodes.topology(2, "dac", dp_shard=3)
    nodes.begin(second, newest)
    assert newest.key is not None
    assert "memory" not in nodes.restored("d", 2, newest.key, 1)
    assert "memory" in nodes.restored("a", 2, newest.key, 1)
    nodes.equip(second)
    nodes.capture(2)
    keepers = {name: nodes.until_kept(2, name) for name in "acd"}
    assert len(set(keepers.values())) == 3, "each keeps the copy of one other"
    assert "b" not in keepers.values()
    # A generation that has snapshots of its own needs the older one's no more.
    for step in (3, 4, 5):
        nodes.capture(step)
    wait_until(lambda: all(step > 1 for name in "acd" for step, _ in nodes.held(name)))


@pytest.mark.slow
def test_copies_stay_where_they_are_when_a_node_is_lost(start: Start) -> None:
    """Of four nodes one goes: only the copies that it held, and that it owned, move."""
    nodes = Nodes(start, *"abcd")
    first = nodes.topology(1, "abcd", dp_shard=4)
    nodes.open(1)
    nodes.begin(first, start=0)
    nodes.equip(first)
    nodes.capture(1)
    before = {name: nodes.until_kept(1, name) for name in "abcd"}
    gone = before["a"]
    nodes.kill(gone)
    nodes.ranks.clear()
    rest = [name for name in "abcd" if name != gone]
    newest = nodes.choose("a", 2, rest)
    assert newest.step == 1
    assert set(newest.placement) == set("abcd"), "the plan in force goes along"
    second = nodes.topology(2, rest, dp_shard=3)
    nodes.begin(second, newest)
    nodes.equip(second)
    nodes.capture(2)
    after = {name: nodes.until_kept(2, name) for name in rest}
    stayed = [name for name in rest if name != "a" and before[name] == after[name]]
    assert len(stayed) >= 1
    assert len(set(after.values())) == 3


@pytest.mark.slow
def test_a_mover_that_listens_elsewhere_now_is_found_there(start: Start) -> None:
    """The same generation is said again with the new list; what was being sent to the old address
    is not waited for."""
    nodes = Nodes(start, "a", "b")
    topo = nodes.topology(1, "ab", dp_shard=2)
    nodes.open(1)
    nodes.begin(topo, start=0)
    nodes.equip(topo)
    nodes.capture(1)
    assert nodes.until_kept(1, "a") == "b"
    nodes.kill("b")
    nodes.add("b")
    nodes.begin(topo, start=0)
    nodes.equip(topo, only=[1])
    nodes.capture(2)
    assert nodes.until_kept(2, "a") == "b"
    assert nodes.until_kept(2, "b") == "a"


@pytest.mark.parametrize("bucket", ["none", "out of reach"])
def test_what_is_rotten_in_a_nodes_memory_comes_from_another_ones(
    start: Start, tmp_path: Path, bucket: str
) -> None:
    """A node holds its own part and a copy of the other's, both corrupt. Its worker reads both
    where they are intact. An unreachable bucket may have them, and is not waited for."""
    (loop := tmp_path / "loop").symlink_to(loop)
    address = "" if bucket == "none" else loop.as_uri()
    nodes = Nodes(start, "a", "b")
    first = nodes.topology(1, "ab", dp_replicate=2)
    nodes.open(1)
    nodes.begin(first, start=0)
    nodes.equip(first)
    nodes.capture(1)
    for name in "ab":
        nodes.until_kept(1, name)
    assert flip_memory_bits(nodes.movers["a"].process.pid, stride=2600) > 0
    newest = nodes.choose("b", 2, "ab")
    assert (newest.step, newest.durable) == (1, False)
    nodes.begin(nodes.topology(2, "ab", dp_replicate=2), newest)
    boot: Any = SimpleNamespace(
        run_folder=str(nodes.folder),
        mover_socket=nodes.movers["a"].socket,
        generation=2,
        rank=0,
        restore_key=newest.key,
        start_step=1,
        config={"checkpoint": {"bucket": address}},
    )
    found = {spec.name: torch.zeros(spec.shape, dtype=DTYPE[spec.dtype]) for spec in TABLE}
    wanted = [(whole_box(name, tuple(tensor.shape)), tensor) for name, tensor in found.items()]
    session: Any = SimpleNamespace(engine=SimpleNamespace(load=lambda boxes: boxes.many(wanted)))
    told: list[Event] = []
    reporter: Any = SimpleNamespace(progress=lambda *_: None, emit=told.append)
    restore(boot, session, reporter, SECRET)
    right = state(1, TABLE)
    assert all(torch.equal(found[name], right[name]) for name in found)
    rejected = [event for event in told if isinstance(event, SourceRejected)]
    assert {event.source for event in rejected} == {"memory"}
    assert len({event.key for event in rejected}) == 2
