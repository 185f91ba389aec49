"""Copies of one checkpoint that run at the same time remove nothing of each other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from xxhash import xxh3_128_hexdigest

from holdfast.checkpoint.bucket import fencing
from holdfast.checkpoint.bucket.copy import copy_checkpoint
from holdfast.checkpoint.bucket.copy_lease import CopyLease, LeaseHeldError
from holdfast.checkpoint.bucket.uploader import Uploader
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.checkpoint.restore.verify import verify
from holdfast.checkpoint.save.retention import RetentionRules
from holdfast.core.format.manifest import Commit
from holdfast.errors import CheckpointError, HoldfastError
from holdfast.events import CheckpointUploaded, Event, UploadFailed
from holdfast.wire.store.location import open_store
from holdfast.wire.store.run_store import Buffer, FolderStore, RunStore
from tests.runtime.checkpoint.bucket.test_copy_lease import CLAIM, KEY, NEVER, save, whole
from tests.support import s3
from tests.support.ranks import DEADLINE_S, wait_until

FIRST = "data/0000000001/0000000005-rank00000-0.safetensors"


@pytest.fixture
def source(tmp_path: Path) -> FolderStore:
    return saved(tmp_path / "source", 1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "target").mkdir()
    return tmp_path / "target"


def saved(folder: Path, seed: int) -> FolderStore:
    folder.mkdir()
    store = FolderStore(folder)
    save(store, seed)
    return store


class ReadOnce(FolderStore):
    """Something happens when its first blob is read first; read a second time, it fails."""

    def __init__(self, folder: Path, meanwhile: Callable[[], object]) -> None:
        super().__init__(folder)
        self._meanwhile = meanwhile
        self._read = False

    def read_into(self, key: str, start: int, out: memoryview) -> None:
        if key == FIRST and start == 0:
            if self._read:
                raise HoldfastError("the machine is gone")
            self._read = True
            self._meanwhile()
        super().read_into(key, start, out)


@pytest.mark.parametrize("kind", ["folder", "bucket"])
@pytest.mark.usefixtures("s3_credentials")
def test_what_another_copy_brought_and_committed_stays(
    source: FolderStore, folder: Path, kind: str
) -> None:
    target: RunStore = FolderStore(folder)
    if kind == "bucket":
        target = open_store(s3.location(s3.server()))
    slow = ReadOnce(source.folder, lambda: copy_checkpoint(source, KEY, target))
    done = copy_checkpoint(slow, KEY, target)
    assert whole(target, source)
    assert (done.copied_bytes, done.present_bytes) == (
        0,
        Checkpoint.open(source, KEY).commit.nbytes,
    )


def test_two_movers_that_upload_the_same_checkpoint(source: FolderStore, folder: Path) -> None:
    target = FolderStore(folder)
    begun, go = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        assert go.wait(DEADLINE_S)

    events: list[Event] = []
    old = Uploader(ReadOnce(source.folder, hold), lambda: target, RetentionRules(3), events.append)
    assert begun.wait(DEADLINE_S)
    new = Uploader(source, lambda: target, RetentionRules(3), events.append)
    assert new.wait_for_newest(DEADLINE_S) is None
    go.set()
    assert old.wait_for_newest(DEADLINE_S) is None
    for uploader in (old, new):
        uploader.close(DEADLINE_S)
    assert verify(target, KEY) == []
    assert [(type(event), event.step) for event in events] == [(CheckpointUploaded, 5)] * 2


@pytest.mark.parametrize("when", ["before", "in the midst"])
def test_a_source_that_is_not_mounted_for_a_while_is_neither_fenced_nor_without_the_checkpoint(
    source: FolderStore, folder: Path, tmp_path: Path, when: str
) -> None:
    target, events = FolderStore(folder), list[Event]()
    fencing.enter_target(source, target, 1)

    def unmount() -> None:
        source.folder.rename(tmp_path / "elsewhere")
        source.folder.mkdir()

    class Unmounted(FolderStore):
        def read_into(self, key: str, start: int, out: memoryview) -> None:
            if when == "in the midst" and not (tmp_path / "elsewhere").exists() and not events:
                unmount()
            super().read_into(key, start, out)

    uploads = Unmounted(source.folder)
    if when == "before":
        unmount()
    uploader = Uploader(uploads, lambda: target, RetentionRules(3), events.append)
    uploader.request_upload(KEY)
    wait_until(lambda: events, what="the failure")
    (failed,) = events
    assert isinstance(failed, UploadFailed)
    assert failed.reason == "the run folder is out of reach"
    source.folder.rmdir()
    (tmp_path / "elsewhere").rename(source.folder)
    wait_until(lambda: len(events) > 1, what="the upload")
    uploader.close(DEADLINE_S)
    assert [type(event) for event in events] == [UploadFailed, CheckpointUploaded]
    assert verify(target, KEY) == []


class Watched(FolderStore):
    """Something happens before the first of some objects is created; only claims may go."""

    def __init__(self, folder: Path, part_of_key: str, meanwhile: Callable[[], object]) -> None:
        super().__init__(folder)
        self._waits_for, self._meanwhile = part_of_key, meanwhile

    def create(self, key: str, data: Buffer | Iterable[Buffer]) -> None:
        if self._waits_for and self._waits_for in key:
            self._waits_for = ""
            self._meanwhile()
        super().create(key, data)

    def delete(self, key: str) -> None:
        assert key.startswith(CLAIM)
        super().delete(key)


@pytest.mark.parametrize(
    "when", [CLAIM, "rank00000-0", "rank00000.json", "rank00001-0", "rank00001.json", KEY]
)
def test_a_copy_that_comes_second_anywhere_removes_nothing(
    source: FolderStore, folder: Path, when: str
) -> None:
    target = FolderStore(folder)
    watched = Watched(folder, when, lambda: copy_checkpoint(source, KEY, target))
    copy_checkpoint(source, KEY, watched)
    assert whole(target, source)


def test_who_trusts_an_old_claim_removes_nothing_of_another_checkpoint(
    source: FolderStore, folder: Path, tmp_path: Path
) -> None:
    other, target = saved(tmp_path / "other", 2), FolderStore(folder)
    raw = other.get(KEY)

    def take_over() -> None:
        CopyLease(target, Commit.from_bytes(raw, KEY), xxh3_128_hexdigest(raw), 0.1).acquire()
        copy_checkpoint(other, KEY, target, lease_expiry_s=NEVER)

    with pytest.raises(LeaseHeldError, match="was taken over there"):
        copy_checkpoint(source, KEY, Watched(folder, FIRST, take_over), lease_expiry_s=NEVER)
    assert whole(target, other)


@pytest.mark.parametrize("same", [True, False])
def test_who_mends_at_the_same_time(source: FolderStore, folder: Path, same: bool) -> None:
    class Contended(FolderStore):
        """If an object is removed, another copy is quicker to make it again."""

        def delete(self, key: str) -> None:
            super().delete(key)
            if key.startswith("data/"):
                self.create(key, source.get(key) if same else b"of another")

    target = Contended(folder)
    target.create(FIRST, b"rotten")
    if same:
        done = copy_checkpoint(source, KEY, target)
        assert whole(target, source)
        assert done.present_bytes == source.size(FIRST)
    else:
        with pytest.raises(CheckpointError, match=r"somebody else writes data/.*copy it again"):
            copy_checkpoint(source, KEY, target)
