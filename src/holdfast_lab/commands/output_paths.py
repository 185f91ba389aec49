"""Folders that commands write to, with one writer at a time."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from holdfast.errors import UserError


def make_folder(folder: Path) -> None:
    """Make a folder of `--out`, if it is not there. Raises UserError."""
    with explained_out_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)


@contextmanager
def only_writer(folder: Path | None) -> Iterator[None]:
    """Inside, no second command writes into this folder of `--out`. It is made, and removed again
    if nothing was written. Raises UserError."""
    if folder is None:
        yield
        return
    is_new = not folder.exists()
    make_folder(folder)
    place = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                "another command is writing into this folder",
                where=f"command line, --out: {folder}",
                remedy="wait until it ends, or give --out another path",
            ) from None
        yield
    finally:
        os.close(place)
        if is_new:
            with suppress(OSError):
                folder.rmdir()


@contextmanager
def explained_out_errors(folder: Path) -> Iterator[None]:
    """Inside, the folder of `--out` is made and filled. Raises UserError."""
    try:
        yield
    except FileExistsError as error:
        raise UserError(
            "this is a file, and must be a folder",
            where=f"command line, --out: {error.filename or folder}",
            remedy="give --out another path",
        ) from None
    except OSError as error:
        raise UserError(
            f"the folder cannot be made: {error.strerror}",
            where=f"command line, --out: {error.filename or folder}",
            remedy="give a path in a folder that you can write to",
        ) from None
