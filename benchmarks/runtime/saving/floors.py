"""Floors of every way of saving, measured in the same run. They are one copy of the bytes into
existing memory, one hash of them, and one write past the page cache with a sync."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from xxhash import xxh3_128_digest

PIECE = 16 * 2**20
Times = tuple[float, float]
"""Wall seconds, and CPU seconds of this thread."""


def timed(work: Callable[[], object]) -> Times:
    wall, cpu = time.perf_counter(), time.thread_time()
    work()
    return time.perf_counter() - wall, time.thread_time() - cpu


class Memcpy:
    """One copy of `size` bytes into memory that is there."""

    def __init__(self, size: int) -> None:
        self._source = torch.randn(max(1, size // 4))
        self._target = torch.zeros_like(self._source)

    def time(self) -> Times:
        return timed(lambda: self._target.copy_(self._source))


class DirectWrite:
    """One write of `size` bytes and a sync, past the page cache; through it where the file system
    refuses O_DIRECT."""

    def __init__(self, folder: Path, size: int) -> None:
        self._size = max(mmap.PAGESIZE, size // mmap.PAGESIZE * mmap.PAGESIZE)
        self._memory = mmap.mmap(-1, self._size)
        self._memory.write(os.urandom(mmap.PAGESIZE) * (self._size // mmap.PAGESIZE))
        self._path = folder / "floor"
        self._flags = getattr(os, "O_DIRECT", 0)
        try:
            self._write()
        except OSError:
            self._flags = 0
        self._path.unlink(missing_ok=True)

    def time(self) -> Times:
        times = timed(self._write)
        self._path.unlink()
        return times

    def _write(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | self._flags
        fd = os.open(self._path, flags, 0o600)
        try:
            with memoryview(self._memory) as view:
                done = 0
                while done < self._size:
                    done += os.write(fd, view[done : done + PIECE])
            os.fsync(fd)
        finally:
            os.close(fd)


def memcpy(size: int, rounds: int) -> list[Times]:
    floor = Memcpy(size)
    return [floor.time() for _ in range(rounds)]


def xxh3(size: int, rounds: int) -> list[Times]:
    data = torch.randn(max(1, size // 4)).numpy().data
    return [timed(lambda: xxh3_128_digest(data)) for _ in range(rounds)]


def direct_write(folder: Path, size: int, rounds: int) -> list[Times]:
    floor = DirectWrite(folder, size)
    return [floor.time() for _ in range(rounds)]
