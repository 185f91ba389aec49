"""One range of a file into several buffers, so that no byte is read into one and then copied."""

from __future__ import annotations

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
