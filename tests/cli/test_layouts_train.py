"""The run file's layouts, from `holdfast train` to the last step: the losses of one worker."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from holdfast.events import Evaluated, GenerationStarted
from holdfast.wire.journal import read
from holdfast.wire.runstore import FolderStore
from tests.cli.support import apart, write_run_file

# 17 tokens a sample: tp 2 has to cut an odd number of them.
SETTINGS = ("model.layers=3", "train.batch_size=6", "train.microbatch_size=1",
            "train.precision=float64", "data.sequence_length=17",
            "train.evaluate.every=2")  # fmt: skip


def trained(run_file: Path, name: str, *layout: str) -> tuple[list[float], list[dict[str, object]]]:
    """(validation losses, the replicas of the generation) of a whole run."""
    folder = run_file.parent / name
    done = apart("train", run_file, f"folder={folder}", *SETTINGS, *layout)
    assert done.code == 0, done.err
    events = [record.event for record in read(FolderStore(folder))]
    (began,) = [event for event in events if isinstance(event, GenerationStarted)]
    losses = [event.loss for event in events if isinstance(event, Evaluated)]
    assert len(losses) == 3
    return losses, began.topology["replicas"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    run_file = write_run_file(tmp_path_factory.mktemp("layouts"))
    return run_file, trained(run_file, "alone", "layout.workers=1")[0]


@pytest.mark.parametrize(
    ("layout", "kinds"),
    [
        (["layout.workers=4", "layout.pp=2", "layout.tp=2"], [([2, 1, 1, 2], [2, 1])]),
        (["layout.workers=3", "layout.replicas=[{pp: 2, stages: [1, 2]}, {}]"],
         [([2, 1, 1, 1], [1, 2]), ([1, 1, 1, 1], [])]),
    ],
    ids=["pp2-tp2", "pp2-beside-1"],
)  # fmt: skip
def test_a_run_file_s_layout_trains_to_the_losses_of_one_worker(
    layout: list[str], kinds: list[tuple[list[int], list[int]]], alone: tuple[Path, list[float]],
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    run_file, want = alone
    losses, replicas = trained(run_file, request.node.callspec.id, *layout)
    assert [(r["mesh_shape"], r.get("stages", [])) for r in replicas] == kinds
    np.testing.assert_allclose(losses, want, rtol=1e-10)
