"""Standard streams that cannot break a command.

A closed descriptor is replaced by /dev/null. Otherwise the next file that is opened, such as the
journal, would get its number, and messages would go into that file. A character that the encoding
lacks is replaced. A reader that has left, a full disk or a closed terminal ends no training.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

WORKING_COMMANDS = (
    ("train",),
    ("join",),
    ("stage",),
    ("chaos",),
    ("export",),
    ("init",),
    ("data", "prepare"),
    ("checkpoint", "import"),
    ("checkpoint", "copy"),
    ("checkpoint", "prune"),
)
"""Commands that do more than print. What they print may be lost; their work may not."""


class GuardedFile(io.FileIO):
    """A descriptor whose failing writes raise at most once.

    After a failure all output is dropped, so that a buffer that could not be written raises no
    second error when the interpreter ends.
    """

    def __init__(self, fd: int, is_loss_silent: bool) -> None:
        """is_loss_silent: the first failure raises nothing either."""
        super().__init__(fd, "wb", closefd=False)
        self._is_loss_silent = is_loss_silent
        self._has_failed = False

    def write(self, data: object) -> int:
        view = memoryview(data)  # type: ignore[arg-type]  # any buffer, as the base class takes
        if not self._has_failed:
            try:
                return super().write(view) or 0
            except OSError:
                self._has_failed = True
                if not self._is_loss_silent:
                    raise
        return view.nbytes


def guard_streams(arguments: Sequence[str]) -> None:
    """Guard this process's standard streams for the command that `arguments` call."""
    # Open /dev/null in place of each closed standard descriptor.
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            with suppress(OSError):  # no /dev here: then it stays closed
                # The lowest free number is this one. A child inherits it like any other's.
                os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    works = any(tuple(arguments[: len(words)]) == words for words in WORKING_COMMANDS)
    sys.stdout = _guarded(sys.stdout, 1, works)
    sys.stderr = _guarded(sys.stderr, 2, is_loss_silent=True)
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115  # open until this process ends


def _guarded(stream: object, fd: int, is_loss_silent: bool) -> io.TextIOWrapper:
    encoding = getattr(stream, "encoding", None) or "utf-8"
    is_terminal = os.isatty(fd)
    if isinstance(stream, io.TextIOWrapper):
        with suppress(OSError):
            stream.flush()
    raw = GuardedFile(fd, is_loss_silent)
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding,
        errors="replace" if fd == 1 else "backslashreplace",
        line_buffering=is_terminal or fd == 2,
    )
