"""Tables of word n-grams: what `perplexity` and `contamination` know of the texts of their stage.

A table is some arrays in a folder, one file each. The preparing process writes them once, and all
processes map them. Words are those of `shingles.word_hashes`.
"""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.data.filters.shingles import gram_sums, mix
from holdfast.data.read.files import write_atomic

Hashes = NDArray[np.uint64]
Table = Mapping[str, NDArray[Any]]


def gram_hashes(words: Hashes, size: int) -> Hashes:
    """Return a hash of each n-gram of `size` words, in order: [words] -> [words - size + 1]. The
    size is a part of the hash, so one table holds n-grams of several sizes."""
    return mix(gram_sums(words, size) + np.uint64(size))


def find_in(keys: Hashes, wanted: Hashes) -> NDArray[np.int64]:
    """Return the place of each wanted hash among sorted keys; -1 if it is not there."""
    if not len(keys):
        return np.full(len(wanted), -1, dtype=np.int64)
    places = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[places] == wanted, places, -1)


def write_table(folder: Path, table: Table) -> None:
    """Write the arrays of a table, each atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, values in table.items():
        buffer = BytesIO()
        np.save(buffer, values)
        write_atomic(folder / f"{name}.npy", [buffer.getbuffer()])


def read_table(folder: str, *names: str) -> list[NDArray[Any]]:
    """Return arrays of a table, mapped."""
    return [np.load(Path(folder) / f"{name}.npy", mmap_mode="r") for name in names]
