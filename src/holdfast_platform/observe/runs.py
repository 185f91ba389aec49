"""The registry of runs: one row a run in an SQLite file, made from the journals of run folders.

It keeps nothing that the runs do not have. Any row, or the file, may be lost, and is read again. It
remembers *places*: run folders, folders of runs, and buckets. Each look reads the journals that
have grown since, so a new run in a known folder shows by itself. Several processes may look at a
time: a row is replaced only by one whose journal was looked at later.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from holdfast.doctor.state import is_at_work
from holdfast.errors import HoldfastError, RunFolderError, UserError
from holdfast.events import RunStarted
from holdfast.launch.run.holder import HolderWatch
from holdfast.launch.run.runs import RESOLVED_FILE, Run, open_run
from holdfast.policy.spending import meter_of
from holdfast.report.history.progress import RunProgress
from holdfast.report.ledger.ordering import order_records
from holdfast.wire.journal import read_journal
from holdfast.wire.store.run_location import make_local_folder
from holdfast.wire.store.run_store import JOURNAL_PREFIX, segment_sizes

VERSION = 1
_BUSY_S = 30.0
_DEPTH = 3  # folders below a place in which runs are looked for
_LIVE = "running"
_MISSING = "missing"
STATES = (_LIVE, "interrupted", "finished", "stopped", "paused", "failed", "not begun", _MISSING)


class RegistryFileError(UserError):
    """The file is no registry of runs, or cannot be written."""


@dataclass(frozen=True)
class RunEntry:
    """One run. usd: of the nodes whose price is known. unpriced_hours: of all other nodes.

    state: running, interrupted, finished, stopped, failed, "not begun", or missing (its folder).
    began, seen: seconds since 1970. began: 0 before a first session.
    """

    place: str
    name: str = ""
    state: str = ""
    step: int = 0
    steps: int = 0
    began: float = 0.0
    sessions: int = 0
    nodes: int = 0  # that ever took part
    node_hours: float = 0.0
    usd: float = 0.0
    unpriced_hours: float = 0.0
    tags: Mapping[str, str] = field(default_factory=dict)
    journal_bytes: int = -1
    seen: float = 0.0
    error: str = ""  # why it could not be read

    def has(self, tags: Mapping[str, str]) -> bool:
        return all(self.tags.get(key) == value for key, value in tags.items())

    @property
    def cost(self) -> str:
        """Dollars for people; a "+" stands for hours without a price."""
        if not self.node_hours or self.unpriced_hours >= self.node_hours:
            return ""
        return f"{self.usd:,.2f}{' +' if self.unpriced_hours else ''}"


CHECK_UP_MARK = "check-up"
"""A file next to the run folder of a check-up's copy, which is no run to list or to pay for."""
_COLUMNS = tuple(f.name for f in fields(RunEntry))


def default_registry() -> Path:
    """$XDG_STATE_HOME/holdfast/runs.sqlite, or below ~/.local/state."""
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(base) / "holdfast" / "runs.sqlite"


def read_run(place: str, seen: float, known: RunEntry | None = None) -> RunEntry:
    """Read a run's journal, unless it is as long as that of `known`. seen: time of this look."""
    try:
        run = open_run(_folder(place))
        size = sum(segment_sizes(run.store, JOURNAL_PREFIX).values())
        if known is None or known.journal_bytes != size or known.error:
            known = _entry(run, place, size)
        state = known.state
        if state in (_LIVE, "interrupted", _MISSING):
            lives = is_at_work(run.folder, HolderWatch(run.folder, lambda line: None))
            state = _LIVE if lives else "interrupted"
        return RunEntry(**{**_row(known), "state": state, "seen": seen, "error": ""})
    except HoldfastError as error:
        kept = _row(known or RunEntry(place))
        state = kept["state"] if _is_there(place) else _MISSING
        return RunEntry(**{**kept, "seen": seen, "error": str(error), "state": state})


def _entry(run: Run, place: str, size: int) -> RunEntry:
    records = read_journal(run.store)
    progress = RunProgress(run.config.train.steps)
    for record in order_records(records):
        progress.observe(record)
    starts = [(r.generation, r.time, r.event) for r in records if isinstance(r.event, RunStarted)]
    meter = meter_of(records)
    spent = meter.spent()
    tags = dict(run.config.tags)
    if starts:
        tags = dict(max(starts, key=lambda start: start[:2])[2].tags)
    return RunEntry(
        place,
        run.config.name,
        (progress.state if progress.is_over else _LIVE) if starts else "not begun",
        progress.step,
        progress.total_steps,
        min((at for _, at, _ in starts), default=0.0),
        len(starts),
        len({stay.node for stay in meter.stays}),
        round(spent.node_hours, 6),
        round(spent.usd, 6),
        round(spent.unpriced_hours, 6),
        tags,
        size,
    )


