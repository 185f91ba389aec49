"""A checkpoint of `torch.distributed.checkpoint` as tensors that can be read by box: no torch.

`DcpFolder.open` asks a child process (dcp_metadata.py) what lies where; after that only plain byte
ranges of the data files are mapped and copied. A tensor whose chunks do not cover it exactly once
is refused: DCP's own reader would leave the rest of it uninitialised.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.checkpoint.interop.dcp_metadata import METADATA
from holdfast.core.sharding.boxes import Box, coverage_problem, whole_box
from holdfast.core.sharding.state_table import ITEM_BYTES
from holdfast.errors import CheckpointError
from holdfast.wire.child_command import module_command

METADATA_MODULE = "holdfast.checkpoint.interop.dcp_metadata"
METADATA_TIMEOUT_S = 1800.0
"""For a folder of many files on a slow disk."""

READ_BLOCK_BYTES = 16 * 2**20
"""Read at a time."""

_BITS = {8: "<u8", 4: "<u4", 2: "<u2", 1: "u1"}
_NUMPY_DTYPE = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U8": "u1",
    "BOOL": "u1",
}


@dataclass(frozen=True, slots=True)
class DcpChunk:
    """One stored box: `nbytes` bytes of storage from byte `start` of `file`. Its first element is
    number `first_element` of the storage. Neighbours on each dim lie `strides` elements apart."""

    box: Box
    file: str
    start: int
    nbytes: int
    first_element: int
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DcpTensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[DcpChunk, ...]


def is_dcp(folder: Path) -> bool:
    return (folder / METADATA).is_file()


class DcpFolder:
    """Tensors by their flat names, and the names of what is no tensor. `values` has those of plain
    numbers, texts and containers."""

    def __init__(
        self,
        folder: Path,
        tensors: dict[str, DcpTensor],
        others: tuple[str, ...],
        values: dict[str, Any] | None = None,
    ):
        self.folder, self.tensors, self.non_tensors = folder, tensors, others
        self.values = values or {}

    @staticmethod
    def open(folder: Path) -> DcpFolder:
        """Raises CheckpointError for a folder that is not wholly what DCP writes."""
        answer = _read_metadata(folder)
        tensors = {name: _tensor_from_json(name, row) for name, row in answer["tensors"].items()}
        for tensor in tensors.values():
            _check_tensor(folder, tensor)
        return DcpFolder(folder, tensors, tuple(answer["others"]), answer["values"])

    def read(self, box: Box) -> Any:
        """The elements of a box as an array of its dtype (BF16 as its 16 bits)."""
        tensor = self.tensors[box.name]
        out = np.empty(box.lengths, _BITS[ITEM_BYTES[tensor.dtype]])
        for chunk in tensor.chunks:
            common = chunk.box.intersect(box) if box.size else None
            if common is not None:
                there = self._map_chunk(chunk, out.dtype)
                out[_within(common, box)] = there[_within(common, chunk.box)]
        return out

    def iterate_rows(self, name: str, dtype: str, unit: int = 1) -> Iterator[Any]:
        """Yield a complete tensor, row-major, in blocks of a multiple of `unit` rows, cast to
        `dtype`."""
        tensor = self.tensors[name]
        every = whole_box(name, tensor.shape)
        if not tensor.shape:
            yield cast_bits(self.read(every), tensor.dtype, dtype)
            return
        row = max(1, every.size // max(1, tensor.shape[0])) * ITEM_BYTES[tensor.dtype]
        step = max(1, READ_BLOCK_BYTES // (row * unit)) * unit
        for first in range(0, tensor.shape[0], step):
            count = min(step, tensor.shape[0] - first)
            box = Box(name, (first, *every.offsets[1:]), (count, *every.lengths[1:]))
            yield cast_bits(self.read(box), tensor.dtype, dtype)

    def _map_chunk(self, chunk: DcpChunk, kind: Any) -> Any:
        """A chunk's elements where they lie in its file."""
        count = chunk.nbytes // kind.itemsize
        try:
            flat = np.memmap(
                self.folder / chunk.file, kind, mode="r", offset=chunk.start, shape=(count,)
            )
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"cannot be read ({error})",
                where=str(self.folder / chunk.file),
                remedy="copy the checkpoint again",
            ) from error
        strides = tuple(stride * kind.itemsize for stride in chunk.strides)
        return np.lib.stride_tricks.as_strided(
            flat[chunk.first_element :], chunk.box.lengths, strides, writeable=False
        )


