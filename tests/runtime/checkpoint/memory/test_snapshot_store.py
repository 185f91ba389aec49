"""Tier 0: snapshots that a mover keeps in memory, for how long, how a restart uses them, and what
goes if memory is short."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.capture.capturer import CompletedCapture, SkippedCapture
from holdfast.checkpoint.format.blob import blob_header, blob_size
from holdfast.checkpoint.memory.arena import Arena, identity_digest, slot_capacity
from holdfast.checkpoint.memory.snapshot_store import MemoryFile
from holdfast.checkpoint.mover.client import MoverClient
from holdfast.checkpoint.mover.service import MoverService, MoverSettings
from holdfast.checkpoint.restore.catalog import list_commits
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.checkpoint.restore.sources import FallbackReader, MappedSource, StoreSource
from holdfast.checkpoint.restore.start_records import record_start
from holdfast.core.format.manifest import commit_key, place_boxes
from holdfast.core.sharding.ownership import owned_boxes
from holdfast.core.sharding.state_table import local_boxes
from holdfast.errors import CorruptError, FencedError, HoldfastError
from holdfast.events import CheckpointCommitted, SnapshotComplete, SnapshotDropped
from holdfast.layout import Topology
from holdfast.machine import limits
from holdfast.policy.saving.destinations import SaveDestinations
from holdfast.wire.store.run_store import FolderStore, MissingKeyError
from holdfast.wire.term import create_generation
from tests.support.mover_process import (
    TABLE,
    Mover,
    Start,
    Workers,
    assert_holds,
    assert_reads,
    events_until,
    topology,
)


def remember(workers: Workers, step: int) -> None:
    """Every rank hands over a snapshot that stays in memory; returns when it is complete."""
    workers.compute(step)
    for rank in workers.ranks:
        rank.hand_over(step, durable=False)
    events_until(workers.client, lambda e: isinstance(e, SnapshotComplete) and e.step == step)


@contextmanager
def opened(mover: Mover, client: MoverClient, key: str) -> Iterator[Checkpoint]:
    """What a worker restores from: the mover's memory, mapped, and behind it the run store."""
    holdings = client.holdings(key)
    mapped = MappedSource(holdings.slots)
    yield Checkpoint(FallbackReader([mapped, StoreSource(mover.store)]), holdings.commit)
    mapped.close()


def next_generation(mover: Mover, topo: Topology) -> tuple[MoverClient, Any]:
    """As the agent does: open it, ask for the restore point, say who will write."""
    client = mover.client(topo.generation)
    with pytest.raises(HoldfastError):
        client.holdings("commits/none.json")
    create_generation(mover.store, topo.generation, {})
    newest = client.find_restore_point()
    client.expect(topo, TABLE, newest.step)
    return client, newest


def read_everything(checkpoint: Checkpoint, step: int, topo: Topology) -> None:
    """Every rank of `topo` reads its boxes in one pass; all are those of `step`."""
    for rank in range(topo.world_size):
        boxes = [box for box in local_boxes(topo, TABLE, rank) if box.size]
        assert_reads(checkpoint, boxes, step)


@pytest.mark.parametrize(("replicas", "dp_shard"), [(2, 2), (2, 1), (1, 3)])
def test_the_newest_snapshot_outlives_its_generation_and_opens_on_any_layout(
    start: Start, replicas: int, dp_shard: int
) -> None:
    mover = start()
    first = topology(2, 2)
    client = mover.begin(first)
    workers = Workers(client, first)
    workers.commit(1)
    for step in (2, 3, 4):
        remember(workers, step)
    second = topology(replicas, dp_shard, generation=2)
    client, newest = next_generation(mover, second)
    assert (newest.step, newest.durable, newest.meta) == (4, False, {"position": 64})
    with opened(mover, client, newest.key) as checkpoint:
        read_everything(checkpoint, 4, second)
        assert set(checkpoint.read_stats.bytes_by_source) == {"memory"}
    for _ in range(3):  # the old memory goes with the new generation's first complete snapshot
        Workers(client, second)
    workers = Workers(client, second)
    remember(workers, 5)
    assert [tuple(s) for s in client.status()["memory"]] == [(2, 5)]


def test_what_only_memory_held_is_made_durable(start: Start) -> None:
    mover = start()
    topo = topology(2)
    client = mover.begin(topo)
    remember(Workers(client, topo), 7)
    assert list_commits(mover.store) == []
    client, newest = next_generation(mover, topology(1, generation=2))
    events_until(client, lambda e: isinstance(e, CheckpointCommitted) and e.step == 7)
    assert list_commits(mover.store) == [newest.key] == [commit_key(1, 7)]
    assert_holds(Checkpoint.open(mover.store, commit_key(1, 7)), 7)
    mover.kill()
    again = start()
    assert again.client(3).find_restore_point().step == 7


