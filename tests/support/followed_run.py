"""A run in a process of its own, which a test follows in its journal."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from holdfast.events import Event, GenerationStarted, Record, StepDone, WorkerStarted
from holdfast.wire.journal import follow_journal, read_journal
from holdfast.wire.store.run_store import FolderStore
from tests.support.commands import Outcome

E = TypeVar("E", bound=Event)
DEADLINE = 240.0  # seconds for a run on a busy machine


class FollowedRun:
    """process: a command that trains in `folder`. pids: of its workers by rank, once `records` has
    come to them."""

    def __init__(self, folder: Path, process: subprocess.Popen[str]) -> None:
        self.folder, self.process = folder, process
        self.pids: dict[int, int] = {}
        self.output: list[str] = []
        self._stop = threading.Event()
        self._collector = threading.Thread(target=self._collect, daemon=True)
        self._collector.start()
        self._rest = self.records()

    def _collect(self) -> None:
        self.output += self.process.communicate()
        self._stop.set()

    def records(self) -> Iterator[Record]:
        """All records of the folder, until the command has ended."""
        store = FolderStore(self.folder)
        for records in follow_journal(store, poll_interval_s=0.02, stop=self._stop):
            for record in records:
                event = record.event
                if isinstance(event, GenerationStarted) and event.came_from is not None:
                    came_from = enumerate(event.came_from)
                    self.pids = {rank: self.pids[was] for rank, was in came_from if was is not None}
                if isinstance(event, WorkerStarted):
                    self.pids[event.rank] = event.pid
                yield record

    def until(self, seen: Callable[[Record], bool]) -> Record:
        """Return the next record of which this is true."""
        over = threading.Timer(DEADLINE, self._stop.set)
        over.start()
        try:
            for record in self._rest:
                if seen(record):
                    return record
        finally:
            over.cancel()
        pytest.fail(f"it ended before that: {self.output}")

    def until_step(self, step: int, generation: int = 1) -> None:
        """Until at least this step is done, in this generation or a later one."""
        self.until(
            lambda r: (
                isinstance(r.event, StepDone)
                and r.generation >= generation
                and r.event.step >= step
            )
        )

    def events(self, kind: type[E], generation: int | None = None) -> list[E]:
        """The events of a kind that the journal has now."""
        return [
            record.event
            for record in read_journal(FolderStore(self.folder))
            if isinstance(record.event, kind) and generation in (None, record.generation)
        ]

    def finish(self) -> Outcome:
        """As `end`; the command must have succeeded."""
        return self.end().succeeds()

    def end(self) -> Outcome:
        """Wait until the command has ended."""
        self._collector.join(DEADLINE)
        assert not self._collector.is_alive(), "it is still there"
        return Outcome(self.process.returncode, *self.output)
