"""Writers of a checkpoint: in a bucket over real HTTP, killed at any point of a save, and many of
them."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from obstore.store import MemoryStore as ObjectMemory

from holdfast.checkpoint.capture.copy_plan import view_of
from holdfast.checkpoint.format.blob import blob_header
from holdfast.checkpoint.format.save_context import SaveContext
from holdfast.checkpoint.restore.catalog import list_commits
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.checkpoint.restore.verify import find_newest_verified, verify
from holdfast.checkpoint.save.retention import (
    RetentionRules,
    apply_retention,
    sweep_older_generations,
)
from holdfast.checkpoint.save.writer import MAX_SEQUENTIAL_KEYS, gc_paused, try_commit, write_part
from holdfast.core.format.manifest import (
    Commit,
    blob_key,
    commit_key,
    part_key,
    place_boxes,
    writer_name,
)
from holdfast.core.sharding.boxes import whole_box
from holdfast.core.sharding.ownership import owned_boxes
from holdfast.core.sharding.state_table import TensorSpec
from holdfast.errors import CorruptError, FencedError, StoreError
from holdfast.layout import Topology
from holdfast.wire.store.bucket import BucketStore
from holdfast.wire.store.location import SEAL_KEY_VARIABLE, open_store
from holdfast.wire.store.run_store import AlreadyExistsError, FolderStore, ReadPreference, RunStore
from holdfast.wire.term import create_generation
from tests.support import s3
from tests.support.checkpoint_faults import states
from tests.support.checkpoint_faults.histories import history, plan
from tests.support.checkpoint_faults.verdict import compare
from tests.support.memory_store import MemoryStore
from tests.support.mover_process import (
    TABLE,
    Start,
    Workers,
    assert_holds,
    files,
    newest_verified,
    state,
    topology,
    write_noise,
)
from tests.support.ranks import DEADLINE_S, RankContext, run_ranks
from tests.support.s3 import Fault, Proxy, Request

pytestmark = pytest.mark.usefixtures("s3_credentials")


def _plan(topo: Topology) -> SaveContext:
    return SaveContext(topo.generation, topo, TABLE, "c", "d", extent_bytes=1024)


def _write(store: RunStore, topo: Topology, rank: int, step: int) -> None:
    """What the mover does with one rank's snapshot."""
    tensors = place_boxes(owned_boxes(topo, TABLE, rank), TABLE)
    head, full = blob_header(tensors), state(step)

    def content() -> Iterator[bytes]:
        yield head
        for p in tensors:
            tensor = full[p.box.name]
            box = view_of(tensor, whole_box(p.box.name, tuple(tensor.shape)), p.box).contiguous()
            yield box.reshape(-1).view(torch.uint8).numpy().tobytes()

    write_part(store, _plan(topo), step, rank, content(), len(head), tensors, {"position": step})


