"""A run ends when its last checkpoint is in the bucket, and not before. The trainer is real, and
the S3 server is behind a proxy that stalls or refuses uploads."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.checkpoint.restore.catalog import list_commits, step_of
from holdfast.events import RunFinished, RunStopped
from holdfast.wire.journal import read_journal
from holdfast.wire.store.location import open_store
from holdfast.wire.store.run_store import FolderStore
from tests.support import s3
from tests.support.commands import apart, start, write_run_file
from tests.support.s3 import Fault, Proxy, Request

LAST = "0000000006-rank"
pytestmark = pytest.mark.usefixtures("s3_credentials")


class Gate:
    """Holds back what is sent of the last checkpoint."""

    def __init__(self, proxy: Proxy) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        proxy.rule = self._rule

    def _rule(self, request: Request) -> Fault | None:
        if request.method == "PUT" and LAST in request.key:
            self.reached.set()
            self.open.wait(120)
        return None


@pytest.fixture
def gate(proxy: Proxy) -> Iterator[Gate]:
    made = Gate(proxy)
    yield made
    made.open.set()  # a thread of the proxy may wait there


def _until(process: subprocess.Popen[str], words: str) -> list[str]:
    """What it says, up to a line with these words; it has said all of it when it ends before."""
    assert process.stderr is not None
    said: list[str] = []
    for line in process.stderr:
        said.append(line)
        if words in line:
            return said
    raise AssertionError(f"{words!r} was never said: {said}")


def _kinds(folder: Path) -> list[type]:
    kinds = [type(record.event) for record in read_journal(FolderStore(folder))]
    return [kind for kind in kinds if kind in (RunFinished, RunStopped)]


@pytest.mark.slow
def test_a_run_has_not_ended_before_its_last_checkpoint_is_in_the_bucket(
    tmp_path: Path, proxy: Proxy, gate: Gate
) -> None:
    """The bucket takes its time; then a second start is interrupted and says what is missing."""
    where = s3.location(proxy.address, f"last-{id(proxy)}", timeout=60)
    run_file, folder = write_run_file(tmp_path), tmp_path / "run"
    process = start("train", run_file, f"checkpoint.bucket={where}", "--json")
    try:
        said = _until(process, "waiting for the bucket")
        assert "the bucket does not have step 6 yet" in said[-1]
        assert process.poll() is None
        assert _kinds(folder) == []
        process.send_signal(signal.SIGTERM)
        _, rest = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130, rest
    assert "stopped after step 6 (SIGTERM; the bucket does not have step 6 yet: " in rest
    assert _kinds(folder) == [RunStopped]
    assert 6 not in map(step_of, list_commits(open_store(where)))

    gate.open.set()
    apart("train", run_file, f"checkpoint.bucket={where}").succeeds()
    assert _kinds(folder) == [RunStopped, RunFinished]
    assert step_of(list_commits(open_store(where))[0]) == 6


@pytest.mark.slow
def test_a_bucket_that_takes_nothing_any_more_is_not_waited_for_without_end(
    tmp_path: Path, proxy: Proxy
) -> None:
    where = s3.location(proxy.address, f"gone-{id(proxy)}", timeout=60, retries=0)
    run_file, folder = write_run_file(tmp_path), tmp_path / "run"
    proxy.rule = lambda request: (
        Fault(503, "SlowDown") if request.method == "PUT" and LAST in request.key else None
    )
    settings = (f"checkpoint.bucket={where}", "checkpoint.bucket_wait_seconds=10")
    found = apart("train", run_file, *settings)
    assert found.code == 1, found.err
    assert "stopped after step 6 (the bucket does not have step 6 yet: " in found.out + found.err
    assert "(503" in found.out + found.err
    assert _kinds(folder) == [RunStopped]


@pytest.mark.slow
def test_a_run_that_leaves_says_so_before_it_waits_and_waits_no_longer_than_it_has(
    tmp_path: Path, proxy: Proxy
) -> None:
    """Nothing reaches the bucket, and SIGTERM says when the machine will be lost."""
    where = s3.location(proxy.address, f"leave-{id(proxy)}", timeout=60)
    run_file, folder = write_run_file(tmp_path), tmp_path / "run"
    trained, may = threading.Event(), threading.Event()

    def held(request: Request) -> Fault | None:
        if request.method == "PUT" and "data/" in request.key:
            trained.set()
            may.wait(120)
        return None

    proxy.rule = held
    process = start(
        "train",
        run_file,
        f"checkpoint.bucket={where}",
        "train.steps=100000",
        "train.evaluate.every=0",
        "cluster.grace_seconds=4",
        "--json",
    )
    try:
        assert trained.wait(90)
        process.send_signal(signal.SIGTERM)
        said = _until(process, "waiting for the bucket")
        assert _kinds(folder) == [RunStopped], said  # killed from here on, it has stopped
        rest = _until(process, "stopped after step")[-1]
        may.set()
        process.communicate(timeout=90)
    finally:
        may.set()
        process.kill()
    assert process.returncode == 0, rest
    assert "time was up" in rest
    reasons = [
        r.event.reason for r in read_journal(FolderStore(folder)) if isinstance(r.event, RunStopped)
    ]
    assert reasons[0] == "SIGTERM"
    assert "the bucket does not have step" in reasons[-1]
