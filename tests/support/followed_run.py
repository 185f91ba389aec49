"""A run in a process of its own, which a test follows in its journal, and one in which a worker is
killed."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

import holdfast
from holdfast.events import (
    Event,
    GenerationStarted,
    Record,
    RunFinished,
    StepDone,
    WorkerLost,
    WorkerStarted,
)
from holdfast.wire.journal import follow_journal, read_journal
from holdfast.wire.store.run_store import FolderStore
from tests.support.commands import Outcome, apart, start

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


PLAIN = ("--set", "device=cpu", "--set", "cluster.threads_per_worker=1")


@dataclass(frozen=True)
class KilledRun:
    """events: the journal. pids: of the first generation, by rank. killed: the process that was
    killed. at: the newest step then. said: the command's output."""

    events: list[Event]
    pids: dict[int, int]
    killed: int
    at: int
    said: str


def run_undisturbed(script: Path, folder: Path, *arguments: str, workers: int = 1) -> None:
    apart(
        *("run", script, "--folder", folder, "--workers", str(workers), *PLAIN, *arguments),
        folder=folder.parent,
        deadline=DEADLINE,
    ).succeeds()


def run_killed(script: Path, folder: Path, *arguments: str, workers: int, at: int) -> KilledRun:
    """Run the script; kill a worker when step `at` is done."""
    command = ("run", script, "--folder", folder, "--workers", str(workers), *PLAIN, *arguments)
    return run_with_a_kill(folder, at, *command, current=folder.parent)


def run_with_a_kill(
    folder: Path, at: int, *command: str | Path, current: Path | None = None
) -> KilledRun:
    """Run a command that trains in `folder`; kill the worker of the highest rank when step `at` is
    done. The run ends well, and loses no other worker."""
    run = FollowedRun(folder, start(*command, folder=current))
    run.until(lambda r: isinstance(r.event, StepDone) and r.event.step >= at and bool(run.pids))
    pids = dict(run.pids)
    killed = pids[max(pids)]
    os.kill(killed, signal.SIGKILL)
    ended = run.end()
    assert ended.code == 0, ended.err
    events = [record.event for record in read_journal(FolderStore(folder))]
    lost = [(e.cause, e.pid) for e in events if isinstance(e, WorkerLost)]
    assert lost == [("SIGKILL", killed)]
    return KilledRun(events, pids, killed, at, ended.out + ended.err)


def assert_continued_in_process(found: KilledRun, steps: int) -> None:
    """The survivors continued in the same step: they hold their state, no step was done twice, and
    none of them was replaced."""
    following = next(
        e for e in found.events if isinstance(e, GenerationStarted) and e.reason == "worker_lost"
    )
    assert following.came_from is not None, "the survivors hold the state"
    kept = {found.pids[rank] for rank in following.came_from if rank is not None}
    assert kept == set(found.pids.values()) - {found.killed} != set()
    done = [e.step for e in found.events if isinstance(e, StepDone)]
    assert sorted(set(done)) == list(range(1, steps + 1))
    assert following.step >= found.at, "no step is done a second time"
    assert sum(isinstance(e, RunFinished) for e in found.events) == 1


def assert_same_bits(left: Path, right: Path, step: int) -> None:
    one, other = holdfast.open_checkpoint(left), holdfast.open_checkpoint(right)
    assert one.step == other.step == step
    assert list(one.names) == list(other.names)
    for name in one.names:
        assert one[name].numpy().tobytes() == other[name].numpy().tobytes(), name
