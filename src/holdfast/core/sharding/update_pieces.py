"""The pieces in which an update brings a rank's optimizer state to the device.

A piece has parts of parameters that share their settings. Each part begins at a multiple of
`GRAIN` elements of its parameter. So the vector code of a kernel meets the same elements as without
pieces, and no bit differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

GRAIN = 4096  # elements; a multiple of each vector length
ALIGNMENT = 16  # elements between the beginnings of two parts
BUFFER_SETS = 3
"""One piece is read, one is updated and one is written at the same time."""


@dataclass(frozen=True, slots=True)
class PiecePart:
    """Elements [start, stop) of parameter `index`. at: its first element in the piece's buffer."""

    index: int
    start: int
    stop: int
    at: int


@dataclass(frozen=True, slots=True)
class UpdatePiece:
    """Parts of parameters of one group, and the elements that a buffer needs for them."""

    group: int
    parts: tuple[PiecePart, ...]
    size: int


def cut_into_pieces(
    groups: Sequence[Iterable[tuple[int, int]]], elements: int
) -> tuple[UpdatePiece, ...]:
    """Cut each group's (index, elements) into pieces of at most `elements` elements."""
    most = max(GRAIN, elements // GRAIN * GRAIN)
    pieces: list[UpdatePiece] = []
    for number, group in enumerate(groups):
        parts: list[PiecePart] = []
        size = 0
        for index, length in group:
            start = 0
            while start < length:
                room = (most - size) // GRAIN * GRAIN
                taken = length - start if length - start <= most - size else room
                if not taken:
                    pieces.append(UpdatePiece(number, tuple(parts), size))
                    parts, size = [], 0
                    continue
                parts.append(PiecePart(index, start, start + taken, size))
                start += taken
                size += -(-taken // ALIGNMENT) * ALIGNMENT
        if parts:
            pieces.append(UpdatePiece(number, tuple(parts), size))
    return tuple(pieces)


def staged_elements(pieces: Sequence[UpdatePiece]) -> int:
    """Elements that the buffers have for one tensor of each parameter."""
    return min(BUFFER_SETS, len(pieces)) * max((piece.size for piece in pieces), default=0)
