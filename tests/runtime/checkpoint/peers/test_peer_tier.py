"""Tier 1 with real processes: snapshots reach another mover's memory, and come back from there."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from holdfast.checkpoint.peers.client import OFFER_PATH, USE_COPY, PeerClient, PeerError
from holdfast.checkpoint.peers.config import Peer
from holdfast.checkpoint.peers.source import PeerSource, open_peers
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.checkpoint.restore.sources import FallbackReader
from holdfast.core.format.manifest import PartManifest, blob_key, merge_parts, writer_name
from holdfast.core.sharding.state_table import StateTable, TensorSpec
from holdfast.errors import CorruptError
from holdfast.layout import Layout, Topology, place_layout
from holdfast.policy.placement import Machine
from tests.support.peer_nodes import SECRET, TABLE, Node, assert_holds, offer_of, restored, topology
from tests.support.processes import stop
from tests.support.ranks import wait_until

Start = Callable[..., Node]


@pytest.fixture
def start() -> Iterator[Start]:
    nodes: list[Node] = []

    def make(*peers: Any, **settings: Any) -> Node:
        nodes.append(Node(*peers, **settings))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()


def pair(
    start: Start, topo: Topology | None = None, table: StateTable = TABLE, **settings: Any
) -> tuple[Node, Node]:
    """One that keeps copies, and one whose generation has begun."""
    keeper = start(name="keeper")
    owner = start(keeper, name="owner", **settings)
    owner.begin(topo or topology(), table)
    return keeper, owner


def put_kept(owner: Node, step: int, generation: int = 1) -> None:
    """Capture a step, and wait until the keeper has it."""
    assert owner.put(step) == []
    wait_until(lambda: owner.kept("keeper") == (generation, step))


def source_of(node: Node, generation: int) -> PeerSource:
    return PeerSource("peer", node.address, SECRET, generation)


def test_a_killed_mover_comes_back_from_its_peer_on_another_layout(start: Start) -> None:
    """Three ranks' shards onto two, from the memory of the machine that is left."""
    keeper, owner = pair(start, topology(dp_shard=3))
    for step in (1, 2):
        put_kept(owner, step)
    assert keeper.do("complete") == [[1, 2], [1, 1]]
    owner.kill()
    source = source_of(keeper, 2)  # the next generation asks, and fences the first
    for step in (1, 2):
        found = restored(source, 1, step)
        assert found.commit.meta == {"position": step}
        count = assert_holds(found, topology(2, dp_shard=2), step)
        assert count == sum(spec.nbytes for spec in TABLE) + 8  # the scalar lies on both
    source.close()


def test_every_rank_of_a_peer_can_be_told_from_its_manifest(start: Start) -> None:
    """The bytes are those of the owner, extent by extent, and each layout reads what it needs."""
    keeper, owner = pair(start, topology(replicas=2))
    put_kept(owner, 4)
    there, here = source_of(keeper, 1), source_of(owner, 1)
    assert there.inventory() == here.inventory()
    for line in there.inventory():
        key = blob_key(line.generation, line.step, writer_name(line.rank))
        one, other = bytearray(line.nbytes), bytearray(line.nbytes)
        there.read_into(key, 0, memoryview(one))
        here.read_into(key, 0, memoryview(other))
        assert one == other
    assert assert_holds(restored(there, 1, 4), topology(2), 4)


def test_two_machines_keep_each_others_snapshots_and_the_third_is_spared(start: Start) -> None:
    """Racks decide: the copy goes to the machine in the other one."""
    near, far = start(name="near"), start(name="far")
    owner = start(
        Peer(Machine("near", rack="a"), near.address),
        Peer(Machine("far", rack="b"), far.address),
        name="owner",
    )
    owner.begin(topology())
    owner.put(1)
    names = wait_until(lambda: near.has() + far.has())
    assert names == [(1, 1, 0)]
    both = start(
        Peer(Machine("near", rack="a"), near.address),
        Peer(Machine("far", rack="b"), far.address),
        name="both",
        copies=2,
    )
    both.begin(topology(2))
    both.put(2)
    wait_until(lambda: both.kept("near") == both.kept("far") == (2, 2))
    assert (2, 2, 0) in near.has()
    assert (2, 2, 0) in far.has()


