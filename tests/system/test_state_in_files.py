"""A model whose state is three times what the device may have trains with files.

The device is a number of bytes on a CPU (`train.memory.device_gb`), activations included. Without
files the run is refused. With files it ends with the bits of an undisturbed run without a limit,
although its agent, and before that a worker, is killed.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from holdfast.config.loading.load import load_config
from holdfast.config.sections.memory import GB
from holdfast.data.stream.dataset import Dataset
from holdfast.elastic.node.launch_specs import plan_topology
from holdfast.events import StepDone, WorkerStarted
from holdfast.plan.memory.memory_use import contents_by_rank
from tests.support.checkpoints import newest_tensors
from tests.support.commands import apart, start
from tests.support.journal_reader import Journal
from tests.support.ranks import wait_until

STEPS, DEADLINE = 60, 300.0
MODEL = "model={preset: null, layers: 4, dim: 192, heads: 2, kv_heads: 1, ffn_dim: 576}"
SETTINGS = (
    MODEL,
    f"train.steps={STEPS}",
    "train.evaluate.every=0",
    "checkpoint.every_steps=5",
    "cluster.threads_per_worker=1",
    "layout.workers=2",
)


def _third_of_the_state(run_file: Path) -> float:
    """GB that hold a third of what a rank has."""
    config = load_config(run_file, [MODEL, "layout.workers=2"]).config
    words = Dataset.open(config.data.folder).vocab_size
    model = config.model.model_copy(update={"vocab_size": words})
    config = config.model_copy(update={"model": model})
    (first, *_) = contents_by_rank(config, plan_topology(config, 1, "here"))
    return first.held.total / 3 / GB


def _places(device_gb: float, folder: Path) -> tuple[str, ...]:
    return (
        f"train.memory.device_gb={device_gb}",
        "train.memory.optimizer=file",
        "train.memory.gradients=file",
        f"train.memory.folder={folder}",
        "train.memory.piece_mb=0.05",
    )


@pytest.mark.slow
def test_a_state_of_three_times_the_device_trains_with_files_and_resumes(
    run_file: Path, tmp_path: Path
) -> None:
    device_gb, disk = _third_of_the_state(run_file), tmp_path / "nvme"
    disk.mkdir()
    refused = apart(
        *("train", run_file, f"folder={tmp_path / 'refused'}", *SETTINGS),
        f"train.memory.device_gb={device_gb}",
        deadline=DEADLINE,
    )
    assert refused.code == 2, refused.err
    assert "train.memory.device_gb: a rank needs" in refused.err
    apart(
        "train", run_file, f"folder={tmp_path / 'alone'}", *SETTINGS, deadline=DEADLINE
    ).succeeds()

    folder = tmp_path / "killed"
    command = ("train", run_file, f"folder={folder}", *SETTINGS, *_places(device_gb, disk))
    process, journal = start(*command), Journal(folder)
    try:
        _wait_for_step(journal, 8)
        os.kill(_pids(journal)[1], signal.SIGKILL)
        _wait_for_step(journal, 20)
    finally:
        process.kill()  # the agent: its workers end by themselves
        process.communicate(timeout=DEADLINE)
    apart(*command, deadline=DEADLINE).succeeds()
    first, second = (newest_tensors(path, STEPS) for path in (tmp_path / "alone", folder))
    assert first == second
    assert os.listdir(disk) == []


def _wait_for_step(journal: Journal, step: int) -> None:
    def is_done() -> bool:
        events = [record.event for record in journal.records()]
        return any(isinstance(event, StepDone) and event.step >= step for event in events)

    wait_until(is_done, DEADLINE)


def _pids(journal: Journal) -> dict[int, int]:
    events = (record.event for record in journal.records())
    return {event.rank: event.pid for event in events if isinstance(event, WorkerStarted)}


@pytest.mark.slow
def test_a_missing_folder_ends_the_command_with_one_sentence(
    run_file: Path, tmp_path: Path
) -> None:
    refused = apart(
        *("train", run_file, f"folder={tmp_path / 'run'}", *SETTINGS),
        *_places(0, tmp_path / "not-mounted"),
        deadline=DEADLINE,
    )
    assert refused.code == 2, refused.err
    assert "Traceback" not in refused.err
    assert "train.memory.folder: there is no folder" in refused.err
