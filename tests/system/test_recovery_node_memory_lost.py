"""Tier 1 from outside: a node's memory is lost, and the run resumes from another machine's.

The run saves durably only at its end and keeps a snapshot of every step in memory. Its mover is
killed, and all of that memory with it. So are its workers. Without the staging machine it would
begin again at step 0.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.restore.catalog import list_commits
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.core.sharding.boxes import whole_box
from holdfast.events import (
    CheckpointRestored,
    GenerationStarted,
    RunFinished,
    SnapshotKept,
    WorkerStarted,
)
from holdfast.wire.journal import follow_journal, read_journal
from holdfast.wire.store.run_store import FolderStore
from tests.support.commands import apart, secret_file, staging, start, write_run_file
from tests.support.processes import children_of

STEPS = 60
KILL_AT = 20


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[str]:
    with staging(tmp_path) as address:
        yield address


@pytest.mark.slow
def test_a_run_whose_mover_is_killed_goes_on_from_the_staging_machine(
    tmp_path: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_SECRET_FILE", str(secret_file(tmp_path)))
    path = write_run_file(tmp_path)
    text = path.read_text().replace(
        "checkpoint: {every_steps: 3}\n",
        (
            "checkpoint:\n  every_steps: 0\n  memory_every_steps: 1\n  slots: 3\n"
            f"  peers: [{{name: stage, address: '{stage}', stable: true}}]\n"
        ),
    )
    path.write_text(text)
    settings = (
        f"train.steps={STEPS}",
        "train.evaluate.every=0",
        "cluster.threads_per_worker=1",
        "cluster.recovery=restart",
    )
    alone, lost = tmp_path / "alone", tmp_path / "lost"
    undisturbed = apart(
        "train",
        path,
        f"folder={alone}",
        *settings,
        "layout.workers=1",
        "checkpoint.peers=[]",
        deadline=200,
    )
    assert undisturbed.code == 0, undisturbed.err

    process = start("train", path, f"folder={lost}", *settings, "layout.workers=2")
    output: list[str] = []
    collector = threading.Thread(target=lambda: output.extend(process.communicate(timeout=200)))
    collector.start()
    _kill_mover_and_worker(process.pid, lost)
    collector.join(200)
    assert process.wait(120) == 0, output

    records = read_journal(FolderStore(lost))
    begun = [r.event for r in records if isinstance(r.event, GenerationStarted)]
    assert len(begun) == 2
    assert begun[1].reason == "worker_lost"
    assert begun[1].step >= KILL_AT
    restored = [r.event for r in records if isinstance(r.event, CheckpointRestored)]
    assert restored
    assert all(event.sources.get("peer stage", 0) > 0 for event in restored)
    assert sum(isinstance(r.event, RunFinished) for r in records) == 1
    _same_state(alone, lost)


def _kill_mover_and_worker(agent: int, folder: Path) -> None:
    """SIGKILL, once the staging machine holds a step from KILL_AT on. The agent ends the other
    worker."""
    end = threading.Event()
    deadline = threading.Timer(120, end.set)
    deadline.start()
    workers: list[int] = []
    for records in follow_journal(FolderStore(folder), poll_interval_s=0.05, stop=end):
        workers += [r.event.pid for r in records if isinstance(r.event, WorkerStarted)]
        if any(isinstance(r.event, SnapshotKept) and r.event.step >= KILL_AT for r in records):
            (mover,) = children_of(agent, "holdfast.checkpoint.mover.main", recursive=True)
            mover.kill()
            os.kill(workers[0], signal.SIGKILL)
            break
    else:
        pytest.fail("no snapshot reached the staging machine")
    deadline.cancel()


def _same_state(one: Path, other: Path) -> None:
    """The newest checkpoints of two runs hold the same bytes."""
    found: list[Any] = []
    for folder in (one, other):
        store = FolderStore(folder)
        found.append(Checkpoint.open(store, list_commits(store)[0]))
    assert found[0].step == found[1].step == STEPS
    for spec in found[0].tensors:
        box = whole_box(spec.name, spec.shape)
        held = [bytearray(spec.nbytes) for _ in found]
        for checkpoint, out in zip(found, held, strict=True):
            checkpoint.read(box, memoryview(out))
        assert held[0] == held[1], spec.name
