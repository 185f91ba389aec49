"""The run store: the one durable thing a run needs, as keys and bytes.

Two drivers stand here: a folder, and memory (for tests and dry runs); `bucket.py` has a third. A
bucket needs only what the protocol promises. An object appears atomically, `create` lets exactly
one of several racing writers win, and `list` is sorted. Everything else Holdfast fences with
(terms, generations, commits) is built from create-if-absent alone.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from holdfast.errors import CorruptError, HoldfastError, OutOfSpaceError, RunFolderError
from holdfast.wire.store.publish import publish_file
from holdfast.wire.store.vectored_io import DirectWriter, read_vectored

Buffer = bytes | bytearray | memoryview
"""Types that can be written. (`collections.abc.Buffer` is younger than Python 3.11.)"""

_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_TEMPORARY = ".tmp-"  # no valid key has a segment that begins with a dot


class AlreadyExistsError(HoldfastError):
    """`create` came second: the key is taken and its bytes are another writer's."""


class MissingKeyError(HoldfastError):
    """No object has this key."""


class RunStore(Protocol):
    """Keys are slash-separated; objects are immutable, but for the journal's segments and a term's
    signs of life, which grow."""

    def create(self, key: str, data: Buffer | Iterable[Buffer]) -> None:
        """Store `data` under `key` atomically, durable on return.

        Raises AlreadyExistsError when the key is taken, OutOfSpaceError when the disk is full
        (nothing is left behind). Raises RunFolderError when the store may not be written,
        StoreError (one of those) when a bucket is out of reach. If a bucket has a large blob with
        these very bytes, the call succeeds: so the upload of a killed mover resumes.
        """

    def get(self, key: str) -> bytes:
        """Return the complete object. Raises MissingKeyError."""

    def read_into(self, key: str, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes [start, start + len(out)) of the object.

        Raises MissingKeyError, and CorruptError when the object ends before.
        """

    def list(self, prefix: str) -> list[str]:
        """Every key that begins with `prefix`, sorted. Never a part of them for all: raises
        RunFolderError when some cannot be read."""

    def delete(self, key: str) -> None:
        """Remove the object; a key that is not there is no error."""

    def size(self, key: str) -> int:
        """Bytes of the object. Raises MissingKeyError."""

    def append(self, key: str, data: Buffer, sync: bool = False) -> None:
        """Add `data` to the end of a journal segment, which one writer alone appends to.

        With `sync` it is durable on return, with all that came before it. Without, no disk has to
        answer that it is. Object stores cannot append: a bucket's driver makes a segment of
        numbered objects and joins them for its readers; only keys below `journal/`.
        """

    def sweep(self, prefix: str, keep: str = "") -> int:
        """Remove the unfinished objects that killed creators left below the folder `prefix`, except
        those below the folder `keep`. Return how many. A creator still at work there fails."""


@runtime_checkable
class ChecksummedStore(Protocol):
    """A store that keeps a checksum of each large blob."""

    def has_same_bytes(self, key: str, data: Iterable[Buffer]) -> bool:
        """Return True if the blob is there and has these bytes, without sending or reading it.
        False if that is unknown."""


@runtime_checkable
class ReplacingStore(Protocol):
    """A store that replaces an object atomically: a bucket's description and signs of life."""

    def replace(self, key: str, data: Buffer) -> None:
        """Store a small object, whether one is there or not. Raises as `RunStore.create` does."""


@runtime_checkable
class SegmentedStore(Protocol):
    """A store in which each append is a request of its own, and each look at a segment another."""

    append_interval_s: float
    """Seconds that a writer waits between two appends, unless something needs the first."""

    def segment_sizes(self, prefix: str) -> dict[str, int]:
        """Return the journal's segments that begin with `prefix`, and their bytes, by one
        request."""


def segment_sizes(store: RunStore, prefix: str) -> dict[str, int]:
    """Return the keys that begin with `prefix`, sorted, and their bytes."""
    if isinstance(store, SegmentedStore):
        return store.segment_sizes(prefix)
    if isinstance(store, FolderStore):
        return store.sizes(prefix)
    sizes = {}
    for key in store.list(prefix):
        with suppress(MissingKeyError):  # removed meanwhile
            sizes[key] = store.size(key)
    return sizes


def free_bytes(store: RunStore) -> int | None:
    """Return the bytes that a folder's file system has left; None if that is not known."""
    folder = getattr(getattr(store, "inner", store), "folder", None)
    try:
        return None if folder is None else shutil.disk_usage(folder).free
    except OSError:
        return None


def append_interval(store: RunStore) -> float:
    """Return the seconds between two appends of one writer to a store; 0 for no limit."""
    return store.append_interval_s if isinstance(store, SegmentedStore) else 0.0


class ReadPreference(NamedTuple):
    """How a store is best read: requests under way at a time, and bytes of each. A distant one
    wants many, because each waits for its answer."""

    requests: int
    bytes: int


NEARBY_READS = ReadPreference(2, 8 * 2**20)
"""One request is answered while the answer to another is checked."""

FILE_READS = ReadPreference(2, 64 * 2**20)
"""Requests long enough for the kernel's full read-ahead within each. Each request opens the file
again; two that take turns in short pieces of one file look random to the kernel."""


@runtime_checkable
class VectoredStore(Protocol):
    """A store that reads a range into several buffers in one request."""

    def scatter(self, key: str, start: int, outs: Sequence[memoryview]) -> None:
        """Fill all of `outs`, one after the other, with the object's bytes from `start` on.
        Raises as `read_into` does."""


def check_key(key: str) -> str:
    """The key itself. Raises ValueError for one that could leave the store or hide in it."""
    parts = key.split("/")
    if len(key) > 512 or not all(_SEGMENT.fullmatch(part) for part in parts):
        raise ValueError(f"{key!r} is not a key of the run store")
    return key


def byte_views(data: Buffer | Iterable[Buffer]) -> Iterator[memoryview]:
    """The data as flat byte views, without copying."""
    parts: Iterable[Buffer] = [data] if isinstance(data, bytes | bytearray | memoryview) else data
    for part in parts:
        yield memoryview(part).cast("B")


class FolderStore:
    """A run store in a folder of a local or shared file system.

    Atomicity comes from `link(2)`. The bytes are written and synced under a temporary name, and the
    link to the final name fails if that is taken. (`rename` would replace silently.)

    The store is the folder that was there when this object was made or first wrote. Another folder
    at its path is not: once the folder is moved or replaced, nothing is written or deleted any
    more.
    """

    reads = FILE_READS

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self._root: int | None = None
        self._open_root()
        self._unsynced_folders = UnsyncedFolders(self.folder)

    def __reduce__(self) -> tuple[type[FolderStore], tuple[Path]]:
        """In another process the store is the folder that is there now."""
        return FolderStore, (self.folder,)

    def create(self, key: str, data: Buffer | Iterable[Buffer]) -> None:
        target = self._path(key)
        with self._translate_errors(key):
            for made in self._make_parents(target):
                _sync_folder(made.parent)
            if target.exists():  # the link below decides; this spares writing a blob in vain
                raise AlreadyExistsError(f"{key} exists already")
            temporary = target.parent / f"{_TEMPORARY}{secrets.token_hex(8)}"
            try:
                self._write(temporary, data)
                publish_file(temporary, target)
            except FileExistsError:
                raise AlreadyExistsError(f"{key} exists already") from None
            finally:
                temporary.unlink(missing_ok=True)
            _sync_folder(target.parent)

    def get(self, key: str) -> bytes:
        with self._translate_errors(key):
            return self._path(key).read_bytes()

    def read_into(self, key: str, start: int, out: memoryview) -> None:
        self.scatter(key, start, [out.cast("B")])

    def scatter(self, key: str, start: int, outs: Sequence[memoryview]) -> None:
        due = sum(map(len, outs))
        with self._translate_errors(key):
            # A text: a reader of a journal opens a thousand segments, and a Path costs as much.
            fd = os.open(f"{self.folder}/{check_key(key)}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                done = read_vectored(fd, start, outs)
            finally:
                os.close(fd)
        if done < due:
            raise CorruptError(f"{key} ends at byte {start + done}, {start + due} were expected")

    def list(self, prefix: str) -> list[str]:
        with self._translate_errors(prefix):
            return sorted({key for key, _ in self._entries(prefix)})

    def sizes(self, prefix: str) -> dict[str, int]:
        """Return the keys that begin with `prefix`, sorted, and their bytes. Raises as `list`."""
        sizes: dict[str, int] = {}
        with self._translate_errors(prefix):
            for key, entry in self._entries(prefix):
                with suppress(FileNotFoundError):  # removed meanwhile
                    sizes[key] = entry.stat().st_size
        return dict(sorted(sizes.items()))

    def _entries(self, prefix: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """Yield each key that begins with `prefix`. A folder that changes may list a name twice, on
        NFS for example."""
        # Only the deepest complete folder of the prefix is walked: listing one generation's journal
        # does not read the folder of blobs.
        folders = [check_key(prefix.rpartition("/")[0]) if "/" in prefix else ""]
        while folders:
            base = folders.pop()
            try:
                with os.scandir(f"{self.folder}/{base}") as entries:
                    found = [
                        (f"{base}/{each.name}" if base else each.name, each) for each in entries
                    ]
            except FileNotFoundError:  # there is none, or it was removed meanwhile
                continue
            for key, entry in found:
                if entry.is_dir():
                    if not entry.is_symlink():
                        folders.append(key)
                elif key.startswith(prefix) and not entry.name.startswith(_TEMPORARY):
                    yield key, entry

    def delete(self, key: str) -> None:
        path = self._path(key)
        with self._translate_errors(key):
            self._check_same_folder()
            path.unlink(missing_ok=True)

    def sweep(self, prefix: str, keep: str = "") -> int:
        root, kept = self.folder / prefix.rstrip("/"), self.folder / keep.rstrip("/")
        count = 0
        with self._translate_errors(prefix):
            self._check_same_folder()
            for folder, _, names in os.walk(root, onerror=_raise_unless_missing):
                if keep and Path(folder).is_relative_to(kept):
                    continue
                for name in names:
                    if name.startswith(_TEMPORARY):
                        Path(folder, name).unlink(missing_ok=True)
                        count += 1
        return count

    def size(self, key: str) -> int:
        with self._translate_errors(key):
            return self._path(key).stat().st_size

    def append(self, key: str, data: Buffer, sync: bool = False) -> None:
        path = self._path(key)
        with self._translate_errors(key):
            for made in self._make_parents(path):
                self._unsynced_folders.add(made)
            fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                before = os.fstat(fd).st_size
                self._unsynced_folders.meet(path)
                try:
                    _write_all(fd, memoryview(data).cast("B"))
                    if sync:
                        os.fsync(fd)  # a network's file system says only here that it is full
                        self._unsynced_folders.sync_above(path)
                except OSError:
                    os.ftruncate(fd, before)  # no torn line: the caller may append it again
                    raise
            finally:
                os.close(fd)

    # --- helpers --------------------------------------------------------------------------
    def _path(self, key: str) -> Path:
        return self.folder / check_key(key)

    def _make_parents(self, target: Path) -> Sequence[Path]:
        """Make the folders above `target`; return the new ones, whose names are not durable."""
        self._check_same_folder()
        missing: list[Path] = []
        folder = target.parent
        while not folder.is_dir():
            missing.append(folder)
            folder = folder.parent
        for new in reversed(missing):
            new.mkdir(exist_ok=True)
        self._open_root()
        return missing[::-1]

    def _open_root(self) -> None:
        """Keep a descriptor of the folder once it exists. While the descriptor is open, no other
        folder has its inode. (On FUSE and overlays an inode number may change, or be reused.)"""
        if self._root is not None:
            return
        flags = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
        try:
            self._root = os.open(self.folder, flags)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise translate_os_error(error, self.folder) from error
        weakref.finalize(self, os.close, self._root)

    def _check_same_folder(self) -> None:
        """Raises RunFolderError when the path leads to another folder than it did, or to none."""
        if self._root is None:
            return
        with suppress(FileNotFoundError, NotADirectoryError):
            if os.path.samestat(os.stat(self.folder), os.fstat(self._root)):
                return
        raise RunFolderError(
            "the run folder has been moved, removed or replaced",
            where=str(self.folder),
            remedy="put it back, or start another run",
        )

    @staticmethod
    def _write(path: Path, data: Buffer | Iterable[Buffer]) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            writer = DirectWriter(fd)
            for chunk in byte_views(data):
                writer.write(chunk)
            os.fsync(fd)
        finally:
            os.close(fd)

    @contextmanager
    def _translate_errors(self, key: str) -> Iterator[None]:
        """Turn what the operating system says into what the person at the keyboard can mend."""
        try:
            yield
        except (FileNotFoundError, IsADirectoryError):
            raise MissingKeyError(f"there is no {key} in {self.folder}") from None
        except OSError as error:
            raise translate_os_error(error, self.folder) from error


class UnsyncedFolders:
    """Folders with names that may not be durable yet. A file's own fsync does not cover its name.

    A recovery appends its first records without waiting for a disk. So the folders of a segment
    are synced by the first append that must be durable, not by the one that makes it. Another
    process may have made a name, and may have been killed before that. So each name that this
    process meets for the first time counts as new."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._changes: dict[Path, int] = {}  # names that were noted in each folder
        self._met: set[Path] = set()

    def meet(self, path: Path) -> None:
        """Note a name, and those of the folders above it, unless they were noted before."""
        with self._lock:
            for each in () if path in self._met else (path, *path.parents):
                if self._root in each.parents and each not in self._met:
                    self._add(each)

    def add(self, path: Path) -> None:
        """Note a new name."""
        with self._lock:
            self._add(path)

    def _add(self, path: Path) -> None:
        self._met.add(path)
        self._changes[path.parent] = self._changes.get(path.parent, 0) + 1

    def sync_above(self, path: Path) -> None:
        """Make the names on the way to a path durable. Raises OSError; then they stay noted."""
        with self._lock:
            due = [(each, self._changes[each]) for each in path.parents if each in self._changes]
        for folder, changes in due:
            _sync_folder(folder)
            with self._lock:
                if self._changes.get(folder) == changes:  # no other name came meanwhile
                    del self._changes[folder]


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _raise_unless_missing(error: OSError) -> None:
    """`os.walk` leaves out what it cannot read: taken for absent, a checkpoint would be removed."""
    if not isinstance(error, FileNotFoundError):
        raise error


def _sync_folder(folder: Path) -> None:
    """Make a new name durable: a file's own fsync does not cover the entry in its folder."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def translate_os_error(error: OSError, folder: Path) -> HoldfastError:
    where = str(folder)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return OutOfSpaceError(
            "the disk is full", where=where, remedy="free some space, or use another folder"
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        if error.errno == errno.EPERM and error.filename2 is not None:
            return RunFolderError(
                "the file system can neither make hard links nor rename without replacing, and "
                "create-if-absent needs one of the two",
                where=where,
                remedy="use a folder on a local disk or on NFS",
            )
        if error.errno == errno.EROFS:
            return RunFolderError(
                "the run folder's file system is read-only",
                where=where,
                remedy="mount it for writing, or use another folder with folder=<path>",
            )
        return RunFolderError(
            "no permission to read or write the run folder",
            where=where,
            remedy="use a folder of your own, with folder=<path>",
        )
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return RunFolderError(
            "the run folder is not a folder",
            where=where,
            remedy="use another folder with folder=<path>",
        )
    return RunFolderError(f"the run folder failed: {error.strerror}", where=where)


JOURNAL_PREFIX = "journal/"
SIMULATED_KEY = "simulated"
"""In the settings of a run that nothing trained: the words of its study."""
SIMULATED_FILE = "simulated.json"
"""Totals of a simulated run that no journal has: money, energy, traffic."""