def _row(entry: RunEntry) -> dict[str, Any]:
    return {name: getattr(entry, name) for name in _COLUMNS}


def _folder(place: str) -> Path:
    return make_local_folder(place) if "://" in place else Path(place)


def _is_there(place: str) -> bool:
    return "://" in place or (Path(place) / RESOLVED_FILE).exists()


def runs_below(place: str) -> Iterator[str]:
    """Yield the run folders in a place: itself, or those below it but the copies of check-ups."""
    if _is_there(place):
        yield place
        return
    for depth in range(1, _DEPTH + 1):
        for file in sorted(Path(place).glob("/".join(["*"] * depth + [RESOLVED_FILE]))):
            if not (file.parent.parent / CHECK_UP_MARK).exists():
                yield str(file.parent)


class RunsRegistry:
    """The file. Each method opens it, so an object may be used in several threads."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self.path, _BUSY_S, isolation_level=None)) as file:
                file.execute("BEGIN IMMEDIATE")
                self._migrate(file)
                yield file
                file.execute("COMMIT")
        except (sqlite3.Error, OSError) as error:
            raise RegistryFileError(
                f"this is no registry of runs, or cannot be written ({error})",
                where=str(self.path),
                remedy="remove it, and name the folders again: holdfast runs add FOLDER; or name "
                "another file with --registry",
            ) from None

    def _migrate(self, file: sqlite3.Connection) -> None:
        version = file.execute("PRAGMA user_version").fetchone()[0]
        if version > VERSION:
            raise RegistryFileError(
                f"a newer version of Holdfast wrote it (format {version})",
                where=str(self.path),
                remedy="install that version, or name another file with --registry",
            )
        if version < VERSION:
            columns = ", ".join(c for c in _COLUMNS if c != "place")
            file.execute("CREATE TABLE places (place TEXT PRIMARY KEY)")
            file.execute(f"CREATE TABLE runs (place TEXT PRIMARY KEY, {columns})")
            file.execute(f"PRAGMA user_version = {VERSION}")

    def add(self, place: str) -> list[str]:
        """Remember a place. Return the runs in it. Raises RunFolderError if there is none."""
        place = place if "://" in place else os.path.abspath(place)
        found = list(runs_below(place))
        if not found:
            raise RunFolderError(
                "there is no run here, nor in the folders below it",
                where=place,
                remedy="name a run folder, a folder of runs, or the address of a bucket",
            )
        with self._open() as file:
            file.execute("INSERT OR IGNORE INTO places VALUES (?)", (place,))
        self.refresh()
        return found

    def forget(self, place: str) -> bool:
        """Forget a place and its runs. Return whether it was known."""
        place = place if "://" in place else os.path.abspath(place)
        with self._open() as file:
            known = file.execute("DELETE FROM places WHERE place = ?", (place,)).rowcount
            below = f"{place}/"
            gone = file.execute(
                "DELETE FROM runs WHERE place = ? OR substr(place, 1, ?) = ?",
                (place, len(below), below),
            ).rowcount
            places = [row[0] for row in file.execute("SELECT place FROM places")]
        above = [each for each in places if place.startswith(f"{each}/")]
        if above:  # the next look would find it again
            raise RunFolderError(
                f"it lies in {above[0]}, which is known", where=place, remedy="forget that one"
            )
        return known + gone > 0

    def places(self) -> list[str]:
        with self._open() as file:
            return [row[0] for row in file.execute("SELECT place FROM places ORDER BY place")]

    def entries(self) -> list[RunEntry]:
        """Return the rows as they are, the newest run first."""
        with self._open() as file:
            rows = file.execute(
                f"SELECT {', '.join(_COLUMNS)} FROM runs ORDER BY began DESC, place"
            ).fetchall()
        return [
            RunEntry(**{**dict(zip(_COLUMNS, row, strict=True)), "tags": json.loads(row[11])})
            for row in rows
        ]

    def refresh(self, *, anew: bool = False) -> list[RunEntry]:
        """Read what has changed, or with `anew` all of it, and return the rows."""
        known = {} if anew else {entry.place: entry for entry in self.entries()}
        found = dict.fromkeys(run for place in self.places() for run in runs_below(place))
        for place in (*found, *(each for each in known if each not in found)):
            self._write(read_run(place, time.time(), known.get(place)))
        return self.entries()

    def _write(self, entry: RunEntry) -> None:
        row = asdict(entry) | {"tags": json.dumps(dict(entry.tags), sort_keys=True)}
        updates = ", ".join(f"{c} = excluded.{c}" for c in _COLUMNS if c != "place")
        with self._open() as file:
            file.execute(
                f"INSERT INTO runs ({', '.join(_COLUMNS)}) VALUES "
                f"({', '.join('?' * len(_COLUMNS))}) ON CONFLICT (place) DO UPDATE SET {updates} "
                "WHERE excluded.seen >= runs.seen",
                [row[name] for name in _COLUMNS],
            )
