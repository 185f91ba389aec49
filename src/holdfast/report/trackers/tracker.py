"""What a tracker is: the class that an adapter to another program implements.

A tracker lives in a process of its own, next to a run or after it. It reads nothing of the run
itself. Its process reads the journal and calls it, one call at a time, in this order:

    start     once, before anything else
    event     for each record of the journal
    log       for each step and each validation that counts
    rewind    if steps are done again and `can_rewind` is true
    flush     after each batch, before the position in the journal is stored
    finish    once, if the run or this session of it is over

A call may raise, hang, or end the process. Then a new process starts, calls `start`, and repeats
the calls since the last stored position. So `log` with a step and values that were logged before
must leave one point.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from holdfast.events import Record

MODES = ("offline", "online")
_LASTING = range(400, 500)  # statuses of HTTP that say that the request is wrong
_PASSING = (408, 425, 429)  # of these the ones that ask for another attempt
_STATUS = re.compile(r"\b(?:error(?: code)?|status(?: code)?|http)[ :]+([45]\d\d)\b", re.IGNORECASE)
_LASTING_ERRORS = (ImportError, PermissionError, NotADirectoryError, FileExistsError)


@dataclass(frozen=True)
class RunInfo:
    """The run that a tracker follows."""

    name: str  # `name` of the run file
    key: str  # stays the same over all sessions of the run, and is unique
    run_folder: Path
    folder: Path  # this tracker's own folder in the run folder; exists
    config: Mapping[str, Any] = field(default_factory=dict)
    # dotted keys of the run file that decide the computation, with their values
    options: Mapping[str, str] = field(default_factory=dict)  # of this tracker, by name
    delivered: Mapping[str, int] = field(default_factory=dict)
    # "train" and "validation" -> the last step that was logged and flushed; absent: none


class Tracker:
    """Base class of trackers and callbacks. Each method may stay as it is."""

    can_rewind: ClassVar[bool] = False
    """True if values that were logged can be taken back. If it is false, the first value of a step
    stays, and a step that is done again is not logged again."""

    settle_seconds: ClassVar[float] = 0.0
    """Seconds after `flush` until values survive a kill of all processes. After a failure, the
    calls of the last `settle_seconds` are repeated, too."""

    option_names: ClassVar[tuple[str, ...] | None] = None
    """Names of the options that this tracker takes; None: any."""

    places: ClassVar[str] = "logging.options"
    """Keys and variables that a server's refusal is about, for its remedy."""

    @classmethod
    def problems(
        cls, options: Mapping[str, str], environment: Mapping[str, str]
    ) -> Iterator[tuple[str, str, str]]:
        """Yield option, what is wrong and a remedy, of values that can never work. No package is
        imported for it. It is asked before the run starts."""
        yield from ()

    def is_refusal(self, error: BaseException) -> bool:
        """Return True for an error that does not pass by itself: the tracker then ends. After any
        other error it is started again."""
        status = http_status(error)
        if status is not None:
            return status in _LASTING and status not in _PASSING
        return isinstance(error, _LASTING_ERRORS)

    def start(self, info: RunInfo) -> None:
        """Open the run in the other program; continue it if `info.key` was there before."""

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Log the values of a step. `time` is when it was done, in seconds since 1970.

        All names of one call begin with `validation/`, or none does. Steps of a run on several
        nodes may come out of order.
        """

    def event(self, record: Record) -> None:
        """Take one record of the journal."""

    def rewind(self, step: int) -> None:
        """Take back the values of all steps after `step`. They will be logged again."""

    def flush(self) -> None:
        """Return once all that was logged has arrived, or lies where it survives this process."""

    def finish(self, reason: str) -> None:
        """Close the run. `reason` is finished, stopped, failed, or interrupted."""


def http_status(error: BaseException | None) -> int | None:
    """Return the status of HTTP that an error or one of its causes tells; None if none does."""
    while error is not None:
        ask = getattr(error, "get_http_status_code", None)  # of MLflow's errors
        said = _STATUS.search(str(error))
        for status in (
            int(said[1]) if said else None,
            ask() if callable(ask) else None,
            getattr(getattr(error, "response", None), "status_code", None),
            getattr(error, "status_code", None),
            getattr(error, "code", None),
        ):
            if isinstance(status, int) and 400 <= status < 600:
                return status
        error = error.__cause__ or error.__context__
    return None


def mode_problems(options: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield the problem of an option `mode` that is not one of MODES."""
    mode = options.get("mode") or MODES[0]
    if mode not in MODES:
        yield "mode", f"{mode!r} is no mode", f"use {' or '.join(MODES)}"


def folder_problems(options: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield the problem of an option `folder` that names something else."""
    folder = Path(options.get("folder") or ".")
    if folder.exists() and not folder.is_dir():
        yield "folder", f"{folder} is no folder", "name another one"
