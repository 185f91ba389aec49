"""Reports of workers are answered while the disk hangs, and their events count once it has them."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from holdfast.elastic.agent import run_records
from holdfast.elastic.agent.run_records import StoredReports
from holdfast.elastic.event_log import EventLog
from holdfast.errors import RunFolderError
from holdfast.events import StepDone
from holdfast.wire.store.run_store import Buffer, FolderStore
from tests.support.agents import until


class _Disk(FolderStore):
    """A folder on a disk that may hang, or be out of order."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.answers = threading.Event()
        self.answers.set()
        self.is_broken = False

    def append(self, key: str, data: Buffer, sync: bool = False) -> None:
        assert self.answers.wait(120)
        if self.is_broken:
            raise RunFolderError("the run folder failed")
        super().append(key, data, sync)


def _step(number: int) -> StepDone:
    return StepDone(1.0, 1, 1.0, 1e-3, 0.1, step=number)


def test_a_report_is_answered_while_the_disk_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says what is durable: what an older report brought counts as soon as the disk has it."""
    disk = _Disk(tmp_path)

    async def go() -> None:
        log = EventLog(disk, [], print)
        log.begin_generation(1)
        reports = StoredReports(log)
        log.emit("rank0", _step(1))
        assert await reports.store(1, 0, 1, sync=True)
        assert reports.durable_below(1, 0) == 1
        monkeypatch.setattr(run_records, "STORE_TIMEOUT_S", 0.05)
        disk.answers.clear()
        for number in (2, 3, 4):
            log.emit("rank0", _step(number))
            assert not await reports.store(1, 0, number, sync=True)
        assert reports.durable_below(1, 0) == 1
        monkeypatch.setattr(run_records, "STORE_TIMEOUT_S", 60.0)
        disk.answers.set()
        await until(lambda: reports.durable_below(1, 0) == 2, "the oldest of them to count")
        assert await reports.store(1, 0, 4, sync=True)
        assert reports.durable_below(1, 0) == 4
        assert reports.durable_below(2, 0) == 0

    asyncio.run(go())


def test_a_disk_that_is_out_of_order_is_asked_once_for_each_report(tmp_path: Path) -> None:
    disk = _Disk(tmp_path)

    async def go() -> None:
        log = EventLog(disk, [], lambda line: None)
        log.begin_generation(1)
        reports = StoredReports(log)
        disk.is_broken = True
        log.emit("rank0", _step(1))
        assert not await reports.store(1, 0, 1, sync=False)
        assert not await reports.store(1, 0, 1, sync=True)
        disk.is_broken = False
        assert await reports.store(1, 0, 1, sync=False)
        assert reports.durable_below(1, 0) == 0
        assert await reports.store(1, 0, 1, sync=True)
        assert reports.durable_below(1, 0) == 1

    asyncio.run(go())
