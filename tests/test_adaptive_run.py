"""A run that decides by itself how often to save: what it says, and what it learns from a kill."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

from holdfast.events import CheckpointCommitted, SaveInterval, StepDone, WorkerLost, WorkerStarted
from holdfast.wire.journal import follow, read
from holdfast.wire.runstore import FolderStore
from tests.cli.support import apart, start, within, write_run_file

SETTINGS = (
    "train.steps=160", "train.batch_size=6", "train.evaluate.every=0", "checkpoint.keep_last=60",
    "checkpoint.interval=adaptive", "checkpoint.min_seconds=0.05", "layout.workers=2",
    "checkpoint.node_mtbf_hours=0.01", "cluster.threads_per_worker=1",
)  # fmt: skip


def test_a_kill_is_remembered_over_the_restart_and_over_a_new_session(tmp_path: Path) -> None:
    path, folder = write_run_file(tmp_path), tmp_path / "run"
    assert within("data", "prepare", path).code == 0
    process = start("train", path, f"folder={folder}", *SETTINGS)
    done = threading.Event()
    collector = threading.Thread(target=lambda: (process.communicate(timeout=200), done.set()))
    collector.start()
    pids: dict[int, int] = {}
    decided: set[int] = set()  # generations that have said how often they save
    killed = left = False
    for batch in follow(FolderStore(folder), poll=0.05, stop=done):
        for record in batch:
            event = record.event
            if isinstance(event, WorkerStarted):
                pids[event.rank] = event.pid
            elif isinstance(event, SaveInterval):
                decided.add(record.generation)
            elif not isinstance(event, StepDone):
                continue
            elif event.step >= 20 and 1 in decided and not killed:
                killed = True
                os.kill(pids[1], signal.SIGKILL)
            elif record.generation == 2 and 2 in decided and not left:
                left = True
                process.terminate()
    collector.join(200)
    assert killed
    assert left
    assert apart("train", path, f"folder={folder}", *SETTINGS, deadline=200).code == 0

    records = read(FolderStore(folder))
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
    assert sum(isinstance(record.event, CheckpointCommitted) for record in records) > 3