def test_three_nodes_keep_each_others_ranks_and_one_may_go(start: Start) -> None:
    """A rank on each; every mover comes to the same plan, and whichever node is lost, the other
    two hold the step together."""
    names = ("a", "b", "c")
    ports = {name: free_port() for name in names}
    peers = {n: Peer(Machine(n), f"127.0.0.1:{port}") for n, port in ports.items()}
    nodes = {n: start(*(peers[o] for o in names if o != n), name=n, port=ports[n]) for n in names}
    topo = place_layout(Layout(dp_shard=3), 1, names)
    for number, node in enumerate(nodes.values()):
        node.begin(topo)
        node.put(1, [number])
    for node in nodes.values():
        wait_until(
            lambda node=node: [1, 1] in [s["kept"] for s in node.do("status")["sends"].values()]
        )
    assert sorted(len(node.has()) for node in nodes.values()) == [2, 2, 2]
    nodes["a"].kill()
    sources, silent = open_peers([peers["b"], peers["c"], peers["a"]], SECRET, 2)
    assert [name for name, _ in silent] == ["a"]
    parts = {
        line.rank: (PartManifest.from_bytes(line.sealed_manifest, "test"), line.sealed_manifest)
        for source in sources
        for line in source.inventory()
    }
    commit = merge_parts(parts, topo, TABLE, "c", "d")
    assert assert_holds(Checkpoint(FallbackReader(sources), commit), topology(2, dp_shard=2), 1)
    assert {(1, 1, 0), (1, 1, 2)} <= {tuple(x) for x in nodes["b"].do("memories", generation=2)}


def test_the_first_copy_goes_to_the_stable_machine_and_not_to_the_other_replica(
    start: Start,
) -> None:
    """A node that trains too lends its memory as well; it may go any time, the stable one stays."""
    stage, other = start(name="stage"), start(name="b")
    node = start(other, stage, name="a", stable="stage")
    node.begin(place_layout(Layout(dp_replicate=2), 1, ("a", "b")))
    node.put(1, [0])
    there = wait_until(lambda: [n for n in ("stage", "b") if node.kept(n) == (1, 1)])
    assert there == ["stage"]


def test_connections_stay_open_from_step_to_step(start: Start) -> None:
    """One that the owner offers over, and one that the keeper reads over."""
    keeper, owner = pair(start)

    def ends() -> set[Any]:
        found = psutil.Process(keeper.process.pid).net_connections("tcp")
        return {(c.laddr, c.raddr) for c in found if c.status == psutil.CONN_ESTABLISHED}

    seen = []
    for step in (1, 2, 3, 4):
        owner.put(step)
        wait_until(lambda s=step: owner.kept("keeper") == (1, s))
        seen.append(ends())
    assert len(seen[0]) == 2
    assert seen == [seen[0]] * 4
    owner.begin(topology(2))
    put_kept(owner, 5, generation=2)
    wait_until(lambda: len(ends()) == 2)  # those of the older generation are closed
    assert ends().isdisjoint(seen[0])


def test_unchanged_extents_are_not_sent_again(start: Start) -> None:
    keeper, owner = pair(start)
    put_kept(owner, 1)
    first = keeper.do("status")["keeps"]
    assert first["reused"] == 0
    put_kept(owner, 2)
    second = keeper.do("status")["keeps"]
    size = sum(spec.nbytes for spec in TABLE)
    frozen = TABLE[1].nbytes
    assert first["pulled"] >= size
    assert frozen - 2 * 4096 <= second["reused"] <= frozen + 2 * 4096
    assert second["pulled"] - first["pulled"] <= first["pulled"] - second["reused"]
    assert owner.do("status")["sent"] == second["pulled"]
    events = wait_until(lambda: owner.do("events") if len(owner.do("events")) == 2 else None)
    assert [event["spared"] for event in events] == [0, second["reused"]]
    assert assert_holds(restored(source_of(keeper, 1), 1, 2), topology(2, dp_shard=2), 2)


def test_a_kill_in_the_middle_of_a_pull_leaves_the_older_one_whole(start: Start) -> None:
    keeper, slow = pair(start, topology(dp_shard=2), TABLE[:1], bytes_per_second=20_000.0)
    put_kept(slow, 1)
    slow.put(2)
    before = keeper.do("status")["keeps"]["pulled"]
    wait_until(lambda: keeper.do("status")["keeps"]["pulled"] > before)  # it has begun
    slow.kill()
    wait_until(lambda: keeper.do("status")["keeps"]["refused"])
    assert keeper.do("complete") == [[1, 1]]
    assert assert_holds(restored(source_of(keeper, 2), 1, 1), topology(2), 1)


