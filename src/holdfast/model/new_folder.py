"""A folder for another program that appears complete, or not at all."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from holdfast.errors import ModelFolderError, OutOfSpaceError, UserError

PARTIAL = ".partial"
NOT_CONTENT = (PARTIAL, "lost+found")  # of an export that was killed, of a disk's file system


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Write into the folder that is given; at the end its files are those of `folder`.

    A folder that does not exist appears by a rename, from `<name>.partial` in the same parent. An
    empty folder that exists may be a mount point, and its parent may be read-only. Then `.partial`
    lies inside of it, and each file moves up, `config.json` last. After an error nothing is left.

    Raises ModelFolderError for a folder that is not empty or cannot be written, OutOfSpaceError on
    a full disk.
    """
    folder = folder.absolute()
    exists = os.path.lexists(folder)
    if exists and (not folder.is_dir() or any(p.name not in NOT_CONTENT for p in folder.iterdir())):
        raise ModelFolderError(
            "this is not an empty folder", where=str(folder), remedy="name a new one"
        )
    partial = folder / PARTIAL if exists else folder.with_name(f"{folder.name}{PARTIAL}")
    try:
        shutil.rmtree(partial, ignore_errors=True)  # of an export that was killed
        partial.mkdir(parents=True)
        yield partial
        if exists:
            _move_up(partial, folder)
        else:
            partial.rename(folder)
    except (OSError, SafetensorError) as error:
        raise _write_error(folder, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _move_up(partial: Path, folder: Path) -> None:
    """Move all files; if one cannot be moved, remove those that were."""
    moved: list[Path] = []
    try:
        for path in sorted(partial.iterdir(), key=lambda p: (p.name == "config.json", p.name)):
            path.rename(folder / path.name)
            moved.append(folder / path.name)
    except OSError:
        for path in moved:
            path.unlink()
        raise


def _write_error(folder: Path, error: Exception) -> UserError:
    """The safetensors library reports an operating system's error as text."""
    full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
    if full or "os error 28" in str(error):
        return OutOfSpaceError(
            "the disk is full", where=str(folder), remedy="make room, or name another place"
        )
    reason = getattr(error, "strerror", None)
    return ModelFolderError(
        f"the folder cannot be written ({reason or error})",
        where=str(folder),
        remedy="name a folder on a disk that you may write to",
    )
