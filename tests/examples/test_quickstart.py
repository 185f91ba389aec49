"""The quickstart: what its hands reach for, what they measure, and how both ends are compared."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest

from holdfast.events import (
    Evaluated,
    Event,
    GenerationStarted,
    RunFinished,
    RunStopped,
    StepDone,
    WorkerLost,
    WorkerStarted,
)
from holdfast.wire.journal import JournalWriter, read_journal
from holdfast.wire.store.run_store import FolderStore
from tests.support.commands import within, write_run_file
from tests.support.ranks import wait_until

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


def write(folder: Path, number: int, event: Event) -> None:
    journal = JournalWriter(FolderStore(folder), "agent.two", number)
    journal.emit(event)
    journal.flush()


ALL = ["one", "two", "three", "four"]
DEEDS = ["kill", "notice", "return", "partition", "healed", "leader", "back"]


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
        assert bystander.wait(120) == -signal.SIGKILL
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
    notes = json.loads((tmp_path / "desk" / "disturbances.json").read_text())
    assert [row["name"] for row in notes["rows"]] == ["kill"]
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
    assert bystander.communicate(b"\n", timeout=120) == (None, None)
    assert bystander.returncode == 0


def test_a_run_that_has_ended_is_disturbed_no_more_and_nothing_is_started(
    disturbed: ModuleType, tmp_path: Path
) -> None:
    folder = finished(tmp_path / "run", ALL)
    run = disturbed.Disturbed(Path("run.yaml"), folder, STEPS, tmp_path / "desk")
    assert run.run()
    assert run.fleet.alive_nodes == []


def finished(folder: Path, nodes: list[str]) -> Path:
    """By a command of these nodes, without a disturbance."""
    generation(folder, 1, nodes, 0)
    steps(folder, 1, 1, STEPS)
    write(folder, 1, Evaluated(1.0, 2.0, 5, 0.1, step=STEPS))
    write(folder, 1, RunFinished(step=STEPS))
    return folder


@pytest.mark.parametrize("nodes", [ALL, ["another-name"]], ids=" ".join)
def test_a_run_that_another_command_finished_was_not_disturbed(
    quickstart: ModuleType, tmp_path: Path, nodes: list[str]
) -> None:
    folder = finished(tmp_path / "run", nodes)
    with pytest.raises(SystemExit) as ended:
        quickstart.disturb(Path("run.yaml"), folder, STEPS)
    said = str(ended.value.code)  # a text: printed, and the exit code is 1
    places = [said.index(f"{name} (") for name in DEEDS]
    assert places == sorted(places)
    assert f"start anew with: rm -r {folder}," in said


def test_what_was_done_to_an_older_run_in_the_same_folder_does_not_count(
    quickstart: ModuleType, disturbed: ModuleType, tmp_path: Path
) -> None:
    folder, desk = finished(tmp_path / "run", ALL), tmp_path / "run-nodes"
    run = disturbed.Disturbed(Path("run.yaml"), folder, STEPS, desk)
    run.story.read_older()
    run.rows = [disturbed.Row(name, "done", happened=True) for name in DEEDS]
    run._note()
    rows = quickstart.disturb(Path("run.yaml"), folder, STEPS)
    assert [row.name for row in rows] == DEEDS
    assert quickstart.missing(rows, folder) == ""
    shutil.rmtree(folder)
    finished(folder, ALL)
    with pytest.raises(SystemExit, match="kill"):
        quickstart.disturb(Path("run.yaml"), folder, STEPS)


def test_one_that_did_not_happen_is_missing_beside_those_that_did(
    quickstart: ModuleType, disturbed: ModuleType, tmp_path: Path
) -> None:
    run = disturbed.Disturbed(Path("run.yaml"), tmp_path / "run", STEPS, tmp_path / "desk")
    run.rows = [disturbed.Row(name, "done", happened=True) for name in DEEDS if name != "notice"]
    rows = run.outcome()
    assert [row.name for row in rows] == DEEDS
    said = quickstart.missing(rows, tmp_path / "run")
    assert "notice (a node has notice and leaves)" in said
    assert "kill" not in said
    assert "did not happen" in disturbed.table(rows)


def test_a_node_of_another_name_is_told_of_after_the_four(
    disturbed: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = disturbed.Disturbed(Path("run.yaml"), tmp_path / "run", STEPS, tmp_path / "desk")
    generation(tmp_path / "run", 1, ["another", "two", "one"], 0)
    run.story.read()
    assert "one, two, another" in capsys.readouterr().out


@pytest.mark.parametrize("other", [1.0, 1.0 + 2**-52])
def test_two_runs_are_compared_to_the_last_bit(
    quickstart: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], other: float
) -> None:
    for name in "ab":
        generation(tmp_path / name, 1, ALL, 0)
        steps(tmp_path / name, 1, 1, 9)
        steps(tmp_path / name, 1, 10, 10, 1.0 if name == "a" else other)
        write(tmp_path / name, 1, Evaluated(1.0, 2.0, 5, 0.1, step=10))
    assert quickstart.compare(tmp_path / "a", tmp_path / "b", 10) is (other == 1.0)
    said = capsys.readouterr().out
    assert ("to the last bit" in said) is (other == 1.0)
    assert ("first at step 10" in said) is (other != 1.0)


@pytest.mark.parametrize("which", ["disturbed", "undisturbed"])
@pytest.mark.parametrize("untold", [(4, 6), (10, 11)], ids=["within", "the last"])
def test_a_step_that_nobody_told_of_is_not_the_same(
    quickstart: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    which: str,
    untold: tuple[int, int],
) -> None:
    for name in ("disturbed", "undisturbed"):
        first, end = untold if name == which else (11, 11)
        generation(tmp_path / name, 1, ALL, 0)
        steps(tmp_path / name, 1, 1, first - 1)
        steps(tmp_path / name, 1, end, 10)
        write(tmp_path / name, 1, Evaluated(1.0, 2.0, 5, 0.1, step=10))
    assert not quickstart.compare(tmp_path / "disturbed", tmp_path / "undisturbed", 10)
    said = capsys.readouterr().out
    number = untold[1] - untold[0]
    assert f"{number} of 10 steps have no loss in the journal of the {which} run" in said
    assert f"the first is {untold[0]}" in said


def test_runs_without_a_validation_at_their_end_are_not_the_same(
    quickstart: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in "ab":
        generation(tmp_path / name, 1, ALL, 0)
        steps(tmp_path / name, 1, 1, 10)
    assert not quickstart.compare(tmp_path / "a", tmp_path / "b", 10)
    assert "differ, in their validation" in capsys.readouterr().out


INTERRUPTED = """\
import signal
import sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it is ignored
sys.path.insert(0, sys.argv.pop(1))
import run
line, sys.argv[1:] = sys.argv[1:], []
run.quickstart = lambda size: run.holdfast(*line)
run.LEAVE_SECONDS = 0.5
sys.exit(run.main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("reach", [os.killpg, os.kill], ids=["both", "the script alone"])
def test_ctrl_c_while_a_command_trains_ends_in_a_sentence_and_leaves_nobody(
    tmp_path: Path, reach: Callable[[int, int], None]
) -> None:
    """The command saves and leaves, as it does when it is interrupted by itself."""
    run_file, folder = write_run_file(tmp_path), tmp_path / "run"
    assert within("data", "prepare", run_file).code == 0
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            INTERRUPTED,
            str(FOLDER),
            "train",
            str(run_file),
            "train.steps=100000",
            "train.evaluate.every=0",
            "layout.workers=1",
        ],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:

        def is_training() -> bool:
            assert process.poll() is None
            return any(isinstance(r.event, StepDone) for r in read_journal(FolderStore(folder)))

        wait_until(is_training, what="the first step", pause_s=0.1)
        reach(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=120)  # until the command, too, says no more
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130, said
    assert said.strip().endswith("interrupted; the same command goes on from there")
    assert "Traceback" not in said
    assert any(isinstance(r.event, RunStopped) for r in read_journal(FolderStore(folder)))
