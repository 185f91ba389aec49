"""A commit of many writers: their parts are asked for several at a time, and none is overlooked."""

from __future__ import annotations

import gc
import threading

import pytest

from holdfast.checkpoint.format.save_context import SaveContext
from holdfast.checkpoint.restore.verify import verify
from holdfast.checkpoint.save.writer import MAX_SEQUENTIAL_KEYS, gc_paused, try_commit
from holdfast.core.sharding.state_table import TensorSpec
from holdfast.errors import CorruptError
from holdfast.wire.store.run_store import ReadPreference
from tests.support.memory_store import MemoryStore
from tests.support.mover_process import topology, write_noise
from tests.support.ranks import DEADLINE_S

TABLE = (TensorSpec("model.embed.weight", "F32", (64, 8), 0),)
RANKS = 2 * MAX_SEQUENTIAL_KEYS


class Together(MemoryStore):
    """Answers for a part, and for a blob's size, only when another one is requested at the same
    time."""

    reads = ReadPreference(4, 2**20)

    def __init__(self) -> None:
        super().__init__()
        self.two = threading.Barrier(2)
        self.strict = False

    def get(self, key: str) -> bytes:
        if self.strict and key.startswith("parts/"):
            self.two.wait(DEADLINE_S)
        return super().get(key)

    def size(self, key: str) -> int:
        if self.strict:
            self.two.wait(DEADLINE_S)
        return super().size(key)


def _written(store: MemoryStore) -> SaveContext:
    topo = topology(1, RANKS)
    plan = SaveContext(1, topo, TABLE, "c", "d", extent_bytes=1024)
    for rank in range(RANKS):
        write_noise(store, plan, 1, rank)
    return plan


def test_many_parts_are_asked_for_at_the_same_time() -> None:
    store = Together()
    plan = _written(store)
    store.strict = True
    commit = try_commit(store, plan, 1)
    store.strict = False
    assert commit is not None
    assert [writer.rank for writer in commit.writers] == list(range(RANKS))
    assert verify(store, commit.key) == []


def test_one_blob_of_many_that_has_changed_is_found() -> None:
    store = MemoryStore()
    plan = _written(store)
    blob = sorted(store.list("data/"))[RANKS // 2]
    content = store.get(blob)
    store.delete(blob)
    store.create(blob, content[:-1])
    with pytest.raises(CorruptError, match="has changed since it was written"):
        try_commit(store, plan, 1)
    assert store.list("commits/") == []


def test_the_collector_is_off_within_and_on_again_after_an_error() -> None:
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), gc_paused():
        print(1 / gc.isenabled())
    assert gc.isenabled()
