"""Reads complete tensors in a known order, as an export does.

A sharded run's tensors are split over all writers' blobs, so one tensor touches an extent of each.
Read by itself, it would cost many times its bytes. Here as many tensors as fit into `budget` are
read in one pass, which reads each extent once. They are handed out part by part. Of a tensor larger
than that, as many rows are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.core.sharding.boxes import Box, whole_box
from holdfast.core.sharding.state_table import ITEM_BYTES

BUDGET_BYTES = 256 * 2**20

_BITS = {8: "<u8", 4: "<u4", 2: "<u2", 1: "u1"}


class ReadAhead:
    """A checkpoint's `read`, quick for a caller that reads in the order of `names`."""

    def __init__(
        self, checkpoint: Checkpoint, names: Sequence[str], budget: int = BUDGET_BYTES
    ) -> None:
        self._checkpoint, self._names, self._budget = checkpoint, tuple(names), budget
        self._index_by_name = {name: number for number, name in enumerate(self._names)}
        self._arrays: dict[str, tuple[Box, Any]] = {}

    def read(self, box: Box, out: memoryview) -> None:
        """Fill `out` with the box's elements, row-major. Raises as `Checkpoint.read` does."""
        if box.name not in self._arrays or not self._arrays[box.name][0].contains(box):
            self._load(self._boxes_to_load(box))
        there, array = self._arrays[box.name]
        target = np.frombuffer(out, array.dtype).reshape(box.lengths)
        spans = zip(box.offsets, there.offsets, box.lengths, strict=True)
        target[...] = array[tuple(slice(at - base, at - base + n) for at, base, n in spans)]

    def _boxes_to_load(self, box: Box) -> list[Box]:
        """Return the boxes to hold so that `box` is among them. These are its tensor and those
        after it, as many as fit, or its rows and those after them."""
        spec = self._checkpoint.spec(box.name)
        if spec.nbytes > self._budget or box.name not in self._index_by_name:
            if not box.lengths or not box.size:
                return [box]
            row = spec.nbytes // spec.shape[0]
            count = max(box.lengths[0], self._budget // row)
            first = box.offsets[0]
            rest = spec.shape[1:]
            lengths = (min(count, spec.shape[0] - first), *rest)
            return [Box(box.name, (first, *(0 for _ in rest)), lengths)]
        found: list[Box] = []
        left = self._budget
        for name in self._names[self._index_by_name[box.name] :]:
            spec = self._checkpoint.spec(name)
            left -= spec.nbytes
            if left < 0:
                break
            found.append(whole_box(name, spec.shape))
        return found

    def _load(self, boxes: Sequence[Box]) -> None:
        """Read boxes in one pass; what was held goes before."""
        self._arrays = {}
        held = {}
        for box in boxes:
            item = ITEM_BYTES[self._checkpoint.spec(box.name).dtype]
            held[box.name] = box, np.empty(box.lengths, _BITS[item])
        self._checkpoint.read_all((box, array.reshape(-1).data) for box, array in held.values())
        self._arrays = held
