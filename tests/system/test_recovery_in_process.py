"""Recovery in the same process, from outside: surviving workers continue, and nothing is lost.

Real runs of `holdfast train`. Processes are killed, and the surviving ones keep their process ids.
The end is that of an undisturbed run, to the bit if only replicas changed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from holdfast.checkpoint.restore.catalog import list_commits
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.core.data.lineage import split_effective
from holdfast.core.sharding.boxes import whole_box
from holdfast.events import (
    GenerationStarted,
    RestorePointFound,
    RunFinished,
    StepDone,
    WorkerHeld,
    WorkerLost,
)
from holdfast.report.history import history
from holdfast.wire.journal import read_journal
from holdfast.wire.store.run_store import FolderStore
from tests.support.commands import apart, start, within
from tests.support.faulty_trainer import DEEDS
from tests.support.followed_run import DEADLINE, FollowedRun
from tests.support.processes import children_of
from tests.support.ranks import ROOT

STEPS = 40
SETTINGS = (
    f"train.steps={STEPS}",
    "train.batch_size=6",
    "train.precision=float64",
    "train.evaluate.every=0",
    "train.optimizer.clip_norm=0.05",
    "checkpoint.every_steps=1000",
    "cluster.threads_per_worker=1",
)

ALONE = "cluster.settle_seconds=1000"
"""A worker that is ready to join waits until the end of the run."""


@pytest.fixture(scope="module")
def alone(run_file: Path) -> Path:
    """One worker, undisturbed."""
    folder = run_file.parent / "alone"
    apart(
        "train", run_file, f"folder={folder}", *SETTINGS, "layout.workers=1", deadline=DEADLINE
    ).succeeds()
    return folder


@contextmanager
def _running(folder: Path, process: subprocess.Popen[str]) -> Iterator[FollowedRun]:
    try:
        yield FollowedRun(folder, process)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _train(run_file: Path, name: str, *settings: str) -> AbstractContextManager[FollowedRun]:
    folder = run_file.parent / name
    return _running(folder, start("train", run_file, f"folder={folder}", *SETTINGS, *settings))


def _befallen(
    run_file: Path, name: str, deeds: dict[str, Any], *settings: str
) -> AbstractContextManager[FollowedRun]:
    folder = run_file.parent / name
    process = start(
        *(run_file, f"folder={folder}", *SETTINGS, *settings),
        folder=ROOT,
        module="tests.support.faulty_trainer",
        environ={DEEDS: json.dumps(deeds)},
    )
    return _running(folder, process)


def _state(folder: Path) -> dict[str, NDArray[np.float64]]:
    """Every tensor of the last checkpoint."""
    store = FolderStore(folder)
    checkpoint = Checkpoint.open(store, list_commits(store)[0])
    assert checkpoint.step == STEPS
    out = {}
    for spec in checkpoint.tensors:
        value = np.empty(spec.shape, np.float64)
        checkpoint.read(whole_box(spec.name, spec.shape), value.data.cast("B"))
        assert np.any(value), f"{spec.name} is all zeros"
        out[spec.name] = value
    return out


def _every_step_once(folder: Path, alone: Path, rel: float) -> None:
    """The losses of the undisturbed run, each step reported, each sample used once."""
    curves = [
        {
            r.event.step: r.event.loss
            for r in split_effective(read_journal(FolderStore(f)))[0]
            if isinstance(r.event, StepDone)
        }
        for f in (folder, alone)
    ]
    assert list(curves[0]) == list(range(1, STEPS + 1))
    for step, loss in curves[1].items():
        assert curves[0][step] == pytest.approx(loss, rel=rel)
    audit = within("data", "audit", folder).succeeds()
    assert f"{6 * STEPS:,} samples in {STEPS} steps: none missing, none twice" in audit.out


def _same_bits(folder: Path, alone: Path) -> None:
    one, other = _state(folder), _state(alone)
    for name, value in one.items():
        assert np.array_equal(value, other[name]), name


@pytest.mark.slow
def test_of_four_replicas_whoever_is_not_hit_stays(run_file: Path, alone: Path) -> None:
    """Rank 0 is lost; then two at once; then the fork server, and the mover. (No worker joins them:
    test_rung0 covers that.)"""
    with _train(run_file, "replicas", "layout.workers=4", ALONE) as run:
        run.until_step(3, 1)
        first = dict(run.pids)
        os.kill(first[0], signal.SIGKILL)
        run.until_step(8, 2)
        second = dict(run.pids)
        assert sorted(second.values()) == sorted([first[1], first[2], first[3]])

        os.kill(first[1], signal.SIGKILL)
        os.kill(first[3], signal.SIGKILL)
        run.until(lambda r: isinstance(r.event, StepDone) and run.pids == {0: first[2]})

        for module in ("holdfast.elastic.worker.fork_server", "holdfast.checkpoint.mover.main"):
            (child,) = children_of(run.process.pid, module)
            child.kill()
        run.finish()
        assert run.pids == {0: first[2]}, "their ends are nobody's"

    begun = run.events(GenerationStarted)
    assert begun[0].reason == "start"
    for event in begun[1:]:
        assert event.came_from is not None, "nobody began from anything but what he held"
        assert (event.reason, event.rung, event.restored_from) == ("worker_lost", 0, None)
    notes = [json.loads(path.read_text()) for path in sorted((run.folder / "starts").iterdir())]
    assert notes[0] == {"step": 0}
    assert notes[1:], "who went on has noted from where"
    assert {note.get("stored") for note in notes[1:]} == {False}, "and read no checkpoint"
    lost = run.events(WorkerLost)
    assert sorted(event.pid for event in lost) == sorted([first[0], first[1], first[3]])
    assert {event.cause for event in lost} == {"SIGKILL"}
    assert len(run.events(RunFinished)) == 1
    _every_step_once(run.folder, alone, 0.0)
    _same_bits(run.folder, alone)
    story = history.read_history(FolderStore(run.folder))
    assert sum(incident.steps_lost for incident in story.incidents) <= len(begun) - 1
    assert story.time["recovery"] > 0
    assert sum(story.time.values()) == pytest.approx(story.wall)


ON_A_DEVICE = {"ranks_per_device": 0}
"""The stand-in, with all of its row as it is."""


@pytest.mark.slow
def test_on_a_device_whoever_is_not_hit_stays(run_file: Path, alone: Path) -> None:
    """Nothing but the agent says that a rank is lost (`tests/support/fake_nccl.py`)."""
    deeds = {"on a device": ON_A_DEVICE}
    with _befallen(run_file, "device", deeds, "layout.workers=3", ALONE) as run:
        run.until_step(3, 1)
        first = dict(run.pids)
        os.kill(first[0], signal.SIGKILL)
        run.until_step(8, 2)
        assert sorted(run.pids.values()) == sorted([first[1], first[2]])
        run.finish()
    begun = run.events(GenerationStarted)[1:]
    assert [(event.reason, event.rung) for event in begun] == [("worker_lost", 0)]
    _every_step_once(run.folder, alone, 0.0)
    _same_bits(run.folder, alone)


@pytest.mark.slow
def test_the_rank_whose_kernel_hangs_is_named_and_replaced(run_file: Path, alone: Path) -> None:
    """All ranks wait, and each of them is heard. Only the devices tell whom they wait for."""
    deeds = {"on a device": ON_A_DEVICE, "kernel hangs": [1, 1, 9]}
    with _befallen(run_file, "hang", deeds, "layout.workers=3", ALONE) as run:
        run.until_step(8, 1)
        first = dict(run.pids)
        run.until_step(12, 2)
        assert sorted(run.pids.values()) == sorted([first[0], first[2]])
        run.finish()
    (lost,) = run.events(WorkerLost)
    assert (lost.rank, lost.noticed_by) == (1, "device")
    assert "its device has not reached an exchange for" in lost.cause
    begun = run.events(GenerationStarted)[1:]
    assert [(event.reason, event.rung) for event in begun] == [("hang", 0)]
    _every_step_once(run.folder, alone, 0.0)
    _same_bits(run.folder, alone)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp_shard", "tp"])
def test_on_a_device_a_broken_replica_begins_from_memory(
    run_file: Path, alone: Path, layout: str
) -> None:
    settings = (
        f"layout.{layout}=2",
        "layout.workers=2",
        "checkpoint.memory_every_steps=1",
        "train.microbatch_size=2",
    )
    deeds = {"on a device": ON_A_DEVICE, "last": [[3, 12, 250]]}
    with _befallen(run_file, f"device-{layout}", deeds, *settings) as run:
        run.until_step(5, 1)
        before = dict(run.pids)
        os.kill(before[1], signal.SIGKILL)
        run.until_step(9, 2)
        assert run.pids[0] == before[0], "its aborts came to an end, so it stays"
        run.finish()
    second = run.events(GenerationStarted)[1]
    assert (second.reason, second.rung, second.came_from) == ("worker_lost", 2, None)
    _every_step_once(run.folder, alone, 1e-10)


@pytest.mark.slow
def test_where_a_backend_has_no_abort_the_agent_replaces_who_hangs(
    run_file: Path, alone: Path
) -> None:
    settings = (
        "layout.dp_shard=2",
        "layout.workers=2",
        "checkpoint.memory_every_steps=1",
        "train.microbatch_size=2",
    )
    deeds = {"on a device": {**ON_A_DEVICE, "can_abort": False}, "last": [[3, 12, 250]]}
    with _befallen(run_file, "no-abort", deeds, *settings) as run:
        run.until_step(5, 1)
        before = dict(run.pids)
        os.kill(before[1], signal.SIGKILL)
        run.until_step(9, 2)
        assert not set(run.pids.values()) & set(before.values())
        run.finish()
    _every_step_once(run.folder, alone, 1e-10)


@pytest.mark.slow
def test_a_process_that_has_made_enough_groups_is_replaced(run_file: Path, alone: Path) -> None:
    """Rank 0 joins the second generation as its last: it ends when that is halted."""
    deeds = {"on a device": {**ON_A_DEVICE, "regroups_per_process": 2}, "raise": [[2, 1, 9]]}
    settings = ("layout.workers=3", ALONE)
    with _befallen(run_file, "worn", deeds, *settings) as run:
        run.until_step(3, 1)
        first = dict(run.pids)
        os.kill(first[2], signal.SIGKILL)
        run.finish()
    third = run.events(GenerationStarted)[2]
    assert (third.reason, third.came_from) == ("error", [1]), "rank 0 has ended"
    _every_step_once(run.folder, alone, 0.0)
    _same_bits(run.folder, alone)


@pytest.mark.parametrize("layout", ["dp_shard", pytest.param("tp", marks=pytest.mark.slow)])
def test_what_only_the_lost_one_held_comes_from_memory(
    run_file: Path, alone: Path, layout: str
) -> None:
    """Steps last a quarter of a second, so that a mover on a busy machine keeps up. Then no worker
    goes further back than to the last step, or the one before while it is copied."""
    settings = (
        f"layout.{layout}=2",
        "layout.workers=2",
        "checkpoint.memory_every_steps=1",
        "train.microbatch_size=2",
    )
    with _befallen(run_file, layout, {"last": [[3, 12, 250]]}, *settings) as run:
        run.until_step(5, 1)
        before = dict(run.pids)
        os.kill(before[1], signal.SIGKILL)
        run.until_step(9, 2)
        assert run.pids[0] == before[0]
        assert run.pids[1] != before[1]
        run.finish()
    second = run.events(GenerationStarted)[1]
    assert (second.reason, second.rung, second.came_from) == ("worker_lost", 2, None)
    assert [event.durable for event in run.events(RestorePointFound)] == [False]
    reached = max(
        r.event.step
        for r in read_journal(FolderStore(run.folder))
        if r.generation == 1 and isinstance(r.event, StepDone)
    )
    assert second.step >= reached - 1, "memory holds one of the last two steps"
    _every_step_once(run.folder, alone, 1e-10)
    one, other = _state(run.folder), _state(alone)
    for name, value in one.items():
        assert np.linalg.norm(value - other[name]) < 1e-10 * np.linalg.norm(other[name]), name


def test_an_error_ends_no_process_and_a_death_while_they_agree_is_one_more_round(
    run_file: Path, alone: Path
) -> None:
    """Rank 1 raises in step 5. While all agree on what to do, rank 2 dies; while the next ones
    agree, rank 0 does."""
    deeds = {"raise": [[1, 1, 5]], "die agreeing": [[2, 2], [3, 0]]}
    with _befallen(run_file, "error", deeds, "layout.workers=3", ALONE) as run:
        run.until(lambda r: isinstance(r.event, GenerationStarted) and r.generation == 2)
        first = dict(run.pids)
        run.finish()
    begun = run.events(GenerationStarted)
    assert [event.reason for event in begun] == ["start", "error", "worker_lost", "worker_lost"]
    assert [event.rung for event in begun] == [-1, 1, 0, 0]
    assert [event.came_from for event in begun[1:]] == [[0, 1, 2], [0, 1], [1]]
    assert [event.pid for event in run.events(WorkerLost)] == [first[2], first[0]]
    said = [event.why for event in run.events(WorkerHeld) if event.rank == 1]
    assert "ValueError: the test broke it" in said
    _every_step_once(run.folder, alone, 0.0)
    _same_bits(run.folder, alone)
