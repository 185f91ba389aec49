"""Writing a folder of `torch.distributed.checkpoint`: DCP itself writes, we hand it the tensors.

A planner is DCP's own way to say what is saved. This one lists every tensor in pieces of at most
`PIECE_BYTES` and reads a piece from the checkpoint when DCP's writer asks for it. The writer keeps
a reference to every tensor that it has written (FileSystemWriter, 2.13). So all pieces live in one
buffer that is refilled: memory is one piece, whatever the model. That needs the writer to ask
for one piece at a time, which `per_thread_copy_ahead=0` makes sure of on every device.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from holdfast.core.sharding.boxes import Box
from holdfast.core.sharding.state_table import ITEM_BYTES

WRITE_PIECE_BYTES = 64 * 2**20

DTYPE = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True, slots=True)
class ExportedTensor:
    """A tensor under its flat name; `path` is where it stands in the nested state dictionary.

    `source` names it in the checkpoint. `pairs`: so many heads, whose rows are reordered from
    halves to pairs.
    """

    name: str
    path: tuple[str, ...]
    source: str
    dtype: str
    shape: tuple[int, ...]
    pairs: int = 0


@dataclass(frozen=True, slots=True)
class ExportedObject:
    """A number or another small object under its flat name; a float becomes a tensor if asked."""

    name: str
    path: tuple[str, ...]
    value: Any
    tensor: bool = False


ReadInto = Callable[[Box, memoryview], None]
"""Fills memory with a box of the checkpoint, row-major."""


def write_dcp(
    folder: Path,
    tensors: Iterable[ExportedTensor],
    objects: Iterable[ExportedObject],
    read: ReadInto,
) -> None:
    """Write the folder; it must not hold a checkpoint yet. Raises what `read` raises, and OSError
    as the disk does. (DCP hands on what went wrong in an exception of its own.)"""
    folder.mkdir(parents=True, exist_ok=True)
    writer = FileSystemWriter(
        folder, single_file_per_rank=True, thread_count=1, per_thread_copy_ahead=0
    )
    planner = _BoxSavePlanner(tuple(tensors), tuple(objects), read)
    with warnings.catch_warnings():  # that one process saves is what is meant
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            save({}, storage_writer=writer, planner=planner, no_dist=True)
        except CheckpointException as failed:
            raise next(cause for cause, _ in failed.failures.values()) from None


class _BoxSavePlanner(DefaultSavePlanner):
    """Lists boxes of a checkpoint, and reads one when its turn comes."""

    def __init__(
        self,
        tensors: tuple[ExportedTensor, ...],
        objects: tuple[ExportedObject, ...],
        read: ReadInto,
    ) -> None:
        super().__init__()
        self._tensors, self._objects, self._read = tensors, objects, read
        self._by_name = {t.name: t for t in tensors}
        self._values = {o.name: o for o in objects}
        largest = max((_piece_bytes(t) for t in tensors), default=0)
        self._buffer = np.empty(largest, np.uint8)

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self.is_coordinator = is_coordinator
        self.state_dict = {}
        self.mappings = {row.name: row.path for row in self._tensors}
        self.mappings |= {row.name: row.path for row in self._objects}

    def create_local_plan(self) -> SavePlan:
        items = [item for tensor in self._tensors for item in _items(tensor)]
        items += [
            _item(row.name, "F32", (), (), ())
            if row.tensor
            else WriteItem(MetadataIndex(row.name), WriteItemType.BYTE_IO)
            for row in self._objects
        ]
        self.plan = SavePlan(items, planner_data=self.mappings)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if plain := self._values.get(write_item.index.fqn):
            if plain.tensor:
                return torch.tensor(plain.value, dtype=torch.float32)
            stream = io.BytesIO()
            torch.save(plain.value, stream)
            return stream
        tensor = self._by_name[write_item.index.fqn]
        assert write_item.tensor_data is not None
        chunk = write_item.tensor_data.chunk
        box = Box(tensor.source, tuple(chunk.offsets), tuple(chunk.sizes))
        flat = self._buffer[: box.size * ITEM_BYTES[tensor.dtype]]
        self._read(box, flat.data)
        found = torch.from_numpy(flat).view(DTYPE[tensor.dtype]).view(box.lengths)
        if tensor.pairs:
            head = tensor.shape[0] // tensor.pairs
            # Rows: [n*head, ...], each head two halves -> each head in pairs (a copy).
            parts = found.view(-1, 2, head // 2, *found.shape[1:])
            found.copy_(parts.transpose(1, 2).reshape(found.shape))
        return found


def _row_bytes(tensor: ExportedTensor) -> int:
    return ITEM_BYTES[tensor.dtype] * prod(tensor.shape[1:])


def _rows_per_piece(tensor: ExportedTensor) -> int:
    unit = tensor.shape[0] // tensor.pairs if tensor.pairs else 1  # a head stays in one piece
    return max(1, WRITE_PIECE_BYTES // (_row_bytes(tensor) * unit)) * unit


def _piece_bytes(tensor: ExportedTensor) -> int:
    rows = min(_rows_per_piece(tensor), tensor.shape[0]) if tensor.shape else 1
    return _row_bytes(tensor) * rows


def _items(tensor: ExportedTensor) -> Iterator[WriteItem]:
    """The pieces of a tensor, by rows."""
    if not tensor.shape:
        yield _item(tensor.name, tensor.dtype, (), (), ())
        return
    rows = _rows_per_piece(tensor)
    for first in range(0, tensor.shape[0], rows):
        offsets = (first, *(0 for _ in tensor.shape[1:]))
        lengths = (min(rows, tensor.shape[0] - first), *tensor.shape[1:])
        yield _item(tensor.name, tensor.dtype, tensor.shape, offsets, lengths)


def _item(
    name: str,
    dtype: str,
    shape: tuple[int, ...],
    offsets: tuple[int, ...],
    lengths: tuple[int, ...],
) -> WriteItem:
    data = TensorWriteData(
        ChunkStorageMetadata(torch.Size(offsets), torch.Size(lengths)),
        TensorProperties(DTYPE[dtype]),
        torch.Size(shape),
    )
    return WriteItem(
        MetadataIndex(name, torch.Size(offsets)), WriteItemType.SHARD, tensor_data=data
    )


def optimizer_settings(
    rate: float, peak: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> Mapping[str, Any]:
    """Return what torch's AdamW keeps of a parameter group in addition to its parameters, and its
    scheduler's `initial_lr`."""
    optimizer = torch.optim.AdamW(
        [torch.zeros(1)], lr=rate, betas=betas, eps=eps, weight_decay=weight_decay
    )
    (group,) = optimizer.param_groups
    return {k: v for k, v in group.items() if k != "params"} | {"initial_lr": peak}
