"""A run that decides by itself how often to save: its reports, and its reaction to a kill."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.events import (
    CheckpointCommitted,
    Record,
    SaveInterval,
    StepDone,
    WorkerLost,
    WorkerStarted,
)
from holdfast.wire.journal import read_journal
from holdfast.wire.store.run_store import FolderStore
from tests.support.commands import start, within, write_run_file
from tests.support.followed_run import FollowedRun

SETTINGS = (
    "train.steps=100000",
    "train.batch_size=6",
    "train.evaluate.every=0",
    "checkpoint.keep_last=60",
    "checkpoint.interval=adaptive",
    "checkpoint.min_seconds=0.05",
    "layout.workers=2",
    "checkpoint.node_mtbf_hours=0.01",
    "cluster.threads_per_worker=1",
)


@pytest.mark.slow
def test_a_kill_is_remembered_over_the_restart_and_over_a_new_session(tmp_path: Path) -> None:
    path, folder = write_run_file(tmp_path), tmp_path / "run"
    assert within("data", "prepare", path).code == 0
    pids: dict[int, int] = {}
    decided: set[int] = set()  # generations that have said how often they save
    killed = threading.Event()

    def first(record: Record) -> bool:
        event = record.event
        if isinstance(event, WorkerStarted):
            pids[event.rank] = event.pid
        elif isinstance(event, SaveInterval):
            decided.add(record.generation)
        elif isinstance(event, StepDone) and event.step >= 20 and 1 in decided:
            if not killed.is_set():
                killed.set()
                os.kill(pids[1], signal.SIGKILL)
            return record.generation == 2 and 2 in decided
        return False

    saved: list[int] = []  # steps saved by time: unrequested, and not the end of the run

    def second(record: Record) -> bool:
        if record.generation == 3 and isinstance(record.event, CheckpointCommitted):
            saved.append(record.event.step)
        return len(saved) == 2

    for until in (first, second):
        assert _until(path, folder, until) == 0

    records = read_journal(FolderStore(folder))
    assert sum(isinstance(record.event, WorkerLost) for record in records) == 1
    told: dict[int, list[str]] = {}
    for record in records:
        if isinstance(record.event, SaveInterval):
            assert record.writer == "rank0"
            assert record.event.tier == 2
            assert record.event.seconds >= 0.05
            told.setdefault(record.generation, []).append(record.event.reason)
    assert "(no failure in " in told[1][0]
    assert all("(1 failure in " in reason for number in (2, 3) for reason in told[number])
    assert len(saved) >= 2


def _until(path: Path, folder: Path, leaves: Callable[[Record], bool]) -> int:
    """Run a session and ask it to leave once `leaves` says so of a record; return its exit code."""
    process = start("train", path, f"folder={folder}", *SETTINGS)
    run = FollowedRun(folder, process)
    run.until(leaves)
    process.terminate()
    return run.end().code
