"""A run that learns of a deadline, from outside: its decision, and the start of the next run.

Nothing is saved by steps or by the clock: what is there afterwards was saved because of the notice.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from holdfast.events import (
    CheckpointCommitted,
    CheckpointRestored,
    EmergencyPlanned,
    Event,
    GenerationStarted,
    NoticeReceived,
    RunStopped,
    SnapshotKept,
    StepDone,
)
from holdfast.wire.journal import JournalWriter, read_journal
from holdfast.wire.store.run_store import FolderStore
from tests.support.commands import (
    apart,
    peer_settings,
    secret_file,
    start,
    within,
    write_run_file,
)
from tests.support.followed_run import FollowedRun

SETTINGS = (
    "train.steps=100000",
    "train.evaluate.every=0",
    "checkpoint.every_steps=0",
    "cluster.threads_per_worker=1",
    "layout.workers=1",
)


class Trainer(FollowedRun):
    """A run of these settings."""

    def __init__(self, *arguments: str | Path, folder: Path) -> None:
        super().__init__(folder, start("train", *arguments, f"folder={folder}", *SETTINGS))


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = write_run_file(tmp_path)
    assert within("data", "prepare", path).code == 0
    return path


def _events(folder: Path, generation: int) -> list[Event]:
    return [r.event for r in read_journal(FolderStore(folder)) if r.generation == generation]


Kind = TypeVar("Kind", bound=Event)


def _of(events: list[Event], kind: type[Kind]) -> list[Kind]:
    return [event for event in events if isinstance(event, kind)]


def _last_step(events: list[Event]) -> int:
    return max(event.step for event in _of(events, StepDone))


def test_what_the_disk_will_have_in_time_is_saved_and_a_restart_begins_there(
    run_file: Path, tmp_path: Path
) -> None:
    """First a notice to a run that continues, then SIGTERM with the kill a minute later. It goes to
    every process of the run, as systemd sends it, and a scheduler that preempts a job."""
    folder = tmp_path / "run"
    trainer = Trainer(run_file, "cluster.grace_seconds=60", folder=folder)
    trainer.until(lambda r: isinstance(r.event, StepDone) and r.event.step >= 3)
    told = apart("notice", folder, "--seconds", "90", "--json").succeeds()
    assert json.loads(told.out)["tiers"] == [2]
    saved = trainer.until(lambda r: isinstance(r.event, CheckpointCommitted))
    trainer.until(lambda r: isinstance(r.event, StepDone) and r.event.step > saved.event.step)
    agent = psutil.Process(trainer.process.pid)
    for process in (*agent.children(recursive=True), agent):
        process.send_signal(signal.SIGTERM)
    ended = trainer.end()
    assert ended.code == 0, ended.err

    events = _events(folder, 1)
    heard = _of(events, NoticeReceived)
    assert [(n.seconds, n.leave, n.source) for n in heard] == [
        (90.0, False, "notice"),
        (60.0, True, "SIGTERM"),
    ]
    plans = _of(events, EmergencyPlanned)
    assert [plan.tiers for plan in plans] == [[2], [2]]
    assert all("into tier 2 by" in plan.reason and plan.bytes > 0 for plan in plans)
    committed = [event.step for event in _of(events, CheckpointCommitted)]
    assert len(committed) == 2, "the first notice is passed on once"
    assert committed[-1] == _last_step(events)
    assert _of(events, RunStopped)[0].step == committed[-1]

    again = Trainer(run_file, folder=folder)
    begun = again.until(lambda r: r.generation == 2 and isinstance(r.event, GenerationStarted))
    assert begun.event.step == committed[-1]
    again.process.kill()
    again.end()
    refused = apart("notice", folder, "--seconds", "30")
    refused.refuses("nobody is training here")


def _pretend_a_slow_disk(folder: Path) -> None:
    """As if every save into the run store had taken hours: what the next session learns from."""
    writer = JournalWriter(FolderStore(folder), "slow-disk", 1, is_new_generation=True)
    known = _of(_events(folder, 1), CheckpointCommitted)[-1]
    for _ in range(9):
        writer.emit(CheckpointCommitted(known.key, known.bytes, 1e4, step=known.step))
    writer.flush(sync=True)


@pytest.mark.slow
def test_where_only_a_peer_would_have_it_in_time_a_peer_gets_it(
    run_file: Path, tmp_path: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_SECRET_FILE", str(secret_file(tmp_path)))
    settings = peer_settings(stage, is_durable=True)
    folder = tmp_path / "run"
    first = Trainer(run_file, *settings, folder=folder)
    first.until(lambda r: isinstance(r.event, StepDone) and r.event.step >= 3)
    first.process.send_signal(signal.SIGTERM)
    assert first.end().code == 0
    _pretend_a_slow_disk(folder)

    second = Trainer(run_file, *settings, "cluster.grace_seconds=600", folder=folder)
    second.until(lambda r: r.generation == 2 and isinstance(r.event, StepDone))
    second.process.send_signal(signal.SIGTERM)
    ended = second.end()
    assert ended.code == 0, ended.err
    events = _events(folder, 2)
    [plan] = _of(events, EmergencyPlanned)
    assert plan.tiers == [1]
    assert "tier 2 would need" in plan.reason
    last = _last_step(events)
    assert [event.step for event in _of(events, SnapshotKept)] == [last]
    assert _of(events, CheckpointCommitted) == []
    assert _of(events, RunStopped)[0].step == last

    again = Trainer(run_file, *settings, folder=folder)
    begun = again.until(lambda r: r.generation == 3 and isinstance(r.event, CheckpointRestored))
    again.process.kill()
    again.end()
    assert begun.event.step == last
    assert isinstance(begun.event, CheckpointRestored)
    assert begun.event.sources.get("peer stage", 0) > 0
