"""What no way of saving can leave out, measured in the same run: one copy of the bytes into memory
that is there, one hash of them, one write of them past the page cache and a sync."""

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


def memcpy(size: int, rounds: int) -> list[Times]:
    source = torch.randn(max(1, size // 4))
    target = torch.zeros_like(source)
    return [timed(lambda: target.copy_(source)) for _ in range(rounds)]


def xxh3(size: int, rounds: int) -> list[Times]:
    data = torch.randn(max(1, size // 4)).numpy().data
    return [timed(lambda: xxh3_128_digest(data)) for _ in range(rounds)]


def direct_write(folder: Path, size: int, rounds: int) -> list[Times]:
    """Through the cache where the file system refuses O_DIRECT."""
    size = max(mmap.PAGESIZE, size // mmap.PAGESIZE * mmap.PAGESIZE)
    memory = mmap.mmap(-1, size)
    memory.write(os.urandom(mmap.PAGESIZE) * (size // mmap.PAGESIZE))
    path = folder / "floor"

    def write(flags: int) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flags, 0o600)
        try:
            with memoryview(memory) as view:
                done = 0
                while done < size:
                    done += os.write(fd, view[done : done + PIECE])
            os.fsync(fd)
        finally:
            os.close(fd)

    flags = getattr(os, "O_DIRECT", 0)
    try:
        write(flags)
    except OSError:
        flags = 0
    times = []
    for _ in range(rounds):
        path.unlink(missing_ok=True)
        times.append(timed(lambda: write(flags)))
    path.unlink()
    return times
