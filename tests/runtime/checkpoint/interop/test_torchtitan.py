"""A checkpoint that torchtitan 0.3 wrote with two ranks (`foreign_trainers.py torchtitan`): a run
continues it, and says what it holds. Values in it that are no plain ones stay unread."""

from __future__ import annotations

import os
import pickle
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from holdfast.checkpoint.interop.dcp import DcpFolder
from holdfast.checkpoint.interop.dcp_import import import_flat
from holdfast.checkpoint.interop.dcp_metadata import METADATA
from holdfast.checkpoint.interop.hf_trainer import ForeignState
from holdfast.checkpoint.interop.torchtitan import group_names, read_dcp
from holdfast.config.run import RunConfig
from holdfast.errors import CheckpointError
from tests.support import foreign_trainers as theirs
from tests.support.foreign_losses import FIXTURES, continues_as, run_of
from tests.support.memory_store import MemoryStore

TITAN = FIXTURES / "torchtitan"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    with tarfile.open(TITAN / "checkpoint.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "checkpoint"


def read(folder: Path, config: RunConfig, **options: bool) -> ForeignState:
    return read_dcp(folder, config.model, config.train.optimizer, **options)


def test_the_next_twenty_losses_are_those_of_torchtitan(checkpoint: Path) -> None:
    config = run_of("torchtitan")
    assert read(checkpoint, config).differences == ()
    continues_as("torchtitan", checkpoint, partial(read, config=config))


def test_everything_in_the_folder_is_used_or_told(checkpoint: Path) -> None:
    config = run_of("torchtitan")
    found = read(checkpoint, config)
    assert (found.trainer, found.step) == ("torchtitan", theirs.SAVED)
    assert found.settings == {
        "train.optimizer.name": "adamw",
        "train.optimizer.learning_rate": theirs.TITAN_RATE,
        "train.optimizer.betas": list(theirs.BETAS),
        "train.optimizer.eps": 1e-8,
        "train.optimizer.weight_decay": theirs.DECAY,
    }
    assert found.rate == pytest.approx(theirs.TITAN_RATE * (1 - 0.9 * 6 / 26))
    assert "dp_rank_1 at sample 20" in found.position
    assert "with 240 tokens a rank" in found.position
    model, optimizer = config.model, config.train.optimizer
    imported = import_flat(MemoryStore(), found.state, checkpoint, model, optimizer=optimizer)
    assert imported.unused_names == ()
    assert (imported.commit.step, imported.naming_scheme) == (theirs.SAVED, "torchtitan")


def test_a_decay_that_the_run_does_not_have_is_told(checkpoint: Path) -> None:
    plain = run_of("torchtitan").model_dump()
    plain["train"]["optimizer"]["groups"] = []
    (line,) = read(checkpoint, RunConfig.model_validate(plain)).differences
    assert "weight decay of 5 parameters differs" in line
    assert "0.05 there, 0.0 here" in line


def resave(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Save the checkpoint again as DCP does, with other contents."""
    stored = DcpFolder.open(folder)
    state: dict[str, Any] = {
        name: torch.zeros(tensor.shape) for name, tensor in stored.tensors.items()
    }
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    state |= stored.values
    change(state)
    dcp.save(state, checkpoint_id=folder.parent / "changed", no_dist=True)
    return folder.parent / "changed"


NORM = "optimizer.state.norm.weight"
FUSED = "optimizer.state.layers.0.attention.qkv_linear.wqkv.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s.update({f"{NORM}.max_exp_avg_sq": torch.ones(8)}), "holds max_exp_avg_sq"),
        (lambda s: s.pop(f"{NORM}.exp_avg"), "state is not complete.*norm.weight.exp_avg"),
        (lambda s: s.update({f"{FUSED}.exp_avg": torch.ones(20, 8)}), "has 20 rows, and .* 16"),
        (
            lambda s: s.update({"optimizer.param_groups.norm.weight.amsgrad": True}),
            "amsgrad=True for norm.weight",
        ),
    ],
)
def test_an_optimizer_that_a_run_does_not_have_is_refused(
    change: Callable[[dict[str, Any]], object], said: str, checkpoint: Path
) -> None:
    config, folder = run_of("torchtitan"), resave(checkpoint, change)

    def imports() -> None:
        found = read(folder, config)
        import_flat(MemoryStore(), found.state, folder, config.model)

    with pytest.raises(CheckpointError, match=said):
        imports()


class Evil:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.system, ("touch pwned",)


def test_a_value_that_calls_something_stays_unread(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DCP's own reader would run the first, and torchtitan the second."""
    monkeypatch.chdir(checkpoint.parent)
    endless: Any = ["x"]
    for _ in range(60):  # 2**60 items, in a pickle of some hundred bytes
        endless = [endless, endless]

    def change(state: dict[str, Any]) -> None:
        state["lr_scheduler.last_epoch"] = Evil()
        state["dataloader.dp_rank_0"] = pickle.dumps(Evil())
        state["dataloader.dp_rank_1"] = pickle.dumps(endless)

    folder = resave(checkpoint, change)
    found = read(folder, run_of("torchtitan"))
    assert found.step == theirs.SAVED
    names = {"lr_scheduler.last_epoch", "dataloader.dp_rank_0", "dataloader.dp_rank_1"}
    assert set(found.state.non_tensors) == names
    assert group_names(sorted(names)) == [
        "dataloader.dp_rank_* (2 times)",
        "lr_scheduler.last_epoch",
    ]
    metadata = pickle.loads((folder / METADATA).read_bytes())
    metadata.planner_data = Evil()
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"names posix\.system"):
        read(folder, run_of("torchtitan"))
    assert not (checkpoint.parent / "pwned").exists()
