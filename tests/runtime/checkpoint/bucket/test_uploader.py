"""Tier 3 through a real mover: commits get into the bucket in spite of its faults."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from holdfast.checkpoint.bucket.recover_folder import recover_folder
from holdfast.checkpoint.restore.catalog import list_commits, step_of
from holdfast.core.sharding.state_table import TensorSpec
from holdfast.errors import CheckpointError, StoreError
from holdfast.events import CheckpointCommitted, CheckpointRemoved, CheckpointUploaded, UploadFailed
from holdfast.wire.store.location import UnfitStoreError, open_store
from holdfast.wire.store.run_store import FolderStore
from holdfast.wire.term import newest_generation
from tests.support import s3
from tests.support.mover_process import (
    Start,
    Workers,
    assert_holds,
    events_until,
    newest_verified,
    topology,
    uploaded,
)
from tests.support.ranks import wait_until
from tests.support.s3 import Fault, Proxy, Request

pytestmark = pytest.mark.usefixtures("s3_credentials")


def test_what_is_committed_gets_into_the_bucket_and_old_ones_go(start: Start) -> None:
    where = s3.location(s3.server())
    workers = start(bucket=where, bucket_keep_last=2).workers(1, 3)
    for step in (1, 2, 3):
        workers.commit(step)
        events_until(workers.client, uploaded(step))
    bucket = open_store(where)
    assert_holds(newest_verified(bucket), 3)
    workers.commit(4)
    events_until(workers.client, uploaded(4))
    assert 1 not in map(step_of, list_commits(bucket))  # 2 goes just after 4 has come


@pytest.mark.slow
def test_a_bucket_that_fails_delays_no_commit_and_gets_the_newest_later(
    start: Start, proxy: Proxy
) -> None:
    proxy.rule = lambda request: Fault(503, "SlowDown")
    workers = start(bucket=s3.location(proxy.address, "slow", timeout=1, retries=0)).workers(1, 3)
    for step in (1, 2, 3):
        workers.commit(step)
    events = events_until(workers.client, lambda event: isinstance(event, UploadFailed))
    assert any(isinstance(e, CheckpointCommitted) and e.step == 1 for e in events)
    failed = [e for e in events if isinstance(e, UploadFailed)]
    assert len(failed) == 1
    assert "the store answers with an error (503 SlowDown)" in failed[0].reason
    proxy.rule = lambda request: None
    events = events_until(workers.client, uploaded(3))
    assert len([e for e in events if isinstance(e, UploadFailed)]) == 1  # said once


@pytest.mark.slow
def test_a_bucket_slower_than_retention_gets_whole_checkpoints(start: Start, proxy: Proxy) -> None:
    """What is being sent stays until it has arrived, although newer ones have taken its place."""
    reached, gate = threading.Event(), threading.Event()

    def slow(request: Request) -> Fault | None:
        if request.method == "PUT" and "rank00000-0.safetensors" in request.key:
            reached.set()
            gate.wait(120)
        return None

    proxy.rule = slow
    where = s3.location(proxy.address, f"behind-{id(proxy)}")
    mover = start(bucket=where, keep_last=1)
    workers = mover.workers(1, 3)
    workers.commit(1)
    assert reached.wait(120)
    for step in (2, 3, 4):
        workers.commit(step)
    gate.set()
    events = events_until(workers.client, uploaded(4))
    assert any(uploaded(1)(event) for event in events)
    assert not [event for event in events if isinstance(event, UploadFailed)]
    workers.commit(5)
    events_until(workers.client, lambda e: isinstance(e, CheckpointRemoved) and e.step == 1)


def _stored(where: str, part_of_key: str) -> list[str]:
    store = open_store(where)
    return [key for key in (*store.list("data/"), *store.list("parts/")) if part_of_key in key]


@pytest.mark.slow
def test_what_an_abandoned_copy_left_in_the_bucket_goes_also_when_that_fails_at_first(
    start: Start, proxy: Proxy
) -> None:
    """Two blobs of step 1 have arrived, the third is refused; then step 2 takes its place."""
    refused: list[Request] = []
    armed = threading.Event()  # once the bucket has been probed

    def rule(request: Request) -> Fault | None:
        if request.method == "PUT" and "0000000001-rank00002" in request.key:
            return Fault(503, "SlowDown")
        if armed.is_set() and not refused and s3.removes(request):
            refused.append(request)
            return Fault(503, "SlowDown")
        return None

    proxy.rule = rule
    where = s3.location(proxy.address, f"abandoned-{id(proxy)}", retries=0)
    workers = start(bucket=where).workers(1, 3)
    workers.commit(1)
    events_until(workers.client, lambda event: isinstance(event, UploadFailed))
    assert len(_stored(where, "0000000001-rank")) > 0
    armed.set()
    workers.commit(2)
    events_until(workers.client, uploaded(2))
    workers.commit(3)
    events_until(workers.client, uploaded(3))
    wait_until(lambda: not _stored(where, "0000000001-rank"), what="nothing is left of step 1")
    assert refused
    assert [step_of(key) for key in list_commits(open_store(where))] == [3, 2]


def test_what_older_generations_left_in_the_bucket_goes_at_the_first_upload(start: Start) -> None:
    where = s3.location(s3.server())
    bucket = open_store(where)
    older, ours = (f"data/000000000{g}/0000000009-rank00000-0.safetensors" for g in (1, 2))
    for key in (older, ours, "parts/0000000001/0000000009-rank00000.json"):
        bucket.create(key, b"of a copy that was cut short")
    mover = start(bucket=where)
    workers = mover.workers(1, 3, generation=2)
    workers.commit(1)
    events_until(workers.client, uploaded(1))
    wait_until(lambda: _stored(where, "0000000009-rank") == [ours], what="the older ones are gone")
    assert_holds(newest_verified(bucket), 1)


def test_the_upload_of_a_killed_mover_is_resumed_by_the_next(start: Start, proxy: Proxy) -> None:
    """Killed when two of three blobs have arrived: those are not sent again."""
    reached = threading.Event()

    def stall(request: Request) -> Fault | None:
        if request.method == "PUT" and "rank00002-0.safetensors" in request.key:
            reached.set()
            proxy.closing.wait(120)
        return None

    proxy.rule = stall
    prefix = f"killed-{id(proxy)}"
    mover = start(bucket=s3.location(proxy.address, prefix))
    workers = mover.workers(1, 3)
    workers.commit(1)
    assert reached.wait(120)
    mover.kill()
    assert list_commits(open_store(s3.location(s3.server(), prefix))) == []
    with s3.proxied() as second:
        where = s3.location(second.address, prefix)
        client = start(bucket=where).begin(topology(1, 3, generation=2))
        events_until(client, uploaded(1))
        for rank, again in ((0, False), (1, False), (2, True)):
            assert (second.sent(f"rank{rank:05d}-0.safetensors") > 0) is again
        assert_holds(newest_verified(open_store(where)), 1)


def test_a_run_whose_folder_is_lost_begins_from_the_bucket(start: Start, tmp_path: Path) -> None:
    where = s3.location(s3.server())
    workers = start(bucket=where).workers(1, 3)
    workers.commit(7)
    events_until(workers.client, uploaded(7))
    said: list[str] = []
    folder = FolderStore(tmp_path / "new")
    recover_folder(folder, where, "c", False, said.append)
    assert said == ["step 7 was brought back from the bucket"]
    assert_holds(newest_verified(folder), 7)
    assert newest_generation(folder) == 1  # so the next one is newer than whatever wrote it
    recover_folder(folder, where, "c", False, said.append)
    assert len(said) == 1  # it is there
    for config_hash, fresh, why in (("other", False, "another run"), ("c", True, "set aside")):
        with pytest.raises(CheckpointError, match=f"checkpoint.bucket: .*{why}.*another prefix"):
            recover_folder(FolderStore(tmp_path / why), where, config_hash, fresh, said.append)


def test_a_bucket_that_is_away_at_the_start_stops_only_those_who_need_it(
    start: Start, proxy: Proxy, tmp_path: Path
) -> None:
    workers = start().workers(1, 3)
    workers.commit(1)
    where = s3.location(proxy.address, timeout=60, retries=0)
    proxy.rule = lambda request: Fault(503, "SlowDown")
    said: list[str] = []
    recover_folder(FolderStore(tmp_path / "run"), where, "c", False, said.append)
    assert len(said) == 1
    assert "without its bucket for now" in said[0]
    with pytest.raises(StoreError, match="503 SlowDown"):
        recover_folder(FolderStore(tmp_path / "new"), where, "c", False, said.append)
    proxy.rule = lambda request: None
    proxy.drop_headers = frozenset({"if-none-match"})
    with pytest.raises(UnfitStoreError, match="overwrites"):
        recover_folder(FolderStore(tmp_path / "run"), where, "c", False, said.append)


def test_a_broken_checkpoint_in_the_bucket_is_passed_over(start: Start, tmp_path: Path) -> None:
    where = s3.location(s3.server())
    workers = start(bucket=where).workers(1, 3)
    for step in (1, 2):
        workers.commit(step)
        events_until(workers.client, uploaded(step))
    bucket = open_store(where)
    blob = next(key for key in bucket.list("data/") if "0000000002-rank00001" in key)
    data = bytearray(bucket.get(blob))
    data[-1] ^= 1
    bucket.delete(blob)
    bucket.create(blob, data)
    said: list[str] = []
    folder = FolderStore(tmp_path / "new")
    recover_folder(folder, where, "c", False, said.append)
    assert "cannot be trusted" in said[0]
    assert said[1:] == ["step 1 was brought back from the bucket"]
    assert_holds(newest_verified(folder), 1)


def test_a_mover_whose_run_store_is_the_bucket(start: Start) -> None:
    """No folder at all: what a rank captured goes straight there, and the next mover finds it."""
    where = s3.location(s3.server())
    mover = start(at=where)
    workers = mover.workers(1, 3)
    for step in (1, 2):
        workers.commit(step)
    mover.kill()
    again = start(at=where)
    topo = topology(2, 1, generation=2)
    client = again.begin(topo)
    newest = client.find_restore_point()
    assert (newest.step, newest.generation) == (2, 1)
    others = Workers(client, topo)
    others.commit(3)
    assert_holds(newest_verified(open_store(where)), 3)


@pytest.mark.slow
def test_an_upload_that_is_tried_again_reads_nothing_back(start: Start, proxy: Proxy) -> None:
    """A large blob that has arrived is known by the checksum that is stored with it."""
    table = (TensorSpec("model.embed.weight", "F32", (3000, 1000), 0),)
    proxy.rule = lambda request: (
        Fault(503) if request.method == "PUT" and "/commits/" in request.key else None
    )
    mover = start(bucket=s3.location(proxy.address, "again", timeout=5, retries=0))
    topo = topology()
    client = mover.begin(topo, table)
    workers = Workers(client, topo, table)
    workers.commit(1)
    events_until(client, lambda event: isinstance(event, UploadFailed))
    sent = proxy.sent("rank00000-0.safetensors")
    assert sent > 12_000_000
    proxy.rule = lambda request: None
    events = events_until(client, uploaded(1))
    assert [e.bytes for e in events if isinstance(e, CheckpointUploaded)] == [0]
    assert proxy.sent("rank00000-0.safetensors") == sent
    reads = [r for r in proxy.log if r.kind == "GET" and "/data/" in r.key]
    assert all("/.sum-" in r.key for r in reads)
