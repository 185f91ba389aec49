"""A blob is written and hashed at the same time; if either fails, nothing of the save stays."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.checkpoint.mover.service import HASH_THREADS, MoverService, MoverSettings
from holdfast.checkpoint.restore.catalog import list_commits
from holdfast.core.format.manifest import commit_key
from holdfast.errors import OutOfSpaceError
from holdfast.wire.store.run_store import Buffer, FolderStore, byte_views
from holdfast.wire.term import create_generation
from tests.support.checkpoint_faults import states
from tests.support.checkpoint_faults.movers import Direct, Ranks
from tests.support.checkpoint_faults.verdict import compare
from tests.support.mover_process import files, newest_verified
from tests.support.ranks import DEADLINE_S


class Slow(FolderStore):
    """Stops in the middle of each blob until it may continue."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.begun, self.go, self.written = (threading.Event() for _ in range(3))
        self.full = False

    def create(self, key: str, data: Buffer | Iterable[Buffer]) -> None:
        super().create(key, self._slowly(data) if key.startswith("data/") else data)
        if key.startswith("data/"):
            self.written.set()

    def _slowly(self, data: Buffer | Iterable[Buffer]) -> Iterator[Buffer]:
        for part in byte_views(data):
            yield part[:100]
            self.begun.set()
            assert self.go.wait(DEADLINE_S)
            if self.full:
                raise OutOfSpaceError("the disk is full")
            yield part[100:]


def begin(store: FolderStore, number: int = 0) -> tuple[MoverService, Ranks]:
    service = MoverService(store, MoverSettings("campaign", "c", "d", extent_bytes=512))
    topo = states.topology(number, 1)
    create_generation(store, 1, {})
    service.expect(1, topo, states.TABLE)
    return service, Ranks(Direct(service, 1), topo)


@contextmanager
def hashing_held(service: MoverService) -> Iterator[None]:
    """No capture is hashed within."""
    go = threading.Event()
    for _ in range(HASH_THREADS):
        service._hash_threads.submit(go.wait, DEADLINE_S)
    try:
        yield
    finally:
        go.set()


def announce(ranks: Ranks, step: int) -> int:
    """Every rank captures and hands over; the slot of the last one."""
    made = [ranks.capture(rank, step) for rank in range(ranks.topology.world_size)]
    for rank, (slot, head) in enumerate(made):
        ranks.announce(rank, step, slot, head)
    return made[-1][0]


def test_the_blob_is_there_before_the_capture_is_hashed_and_the_part_is_not(tmp_path: Path) -> None:
    store = Slow(tmp_path)
    store.go.set()
    service, ranks = begin(store, 1)
    with hashing_held(service):
        announce(ranks, 1)
        assert store.written.wait(DEADLINE_S)
        assert store.list("data/")
        assert store.list("parts/") == list_commits(store) == []
        assert service.snapshot_store.inventory() == []
    assert ranks.client.wait_until_committed(1, DEADLINE_S) is None
    found = newest_verified(store)
    compare(found, states.topology(2, 2))
    service.close()


def test_a_slot_is_held_until_the_disk_has_read_it_though_its_save_is_fenced(
    tmp_path: Path,
) -> None:
    """The next generation begins while a blob is half written and nothing is hashed."""
    store = Slow(tmp_path)
    service, ranks = begin(store)
    with hashing_held(service):
        slot = announce(ranks, 1)
        assert store.begun.wait(DEADLINE_S)
        create_generation(store, 2, {})
        service.expect(2, states.topology(0, 2), states.TABLE)
    assert not service.drain(0.2)  # hashed and refused meanwhile; the disk still reads
    assert ranks.arenas[0].is_held(slot)
    store.go.set()
    assert "generation 2" in (ranks.client.wait_until_committed(1, DEADLINE_S) or "")
    service.close()
    assert not ranks.arenas[0].is_held(slot)
    assert not [name for name in files(store) if name.startswith(("data/", "parts/", "commits/"))]


def test_a_capture_that_cannot_be_hashed_leaves_no_blob(tmp_path: Path) -> None:
    store = Slow(tmp_path)
    service, ranks = begin(store)
    with hashing_held(service):
        slot = announce(ranks, 1)
        assert store.begun.wait(DEADLINE_S)
        ranks.arenas[0].release(slot)  # as a mover that lost count would
        ranks.arenas[0].begin_write(slot)
    store.go.set()
    assert "does not hold step 1" in (ranks.client.wait_until_committed(1, DEADLINE_S) or "")
    assert service.drain(DEADLINE_S)
    assert not [name for name in files(store) if name.startswith(("data/", "parts/", "commits/"))]
    assert ranks.client.wait_until_committed(1, 0) is not None
    announce(ranks, 2)
    assert ranks.client.wait_until_committed(2, DEADLINE_S) is None
    assert list_commits(store) == [commit_key(1, 2)]
    service.close()


def test_a_capture_that_cannot_be_written_stays_in_memory(tmp_path: Path) -> None:
    """Probe P2: the exception of a writing thread is the reason of the save."""
    store = Slow(tmp_path)
    store.full = True
    store.go.set()
    service, ranks = begin(store, 1)
    announce(ranks, 1)
    assert ranks.client.wait_until_committed(1, DEADLINE_S) == "the disk is full"
    assert service.drain(DEADLINE_S)
    assert service.snapshot_store.complete_steps() == [(1, 1)]
    assert not [name for name in files(store) if name.startswith(("data/", "parts/", "commits/"))]
    store.full = False
    assert ranks.save(2) is None
    assert list_commits(store) == [commit_key(1, 2)]
    service.close()


def test_a_disk_that_hangs_holds_no_thread_that_hashes(tmp_path: Path) -> None:
    """A capture is fenced while its blob is half written; the next generation continues
    meanwhile."""
    store = Slow(tmp_path)
    service, ranks = begin(store, 1)  # two ranks
    with hashing_held(service):
        slot = announce(ranks, 1)
        assert store.begun.wait(DEADLINE_S)
        create_generation(store, 2, {})
        service.expect(2, states.topology(0, 2), states.TABLE)
    meet = threading.Barrier(HASH_THREADS)  # every thread comes there
    threads = service._hash_threads
    for free in [threads.submit(meet.wait, DEADLINE_S) for _ in range(HASH_THREADS)]:
        free.result(2 * DEADLINE_S)
    assert any(arena.is_held(slot) for arena in ranks.arenas)  # the disk still reads
    own = Ranks(Direct(service, 2), states.topology(0, 2))
    place, head = own.capture(0, 2)
    service.accept_capture(2, 0, 2, place, head.sequence, {}, durable=False)
    with service._change:
        assert service._change.wait_for(
            lambda: (2, 2) in service.snapshot_store.complete_steps(), DEADLINE_S
        )
    store.go.set()
    assert "generation 2" in (ranks.client.wait_until_committed(1, DEADLINE_S) or "")
    service.close()
    assert not any(arena.is_held(slot) for arena in ranks.arenas)
    assert not [name for name in files(store) if name.startswith(("data/", "parts/", "commits/"))]
