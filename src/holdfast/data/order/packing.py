"""Packs rows of chat data into samples: complete rows only, and none sees another.

Best-fit decreasing: rows are taken from the longest to the shortest, and each goes into the fullest
sample that has room for it (Johnson, 1973). Rows of one length are placed together, so millions of
rows take seconds. The packing follows from the lengths alone. A pair is one row of two documents.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray


class MaskedStream(Protocol):
    """`dataset.TokenStream` of chat data is one."""

    def read(self, start: int, stop: int) -> NDArray[Any]: ...
    def read_mask(self, start: int, stop: int) -> NDArray[np.uint8]: ...
    def document_starts(self) -> NDArray[np.int64]: ...
    def document_values(self) -> NDArray[np.float32] | None: ...

    @property
    def documents_per_row(self) -> int: ...


@dataclass(frozen=True)
class PackedSample:
    """tokens [n]; mask [n]: 1 for tokens that carry loss; ends [n]: True for the last of a
    document. starts, lengths [documents]: where each lies in the stream. values [documents]: see
    `chat_tokens.RowTokens`."""

    tokens: NDArray[Any]
    mask: NDArray[np.uint8]
    ends: NDArray[np.bool_]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    values: NDArray[np.float32] | None = None


class PackedSamples:
    """The samples of one stream, of at most `room` tokens each. A row has one document, or the two
    of a pair, which share a sample. left_out, cut: rows that are longer and are left out, or cut:
    each document to its share of `room`. A row is left out too if the rest of a document carries no
    loss."""

    def __init__(self, stream: MaskedStream, room: int, long_rows: Literal["leave_out", "cut"]):
        self._stream = stream
        starts = stream.document_starts()
        lengths = np.diff(starts).reshape(-1, stream.documents_per_row)
        starts = starts[:-1].reshape(lengths.shape)
        is_long = lengths.sum(axis=1) > room
        kept = ~is_long
        if long_rows == "cut":
            share = room // stream.documents_per_row
            lengths[is_long] = np.minimum(lengths[is_long], share)
            for row in np.flatnonzero(is_long).tolist():
                kept[row] = all(
                    stream.read_mask(begin + 1, begin + size).any()
                    for begin, size in zip(starts[row].tolist(), lengths[row].tolist(), strict=True)
                )
        self.rows = np.flatnonzero(kept)
        self.cut = int((kept & is_long).sum())
        self.left_out = int((~kept).sum())
        values = stream.document_values()
        self._values = None if values is None else values.reshape(starts.shape)[kept]
        self._starts, self._lengths = starts[kept], lengths[kept]
        bins = pack(self._lengths.sum(axis=1), room)
        self._order = np.argsort(bins, kind="stable")
        self._edges = np.searchsorted(bins[self._order], np.arange(int(bins.max(initial=-1)) + 2))
        self.count = len(self._edges) - 1
        self._sequence = np.arange(self.count)
        self.tokens = int(self._lengths.sum())

    def sort_by_length(self, descending: bool) -> None:
        """Number the samples by the mean length of their rows, the shortest (longest) first."""
        rows = np.diff(self._edges)
        sample = np.repeat(np.arange(self.count), rows)
        means = np.bincount(sample, self._lengths[self._order].sum(axis=1)) / rows
        self._sequence = np.argsort(-means if descending else means, kind="stable")

    def sample(self, index: int) -> PackedSample:
        """The rows of one sample, in the stream's order."""
        index = self._sequence[index]
        chosen = self._order[self._edges[index] : self._edges[index + 1]]
        starts, lengths = self._starts[chosen].ravel(), self._lengths[chosen].ravel()
        tokens, masks = [], []
        for start, stop in zip(starts.tolist(), (starts + lengths).tolist(), strict=True):
            tokens.append(self._stream.read(start, stop))
            masks.append(self._stream.read_mask(start, stop))
        ends = np.zeros(int(lengths.sum()), dtype=np.bool_)
        ends[np.cumsum(lengths) - 1] = True
        values = None if self._values is None else self._values[chosen].ravel()
        return PackedSample(
            np.concatenate(tokens), np.concatenate(masks), ends, starts, lengths, values
        )


def pack(lengths: NDArray[np.int64], room: int) -> NDArray[np.int64]:
    """lengths [n], none above `room` -> the bin of each [n]. Bins are numbered from 0 and hold at
    most `room`."""
    bins = np.empty(len(lengths), dtype=np.int64)
    order = np.argsort(-lengths, kind="stable")
    edges = np.flatnonzero(np.diff(lengths[order])) + 1
    open_bins = _OpenBins(room)
    for rows in np.split(order, edges) if len(order) else ():
        bins[rows] = open_bins.place(int(lengths[rows[0]]), len(rows))
    return bins


class _OpenBins:
    """Bins with room left, by how much that is."""

    def __init__(self, room: int):
        self._room = room
        self._by_room: dict[int, list[NDArray[np.int64]]] = {}
        self._rooms: list[int] = []  # sorted
        self._bins = 0

    def place(self, length: int, count: int) -> NDArray[np.int64]:
        """The bins [count] of so many rows of one length."""
        placed: list[NDArray[np.int64]] = []
        while count:
            room, bins = self._take(length) or (self._room, None)
            each = room // length
            if bins is None:
                number = -(-count // each)
                bins = np.arange(self._bins, self._bins + number)
                self._bins += number
            used = min(len(bins), -(-count // each))
            self._put(room, bins[used:])
            full, rest = divmod(count, each) if used * each > count else (used, 0)
            self._put(room - each * length, bins[:full])
            self._put(room - rest * length, bins[full:used])
            taken = min(count, used * each)
            placed.append(np.repeat(bins[:used], each)[:taken])
            count -= taken
        return np.concatenate(placed)

    def _take(self, length: int) -> tuple[int, NDArray[np.int64]] | None:
        """The bins of the smallest room that fits, if there are any."""
        at = bisect_left(self._rooms, length)
        if at == len(self._rooms):
            return None
        room = self._rooms.pop(at)
        return room, np.concatenate(self._by_room.pop(room))

    def _put(self, room: int, bins: NDArray[np.int64]) -> None:
        if not len(bins) or not room:
            return
        if room not in self._by_room:
            self._by_room[room] = []
            insort(self._rooms, room)
        self._by_room[room].append(bins)
