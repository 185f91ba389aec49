"""Checkpoints that one process writes: from tensors, from a Hugging Face folder, from the past."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from holdfast.checkpoint.interop.huggingface import import_huggingface
from holdfast.checkpoint.restore.catalog import list_commits
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.checkpoint.restore.verify import verify
from holdfast.checkpoint.save.single_writer import TensorSource, write_single
from holdfast.checkpoint.save.writer import check_fence
from holdfast.config.sections.model import ModelConfig
from holdfast.core.format.manifest import commit_key
from holdfast.core.sharding.boxes import Box, whole_box
from holdfast.core.sharding.parameters import decoder_parameters
from holdfast.core.sharding.state_table import state_table
from holdfast.errors import CheckpointError, FencedError, RunFolderError
from holdfast.model.huggingface import export_folder
from holdfast.wire.store.run_store import FolderStore
from holdfast.wire.term import create_generation
from tests.support.memory_store import MemoryStore
from tests.support.mover_process import newest_verified, read_box

GOLDEN = Path(__file__).parents[3] / "golden" / "checkpoints"
MODEL = ModelConfig(
    preset=None, layers=1, dim=16, heads=2, kv_heads=1, ffn_dim=24, vocab_size=40, max_position=64
)


def numbers(first: int, count: int) -> bytes:
    return struct.pack(f"<{count}f", *(float(first + i) for i in range(count)))


def sources() -> list[TensorSource]:
    return [
        TensorSource("half", "BF16", (3,), [b"\1\2", b"\3\4\5\6"]),
        TensorSource("w", "F32", (4, 2), (numbers(2 * row, 2) for row in range(4))),
        TensorSource("scale", "F64", (), [struct.pack("<d", 0.5)]),
    ]


def test_what_is_written_is_read() -> None:
    store = MemoryStore()
    commit = write_single(store, 1, 6, sources(), {"position": 3}, extent_bytes=10)
    found = newest_verified(store)
    assert found.commit == commit
    assert verify(store, commit.key) == []
    out = bytearray(8)
    found.read(Box("w", (1, 1), (2, 1)), memoryview(out))
    assert struct.unpack("<2f", out) == (3.0, 5.0)
    scale = bytearray(8)
    found.read(Box("scale", (), ()), memoryview(scale))
    assert struct.unpack("<d", scale) == (0.5,)


def test_a_step_is_written_once_and_only_by_the_newest_generation() -> None:
    store = MemoryStore()
    write_single(store, 1, 6, sources(), {})
    with pytest.raises(CheckpointError, match="committed already"):
        write_single(store, 1, 6, sources(), {})
    create_generation(store, 2, {})
    with pytest.raises(FencedError, match="generation 2 has begun"):
        write_single(store, 1, 7, sources(), {})


@pytest.mark.parametrize("wrong", [numbers(0, 7), numbers(0, 9)], ids=["short", "long"])
def test_bytes_that_do_not_fit_leave_nothing(tmp_path: Path, wrong: bytes) -> None:
    store = FolderStore(tmp_path)
    with pytest.raises(CheckpointError, match=r"w: .* bytes came, 32 are due"):
        write_single(store, 1, 6, [TensorSource("w", "F32", (4, 2), [wrong])], {})
    assert store.list("") == []


def test_nothing_is_committed_in_a_run_store_that_was_emptied() -> None:
    """A generation that has its object may write; without it the store is not the run's."""
    store = MemoryStore()
    check_fence(store, 1)
    create_generation(store, 1, {})
    check_fence(store, 1, has_record=True)
    for key in store.list("generations/"):
        store.delete(key)
    with pytest.raises(RunFolderError, match="emptied or replaced: generation 1 is not in it"):
        check_fence(store, 1, has_record=True)


def test_an_import_that_was_killed_can_be_repeated() -> None:
    store = MemoryStore()

    def torn() -> Iterator[bytes]:
        yield numbers(0, 8)

    commit = write_single(store, 0, 0, [TensorSource("w", "F32", (4, 2), torn())], {})
    store.delete(commit.key)  # as if it had been killed just before the commit
    write_single(store, 0, 0, sources(), {})
    assert verify(store, commit_key(0, 0)) == []


def test_a_hugging_face_folder_becomes_the_state_after_step_0(tmp_path: Path) -> None:
    weights = {
        p.name: torch.randn(p.shape, generator=torch.Generator().manual_seed(n))
        for n, p in enumerate(decoder_parameters(MODEL))
    }
    export_folder(tmp_path / "hf", MODEL, weights, None)
    store = FolderStore(tmp_path / "run")
    commit = import_huggingface(store, tmp_path / "hf", MODEL)
    assert (commit.step, commit.generation) == (0, 0)
    found = newest_verified(store)
    assert [s.name for s in found.tensors] == [s.name for s in state_table(MODEL)]
    for name, tensor in weights.items():
        shape = tuple(tensor.shape)
        assert torch.equal(read_box(found, whole_box(f"model.{name}", shape)), tensor)
        for slot in ("exp_avg", "exp_avg_sq"):
            assert not read_box(found, whole_box(f"optimizer.{slot}.{name}", shape)).any()
    with pytest.raises(CheckpointError, match="has checkpoints already"):
        import_huggingface(store, tmp_path / "hf", MODEL)
    other = MODEL.model_copy(update={"ffn_dim": 32})
    with pytest.raises(CheckpointError, match=r"model\.ffn_dim is 32 here and 24 there"):
        import_huggingface(FolderStore(tmp_path / "other"), tmp_path / "hf", other)


@pytest.mark.parametrize("version", sorted(p.name for p in GOLDEN.iterdir()))
def test_every_older_format_is_still_read(version: str) -> None:
    """One golden checkpoint per format version, written by two ranks; it must never change."""
    store = FolderStore(GOLDEN / version)
    (key,) = list_commits(store)
    assert verify(store, key) == []
    checkpoint = Checkpoint.open(store, key)
    assert (checkpoint.step, checkpoint.commit.generation) == (7, 3)
    assert checkpoint.commit.meta == {"position": 112}
    for spec in checkpoint.tensors:
        count = spec.nbytes // 4
        out = bytearray(spec.nbytes)
        checkpoint.read(whole_box(spec.name, spec.shape), memoryview(out))
        assert struct.unpack(f"<{count}f", out) == tuple(float(i) for i in range(count)), spec
