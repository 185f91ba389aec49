"""All drivers keep the same promises; the folder keeps them under races and full disks. A name is
given once, also where a file system cannot link, or answers an old question."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.errors import CorruptError, OutOfSpaceError, RunFolderError
from holdfast.wire.store import publish
from holdfast.wire.store.location import open_store
from holdfast.wire.store.run_store import (
    AlreadyExistsError,
    FolderStore,
    MissingKeyError,
    RunStore,
    translate_os_error,
)
from tests.support import s3
from tests.support.memory_store import MemoryStore

Make = Callable[[], RunStore]


@pytest.fixture(params=["folder", "memory", "bucket"])
def store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> RunStore:
    if request.param == "bucket":
        for name, value in s3.CREDENTIALS.items():
            monkeypatch.setenv(name, value)
        return open_store(s3.location(s3.server()))
    return FolderStore(tmp_path / "run") if request.param == "folder" else MemoryStore()


def test_created_bytes_come_back_whole_and_in_ranges(store: RunStore) -> None:
    store.create("a/b/one", [b"0123", bytearray(b"45"), memoryview(b"6789")])
    assert store.get("a/b/one") == b"0123456789"
    assert store.size("a/b/one") == 10
    out = bytearray(4)
    store.read_into("a/b/one", 3, memoryview(out))
    assert out == b"3456"


def test_a_range_beyond_the_end_is_corrupt_not_short(store: RunStore) -> None:
    store.create("a", b"abc")
    with pytest.raises(CorruptError, match="ends at byte 3, 5 were expected"):
        store.read_into("a", 1, memoryview(bytearray(4)))


def test_create_never_replaces(store: RunStore) -> None:
    store.create("terms/1.json", b"first")
    with pytest.raises(AlreadyExistsError):
        store.create("terms/1.json", b"second")
    assert store.get("terms/1.json") == b"first"


def test_missing_keys(store: RunStore) -> None:
    for ask in (store.get, store.size):
        with pytest.raises(MissingKeyError):
            ask("not/there")
    with pytest.raises(MissingKeyError):
        store.read_into("not/there", 0, memoryview(bytearray(1)))
    store.delete("not/there")


def test_listing_is_sorted_and_by_prefix_of_the_key(store: RunStore) -> None:
    for key in ("b/2", "b/10", "a", "bb", "b/x/y"):
        store.create(key, b"")
    assert store.list("") == ["a", "b/10", "b/2", "b/x/y", "bb"]
    assert store.list("b/") == ["b/10", "b/2", "b/x/y"]
    assert store.list("b") == ["b/10", "b/2", "b/x/y", "bb"]
    assert store.list("b/1") == ["b/10"]
    assert store.list("c/d") == []
    store.delete("b/2")
    assert store.list("b/") == ["b/10", "b/x/y"]


def test_append_adds_to_the_end(store: RunStore) -> None:
    store.append("journal/1.jsonl", b"one\n")
    store.append("journal/1.jsonl", b"two\n", sync=True)
    assert store.get("journal/1.jsonl") == b"one\ntwo\n"


@pytest.mark.parametrize(
    "key", ["", "/etc/passwd", "../secret", "a/../../b", "a//b", "a/", ".tmp-x", "a/.b", "ä", "a\0"]
)
def test_keys_that_could_leave_the_store_are_refused(store: RunStore, key: str) -> None:
    for use in (store.get, store.size, store.delete, lambda k: store.create(k, b"")):
        with pytest.raises(ValueError, match="is not a key"):
            use(key)


def test_of_many_creators_exactly_one_wins(store: RunStore) -> None:
    start, wins = threading.Barrier(8), []

    def create(number: int) -> None:
        start.wait(120)
        try:
            store.create("generations/2.json", f"{number}".encode())
        except AlreadyExistsError:
            return
        wins.append(number)

    threads = [threading.Thread(target=create, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(wins) == 1
    assert store.get("generations/2.json") == str(wins[0]).encode()


def test_a_killed_creator_leaves_no_object(tmp_path: Path) -> None:
    """SIGKILL in the middle of the data: the key stays free and is not listed."""
    script = """
        import os, signal, sys
        from holdfast.wire.store.run_store import FolderStore
        def data():
            yield b"x" * 1_000_000
            os.kill(os.getpid(), signal.SIGKILL)
        FolderStore(sys.argv[1]).create("data/blob", data())
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(tmp_path)])
    assert ended.returncode == -9
    store = FolderStore(tmp_path)
    assert store.list("") == []
    (half,) = (tmp_path / "data").iterdir()
    assert half.stat().st_size == 1_000_000
    assert store.sweep("data/", keep="data/") == 0
    assert store.sweep("dat") == store.sweep("other/") == 0
    assert half.exists()
    store.create("data/blob", b"whole")
    assert store.sweep("data/") == 1
    assert not half.exists()
    assert store.get("data/blob") == b"whole"


