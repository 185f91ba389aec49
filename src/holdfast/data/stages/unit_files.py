"""The file of a unit's result: a line of JSON, then bytes whose checksum that line holds."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128

from holdfast.core.json_parsing import parse_json
from holdfast.data.read.files import READ_BYTES, write_atomic
from holdfast.errors import CorruptError

SPOOL_BYTES = 16 << 20
"""Bytes of a unit's result that are held in memory; more of them wait in a temporary file."""
MAX_HEADER_BYTES = 64 << 20

Payload = Callable[[], Iterator[bytes]]


def write_result(path: Path, header: dict[str, Any], payload: Payload) -> None:
    """Write a result atomically. `payload` gives its bytes each time it is called."""
    state, size = xxh3_128(), 0
    for piece in payload():
        state.update(piece)
        size += len(piece)
    line = json.dumps({**header, "size": size, "xxh3": state.hexdigest()}) + "\n"
    write_atomic(path, chain([line.encode()], payload()))


def read_result(path: Path) -> tuple[dict[str, Any], int]:
    """Header, and where the payload begins. Raises CorruptError when the bytes are not those that
    were written."""
    state, size = xxh3_128(), 0
    with path.open("rb") as file:
        line = file.readline(MAX_HEADER_BYTES)
        while piece := file.read(READ_BYTES):
            state.update(piece)
            size += len(piece)
    try:
        header = parse_json(line)
        sound = header["size"] == size and header["xxh3"] == state.hexdigest()
    except (ValueError, KeyError, TypeError):
        sound = False
    if not sound:
        raise CorruptError(f"{path} is not what was written")
    return header, len(line)


def mapped(path: Path, dtype: str, at: int, count: int) -> NDArray[Any]:
    """Numbers of a file, mapped: they may be more than memory. The array holds a descriptor."""
    if not count:
        return np.zeros(0, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r", offset=at, shape=(count,))


class UnitTables(Sequence[NDArray[Any]]):
    """A table of each unit, mapped when it is asked for. So a corpus may have more units than a
    process may have files."""

    def __init__(self, tables: Sequence[Callable[[], NDArray[Any]]]):
        self._tables = tables

    def __len__(self) -> int:
        return len(self._tables)

    @overload
    def __getitem__(self, index: int) -> NDArray[Any]: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[NDArray[Any]]: ...

    def __getitem__(self, index: int | slice) -> NDArray[Any] | Sequence[NDArray[Any]]:
        if isinstance(index, slice):
            return UnitTables(self._tables[index])
        return self._tables[index]()
