"""Cuts a stream of bytes into other pieces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def rechunk(data: Iterable[memoryview], size: int) -> Iterator[bytearray]:
    """The same bytes in pieces of `size`, the last one shorter. Copied: a source may fill the
    buffer that it yields again while a piece of it is still in use."""
    part, filled = bytearray(), 0
    for view in data:
        rest = view
        while rest:
            if not part:
                part, filled = bytearray(size), 0
            count = min(size - filled, len(rest))
            part[filled : filled + count] = rest[:count]
            filled += count
            rest = rest[count:]
            if filled == size:
                yield part
                part = bytearray()
    if part:
        yield part[:filled]
