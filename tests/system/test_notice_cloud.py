"""A run whose cloud takes the machine away: a hint, then the notice, heard over real HTTP."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from holdfast.events import (
    CheckpointCommitted,
    NoticeReceived,
    RunStopped,
    StepDone,
)
from holdfast.wire.journal import read_journal
from holdfast.wire.store.run_store import FolderStore
from tests.support.commands import apart, within, write_run_file
from tests.support.metadata_service import metadata_service
from tests.system.test_notice_emergency_save import Trainer


@pytest.mark.slow
def test_a_run_saves_at_a_hint_and_leaves_at_a_notice(tmp_path: Path) -> None:
    run_file, folder = write_run_file(tmp_path), tmp_path / "run"
    assert within("data", "prepare", run_file).code == 0
    with metadata_service() as service:
        trainer = Trainer(
            run_file,
            "cluster.notices=aws",
            f"cluster.notices_at={service.address}",
            "cluster.notices_every_seconds=0.1",
            folder=folder,
        )
        trainer.until(lambda r: isinstance(r.event, StepDone) and r.event.step >= 2)
        service.rebalance = {"noticeTime": "2026-03-01T11:59:59Z"}
        saved = trainer.until(lambda r: isinstance(r.event, CheckpointCommitted))
        trainer.until(lambda r: isinstance(r.event, StepDone) and r.event.step > saved.event.step)
        at = datetime.now(UTC) + timedelta(seconds=110)
        service.action = {"action": "terminate", "time": at.strftime("%Y-%m-%dT%H:%M:%SZ")}
        ended = trainer.end()
    assert ended.code == 0, ended.err
    events = [record.event for record in read_journal(FolderStore(folder))]
    heard = [event for event in events if isinstance(event, NoticeReceived)]
    assert [(n.leave, n.source) for n in heard] == [
        (False, "aws: rebalance recommendation"),
        (True, "aws: terminate"),
    ]
    assert 0 < heard[1].seconds <= 110
    last = max(event.step for event in events if isinstance(event, StepDone))
    stopped = next(event for event in events if isinstance(event, RunStopped))
    committed = [event.step for event in events if isinstance(event, CheckpointCommitted)]
    assert committed[-1] == stopped.step == last
    assert stopped.reason == "aws: terminate"


def test_an_address_that_is_none_is_refused_before_anything_begins(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path)
    assert within("data", "prepare", run_file).code == 0
    refused = apart("train", run_file, "cluster.notices=azure", "cluster.notices_at=here")
    refused.refuses_last("'here' is not the address of a metadata service", "cluster.notices_at")
    assert not (tmp_path / "run" / "generations").exists()
