"""The quickstart's killer: it kills a worker of the start that it watches, and nothing else."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from holdfast.events import CheckpointCommitted, StepDone, WorkerStarted
from holdfast.wire.journal import JournalWriter
from holdfast.wire.runstore import FolderStore

SCRIPT = Path(__file__).parents[2] / "examples" / "quickstart" / "run.py"
STEPS = 100


@pytest.fixture(scope="module")
def quickstart() -> ModuleType:
    spec = importlib.util.spec_from_file_location("quickstart", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits for its input to end."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def write_half_a_run(folder: Path, pid: int) -> None:
    journal = JournalWriter(FolderStore(folder), "agent", 1)
    journal.emit(WorkerStarted(0, pid, "here"))
    journal.emit(CheckpointCommitted("key", 1, 0.1, step=50))
    for step in range(1, 61):
        journal.emit(StepDone(1.0, 1, 1.0, 1e-3, 0.1, step=step))
    journal.flush()


def test_a_worker_of_this_start_is_killed(
    quickstart: ModuleType, tmp_path: Path, bystander: subprocess.Popen[bytes]
) -> None:
    killer = quickstart.Killer(tmp_path, STEPS)
    write_half_a_run(tmp_path, bystander.pid)
    killer.done.set()
    killer.run()
    assert bystander.wait(10) == -signal.SIGKILL
    assert f"after step 55, worker 0 (process {bystander.pid})" in killer.said


def test_a_process_that_an_older_start_names_is_left_alone(
    quickstart: ModuleType, tmp_path: Path, bystander: subprocess.Popen[bytes]
) -> None:
    write_half_a_run(tmp_path, bystander.pid)
    killer = quickstart.Killer(tmp_path, STEPS)
    killer.done.set()
    killer.run()
    assert killer.said == ""
    assert bystander.communicate(b"\n", timeout=10) == (None, None)
    assert bystander.returncode == 0