def _save(where: str, topo: Topology, step: int) -> list[Commit]:
    """Three writers, each with a client of its own, at once; what each found committed."""
    found: list[Commit] = []

    def work(rank: int) -> None:
        store = open_store(where)
        _write(store, topo, rank, step)
        if commit := try_commit(store, _plan(topo), step):
            found.append(commit)

    threads = [threading.Thread(target=work, args=(r,)) for r in range(topo.world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return found


def _begin(where: str, topo: Topology) -> RunStore:
    store = open_store(where)
    create_generation(store, topo.generation, {})
    return store


@pytest.mark.parametrize(
    ("replicas", "dp_shard", "options"),
    [(1, 3, {}), (3, 1, {}), (1, 3, {"seal": "env", "compress": "zstd"})],
    ids=["sharded", "replicated", "sealed"],
)
def test_three_writers_commit_once_and_it_restores_bit_for_bit(
    replicas: int, dp_shard: int, options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SEAL_KEY_VARIABLE, "ab" * 32)
    where = s3.location(s3.server(), **options)
    topo = topology(replicas, dp_shard)
    store = _begin(where, topo)
    for step in (1, 2):
        commits = _save(where, topo, step)
        assert commits
        assert len({commit.to_bytes() for commit in commits}) == 1
    assert len(list_commits(store)) == 2
    assert_holds(newest_verified(store), 2)
    oldest = list_commits(store)[-1]
    assert apply_retention(store, RetentionRules(keep_last=1), [2], []) == [oldest]
    assert len(list_commits(store)) == 1
    create_generation(store, 2, {})
    with pytest.raises(FencedError):
        _write(store, topo, 0, 3)
    assert sweep_older_generations(store, 2) == 0


def test_a_restore_lists_once_and_gets_once_before_the_first_data_byte(proxy: Proxy) -> None:
    topo = topology(1, 3)
    where = s3.location(proxy.address)
    _begin(where, topo)
    _save(where, topo, 5)
    store = open_store(where)
    proxy.log.clear()
    assert_holds(Checkpoint.open(store, list_commits(store)[0]), 5)
    assert proxy.kinds()[:2] == ["LIST", "GET"]
    assert all("/data/" in request.key for request in proxy.log[2:])
    proxy.log.clear()
    assert find_newest_verified(store) is not None
    first = next(i for i, r in enumerate(proxy.log) if r.kind == "GET" and "/data/" in r.key)
    before = proxy.kinds()[:first]
    assert before.count("LIST") == before.count("GET") == 1, before


def test_a_writer_that_begins_again_finds_its_blob_and_its_part() -> None:
    """A mover that was killed behind its part, perhaps behind the commit, writes the step again."""
    topo = topology(1, 3)
    store = BucketStore(ObjectMemory(), "memory", part_bytes=256)  # all blobs are large ones
    create_generation(store, 1, {})
    for rank in (0, 1, 2, 0, 1):
        _write(store, topo, rank, 1)
    assert try_commit(store, _plan(topo), 1) is not None
    for rank in range(3):
        _write(store, topo, rank, 1)
    assert verify(store, list_commits(store)[0]) == []
    store.delete(part_key(1, 1, writer_name(1)))
    store.create(part_key(1, 1, writer_name(1)), b"of somebody else")
    with pytest.raises(AlreadyExistsError):
        _write(store, topo, 1, 1)
    assert store.size(blob_key(1, 1, writer_name(1))) > 0


@pytest.mark.parametrize("after", ["LIST", "commit", "data"])
def test_an_endpoint_that_is_lost_during_a_restore_is_not_a_broken_checkpoint(
    proxy: Proxy, after: str
) -> None:
    topo = topology(1, 3)
    where = s3.location(proxy.address, timeout=1, retries=0)
    _begin(where, topo)
    for step in (1, 2):
        assert _save(where, topo, step)
    rejected: list[tuple[str, str]] = []

    def rule(request: Request) -> Fault | None:
        lost = {
            "LIST": request.kind == "LIST",
            "commit": "/commits/" in request.key,
            "data": "/data/" in request.key and request.kind == "GET",
        }
        return Fault(503, "SlowDown") if lost[after] else None

    proxy.rule = rule
    store = open_store(where)
    with pytest.raises(StoreError, match="503 SlowDown"):
        find_newest_verified(store, lambda key, reason: rejected.append((key, reason)))
    assert rejected == []
    proxy.rule = lambda request: None
    assert newest_verified(store).step == 2


def test_a_mover_killed_at_seeded_moments_never_breaks_the_newest(start: Start) -> None:
    """SIGKILL while four ranks' blobs are being written, at ten moments of one run."""
    table = (TensorSpec("w", "F32", (4096, 64), 0), TensorSpec("v", "F32", (300, 7), 0))
    moments = random.Random(3)
    newest = 0
    interrupted = 0
    for generation in range(1, 11):
        mover = start(extent_bytes=65536, keep_last=2)
        topo = topology(4, generation=generation)
        client = mover.begin(topo, table)
        assert client.find_restore_point().step == newest
        workers = Workers(client, topo, table)
        step = newest + 1
        workers.save(step)
        # where in the save it is killed
        threading.Event().wait(moments.uniform(0, 0.03) if newest else 0)
        mover.kill()
        found = find_newest_verified(mover.store)
        after = found.step if found else 0
        assert after in (newest, step)
        interrupted += after == newest
        if found:
            assert_holds(found, after, table)
            assert verify(mover.store, found.commit.key) == []
        newest = after
    assert interrupted, files(mover.store)  # some of the kills must have hit a save


def crash_over(ctx: RankContext, folder: Path) -> None:
    """Save step 8 once more, by every way there is, and die after a hundred bytes of it."""
    store = FolderStore(folder)
    made = plan(states.topology(3, 2))
    tensors = states.owned(made.topology, 0)
    data, start = states.blob(99, tensors)
    with pytest.raises(AlreadyExistsError):
        write_part(store, made, 8, 0, [data], start, tensors, {})
    with pytest.raises(AlreadyExistsError):
        store.create(commit_key(2, 8), b"{}")
    create_generation(store, 3, {})

    def dying() -> Iterable[bytes]:
        yield data[:100]
        os.kill(os.getpid(), signal.SIGKILL)

    write_part(store, plan(states.topology(3, 3)), 8, 0, dying(), start, tensors, {})


def test_a_crash_while_a_step_is_saved_again_destroys_nothing(tmp_path: Path) -> None:
    """Probe P4. In torch.distributed.checkpoint the older checkpoint is lost, and looks valid."""
    store = history(3, 3).pour(tmp_path / "run")
    (ended,) = run_ranks(crash_over, 1, {"folder": store.folder}, dies={0: "SIGKILL"})
    assert ended.exit == -signal.SIGKILL, ended.log
    found = newest_verified(store)
    assert found.commit.key == commit_key(2, 8)
    compare(found, states.topology(0, 4))
    assert verify(store, found.commit.key) == []


ONE_TENSOR = (TensorSpec("model.embed.weight", "F32", (64, 8), 0),)
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
    plan = SaveContext(1, topo, ONE_TENSOR, "c", "d", extent_bytes=1024)
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
