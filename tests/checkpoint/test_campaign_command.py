"""Torn and rotten checkpoints under the real command.

One run trains to its end. Copies of its folder are damaged, and `holdfast train` is asked to go on
with another number of workers: it begins from the newest good checkpoint, says which ones it passed
over, trains the rest again, and its last checkpoint holds the same bytes as that of the run that
nobody disturbed. Where nothing good is left, it says so in one sentence and begins nothing.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.checkpoint.restore import Checkpoint, listing
from holdfast.events import CheckpointRejected
from holdfast.spec.boxes import whole
from holdfast.wire.journal import read
from holdfast.wire.runstore import FolderStore
from tests.cli.support import Outcome, apart, write_run_file

STEPS = 12
SETTINGS = (
    f"train.steps={STEPS}", "train.evaluate.every=0", "checkpoint.every_steps=3",
    "checkpoint.keep_last=4", "cluster.threads_per_worker=1", "train.batch_size=6",
)  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run file, and beside it the folder of its finished run; tests must not change it."""
    run_file = write_run_file(tmp_path_factory.mktemp("rotten"))
    outcome = apart("train", run_file, f"folder={run_file.parent / 'whole'}", *SETTINGS,
                    "layout.workers=2")  # fmt: skip
    assert outcome.code == 0, outcome.err
    store = FolderStore(run_file.parent / "whole")
    assert [Checkpoint.open(store, key).step for key in listing(store)] == [12, 9, 6, 3]
    return run_file


def tensors(folder: Path) -> dict[str, bytes]:
    """Every tensor of the newest checkpoint, which is that of the last step."""
    store = FolderStore(folder)
    checkpoint = Checkpoint.open(store, listing(store)[0])
    assert checkpoint.step == STEPS
    found = {}
    for spec in checkpoint.tensors:
        out = bytearray(spec.nbytes)
        checkpoint.read(whole(spec.name, spec.shape), memoryview(out))
        found[spec.name] = bytes(out)
    return found


def go_on(finished: Path, folder: Path, workers: int) -> Outcome:
    return apart("train", finished, f"folder={folder}", *SETTINGS, f"layout.workers={workers}")


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
    step = int(path.name[:10])
    before = path.with_name(path.name.replace(f"{step:010d}", f"{step - 3:010d}"))
    path.write_bytes(before.read_bytes())


DAMAGE: dict[str, Callable[[Path, random.Random], None]] = {
    "flip_payload": flip_payload, "cut": cut, "remove": remove, "older": older, "flip": flip,
}  # fmt: skip


def of_step(folder: Path, step: int, how: str) -> list[Path]:
    """The files of a step that this damage is for."""
    if how == "flip":
        key = next(k for k in listing(FolderStore(folder)) if f"{2**64 - 1 - step:016x}" in k)
        return [folder / key]
    return sorted(folder.glob(f"data/*/{step:010d}-rank*"))


def damaged(finished: Path, tmp_path: Path, steps: list[int], seed: int, how: str) -> Path:
    folder = tmp_path / "run"
    shutil.copytree(finished.parent / "whole", folder)
    rng = random.Random(seed)
    for step in steps:
        DAMAGE[how](rng.choice(of_step(folder, step, how)), rng)
    return folder


CASES = [
    pytest.param("flip_payload", [12, 9], 3, 1),
    *(
        pytest.param(how, steps, workers, seed, marks=pytest.mark.slow)
        for seed, (how, steps, workers) in enumerate(
            [("cut", [12], 1), ("remove", [12], 3), ("older", [12], 2), ("flip", [12], 3),
             ("flip_payload", [12], 2), ("cut", [12, 9, 6], 2), ("flip", [12, 9], 1),
             ("older", [12, 9], 3)],
            2,
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("how", "steps", "workers", "seed"), CASES)
def test_a_run_goes_on_from_the_newest_good_checkpoint(
    finished: Path, tmp_path: Path, how: str, steps: list[int], workers: int, seed: int
) -> None:
    folder = damaged(finished, tmp_path, steps, seed, how)
    outcome = go_on(finished, folder, workers)
    assert outcome.code == 0, outcome.err
    assert tensors(folder) == tensors(finished.parent / "whole")
    events = [record.event for record in read(FolderStore(folder))]
    rejected = [event.step for event in events if isinstance(event, CheckpointRejected)]
    assert sorted(set(rejected), reverse=True) == steps


def test_where_nothing_good_is_left_it_says_so_and_begins_nothing(
    finished: Path, tmp_path: Path
) -> None:
    folder = damaged(finished, tmp_path, [12, 9, 6, 3], 5, "flip_payload")
    go_on(finished, folder, 2).refuses_last("none of 4 checkpoints can be trusted", "--fresh")
    assert len(listing(FolderStore(folder))) == 4
