"""One range of a file into several buffers, so that no byte is read into one and then copied."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterable, Iterator, Sequence

_MAX_BUFFERS = 1024  # IOV_MAX: buffers that one call of the system takes


def read_vectored(fd: int, start: int, outs: Sequence[memoryview]) -> int:
    """Fill buffers in turn with a file's bytes from `start` on; return how many were read. That is
    less than the room if the file ends before. The buffers are flat, of bytes."""
    left = [out for out in outs if len(out)]
    done = 0
    while left:
        count = _read_some(fd, left[:_MAX_BUFFERS], start + done)
        if not count:
            break
        done += count
        full = 0
        while full < len(left) and count >= len(left[full]):
            count -= len(left[full])
            full += 1
        left = left[full:]
        if count:
            left[0] = left[0][count:]
    return done


def _read_some(fd: int, outs: Sequence[memoryview], start: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(fd, outs, start)
    data = os.pread(fd, len(outs[0]), start)  # where there is no scattered read (macOS)
    outs[0][: len(data)] = data
    return len(data)


def group_buffers(outs: Iterable[memoryview], max_bytes: int) -> Iterator[list[memoryview]]:
    """The same room in groups of at most `max_bytes` bytes each, cut where need be."""
    group: list[memoryview] = []
    room = max_bytes
    for out in outs:
        rest = out
        while rest:
            taken = rest[:room]
            group.append(taken)
            room -= len(taken)
            rest = rest[len(taken) :]
            if not room:
                yield group
                group, room = [], max_bytes
    if group:
        yield group


# Writes past the page cache, if possible: for bytes that will not be read soon.
#
# A buffered write copies every byte and fills the cache that training reads its data from. It
# leaves the disk's work to the sync at the end. With O_DIRECT the disk reads from the arena
# itself: no copy, hardly any CPU. Offset, length and address must be multiples of a block, as an
# arena's slots and a blob's data are. The rest of a file and every small file are written through
# the cache. So is every file of a file system that refuses (tmpfs, some networks' and FUSE).

BLOCK_BYTES = 4096
MIN_DIRECT_BYTES = 256 * 1024
"""A shorter piece is not worth a write of its own to the disk."""

_O_DIRECT: int = getattr(os, "O_DIRECT", 0)  # Linux


class DirectWriter:
    """Appends to an open file that is empty; its creator syncs and closes it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._offset = 0
        self._is_supported = bool(_O_DIRECT)
        self._is_direct = False
        self.direct_bytes = 0

    def write(self, data: memoryview) -> None:
        """Hand all of `data` (flat bytes) to the kernel before this returns. Raises OSError."""
        whole = len(data) // BLOCK_BYTES * BLOCK_BYTES
        if self._is_supported and whole >= MIN_DIRECT_BYTES and self._offset % BLOCK_BYTES == 0:
            data = self._write_direct(data, whole)
        if data:
            self._set_direct(False)
        while data:
            count = os.write(self._fd, data)
            self._offset += count
            data = data[count:]

    def _write_direct(self, data: memoryview, whole: int) -> memoryview:
        """Write up to `whole` bytes past the cache; what is left of `data`."""
        try:
            self._set_direct(True)
            while whole >= BLOCK_BYTES and self._offset % BLOCK_BYTES == 0:
                count = os.write(self._fd, data[:whole])
                self._offset += count
                self.direct_bytes += count
                data, whole = data[count:], whole - count
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._is_supported = False  # the file system refuses, or this memory is not aligned
        return data

    def _set_direct(self, on: bool) -> None:
        if on != self._is_direct:
            flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | _O_DIRECT if on else flags & ~_O_DIRECT)
            self._is_direct = on