def test_a_receiver_that_is_told_to_end_does_so_in_the_middle_of_a_pull(start: Start) -> None:
    keeper, slow = pair(start, topology(), TABLE[:1], bytes_per_second=5_000.0)
    slow.put(1)
    wait_until(lambda: slow.do("status")["sent"])
    assert keeper.process.stdin is not None
    keeper.process.stdin.close()  # its orderly end
    assert keeper.process.wait(120) == 0


@pytest.mark.slow
def test_a_receiver_that_is_killed_costs_a_copy_and_nothing_else(start: Start) -> None:
    """The owner continues to capture, reports the loss once, and sends to the new receiver once it
    is up."""
    keeper = start(name="keeper", port=free_port())
    owner = start(keeper, name="owner")
    owner.begin(topology())
    put_kept(owner, 1)
    stop(keeper.process.pid)
    assert owner.put(2) == []  # the pull hangs, the capture does not
    keeper.kill()
    wait_until(lambda: owner.do("status")["sends"]["keeper"]["counts"]["failed"])
    events = wait_until(lambda: owner.do("events") if len(owner.do("events")) == 2 else None)
    assert [event["kind"] for event in events] == ["snapshot_kept", "peer_failed"]
    port = int(keeper.address.rpartition(":")[2])
    again = start(name="keeper", port=port)
    steps = itertools.count(3)

    def kept() -> bool:
        """A step more as soon as nothing is on its way: a newer one would take its place."""
        if not owner.do("status")["sends"]["keeper"]["busy"]:
            owner.put(next(steps))
        return bool(owner.kept("keeper")[1] > 2)

    wait_until(kept)
    source = source_of(again, 1)
    newest = source.inventory()[0]
    assert assert_holds(restored(source, 1, newest.step), topology(2), newest.step)


def test_a_newer_step_takes_the_place_of_one_that_waits(start: Start) -> None:
    keeper, owner = pair(start, topology(), TABLE[:1], bytes_per_second=40_000.0)
    wait_until(lambda: owner.put(1) == [])
    wait_until(lambda: owner.do("status")["sends"]["keeper"]["busy"])
    assert owner.put(2) == owner.put(3) == owner.put(4) == []
    wait_until(lambda: owner.kept("keeper") == (1, 4))
    counts = owner.do("status")["sends"]["keeper"]["counts"]
    assert counts == {"kept": 2, "superseded": 2, "failed": 0}
    events = wait_until(lambda: owner.do("events") if len(owner.do("events")) == 2 else None)
    assert sum(event["skipped"] for event in events) == 2
    assert keeper.has() == [(1, 4, 0), (1, 1, 0)]


@pytest.mark.parametrize("slots", [2, 3])
def test_a_slow_holder_holds_up_no_capture(start: Start, slots: int) -> None:
    """It has taken next to nothing, and every step finds a slot."""
    keeper, owner = pair(
        start, topology(dp_shard=2), TABLE[:1], bytes_per_second=1_000.0, slots=slots
    )
    assert [owner.put(step) for step in range(1, 13)] == [[]] * 12
    assert keeper.has() == []
    status = owner.do("status")["sends"]["keeper"]
    assert status["counts"]["superseded"] > 0
    assert status["counts"]["failed"] == 0


def test_a_rotten_byte_of_the_owner_is_not_kept(start: Start) -> None:
    keeper, owner = pair(start, every_steps=2)
    owner.put(1)  # not offered: only every second one is
    owner.do("flip", generation=1, step=1, rank=0)
    source = source_of(owner, 1)
    line = source.inventory()[0]
    body = offer_of(line.sealed_manifest, owner.address, topology())
    client = PeerClient(keeper.address, SECRET, 1)
    with pytest.raises(PeerError, match="sent other bytes than it announced"):
        client.post(OFFER_PATH, body)
    assert keeper.has() == []
    # A reader that reads it from the owner itself sees the error as well.
    found = restored(source, 1, 1)
    with pytest.raises(CorruptError, match="checksum does not match"):
        assert_holds(found, topology(2), 1)


