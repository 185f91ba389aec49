"""Saving through a real mover process: what is committed is what was captured, bit for bit."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from holdfast.checkpoint.capture.capturer import Capturer, CompletedCapture, SkippedCapture
from holdfast.checkpoint.restore.catalog import list_commits
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.checkpoint.restore.verify import verify
from holdfast.core.format.manifest import commit_key
from holdfast.core.sharding.state_table import TensorSpec
from holdfast.errors import CheckpointError
from holdfast.events import CheckpointCommitted, CheckpointFailed, CheckpointRemoved
from tests.support.mover_process import (
    TABLE,
    Start,
    Workers,
    assert_holds,
    events_until,
    files,
    newest_verified,
    topology,
)


@pytest.mark.parametrize(("replicas", "dp_shard"), [(1, 1), (4, 1), (1, 3), (2, 2)])
def test_committed_state_is_bit_equal_on_every_layout(
    start: Start, replicas: int, dp_shard: int
) -> None:
    mover = start()
    workers = mover.workers(replicas, dp_shard)
    workers.commit(7)
    checkpoint = newest_verified(mover.store)
    assert_holds(checkpoint, 7)
    assert checkpoint.commit.meta == {"position": 112}
    assert verify(mover.store, checkpoint.commit.key) == []
    # Nothing is stored twice: data bytes are those of one copy of the state.
    data = sum(w.blob.size - w.blob.data_start for w in checkpoint.commit.writers)
    assert data == sum(spec.nbytes for spec in TABLE) == sum(c.nbytes for c in workers.capturers)
    assert workers.client.find_restore_point().key == checkpoint.commit.key


def test_what_is_being_saved_is_never_overwritten(start: Start) -> None:
    """Probe P1: state changes, and is captured again, before the first save has begun."""
    mover = start()
    workers = mover.workers(2)
    for step in (1, 2):
        workers.compute(step)
        for capturer in workers.capturers:
            assert isinstance(capturer.capture(step), CompletedCapture)
    workers.compute(3)
    for capturer in workers.capturers:
        assert not capturer.has_free_slot()
        assert isinstance(capturer.capture(3), SkippedCapture)
        assert capturer.skipped == 1
    for step in (1, 2):
        for capturer in workers.capturers:
            assert capturer.announce(step, {}) is None
    for step in (1, 2):
        assert workers.capturers[0].wait_until_committed(step, 60) is None
        assert_holds(Checkpoint.open(mover.store, commit_key(1, step)), step)
    workers.commit(4)  # slots are free again
    assert_holds(Checkpoint.open(mover.store, commit_key(1, 4)), 4)


def test_capture_waits_for_a_slot_when_asked_to(start: Start) -> None:
    mover = start()
    workers = mover.workers()
    (capturer,) = workers.capturers
    for step in (1, 2):
        workers.compute(step)
        assert isinstance(capturer.capture(step), CompletedCapture)
    workers.compute(3)
    found: list[CompletedCapture | SkippedCapture] = []
    training = threading.Thread(target=lambda: found.append(capturer.capture(3, wait=60)))
    training.start()
    for step in (1, 2):  # the reporter's thread, meanwhile; the newest is kept
        assert capturer.announce(step, {}) is None
    training.join(120)
    assert isinstance(found[0], CompletedCapture)
    assert capturer.announce(3, {}) is None
    assert capturer.wait_until_committed(3, 60) is None
    assert_holds(Checkpoint.open(mover.store, commit_key(1, 3)), 3)


def test_a_dropped_capture_frees_its_slot(start: Start) -> None:
    (capturer,) = start().workers().capturers
    for step in range(5):
        assert isinstance(capturer.capture(step), CompletedCapture)
        capturer.drop_capture(step)
    assert isinstance(capturer.announce(4, {}), SkippedCapture)


def test_training_goes_on_without_a_mover(start: Start) -> None:
    mover = start()
    (capturer,) = mover.workers().capturers
    mover.kill()
    assert isinstance(capturer.capture(1), CompletedCapture)
    answer = capturer.announce(1, {})
    assert isinstance(answer, SkippedCapture)
    assert "mover" in answer.reason
    assert "mover" in (capturer.wait_until_committed(1, 1) or "")
    for step in (2, 3):  # the slot of step 1 is free again
        assert isinstance(capturer.capture(step), CompletedCapture)
    assert isinstance(capturer.capture(4, wait=1), SkippedCapture)


def test_a_step_that_one_rank_skipped_is_never_committed(start: Start) -> None:
    mover = start()
    workers = mover.workers(2)
    workers.compute(1)
    first, second = workers.capturers
    assert isinstance(first.capture(1), CompletedCapture)
    assert first.announce(1, {}) is None
    workers.commit(2)
    assert second.wait_until_committed(1, 60) == "not every rank captured it"
    assert [Checkpoint.open(mover.store, key).step for key in list_commits(mover.store)] == [2]
    assert not [name for name in files(mover.store) if "0000000001-rank" in name]


def test_a_tensor_of_another_shape_or_dtype_is_refused(start: Start) -> None:
    mover = start()
    topo = topology()
    client = mover.begin(topo, (TensorSpec("w", "F32", (4,), 0),))
    table = (TensorSpec("w", "F32", (4,), 0),)
    for wrong in (torch.zeros(5), torch.zeros(4, dtype=torch.float64)):
        with pytest.raises(CheckpointError, match="is due"):
            Capturer(client, topo, table, 0, {"w": wrong}, run="test")
    with pytest.raises(CheckpointError, match="no tensor w"):
        Capturer(client, topo, table, 0, {}, run="test")


def test_many_tensors_cost_no_descriptors(start: Start) -> None:
    """Probe P6: 1,500 tensors, one memory file."""
    mover = start()
    topo = topology()
    table = tuple(TensorSpec(f"t{i}", "F32", (3,), 0) for i in range(1500))
    client = mover.begin(topo, table)
    theirs = Path(f"/proc/{mover.process.pid}/fd")
    before, before_theirs = len(os.listdir("/proc/self/fd")), len(list(theirs.iterdir()))
    workers = Workers(client, topo, table)
    workers.commit(1)
    assert len(os.listdir("/proc/self/fd")) <= before + 2
    assert len(list(theirs.iterdir())) <= before_theirs + 5
    assert_holds(Checkpoint.open(mover.store, commit_key(1, 1)), 1, table)


def test_more_ranks_than_rows_leave_whole_writers_empty(start: Start) -> None:
    mover = start()
    topo = topology(dp_shard=4)
    table = (TensorSpec("w", "F32", (2, 3), 0),)
    workers = Workers(mover.begin(topo, table), topo, table)
    workers.commit(1)
    assert_holds(Checkpoint.open(mover.store, commit_key(1, 1)), 1, table)


def test_retention_removes_the_oldest_and_says_so(start: Start) -> None:
    mover = start(keep_last=2, keep_every=4)
    workers = mover.workers(2)
    for step in range(1, 8):
        workers.commit(step)
    events = events_until(
        workers.client, lambda e: isinstance(e, CheckpointRemoved) and e.step == 5
    )
    assert [Checkpoint.open(mover.store, k).step for k in list_commits(mover.store)] == [7, 6, 4]
    kept = {f"{step:010d}" for step in (4, 6, 7)}
    data = [name.split("/")[2][:10] for name in files(mover.store) if name.startswith("data/")]
    assert set(data) == kept
    assert [e.step for e in events if isinstance(e, CheckpointRemoved)] == [1, 2, 3, 5]
    done = [e for e in events if isinstance(e, CheckpointCommitted)]
    assert [e.step for e in done] == list(range(1, 8))
    assert all(e.seconds >= 0 and e.bytes > 0 for e in done)


def test_the_checkpoint_that_was_restored_from_is_kept(start: Start) -> None:
    before = start(keep_last=1)
    before.workers().commit(1)
    before.kill()
    mover = start(keep_last=1)
    topo = topology(generation=2)
    client = mover.begin(topo)
    assert client.find_restore_point().step == 1
    workers = Workers(client, topo)
    workers.commit(2)  # all ranks continue from step 1, so they read it: it is known to be good
    workers.commit(3)
    events_until(client, lambda e: isinstance(e, CheckpointRemoved) and e.step == 2)
    assert [Checkpoint.open(mover.store, k).step for k in list_commits(mover.store)] == [3, 1]


def test_saving_a_committed_step_again_leaves_it_as_it_is(start: Start) -> None:
    """Probe P4: keys are immutable. A new mover does not know what the old one did."""
    first = start()
    topo = topology()
    Workers(first.begin(topo), topo).commit(1)
    first.kill()
    second = start()
    client = second.begin(topo)
    workers = Workers(client, topo)
    workers.save(1)
    assert "exists already" in (workers.capturers[0].wait_until_committed(1, 60) or "")
    events, _ = client.events(0)
    assert [e.step for e in events if isinstance(e, CheckpointFailed)] == [1]
    assert_holds(newest_verified(second.store), 1)