def test_an_incomplete_step_is_passed_over(start: Start) -> None:
    mover = start()
    workers = mover.workers(2, slots=3)
    remember(workers, 1)
    workers.compute(2)
    workers.ranks[0].hand_over(2, durable=False)
    client, newest = next_generation(mover, topology(2, generation=2))
    assert newest.step == 1
    with opened(mover, client, newest.key) as checkpoint:
        read_everything(checkpoint, 1, topology(1))


def test_the_newest_complete_step_is_never_overwritten(start: Start) -> None:
    """Rank 1 is lost; rank 0 captures for as long as it finds room. The last step of both stays."""
    mover = start()
    workers = mover.workers(2)
    remember(workers, 1)
    for step in (2, 3, 4):
        workers.compute(step)
        if isinstance(workers.capturers[0].capture(step), CompletedCapture):
            workers.capturers[0].announce(step, {}, SaveDestinations(False))
    assert workers.client.drain()
    client, newest = next_generation(mover, topology(1, generation=2))
    assert newest.step == 1
    with opened(mover, client, newest.key) as checkpoint:
        read_everything(checkpoint, 1, topology(1))


def test_a_step_that_one_rank_skipped_holds_no_slot(start: Start) -> None:
    workers = start().workers(2)
    remember(workers, 1)
    workers.compute(2)
    workers.ranks[0].hand_over(2, durable=False)  # rank 1 skips this one
    assert isinstance(workers.capturers[0].capture(3), SkippedCapture)
    workers.compute(4)
    workers.ranks[1].hand_over(4, durable=False)
    workers.ranks[0].hand_over(4, durable=False)
    events_until(workers.client, lambda e: isinstance(e, SnapshotComplete) and e.step == 4)


def test_a_rank_without_a_snapshot_says_so_and_holds_up_nobody(start: Start) -> None:
    """Rank 1's copy failed, so rank 0's part of the step can never become complete."""
    workers = start().workers(2)
    remember(workers, 1)
    workers.compute(2)
    workers.ranks[0].hand_over(2)
    assert isinstance(workers.capturers[1].announce(2, {}), SkippedCapture)
    assert (
        workers.capturers[0].wait_until_committed(2, 60)
        == "rank 1: nothing was captured at this step"
    )
    workers.compute(3)
    for rank in workers.ranks:  # as the loop does: no rank has seen a later step
        rank.hand_over(3, durable=False)
    events_until(workers.client, lambda e: isinstance(e, SnapshotComplete) and e.step == 3)


def flip_in_memory(client: MoverClient, key: str, number: int = 0) -> str:
    """One bit of a blob in the mover's memory, after it was hashed; the blob's key."""
    holdings = client.holdings(key)
    blob = sorted(holdings.slots)[number]
    fd, slot, header = holdings.slots[blob]
    arena = Arena(fd)
    arena.data(slot, header.length)[header.length - 1] ^= 0x20
    for other in {f for f, _, _ in holdings.slots.values()}:
        os.close(other)
    return blob


def test_a_flipped_byte_in_memory_comes_from_the_disk(start: Start) -> None:
    mover = start()
    workers = mover.workers(2)
    workers.commit(3)
    client, newest = next_generation(mover, topology(1, generation=2))
    blob = flip_in_memory(client, newest.key)
    with opened(mover, client, newest.key) as checkpoint:
        read_everything(checkpoint, 3, topology(1))
        assert set(checkpoint.read_stats.bytes_by_source) == {"memory", "run store"}
        ((source, key, reason),) = set(checkpoint.read_stats.problems)
        assert (source, key) == ("memory", blob)
        assert "checksum does not match" in reason


def test_a_flipped_byte_that_is_nowhere_else_is_refused_and_the_next_taken(start: Start) -> None:
    mover = start()
    workers = mover.workers(2)
    workers.commit(3)
    remember(workers, 4)
    arena = workers.capturers[0]._arena
    for slot in range(arena.slots):
        header = arena.header(slot)
        if header is not None and header.step == 4:
            arena.data(slot, header.length)[header.length - 1] ^= 0x20
    client, newest = next_generation(mover, topology(1, generation=2))
    assert newest.step == 4
    with (
        opened(mover, client, newest.key) as checkpoint,
        pytest.raises((CorruptError, MissingKeyError), match="checksum"),
    ):
        read_everything(checkpoint, 4, topology(1))
    assert list_commits(mover.store) == [commit_key(1, 3)]  # rot does not become durable
    third = mover.client(3)
    create_generation(mover.store, 3, {})
    found = third.find_restore_point(corrupt_keys={newest.key: "a flipped byte"})
    assert (found.step, found.durable) == (3, True)
    assert (newest.key, "a flipped byte") in found.rejected


