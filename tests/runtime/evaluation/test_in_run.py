"""Tasks in a run: an evaluator that is killed again and again changes no bit, and ends its work."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from holdfast.api.reading import open_checkpoint, summary
from tests.runtime.evaluation.test_own_tasks import write_rows
from tests.support.commands import start, within, write_run_file

TRAIN = ("train.steps=60", "layout.workers=1", "checkpoint.every_steps=5")


@pytest.mark.slow
def test_a_killed_evaluator_changes_no_bit_and_ends_its_work(tmp_path: Path) -> None:
    file = write_run_file(tmp_path / "t")
    within("train", file, *TRAIN, f"folder={tmp_path}/plain").succeeds()
    write_rows(tmp_path / "rows")
    tasks = json.dumps([{"path": f"{tmp_path}/rows/{n}.jsonl"} for n in ("texts", "choices")])
    words = (f"evaluate.tasks={tasks}", "evaluate.every=20", "logging.trackers=csv")
    folder, killed = tmp_path / "evaluated", 0
    process = start("train", file, *TRAIN, *words, f"folder={folder}", "checkpoint.keep_last=99")
    while process.poll() is None:
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.pid).children(recursive=True):
                if killed < 3 and "TaskEvaluator" in " ".join(child.cmdline()):
                    os.kill(child.pid, signal.SIGKILL)
                    killed += 1
        with suppress(psutil.TimeoutExpired):
            psutil.Process(process.pid).wait(0.2)
    assert process.returncode == 0, process.communicate()
    assert killed == 3
    plain, evaluated = open_checkpoint(tmp_path / "plain"), open_checkpoint(folder)
    assert all(plain[name].equal(evaluated[name]) for name in plain.names)
    done = {(task["task"], task["step"]) for task in summary(folder)["tasks"]}
    assert done == {(name, step) for name in ("texts", "choices") for step in (20, 40, 60)}
    rows = (folder / "trackers/csv/tasks-texts.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["step", "20", "40", "60"]
