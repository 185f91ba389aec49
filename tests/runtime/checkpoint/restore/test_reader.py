"""Reading: on any layout, only what is needed, and never a byte that is not as it was written."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.checkpoint.restore.catalog import describe_checkpoint, list_commits
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.checkpoint.restore.verify import find_newest_verified, verify
from holdfast.core.format.manifest import commit_key
from holdfast.core.sharding.boxes import Box, whole_box
from holdfast.core.sharding.state_table import local_boxes
from holdfast.errors import CheckpointError, CorruptError, HoldfastError
from holdfast.wire.store.run_store import FolderStore
from tests.support.mover_process import (
    TABLE,
    Mover,
    Start,
    Workers,
    assert_holds,
    files,
    newest_verified,
    read_box,
    state,
    topology,
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> FolderStore:
    """Steps 1 to 3 on two replicas of two shards each; tests must not change it."""
    folder = tmp_path_factory.mktemp("run")
    with closing(Mover(folder, keep_last=5)) as mover:
        workers = mover.workers(2, 2)
        for step in (1, 2, 3):
            workers.commit(step)
    return mover.store


@pytest.fixture
def copied(saved: FolderStore, tmp_path: Path) -> FolderStore:
    """A copy that a test may damage."""
    target = FolderStore(tmp_path / "copy")
    for name in files(saved):
        path = target.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((saved.folder / name).read_bytes())
    return target


@pytest.mark.parametrize(("replicas", "dp_shard"), [(1, 1), (1, 2), (1, 3), (3, 1), (2, 5)])
def test_every_layout_reads_its_boxes(saved: FolderStore, replicas: int, dp_shard: int) -> None:
    checkpoint = newest_verified(saved)
    full = state(3)
    topo = topology(replicas, dp_shard)
    for rank in range(topo.world_size):
        for box in local_boxes(topo, TABLE, rank):
            part = full[box.name][
                tuple(slice(a, b) for a, b in zip(box.offsets, box.stops, strict=True))
            ]
            assert torch.equal(read_box(checkpoint, box), part)


@given(st.data())
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_box_can_be_read(saved: FolderStore, data: st.DataObject) -> None:
    checkpoint = Checkpoint.open(saved, commit_key(1, 2))
    spec = data.draw(st.sampled_from(TABLE))
    starts = tuple(data.draw(st.integers(0, n - 1)) for n in spec.shape)
    lengths = tuple(
        data.draw(st.integers(1, n - a)) for n, a in zip(spec.shape, starts, strict=True)
    )
    box = Box(spec.name, starts, lengths)
    part = state(2)[spec.name][
        tuple(slice(a, b) for a, b in zip(box.offsets, box.stops, strict=True))
    ]
    assert torch.equal(read_box(checkpoint, box), part)


def test_only_the_extents_that_are_needed_are_read(saved: FolderStore) -> None:
    checkpoint = Checkpoint.open(saved, commit_key(1, 3))
    read_box(checkpoint, Box("model.embed.weight", (0, 0), (1, 8)))
    assert 0 < checkpoint.bytes_read <= 1024  # one row lies in one extent


def test_reading_all_boxes_of_a_writer_reads_each_extent_once(saved: FolderStore) -> None:
    checkpoint = Checkpoint.open(saved, commit_key(1, 3))
    for spec in TABLE:
        read_box(checkpoint, whole_box(spec.name, spec.shape))
    data = sum(w.blob.size for w in checkpoint.commit.writers)
    assert checkpoint.bytes_read <= data


def test_a_small_cache_reads_more_and_the_same(saved: FolderStore) -> None:
    commit = Checkpoint.open(saved, commit_key(1, 3)).commit
    checkpoint = Checkpoint(saved, commit, cache_bytes=1)
    assert_holds(checkpoint, 3)
    for spec in TABLE:
        read_box(checkpoint, whole_box(spec.name, spec.shape))
    assert checkpoint.bytes_read > sum(w.blob.size for w in commit.writers)


def test_a_wrong_box_is_refused_in_one_sentence(saved: FolderStore) -> None:
    checkpoint = Checkpoint.open(saved, commit_key(1, 3))
    with pytest.raises(CheckpointError, match="no tensor nobody"):
        checkpoint.read(Box("nobody", (), ()), memoryview(bytearray(4)))
    with pytest.raises(CheckpointError, match="outside"):
        checkpoint.read(Box("model.norm.weight", (4,), (5,)), memoryview(bytearray(20)))
    with pytest.raises(CheckpointError, match=r"box \(4,\) at \(-2,\) is outside"):
        checkpoint.read(Box("model.norm.weight", (-2,), (4,)), memoryview(bytearray(16)))
    with pytest.raises(CheckpointError, match="outside"):
        checkpoint.read(Box("model.norm.weight", (4,), (-2,)), memoryview(bytearray(8)))
    with pytest.raises(CheckpointError, match="outside"):
        checkpoint.read(Box("model.norm.weight", (0,), (1, 8)), memoryview(bytearray(32)))
    with pytest.raises(CheckpointError, match="outside"):
        checkpoint.read(Box("model.norm.weight", (0, 0), (1, 8)), memoryview(bytearray(32)))


def test_listing_is_newest_first(saved: FolderStore) -> None:
    assert [describe_checkpoint(saved, key)["step"] for key in list_commits(saved)] == [3, 2, 1]
    assert all(verify(saved, key) == [] for key in list_commits(saved))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


@pytest.mark.parametrize("kind", ["data", "parts", "commits"])
def test_one_changed_byte_anywhere_is_found(copied: FolderStore, kind: str) -> None:
    """Probe P3, for every kind of file: by verify, and by a restart, which falls to the next."""
    newest = commit_key(1, 3)
    victims = [
        n for n in files(copied) if n.startswith(kind) and (n == newest or "/0000000003-" in n)
    ]
    assert victims
    for name in victims:
        path = copied.folder / name
        good = path.read_bytes()
        stride = max(1, len(good) // 40)
        for at in {*range(0, len(good), stride), len(good) - 1}:
            flip(path, at)
            assert verify(copied, newest), (name, at)
            path.write_bytes(good)
        flip(path, len(good) // 2)
        rejected: list[str] = []
        found = newest_verified(copied, lambda key, reason: rejected.append(key))  # noqa: B023
        assert found.step == 2
        assert rejected == [newest]
        path.write_bytes(good)
    assert verify(copied, newest) == []


def test_a_flipped_bit_is_never_handed_out(copied: FolderStore) -> None:
    checkpoint = Checkpoint.open(copied, commit_key(1, 3))
    blob = checkpoint.commit.writers[0].blob
    flip(copied.folder / blob.key, blob.data_start + 1)
    first_row = Box("model.embed.weight", (0, 0), (1, 8))  # rank 0's blob begins with it
    with pytest.raises(CorruptError, match="checksum does not match"):
        read_box(checkpoint, first_row)


@pytest.mark.parametrize("damage", ["missing", "short", "long", "swapped", "older"])
def test_blobs_that_are_not_what_was_written_are_found(copied: FolderStore, damage: str) -> None:
    """Probe P5 and its relatives: nothing is ever left uninitialised."""
    key = commit_key(1, 3)
    first, second = (w.blob.key for w in Checkpoint.open(copied, key).commit.writers[:2])
    path = copied.folder / first
    data = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "short":
        path.write_bytes(data[:-1])
    elif damage == "long":
        path.write_bytes(data + b"\0")
    elif damage == "swapped":
        path.write_bytes((copied.folder / second).read_bytes())
    else:
        path.write_bytes((copied.folder / first.replace("0000000003-", "0000000002-")).read_bytes())
    problems = verify(copied, key)
    assert problems
    assert first in problems[0]
    if damage != "long":  # what lies behind the end is not read
        with pytest.raises(HoldfastError):
            assert_holds(Checkpoint.open(copied, key), 3)
    assert_holds(newest_verified(copied), 2)


def test_no_whole_checkpoint_is_an_error_and_none_at_all_is_not(copied: FolderStore) -> None:
    for name in files(copied):
        if name.startswith("data/"):
            flip(copied.folder / name, 4100)
    with pytest.raises(CheckpointError, match="none of 3 checkpoints can be trusted"):
        find_newest_verified(copied)
    for name in files(copied):
        (copied.folder / name).unlink()
    assert find_newest_verified(copied) is None


def test_of_one_step_the_newer_generation_wins(start: Start) -> None:
    mover = start()
    for generation in (1, 2):
        mover.workers(2, generation=generation).commit(5)
    assert [
        Checkpoint.open(mover.store, k).commit.generation for k in list_commits(mover.store)
    ] == [2, 1]


def test_newest_says_what_it_passed_over(start: Start) -> None:
    """It names checkpoints that are visibly incomplete, and those that readers found corrupt."""
    before = start()
    topo = topology()
    client = before.begin(topo)
    assert client.find_restore_point().key is None
    workers = Workers(client, topo)
    for step in (1, 2, 3):
        workers.commit(step)
    before.kill()  # and its memory with it
    mover = start()
    client = mover.begin(topology(generation=2))
    (blob,) = [n for n in files(mover.store) if n.startswith("data/") and "/0000000003-" in n]
    os.truncate(mover.store.folder / blob, 4200)
    answer = client.find_restore_point()
    assert (answer.step, answer.meta) == (2, {"position": 32})
    ((key, reason),) = answer.rejected
    assert key == commit_key(1, 3)
    assert blob in reason
    answer = client.find_restore_point(
        corrupt_keys={commit_key(1, 2): "a byte is not as it was written"}
    )
    assert (answer.step, answer.durable) == (1, True)
    kinds = [event.kind for event in client.events(0)[0]]
    assert kinds.count("checkpoint_rejected") == 1  # who read the other has told of it
