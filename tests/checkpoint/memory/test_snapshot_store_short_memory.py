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

from holdfast.checkpoint.format.blob import header, total_size
from holdfast.checkpoint.memory import limits
from holdfast.checkpoint.memory.arena import Arena, digest, slot_capacity
from holdfast.checkpoint.memory.snapshot_store import MemoryFile
from holdfast.checkpoint.mover.service import Service, Settings
from holdfast.core.format.manifest import placed
from holdfast.core.sharding.ownership import owned_boxes
from holdfast.errors import FencedError
from holdfast.events import SnapshotDropped
from holdfast.layout import Topology
from holdfast.wire.store.run_store import FolderStore
from holdfast.wire.term import open_generation
from tests.support.mover_process import TABLE, topology


def blob_of(topo: Topology, rank: int) -> tuple[bytes, int]:
    tensors = placed(owned_boxes(topo, TABLE, rank), TABLE)
    head = header(tensors)
    return head, total_size(head, tensors)


def ask(service: Service, topo: Topology, rank: int, process: int | None) -> Arena:
    size = slot_capacity(blob_of(topo, rank)[1])
    fd = service.arena(topo.generation, rank, size, 2, process)
    try:
        return Arena(fd)
    finally:
        os.close(fd)


def remember(service: Service, arena: Arena, topo: Topology, rank: int, step: int) -> None:
    head, size = blob_of(topo, rank)
    slot = arena.free_slot()
    assert slot is not None
    arena.begin(slot)
    arena.data(slot, len(head))[:] = head
    made = arena.finish(slot, digest("test"), topo.generation, step, size, digest(head))
    service.captured(topo.generation, rank, step, slot, made.sequence, {}, durable=False)
    assert service.drain(60)


def begin(service: Service, folder: Path, topo: Topology) -> int:
    """Open a generation, ask for its restore point, begin it; the step."""
    open_generation(FolderStore(folder), topo.generation, {})
    step = int(service.newest(topo.generation, 20)["step"])
    service.expect(topo.generation, topo, TABLE, step)
    return step


@pytest.fixture
def service(tmp_path: Path) -> Service:
    return Service(FolderStore(tmp_path), Settings("test", "c", "d", extent_bytes=1024))


def test_without_room_for_both_the_older_snapshot_goes_when_all_have_restored(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = topology(), topology(generation=2)
    begin(service, tmp_path, first)
    arena = ask(service, first, 0, os.getpid())
    remember(service, arena, first, 0, 3)
    assert begin(service, tmp_path, second) == 3
    # As if one of the two fitted: there is room once nothing is on the shelf any more.
    monkeypatch.setattr(limits, "available", lambda: 0 if service.shelf.complete() else 2**30)
    new = ask(service, second, 0, os.getpid())
    assert service.shelf.complete() == []
    events, _ = service.outcomes.since(0, 0)
    dropped = [fields for kind, fields in events if kind == SnapshotDropped.kind]
    assert [fields["step"] for fields in dropped] == [3]
    assert "no memory for an arena" in dropped[0]["reason"]
    remember(service, new, second, 0, 4)
    assert service.shelf.complete() == [(2, 4)]


def test_an_arena_in_the_making_delays_nobody_and_a_newer_generation_is_not_overlooked(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gigabytes take seconds: meanwhile the mover answers, and the next generation can begin."""
    first, second = topology(), topology(generation=2)
    begin(service, tmp_path, first)
    making, go = threading.Event(), threading.Event()
    create = Arena.create

    def slow(name: str, slots: int, capacity: int) -> int:
        if name.startswith("holdfast-1-"):
            making.set()
            assert go.wait(60)
        return create(name, slots, capacity)

    monkeypatch.setattr(Arena, "create", staticmethod(slow))
    with ThreadPoolExecutor(2) as threads:
        try:
            late = [threads.submit(ask, service, first, 0, os.getpid())]
            assert making.wait(60)
            late.append(threads.submit(ask, service, first, 0, os.getpid()))
            assert begin(service, tmp_path, second) == 0
            arena = ask(service, second, 0, os.getpid())
        finally:
            go.set()
        for asked in late:
            with pytest.raises(FencedError):
                asked.result(60)
    remember(service, arena, second, 0, 1)
    assert service.shelf.complete() == [(2, 1)]


def test_memory_of_a_worker_that_has_ended_is_used_again(service: Service, tmp_path: Path) -> None:
    """Its newest snapshot stays; what it captured and never announced does not block a slot."""
    first, second = topology(), topology(generation=2)
    begin(service, tmp_path, first)
    worker = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    arena = ask(service, first, 0, worker.pid)
    remember(service, arena, first, 0, 3)
    head, size = blob_of(first, 0)
    slot = arena.free_slot()
    assert slot is not None
    arena.begin(slot)
    arena.finish(slot, digest("test"), 1, 4, size, digest(head))  # killed before it said so
    worker.kill()
    worker.wait()
    if worker.stdin is not None:
        worker.stdin.close()
    assert begin(service, tmp_path, second) == 3
    again = ask(service, second, 0, os.getpid())
    assert again.free_slot() == slot
    kept = service.shelf.get(1, 3, 0)
    assert kept.slot != slot
    assert again.header(kept.slot) == kept.header  # the same memory
    remember(service, again, second, 0, 5)
    assert service.shelf.complete() == [(2, 5)]


def test_memory_is_deserted_when_every_writer_has_ended_and_not_before() -> None:
    made = MemoryFile(Arena.create("test", 2, 4096))
    made.given_to(os.getpid())
    assert not made.deserted
    ended = MemoryFile(Arena.create("test", 2, 4096))
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ended.given_to(child.pid)
    assert not ended.deserted
    child.communicate(b"\n")
    assert ended.deserted
    ended.given_to(None)  # an unknown process
    assert not ended.deserted
