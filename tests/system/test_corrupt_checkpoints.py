"""Torn and corrupt checkpoints under the real command.

A run and its trainer are killed when it has several checkpoints. One copy of its folder continues
undisturbed to the end. Other copies are damaged, and `holdfast train` continues with another number
of workers. It begins from the newest good checkpoint and says which ones it skipped. Its last
checkpoint holds the same bytes as the undisturbed one's. If nothing good is left, it says so in one
sentence and begins nothing.
"""

from __future__ import annotations

import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.checkpoint.restore.catalog import list_commits, step_of
from holdfast.events import CheckpointRejected
from holdfast.wire.journal import read_journal
from holdfast.wire.store.run_store import FolderStore
from tests.support.checkpoints import newest_tensors
from tests.support.commands import Outcome, apart, start, write_run_file
from tests.support.ranks import wait_until

STEPS = 60
SETTINGS = (
    f"train.steps={STEPS}",
    "train.evaluate.every=0",
    "checkpoint.every_steps=8",
    "checkpoint.keep_last=9",
    "cluster.threads_per_worker=1",
    "train.batch_size=6",
)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run file, and next to it the folder of its killed run; tests must not change it."""
    run_file = write_run_file(tmp_path_factory.mktemp("rotten"))
    folder = run_file.parent / "killed"
    process = start("train", run_file, f"folder={folder}", *SETTINGS, "layout.workers=2")
    try:
        enough = lambda: folder.is_dir() and len(steps_of(folder)) >= 4  # noqa: E731
        wait_until(lambda: enough() or process.poll() is not None, 120, "four checkpoints")
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == -signal.SIGKILL, "it ended before it was killed"
    return run_file


@pytest.fixture(scope="module")
def undisturbed(killed: Path) -> Path:
    """The folder of the same run, continued to its end."""
    folder = killed.parent / "whole"
    shutil.copytree(killed.parent / "killed", folder)
    outcome = go_on(killed, folder, 2)
    assert outcome.code == 0, outcome.err
    return folder


def steps_of(folder: Path) -> list[int]:
    """Newest first. On a machine that is busy a run skips some."""
    return [step_of(key) for key in list_commits(FolderStore(folder))]


def go_on(run_file: Path, folder: Path, workers: int) -> Outcome:
    return apart("train", run_file, f"folder={folder}", *SETTINGS, f"layout.workers={workers}")


def flip(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def flip_payload(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    data[rng.randrange(start, len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def cut(path: Path, rng: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: rng.randrange(len(data))])


def remove(path: Path, rng: random.Random) -> None:
    path.unlink()


def older(path: Path, rng: random.Random) -> None:
    """The bytes of the same writer's earlier step."""
    before = [other for other in sorted(path.parent.glob(f"*{path.name[10:]}")) if other < path]
    path.write_bytes(before[-1].read_bytes())


DAMAGE: dict[str, Callable[[Path, random.Random], None]] = {
    "flip_payload": flip_payload,
    "cut": cut,
    "remove": remove,
    "older": older,
    "flip": flip,
}


def of_step(folder: Path, step: int, how: str) -> list[Path]:
    """The files of a step that this damage is for."""
    if how == "flip":
        key = next(k for k in list_commits(FolderStore(folder)) if f"{2**64 - 1 - step:016x}" in k)
        return [folder / key]
    return sorted(folder.glob(f"data/*/{step:010d}-rank*"))


def damaged(whole: Path, folder: Path, count: int, seed: int, how: str) -> list[int]:
    """Make a copy of a run whose newest `count` checkpoints are broken; their steps."""
    shutil.copytree(whole, folder)
    steps = steps_of(folder)[:count]
    rng = random.Random(seed)
    for step in steps:
        DAMAGE[how](rng.choice(of_step(folder, step, how)), rng)
    return steps


def rejected(folder: Path) -> list[int]:
    """The steps that were passed over, newest first."""
    events = [record.event for record in read_journal(FolderStore(folder))]
    return sorted({e.step for e in events if isinstance(e, CheckpointRejected)}, reverse=True)


pytestmark = pytest.mark.slow

CASES = [
    (how, count, workers, seed)
    for seed, (how, count, workers) in enumerate(
        [
            ("flip_payload", 2, 3),
            ("cut", 1, 1),
            ("remove", 1, 3),
            ("older", 1, 2),
            ("flip", 1, 3),
            ("flip_payload", 1, 2),
            ("cut", 3, 2),
            ("flip", 2, 1),
            ("older", 2, 3),
        ],
        1,
    )
]


@pytest.mark.parametrize(("how", "count", "workers", "seed"), CASES)
def test_a_run_goes_on_from_the_newest_good_checkpoint(
    killed: Path, undisturbed: Path, tmp_path: Path, how: str, count: int, workers: int, seed: int
) -> None:
    folder = tmp_path / "run"
    steps = damaged(killed.parent / "killed", folder, count, seed, how)
    outcome = go_on(killed, folder, workers)
    assert outcome.code == 0, outcome.err
    assert newest_tensors(folder, STEPS) == newest_tensors(undisturbed, STEPS)
    assert rejected(folder) == steps


def test_a_run_is_not_finished_with_a_rotten_last_checkpoint(
    killed: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """The trainer ended before it could say that the run is finished: no worker would read the
    last checkpoint any more."""
    folder = tmp_path / "run"
    steps = damaged(undisturbed, folder, 1, 9, "flip_payload")
    for segment in folder.glob("journal/*/*.jsonl"):
        lines = segment.read_text().splitlines(keepends=True)
        segment.write_text("".join(line for line in lines if "run_finished" not in line))
    outcome = go_on(killed, folder, 3)
    assert outcome.code == 0, outcome.err
    assert newest_tensors(folder, STEPS) == newest_tensors(undisturbed, STEPS)
    assert rejected(folder) == steps == [STEPS]


def test_where_nothing_good_is_left_it_says_so_and_begins_nothing(
    killed: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    steps = damaged(killed.parent / "killed", folder, 100, 5, "cut")
    go_on(killed, folder, 2).refuses_last(
        f"none of {len(steps)} checkpoints can be trusted", "--fresh", code=3
    )
    assert steps_of(folder) == steps