def test_the_next_generation_ends_the_older_ones_when_it_is_complete(start: Start) -> None:
    keeper, owner = pair(start, topology(dp_shard=3))
    put_kept(owner, 5)
    owner.begin(topology(2, dp_shard=2))
    owner.put(6, [0])  # rank 1 is missing: nothing is offered yet
    assert keeper.do("complete") == [[1, 5]]
    owner.put(6, [1])
    wait_until(lambda: owner.kept("keeper") == (2, 6))
    assert keeper.has() == [(2, 6, 0), (2, 6, 1)]
    used = keeper.do("status")["keeps"]["used"]
    assert used < 3 * sum(spec.nbytes for spec in TABLE)


def test_no_room_is_a_sentence_and_room_is_made_from_older_generations(start: Start) -> None:
    size = sum(spec.nbytes for spec in TABLE)
    tight = start(name="keeper", room=3 * size)
    owner = start(tight, name="owner")
    owner.begin(topology())
    put_kept(owner, 1)
    owner.begin(topology(2, dp_shard=2))
    put_kept(owner, 2, generation=2)
    assert tight.has() == [(2, 2, 0), (2, 2, 1)]
    full = start(name="full", room=size)
    other = start(full, name="owner")
    other.begin(topology(3))
    other.put(3)
    wait_until(lambda: other.do("status")["sends"]["full"]["counts"]["failed"])
    assert "no room for a copy" in other.do("status")["sends"]["full"]["reason"]
    assert full.has() == []


def test_the_budget_bounds_what_leaves(start: Start) -> None:
    """Counted in bytes over a window that the test measures itself."""
    keeper = start(name="keeper")
    rate = 100_000.0
    table = (TensorSpec("model.w", "F32", (4000, 256), 0),)  # 40 s at this rate
    owner = start(keeper, name="owner", bytes_per_second=rate, extent_bytes=16384)
    owner.begin(topology(), table)
    import time

    begun = time.monotonic()
    owner.put(1)
    wait_until(lambda: time.monotonic() - begun > 2.5 and owner.do("status")["sent"] > 0)
    sent = int(owner.do("status")["sent"])
    passed = time.monotonic() - begun
    assert 0 < sent <= 1.2 * rate * passed
    # A restore is not throttled: it has the complete blob while the copy is still under way.
    source = source_of(owner, 1)
    assert assert_holds(restored(source, 1, 1), topology(2), 1)
    assert keeper.has() == []


def test_a_peer_that_dies_during_a_restore_leaves_the_rest_to_the_next_source(start: Start) -> None:
    first, second = start(name="first"), start(name="second")
    owner = start(first, second, name="owner", copies=2)
    owner.begin(topology(dp_shard=2))
    owner.put(1)
    wait_until(lambda: owner.kept("first") == owner.kept("second") == (1, 1))
    sources = [source_of(first, 2), source_of(second, 2)]
    commit = restored(sources[0], 1, 1).commit
    mixed = FallbackReader(sources)
    first.kill()
    assert assert_holds(Checkpoint(mixed, commit), topology(2), 1)
    assert mixed.stats.problems


def test_reading_what_was_overwritten_is_missing(start: Start) -> None:
    owner = start(name="owner")
    owner.begin(topology())
    owner.put(1)
    source = source_of(owner, 1)
    for step in (2, 3, 4):
        owner.put(step)
    line = source.inventory()[0]
    key = blob_key(line.generation, line.step, writer_name(line.rank))
    with pytest.raises(Exception, match="is not in memory"):
        source.read_into(key, 0, memoryview(bytearray(100)))


def test_threads_share_a_client(start: Start) -> None:
    owner = start(name="owner")
    owner.begin(topology())
    owner.put(1)
    client = PeerClient(owner.address, SECRET, 1)
    line = source_of(owner, 1).inventory()[0]
    key = blob_key(1, 1, writer_name(0))
    whole = bytearray(line.nbytes)
    client.read_into(key, 0, memoryview(whole))
    wrong: list[int] = []

    def read(start: int) -> None:
        for at in range(start, line.nbytes - 999, 7777):
            out = bytearray(999)
            client.read_into(key, at, memoryview(out), USE_COPY)
            if out != whole[at : at + 999]:
                wrong.append(at)

    threads = [threading.Thread(target=read, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert wrong == []


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