def test_what_a_later_generation_gave_up_does_not_come_back(start: Start) -> None:
    """Generation 2 began from step 1 although memory had step 5 (its agent could not see it). A
    third one must not continue the abandoned branch."""
    mover = start()
    workers = mover.workers()
    workers.commit(1)
    remember(workers, 5)
    create_generation(mover.store, 2, {})
    record_start(mover.store, 2, 1)  # another mover did
    create_generation(mover.store, 3, {})
    found = mover.client(3).find_restore_point()
    assert (found.step, found.durable) == (1, True)
    assert [reason for _, reason in found.rejected] == [
        "a later generation began again from an older step"
    ]


def test_memory_is_used_again_only_when_nobody_else_can_write_there(start: Start) -> None:
    """This process is alive and has the first generation's memory mapped: it stays its own."""
    mover = start()
    topo = topology()
    client = mover.begin(topo)
    old = Workers(client, topo)
    remember(old, 1)
    client, newest = next_generation(mover, topology(generation=2))
    new = Workers(client, topology(generation=2))
    old.compute(9)
    assert isinstance(
        old.capturers[0].capture(9), CompletedCapture
    )  # scribbles into its own memory only
    remember(new, 2)
    third, newest = next_generation(mover, topology(generation=3))
    with opened(mover, third, newest.key) as checkpoint:
        read_everything(checkpoint, 2, topology())


def test_a_worker_that_stays_gets_its_memory_again_once_it_has_let_go(start: Start) -> None:
    """The same process captures in the next generation, into the same memory. There the last
    generation's newest snapshot stays until this generation has one."""
    mover = start()
    first = mover.begin(topology())
    old = Workers(first, topology())
    remember(old, 1)
    old.capturers[0].close()
    client, newest = next_generation(mover, topology(generation=2))
    new = Workers(client, topology(generation=2), let_go=True)
    new.compute(2)
    assert isinstance(new.capturers[0].capture(2), CompletedCapture)
    new.compute(3)
    assert isinstance(new.capturers[0].capture(3), SkippedCapture), "the other slot is still needed"
    with opened(mover, client, newest.key) as checkpoint:
        read_everything(checkpoint, 1, topology())
    assert new.capturers[0].announce(2, {}, SaveDestinations(False)) is None
    events_until(client, lambda e: isinstance(e, SnapshotComplete) and e.step == 2)
    new.compute(3)
    assert isinstance(new.capturers[0].capture(3, wait=60), CompletedCapture)


