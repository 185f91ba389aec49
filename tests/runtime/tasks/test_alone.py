"""A script without `holdfast run`: one process, the numbers of a run, and a debugger."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast
from holdfast.errors import TaskError
from tests.support.commands import apart, within

SCRIPT = """\
import sys
import torch
import torch.nn.functional as F
import holdfast
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 2))
run = holdfast.run()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
run.keep(model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6))
data = [{"x": torch.full((3,), float(i)), "y": i % 2} for i in range(13)]
def loss(batch):
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")
run.validate(data, lambda batch: (loss(batch), len(batch["y"])))
for step in run.steps(6, batch_size=4, microbatch_size=2):
    for batch in step.batches(data, version="1"):
        step.backward(loss(batch), len(batch["y"]))
    if step.number == 3:
        exec(sys.argv[1])
    step.apply()
print("weight", model[0].weight.sum().item().hex())
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_python_alone_stops_in_a_debugger_and_goes_on(script: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(script), "breakpoint()"],
        input="p 'at step', step.number\nc\n",
        capture_output=True,
        text=True,
        check=True,
        cwd=script.parent,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert "('at step', 3)" in done.stdout
    assert "weight" in done.stdout
    assert "train.py trains alone, and saves nothing" in done.stderr
    assert "step 6: validation loss" in done.stderr
    assert sorted(script.parent.iterdir()) == [script]


def test_an_error_and_a_key_of_another_kind_are_named(script: Path) -> None:
    done = apart("run", script, "--debug", "--set", "logging.trackers=csv", "--", "1 / 0")
    assert done.code == 2
    assert "holdfast: train.py:18: ZeroDivisionError: division by zero" in done.err
    assert "not used by a script that trains alone: logging.trackers" in done.err
    within("run", script, "--debug", "--fresh").refuses("leave out --workers, --folder, --fresh")


def test_one_of_several_processes_does_not_train_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(TaskError, match=r"one of 4 .*holdfast run SCRIPT --workers 4"):
        holdfast.run()


@pytest.mark.slow
def test_the_numbers_are_those_of_a_run_with_one_worker(script: Path, tmp_path: Path) -> None:
    debugged = apart("run", script, "--debug", "--set", "seed=3", "--", "pass")
    folder = tmp_path / "run"
    trained = apart("run", script, "--folder", folder, "--set", "seed=3", "--", "pass")
    assert trained.code == debugged.code == 0, trained.err
    (log,) = folder.glob("logs/*/rank0.log")
    assert debugged.out.strip() in log.read_text()
