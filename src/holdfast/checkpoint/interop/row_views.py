"""Rows of stored tensors as tensors of their own: fused matrices taken apart without a copy.

torchtitan's `wqkv` and Megatron's `linear_qkv` are lists of groups, one for each key and value
head. A group has the rows of its query heads, then of the key, then of the value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from holdfast.checkpoint.interop.dcp import READ_BLOCK_BYTES, DcpFolder, cast_bits
from holdfast.checkpoint.interop.dcp_import import FlatTensor
from holdfast.core.sharding.boxes import Box
from holdfast.core.sharding.state_table import ITEM_BYTES


@dataclass(frozen=True, slots=True)
class RowView:
    """A tensor of `shape` [rows, ...] whose rows lie in `boxes` of a stored tensor, in their order.
    A box may have leading dims of length 1."""

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


class ViewedFolder:
    """A flat state: the tensors of a DCP folder, some of them taken apart into views.

    views: by the name of the new tensor. A stored tensor that a view reads is not listed. numbers:
    further tensors of one number."""

    def __init__(
        self,
        folder: DcpFolder,
        views: Mapping[str, RowView],
        numbers: Mapping[str, float] | None = None,
    ) -> None:
        self._numbers = numbers or {}
        stored = {box.name for view in views.values() for box in view.boxes}
        self._folder, self._views = folder, views
        self.non_tensors: Sequence[str] = folder.non_tensors
        self.tensors: dict[str, FlatTensor] = {
            name: tensor for name, tensor in folder.tensors.items() if name not in stored
        }
        self.tensors |= dict(views) | {name: RowView("F64", (), ()) for name in self._numbers}

    def iterate_rows(self, name: str, dtype: str, unit: int = 1) -> Iterator[Any]:
        """As `DcpFolder.iterate_rows`. Each box of a view has a multiple of `unit` rows."""
        if name in self._numbers:
            yield cast_bits(np.array(self._numbers[name], "<f8").view("<u8"), "F64", dtype)
            return
        if name not in self._views:
            yield from self._folder.iterate_rows(name, dtype, unit)
            return
        view = self._views[name]
        row_bytes = max(1, prod(view.shape[1:])) * ITEM_BYTES[view.dtype]
        count = max(1, READ_BLOCK_BYTES // (row_bytes * unit)) * unit
        for box in view.boxes:
            if not view.shape:
                yield cast_bits(self._folder.read(box).reshape(()), view.dtype, dtype)
                continue
            dim = len(box.lengths) - len(view.shape)
            for first in range(0, box.lengths[dim], count):
                offsets, lengths = list(box.offsets), list(box.lengths)
                offsets[dim] += first
                lengths[dim] = min(count, box.lengths[dim] - first)
                bits = self._folder.read(Box(box.name, tuple(offsets), tuple(lengths)))
                yield cast_bits(bits.reshape(-1, *view.shape[1:]), view.dtype, dtype)


def row_view(
    name: str, dtype: str, stored_shape: Sequence[int], ranges: Sequence[tuple[int, int]], *at: int
) -> RowView:
    """Return the view of some rows of a stored tensor. ranges: (first row, rows). at: index on each
    leading dim."""
    rest = tuple(stored_shape[len(at) + 1 :])
    boxes = tuple(
        Box(name, (*at, first, *(0 for _ in rest)), (*(1 for _ in at), count, *rest))
        for first, count in ranges
    )
    return RowView(dtype, (sum(count for _, count in ranges), *rest), boxes)


def qkv_ranges(heads: int, kv_heads: int, head_size: int) -> dict[str, list[tuple[int, int]]]:
    """Return the rows of q, k and v, as (first row, rows), in a fused matrix."""
    queries = heads // kv_heads
    starts = [group * (queries + 2) * head_size for group in range(kv_heads)]
    return {
        "q": [(start, queries * head_size) for start in starts],
        "k": [(start + queries * head_size, head_size) for start in starts],
        "v": [(start + (queries + 1) * head_size, head_size) for start in starts],
    }
