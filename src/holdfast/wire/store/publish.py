"""Gives a complete file its name, which only one of several racing processes gets.

A hard link does this on most file systems. Some have none: exFAT, and some FUSE and network file
systems. There a rename that replaces nothing does it: `RENAME_NOREPLACE` on Linux, `RENAME_EXCL` on
macOS.

NFS may answer that the name exists although this process has just made the link. The answer to the
first request was lost, and the client asked again. The name then leads to the same file.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from contextlib import suppress
from pathlib import Path

_NO_HARD_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1  # linux/fs.h
_RENAME_EXCL = 4  # sys/stdio.h of macOS


def publish_file(temporary: Path, target: Path) -> None:
    """Give the file `temporary` the name `target`. `temporary` may lead to it, too, afterwards.

    Raises FileExistsError if the name is taken, and OSError if the file system can neither link
    nor rename in this way."""
    try:
        os.link(temporary, target)
    except FileExistsError:
        if not os.path.samefile(temporary, target):
            raise
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        _rename_to_free_name(temporary, target)


def _rename_to_free_name(temporary: Path, target: Path) -> None:
    libc, old, new = ctypes.CDLL(None, use_errno=True), os.fsencode(temporary), os.fsencode(target)
    try:
        if sys.platform == "darwin":
            failed = libc.renamex_np(old, new, _RENAME_EXCL)
        else:
            failed = libc.renameat2(_AT_FDCWD, old, _AT_FDCWD, new, _RENAME_NOREPLACE)
    except AttributeError:  # a C library without it
        failed, code = -1, errno.ENOSYS
    else:
        code = ctypes.get_errno()
    if failed:
        # as `os.link` fails where there are no hard links, so that its message fits
        code = code if code == errno.EEXIST else errno.EPERM
        raise OSError(code, os.strerror(code), str(temporary), None, str(target))


def replace_file(path: Path, text: str) -> None:
    """Write a file atomically; on a full disk, remove the part that was written."""
    temporary = temporary_beside(path)
    try:
        temporary.write_text(text, "utf-8")
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise


def temporary_beside(path: Path) -> Path:
    """Return this process's name for an unfinished file that becomes `path`."""
    return path.with_name(f".tmp-{path.name}-{os.getpid()}")
