"""What a node has of a dataset with an address: files that were fetched by need, and checked.

    <cache>/<version>/manifest.json, tokenizer.json, shards/...    as at the address
    <cache>/<version>/.fetch/<name>    a file on its way; the process that fetches it has its lock
    <cache>/addresses/<hash>.json      the version that an address held when it was last read

All processes of a node share the folder. A file has its name once its checksum is the manifest's.
So each file is fetched once for a node, and a process that starts later finds it. If the cache is
full, the files that were not used for the longest time go. A process that has mapped such a file
keeps its bytes.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128

from holdfast.data.read.files import file_checksum
from holdfast.data.stream.shards import ShardFile
from holdfast.errors import CorruptError, DataError, OutOfSpaceError, StoreError
from holdfast.wire.store.run_store import MissingKeyError, RunStore

logger = logging.getLogger(__name__)

PIECE_BYTES = 4 * 2**20
"""Bytes of one request."""
PATIENCE_S = 600.0
"""A file that is needed now is asked for again so long, if the address does not answer."""
MAX_PAUSE_S = 10.0
SAY_AFTER_S = 5.0
"""Seconds after which a wait is reported."""
FETCH_FOLDER = ".fetch"
DAMAGE_REMEDY = (
    "remove everything at this address and run holdfast data prepare again, or name another "
    "data.folder"
)


class NodeCache:
    """The files of one dataset.

    Args:
        location: the dataset's address, with its options; `where` is the address without them.
        folder: of the dataset's version.
        limit: bytes of the shards of all datasets below the folder's parent.
    """

    def __init__(self, store: RunStore, location: str, where: str, folder: Path, limit: int):
        self.location, self.where, self.folder, self.limit = location, where, folder, limit
        self._store = store
        self._closing = threading.Event()
        self.on_wait: Callable[[str, str], None] = _log_wait
        """Called once with the key and the reason of a long wait, and without a reason at its
        end."""

    def has(self, file: ShardFile) -> bool:
        """Return True if the file is here, with its size."""
        try:
            return (self.folder / file.path).stat().st_size == file.bytes
        except FileNotFoundError:
            return False

    def touch(self, file: ShardFile) -> None:
        """Note that the file is used or will be soon."""
        with suppress(FileNotFoundError):
            os.utime(self.folder / file.path)

    def path(self, file: ShardFile) -> Path:
        """The file's place, fetched first if it is not here. While the address does not answer, it
        is asked again for `PATIENCE_S`.

        Raises DataError for bytes that are not the manifest's, OutOfSpaceError, and StoreError."""
        asked, pause, is_said = time.monotonic(), 0.5, False
        while not self.has(file):
            try:
                self.fetch(file)
            except StoreError as error:
                waited = time.monotonic() - asked
                if waited > PATIENCE_S:
                    raise
                if waited > SAY_AFTER_S and not is_said:
                    is_said = True
                    self.on_wait(file.path, str(error))
                self._closing.wait(pause)
                pause = min(2 * pause, MAX_PAUSE_S)
        if is_said:
            self.on_wait(file.path, "")
        return self.folder / file.path

    def map(self, file: ShardFile, dtype: np.dtype[Any]) -> NDArray[Any]:
        """The file as an array. Raises as `path` does."""
        while True:
            path = self.path(file)
            with suppress(FileNotFoundError):  # another process has just made room
                array = np.memmap(path, dtype=dtype, mode="r")
                self.touch(file)
                return array

    def fetch(self, file: ShardFile, *, wait: bool = True) -> bool:
        """Fetch a file. wait: for another thread or process that fetches it. Return False if that
        one still does. Raises as `path` does, at the first failure."""
        target = self.folder / file.path
        part = self.folder / FETCH_FOLDER / target.name
        with explain_cache_errors(self.folder):
            part.parent.mkdir(parents=True, exist_ok=True)
            target.parent.mkdir(parents=True, exist_ok=True)
            while not self.has(file):
                with part.open("a+b") as out:
                    try:
                        fcntl.flock(out, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
                    except BlockingIOError:
                        return False
                    if not _is_same(part, out):
                        continue  # it was fetched and renamed meanwhile
                    if self.has(file):
                        part.unlink()
                        continue
                    make_room(self.folder.parent, self.limit - file.bytes)
                    self._download(file, out)
                    os.replace(part, target)
        return True

    def remove_if_damaged(self, file: ShardFile) -> None:
        """Remove a file that is here with other bytes: it is fetched again when it is needed."""
        path = self.folder / file.path
        with explain_cache_errors(self.folder), suppress(FileNotFoundError):
            if file_checksum(path) != file.xxh3:
                path.unlink()

    def check_source(self, file: ShardFile) -> None:
        """Read a file at the address without keeping it. Raises as `fetch` does."""
        if not self._reads_right(file, _Nowhere()):
            raise self._damage_error(file)

    def _download(self, file: ShardFile, out: IO[bytes]) -> None:
        for _ in range(2):
            out.truncate(0)
            if self._reads_right(file, out):
                out.flush()
                os.fsync(out.fileno())
                return
        raise self._damage_error(file)

    def _reads_right(self, file: ShardFile, out: IO[bytes] | _Nowhere) -> bool:
        """Copy a file from the address. Return False if its bytes are not the manifest's."""
        state = xxh3_128()
        piece = bytearray(min(PIECE_BYTES, file.bytes))
        try:
            for at in range(0, file.bytes, PIECE_BYTES):
                view = memoryview(piece)[: file.bytes - at]
                self._store.read_into(file.path, at, view)
                state.update(view)
                out.write(view)
        except CorruptError:
            return False
        except MissingKeyError:
            raise DataError(
                f"the shard {file.path} is missing", where=self.where, remedy=DAMAGE_REMEDY
            ) from None
        return state.hexdigest() == file.xxh3

    def _damage_error(self, file: ShardFile) -> DataError:
        return DataError(
            f"{file.path} at the address has other bytes than were written, in two readings",
            where=self.where,
            remedy=DAMAGE_REMEDY,
        )


class _Nowhere:
    def write(self, data: memoryview) -> int:
        return len(data)


def make_room(root: Path, limit: int) -> None:
    """Remove the shards that were not used for the longest time, until at most `limit` bytes of
    shards are below the cache's root."""
    files: list[tuple[float, int, Path]] = []
    for path in root.glob("*/shards/*"):
        with suppress(FileNotFoundError):
            status = path.stat()
            files.append((status.st_mtime, status.st_size, path))
    total = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if total <= limit:
            return
        path.unlink(missing_ok=True)
        total -= size


def total_bytes(files: Iterable[ShardFile]) -> int:
    return sum(file.bytes for file in files)


def _is_same(path: Path, file: IO[bytes]) -> bool:
    """Return True if the open file still has this name."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


@contextmanager
def explain_cache_errors(folder: Path) -> Iterator[None]:
    """Turn errors of the cache's file system into one sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OutOfSpaceError(
                "the disk of the dataset's cache is full",
                where=str(folder),
                remedy="free some space, or name a folder on another disk with data.cache=<path>",
            ) from None
        raise DataError(
            f"the dataset's cache cannot be written ({error.strerror})",
            where=str(folder),
            remedy="name another folder with data.cache=<path>",
        ) from None


def _log_wait(key: str, reason: str) -> None:
    if reason:
        logger.warning("a batch waits for %s: %s", key, reason)
    else:
        logger.warning("%s, which a batch waited for, is here", key)