def test_extents_are_read_once_and_only_where_a_box_lies(start: Start) -> None:
    """Four writers, three readers: bytes read per byte needed."""
    mover = start(extent_bytes=128)
    mover.workers(1, 4).commit(1)
    commit = Checkpoint.open(mover.store, commit_key(1, 1)).commit
    readers = topology(1, 3)
    for rank in range(3):
        checkpoint = Checkpoint(mover.store, commit)
        boxes = [b for b in local_boxes(readers, TABLE, rank) if b.size]
        outs = [
            bytearray(b.size * checkpoint.spec(b.name).nbytes // max(1, _size(b.name)))
            for b in boxes
        ]
        checkpoint.read_all(zip(boxes, map(memoryview, outs), strict=True))
        touched = checkpoint.bytes_read
        once = {(w.blob.key, e.offset) for w in commit.writers for e in w.blob.extents()}
        assert touched <= 128 * len(once)
        assert touched <= sum(map(len, outs)) + 2 * 128 * 4 * len(boxes)


def _size(name: str) -> int:
    (spec,) = [spec for spec in TABLE if spec.name == name]
    size = 1
    for length in spec.shape:
        size *= length
    return size


def blob_of(topo: Topology, rank: int) -> tuple[bytes, int]:
    tensors = place_boxes(owned_boxes(topo, TABLE, rank), TABLE)
    head = blob_header(tensors)
    return head, blob_size(head, tensors)


def ask(service: MoverService, topo: Topology, rank: int, process: int | None) -> Arena:
    size = slot_capacity(blob_of(topo, rank)[1])
    fd = service.get_arena(topo.generation, rank, size, 2, process)
    try:
        return Arena(fd)
    finally:
        os.close(fd)


def keep_snapshot(
    service: MoverService, arena: Arena, topo: Topology, rank: int, step: int
) -> None:
    head, size = blob_of(topo, rank)
    slot = arena.free_slot()
    assert slot is not None
    arena.begin_write(slot)
    arena.data(slot, len(head))[:] = head
    made = arena.finish_write(
        slot, identity_digest("test"), topo.generation, step, size, identity_digest(head)
    )
    service.accept_capture(topo.generation, rank, step, slot, made.sequence, {}, durable=False)
    assert service.drain(60)


def begin(service: MoverService, folder: Path, topo: Topology) -> int:
    """Open a generation, ask for its restore point, begin it; the step."""
    create_generation(FolderStore(folder), topo.generation, {})
    step = service.find_restore_point(topo.generation, 20).step
    service.expect(topo.generation, topo, TABLE, step)
    return step


@pytest.fixture
def service(tmp_path: Path) -> MoverService:
    return MoverService(FolderStore(tmp_path), MoverSettings("test", "c", "d", extent_bytes=1024))


def test_without_room_for_both_the_older_snapshot_goes_when_all_have_restored(
    service: MoverService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = topology(), topology(generation=2)
    begin(service, tmp_path, first)
    arena = ask(service, first, 0, os.getpid())
    keep_snapshot(service, arena, first, 0, 3)
    assert begin(service, tmp_path, second) == 3
    # As if one of the two fitted: there is room once nothing is on the shelf any more.
    monkeypatch.setattr(
        limits, "available_memory", lambda: 0 if service.snapshot_store.complete_steps() else 2**30
    )
    new = ask(service, second, 0, os.getpid())
    assert service.snapshot_store.complete_steps() == []
    events, _ = service.save_tracker.events_since(0, 0)
    dropped = [fields for kind, fields in events if kind == SnapshotDropped.kind]
    assert [fields["step"] for fields in dropped] == [3]
    assert "no memory for an arena" in dropped[0]["reason"]
    keep_snapshot(service, new, second, 0, 4)
    assert service.snapshot_store.complete_steps() == [(2, 4)]


def test_an_arena_in_the_making_delays_nobody_and_a_newer_generation_is_not_overlooked(
    service: MoverService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gigabytes take seconds: meanwhile the mover answers, and the next generation can begin."""
    first, second = topology(), topology(generation=2)
    begin(service, tmp_path, first)
    making, go = threading.Event(), threading.Event()
    create = Arena.create

    def slow(name: str, slots: int, capacity: int, numa_node: int | None) -> int:
        if name.startswith("holdfast-1-"):
            making.set()
            assert go.wait(120)
        return create(name, slots, capacity, numa_node)

    monkeypatch.setattr(Arena, "create", staticmethod(slow))
    with ThreadPoolExecutor(2) as threads:
        try:
            late = [threads.submit(ask, service, first, 0, os.getpid())]
            assert making.wait(120)
            late.append(threads.submit(ask, service, first, 0, os.getpid()))
            assert begin(service, tmp_path, second) == 0
            arena = ask(service, second, 0, os.getpid())
        finally:
            go.set()
        for asked in late:
            with pytest.raises(FencedError):
                asked.result(120)
    keep_snapshot(service, arena, second, 0, 1)
    assert service.snapshot_store.complete_steps() == [(2, 1)]


def test_memory_of_a_worker_that_has_ended_is_used_again(
    service: MoverService, tmp_path: Path
) -> None:
    """Its newest snapshot stays; what it captured and never announced does not block a slot."""
    first, second = topology(), topology(generation=2)
    begin(service, tmp_path, first)
    worker = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    arena = ask(service, first, 0, worker.pid)
    keep_snapshot(service, arena, first, 0, 3)
    head, size = blob_of(first, 0)
    slot = arena.free_slot()
    assert slot is not None
    arena.begin_write(slot)
    # killed before it said so
    arena.finish_write(slot, identity_digest("test"), 1, 4, size, identity_digest(head))
    worker.kill()
    worker.wait()
    if worker.stdin is not None:
        worker.stdin.close()
    assert begin(service, tmp_path, second) == 3
    again = ask(service, second, 0, os.getpid())
    assert again.free_slot() == slot
    kept = service.snapshot_store.get(1, 3, 0)
    assert kept.slot != slot
    assert again.header(kept.slot) == kept.header  # the same memory
    keep_snapshot(service, again, second, 0, 5)
    assert service.snapshot_store.complete_steps() == [(2, 5)]


def test_memory_is_deserted_when_every_writer_has_ended_and_not_before() -> None:
    made = MemoryFile(Arena.create("test", 2, 4096))
    made.add_writer(os.getpid())
    assert not made.has_no_writers_but(None)
    ended = MemoryFile(Arena.create("test", 2, 4096))
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ended.add_writer(child.pid)
    assert not ended.has_no_writers_but(None)
    child.communicate(b"\n")
    assert ended.has_no_writers_but(None)
    ended.add_writer(None)  # an unknown process
    assert not ended.has_no_writers_but(None)
