"""Writes safetensors files of a model piece by piece, so that no file is ever held in memory.

Sizes follow from the name map. So each tensor's file and each file's header are known before the
first number is read. Then every tensor is read, cast and written in blocks of rows of at most
`BLOCK_BYTES`. Memory is one block for any size of the model or of a file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from holdfast.config.huggingface.weight_files import INDEX, SINGLE
from holdfast.core.format.hf_names import NameMap, Piece, TensorMapping
from holdfast.core.sharding.boxes import Box

BLOCK_BYTES = 16 * 2**20

_THEIR_DTYPE = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
}


class TensorReader(Protocol):
    """Our parameters, readable in part."""

    def dtype(self, name: str) -> torch.dtype: ...

    def box(self, name: str, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """The elements [offsets, offsets + lengths) of our tensor `name`."""


class WholeTensors:
    """Complete tensors as `Parts`, each requested when its turn comes; the last one is kept."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._last: tuple[str, Tensor] | None = None

    def dtype(self, name: str) -> torch.dtype:
        return self._tensor(name).dtype

    def box(self, name: str, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
        value = self._tensor(name)
        if value.dim() != len(lengths):
            raise ValueError(f"{name} has shape {tuple(value.shape)}, not {len(lengths)} dims")
        part = value[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]
        if tuple(part.shape) != tuple(lengths):
            raise ValueError(f"{name} has shape {tuple(value.shape)}, which is too small")
        return part

    def _tensor(self, name: str) -> Tensor:
        if self._last is None or self._last[0] != name:
            self._last = (name, self._tensors[name].detach().cpu())
        return self._last[1]


@dataclass(frozen=True, slots=True)
class _PlannedTensor:
    """One of their tensors as it will be written."""

    entry: TensorMapping
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.entry.shape) * self.dtype.itemsize


def write_files(
    folder: Path, names: NameMap, tensors: TensorReader, dtype: torch.dtype | None, shard_bytes: int
) -> str:
    """Write the files and, where there are several, the index. -> the dtype most numbers have.

    A file is closed when one more tensor would make it larger than `shard_bytes`. Raises OSError
    as the disk does, ValueError for a padding row that is not zero.
    """
    planned = [
        _PlannedTensor(entry, dtype or tensors.dtype(entry.pieces[0].ours))
        for entry in names.stored_entries
    ]
    files = _group_into_files(planned, shard_bytes)
    located: dict[str, str] = {}
    for number, inside in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors" if len(files) > 1 else SINGLE
        _write_file(folder / name, inside, tensors)
        located |= {row.entry.theirs: name for row in inside}
    if len(files) > 1:
        total = sum(row.nbytes for row in planned)
        index = {"metadata": {"total_size": total}, "weight_map": located}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", "utf-8")
    numbers: dict[str, int] = {}
    for row in planned:
        name = str(row.dtype).removeprefix("torch.")
        numbers[name] = numbers.get(name, 0) + prod(row.entry.shape)
    return max(numbers, key=lambda name: numbers[name])


def _group_into_files(
    planned: Iterable[_PlannedTensor], shard_bytes: int
) -> list[list[_PlannedTensor]]:
    """In order, each file as full as it may be; a tensor larger than that has one to itself."""
    files: list[list[_PlannedTensor]] = [[]]
    held = 0
    for row in planned:
        if files[-1] and held + row.nbytes > shard_bytes:
            files.append([])
            held = 0
        files[-1].append(row)
        held += row.nbytes
    return files


def _write_file(path: Path, inside: Sequence[_PlannedTensor], tensors: TensorReader) -> None:
    """One file: eight bytes of header length, the header, the tensors without gaps."""
    ordered = sorted(inside, key=lambda row: -row.dtype.itemsize)  # each aligned to its elements
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for row in ordered:
        header[row.entry.theirs] = {
            "dtype": _THEIR_DTYPE[row.dtype],
            "shape": list(row.entry.shape),
            "data_offsets": [at, at + row.nbytes],
        }
        at += row.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for row in ordered:
            for block in row_blocks(row.entry, tensors):
                value = block.to(row.dtype).contiguous()
                file.write(value.reshape(-1).view(torch.uint8).numpy().data)


def row_blocks(entry: TensorMapping, tensors: TensorReader) -> Iterator[Tensor]:
    """One of their tensors out of ours, in blocks of rows."""
    rows = entry.shape[0] if entry.shape else 1
    row_bytes = max(1, prod(entry.shape[1:]) * 4)
    step = max(1, BLOCK_BYTES // row_bytes)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        offsets = (first, *(0 for _ in entry.shape[1:])) if entry.shape else ()
        yield _read_block(
            entry, Box("", offsets, (count, *entry.shape[1:]) if offsets else ()), tensors
        )
    for piece in entry.pieces:
        _check_padding(piece, tensors, step)


def _read_block(entry: TensorMapping, wanted: Box, tensors: TensorReader) -> Tensor:
    """The part `wanted` of one of their tensors, which pieces of ours fill."""
    out: Tensor | None = None
    for piece in entry.pieces:
        common = Box("", piece.offsets, piece.lengths).intersect(wanted)
        if common is None:
            continue
        at = [c - p for c, p in zip(common.offsets, piece.offsets, strict=True)]
        if piece.picked is not None:
            value = tensors.box(piece.ours, [piece.picked, *at], [1, *common.lengths])[0]
        else:
            value = tensors.box(piece.ours, at, common.lengths)
        if common == wanted:
            return value
        if out is None:
            out = torch.zeros(wanted.lengths, dtype=value.dtype)
        place = zip(common.offsets, wanted.offsets, common.lengths, strict=True)
        out[tuple(slice(c - w, c - w + n) for c, w, n in place)] = value
    assert out is not None, "pieces fill their tensor"
    return out


def _check_padding(piece: Piece, tensors: TensorReader, step: int) -> None:
    """Rows of ours that theirs lacks must be zero."""
    rows = piece.lengths[0]
    for first in range(rows, rows + piece.dropped_rows, step):
        count = min(step, rows + piece.dropped_rows - first)
        rest = piece.lengths[1:]
        if tensors.box(piece.ours, (first, *(0 for _ in rest)), (count, *rest)).any():
            raise ValueError(f"{piece.ours} has numbers in its padding, rows {rows} and later")
