"""Counts of different numbers, of which many come: memory is bounded by the different ones."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


class KeyCounts:
    """Counts keys [n] of one type. collected: keys that are held before they are counted."""

    def __init__(self, collected: int) -> None:
        self._parts: list[tuple[NDArray[Any], NDArray[np.int64]]] = []
        self._collected, self._pending = collected, 0

    def add(self, keys: NDArray[Any]) -> None:
        self._parts.append((keys, np.ones(len(keys), dtype=np.int64)))
        self._pending += len(keys)
        if self._pending >= max(self._collected, len(self._parts[0][0])):
            self.result()

    def result(self) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return the different keys, sorted, and how often each came."""
        if not self._parts:
            return np.zeros(0, np.uint64), np.zeros(0, np.int64)
        keys, inverse = np.unique(np.concatenate([k for k, _ in self._parts]), return_inverse=True)
        counts = np.concatenate([c for _, c in self._parts])
        # Sums of whole numbers below 2^53 are exact in float64.
        sums = np.bincount(inverse, counts, len(keys)).astype(np.int64)
        self._parts, self._pending = [(keys, sums)], 0
        return keys, sums
