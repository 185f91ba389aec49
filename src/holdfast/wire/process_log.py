"""The log of one process: a line has time, level, process, generation and rank.

    2026-11-25T15:59:12.123Z INFO worker generation=4 rank=2: resumed from step 12

Agent, mover and worker log with `logging` from the standard library. Their files are in `logs/` of
the run folder: `agent.log`, `mover.log`, and one file for each generation and rank. Lines that a
user reads in the terminal are no part of this; the agent logs a copy of them.

A mover and a worker write to their standard output, which the agent has opened for them. Every
process writes on a background thread, because a disk that hangs must not block what it does.
"""

from __future__ import annotations

import logging
import queue
import re
import threading
import time
from pathlib import Path
from typing import TextIO

ROOT = "holdfast"
_HEAD = re.compile(r"^\S+Z [A-Z]+ \w+ generation=\d+(?: rank=-?\d+)?: ")
CLOSE_TIMEOUT_S = 2.0
"""Seconds that the end of a process waits for its last lines; a disk may hang."""


class PlaceFilter(logging.Filter):
    """Adds the process, its generation and its rank to each line."""

    def __init__(self, process: str, generation: int, rank: int | None) -> None:
        super().__init__()
        self.process, self.generation, self.rank = process, generation, rank

    def filter(self, record: logging.LogRecord) -> bool:
        rank = "" if self.rank is None else f" rank={self.rank}"
        record.place = f"{self.process} generation={self.generation}{rank}"
        return True


class BackgroundHandler(logging.Handler):
    """Writes lines on a daemon thread; `emit` never waits for the disk.

    If a line cannot be written it is dropped. The next line that can be written is preceded by the
    number of those that were dropped.
    """

    def __init__(self, target: Path | TextIO) -> None:
        """target: a file that is opened for each line, or an open stream."""
        super().__init__()
        self._target = target
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_lines, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.put(self.format(record))

    def _write_lines(self) -> None:
        dropped = 0
        while (line := self._lines.get()) is not None:
            try:
                note = f"{dropped} lines could not be written\n" if dropped else ""
                self._write(f"{note}{line}\n")
                dropped = 0
            except OSError:
                dropped += 1

    def _write(self, text: str) -> None:
        if isinstance(self._target, Path):
            with self._target.open("a", encoding="utf-8", errors="replace") as file:
                file.write(text)
        else:
            self._target.write(text)
            self._target.flush()

    def close(self) -> None:
        """Write what is queued, for `CLOSE_TIMEOUT_S` at most."""
        self._lines.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        super().close()


def start(
    process: str, target: Path | TextIO, *, generation: int = 0, rank: int | None = None
) -> None:
    """Send what this process logs to `target`, and to nowhere else, until `stop`.

    Args:
        process: agent, mover or worker.
        target: a file, or an open stream.
        generation: the generation in which the process begins; `enter` changes it.
        rank: the worker's rank; None for other processes.
    """
    handler = BackgroundHandler(target)
    form = "%(asctime)s.%(msecs)03dZ %(levelname)s %(place)s: %(message)s"
    formatter = logging.Formatter(form, "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    handler.addFilter(PlaceFilter(process, generation, rank))
    stop()
    logger = logging.getLogger(ROOT)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def stop() -> None:
    """Write what is queued and log no more."""
    logger = logging.getLogger(ROOT)
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()


def message_of(line: str) -> str:
    """Return a line of a log without time, level and place, as a user reads it."""
    return _HEAD.sub("", line)


def enter(generation: int, rank: int | None = None) -> None:
    """Name this generation, and this rank of a worker, in the lines that follow."""
    for handler in logging.getLogger(ROOT).handlers:
        for place in handler.filters:
            if isinstance(place, PlaceFilter):
                place.generation, place.rank = generation, rank
