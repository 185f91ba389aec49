"""A file that one process uses as memory: its space is reserved, and no name is left of it.

The file loses its name as soon as it is open. So it ends with the process, however that ends, and
no later process can take it for a state. Its space is reserved before it is used. So a disk that
gets full later does not concern it, and a mapped page cannot fail for want of space.
"""

from __future__ import annotations

import errno
import mmap
import os
import weakref
from pathlib import Path

from holdfast.config.sections.memory import GB
from holdfast.errors import StateMemoryError

_KEY = "train.memory.folder"


class ScratchFile:
    """A mapped file of zeros. Offsets are bytes. Its space is free again when it is closed and no
    tensor uses the map any more."""

    def __init__(self, folder: str, label: str, nbytes: int) -> None:
        """label: of the process, for the moment in which the file has a name.

        Raises StateMemoryError for a folder that is missing or cannot be written, and for a disk
        without room.
        """
        self._folder, self._size = folder, 0
        try:
            is_folder = Path(folder).is_dir()
        except OSError as error:  # a disk that is lost, or a folder above it without a right
            raise self._failure(error) from error
        if not is_folder:
            raise StateMemoryError(
                f"there is no folder {folder} for the state of a rank",
                where=_KEY,
                remedy="mount its disk or make it, or name another folder",
            )
        path = os.path.join(folder, f".holdfast-{label}-{os.getpid()}")
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            os.unlink(path)
        except OSError as error:
            raise StateMemoryError(
                f"{folder} cannot be written ({error.strerror})",
                where=_KEY,
                remedy="change its permissions, or name another folder",
            ) from error
        self.close = weakref.finalize(self, os.close, self._fd)
        try:
            self.map = self._reserve(max(1, nbytes))
        except BaseException:
            self.close()
            raise

    def extend(self, nbytes: int) -> int:
        """Reserve more bytes at the end, outside of the map. Return their offset. Raises
        StateMemoryError for a disk without room."""
        start = self._size
        self._allocate(nbytes)
        return start

    def _reserve(self, nbytes: int) -> mmap.mmap:
        self._allocate(nbytes)
        return mmap.mmap(self._fd, nbytes)

    def _allocate(self, nbytes: int) -> None:
        try:
            os.posix_fallocate(self._fd, self._size, nbytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise self._failure(error) from error
            free = os.statvfs(self._folder)
            raise StateMemoryError(
                f"the state of a rank needs {nbytes / GB:.4g} GB more in {self._folder}, which has "
                f"{free.f_bavail * free.f_frsize / GB:.4g} GB free",
                where=_KEY,
                remedy="make room and run the same command again, or name another folder",
            ) from error
        self._size += nbytes

    def read(self, into: memoryview, offset: int) -> None:
        """Fill bytes from the file. Raises StateMemoryError if the disk fails."""
        done = 0
        try:
            while done < len(into):
                count = os.preadv(self._fd, [into[done:]], offset + done)
                if not count:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                done += count
        except OSError as error:
            raise self._failure(error) from error

    def write(self, source: memoryview, offset: int) -> None:
        """Write bytes to the file. Raises StateMemoryError if the disk fails."""
        done = 0
        try:
            while done < len(source):
                done += os.pwritev(self._fd, [source[done:]], offset + done)
        except OSError as error:
            raise self._failure(error) from error

    def _failure(self, error: OSError) -> StateMemoryError:
        """What a failed call means to the user."""
        return StateMemoryError(
            f"the state of a rank in {self._folder} cannot be used ({error.strerror})",
            where=_KEY,
            remedy="check that disk and run the same command again, or name another folder",
        )
