"""Tier 0 from outside: a killed worker's state comes back from its node's memory.

The run saves durably only at its end, and keeps a snapshot of every step in the mover's memory.
Workers get SIGKILL. Each time all are ended, and the next generation resumes from the newest
snapshot. The end is that of an undisturbed run, to the bit.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from holdfast.events import (
    CheckpointCaptured,
    CheckpointCommitted,
    CheckpointFailed,
    CheckpointRestored,
    CheckpointSkipped,
    GenerationStarted,
    RestorePointFound,
    RunFinished,
    SnapshotComplete,
)
from holdfast.wire.journal import read_journal
from holdfast.wire.store.run_store import FolderStore
from tests.support.checkpoints import newest_tensors
from tests.support.commands import apart, start, within
from tests.support.followed_run import FollowedRun

STEPS = 120
KILLS = (15, 35)
SETTINGS = (
    f"train.steps={STEPS}",
    "train.batch_size=6",
    "train.evaluate.every=0",
    "checkpoint.every_steps=1000",
    "checkpoint.memory_every_steps=1",
    "cluster.threads_per_worker=1",
    "cluster.recovery=restart",
    "layout.workers=2",
)


@pytest.mark.slow
def test_killed_workers_go_on_from_memory_and_end_in_the_same_bits(run_file: Path) -> None:
    alone, killed = run_file.parent / "alone", run_file.parent / "killed"
    apart("train", run_file, f"folder={alone}", *SETTINGS, deadline=240).succeeds()
    run, held = _killed(run_file, killed)
    run.finish()

    assert len(run.events(RunFinished)) == 1
    begun = run.events(GenerationStarted)
    assert [event.reason for event in begun] == ["start", "worker_lost", "worker_lost"]
    for event, step in zip(begun[1:], held, strict=True):
        assert event.step >= step, "nothing that was complete in memory is lost"
    assert [event.durable for event in run.events(RestorePointFound)] == [False, False]
    restored = run.events(CheckpointRestored)
    assert len(restored) == 4
    for event in restored:
        assert set(event.sources) == {"memory"}, "no byte came from the disk"
        assert {"open", "plan", "read", "verify", "copy"} <= set(event.phases)
    assert STEPS in {event.step for event in run.events(CheckpointCommitted)}

    assert newest_tensors(alone, STEPS) == newest_tensors(killed, STEPS)
    audit = within("data", "audit", killed).succeeds()
    assert f"{6 * STEPS:,} samples in {STEPS} steps: none missing, none twice" in audit.out


@pytest.mark.slow
def test_beside_a_snapshot_of_every_step_the_durable_saves_come_first(run_file: Path) -> None:
    """Steps take milliseconds, so most durable saves meet slots that are in use."""
    folder = run_file.parent / "every-step"
    apart(
        "train",
        run_file,
        f"folder={folder}",
        *SETTINGS,
        "checkpoint.every_steps=5",
        "checkpoint.keep_last=100",
        deadline=240,
    ).succeeds()
    events = [record.event for record in read_journal(FolderStore(folder))]
    assert not any(isinstance(event, CheckpointFailed) for event in events)
    captured = {
        event.step: event.durable
        for event in events
        if isinstance(event, CheckpointCaptured) and event.rank == 0
    }
    assert len(captured) > STEPS // 5
    skipped = {event.step for event in events if isinstance(event, CheckpointSkipped)}
    for due in range(5, STEPS, 5):
        found = min(step for step in captured if step >= due)
        assert captured[found], f"step {due} was owed, and step {found} stayed in memory"
        assert found == due or due in skipped or min(skipped, default=STEPS) < due
    durable = {step for step, is_durable in captured.items() if is_durable}
    committed = {event.step for event in events if isinstance(event, CheckpointCommitted)}
    assert STEPS in committed <= durable
    # Saves under way with the last one may be committed when no agent listens any more.
    assert set(sorted(durable)[:-3]) <= committed


def _killed(run_file: Path, folder: Path) -> tuple[FollowedRun, list[int]]:
    """Train in `folder`, and SIGKILL a worker when the journal shows that memory holds each step
    of KILLS or a later one; those steps."""
    process = start("train", run_file, f"folder={folder}", *SETTINGS)
    run, held = FollowedRun(folder, process), list[int]()
    for number, due in enumerate(KILLS, 1):
        # Late reports of a generation that was already hit do not count.
        record = run.until(
            lambda r, number=number, due=due: (
                isinstance(r.event, SnapshotComplete)
                and r.event.step >= due
                and r.generation >= number
            )
        )
        held.append(record.event.step)
        os.kill(run.pids[number % 2], signal.SIGKILL)
    return run, held
