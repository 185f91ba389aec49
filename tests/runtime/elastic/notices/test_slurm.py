"""Slurm's signals, to a process of its own, and what its clock says. `squeue` is a script here: it
prints what the real one does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest

from holdfast.config.sections.cluster import ClusterConfig
from holdfast.elastic.notices.clouds import make_notice_source
from holdfast.elastic.notices.slurm import make_slurm_source
from holdfast.elastic.notices.source import TerminationWarning
from holdfast.errors import ConfigError
from tests.support.metadata_service import polled

NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC).timestamp()

AGENT = """
import asyncio, json, signal, sys
import holdfast.elastic.notices.slurm
from holdfast.config.sections.cluster import ClusterConfig
from holdfast.elastic.notices.clouds import make_notice_source
from holdfast.elastic.notices.poller import NoticePoller

holdfast.elastic.notices.slurm.SLURM_COMMAND_TIMEOUT_S = 60.0  # a machine may be busy

async def main():
    over = asyncio.Event()
    def heard(warned):
        print(json.dumps(warned), flush=True)
    source = make_notice_source(ClusterConfig(notices="slurm", grace_seconds=25))
    watch = NoticePoller(source, 0.01, heard, print)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, lambda: watch.pass_on_signal(signal.SIGTERM))
    loop.add_signal_handler(signal.SIGINT, over.set)
    assert not watch.pass_on_signal(signal.SIGINT)
    print("ready", flush=True)
    await over.wait()
    watch.close()

asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.elastic.notices.slurm.SLURM_COMMAND_TIMEOUT_S", 60.0)
    monkeypatch.setattr("holdfast.elastic.notices.slurm.END_TIME_RETRY_DELAYS_S", (0.0,))


def _squeue(folder: Path, says: str) -> dict[str, str]:
    """An environment in which `squeue` prints `says`, if it is asked for job 7 in UTC."""
    _script(folder / "squeue", "--noheader --job 7 --format %T %e", says)
    return os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}


def _script(path: Path, arguments: str, says: str) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(f'#!/bin/sh\n[ "$*" = "{arguments}" ] && [ "$TZ" = UTC ] || exit 1\n{says}\n')
    fresh.chmod(0o755)
    fresh.rename(path)


def _at(seconds: float, state: str = "RUNNING") -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime(f"echo {state} %Y-%m-%dT%H:%M:%S")


@contextmanager
def _agent(environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", AGENT], env=environment, text=True, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _said(process: subprocess.Popen[str]) -> TerminationWarning:
    assert process.stdout is not None
    return TerminationWarning(*json.loads(process.stdout.readline()))


def test_signals_are_notices_and_the_queue_says_how_much_is_left(tmp_path: Path) -> None:
    end = time.time() + 600
    environment = _squeue(tmp_path, _at(end))
    with _agent(environment) as process:
        process.send_signal(signal.SIGUSR1)
        heard = _said(process)
        assert (heard.source, heard.must_leave) == ("slurm: SIGUSR1", True)
        assert 400 < heard.seconds_left <= 600
        _squeue(tmp_path, _at(time.time() + 300))  # preempted: the end is nearer
        process.send_signal(signal.SIGTERM)
        heard = _said(process)
        assert (heard.source, heard.must_leave) == ("slurm: SIGTERM", True)
        assert 100 < heard.seconds_left <= 300


@pytest.mark.parametrize(
    ("first", "now", "usr1", "term"),
    [
        (_at(NOW + 7200), _at(NOW + 7200), 7200.0, 25.0),  # somebody's own SIGTERM, or scancel
        (_at(NOW + 7200), _at(NOW + 90), 90.0, 90.0),  # preempted
        (_at(NOW + 7200), _at(NOW + 90, "SIGNALING"), 90.0, 90.0),
        (_at(NOW + 90), _at(NOW + 88), 88.0, 25.0),  # not moved
        (_at(NOW + 90), _at(NOW - 3), 1.0, 25.0),  # the end is here; the kill is a grace away
        (_at(NOW + 90), _at(NOW + 5000, "COMPLETING"), 90.0, 25.0),  # it is put back into the queue
        ("exit 1", "exit 1", 77.0, 25.0),  # no controller, but the variable
        ("exit 1", _at(NOW + 50), 50.0, 50.0),
        ("echo RUNNING N/A", "echo RUNNING UNLIMITED", 77.0, 25.0),
        ("echo '<html> x'", "printf '\\377 \\376'", 77.0, 25.0),
    ],
)
def test_how_much_is_left(tmp_path: Path, first: str, now: str, usr1: float, term: float) -> None:
    environment = _squeue(tmp_path, first) | {"SLURM_JOB_END_TIME": f"{NOW + 77:.0f}"}
    source = make_slurm_source(25.0, environment, lambda: NOW)
    source.read_settings()
    _squeue(tmp_path, now)
    assert source.seconds_until_kill(signal.SIGUSR1) == usr1
    assert source.seconds_until_kill(signal.SIGTERM) == term


def test_the_time_from_term_to_kill_is_slurms_own_setting(tmp_path: Path) -> None:
    environment = _squeue(tmp_path, "exit 1")
    for says, grace in (
        ("echo 'JobRequeue = 1'; echo 'KillWait                = 12 sec'", 12.0),
        ("exit 1", 30.0),
    ):
        _script(tmp_path / "scontrol", "show config", says)
        source = make_slurm_source(0.0, environment, lambda: NOW)
        source.read_settings()
        assert (
            source.seconds_until_kill(signal.SIGTERM)
            == source.seconds_until_kill(signal.SIGUSR1)
            == grace
        )


def test_a_queue_that_does_not_answer_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.elastic.notices.slurm.SLURM_COMMAND_TIMEOUT_S", 0.2)
    environment = _squeue(tmp_path, "exec sleep 1000")
    for path, left in ((environment["PATH"], 50.0), ("", 50.0)):
        environment |= {"PATH": path, "SLURM_JOB_END_TIME": f"{NOW + 50:.0f}"}
        source = make_slurm_source(25.0, environment, lambda: NOW)
        source.read_settings()
        assert source.seconds_until_kill(signal.SIGUSR1) == left


def test_two_signals_at_once_are_the_nearer_one(tmp_path: Path) -> None:
    source = make_slurm_source(30.0, _squeue(tmp_path, "exit 1"), lambda: NOW)
    source.signal_handlers()[signal.SIGTERM]()
    source.signal_handlers()[signal.SIGUSR1]()
    heard = polled(source)
    assert (heard.source, heard.seconds_left) == ("slurm: SIGTERM", 30.0)


def test_outside_of_a_job_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="runs in no Slurm job"):
        make_notice_source(ClusterConfig(notices="slurm"), environment={})
