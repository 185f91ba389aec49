"""Comparing and copying checkpoints of several writers, of one layout and of unlike ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.checkpoint.bucket import copy
from holdfast.checkpoint.bucket.copy import copy_checkpoint
from holdfast.checkpoint.restore import inspect
from holdfast.checkpoint.restore.catalog import list_commits
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.checkpoint.restore.verify import verify
from holdfast.core.sharding.boxes import Box
from holdfast.core.sharding.state_table import TensorSpec
from holdfast.errors import CheckpointError
from holdfast.wire.store.run_store import Buffer, FolderStore
from tests.support.memory_store import MemoryStore
from tests.support.mover_process import TABLE, Mover, Start, Workers, assert_holds, state, topology


def saved(mover: Mover, replicas: int, dp_shard: int, steps: tuple[int, ...]) -> FolderStore:
    workers = mover.workers(replicas, dp_shard)
    for step in steps:
        workers.commit(step)
    return mover.store


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FolderStore, FolderStore]]:
    """The same steps, saved by 2 replicas of 2 shards and by 3 shards. Not to be changed."""
    movers = [Mover(tmp_path_factory.mktemp("run"), keep_last=9) for _ in range(2)]
    try:
        yield saved(movers[0], 2, 2, (1, 2)), saved(movers[1], 1, 3, (1, 2))
    finally:
        for mover in movers:
            mover.close()


def opened(store: FolderStore, step: str) -> Checkpoint:
    return Checkpoint.open(store, inspect.find_commit_key(store, step))


def test_a_step_is_found_by_its_number(stores: tuple[FolderStore, FolderStore]) -> None:
    assert opened(stores[0], "newest").step == 2
    assert opened(stores[0], "1").step == opened(stores[0], "0001").step == 1
    for wrong in ("7", "oldest", "-1"):
        with pytest.raises(CheckpointError, match="one of these: 1, 2"):
            inspect.find_commit_key(stores[0], wrong)
    with pytest.raises(CheckpointError, match="no checkpoint here"):
        inspect.find_commit_key(MemoryStore(), "newest")


def test_the_layout_makes_no_difference(stores: tuple[FolderStore, FolderStore]) -> None:
    found = inspect.compare_checkpoints(opened(stores[0], "2"), opened(stores[1], "2"))
    assert (found.same_count, found.differences) == (len(TABLE), {})


def test_what_differs_is_counted_and_measured(stores: tuple[FolderStore, FolderStore]) -> None:
    seen: list[tuple[int, int]] = []
    found = inspect.compare_checkpoints(
        opened(stores[0], "1"),
        opened(stores[1], "2"),
        lambda done, total: seen.append((done, total)),
    )
    one, two = state(1), state(2)
    assert set(found.differences) == set(one)
    for name, difference in found.differences.items():
        assert difference.kind == "bytes"
        assert difference.elements == int((one[name] != two[name]).sum())
        assert difference.total_elements == one[name].numel()
        assert difference.max_abs == float((one[name].double() - two[name].double()).abs().max())
    assert seen[-1] == (sum(spec.nbytes for spec in TABLE),) * 2


def test_tables_that_differ_are_told_apart(start: Start, tmp_path: Path) -> None:
    other = (
        *TABLE[1:-1],
        TensorSpec("model.embed.weight", "F32", (38, 8), 0),
        TensorSpec("model.scale", "F32", (), None),
        TensorSpec("model.new", "F32", (2,), 0),
    )
    mover = start()
    ours = saved(mover, 1, 1, (1,))
    (tmp_path / "other").mkdir()
    second, topo = start(tmp_path / "other"), topology()
    Workers(second.begin(topo, other), topo, other).commit(1)
    found = inspect.compare_checkpoints(opened(ours, "1"), opened(second.store, "1"))
    whats = {name: d.kind for name, d in found.differences.items()}
    assert whats["model.embed.weight"] == "shape"
    assert whats["model.scale"] == "dtype"
    assert whats["model.new"] == "only in the second"


@pytest.mark.parametrize("elements", [1, 3, 7, 24, 1000])
def test_pieces_tile_a_box_in_order(elements: int) -> None:
    box = Box("w", (5, 0, 2), (3, 2, 4))
    pieces = list(inspect.split_box(box, elements))
    assert all(0 < piece.size <= elements for piece in pieces)
    seen = [
        (a, b, c)
        for p in pieces
        for a in range(p.offsets[0], p.stops[0])
        for b in range(p.offsets[1], p.stops[1])
        for c in range(p.offsets[2], p.stops[2])
    ]
    assert seen == sorted(seen)
    assert len(set(seen)) == box.size


# --- copy -----------------------------------------------------------------------------------
class Counting(FolderStore):
    """Counts the bytes that are created, and can fail at the n-th object."""

    def __init__(self, folder: Path, fail_at: int = -1) -> None:
        super().__init__(folder)
        self.created: list[str] = []
        self._fail_at = fail_at

    def create(self, key: str, data: object) -> None:
        if len(self.created) == self._fail_at:
            raise OSError("the machine went away")
        super().create(key, data)  # type: ignore[arg-type]
        self.created.append(key)


def test_a_copy_is_whole_and_made_once(
    stores: tuple[FolderStore, FolderStore], tmp_path: Path
) -> None:
    source, key = stores[0], inspect.find_commit_key(stores[0], "2")
    (tmp_path / "copy").mkdir()
    target = Counting(tmp_path / "copy")
    done = copy_checkpoint(source, key, target)
    assert done.copied_bytes == Checkpoint.open(source, key).commit.nbytes
    assert target.created[-1] == key
    kinds = [name.split("/")[0] for name in target.created]
    assert kinds.index("commits") > max(i for i, kind in enumerate(kinds) if kind == "data")
    assert verify(target, key) == []
    assert_holds(Checkpoint.open(target, key), 2)
    assert list_commits(target) == [key]
    again = Counting(tmp_path / "copy")
    assert copy_checkpoint(source, key, again).copied_bytes == 0
    assert again.created == []


def test_a_copy_goes_on_wherever_it_was_cut(
    stores: tuple[FolderStore, FolderStore], tmp_path: Path
) -> None:
    source, key = stores[0], inspect.find_commit_key(stores[0], "1")
    for fail_at in range(10):
        folder = tmp_path / str(fail_at)
        folder.mkdir()
        cut = Counting(folder, fail_at)
        try:
            copy_checkpoint(source, key, cut)
        except OSError:
            assert list_commits(cut) == [], "a copy that was cut is no checkpoint"
        after = Counting(folder)
        copy_checkpoint(source, key, after)
        assert not set(after.created) & set(cut.created), "what was there is not copied again"
        assert_holds(Checkpoint.open(after, key), 1)


def test_rot_in_the_source_is_refused_and_in_the_target_mended(
    start: Start, tmp_path: Path
) -> None:
    source = saved(start(), 2, 1, (1,))
    key = inspect.find_commit_key(source, "1")
    (tmp_path / "copy").mkdir()
    target = FolderStore(tmp_path / "copy")
    copy_checkpoint(source, key, target)
    for path in sorted((tmp_path / "copy" / "data").rglob("*.safetensors")):
        rot(path)
    done = copy_checkpoint(source, key, target)
    assert (done.copied_bytes, done.present_bytes) == (
        Checkpoint.open(source, key).commit.nbytes,
        0,
    )
    assert verify(target, key) == []
    rot(next((source.folder / "data").rglob("*rank00001*")))
    (tmp_path / "new").mkdir()
    with pytest.raises(CheckpointError, match=r"not whole: data/.*checksum"):
        copy_checkpoint(source, key, FolderStore(tmp_path / "new"))
    assert list_commits(FolderStore(tmp_path / "new")) == []


def rot(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_folder_of_another_run_is_left_alone(
    stores: tuple[FolderStore, FolderStore], start: Start, tmp_path: Path
) -> None:
    other = saved(start(config_hash="another"), 1, 1, (5,))
    with pytest.raises(CheckpointError, match="another run"):
        copy_checkpoint(stores[0], inspect.find_commit_key(stores[0], "2"), other)
    with pytest.raises(CheckpointError, match="another checkpoint of step 2"):
        copy_checkpoint(stores[0], inspect.find_commit_key(stores[0], "2"), stores[1])


def test_the_next_generation_after_a_copy_is_a_newer_one(start: Start, tmp_path: Path) -> None:
    mover = start()
    mover.workers(generation=7).commit(3)
    (tmp_path / "copy").mkdir()
    target = FolderStore(tmp_path / "copy")
    copy_checkpoint(mover.store, inspect.find_commit_key(mover.store, "3"), target)
    assert copy.newest_generation(target) == 7


def test_nothing_of_the_extent_is_believed_unchecked() -> None:
    """A store whose bytes differ from one read to the next: the one that is written is checked."""

    class Flaky(MemoryStore):
        def read_into(self, key: str, start: int, out: memoryview) -> None:
            super().read_into(key, start, out)
            if key.startswith("data/"):
                out[0] ^= 1

    data: Buffer = b"x" * 5000
    store = Flaky()
    store.create("data/0/x", data)
    from xxhash import xxh3_128_hexdigest

    from holdfast.core.format.manifest import Blob

    blob = Blob("data/0/x", 5000, 4096, 8192, (xxh3_128_hexdigest(data),))
    with pytest.raises(CheckpointError, match="checksum"):
        list(copy._read_checked(store, blob))
