"""Tier 1 from outside: a node's memory is lost, and the run resumes from another machine's.

The run saves durably only at its end and keeps a snapshot of every step in memory. Its mover is
killed, and all of that memory with it. So are its workers. Without the staging machine it would
begin again at step 0.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from holdfast.events import (
    CheckpointRestored,
    GenerationStarted,
    RunFinished,
    SnapshotKept,
)
from holdfast.wire.journal import read_journal
from holdfast.wire.store.run_store import FolderStore
from tests.support.checkpoints import newest_tensors
from tests.support.commands import apart, peer_settings, secret_file, start, write_run_file
from tests.support.followed_run import FollowedRun
from tests.support.processes import children_of

STEPS = 60
KILL_AT = 20


@pytest.mark.slow
def test_a_run_whose_mover_is_killed_goes_on_from_the_staging_machine(
    tmp_path: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_SECRET_FILE", str(secret_file(tmp_path)))
    path = write_run_file(tmp_path)
    settings = (
        f"train.steps={STEPS}",
        "train.evaluate.every=0",
        "cluster.threads_per_worker=1",
        "cluster.recovery=restart",
        *peer_settings(stage),
    )
    alone, lost = tmp_path / "alone", tmp_path / "lost"
    apart(
        "train",
        path,
        f"folder={alone}",
        *settings,
        "layout.workers=1",
        "checkpoint.peers=[]",
        deadline=200,
    ).succeeds()

    process = start("train", path, f"folder={lost}", *settings, "layout.workers=2")
    run = FollowedRun(lost, process)
    run.until(lambda r: isinstance(r.event, SnapshotKept) and r.event.step >= KILL_AT)
    (mover,) = children_of(process.pid, "holdfast.checkpoint.mover.main", recursive=True)
    mover.kill()  # the agent ends the other worker
    os.kill(run.pids[0], signal.SIGKILL)
    ended = run.end()
    assert ended.code == 0, ended.err

    records = read_journal(FolderStore(lost))
    begun = [r.event for r in records if isinstance(r.event, GenerationStarted)]
    assert len(begun) == 2
    assert begun[1].reason == "worker_lost"
    assert begun[1].step >= KILL_AT
    restored = [r.event for r in records if isinstance(r.event, CheckpointRestored)]
    assert restored
    assert all(event.sources.get("peer stage", 0) > 0 for event in restored)
    assert sum(isinstance(r.event, RunFinished) for r in records) == 1
    assert newest_tensors(alone, STEPS) == newest_tensors(lost, STEPS)
