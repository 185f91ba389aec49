"""Check-ups of a run file, with real processes: a good one, a failed one, one at a time."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from holdfast_platform.governance.record import read_record
from tests.support.commands import start, within, write_run_file
from tests.support.ranks import wait_until

NAMES = ["training", "killed worker", "resume", "end", "samples", "checkpoints", "alert"]


@contextmanager
def receiver() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """An address that takes alerts, and what it got."""
    got: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *words: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/alerts", got
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_a_good_check_up_is_recorded_and_its_alert_arrives(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path)
    key = tmp_path / "key.pem"
    sign = os.environ.get("HOLDFAST_MODEL_SIGNING") or shutil.which("model_signing")
    words = ["doctor", run_file, "--ready", "--json"]
    if sign and shutil.which("openssl"):
        curve = ("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(key))
        subprocess.run(["openssl", *curve], check=True, capture_output=True)
        words += ["--key", key]
    with receiver() as (address, got):
        told = json.loads(within(*words, f"observe.webhook={address}").succeeds().out)
    assert [check["name"] for check in told["checks"]] == NAMES
    assert {check["state"] for check in told["checks"]} == {"good"}
    assert [each["status"] for each in got] == ["firing", "resolved"]
    assert {each["alerts"][0]["labels"]["alertname"] for each in got} == {"ReadinessCheck"}
    folder = Path(told["record"])
    record = read_record(folder)
    assert not record.problems
    assert [entry.body["ready"] for entry in record.entries] == [True]
    assert (folder / "record.sig").exists() == told["signed"]
    assert not (tmp_path / "run").exists(), "the run itself has not begun"
    assert not (folder / "0001").exists(), "the copy of a good check-up is removed"


def test_a_run_that_does_not_survive_a_loss_is_not_ready(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path)
    given_up = ("cluster.recovery=restart", "cluster.max_restarts_without_progress=0")
    with receiver() as (address, got):
        alerts = f"observe.webhook={address}"
        done = within("canary", run_file, *given_up, alerts, "--once", "--json")
    assert done.code == 1, done.err
    told = json.loads(done.out)
    states = {check["name"]: check["state"] for check in told["checks"]}
    assert states == {"training": "good", "killed worker": "fails", "alert": "good"}
    assert [each["status"] for each in got] == ["firing"], "it continues to fire"
    folder = Path(told["record"])
    assert [entry.body["ready"] for entry in read_record(folder).entries] == [False]
    assert (folder / "0001" / "run").is_dir(), "the copy is kept for whoever mends it"

    # One at a time.
    with (folder / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        within("canary", run_file, "--once").refuses_last("checks this run file now", "--to")


def test_a_webhook_that_does_not_answer_is_a_failure(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path)
    shutil.rmtree(tmp_path / "texts")
    nothing = "observe.webhook=http://127.0.0.1:9/none"
    told = json.loads(within("canary", run_file, nothing, "--once", "--json").out)
    states = {check["name"]: check["state"] for check in told["checks"]}
    assert states == {"training": "fails", "alert": "fails"}
    assert "texts" in told["checks"][0]["found"], "what the copy printed last"


def test_mistakes_are_refused(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path)
    within("doctor", "--ready").refuses("--ready", "RUN_FILE")
    within("doctor", run_file, "--key", "x").refuses("--key", "--ready")
    within("canary", run_file, "--every", "5").refuses("--every")
    within("canary", run_file, "--once", "--key", tmp_path / "none").refuses("no such key")


@pytest.mark.slow
def test_a_canary_repeats_until_it_is_asked_to_end(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path)
    canary = start("canary", run_file, "--every", "1s")
    folder = tmp_path / "run.ready"
    wait_until(lambda: len(read_record(folder).entries) >= 2, seconds=600)
    canary.send_signal(signal.SIGTERM)
    assert canary.wait(120) == 0
    record = read_record(folder)
    assert not record.problems
    assert {entry.body["ready"] for entry in record.entries} == {True}
