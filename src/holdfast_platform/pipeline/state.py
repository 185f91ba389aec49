"""What is kept of a stage between starts: its record and its lock."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import ClassVar, Self, TextIO

from holdfast.core.json_parsing import JsonMessage, parse_json
from holdfast.errors import RunFolderError
from holdfast.wire.store.publish import replace_file
from holdfast_platform.pipeline.recipe import Result

LOCK = ".lock"
LOOK_S = 0.2


class State(StrEnum):
    RUNNING = "running"  # or its command was killed
    FAILED = "failed"
    DONE = "done"


@dataclass(frozen=True)
class KeptRecord(JsonMessage):
    """A record in a file of its own folder."""

    file: ClassVar[str]
    made_by: ClassVar[str]  # command

    def write(self, folder: Path) -> None:
        replace_file(folder / self.file, json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Return the record in a folder; None if there is none. Raises RunFolderError."""
        path = folder / cls.file
        try:
            return cls.from_json(parse_json(path.read_text("utf-8")))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise RunFolderError(
                f"this is not what {cls.made_by!r} wrote",
                where=str(path),
                remedy="move its folder away; what it describes then runs again",
            ) from None


@dataclass(frozen=True)
class Record(KeptRecord):
    """`stage.json` of one recipe."""

    file, made_by = "stage.json", "holdfast pipeline"

    stage: str
    key: str
    recipe: Mapping[str, str]
    state: State
    starts: int = 0  # of its command
    seconds: float = 0.0  # wall time of all starts
    exit_code: int = 0  # of the last command that ended while the pipeline watched
    results: Mapping[str, Result] | None = None  # by name, once done

    @property
    def is_done(self) -> bool:
        """Return True if all results are there."""
        if self.state is not State.DONE or self.results is None:
            return False
        return all(os.path.exists(result.path) for result in self.results.values())


def records_of(folder: Path) -> list[Record]:
    """Return the records of a stage's folder, the newest last. Raises RunFolderError."""
    paths = sorted(folder.glob(f"*/{Record.file}"), key=lambda path: path.stat().st_mtime_ns)
    return [record for path in paths if (record := Record.read(path.parent)) is not None]


@contextmanager
def locked(
    folder: Path, say: Callable[[str], None], is_over: Callable[[], bool]
) -> Iterator[TextIO | None]:
    """Hold the lock of a stage's folder, once no command of an earlier start has it. Yield None if
    `is_over` returns True first."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a+") as lock:
        has_said = False
        while not try_lock(lock):
            if is_over():
                yield None
                return
            if not has_said:
                lock.seek(0)
                who = lock.read().strip() or "another process"
                say(f"{folder.name}: {who} of an earlier start is at work; waiting for its end")
                has_said = True
            time.sleep(LOOK_S)
        yield lock


def try_lock(lock: TextIO) -> bool:
    """Take a lock unless another process has it; return True if it was taken."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
