"""What an agent answers: reports of workers, `holdfast doctor`, and an orchestrator at `/healthz`
and `/readyz`."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.elastic.agent import run_records
from holdfast.elastic.agent.health import HealthApplication, HealthStatus
from holdfast.elastic.agent.requests import check_node
from holdfast.elastic.agent.run_records import StoredReports
from holdfast.elastic.event_log import EventLog
from holdfast.elastic.protocol.node_check import LISTENS, NodeCheck, NodeCheckReply
from holdfast.errors import RunFolderError
from holdfast.events import StepDone
from holdfast.wire.http.connection import RequestHead
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


HEALTH = HealthStatus("training", 2, "leading", 3, 120, 100, 1)


def test_each_link_has_an_outcome_and_a_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as there, socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # nothing listens at its port
        asked = NodeCheck(
            {
                "there": f"127.0.0.1:{there.getsockname()[1]}",
                "ended": f"127.0.0.1:{bound.getsockname()[1]}",
                "strange": "no address",
            }
        )
        found = asyncio.run(check_node(HEALTH, NodeCheck.from_json(asked.to_json())))
    assert found.links["there"].outcome == LISTENS
    assert 0 < (found.links["there"].seconds or 0) < 10
    assert (found.links["ended"].outcome, found.links["ended"].seconds) == ("refused", None)
    assert found.links["strange"].outcome == "unknown"
    assert (found.state, found.step, found.committed_step) == ("training", 120, 100)
    assert 0 < found.memory.available <= found.memory.total
    assert NodeCheckReply.from_json(json.loads(json.dumps(found.to_json()))) == found


class Node:
    """A node whose fields and clock the test sets."""

    def __init__(self) -> None:
        self.status = HealthStatus("training", 1, "leader", 1, 5, 0, 1)
        self.at = 0.0
        self.application = HealthApplication(
            lambda: self.status, lambda: b"", stalled_after_s=100.0, now=lambda: self.at
        )

    def get(self, path: str) -> tuple[int, dict[str, Any]]:
        answer = self.application.admit(RequestHead(b"GET", path.encode(), {}, frozenset()))
        return answer.status, json.loads(answer.body)


@pytest.mark.parametrize("state", ["opening", "spare", "saving", "recovering", "leaving", "over"])
def test_a_node_that_does_not_train_is_healthy_and_not_ready(state: str) -> None:
    node = Node()
    node.status = replace(node.status, state=state)
    node.get("/healthz")
    node.at = 1000.0
    assert node.get("/healthz")[0] == 200
    assert node.get("/readyz")[0] == 503


def test_a_node_that_trains_without_a_step_is_not_healthy() -> None:
    node = Node()
    assert (node.get("/healthz")[0], node.get("/readyz")[0]) == (200, 200)
    node.at = 101.0
    status, fields = node.get("/healthz")
    assert (status, fields["seconds_at_step"]) == (503, 101.0)
    node.status = replace(node.status, step=6)
    assert node.get("/healthz") == (200, node.status.to_json())


def test_the_answer_has_all_keys_that_it_had_in_older_versions() -> None:
    golden = Path(__file__).parents[3] / "golden" / "messages" / "healthz.json"
    for entry in json.loads(golden.read_text()):
        assert entry["json"].keys() <= Node().get("/healthz")[1].keys()
