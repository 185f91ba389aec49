"""Small things that every file of a dataset needs: checksums, canonical JSON, atomic writes."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import xxhash

from holdfast.errors import DataError, OutOfSpaceError

READ_BYTES = 1 << 20


def canonical_json(value: Any) -> bytes:
    """The one spelling of a JSON value: sorted keys, two spaces, a final newline."""
    return (json.dumps(value, sort_keys=True, indent=2, ensure_ascii=True) + "\n").encode()


def checksum(data: bytes | memoryview) -> str:
    """xxh3-128 in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data)


def file_checksum(path: Path) -> str:
    """xxh3-128 of a file, read in pieces of 1 MiB."""
    state = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(READ_BYTES):
            state.update(piece)
    return state.hexdigest()


def write_atomic(path: Path, pieces: Iterable[bytes | memoryview], *, sync: bool = False) -> str:
    """Write a file atomically; return its xxh3-128.

    A killed writer leaves at most a `.tmp` file, which the next one overwrites. `sync` makes it
    survive a power loss.
    """
    state = xxhash.xxh3_128()
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            for piece in pieces:
                file.write(piece)
                state.update(piece)
            file.flush()
            if sync:
                os.fsync(file.fileno())
    except OSError:
        # A full disk must at once give back what the half-written file took.
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    os.replace(temporary, path)
    return state.hexdigest()


@contextlib.contextmanager
def explain_os_errors(folder: Path) -> Iterator[None]:
    """Turn a full disk, or a folder that may not be written, into one sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OutOfSpaceError(
                "the disk is full; what is finished stays and is not done again",
                where=str(folder),
                remedy="make room and run the same command again",
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise DataError(
                f"{error.filename or folder} cannot be opened: {os.strerror(error.errno)}",
                where=str(folder),
                remedy="give yourself the permission, or name another data.folder",
            ) from error
        raise