def test_a_listing_that_cannot_be_read_is_no_empty_one(tmp_path: Path) -> None:
    """Taken for empty, checkpoints would be thought gone, and their bytes be swept."""
    store = FolderStore(tmp_path)
    store.create("commits/a", b"")
    (tmp_path / "commits").rename(tmp_path / "elsewhere")
    (tmp_path / "commits").symlink_to("commits")  # reading it is an error, also for root
    for ask in (store.list, store.sweep):
        with pytest.raises(RunFolderError, match="Too many levels of symbolic links"):
            ask("commits/")


def test_a_folder_that_was_moved_or_replaced_is_left_alone(tmp_path: Path) -> None:
    """A run folder is moved aside while its trainer is stopped: it must not write into the next."""
    old = FolderStore(tmp_path / "run")
    old.create("journal/a", b"1")
    (tmp_path / "run").rename(tmp_path / "run.old-1")
    uses: list[Callable[[], object]] = [
        lambda: old.create("journal/b", b"2"),
        lambda: old.append("journal/a", b"2"),
        lambda: old.delete("journal/a"),
        lambda: old.sweep("journal/"),
    ]
    for _ in range(2):
        for use in uses:
            with pytest.raises(RunFolderError, match="moved, removed or replaced"):
                use()
        assert not (tmp_path / "run" / "journal" / "b").exists()
        new = FolderStore(tmp_path / "run")
        if not (tmp_path / "run").exists():
            new.create("journal/a", b"of another run")
    assert FolderStore(tmp_path / "run").get("journal/a") == b"of another run"
    new = FolderStore(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").mkdir()  # with the same inode number, on some file systems
    with pytest.raises(RunFolderError, match="moved, removed or replaced"):
        new.append("journal/a", b"3")
    (tmp_path / "run").rename(tmp_path / "other")
    (tmp_path / "run.old-1").rename(tmp_path / "run")
    old.append("journal/a", b"2")
    assert old.get("journal/a") == b"12"


def test_a_disk_that_is_found_full_at_the_sync_keeps_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS does it: what is appended again after the failure must not be there already."""
    store = FolderStore(tmp_path)
    store.append("log", b"one\n")

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OutOfSpaceError):
            store.append("log", b"two\n", sync=True)
    store.append("log", b"two\n", sync=True)
    assert store.get("log") == b"one\ntwo\n"


def test_a_name_that_a_changing_folder_lists_twice_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS does it: of three parts, one would be missing and another count twice."""
    store, walk = FolderStore(tmp_path), os.walk
    for key in ("parts/1", "parts/2"):
        store.create(key, b"")
    monkeypatch.setattr(
        os, "walk", lambda *a, **k: ((top, dirs, names * 2) for top, dirs, names in walk(*a, **k))
    )
    assert store.list("parts/") == ["parts/1", "parts/2"]


def test_an_append_waits_for_no_disk_until_it_must_be_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one that must be durable syncs the file and each folder above it."""
    synced: list[str] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        synced.append(os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), tmp_path))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    store = FolderStore(tmp_path)
    store.append("journal/7/rank0.jsonl", b"one\n")
    store.append("journal/7/agent.jsonl", b"one\n")
    assert synced == []
    store.append("journal/7/rank0.jsonl", b"two\n", sync=True)
    assert synced == ["journal/7/rank0.jsonl", "journal/7", "journal", "."]
    del synced[:]
    store.append("journal/7/rank0.jsonl", b"three\n", sync=True)
    store.append("journal/7/agent.jsonl", b"two\n", sync=True)
    assert synced == ["journal/7/rank0.jsonl", "journal/7/agent.jsonl"]


def test_names_that_a_killed_process_made_are_synced_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FolderStore(tmp_path).append("journal/7/rank0.jsonl", b"one\n")
    synced: list[str] = []
    monkeypatch.setattr(
        os, "fsync", lambda fd: synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
    )
    FolderStore(tmp_path).append("journal/7/rank0.jsonl", b"two\n", sync=True)
    assert synced == ["rank0.jsonl", "7", "journal", tmp_path.name]


def _in_a_small_tmpfs(script: str, folder: Path, options: str = "size=1m") -> str:
    """Run `script` with sys.argv[1] a tmpfs of its own, in a user and mount namespace."""
    command = (
        f'mount -t tmpfs -o {options} none "{folder}" && exec "{sys.executable}" -c "$1" "{folder}"'
    )
    try:
        done = subprocess.run(
            ["unshare", "-Urm", "sh", "-c", command, "sh", textwrap.dedent(script)],
            capture_output=True,
            text=True,
            timeout=120,
        )
    except FileNotFoundError:
        pytest.skip("unshare is not installed")
    if "unshare failed" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no user namespaces here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_full_disk_is_one_sentence_and_leaves_nothing_behind(tmp_path: Path) -> None:
    script = """
        import os, sys
        from holdfast.errors import OutOfSpaceError
        from holdfast.wire.store.run_store import FolderStore
        store = FolderStore(sys.argv[1])
        store.create("first", b"a" * 200_000)
        try:
            store.create("second", [b"b" * 500_000] * 3)
        except OutOfSpaceError as error:
            print(error)
        print(sorted(os.listdir(sys.argv[1])))
        fill = open(sys.argv[1] + "/fill", "wb", buffering=0)
        try:
            while True:
                fill.write(b"c" * 4096)
        except OSError:
            pass
        store.append("log", b"")
        before = store.size("log")
        try:
            store.append("log", b"d" * 100_000)
        except OutOfSpaceError as error:
            print("append refused", store.size("log") == before)
        fill.close(); os.remove(sys.argv[1] + "/fill")
        store.append("log", b"d" * 100_000)
        store.create("second", b"b" * 500_000)
        print(store.size("log"), store.size("second"), store.size("first"))
    """
    lines = _in_a_small_tmpfs(script, tmp_path).splitlines()
    assert lines[0] == f"{tmp_path}: the disk is full; free some space, or use another folder"
    assert lines[1] == "['first']"
    assert lines[2] == "append refused True"
    assert lines[3] == "100000 500000 200000"


def test_a_folder_that_may_not_be_written(tmp_path: Path) -> None:
    script = """
        import sys
        from holdfast.errors import RunFolderError
        from holdfast.wire.store.run_store import FolderStore
        for use in (lambda s: s.create("a/b", b""), lambda s: s.append("log", b"x")):
            try:
                use(FolderStore(sys.argv[1]))
            except RunFolderError as error:
                print(error)
    """
    lines = _in_a_small_tmpfs(script, tmp_path, "ro").splitlines()
    assert len(lines) == 2
    assert all("is read-only" in line and str(tmp_path) in line for line in lines)


def test_a_file_in_the_place_of_the_run_folder(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("not a folder")
    with pytest.raises(RunFolderError, match="not a folder"):
        FolderStore(tmp_path / "run" / "deeper").create("a", b"")


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_without_hard_links_one_of_two_writers_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def no_links(old: Path, new: Path) -> None:
        raise OSError(code, os.strerror(code), str(old), None, str(new))

    monkeypatch.setattr(os, "link", no_links)
    store = FolderStore(tmp_path)
    store.create("terms/1.json", b"first")
    (tmp_path / "other").write_bytes(b"second")
    with pytest.raises(FileExistsError):  # a racing writer, after the look for the name
        publish.publish_file(tmp_path / "other", tmp_path / "terms" / "1.json")
    with pytest.raises(AlreadyExistsError):
        store.create("terms/1.json", b"third")
    assert store.get("terms/1.json") == b"first"
    assert sorted(os.listdir(tmp_path / "terms")) == ["1.json"]


def test_where_neither_works_the_sentence_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(old: Path, new: Path) -> None:
        raise OSError(errno.EPERM, "no", str(old), None, str(new))

    class NoLibrary:
        def __init__(self, *_: object, **__: object) -> None: ...

    monkeypatch.setattr(os, "link", no_links)
    monkeypatch.setattr(publish.ctypes, "CDLL", NoLibrary)
    with pytest.raises(RunFolderError, match="neither make hard links nor rename without"):
        FolderStore(tmp_path).create("terms/1.json", b"first")


def test_an_answer_that_was_asked_for_twice_is_recognised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link is made, and the answer says that the name exists (NFS)."""
    make = os.link

    def made_and_denied(old: Path, new: Path) -> None:
        make(old, new)
        raise FileExistsError(errno.EEXIST, "exists", str(old), None, str(new))

    monkeypatch.setattr(os, "link", made_and_denied)
    store = FolderStore(tmp_path)
    store.create("terms/1.json", b"ours")
    assert store.get("terms/1.json") == b"ours"


def test_a_file_system_that_may_only_be_read_is_named() -> None:
    error = translate_os_error(OSError(errno.EROFS, "Read-only file system"), Path("/run"))
    assert "read-only" in str(error)
