"""The checksum of a folder's weights: of model files or of an adapter, read without torch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import xxhash

from holdfast.config.huggingface.weight_files import (
    ADAPTER,
    INDEX,
    SINGLE,
    StoredTensor,
    read_weights,
)
from holdfast.data.read.files import file_checksum
from holdfast.errors import ModelFolderError

_CHUNK = 2**22  # elements that are looked at together
_EXPONENT = {"F16": 0x7C00, "BF16": 0x7F80}


def weights_checksum(folder: Path) -> str:
    """xxh3-128 of names and bytes of the folder's safetensors files. Raises ModelFolderError."""
    total = xxhash.xxh3_128()
    try:
        for name in _weight_files(folder):
            total.update(f"{name}\0{file_checksum(folder / name)}\0".encode())
    except OSError as error:
        raise ModelFolderError(
            f"the weights cannot be read ({error.strerror}: {error.filename})",
            where=str(folder),
            remedy="put the folder back, or name where it is now",
        ) from None
    return total.hexdigest()


def refuse_other_weights(folder: Path, checksum: str, key: str) -> None:
    """Raises ModelFolderError unless the folder's weights have the checksum. key: of the run file,
    which names the folder."""
    found = weights_checksum(folder)
    if found != checksum:
        raise ModelFolderError(
            f"the weights here are not those that the run was begun with: their checksum is "
            f"{found}, and it was {checksum}",
            where=str(folder),
            remedy=f"put the files back, or name a folder that has them in {key}",
        )


def refuse_not_finite(tensors: Iterable[StoredTensor]) -> None:
    """Raises ModelFolderError for a tensor with NaN or an infinite number."""
    for each in tensors:
        kind = "<u2" if each.dtype in _EXPONENT else {"F32": "<f4", "F64": "<f8"}.get(each.dtype)
        if kind is None or each.begin == each.end:
            continue
        count = (each.end - each.begin) // np.dtype(kind).itemsize
        values = np.memmap(each.file, kind, "r", each.begin, (count,))
        bits = _EXPONENT.get(each.dtype)
        for start in range(0, count, _CHUNK):
            part = values[start : start + _CHUNK]
            if np.isfinite(part).all() if bits is None else ((part & bits) != bits).all():
                continue
            raise ModelFolderError(
                f"tensor {each.name} has NaN or infinite numbers",
                where=str(each.file),
                remedy="fetch it again, or take an earlier state of these weights",
            )


def _weight_files(folder: Path) -> list[str]:
    """Names of the files, in order."""
    if (folder / ADAPTER).is_file() and not (folder / INDEX).is_file():
        return [name for name in (SINGLE, ADAPTER) if (folder / name).is_file()]
    return sorted({each.file.name for each in read_weights(folder).values()})
