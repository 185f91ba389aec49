"""Promise 1 across layouts, from outside. A run loses a worker, is asked to leave, and continues
under another layout on another number of workers. It ends like a run on one worker."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from holdfast.checkpoint.restore.catalog import list_commits
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.core.sharding.boxes import Box
from holdfast.events import Evaluated, GenerationStarted, StepDone, WorkerLost
from holdfast.wire.journal import read_journal
from holdfast.wire.store.run_store import FolderStore
from tests.support.commands import apart, start, within, write_run_file
from tests.support.followed_run import FollowedRun
from tests.support.ranks import DEADLINE_S

STEPS, KILL, LEAVE = 30, 4, 8
SETTINGS = (
    f"train.steps={STEPS}",
    "train.batch_size=6",
    "train.microbatch_size=2",
    "train.precision=float64",
    "data.sequence_length=17",  # an odd number, which tp 2 has to cut
    "train.optimizer.clip_norm=0.05",
    "train.evaluate.every=5",
    "checkpoint.every_steps=4",
    "cluster.threads_per_worker=1",
    "model.layers=3",
    "model.heads=4",
    "model.kv_heads=2",
)


SHARDED = ("layout.workers=4", "layout.dp_shard=2")
PIPELINED = ("layout.workers=4", "layout.pp=2", "layout.tp=2")
UNLIKE = ("layout.workers=3", "layout.replicas=[{pp: 2, stages: [1, 2]}, {}]")
Kinds = list[tuple[list[int], list[int]]]
ONE: Kinds = [([1, 1, 1, 1], [])]


@pytest.mark.parametrize(
    ("before", "after", "kinds"),
    [
        pytest.param(
            SHARDED,
            ("layout.workers=3",),
            ([([1, 2, 1, 1], [])] * 2, ONE * 3),
            id="dpshard2-dp2_to_dp3",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            PIPELINED,
            UNLIKE,
            ([([2, 1, 1, 2], [2, 1])], [([2, 1, 1, 1], [1, 2]), *ONE]),
            id="pp2-tp2_to_pp2+one",
        ),
    ],
)
def test_killed_and_resumed_under_another_layout_is_the_run_of_one_worker(
    before: tuple[str, ...], after: tuple[str, ...], kinds: tuple[Kinds, Kinds], tmp_path: Path
) -> None:
    """Its validations too, of which each layout makes some."""
    run_file = write_run_file(tmp_path)
    alone, moved = tmp_path / "alone", tmp_path / "moved"
    apart(
        "train", run_file, f"folder={alone}", *SETTINGS, "layout.workers=1", deadline=DEADLINE_S
    ).succeeds()
    _disturbed_until_told_to_leave(run_file, moved, before)
    apart("train", run_file, f"folder={moved}", *SETTINGS, *after, deadline=DEADLINE_S).succeeds()
    assert _kinds(moved) == kinds

    for name, want in _state(alone).items():
        error = np.linalg.norm(_state(moved)[name] - want) / np.linalg.norm(want)
        assert error < 1e-10, name
    validations = [_validations(folder) for folder in (alone, moved)]
    assert list(validations[0]) == list(range(5, STEPS + 1, 5))
    assert sorted(validations[1]) == list(validations[0])
    np.testing.assert_allclose(
        [validations[1][step] for step in validations[0]], list(validations[0].values()), rtol=1e-10
    )
    audit = within("data", "audit", moved)
    assert "none missing, none twice" in audit.out


def _disturbed_until_told_to_leave(run_file: Path, folder: Path, layout: tuple[str, ...]) -> None:
    """Four workers, of which one gets SIGKILL; later the agent gets SIGTERM."""
    process = start("train", run_file, f"folder={folder}", *SETTINGS, *layout)
    run = FollowedRun(folder, process)
    run.until_step(KILL)
    os.kill(run.pids[3], signal.SIGKILL)
    # Late reports of the generation that was hit do not count.
    run.until_step(LEAVE, generation=2)
    process.send_signal(signal.SIGTERM)
    run.finish()
    assert [e.cause for e in run.events(WorkerLost)] == ["SIGKILL"]
    assert run.events(StepDone)[-1].step < STEPS, "it left too late"


def _state(folder: Path) -> dict[str, NDArray[np.float64]]:
    """Every tensor of the last checkpoint."""
    store = FolderStore(folder)
    checkpoint = Checkpoint.open(store, list_commits(store)[0])
    assert checkpoint.step == STEPS
    out = {}
    for spec in checkpoint.tensors:
        value = np.empty(spec.shape, np.float64)
        checkpoint.read(Box(spec.name, (0,) * len(spec.shape), spec.shape), value.data.cast("B"))
        out[spec.name] = value
    return out


def _kinds(folder: Path) -> tuple[Kinds, Kinds]:
    """The replicas' mesh shapes and stages in the first generation and in the last."""
    events = [record.event for record in read_journal(FolderStore(folder))]
    begun = [e.topology["replicas"] for e in events if isinstance(e, GenerationStarted)]
    first, last = ([(r["mesh_shape"], r.get("stages", [])) for r in begun[at]] for at in (0, -1))
    return first, last


def _validations(folder: Path) -> dict[int, float]:
    """Loss of each validation; of one that was made twice, the last."""
    events = [record.event for record in read_journal(FolderStore(folder))]
    return {e.step: e.loss for e in events if isinstance(e, Evaluated)}
