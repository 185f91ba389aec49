"""A run that learns of a deadline, from outside: its decision, and the start of the next run.

Nothing is saved by steps or by the clock: what is there afterwards was saved because of the notice.
"""

from __future__ import annotations

import json
import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
import pytest

from holdfast.events import (
    CheckpointCommitted,
    CheckpointRestored,
    EmergencyPlanned,
    GenerationStarted,
    NoticeReceived,
    RunStopped,
    SnapshotKept,
    StepDone,
)
from holdfast.wire.journal import JournalWriter
from holdfast.wire.store.run_store import FolderStore
from tests.support.commands import peer_settings, secret_file, start, within, write_run_file
from tests.support.followed_run import FollowedRun
from tests.support.metadata_service import metadata_service

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


def test_what_the_disk_will_have_in_time_is_saved_and_a_restart_begins_there(
    run_file: Path, tmp_path: Path
) -> None:
    """First a notice to a run that continues, then SIGTERM with the kill a minute later. It goes to
    every process of the run, as systemd sends it, and a scheduler that preempts a job."""
    folder = tmp_path / "run"
    trainer = Trainer(run_file, "cluster.grace_seconds=60", folder=folder)
    trainer.until_step(3)
    told = within("notice", folder, "--seconds", "90", "--json").succeeds()
    assert json.loads(told.out)["tiers"] == [2]
    saved = trainer.until(lambda r: isinstance(r.event, CheckpointCommitted))
    trainer.until_step(saved.event.step + 1)
    agent = psutil.Process(trainer.process.pid)
    for process in (*agent.children(recursive=True), agent):
        process.send_signal(signal.SIGTERM)
    trainer.finish()

    heard = trainer.events(NoticeReceived)
    assert [(n.seconds, n.leave, n.source) for n in heard] == [
        (90.0, False, "notice"),
        (60.0, True, "SIGTERM"),
    ]
    plans = trainer.events(EmergencyPlanned)
    assert [plan.tiers for plan in plans] == [[2], [2]]
    assert all("into tier 2 by" in plan.reason and plan.bytes > 0 for plan in plans)
    committed = [event.step for event in trainer.events(CheckpointCommitted)]
    assert len(committed) == 2, "the first notice is passed on once"
    assert committed[-1] == trainer.events(StepDone)[-1].step
    assert trainer.events(RunStopped)[0].step == committed[-1]

    again = Trainer(run_file, folder=folder)
    begun = again.until(lambda r: r.generation == 2 and isinstance(r.event, GenerationStarted))
    assert begun.event.step == committed[-1]
    again.process.kill()
    again.end()
    refused = within("notice", folder, "--seconds", "30")
    refused.refuses("nobody is training here")


def _pretend_a_slow_disk(run: Trainer) -> None:
    """As if every save into the run store had taken hours: what the next session learns from."""
    writer = JournalWriter(FolderStore(run.folder), "slow-disk", 1, is_new_generation=True)
    known = run.events(CheckpointCommitted)[-1]
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
    first.until_step(3)
    first.process.send_signal(signal.SIGTERM)
    first.finish()
    _pretend_a_slow_disk(first)

    second = Trainer(run_file, *settings, "cluster.grace_seconds=600", folder=folder)
    second.until(lambda r: r.generation == 2 and isinstance(r.event, StepDone))
    second.process.send_signal(signal.SIGTERM)
    second.finish()
    [plan] = second.events(EmergencyPlanned, 2)
    assert plan.tiers == [1]
    assert "tier 2 would need" in plan.reason
    last = second.events(StepDone, 2)[-1].step
    assert [event.step for event in second.events(SnapshotKept, 2)] == [last]
    assert second.events(CheckpointCommitted, 2) == []
    assert second.events(RunStopped, 2)[0].step == last

    again = Trainer(run_file, *settings, folder=folder)
    begun = again.until(lambda r: r.generation == 3 and isinstance(r.event, CheckpointRestored))
    again.process.kill()
    again.end()
    assert begun.event.step == last
    assert isinstance(begun.event, CheckpointRestored)
    assert begun.event.sources.get("peer stage", 0) > 0


@pytest.mark.slow
def test_a_run_saves_at_a_hint_of_its_cloud_and_leaves_at_a_notice(
    run_file: Path, tmp_path: Path
) -> None:
    with metadata_service() as service:
        trainer = Trainer(
            run_file,
            "cluster.notices=aws",
            f"cluster.notices_at={service.address}",
            "cluster.notices_every_seconds=0.1",
            folder=tmp_path / "run",
        )
        trainer.until_step(2)
        service.rebalance = {"noticeTime": "2026-03-01T11:59:59Z"}
        saved = trainer.until(lambda r: isinstance(r.event, CheckpointCommitted))
        trainer.until_step(saved.event.step + 1)
        at = datetime.now(UTC) + timedelta(seconds=110)
        service.action = {"action": "terminate", "time": at.strftime("%Y-%m-%dT%H:%M:%SZ")}
        trainer.finish()
    heard = trainer.events(NoticeReceived)
    assert [(n.leave, n.source) for n in heard] == [
        (False, "aws: rebalance recommendation"),
        (True, "aws: terminate"),
    ]
    assert 0 < heard[1].seconds <= 110
    (stopped,) = trainer.events(RunStopped)
    committed = trainer.events(CheckpointCommitted)[-1].step
    assert committed == stopped.step == trainer.events(StepDone)[-1].step
    assert stopped.reason == "aws: terminate"


def test_an_address_that_is_none_is_refused_before_anything_begins(
    run_file: Path, tmp_path: Path
) -> None:
    refused = within("train", run_file, "cluster.notices=azure", "cluster.notices_at=here")
    refused.refuses_last("'here' is not the address of a metadata service", "cluster.notices_at")
    assert not (tmp_path / "run" / "generations").exists()
