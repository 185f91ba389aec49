"""One run from outside, as a user has it. It has two workers. One of them is killed, then the
trainer itself. The run is resumed on a terminal, and finishes. Then everything that is reported
about it is checked."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import random
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from holdfast.events import CheckpointCommitted, Event, StepDone, WorkerStarted
from holdfast.report.history import history
from holdfast.wire.journal import follow_journal
from holdfast.wire.store.run_store import FolderStore
from tests.runtime.report.test_metrics import as_tensorboard_shows
from tests.support.commands import apart, start, write_run_file
from tests.support.processes import runs
from tests.support.ranks import DEADLINE_S, wait_until

STEPS = 200

JOINED = "worker_joined"
"""Whether what replaces the worker joins before the agent is killed is a matter of time."""


@dataclass(frozen=True)
class Ran:
    folder: Path
    metrics: dict[str, float]  # of the first session, before anything was killed
    plain: str  # what the first session said, to a pipe
    screen: str  # what the second said, to a terminal


@pytest.mark.slow
def test_a_run_that_is_killed_twice_finishes_and_tells_all_about_it(tmp_path: Path) -> None:
    ran = _run(tmp_path / "run")
    _one_curve_both_incidents_and_every_second(ran)
    _every_sample_once(ran)
    _both_sessions_said_what_happened(ran)
    _metrics_were_served_while_it_ran(ran)
    _tensorboard_has_the_same_curve(ran)
    _one_page_and_one_json_value(ran)


def _run(root: Path) -> Ran:
    run_file = write_run_file(root)
    folder = run_file.parent / "run"
    port = _free_port()
    settings = (
        f"train.steps={STEPS}",
        "train.evaluate.every=50",
        "checkpoint.every_steps=20",
        f"cluster.metrics_port={port}",
        "tensorboard=true",
        "cluster.threads_per_worker=1",
    )
    metrics, plain = _killed_twice(["train", str(run_file), *settings], folder, port)
    screen = _on_a_terminal("train", str(run_file), *settings)
    return Ran(folder, metrics, plain, screen)


def _free_port() -> int:
    """A port that is free and stays so: outside of those that connections are given."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port")


def _killed_twice(command: list[str], folder: Path, port: int) -> tuple[dict[str, float], str]:
    """Kill a worker after the second checkpoint, and the agent some steps after its recovery. The
    recovery has ended when the lost steps are done again."""
    process = start(*command)
    ended = threading.Event()
    output: list[str] = []

    def collect() -> None:
        output.extend(process.communicate(timeout=DEADLINE_S))
        ended.set()

    collector = threading.Thread(target=collect, daemon=True)
    collector.start()
    pids: dict[int, int] = {}
    metrics: dict[str, float] = {}
    lost_at = 0
    for generation, event in _news(folder, ended):
        if isinstance(event, WorkerStarted):
            pids[event.rank] = event.pid
        if isinstance(event, CheckpointCommitted) and event.step >= 40 and not metrics:
            metrics = _scrape(port)
            os.kill(pids[1], signal.SIGKILL)
        if isinstance(event, StepDone) and generation == 1:
            lost_at = max(lost_at, event.step)
        elif isinstance(event, StepDone) and event.step >= lost_at + 40:
            process.kill()
            break
    collector.join(DEADLINE_S)
    assert process.returncode == -signal.SIGKILL, output
    wait_until(lambda: not any(map(runs, pids.values())), 10, "the workers' end")
    return metrics, output[0]


def _news(folder: Path, ended: threading.Event) -> Iterator[tuple[int, Event]]:
    wait_until(lambda: (folder / "journal").exists() or ended.is_set(), what="a journal")
    for records in follow_journal(FolderStore(folder), poll_interval_s=0.02, stop=ended):
        for record in records:
            yield record.generation, record.event


def _scrape(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=120) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {
            ",".join([s.name, *(v for k, v in sorted(s.labels.items()) if k != "run_id")]): s.value
            for family in families
            for s in family.samples
        }


