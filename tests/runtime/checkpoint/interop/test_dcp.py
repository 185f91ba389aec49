"""Folders of torch.distributed.checkpoint: written by stock DCP and read here, without unpickling
anything that is not on the list. A folder that is not what it claims is refused in one sentence."""

from __future__ import annotations

import errno
import json
import os
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from holdfast.checkpoint.interop.dcp import DcpFolder
from holdfast.checkpoint.interop.dcp_import import ImportResult, import_flat
from holdfast.checkpoint.interop.dcp_metadata import (
    METADATA,
    METADATA_ALLOWLIST,
    AllowlistUnpickler,
    UnsupportedDcpError,
)
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.checkpoint.restore.verify import verify
from holdfast.config.sections.model import ModelConfig
from holdfast.config.sections.optimizer import OptimizerConfig
from holdfast.core.format.flat_names import SCHEMES, FlatName
from holdfast.core.sharding.boxes import Box, whole_box
from holdfast.errors import CheckpointError, CorruptError
from holdfast.model.dcp_export import ExportedTensor, write_dcp
from tests.support.memory_store import MemoryStore
from tests.support.mover_process import read_box
from tests.support.ranks import RankContext, rank_values

MODEL = ModelConfig(
    preset=None, layers=2, dim=16, heads=4, kv_heads=2, ffn_dim=24, vocab_size=37, vocab_multiple=8
)


def save(folder: Path, state: dict[str, Any], **options: Any) -> Path:
    dcp.save(state, storage_writer=FileSystemWriter(folder, **options), no_dist=True)
    return folder


def import_dcp(store: MemoryStore, folder: Path, model: ModelConfig, **more: Any) -> ImportResult:
    return import_flat(store, DcpFolder.open(folder), folder, model, **more)


