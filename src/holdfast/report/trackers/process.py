"""The process of one tracker: `python -m holdfast.report.trackers.process`.

Its starter writes one JSON line to its standard input (`TrackerSpec`) and keeps that pipe open. The
end of the pipe means that nothing more will come: the process delivers what the journal has, closes
the tracker, and exits with 0.

What goes wrong in a tracker ends this process with RETRY_EXIT_CODE. The starter runs it again after
a pause, and it continues at the stored position. So a server that is away, a call that hangs
(`CallWatchdog`), a bug and a kill all take the same way. Exit code 2 is a mistake of the user, or a
refusal that does not pass by itself (`Tracker.is_refusal`). Then standard output has the sentence.
Nothing else flows back to the starter but the exit code.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import logging
import os
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from holdfast.core.json_parsing import parse_json
from holdfast.errors import HoldfastError, RunFolderError, UserError
from holdfast.events import Record
from holdfast.report.trackers.curve import Change, Curve, Rewind
from holdfast.report.trackers.redaction import OutputFilter, redact
from holdfast.report.trackers.registry import check_options, load_tracker
from holdfast.report.trackers.tracker import RunInfo, Tracker
from holdfast.wire import lifeline, process_log
from holdfast.wire.journal import JournalTail
from holdfast.wire.process_title import set_process_title
from holdfast.wire.store.run_location import bucket_of_run, store_of_run

logger = logging.getLogger("holdfast.report.trackers.process")  # it runs as __main__

RETRY_EXIT_CODE = 75
"""Exit code of a process that is to be started again (EX_TEMPFAIL of sysexits.h)."""
POLL_INTERVAL_S = 0.5
SAVE_INTERVAL_S = 1.0  # Seconds between two positions that are stored in the middle of a batch
NICENESS = 19
"""A tracker gets the processor when no worker wants it."""
FOLDER = "trackers"
MAX_LOG_BYTES = 4 << 20  # A log that is larger when the process starts becomes `LOG.old`
_MAX_SENTENCE_CHARS = 500
_QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true", "WANDB_SILENT": "true"}
"""Variables that keep libraries from reporting their use, unless the user has set them."""


@dataclass(frozen=True)
class TrackerSpec:
    """The line on standard input."""

    tracker: str
    run: str  # name of the run
    run_folder: str
    config: dict[str, Any] = field(default_factory=dict)  # dotted keys
    options: dict[str, str] = field(default_factory=dict)
    timeout_s: float = 60.0  # of one call
    paths: list[str] = field(default_factory=list)  # where a module that is not installed may lie
    log: str = ""  # file for all output; "": standard error
    niceness: int = NICENESS

    def to_json_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @staticmethod
    def from_json_line(line: bytes) -> TrackerSpec:
        return TrackerSpec(**json.loads(line))


class CallWatchdog:
    """Ends this process if one call of the tracker takes too long: a thread cannot be killed."""

    def __init__(self, timeout_s: float, on_timeout: Callable[[str], None]) -> None:
        """on_timeout: gets the name of the call; it must end the process."""
        self._timeout_s, self._on_timeout = timeout_s, on_timeout
        self._call: tuple[str, float] | None = None  # name, end of its time
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def call(self, function: Callable[..., None], *arguments: Any) -> None:
        self._call = function.__name__, time.monotonic() + self._timeout_s
        try:
            function(*arguments)
        finally:
            self._call = None

    def _watch(self) -> None:
        while True:
            time.sleep(min(1.0, self._timeout_s / 4))
            call = self._call
            if call is not None and time.monotonic() > call[1]:
                self._on_timeout(call[0])


@dataclass(frozen=True)
class _Position:
    time: float
    curve: dict[str, Any]
    positions: Mapping[str, int] | None  # None: as before


class Delivery:
    """Passes a journal on to one tracker, and stores how far it came."""

    def __init__(
        self, tracker: Tracker, cursor: Cursor, tail: JournalTail, watchdog: CallWatchdog
    ) -> None:
        """Raises RunFolderError if the cursor has no valid curve."""
        self._tracker, self._cursor, self._tail, self._watchdog = tracker, cursor, tail, watchdog
        try:
            self._curve = Curve(tracker.can_rewind, cursor.curve)
        except (KeyError, TypeError, ValueError):
            raise RunFolderError(
                "this is not the position of a tracker",
                where=str(cursor.path),
                remedy="remove the file; the tracker then gets the entire run again",
            ) from None
        self._saved_at = time.monotonic()
        self._unsettled: deque[_Position] = deque()
        self._is_unreadable = False

    @property
    def delivered(self) -> dict[str, int]:
        return self._curve.delivered

    def start(self, info: RunInfo) -> None:
        self._cursor.save(self._curve.to_json())  # the run's key stays the same from now on
        self._watchdog.call(self._tracker.start, info)

    def run(self, no_more: threading.Event) -> None:
        """Deliver records until there are no more; then close the tracker."""
        while True:
            is_last = no_more.is_set()  # before the look, so that the look sees everything
            # Deliver what was appended to the journal since the last time.
            records = self._read()
            for record in records:
                self._watchdog.call(self._tracker.event, record)
                self._apply(self._curve.observe(record))
                if time.monotonic() - self._saved_at > SAVE_INTERVAL_S:
                    self._store_position(None)
            if records:  # points that wait for their generation's start must be read again
                self._store_position(None if self._curve.is_waiting else self._tail.positions)
            self._save_settled()
            if is_last:
                break
            no_more.wait(POLL_INTERVAL_S)
        self._apply(self._curve.take_waiting())
        self._watchdog.call(self._tracker.flush)
        self._watchdog.call(self._tracker.finish, self._curve.end)
        self._cursor.save(self._curve.to_json(), self._tail.positions)

    def _read(self) -> list[Record]:
        try:
            records = self._tail.read_new()
        except HoldfastError as error:
            if not self._is_unreadable:
                logger.warning("the journal cannot be read, it is tried again: %s", error)
            self._is_unreadable = True
            return []
        self._is_unreadable = False
        return records

    def _apply(self, changes: list[Change]) -> None:
        for change in changes:
            if isinstance(change, Rewind):
                self._watchdog.call(self._tracker.rewind, change.step)
            else:
                values = dict(change.values)
                self._watchdog.call(self._tracker.log, change.step, values, change.time)

    def _store_position(self, positions: Mapping[str, int] | None) -> None:
        self._watchdog.call(self._tracker.flush)
        self._saved_at = time.monotonic()
        self._unsettled.append(_Position(self._saved_at, self._curve.to_json(), positions))
        self._save_settled()

    def _save_settled(self) -> None:
        """Save the newest position whose values survive a kill by now."""
        settled, positions = None, None
        limit = time.monotonic() - self._tracker.settle_seconds
        while self._unsettled and self._unsettled[0].time <= limit:
            settled = self._unsettled.popleft()
            positions = settled.positions or positions
        if settled is not None:
            self._cursor.save(settled.curve, positions)


def serve(spec: TrackerSpec, no_more: threading.Event, watchdog: CallWatchdog) -> None:
    """Follow the run until there is no more. Raises what the tracker raises, and UserError."""
    run_folder = Path(spec.run_folder)
    if not _is_there(run_folder):
        raise FileNotFoundError(f"{run_folder} is not there, or is not mounted")
    kind = load_tracker(spec.tracker)
    check_options(spec.tracker, kind, spec.options)
    folder = run_folder / FOLDER / spec.tracker.replace(":", ".")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = lock_tracker(folder)
    except OSError as error:
        raise RunFolderError(
            f"the tracker's folder cannot be written ({error.strerror})",
            where=str(folder),
            remedy="correct its permissions",
        ) from None
    if lock is None:
        raise BlockingIOError(f"another process serves the tracker {spec.tracker} of this run")
    cursor = Cursor.load(folder)
    tail = JournalTail(store_of_run(run_folder), cursor.positions)
    tracker = kind()
    delivery = Delivery(tracker, cursor, tail, watchdog)
    named = spec.run, cursor.key, run_folder, folder, spec.config, spec.options
    try:
        delivery.start(RunInfo(*named, delivery.delivered))
        logger.info("follows the run; delivered so far: %s", delivery.delivered or "nothing")
        delivery.run(no_more)
    except Exception as error:
        if not tracker.is_refusal(error):
            raise
        is_missing = isinstance(error, ImportError)
        raise TrackerRefusedError(
            f"{_in_one_line(error)}, and this does not pass by itself",
            where=f"the tracker {spec.tracker}",
            remedy="mend its package" if is_missing else f"correct {tracker.places}",
        ) from error
    logger.info("everything is delivered: %s", delivery.delivered or "nothing")


class TrackerRefusedError(UserError):
    """Another program refuses what the tracker sends, and would refuse it again."""


def _in_one_line(error: BaseException) -> str:
    line = " ".join(str(error).split())[:_MAX_SENTENCE_CHARS]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lifeline", type=int, default=-1)
    arguments = parser.parse_args()
    lifeline.ignore_agent_signals()  # the end of standard input is what ends this process
    spec = TrackerSpec.from_json_line(sys.stdin.buffer.readline())
    if arguments.lifeline >= 0:
        lifeline.watch_lifeline(arguments.lifeline)
    os.nice(spec.niceness)
    set_process_title(f"tracker {spec.tracker}", spec.run)
    sys.path += spec.paths
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    answer = os.dup(1)  # the starter reads there why a tracker cannot work
    output = OutputFilter(os.environ, _open_log(spec))
    output.start()
    _start_logging(spec)

    def end(code: int) -> None:
        process_log.stop()
        output.close()
        os._exit(code)  # threads of a library may never end

    def on_timeout(call: str) -> None:
        logger.error("%s() took longer than %g s; this is tried again", call, spec.timeout_s)
        end(RETRY_EXIT_CODE)

    no_more = threading.Event()
    threading.Thread(target=_wait_for_end, args=(no_more,), name="stdin", daemon=True).start()
    try:
        serve(spec, no_more, CallWatchdog(spec.timeout_s, on_timeout))
    except UserError as error:
        logger.error("%s", error)
        if spec.log:
            os.write(answer, redact(str(error), os.environ).encode())
        end(UserError.exit_code)
    except BaseException as error:  # also SystemExit of a library
        # A server that is away needs no traceback, at every attempt.
        trace = None if isinstance(error, OSError) else error
        logger.error("%s; this is tried again", _in_one_line(error), exc_info=trace)
        end(RETRY_EXIT_CODE)
    end(0)
    return 0


def _is_there(run_folder: Path) -> bool:
    """Return True for a folder of a run. Nothing is written to the mount point of one that is not
    mounted."""
    if bucket_of_run(run_folder):
        return True
    return any((run_folder / name).is_dir() for name in ("journal", "terms"))


def _open_log(spec: TrackerSpec) -> int:
    """Open the log, of which an older part is kept; return its descriptor."""
    if not spec.log or not _is_there(Path(spec.run_folder)):
        return os.dup(2)
    log = Path(spec.log)
    log.parent.mkdir(parents=True, exist_ok=True)
    if log.exists() and log.stat().st_size > MAX_LOG_BYTES:
        log.replace(log.with_name(f"{log.name}.old"))
    return os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)


def _start_logging(spec: TrackerSpec) -> None:
    """Log as other processes do into a file, and for a person to standard error."""
    if spec.log:
        process_log.start("tracker", sys.stderr)
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"{spec.tracker}: %(message)s"))
    logging.getLogger(process_log.ROOT).addHandler(handler)
    logging.getLogger(process_log.ROOT).setLevel(logging.INFO)


def _wait_for_end(no_more: threading.Event) -> None:
    while os.read(0, 4096):
        pass
    no_more.set()


CURSOR_FILE, LOCK_FILE = "cursor.json", "lock"
_VERSION = 1


@dataclass
class Cursor:
    """A tracker's position. `save` makes it durable."""

    path: Path
    key: str  # the run's key in other programs
    positions: dict[str, int] = field(default_factory=dict)  # segment -> bytes of it that were read
    curve: dict[str, Any] | None = None  # `Curve.to_json`

    @staticmethod
    def load(folder: Path) -> Cursor:
        """Return the stored cursor of a tracker's folder; a new one if there is none.

        Raises RunFolderError if the file is not a cursor."""
        path = folder / CURSOR_FILE
        try:
            value = parse_json(path.read_text("utf-8"))
        except FileNotFoundError:
            return Cursor(path, secrets.token_hex(8))
        except ValueError:
            raise _not_a_cursor(path) from None
        try:
            positions = {str(key): int(size) for key, size in value["positions"].items()}
            return Cursor(path, str(value["key"]), positions, dict(value["curve"]))
        except (KeyError, TypeError, ValueError, AttributeError):
            raise _not_a_cursor(path) from None

    def save(self, curve: Mapping[str, Any], positions: Mapping[str, int] | None = None) -> None:
        """Store what was delivered, and the positions if they are given."""
        self.curve = dict(curve)
        if positions is not None:
            self.positions = dict(positions)
        value = {"v": _VERSION, "key": self.key, "positions": self.positions, "curve": self.curve}
        temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(value, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path)


def _not_a_cursor(path: Path) -> RunFolderError:
    return RunFolderError(
        "this is not the position of a tracker",
        where=str(path),
        remedy="remove the file; the tracker then gets the entire run again",
    )


def lock_tracker(folder: Path) -> int | None:
    """Lock a tracker's folder until this process ends; None if another process has the lock."""
    descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError as error:  # a file system without locks
        logger.warning("%s cannot be locked (%s)", folder, error.strerror)
    return descriptor


if __name__ == "__main__":
    sys.exit(main())
