"""Writes past the page cache, if possible: for bytes that will not be read soon.

A buffered write copies every byte and fills the cache that training reads its data from. It leaves
the disk's work to the sync at the end. With O_DIRECT the disk reads from the arena itself: no copy,
hardly any CPU. Offset, length and address must be multiples of a block, as an arena's slots and a
blob's data are. The rest of a file and every small file are written through the cache. So is every
file of a file system that refuses (tmpfs, some networks' and FUSE).
"""

from __future__ import annotations

import errno
import fcntl
import os

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
