"""Samples of a stream of images or recordings: each document is one."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from holdfast.data.order.packing import PackedSample


class MediaStream(Protocol):
    """`dataset.TokenStream` of images or recordings is one."""

    def read(self, start: int, stop: int) -> NDArray[Any]: ...
    def document_starts(self) -> NDArray[np.int64]: ...


class MediaSamples:
    """The documents of a stream. Each begins with a token, so that its first one is a target: the
    tokenizer's begin token, or the end token. cut: texts that are longer than `room`."""

    def __init__(self, stream: MediaStream, room: int, first: NDArray[Any]):
        """first: token before each document, [1], or [0] if its documents have one."""
        self._stream, self._room, self._first = stream, room, first
        self._starts = stream.document_starts()
        self.count = len(self._starts) - 1
        self.cut = int((np.diff(self._starts) + len(first) > room).sum())

    def sample(self, index: int) -> PackedSample:
        """One document, with at most `room` tokens, all of which but the first carry loss."""
        start, stop = self._starts[index : index + 2].tolist()
        tokens = np.concatenate([self._first, self._stream.read(start, stop)])[: self._room]
        ends = np.zeros(len(tokens), dtype=np.bool_)
        ends[-1] = True
        lengths = np.array([len(tokens)])
        return PackedSample(
            tokens, np.ones(len(tokens), np.uint8), ends, np.array([start]), lengths
        )
