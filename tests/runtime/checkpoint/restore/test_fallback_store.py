"""The bucket replaces blobs that are corrupt or missing in the run folder. A run folder that has
lost every checkpoint is not taken for a new one."""

from __future__ import annotations

import pytest

from holdfast.checkpoint.restore.catalog import list_commits
from holdfast.checkpoint.restore.fallback_store import BUCKET_SOURCE, LazyStore
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.checkpoint.restore.sources import FallbackReader, StoreSource
from holdfast.core.format.manifest import Commit, commit_key
from holdfast.errors import CheckpointError, StoreError
from holdfast.events import CheckpointCommitted, SourceRejected
from holdfast.wire.journal import JournalWriter
from holdfast.wire.store.location import open_store
from holdfast.wire.store.run_store import RunStore
from holdfast.wire.term import create_generation
from tests.support import s3
from tests.support.mover_process import (
    TABLE,
    Mover,
    Start,
    assert_holds,
    events_until,
    topology,
    uploaded,
)
from tests.support.s3 import Fault, Proxy

pytestmark = pytest.mark.usefixtures("s3_credentials")


def _committed(start: Start, where: str, *steps: int) -> Mover:
    """A mover whose run has these steps in its folder and in the bucket; killed."""
    mover = start(bucket=where)
    workers = mover.workers(1, 3)
    for step in steps:
        workers.commit(step)
        events_until(workers.client, uploaded(step))
    mover.kill()
    return mover


def _read(mover: Mover, commit: Commit, where: str) -> Checkpoint:
    """As a worker reads it."""
    second = StoreSource(LazyStore(lambda: open_store(where)), BUCKET_SOURCE)
    return Checkpoint(FallbackReader([StoreSource(mover.store), second]), commit)


def _spoil(store: RunStore, part_of_key: str, kept: int | None) -> str:
    """Cut a blob, or flip a byte in its middle."""
    (key,) = (key for key in store.list("data/") if part_of_key in key)
    data = bytearray(store.get(key))
    data[len(data) // 2] ^= 1
    store.delete(key)
    store.create(key, data[:kept])
    return key


def test_what_the_folder_has_rotten_is_read_from_the_bucket(start: Start) -> None:
    """Of the newest step one blob is cut, one has a flipped byte, one is missing."""
    where = s3.location(s3.server())
    mover = _committed(start, where, 1, 2)
    _spoil(mover.store, "0000000002-rank00000", 100)
    rotten = _spoil(mover.store, "0000000002-rank00001", None)
    mover.store.delete(rotten.replace("rank00001", "rank00002"))
    _spoil(open_store(where), "0000000001-rank00001", None)  # this one is never requested
    again = start(bucket=where)
    create_generation(again.store, 2, {})
    client = again.client(2)
    newest = client.find_restore_point()
    assert (newest.step, newest.durable, newest.rejected) == (2, True, ())
    client.expect(topology(generation=2), TABLE, 2)
    (told,) = (e for e in events_until(client, lambda e: True) if isinstance(e, SourceRejected))
    assert told.step == 2
    assert "100 bytes" in told.reason
    checkpoint = _read(mover, client.holdings(commit_key(1, 2)).commit, where)
    assert_holds(checkpoint, 2)
    assert {source for source, _, _ in checkpoint.read_stats.problems} == {"run store"}
    assert checkpoint.read_stats.bytes_by_source[BUCKET_SOURCE] > 0


def test_a_commit_object_that_rots_or_is_gone_is_found_in_the_bucket(start: Start) -> None:
    where = s3.location(s3.server())
    mover = _committed(start, where, 1, 2, 3)
    newest, middle, oldest = list_commits(mover.store)
    raw = bytearray(mover.store.get(newest))
    raw[50] ^= 1
    mover.store.delete(newest)
    mover.store.create(newest, raw)
    mover.store.delete(middle)
    again = start(bucket=where)
    create_generation(again.store, 2, {})
    assert again.client(2).find_restore_point().key == newest
    # Its readers report it as corrupt everywhere. The next older one is only in the bucket.
    found = again.client(2).find_restore_point(corrupt_keys={newest: "rotten"})
    assert (found.key, found.rejected) == (middle, ((newest, "rotten"),))
    tried = {newest: "rotten", middle: "rotten"}
    assert again.client(2).find_restore_point(corrupt_keys=tried).key == oldest


def test_a_bucket_that_is_away_is_asked_only_where_the_folder_falls_short(
    start: Start, proxy: Proxy
) -> None:
    where = s3.location(proxy.address, f"away-{id(proxy)}", timeout=1, retries=0)
    mover = _committed(start, where, 1, 2)
    proxy.rule = lambda request: Fault(503, "SlowDown")
    again = start(bucket=where)
    create_generation(again.store, 2, {})
    client = again.client(2)
    assert client.find_restore_point().step == 2
    _spoil(mover.store, "0000000002-rank00000", 100)
    found = client.find_restore_point()
    ((key, reason),) = found.rejected
    assert (found.step, key) == (1, commit_key(1, 2))
    assert "100 bytes" in reason
    assert "(503" in reason
    _spoil(mover.store, "0000000001-rank00000", 100)
    with pytest.raises(StoreError, match=r"\(503"):  # the stored bytes may be intact
        client.find_restore_point()


@pytest.mark.parametrize("noted", [True, False])
def test_a_run_folder_without_its_checkpoints_is_no_new_run(start: Start, noted: bool) -> None:
    """By its notes of starts, or by its journal alone; one that never had any begins at step 0."""
    mover = start()
    assert mover.client(1).find_restore_point().key is None
    workers = mover.workers()
    workers.commit(4)
    mover.kill()
    second = start()
    if noted:
        create_generation(second.store, 2, {})
        second.client(2).expect(
            topology(generation=2), TABLE, second.client(2).find_restore_point().step
        )
        create_generation(second.store, 3, {})
    else:
        journal = JournalWriter(second.store, "mover", 1)
        journal.emit(CheckpointCommitted("commits/4", 1, 0.0, step=4))
        journal.flush(True)
    for key in list_commits(second.store):
        second.store.delete(key)
    with pytest.raises(CheckpointError, match=r"a checkpoint of step 4, and none is left.*--fr"):
        second.client(3 if noted else 2).find_restore_point()


def test_a_run_that_went_on_live_and_never_had_a_checkpoint_begins_anew(start: Start) -> None:
    """All processes that held its state are lost. Its notes say from where they continued."""
    mover = start()
    for generation, step in ((1, 0), (2, 4), (3, 9)):
        create_generation(mover.store, generation, {})
        place = topology(generation=generation)
        mover.client(generation).expect(place, TABLE, step, is_from_store=False)
    create_generation(mover.store, 4, {})
    assert mover.client(4).find_restore_point().key is None
    journal = JournalWriter(mover.store, "agent", 1)
    journal.emit(CheckpointCommitted("commits/4", 1, 0.0, step=4))
    journal.flush(True)
    create_generation(mover.store, 5, {})
    with pytest.raises(CheckpointError, match=r"a checkpoint of step 4, and none is left.*--fr"):
        mover.client(5).find_restore_point()
    (key,) = mover.store.list("journal/")
    mover.store.delete(key)
    mover.store.create(key, b"no journal\n" * 3)
    create_generation(mover.store, 6, {})
    with pytest.raises(CheckpointError, match="a checkpoint of step 9, and none is left"):
        mover.client(6).find_restore_point()  # no record says what it had
