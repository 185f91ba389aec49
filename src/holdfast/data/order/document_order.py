"""Documents of a stream in another order, as arithmetic: no token moves.

    stream     a a a b b c c c c      three documents
    order      b c a
    reads      b b c c c c a a a      what windows are cut from

A position among the ordered documents is found in a table of their first tokens, 16 bytes for each
document.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Places = NDArray[np.int64]


class DocumentOrder:
    """starts: first token of each document, and the stream's length, [documents + 1]. scores:
    [documents]; the lowest comes first, and of equal ones the first in the stream."""

    def __init__(self, starts: Places, scores: NDArray[np.float64]):
        order = np.argsort(scores, kind="stable")
        self._from = starts[:-1][order]
        self._starts = np.zeros(len(starts), dtype=np.int64)
        np.cumsum(np.diff(starts)[order], out=self._starts[1:])

    def ranges(self, starts: Places, stops: Places) -> tuple[Places, Places]:
        """Return the ranges of the stream, [n] and [n], that lie behind the ordered positions
        [start, stop): those of each pair after each other. Positions are clipped to the stream."""
        stops = np.minimum(stops, self._starts[-1])
        first = np.searchsorted(self._starts, starts, side="right") - 1
        last = np.searchsorted(self._starts, stops, side="left")
        counts = np.maximum(last - first, 0)
        pair = np.repeat(np.arange(len(starts)), counts)
        before = np.cumsum(counts) - counts
        document = first[pair] + np.arange(len(pair)) - before[pair]
        begins = np.maximum(self._starts[document], starts[pair])
        ends = np.minimum(self._starts[document + 1], stops[pair])
        moved = self._from[document] - self._starts[document]
        return begins + moved, ends + moved

    def position(self, start: int) -> int:
        """Return the ordered position of the document that begins at a token of the stream."""
        return int(self._starts[np.flatnonzero(self._from == start)[0]])