def _on_a_terminal(*command: str) -> str:
    """Everything that the command wrote to a terminal of 100 x 40."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "holdfast.cli.main", *command],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env=os.environ | {"TERM": "xterm-256color", "OMP_NUM_THREADS": "1"},
    )
    os.close(theirs)
    seen = bytearray()

    def read() -> None:
        while True:
            try:
                data = os.read(ours, 65536)
            except OSError:  # the last process with the terminal has ended
                return
            seen.extend(data)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    code = process.wait(DEADLINE_S)
    reader.join(120)
    os.close(ours)
    text = seen.decode(errors="replace")
    assert code == 0, text
    return text


def _one_curve_both_incidents_and_every_second(ran: Ran) -> None:
    story = history.read_history(FolderStore(ran.folder))
    assert story.state == "finished"
    assert [p.step for p in story.steps] == list(range(1, STEPS + 1))
    assert [e.step for e in story.evaluations] == list(range(50, STEPS + 1, 50))
    broken = [incident for incident in story.incidents if incident.kind != JOINED]
    assert [incident.kind for incident in broken] == ["worker_lost", "session_lost"]
    worker, agent = broken
    assert worker.losses[0].rank == 1
    assert worker.losses[0].cause == "SIGKILL"
    for incident in (worker, agent):
        assert incident.seconds is not None
        assert 0 < incident.seconds < DEADLINE_S
        assert incident.reached >= incident.restart_step
    assert [s.ended for s in story.sessions] == ["lost", "finished"]
    reasons = [g.reason for g in story.generations if g.reason != JOINED]
    assert reasons == ["start", "worker_lost", "resume"]
    assert sum(story.time.values()) == pytest.approx(story.wall)
    assert all(seconds >= 0 for seconds in story.time.values())
    for name in ("productive", "startup", "recovery", "evaluation", "stopped"):
        assert story.time[name] > 0, name
    lost_steps = sum(incident.steps_lost for incident in story.incidents)
    assert sum(map(len, story.rework)) == lost_steps
    assert story.time["other"] < 0.5 * story.wall


def _every_sample_once(ran: Ran) -> None:
    audit = apart("data", "audit", ran.folder).succeeds()
    assert f"{4 * STEPS:,} samples in {STEPS} steps: none missing, none twice" in audit.out


def _both_sessions_said_what_happened(ran: Ran) -> None:
    for part in (
        "generation 1, 2 workers",
        "rank 1 of ",
        "lost: SIGKILL",
        "recovered: the others went on",
        "checkpoint of",
    ):
        assert part in ran.plain
    assert "\x1b" not in ran.plain
    for part in (f"step {STEPS}/{STEPS}", "generation ", "╭", "\x1b["):
        assert part in ran.screen


def _metrics_were_served_while_it_ran(ran: Ran) -> None:
    assert ran.metrics["holdfast_step"] >= 40
    assert ran.metrics["holdfast_generation"] == 1
    assert ran.metrics["holdfast_world_size"] == 2
    assert ran.metrics["holdfast_checkpoints_total,ok,2"] >= 2


def _tensorboard_has_the_same_curve(ran: Ran) -> None:
    shown = as_tensorboard_shows(ran.folder / "tensorboard", "train/loss")
    story = history.read_history(FolderStore(ran.folder))
    wanted = {p.step: p.loss for p in story.steps}
    assert [step for step, _ in shown] == list(range(1, STEPS + 1))
    assert all(value == pytest.approx(wanted[step], rel=1e-6) for step, value in shown)


def _one_page_and_one_json_value(ran: Ran) -> None:
    apart("report", ran.folder).succeeds()
    content = (ran.folder / "report.html").read_text()
    for part in ("lost (SIGKILL)", "the session ended without a word", "unigram counts"):
        assert part in content
    assert "http://" not in content
    assert "https://" not in content
    told = apart("report", ran.folder, "--json")
    value: dict[str, Any] = json.loads(told.out)
    assert value["last_step"] == STEPS
    kinds = [incident["kind"] for incident in value["incidents"]]
    assert [kind for kind in kinds if kind != JOINED] == ["worker_lost", "session_lost"]
