"""The quickstart: what its hands reach for, what they measure, and how both ends are compared."""

from __future__ import annotations

import importlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from holdfast.events import (
    Evaluated,
    GenerationStarted,
    RunFinished,
    StepDone,
    WorkerLost,
    WorkerStarted,
)
from holdfast.wire.journal import JournalWriter
from holdfast.wire.runstore import FolderStore

FOLDER = Path(__file__).parents[2] / "examples" / "quickstart"
STEPS = 100


@pytest.fixture
def quickstart(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """As a script it finds its neighbour."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("run")


@pytest.fixture
def disturbed(quickstart: ModuleType) -> ModuleType:
    return importlib.import_module("disturbed")


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits for its input to end."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def generation(folder: Path, number: int, nodes: list[str], step: int, rung: int = -1) -> None:
    journal = JournalWriter(FolderStore(folder), "agent.one", number)
    journal.emit(GenerationStarted({"nodes": nodes}, "start", rung=rung, step=step))
    journal.flush()


def steps(folder: Path, number: int, first: int, last: int, loss: float = 1.0) -> None:
    journal = JournalWriter(FolderStore(folder), "rank0", number)
    for step in range(first, last + 1):
        journal.emit(StepDone(loss, 1, 1.0, 1e-3, 0.1, step=step))
    journal.flush()


def write(folder: Path, number: int, event: WorkerStarted | WorkerLost | Evaluated) -> None:
    journal = JournalWriter(FolderStore(folder), "agent.two", number)
    journal.emit(event)
    journal.flush()


ALL = ["one", "two", "three", "four"]


def test_a_worker_of_this_start_is_killed_and_what_that_cost_is_measured(
    disturbed: ModuleType, tmp_path: Path, bystander: subprocess.Popen[bytes]
) -> None:
    folder = tmp_path / "run"
    run = disturbed.Disturbed(Path("run.yaml"), folder, STEPS, tmp_path / "desk")
    run.story.read_older()
    generation(folder, 1, ALL, 0)
    write(folder, 1, WorkerStarted(1, bystander.pid, "two"))
    steps(folder, 1, 1, 30)
    run.story.read()

    def kill() -> set[str]:
        members: set[str] = run.kill_worker("two")
        assert bystander.wait(60) == -signal.SIGKILL
        steps(folder, 1, 31, 32)
        write(folder, 1, WorkerLost(1, bystander.pid, "SIGKILL", "exit", step=32))
        generation(folder, 2, ["one", "three", "four"], 31, rung=0)
        steps(folder, 2, 32, 33)
        generation(folder, 3, ALL, 33, rung=5)
        steps(folder, 3, 34, 40)
        return members

    run._disturb("kill", "a worker is killed", kill)
    (row,) = run.rows
    assert (row.happened, row.step, row.rung, row.repeated) == (True, 30, 0, 1)
    assert row.noticed is not None
    assert row.pause is not None
    assert json.loads((tmp_path / "desk" / "disturbances.json").read_text())[0]["name"] == "kill"
    assert "a worker is killed" in disturbed.table(run.rows)


def test_a_process_that_an_older_start_names_is_left_alone(
    disturbed: ModuleType, tmp_path: Path, bystander: subprocess.Popen[bytes]
) -> None:
    folder = tmp_path / "run"
    generation(folder, 1, ALL, 0)
    write(folder, 1, WorkerStarted(1, bystander.pid, "two"))
    steps(folder, 1, 1, 30)
    run = disturbed.Disturbed(Path("run.yaml"), folder, STEPS, tmp_path / "desk")
    run.story.read_older()
    run._disturb("kill", "a worker is killed", lambda: run.kill_worker("two"))
    assert [row.happened for row in run.rows] == [False]  # nobody of this start is there
    assert "did not happen" in disturbed.table(run.rows)
    assert bystander.communicate(b"\n", timeout=60) == (None, None)
    assert bystander.returncode == 0


def test_a_run_that_has_ended_is_disturbed_no_more_and_nothing_is_started(
    disturbed: ModuleType, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    generation(folder, 1, ALL, 0)
    steps(folder, 1, 1, STEPS)
    journal = JournalWriter(FolderStore(folder), "agent.three", 1)
    journal.emit(RunFinished(step=STEPS))
    journal.flush()
    run = disturbed.Disturbed(Path("run.yaml"), folder, STEPS, tmp_path / "desk")
    assert run.run()
    assert run.fleet.alive == []


@pytest.mark.parametrize("other", [1.0, 1.0 + 2**-52])
def test_two_runs_are_compared_to_the_last_bit(
    quickstart: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], other: float
) -> None:
    for name in "ab":
        generation(tmp_path / name, 1, ALL, 0)
        steps(tmp_path / name, 1, 1, 9)
        steps(tmp_path / name, 1, 10, 10, 1.0 if name == "a" else other)
        write(tmp_path / name, 1, Evaluated(1.0, 2.0, 5, 0.1, step=10))
    assert quickstart.compare(tmp_path / "a", tmp_path / "b") is (other == 1.0)
    said = capsys.readouterr().out
    assert ("to the last bit" in said) is (other == 1.0)
    assert ("first at step 10" in said) is (other != 1.0)
