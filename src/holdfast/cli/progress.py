"""A line of progress on stderr: redrawn in place on a terminal; elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from types import TracebackType

MIB = 2**20
LINE_INTERVAL_S = 5.0  # between two lines where there is no terminal


class StageProgress:
    """Shows how far a stage is. `say` prints a line of its own, above the moving one."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._is_line_open = False  # a moving line is on the screen
        self._last = time.monotonic()
        self._shown = ("", 0, 0)

    def __enter__(self) -> StageProgress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._end_line()

    def say(self, text: str) -> None:
        self._end_line()
        print(text, file=sys.stderr, flush=True)

    def show(self, what: str, done: int, total: int) -> None:
        """`done` of `total` pieces of the stage `what`."""
        if self._shown == (what, done, total):
            return  # the last of what is done was too small to be counted
        self._shown = what, done, total
        tenth = 10 * done // max(total, 1)
        if self._is_terminal:
            bar = "#" * tenth + "." * (10 - tenth)
            print(f"\r\x1b[K{what} [{bar}] {done}/{total}", end="", file=sys.stderr, flush=True)
            self._is_line_open = True
            if done == total:
                self._end_line()
        elif done == total or time.monotonic() - self._last > LINE_INTERVAL_S:
            print(f"{what}: {done} of {total}", file=sys.stderr, flush=True)
            self._last = time.monotonic()

    def show_bytes(self, what: str, done: int, total: int) -> None:
        """`done` of `total` bytes, in MiB. Less than one is not worth a line."""
        if total >= MIB:
            self.show(f"{what} MiB", done // MIB, total // MIB)

    def _end_line(self) -> None:
        if self._is_line_open:
            print(file=sys.stderr, flush=True)
            self._is_line_open = False
