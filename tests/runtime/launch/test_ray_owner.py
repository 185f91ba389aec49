"""`--on ray` where ray is not installed, and at addresses where no Ray answers."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.launch import _running_job
from holdfast.config.sections.launch import LaunchConfig
from holdfast.errors import ConfigError
from holdfast.launch.owners.owner import NodeState, OwnedJob, OwnerAwayError
from holdfast.launch.owners.ray import owner as ray_owner
from holdfast.launch.owners.ray.job import RayAnswer
from holdfast.launch.owners.ray.node import (
    RAY_LIMIT_VARIABLE,
    READ_INTERVAL_S,
    SpecWatch,
    head_limit_s,
    leave_after_s,
)
from holdfast.launch.owners.ray.plan import JobStatus, NodeStatus, RaySpec
from tests.support.commands import apart, within, write_run_file
from tests.support.ranks import ROOT

GOLDEN = ROOT / "tests" / "golden" / "launch" / "ray.json"
SETTINGS = (
    "folder=/shared/runs/tiny",
    "cluster.places=1",
    "layout.pp=2",
    "launch.spares=1",
    "launch.ray.address=head.example:6379",
    "launch.ray.cpus=8",
    "launch.ray.resources={slot: 1}",
    "launch.ray.runtime_env={env_vars: {NCCL_DEBUG: WARN}}",
)


def test_a_dry_run_prints_what_would_be_submitted(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path)
    settings = ("model.layers=2", "layout.workers=4", "data.folder=/shared/tiny", *SETTINGS)
    done = within("launch", run_file, "--on", "ray", "--nodes", "4", "--dry-run", *settings)
    assert done.code == 0, done.err
    assert done.out == GOLDEN.read_text()
    assert "ray" not in sys.modules


@pytest.fixture
def refusing(tmp_path: Path) -> Iterator[str]:
    """An address where nothing listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.2", 0))
        yield f"127.0.0.2:{taken.getsockname()[1]}"


def job_at(address: str) -> OwnedJob:
    return OwnedJob("ray", "tiny-1", 2, {"address": address, "logs": "/nowhere"})


def test_a_head_that_is_away_is_one_sentence(refusing: str) -> None:
    with pytest.raises(OwnerAwayError, match=r"Ray's head at 127\.0\.0\.2:\d+, which knows"):
        ray_owner.RayOwner().status(job_at(refusing))


def test_a_run_whose_ray_is_away_resumes_on_another_one(
    refusing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job_at(refusing).write(tmp_path)
    launch = {"on": "ray", "ray": {"address": refusing}}
    with pytest.raises(OwnerAwayError):
        _running_job(tmp_path, LaunchConfig(**launch), fresh=False)
    launch["ray"] = {"address": "head.example:6379"}
    assert _running_job(tmp_path, LaunchConfig(**launch), fresh=False) is None
    assert "the run resumes elsewhere" in capsys.readouterr().err
    with pytest.raises(OwnerAwayError):
        _running_job(tmp_path, LaunchConfig(**launch), fresh=True)


class Board:
    """A board whose head answers while `spec` is set."""

    job, spec = "tiny-1", None

    def read_spec(self) -> RaySpec:
        if self.spec is None:
            raise ConnectionError
        return self.spec


def test_the_watch_of_a_spec_knows_how_long_the_head_is_away() -> None:
    board: Any = Board()
    board.spec = RaySpec("tiny-1", (("node-0",),), {"CPU": 1.0}, (), "")
    watch = SpecWatch(board)
    assert watch.newest() is board.spec
    spec, board.spec = board.spec, None
    while watch.silent_s < 2 * READ_INTERVAL_S:
        time.sleep(0.01)
    board.spec = spec
    watch.wait_answer()
    assert watch.newest() is spec


def test_an_agent_saves_before_ray_ends_its_node() -> None:
    assert head_limit_s({}) == 60.0
    assert [leave_after_s(s) for s in (head_limit_s({RAY_LIMIT_VARIABLE: "600"}), 24.0)] == [
        580,
        16,
    ]


def test_a_server_that_is_no_ray_does_not_hang_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_owner, "ANSWER_TIMEOUT_S", 0.2)
    stuck = [sys.executable, "-c", "import time; time.sleep(600)"]
    monkeypatch.setattr(ray_owner, "module_command", lambda *_: stuck)
    with pytest.raises(ConfigError, match="does not answer as Ray's head does"):
        ray_owner.RayOwner().release(job_at("head:6379"))


def test_a_child_that_ends_without_an_answer_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    crash = [sys.executable, "-c", "raise SystemExit('the client lost its head')"]
    monkeypatch.setattr(ray_owner, "module_command", lambda *_: crash)
    with pytest.raises(ConfigError, match="refused: the client lost its head"):
        ray_owner.RayOwner().status(job_at("head:6379"))


def test_the_status_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    known = (NodeStatus("node-0", NodeState.RUNNING, "10.0.0.1, process 7"),)
    answers = iter([JobStatus(known).to_json(), ""])
    monkeypatch.setattr(ray_owner, "_ask", lambda _: RayAnswer(status=next(answers)))
    owner = ray_owner.RayOwner()
    assert owner.status(job_at("head:6379")) == list(known)
    assert owner.status(job_at("head:6379")) == [], "Ray does not know the job"


def test_an_address_that_hangs_is_refused(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path)
    for address in ("127.0.0.1:6379", "ray://localhost:10001"):
        done = apart("launch", run_file, "--on", "ray", f"launch.ray.address={address}")
        done.refuses("launch.ray.address", "use the address that ray start --head prints")
    done = apart("launch", run_file, "--on", "ray", "launch.ray.address=head")
    done.refuses("launch.ray.address", "HOST:PORT")
    done = apart("launch", run_file, "--on", "ray", "launch.ray.cpus=0")
    done.refuses("set cpus to 1")


def test_the_order_is_all_that_the_child_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    echo = [
        sys.executable,
        "-c",
        "import sys, json; order = json.load(sys.stdin); print(json.dumps({'error': 'running', "
        "'detail': order['job'], 'status': '', 'nodes': 0}))",
    ]
    monkeypatch.setattr(ray_owner, "module_command", lambda *_: echo)
    with pytest.raises(ConfigError, match=r"nodes of this run already \(job tiny-1\)"):
        ray_owner.RayOwner().status(job_at("head:6379"))
    assert json.loads(GOLDEN.read_text())["verb"] == "submit"