def cast_bits(bits: Any, from_dtype: str, to_dtype: str) -> Any:
    """An array of one dtype's bits as another's. Widening is exact; narrowing rounds."""
    if from_dtype == to_dtype:
        return bits
    # BF16 is the upper half of a float32.
    wide = (
        (bits.astype("<u4") << 16).view("<f4")
        if from_dtype == "BF16"
        else bits.view(_NUMPY_DTYPE[from_dtype])
    )
    if to_dtype not in _NUMPY_DTYPE:
        raise CheckpointError(f"a {from_dtype} tensor cannot become {to_dtype}")
    return np.ascontiguousarray(wide.astype(_NUMPY_DTYPE[to_dtype])).view(
        _BITS[ITEM_BYTES[to_dtype]]
    )


def _read_metadata(folder: Path) -> dict[str, Any]:
    """Return what the child process reports about the folder."""
    try:
        done = subprocess.run(
            module_command(METADATA_MODULE, str(folder)),
            capture_output=True,
            check=False,
            timeout=METADATA_TIMEOUT_S,
        )
        answer = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError):
        answer = {"refused": "its metadata cannot be read"}
    if "refused" in answer:
        raise CheckpointError(
            f"this is not a checkpoint that can be imported: {answer['refused']}",
            where=str(folder),
            remedy="name the folder that torch.distributed.checkpoint.save wrote",
        )
    return dict(answer)


def _tensor_from_json(name: str, row: dict[str, Any]) -> DcpTensor:
    chunks = tuple(
        DcpChunk(
            Box(name, tuple(c["offsets"]), tuple(c["lengths"])),
            c["file"],
            c["start"],
            c["bytes"],
            c["first"],
            tuple(c["strides"]),
        )
        for c in row["chunks"]
    )
    return DcpTensor(name, row["dtype"], tuple(row["shape"]), chunks)


def _check_tensor(folder: Path, tensor: DcpTensor) -> None:
    """Every element is there once, and inside the bytes of its storage and of its file."""
    item = ITEM_BYTES[tensor.dtype]
    problem = coverage_problem(tensor.shape, [chunk.box for chunk in tensor.chunks])
    if not problem and any(len(chunk.strides) != len(tensor.shape) for chunk in tensor.chunks):
        problem = "its strides have other dims than its shape"
    for chunk in () if problem else tensor.chunks:
        steps = zip(chunk.box.lengths, chunk.strides, strict=True)
        last = chunk.first_element + sum(
            (length - 1) * stride for length, stride in steps if length
        )
        inside = chunk.first_element >= 0 and min(chunk.strides, default=0) >= 0
        if chunk.box.size and (not inside or (last + 1) * item > chunk.nbytes):
            problem = f"its bytes in {chunk.file} are too few"
        elif chunk.start + chunk.nbytes > (folder / chunk.file).stat().st_size:
            problem = f"{chunk.file} is cut short"
    if problem:
        raise CheckpointError(
            f"{tensor.name} is not whole: {problem}", where=str(folder), remedy="save it again"
        )


def _within(common: Box, outer: Box) -> tuple[slice, ...]:
    """The slices of `common` in an array that holds `outer`."""
    return tuple(
        slice(at - base, at - base + length)
        for at, base, length in zip(common.offsets, outer.offsets, common.lengths, strict=True)
    )
