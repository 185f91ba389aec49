"""A tracker costs no step and loses no point, whatever becomes of its server and its process."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from holdfast.events import GenerationStarted, StepDone
from holdfast.report.trackers.process import TrackerSpec
from tests.runtime.report.trackers.test_process import deliver, rows
from tests.support.processes import children_of, stop
from tests.support.ranks import wait_until
from tests.support.tracker_server import TRACKER, TrackerServer
from tests.support.trainer_process import Trainer, gone, training

ENDLESS = {"steps": 1_000_000, "pace": 0.02}


def tracker_pids(trainer: Trainer, name: str) -> set[int]:
    module = "holdfast.report.trackers.process"
    found = children_of(trainer.process.pid, module)
    return {process.pid for process in found if name in process.cmdline()}


def connected_to(url: str, pids: set[int]) -> set[int]:
    """Return the processes that have a connection to the server."""
    port = int(url.rstrip("/").rpartition(":")[2])
    return {
        pid
        for pid in pids
        if any(c.raddr and c.raddr.port == port for c in psutil.Process(pid).net_connections())
    }


@pytest.mark.slow
def test_a_server_that_hangs_refuses_and_dies_and_a_killed_tracker(tmp_path: Path) -> None:
    with TrackerServer() as server:
        server.mode = "hang"
        settings = (
            f"logging.trackers=csv,{TRACKER}",
            f"logging.options={TRACKER}.url={server.url}",
            "logging.timeout_seconds=2",
            "logging.finish_seconds=60",
            "layout.workers=2",
        )
        with training(tmp_path / "run", ENDLESS, *settings) as trainer:
            trainer.wait(lambda: server.requests["hang"], "a request that hangs")
            trainer.wait_step(len(trainer.events(StepDone)) + 20, 1)
            family = trainer.family()
            assert connected_to(server.url, family) <= tracker_pids(trainer, TRACKER)
            server.mode = "refuse"
            trainer.wait(lambda: server.requests["refuse"], "a request that is refused")
            (csv_pid,) = tracker_pids(trainer, "csv")
            os.kill(csv_pid, signal.SIGKILL)
            server.mode = "die"
            trainer.wait(lambda: server.requests["die"], "a request that is cut off")
            trainer.wait(lambda: tracker_pids(trainer, "csv") - {csv_pid}, "another tracker of csv")
            os.kill(trainer.process.pid, signal.SIGTERM)
            assert trainer.end() == 0, trainer.said
            assert f"deliver the rest with: holdfast track {tmp_path / 'run'}" in trainer.said
            assert gone(family)
            steps = [event.step for event in trainer.events(StepDone)]
            assert steps == list(range(1, len(steps) + 1))  # each once, and none twice
            assert len(trainer.events(GenerationStarted)) == 1
        train = rows(tmp_path / "run" / "trackers" / "csv" / "train.csv")
        assert [int(row["step"]) for row in train] == steps
        server.mode = "ok"
        options = {"url": server.url}
        log = str(tmp_path / "by-hand.log")
        spec = TrackerSpec(TRACKER, "run", str(tmp_path / "run"), options=options, log=log)
        assert deliver(spec) == 0, Path(log).read_text()
        assert server.steps() == steps
        assert server.messages[-1] == {"finish": "stopped"}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["hang", "refuse", "die"])
def test_a_server_that_returns_gets_each_point_while_the_run_continues(
    mode: str, tmp_path: Path
) -> None:
    with TrackerServer() as server:
        settings = (
            f"logging.trackers={TRACKER}",
            f"logging.options={TRACKER}.url={server.url}",
            "logging.timeout_seconds=2",
            "logging.finish_seconds=60",
            "layout.workers=2",
        )
        with training(tmp_path / "run", ENDLESS, *settings) as trainer:
            trainer.wait(lambda: len(server.steps()) >= 5, "points before the failure")
            server.mode = mode
            trainer.wait(lambda: server.requests[mode], "a request that fails")
            trainer.wait_step(len(trainer.events(StepDone)) + 20, 1)
            newest = trainer.events(StepDone)[-1].step
            assert len(server.steps()) < newest
            server.mode = "ok"
            trainer.wait(lambda: server.steps()[-1] > newest, "points after the return")
            os.kill(trainer.process.pid, signal.SIGTERM)
            assert trainer.end() == 0, trainer.said
            steps = [event.step for event in trainer.events(StepDone)]
            assert steps == list(range(1, len(steps) + 1))
            assert len(trainer.events(GenerationStarted)) == 1
        assert server.steps() == steps
        assert server.messages[-1] == {"finish": "stopped"}


@pytest.mark.slow
def test_a_tracker_that_is_stopped_holds_up_neither_steps_nor_the_end(tmp_path: Path) -> None:
    settings = ("logging.trackers=csv", "logging.finish_seconds=1", "layout.workers=1")
    with training(tmp_path / "run", ENDLESS, *settings) as trainer:
        trainer.wait(lambda: tracker_pids(trainer, "csv"), "the tracker")
        (pid,) = tracker_pids(trainer, "csv")
        stop(pid)
        trainer.wait_step(len(trainer.events(StepDone)) + 50, 1)
        os.kill(trainer.process.pid, signal.SIGTERM)
        assert trainer.end() == 0, trainer.said
        assert "not everything has reached csv" in trainer.said
        wait_until(lambda: gone({pid}), what="the end of the tracker")


def test_a_refusal_that_does_not_pass_is_in_the_runs_own_output(tmp_path: Path) -> None:
    with TrackerServer() as server:
        server.mode = "401"
        settings = (
            f"logging.trackers={TRACKER}",
            f"logging.options={TRACKER}.url={server.url}",
            "logging.finish_seconds=60",
            "layout.workers=1",
        )
        with training(tmp_path / "run", ENDLESS, *settings) as trainer:
            sentence = "HTTP Error 401: Unauthorized, and this does not pass by itself"
            trainer.wait(lambda: sentence in trainer.said, "the reason")
            trainer.wait_step(len(trainer.events(StepDone)) + 5, 1)
            os.kill(trainer.process.pid, signal.SIGTERM)
            assert trainer.end() == 0, trainer.said
            assert server.requests["401"] == 1
            assert (
                f"{sentence}; correct logging.options; it has ended, and training" in trainer.said
            )
            assert f"--to {TRACKER} --option NAME=VALUE" in trainer.said