def element(bits: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(bits.copy()).view(dtype)


def test_what_dcp_writes_is_read_bit_for_bit(tmp_path: Path) -> None:
    base = torch.randn(6, 10)
    state = {
        "f32": torch.randn(7, 5),
        "bf16": torch.randn(3, 4).bfloat16(),
        "f16": torch.randn(9).half(),
        "f64": torch.tensor(2.5, dtype=torch.float64),
        "i64": torch.arange(5),
        "transposed": base.t(),
        "part": base[2:4, 1:3],
        "parameter": torch.nn.Parameter(base[0]),
        "nested": {"state": {"a": torch.ones(2)}},
        "lr": 0.1,
        "name": "x",
    }
    for number, options in enumerate(({}, {"thread_count": 2}, {"single_file_per_rank": False})):
        found = DcpFolder.open(save(tmp_path / str(number), state, **options))
        assert set(found.non_tensors) == {"lr", "name"}
        for name, value in (*state.items(), ("nested.state.a", torch.ones(2))):
            if isinstance(value, torch.Tensor):
                bits = found.read(whole_box(name, tuple(value.shape)))
                assert torch.equal(element(bits, value.dtype), value.detach()), name
        part = found.read(Box("f32", (2, 1), (3, 4)))
        assert torch.equal(element(part, torch.float32), state["f32"][2:5, 1:])


def _shards_saved(rank: RankContext, folder: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    rank.init_torch_world()
    mesh = init_device_mesh("cpu", (rank.world_size,))
    full = torch.arange(70, dtype=torch.float32).view(7, 10)
    state = {
        "rows": distribute_tensor(full, mesh, [Shard(0)]),
        "columns": distribute_tensor(full, mesh, [Shard(1)]),
        "same": torch.ones(3),
    }
    dcp.save(state, checkpoint_id=folder)


def test_shards_of_several_ranks_are_put_together(tmp_path: Path) -> None:
    """Uneven rows and columns, as three ranks of DTensor save them."""
    rank_values(_shards_saved, 3, {"folder": tmp_path / "dcp"}, deadline=240)
    found = DcpFolder.open(tmp_path / "dcp")
    full = torch.arange(70, dtype=torch.float32).view(7, 10)
    for name in ("rows", "columns"):
        assert len(found.tensors[name].chunks) == 3
        assert torch.equal(element(found.read(whole_box(name, (7, 10))), torch.float32), full)
        blocks = list(found.iterate_rows(name, "F64"))
        assert torch.equal(element(blocks[0], torch.float64), full.double())


# --- import ---------------------------------------------------------------------------------
def their_state(
    scheme: str, prefix: str = "", optimizer: str | None = "optimizer", padded: bool = False
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """(a state dictionary as they save it, the tensors that ours must then hold)."""
    ours: dict[str, torch.Tensor] = {}
    theirs: dict[str, Any] = {}
    states: dict[str, Any] = {}
    generator = torch.Generator().manual_seed(5)
    full = {row.ours: row.shape for row in SCHEMES["holdfast"](MODEL)}
    for row in SCHEMES[scheme](MODEL):
        for kind in ("model", "exp_avg", "exp_avg_sq"):
            shape = full[row.ours] if padded else row.shape
            value = torch.randn(shape, generator=generator)
            name = f"model.{row.ours}" if kind == "model" else f"optimizer.{kind}.{row.ours}"
            ours[name] = torch.zeros(full[row.ours])
            ours[name][: shape[0]] = value
            there = in_pairs(value, row)
            if kind == "model":
                theirs[prefix + row.theirs] = there
            else:
                states[f"state.{row.theirs}.{kind}"] = there
        states[f"state.{row.theirs}.step"] = torch.tensor(12.0)
        states[f"param_groups.{row.theirs}.lr"] = 0.1
    if optimizer is not None:
        theirs[optimizer] = states
    return theirs, ours


def in_pairs(value: torch.Tensor, row: FlatName) -> torch.Tensor:
    """Return torchtitan's order of the rows of q and k, as its own adapter makes it from Hugging
    Face's. It is view(heads, 2, head / 2, D), dims 1 and 2 swapped."""
    if not row.pairs:
        return value
    head = value.shape[0] // row.pairs
    return value.view(row.pairs, 2, head // 2, -1).transpose(1, 2).reshape(value.shape)


@pytest.mark.parametrize(
    ("scheme", "prefix", "optimizer", "padded"),
    [
        ("holdfast", "", "optimizer", True),
        ("torchtitan", "", "optimizer", False),
        ("torchtitan", "model.", "optim", True),
        ("huggingface", "", "optimizer", False),
        ("torchtitan", "", None, False),
        ("torchtitan-0.2", "", "optimizer", False),
    ],
)
def test_a_checkpoint_is_imported_whole(
    tmp_path: Path, scheme: str, prefix: str, optimizer: str | None, padded: bool
) -> None:
    theirs, ours = their_state(scheme, prefix, optimizer, padded)
    theirs["train_state"] = {"seen": 7}
    save(tmp_path / "dcp", theirs)
    store = MemoryStore()
    found = import_dcp(store, tmp_path / "dcp", MODEL, position_of_step=lambda step: 100 * step)
    assert (found.naming_scheme, found.has_moments) == (scheme, optimizer is not None)
    assert "train_state.seen" in found.unused_names
    commit = found.commit
    assert (commit.step, commit.generation) == (12 if optimizer else 0, 0)
    assert commit.meta["position"] == (1300 if optimizer else 0)
    assert verify(store, commit.key) == []
    checkpoint = Checkpoint.open(store, commit.key)
    for name, value in ours.items():
        due = value if optimizer or name.startswith("model.") else torch.zeros_like(value)
        assert torch.equal(read_box(checkpoint, whole_box(name, tuple(value.shape))), due), name


def test_bf16_weights_widen_exactly(tmp_path: Path) -> None:
    theirs, ours = their_state("holdfast", optimizer=None, padded=True)
    save(tmp_path / "dcp", {name: value.bfloat16() for name, value in theirs.items()})
    store = MemoryStore()
    commit = import_dcp(store, tmp_path / "dcp", MODEL).commit
    checkpoint = Checkpoint.open(store, commit.key)
    name = "model.layers.0.ffn.up.weight"
    assert torch.equal(
        read_box(checkpoint, whole_box(name, (24, 16))), ours[name].bfloat16().float()
    )


def test_what_is_not_this_model_is_refused(tmp_path: Path) -> None:
    theirs, _ = their_state("torchtitan")
    del theirs["layers.1.attention.qkv_linear.wq.weight"]
    save(tmp_path / "missing", theirs)
    with pytest.raises(
        CheckpointError, match=r"layers\.1\.attention\.qkv_linear\.wq\.weight is missing"
    ):
        import_dcp(MemoryStore(), tmp_path / "missing", MODEL)
    theirs, _ = their_state("holdfast", padded=True)
    theirs["norm.weight"] = torch.ones(17)
    save(tmp_path / "shape", theirs)
    with pytest.raises(CheckpointError, match=r"norm.weight has the shape \[17\].*\[16\]"):
        import_dcp(MemoryStore(), tmp_path / "shape", MODEL)
    theirs, _ = their_state("holdfast", padded=True)
    theirs["optimizer"]["state.norm.weight.step"] = torch.tensor(13.0)
    save(tmp_path / "steps", theirs)
    with pytest.raises(CheckpointError, match=r"no single step.*--weights-only"):
        import_dcp(MemoryStore(), tmp_path / "steps", MODEL)
    assert import_dcp(MemoryStore(), tmp_path / "steps", MODEL, weights_only=True).commit.step == 0


def test_the_moments_of_another_optimizer_are_refused(tmp_path: Path) -> None:
    """The weights alone begin a run of any optimizer, with zeros for what it keeps."""
    theirs, ours = their_state("holdfast", padded=True)
    save(tmp_path / "dcp", theirs)
    factored = OptimizerConfig.model_validate({"name": "adafactor"})
    with pytest.raises(CheckpointError, match=r"AdamW's moments.* is adafactor.*--weights-only"):
        import_dcp(MemoryStore(), tmp_path / "dcp", MODEL, optimizer=factored)
    store = MemoryStore()
    found = import_dcp(store, tmp_path / "dcp", MODEL, optimizer=factored, weights_only=True)
    checkpoint = Checkpoint.open(store, found.commit.key)
    name = "layers.0.ffn.up.weight"
    weight = read_box(checkpoint, whole_box(f"model.{name}", (24, 16)))
    assert torch.equal(weight, ours[f"model.{name}"])
    rows = read_box(checkpoint, whole_box(f"optimizer.row_var.{name}", (24, 1)))
    assert torch.equal(rows, torch.zeros(24, 1))


# --- what a folder may not do ---------------------------------------------------------------
class Harm:
    """Leaves a file behind when it is unpickled as pickle would."""

    def __init__(self, witness: Path) -> None:
        self._witness = witness

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self._witness}",)


def refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        DcpFolder.open(folder)
    return str(caught.value)


def test_metadata_that_calls_something_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "dcp", {"w": torch.ones(4)})
    witness = tmp_path / "harmed"
    metadata = pickle.loads((folder / METADATA).read_bytes())
    metadata.planner_data = Harm(witness)
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    said = refused(folder)
    assert "names posix.system" in said
    assert not witness.exists()


def test_an_archive_that_calls_something_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "dcp", {"w": torch.ones(4)})
    witness = tmp_path / "harmed"
    data = folder / "__0_0.distcp"
    with zipfile.ZipFile(data) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(data, "w") as archive:
        for name, value in records.items():
            bad = name.endswith("data.pkl")
            archive.writestr(name, pickle.dumps(Harm(witness)) if bad else value)
    metadata = pickle.loads((folder / METADATA).read_bytes())
    for info in metadata.storage_data.values():
        info.offset, info.length = 0, data.stat().st_size
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    assert "names posix.system" in refused(folder)
    assert not witness.exists()


@pytest.mark.parametrize(
    "value",
    [os.getcwd, eval, torch.load, subprocess.run, Path, open, sys.exit, setattr, json.loads],
)
def test_nothing_beyond_the_list_is_known(value: Any) -> None:
    from holdfast.checkpoint.interop.dcp_metadata import ARCHIVE_ALLOWLIST, METADATA_ALLOWLIST

    for known in (METADATA_ALLOWLIST, ARCHIVE_ALLOWLIST):
        with pytest.raises(UnsupportedDcpError, match="no DCP checkpoint of tensors needs"):
            AllowlistUnpickler(pickle.dumps(value), known, "x").load_checked()


class Reaching:
    """An attribute of something: how some releases of Python write a member of an enum."""

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, ("x", "upper")


def test_a_stand_in_reaches_nothing() -> None:
    assert pickle.loads(pickle.dumps(Reaching()))() == "X"
    assert (
        AllowlistUnpickler(pickle.dumps(Reaching()), METADATA_ALLOWLIST, "x").load_checked() is None
    )
    assert (
        AllowlistUnpickler(pickle.dumps(getattr), METADATA_ALLOWLIST, "x").load_checked()
        is not getattr
    )


@pytest.mark.parametrize(
    "failure", [CheckpointError("gone"), CorruptError("rotten"), OSError(errno.ENOSPC, "full")]
)
def test_what_goes_wrong_while_dcp_writes_is_told_as_it_is(
    tmp_path: Path, failure: Exception
) -> None:
    def read(box: Box, out: memoryview) -> None:
        raise failure

    with pytest.raises(type(failure)) as caught:
        write_dcp(tmp_path / "x", [ExportedTensor("w", ("w",), "model.w", "F32", (4,))], [], read)
    assert caught.value is failure
    assert not (tmp_path / "x" / METADATA).exists()


def edit(folder: Path, change: Any) -> None:
    metadata = pickle.loads((folder / METADATA).read_bytes())
    change(metadata)
    (folder / METADATA).write_bytes(pickle.dumps(metadata))


def test_folders_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    """Among them DCP's own silent failures: a chunk that is missing stays uninitialised there."""

    def fresh(name: str) -> Path:
        return save(tmp_path / name, {"w": torch.ones(4, 2)})

    def fewer(metadata: Any) -> None:
        (chunk,) = metadata.state_dict_metadata["w"].chunks
        metadata.state_dict_metadata["w"].size = torch.Size((6, 2))
        assert isinstance(chunk, ChunkStorageMetadata)

    def nowhere(metadata: Any) -> None:
        metadata.storage_data = {MetadataIndex("v", (0, 0)): None}

    def outside(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = "../secret"

    def displaced(*offsets: int) -> Callable[[Any], None]:
        def change(metadata: Any) -> None:
            (chunk,) = metadata.state_dict_metadata["w"].chunks
            chunk.offsets = torch.Size(offsets) if min(offsets) >= 0 else offsets
            ((index, info),) = metadata.storage_data.items()
            metadata.storage_data = {MetadataIndex(index.fqn, chunk.offsets): info}

        return change

    cases = {
        "fewer": (fewer, "4 of 12 elements are missing"),
        "nowhere": (nowhere, "does not say"),
        "outside": (outside, "outside of the folder"),
        "negative": (displaced(-1, 0), "no places"),
        "left": (displaced(0, -2), "no places"),
        "dims": (displaced(0, 0, 0), "have not the dims"),
    }
    for name, (change, words) in cases.items():
        edit(fresh(name), change)
        assert words in refused(tmp_path / name)
    short = fresh("short") / "__0_0.distcp"
    short.write_bytes(short.read_bytes()[:-10])
    assert "not an archive" in refused(tmp_path / "short")
    (fresh("gone") / "__0_0.distcp").unlink()
    assert "No such file" in refused(tmp_path / "gone")
    (fresh("torn") / METADATA).write_bytes(b"\x80\x04torn")
    assert "not a pickle that DCP wrote" in refused(tmp_path / "torn")
    (fresh("huge") / METADATA).write_bytes(b"\x80\x04Nr\xff\xff\xff\x7f.")  # memo of 2^31 entries
    assert "MemoryError" in refused(tmp_path / "huge")
    (fresh("other") / METADATA).write_bytes(pickle.dumps({"a": 1}))
    assert "no description" in refused(tmp_path / "other")
