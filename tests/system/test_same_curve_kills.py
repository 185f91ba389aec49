"""Promise 1 and 2 from outside: a run that is killed again and again ends like an undisturbed one,
to the bit. It has used every sample once.

One worker trains undisturbed. Another run of the same file starts with three workers. A worker
drawn at random gets SIGKILL at each of several seeded points. Then the run is asked to leave. It
continues with two workers, one of them is killed, and it ends. Weights and both moments of AdamW
are compared byte by byte, and the ledger is audited.
"""

from __future__ import annotations

import os
import random
import signal
from itertools import islice
from pathlib import Path

import pytest

from holdfast.events import (
    Event,
    GenerationStarted,
    RunFinished,
    RunStopped,
    StepDone,
    WorkerLost,
    WorkerStarted,
)
from holdfast.wire.journal import read_journal
from holdfast.wire.store.run_store import FolderStore
from tests.support.checkpoints import newest_tensors
from tests.support.commands import Outcome, apart, start, within
from tests.support.followed_run import FollowedRun

SETTINGS = (
    "train.batch_size=6",
    "train.evaluate.every=0",
    "train.optimizer.clip_norm=0.05",
    "checkpoint.every_steps=5",
    "cluster.threads_per_worker=1",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kills", "steps", "precision"), [(2, 100, "fp32"), (10, 260, "fp32"), (4, 130, "fp16")]
)
def test_kills_and_another_number_of_workers_change_no_bit(
    run_file: Path, tmp_path: Path, kills: int, steps: int, precision: str
) -> None:
    settings = (f"train.steps={steps}", f"train.precision={precision}", *SETTINGS)
    leave_at = 20 + 12 * kills
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    apart(
        "train", run_file, f"folder={alone}", *settings, "layout.workers=1", deadline=240
    ).succeeds()

    chooser = random.Random(20260511)
    points = [10 + 12 * i + chooser.randrange(8) for i in range(kills)]
    first = _disturbed(run_file, killed, settings, 3, points, chooser, leave_at)
    assert first.code == 0, first.err
    second = _disturbed(run_file, killed, settings, 2, [leave_at + 30], chooser)
    assert second.code == 0, second.err

    events = [record.event for record in read_journal(FolderStore(killed))]
    losses = [event for event in events if isinstance(event, WorkerLost)]
    assert [loss.cause for loss in losses] == ["SIGKILL"] * (kills + 1)
    assert sum(isinstance(event, RunStopped) for event in events) == 1
    assert sum(isinstance(event, RunFinished) for event in events) == 1
    assert _clipped_in_every_step(events)
    assert newest_tensors(alone, steps) == newest_tensors(killed, steps)

    audit = within("data", "audit", killed).succeeds()
    assert f"{6 * steps:,} samples in {steps} steps: none missing, none twice" in audit.out


def _disturbed(
    run_file: Path,
    folder: Path,
    settings: tuple[str, ...],
    workers: int,
    points: list[int],
    chooser: random.Random,
    leave_at: int | None = None,
) -> Outcome:
    """Train in `folder`; SIGKILL a worker when the journal shows each of `points`; SIGTERM the
    agent at `leave_at`."""
    before = len(read_journal(FolderStore(folder))) if folder.exists() else 0
    process = start("train", run_file, f"folder={folder}", *settings, f"layout.workers={workers}")
    run = FollowedRun(folder, process)
    due, pids, killed = list(points), dict[int, int](), 0
    for record in islice(run.records(), before, None):
        event = record.event
        if isinstance(event, GenerationStarted):  # who stays has another rank
            came_from = enumerate(event.came_from or ())
            pids = {rank: pids[was] for rank, was in came_from if was is not None}
        if isinstance(event, WorkerStarted):
            pids[event.rank] = event.pid
        # Late reports of a generation that was already hit do not count.
        if not isinstance(event, StepDone) or record.generation <= killed:
            continue
        if due and event.step >= due[0] and pids:  # their ids may be reported a moment later
            due.pop(0)
            killed = record.generation
            os.kill(pids[chooser.choice(sorted(pids))], signal.SIGKILL)
        elif not due and leave_at is not None and event.step >= leave_at:
            leave_at = None
            process.send_signal(signal.SIGTERM)
    ended = run.end()
    assert not due, f"the run ended before the points {due}: {ended.err}"
    return ended


def _clipped_in_every_step(events: list[Event]) -> bool:
    done = [event for event in events if isinstance(event, StepDone)]
    return all(event.skipped_at or event.grad_norm > 0.05 for event in done)
