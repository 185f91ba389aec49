"""Copies of one checkpoint that run at the same time. A lease keeps different ones apart and ends
with its holder. No copy removes anything of another."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from xxhash import xxh3_128_hexdigest

from holdfast.checkpoint.bucket import fencing
from holdfast.checkpoint.bucket.copy import copy_checkpoint
from holdfast.checkpoint.bucket.copy_lease import CopyLease, LeaseHeldError
from holdfast.checkpoint.bucket.uploader import Uploader
from holdfast.checkpoint.format.save_context import SaveContext
from holdfast.checkpoint.restore.catalog import list_commits
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.checkpoint.restore.verify import verify
from holdfast.checkpoint.save.retention import RetentionRules
from holdfast.checkpoint.save.writer import try_commit
from holdfast.core.format.manifest import Commit, commit_key, part_prefix
from holdfast.core.sharding.state_table import TensorSpec
from holdfast.errors import CheckpointError, HoldfastError
from holdfast.events import CheckpointUploaded, Event, UploadFailed
from holdfast.layout import Layout, place_layout
from holdfast.wire.store.location import open_store
from holdfast.wire.store.run_store import Buffer, FolderStore, RunStore
from holdfast.wire.term import create_generation
from tests.support import s3
from tests.support.memory_store import MemoryStore
from tests.support.mover_process import write_noise
from tests.support.ranks import DEADLINE_S, wait_until

TABLE = (TensorSpec("model.embed.weight", "F32", (37, 8), 0),)
KEY = commit_key(1, 5)
SHORT = 1.5
NEVER = 1e9
CLAIM = f"{part_prefix(1, 5)}claim"

KILLED = """
import sys
from holdfast.checkpoint.bucket.copy import copy_checkpoint
from holdfast.wire.store.run_store import FolderStore
from tests.support.killed_store import Killing
source, target, key, point = sys.argv[1:]
copy_checkpoint(FolderStore(source), key, Killing(target, int(point)))
"""


def save(store: RunStore, seed: int) -> Commit:
    """Step 5 of a generation 1; another one for each seed, of the same size."""
    topo = place_layout(Layout(dp_shard=2), 1, ("n", "n"))
    plan = SaveContext(1, topo, TABLE, "c", "d", extent_bytes=256)
    create_generation(store, 1, {})
    for rank in range(2):
        write_noise(store, plan, 5, rank, seed)
    commit = try_commit(store, plan, 5)
    assert commit is not None
    return commit


@pytest.fixture
def stores(tmp_path: Path) -> list[FolderStore]:
    """Two machines that each have a step 5 of their own, and where they copy it to."""
    made = []
    for name in ("one", "other", "target"):
        (tmp_path / name).mkdir()
        made.append(FolderStore(tmp_path / name))
    assert save(made[0], 1).to_bytes() != save(made[1], 2).to_bytes()
    return made


def kill_a_copy(source: FolderStore, target: FolderStore, point: int = 4) -> None:
    """In the middle of its first blob, which is behind its claim."""
    words = [str(source.folder), str(target.folder), KEY, str(point)]
    done = subprocess.run([sys.executable, "-c", KILLED, *words], timeout=DEADLINE_S, check=False)
    assert done.returncode == -9
    assert target.list(CLAIM)
    assert list_commits(target) == []


def whole(target: RunStore, source: RunStore) -> bool:
    """The very checkpoint of the source lies there, and no claim any more."""
    assert verify(target, KEY) == []
    return target.get(KEY) == source.get(KEY) and not target.list(CLAIM)


def test_a_killed_copy_that_is_run_again_goes_on_at_once(stores: list[FolderStore]) -> None:
    one, _, target = stores
    kill_a_copy(one, target)
    copy_checkpoint(one, KEY, target, lease_expiry_s=NEVER, say=pytest.fail)
    assert whole(target, one)


def test_a_killed_copy_s_claim_is_taken_over(stores: list[FolderStore]) -> None:
    one, other, target = stores
    kill_a_copy(one, target)
    said: list[str] = []
    copy_checkpoint(other, KEY, target, lease_expiry_s=SHORT, say=said.append)
    assert whole(target, other)
    assert len(said) == 1
    assert "is being copied there (by " in said[0]
    with pytest.raises(CheckpointError, match="another checkpoint of step 5"):
        copy_checkpoint(one, KEY, target, lease_expiry_s=NEVER)


def test_a_claim_without_a_number_is_taken_over_too(stores: list[FolderStore]) -> None:
    one, _, target = stores
    target.create(CLAIM, b"0123456789abcdef")
    copy_checkpoint(one, KEY, target, lease_expiry_s=SHORT)
    assert whole(target, one)


class Held(FolderStore):
    """Stops in the first blob until it may continue; if `silent`, also in any later claim."""

    def __init__(self, folder: Path, silent: bool = False) -> None:
        super().__init__(folder)
        self.begun, self.go = threading.Event(), threading.Event()
        self._silent = silent

    def create(self, key: str, data: Buffer | Iterable[Buffer]) -> None:
        if key.startswith("data/") and not self.begun.is_set():
            self.begun.set()
            assert self.go.wait(DEADLINE_S)
        if self._silent and key.startswith(CLAIM) and self.list(CLAIM):
            assert self.go.wait(DEADLINE_S)
        super().create(key, data)


def test_whoever_lives_keeps_his_claim_however_slow_he_is(stores: list[FolderStore]) -> None:
    one, other, target = stores
    held = Held(target.folder)
    with ThreadPoolExecutor(1) as pool:
        copied = pool.submit(copy_checkpoint, one, KEY, held, lease_expiry_s=4 * SHORT)
        assert held.begun.wait(DEADLINE_S)
        with pytest.raises(LeaseHeldError, match="another checkpoint of step 5"):
            copy_checkpoint(other, KEY, target, lease_expiry_s=NEVER)  # ends by a sign of life
        held.go.set()
        assert copied.result(DEADLINE_S).copied_bytes > 0
    assert whole(target, one)


def test_who_was_stopped_and_taken_over_writes_nothing_more(stores: list[FolderStore]) -> None:
    one, other, target = stores
    held = Held(target.folder, silent=True)
    with ThreadPoolExecutor(1) as pool:
        copied = pool.submit(copy_checkpoint, one, KEY, held, lease_expiry_s=SHORT)
        assert held.begun.wait(DEADLINE_S)
        copy_checkpoint(other, KEY, target, lease_expiry_s=3 * SHORT)  # its own claim has to last
        held.go.set()
        with pytest.raises(HoldfastError):
            copied.result(DEADLINE_S)
    assert whole(target, other)


def test_of_two_who_take_over_at_once_one_wins(stores: list[FolderStore]) -> None:
    one, other, _ = stores

    class Together(MemoryStore):
        """Two create the number behind the abandoned one at the same time."""

        def __init__(self) -> None:
            super().__init__()
            self._meet = threading.Barrier(2)

        def create(self, key: str, data: Buffer | Iterable[Buffer]) -> None:
            if key == f"{CLAIM}-{2:08d}":
                self._meet.wait(DEADLINE_S)
            super().create(key, data)

    for _ in range(10):
        target = Together()
        target.create(f"{CLAIM}-{1:08d}", b"of a third")
        commits = [Commit.from_bytes(store.get(KEY), KEY) for store in (one, other)]
        claims = [CopyLease(target, c, str(n), 0.05) for n, c in enumerate(commits)]
        with ThreadPoolExecutor(2) as pool:
            ends = [
                future.exception(DEADLINE_S) for future in [pool.submit(c.acquire) for c in claims]
            ]
        assert sorted(type(end) for end in ends if end is not None) == [LeaseHeldError]
        claims[ends.index(None)].renew()
        assert len(target.list(CLAIM)) == 2  # the winner's; the abandoned one was removed


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
