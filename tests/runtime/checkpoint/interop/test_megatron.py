"""A checkpoint that megatron-core 0.16 wrote with two tensor-parallel ranks
(`foreign_trainers.py megatron`): a run continues it, and names what it leaves out."""

from __future__ import annotations

import argparse
import os
import shutil
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.checkpoint.interop.dcp import DcpFolder
from holdfast.checkpoint.interop.dcp_import import import_flat
from holdfast.checkpoint.interop.megatron import iteration_folder, read_common, read_megatron
from holdfast.checkpoint.interop.torch_files import load_tensors
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.config.run import RunConfig
from holdfast.core.sharding.boxes import whole_box
from holdfast.errors import CheckpointError
from tests.support import foreign_trainers as theirs
from tests.support.foreign_losses import FIXTURES, continues_as, run_of
from tests.support.memory_store import MemoryStore
from tests.support.mover_process import read_box

MEGATRON = FIXTURES / "megatron"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    with tarfile.open(MEGATRON / "checkpoint.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "checkpoint"


@pytest.fixture
def config() -> RunConfig:
    return run_of("megatron")


def test_the_next_twenty_losses_are_those_of_megatron(checkpoint: Path, config: RunConfig) -> None:
    assert read_megatron(checkpoint, config.model).differences == ()
    continues_as("megatron", checkpoint, partial(read_megatron, model=config.model))


def test_everything_in_the_folder_is_used_or_told(checkpoint: Path, config: RunConfig) -> None:
    found = read_megatron(checkpoint, config.model)
    assert (found.trainer, found.step) == ("Megatron", theirs.SAVED)
    assert found.settings == {
        "train.optimizer.name": "adamw",
        "train.optimizer.learning_rate": theirs.TITAN_RATE,
        "train.optimizer.betas": list(theirs.BETAS),
        "train.optimizer.eps": 1e-8,
        "train.optimizer.weight_decay": theirs.DECAY,
        "train.schedule.kind": "cosine",
        "train.schedule.warmup_steps": 4,
        "train.schedule.counts_from": 0,
        "train.schedule.final_ratio": pytest.approx(0.1),
        "train.schedule.steps": theirs.STEPS,
    }
    assert found.position == "it was at iteration 10, with 40 samples used"
    assert [line.split()[0] for line in found.left_out] == ["args"]
    store = MemoryStore()
    imported = import_flat(store, found.state, checkpoint, config.model)
    assert imported.unused_names == ()
    assert imported.commit.step == theirs.SAVED


def test_fused_matrices_are_taken_apart(checkpoint: Path, config: RunConfig) -> None:
    """Against the splits as Megatron's own modules do them, from the tensors as stored."""
    stored = DcpFolder.open(checkpoint / "iter_0000010")
    store = MemoryStore()
    found = read_megatron(checkpoint, config.model)
    commit = import_flat(store, found.state, checkpoint, config.model).commit
    reader = Checkpoint.open(store, commit.key)

    def whole(name: str) -> torch.Tensor:
        bits = stored.read(whole_box(name, stored.tensors[name].shape))
        return torch.from_numpy(bits.copy()).view(torch.float32)

    def ours(name: str, *shape: int) -> torch.Tensor:
        return read_box(reader, whole_box(name, shape))

    for theirs_, ours_ in (("", "model."), ("optimizer.state.exp_avg.", "optimizer.exp_avg.")):
        qkv = whole(f"{theirs_}decoder.layers.self_attention.linear_qkv.weight")[1]
        groups = qkv.view(2, 4, 4, 8)  # groups, two queries and a key and a value, head, D
        block = f"{ours_}layers.1."
        assert torch.equal(ours(f"{block}attention.q.weight", 16, 8), groups[:, :2].reshape(16, 8))
        assert torch.equal(ours(f"{block}attention.k.weight", 8, 8), groups[:, 2].reshape(8, 8))
        assert torch.equal(ours(f"{block}attention.v.weight", 8, 8), groups[:, 3].reshape(8, 8))
        gate, up = whole(f"{theirs_}decoder.layers.mlp.linear_fc1.weight")[1].chunk(2)
        assert torch.equal(ours(f"{block}ffn.gate.weight", 12, 8), gate)
        assert torch.equal(ours(f"{block}ffn.up.weight", 12, 8), up)


class Evil:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.system, ("touch pwned",)


def test_a_folder_without_its_common_file_is_named(checkpoint: Path, config: RunConfig) -> None:
    (checkpoint / "iter_0000010" / "common.pt").unlink()
    with pytest.raises(CheckpointError, match="is missing, and it holds the iteration"):
        read_megatron(checkpoint, config.model)


@pytest.mark.parametrize("place", ["common", "args"])
def test_a_malicious_pickle_is_refused(
    place: str, checkpoint: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkpoint.parent)
    where = iteration_folder(checkpoint)
    assert where is not None
    evil = {"args": argparse.Namespace(x=Evil())} if place == "args" else {"more": Evil()}
    torch.save({"iteration": 10} | evil, where / "common.pt")
    with pytest.raises(CheckpointError, match=r"names posix\.system, which is no tensor"):
        read_megatron(checkpoint, config.model)
    assert not (checkpoint.parent / "pwned").exists()


def test_the_arguments_are_read_without_their_classes(checkpoint: Path) -> None:
    args = read_common(checkpoint / "iter_0000010")["args"]
    assert args["num_query_groups"] == 2
    assert type(args["attention_backend"]).__name__ == "StandIn"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: c["optimizer"]["param_groups"][0].update(amsgrad=True), "amsgrad=True"),
        (lambda c: c.pop("iteration"), "it has no iteration"),
    ],
)
def test_a_state_that_a_run_does_not_have_is_refused(
    change: Callable[[Any], object], said: str, checkpoint: Path, config: RunConfig
) -> None:
    path = checkpoint / "iter_0000010" / "common.pt"
    common = {key: value for key, value in load(path).items() if key != "args"}
    change(common)
    torch.save(common, path)
    with pytest.raises(CheckpointError, match=said):
        read_megatron(checkpoint, config.model)


def load(path: Path) -> Any:
    from holdfast.checkpoint.interop.megatron import ENUMS, NAMESPACES

    data = shutil.copy(path, path.with_name("copy.pt"))
    return load_tensors(Path(data), ENUMS, NAMESPACES)


def test_another_shape_is_refused(checkpoint: Path, config: RunConfig) -> None:
    plain = config.model_dump()
    plain["model"] |= {"heads": 2, "head_dim": 8}
    other = RunConfig.model_validate(plain).model
    with pytest.raises(CheckpointError, match=r"linear_qkv.weight has 32 rows, and .* 48"):
        read_megatron(checkpoint, other)
