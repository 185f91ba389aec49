"""A line of progress on stderr: redrawn in place on a terminal; elsewhere a line now and then."""

from __future__ import annotations

import sys
import threading
import time

MIB = 2**20
LINE_INTERVAL_S = 5.0  # between two lines where there is no terminal
MOMENT_S = 2.0  # work that is done sooner needs no word


def say(text: str) -> None:
    """Print one line about the progress; never mixed into what another program reads."""
    print(text, file=sys.stderr, flush=True)


class StageProgress:
    """Shows how far a stage is. `say` prints a line of its own, above the moving one."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._is_line_open = False  # a moving line is on the screen
        self._last = time.monotonic()
        self._shown = ("", 0, 0)

    def __enter__(self) -> StageProgress:
        return self

    def __exit__(self, *error: object) -> None:
        self._end_line()

    def say(self, text: str) -> None:
        self._end_line()
        say(text)

    def show(self, what: str, done: int, total: int) -> None:
        """`done` of `total` pieces of the stage `what`."""
        if self._shown == (what, done, total):
            return  # the last of what is done was too small to be counted
        self._shown = what, done, total
        tenth = 10 * done // max(total, 1)
        if self._is_terminal:
            bar = "#" * tenth + "." * (10 - tenth)
            self._draw(f"{what} [{bar}] {done}/{total}")
            if done == total:
                self._end_line()
        elif done == total or time.monotonic() - self._last > LINE_INTERVAL_S:
            say(f"{what}: {done} of {total}")
            self._last = time.monotonic()

    def show_bytes(self, what: str, done: int, total: int) -> None:
        """`done` of `total` bytes, in MiB. Less than one is not worth a line."""
        if total >= MIB:
            self.show(f"{what} MiB", done // MIB, total // MIB)

    def show_seconds(self, words: str, seconds: float) -> float:
        """Show for how long a stage has worked. Returns seconds until the next call is due."""
        line = f"{words}, {seconds:.0f} s"
        if self._is_terminal:
            self._draw(line)
            return 1.0
        say(line)
        return LINE_INTERVAL_S

    def erase(self) -> None:
        """Take the moving line off the screen."""
        if self._is_line_open:
            self._draw("")
            self._is_line_open = False

    def _draw(self, line: str) -> None:
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
        self._is_line_open = True

    def _end_line(self) -> None:
        if self._is_line_open:
            print(file=sys.stderr, flush=True)
            self._is_line_open = False


class LongWork:
    """Shows on stderr what a command does and for how long, once it takes more than `MOMENT_S`.

    A thread of its own shows it, so the work itself need not report how far it is. Shorter work
    prints nothing, and no line of it is left on a terminal.
    """

    def __init__(self, words: str) -> None:
        self._words = words
        self._began = time.monotonic()
        self._progress = StageProgress()
        self._lock = threading.Lock()  # one line at a time
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._show, name="progress", daemon=True)

    def __enter__(self) -> LongWork:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        self._progress.erase()

    def stage(self, words: str) -> None:
        """Name what is done from now on."""
        self._words = words

    def count(self, words: str, done: int, total: int) -> None:
        """`done` of `total` pieces are complete."""
        self._words = f"{words}: {done} of {total} done"

    def say(self, text: str) -> None:
        """Print a line of its own, above the moving one."""
        with self._lock:
            self._progress.erase()
            self._progress.say(text)

    def _show(self) -> None:
        wait = MOMENT_S
        while not self._ended.wait(wait):
            with self._lock:
                seconds = time.monotonic() - self._began
                wait = self._progress.show_seconds(self._words, seconds)
