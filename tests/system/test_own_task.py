"""Promises 1 and 2 for a model of the user's own, under the real command.

One worker trains undisturbed. The same run with other workers and a SIGKILL ends with the same
bits, and its ledger is complete.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import holdfast
from holdfast.events import Evaluated, GenerationStarted, RunFinished, StepDone
from holdfast.wire.journal import read_journal
from holdfast.wire.store.run_store import FolderStore
from tests.support import sample_tasks
from tests.support.commands import apart, start
from tests.support.followed_run import FollowedRun, assert_same_bits, run_with_a_kill

STEPS = 40
RUN_FILE = """\
name: own
folder: run
device: cpu
task: my_task:{name}
train:
  steps: 40
  batch_size: 12
  microbatch_size: 2
  optimizer: {{learning_rate: 0.01, clip_norm: 0.05}}
layout: {{workers: 1}}
checkpoint: {{every_steps: 10}}
cluster: {{threads_per_worker: 1}}
"""


def _write(folder: Path, name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(str(sample_tasks.__file__), folder / "my_task.py")
    (folder / "random.py").write_text("raise RuntimeError('a child took this for its own')\n")
    path = folder / "run.yaml"
    path.write_text(RUN_FILE.format(name=name))
    return path


@pytest.mark.slow
def test_a_task_is_exported_under_its_own_names_and_says_what_it_costs(tmp_path: Path) -> None:
    run_file = _write(tmp_path, "Named")
    apart("train", run_file, "train.steps=4", f"folder={tmp_path / 'run'}").succeeds()
    done = apart(
        "export", tmp_path / "run", "--to", tmp_path / "out", "--dtype", "bfloat16"
    ).succeeds()
    assert "tokenizer" not in done.err
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    kept = holdfast.open_checkpoint(tmp_path / "run").parameters()
    assert loaded.keys() == {f"net.{name}" for name in kept if not name.startswith("unused.")}
    for name, value in loaded.items():
        assert torch.equal(value, kept[name.removeprefix("net.")].to(torch.bfloat16))
    planned = json.loads((tmp_path / "run" / "resolved.json").read_text())
    assert planned["config"]["task"]["flops"] == 6.0 * 5 * 12 * 12
    refused = apart("generate", tmp_path / "run", "a")
    assert (refused.code, "generating text is for" in refused.err) == (2, True)


def _kill_and_compare(tmp_path: Path, name: str, workers: list[int]) -> None:
    run_file, alone = _write(tmp_path, name), tmp_path / "alone"
    apart("train", run_file, f"folder={alone}", deadline=240).succeeds()
    for number in workers:
        folder = tmp_path / f"killed{number}"
        changes = (f"folder={folder}", f"layout.workers={number}")
        found = run_with_a_kill(folder, 7, "train", run_file, *changes)
        assert sum(isinstance(e, RunFinished) for e in found.events) == 1
        assert_same_bits(alone, folder, STEPS)
        # The audit imports this folder's task.
        audit = apart("data", "audit", folder).succeeds()
        assert f"{12 * STEPS:,} samples in {STEPS} steps: none missing, none twice" in audit.out


@pytest.mark.slow
def test_a_kill_changes_no_bit(tmp_path: Path) -> None:
    _kill_and_compare(tmp_path, "Tied", [3])
    folder = tmp_path / "killed3"
    assert holdfast.summary(folder)["last_step"] == STEPS
    records = holdfast.journal(folder)
    assert {record["kind"] for record in records} >= {"step_done", "worker_lost", "run_finished"}
    stop = threading.Event()
    followed = holdfast.follow(folder, stop)
    assert next(followed) == records[0]
    stop.set()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Gru", "Convolution", "Normed", "Tied", "EncoderDecoder", "Gpt2"])
def test_a_kill_changes_no_bit_with_other_numbers_of_workers(tmp_path: Path, name: str) -> None:
    _kill_and_compare(tmp_path, name, [1, 2, 3])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *(("Gru", ["layout.dp_shard=2", f"layout.zero={zero}"]) for zero in (1, 2, 3)),
        ("Heads", ["layout.tp=2"]),
    ],
)
def test_a_sharded_run_is_killed_resumed_and_restored_on_another_layout(
    tmp_path: Path, name: str, layout: list[str]
) -> None:
    run_file, folder = _write(tmp_path, name), tmp_path / "sharded"
    exact = ["train.precision=float64"] if name == "Heads" else []
    layout, tolerance = ["layout.workers=2", *layout, *exact], 1e-6 if exact else 2e-5
    apart("train", run_file, f"folder={tmp_path / 'alone'}", *exact, deadline=240).succeeds()
    process = start("train", run_file, f"folder={folder}", *layout)
    run = FollowedRun(folder, process)
    run.until_step(12)
    os.kill(run.pids[1], signal.SIGKILL)
    run.until_step(25)
    process.send_signal(signal.SIGTERM)
    run.end()
    apart(
        "train", run_file, f"folder={folder}", "layout.workers=2", *exact, deadline=240
    ).succeeds()
    one, two = holdfast.open_checkpoint(tmp_path / "alone"), holdfast.open_checkpoint(folder)
    assert two.step == STEPS
    for name in (name for name in one.names if name.startswith("model.")):
        assert (one[name] - two[name]).abs().max() < tolerance, name


@pytest.mark.slow
def test_a_kill_of_a_replica_of_a_cut_module_changes_no_bit(tmp_path: Path) -> None:
    """Two workers are a replica (tp 2), and there are two. The cut layers have dropout inside."""
    run_file, alone = _write(tmp_path, "Heads"), tmp_path / "alone"
    changes = ["layout.tp=2", "task.args.dropout=0.2"]
    apart(
        "train", run_file, f"folder={alone}", "layout.workers=2", *changes, deadline=240
    ).succeeds()
    folder = tmp_path / "killed"
    four = (f"folder={folder}", "layout.workers=4", *changes)
    run_with_a_kill(folder, 7, "train", run_file, *four)
    assert_same_bits(alone, folder, STEPS)
    planned = json.loads((folder / "resolved.json").read_text())["config"]["task"]["sharding"]
    assert "blocks.0.q.weight 0 4" in planned


@pytest.mark.slow
def test_a_mean_ends_the_run_at_once_and_a_changed_source_is_refused(tmp_path: Path) -> None:
    run_file, module = _write(tmp_path, "Gru"), tmp_path / "my_task.py"
    right = module.read_text()
    module.write_text(right.replace('reduction="sum"', 'reduction="mean"'))
    mean = apart("train", run_file, "layout.workers=2")
    mean.refuses_last("it is a mean", "return the sum")
    events = [record.event for record in read_journal(FolderStore(tmp_path / "run"))]
    assert sum(isinstance(event, GenerationStarted) for event in events) == 1

    module.write_text(right)
    other = apart("train", run_file)
    other.refuses_last("another source of task my_task:Gru", "--fresh")


@pytest.mark.slow
def test_a_branch_of_a_task_ends_like_its_parent(tmp_path: Path) -> None:
    """And the validation of the task is in the journal."""
    run_file, folder = _write(tmp_path, "Gru"), tmp_path / "run"
    short = ["train.steps=12", "train.evaluate.every=5", "checkpoint.every_steps=6"]
    apart("train", run_file, *short).succeeds()
    events = [record.event for record in read_journal(FolderStore(folder))]
    found = [event for event in events if isinstance(event, Evaluated)]
    assert [(e.step, e.tokens, e.bits_per_byte) for e in found] == [
        (n, 9, None) for n in (5, 10, 12)
    ]
    validation = holdfast.summary(folder)["validation"]
    assert validation["loss"] == found[-1].loss

    elsewhere = tmp_path / "branches" / "twin"
    apart("branch", folder, "--at", "6", "--to", elsewhere).succeeds()
    apart("train", elsewhere / "run.yaml").succeeds()
    one, other = holdfast.open_checkpoint(folder), holdfast.open_checkpoint(elsewhere)
    assert one.step == other.step == 12
    assert all(torch.equal(one[name], other[name]) for name in one.names)
    refused = apart("branch", folder, "--at", "6", "--to", tmp_path / "x", "task.args.hidden=4")
    refused.refuses("task.args cannot change in a branch")


@pytest.mark.slow
def test_a_kill_in_a_pipeline_changes_no_bit_and_it_moves_to_one_worker(tmp_path: Path) -> None:
    """Two stages of a tagger with dropout. Both runs have the losses of one worker to 1e-10."""
    run_file, two = _write(tmp_path, "Stack"), ("layout.pp=2", "layout.workers=2")
    exact = ("train.precision=float64", "checkpoint.every_steps=5", "train.schedule.steps=40")
    folders = {name: tmp_path / name for name in ("alone", "calm", "killed")}
    apart("train", run_file, f"folder={folders['alone']}", *exact, deadline=240).succeeds()
    apart("train", run_file, f"folder={folders['calm']}", *exact, *two, deadline=240).succeeds()
    changes = (f"folder={folders['killed']}", *exact, *two)
    run_with_a_kill(folders["killed"], 12, "train", run_file, *changes)
    assert_same_bits(folders["calm"], folders["killed"], STEPS)
    losses = {name: _all_losses(folder) for name, folder in folders.items()}
    assert losses["killed"] == losses["calm"]
    assert list(losses["calm"].values()) == pytest.approx([*losses["alone"].values()], rel=1e-10)
    more = ("train.steps=45", "layout.workers=1")
    for name in ("alone", "killed"):
        apart("train", run_file, f"folder={folders[name]}", *exact, *more).succeeds()
    one, other = (_all_losses(folders[name]) for name in ("alone", "killed"))
    assert list(other.values()) == pytest.approx(list(one.values()), rel=1e-10)


def _all_losses(folder: Path) -> dict[int, float]:
    """Of all steps. A step that was done twice has the same bits."""
    found: dict[int, float] = {}
    for record in read_journal(FolderStore(folder)):
        if isinstance(record.event, StepDone):
            assert found.setdefault(record.event.step, record.event.loss) == record.event.loss
    return found
