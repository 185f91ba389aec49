"""Arenas and older snapshots if memory is short, and the workers that may write into memory
again."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.checkpoint.format.blob import blob_header, blob_size
from holdfast.checkpoint.memory.arena import Arena, identity_digest, slot_capacity
from holdfast.checkpoint.memory.snapshot_store import MemoryFile
from holdfast.checkpoint.mover.service import MoverService, MoverSettings
from holdfast.core.format.manifest import place_boxes
from holdfast.core.sharding.ownership import owned_boxes
from holdfast.errors import FencedError
from holdfast.events import SnapshotDropped
from holdfast.layout import Topology
from holdfast.machine import limits
from holdfast.wire.store.run_store import FolderStore
from holdfast.wire.term import create_generation
from tests.support.mover_process import TABLE, topology


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


def remember(service: MoverService, arena: Arena, topo: Topology, rank: int, step: int) -> None:
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
    remember(service, arena, first, 0, 3)
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
    remember(service, new, second, 0, 4)
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
    remember(service, arena, second, 0, 1)
    assert service.snapshot_store.complete_steps() == [(2, 1)]


def test_memory_of_a_worker_that_has_ended_is_used_again(
    service: MoverService, tmp_path: Path
) -> None:
    """Its newest snapshot stays; what it captured and never announced does not block a slot."""
    first, second = topology(), topology(generation=2)
    begin(service, tmp_path, first)
    worker = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    arena = ask(service, first, 0, worker.pid)
    remember(service, arena, first, 0, 3)
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
    remember(service, again, second, 0, 5)
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
