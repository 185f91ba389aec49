"""A blob is a valid safetensors file, for stock readers too. The stored boxes that a restore is led
to are those that hold what it wants, on any layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from holdfast.checkpoint.format.blob import ExtentHasher, blob_header, parse_header
from holdfast.checkpoint.format.box_index import BoxIndex
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.core.format.manifest import (
    Blob,
    Commit,
    WriterShare,
    blob_key,
    commit_key,
    place_boxes,
    writer_name,
)
from holdfast.core.sharding.boxes import Box, coverage_problem
from holdfast.core.sharding.ownership import owned_boxes
from holdfast.core.sharding.state_table import StateTable, TensorSpec, local_boxes, state_table
from holdfast.errors import CorruptError
from holdfast.layout import Layout, Topology, place_layout
from tests.support.mover_process import DTYPE, TABLE, Start, Workers, state
from tests.support.topologies import MODELS, topologies


def test_stock_readers_understand_a_checkpoint_of_several_writers(
    start: Start, tmp_path: Path
) -> None:
    """safetensors reads each blob; PyTorch's own Hugging Face reader puts the boxes together."""
    mover = start()
    mover.workers(2, 2).commit(4)
    commit = Checkpoint.open(mover.store, commit_key(1, 4)).commit
    folder = tmp_path / "stock"
    folder.mkdir()
    for writer in commit.writers:
        blob = writer.blob
        assert blob.data_start % 4096 == 0
        path = folder / Path(blob.key).name
        path.write_bytes((mover.store.folder / blob.key).read_bytes())
        for name, tensor in load_file(path).items():
            assert tensor.dtype == DTYPE[next(s.dtype for s in TABLE if s.name == name)]
    full = state(4)
    loaded = {name: torch.full_like(tensor, 77) for name, tensor in full.items()}
    state_dict_loader.load(
        loaded, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True
    )
    for name, tensor in full.items():
        assert torch.equal(loaded[name], tensor), name


CUT: StateTable = (
    TensorSpec("model.up", "F32", (10, 6), 0, 0, 5),  # tp cuts rows in units of two
    TensorSpec("model.down", "F32", (7, 9), 0, 1, 9),  # tp cuts columns, dp_shard uneven rows
    TensorSpec("model.kv", "BF16", (4, 3), 0, 0, 1),  # fewer units than tp ranks
    TensorSpec("model.last", "F32", (5,), 0, None, 1, (2,)),  # on one stage
    TensorSpec("model.count", "F64", (), None),
)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(2, dp_shard=3, tp=2),
        Layout(1, pp=2, dp_shard=2, tp=4, stages=(1, 1)),
        Layout(3, cp=2),
    ],
)
def test_stock_readers_open_a_checkpoint_where_it_lies(start: Start, layout: Layout) -> None:
    """Rows and columns cut unevenly, ranks with nothing: the folder of the blobs is all they need.
    (It must hold one step only: `holdfast checkpoint copy` makes such a folder.)"""
    mover = start()
    topo = place_layout(layout, 1, ("node0",) * layout.world_size)
    Workers(mover.begin(topo, CUT), topo, CUT).commit(9)
    folder = mover.store.folder / "data" / "0000000001"
    assert len(list(folder.iterdir())) == layout.world_size
    seen = dict.fromkeys((spec.name for spec in CUT), 0)
    for path in folder.iterdir():
        for name, tensor in load_file(path).items():
            seen[name] += tensor.numel()
    full = state(9, CUT)
    assert seen == {name: tensor.numel() for name, tensor in full.items()}
    loaded = {name: torch.full_like(tensor, 77) for name, tensor in full.items()}
    state_dict_loader.load(
        loaded, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True
    )
    for name, tensor in full.items():
        assert torch.equal(loaded[name], tensor), name


def test_a_blob_without_tensors_is_valid(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(blob_header(()))
    assert load_file(tmp_path / "x.safetensors") == {}


def test_safetensors_accepts_no_holes(tmp_path: Path) -> None:
    """Why tensors are not aligned to 4 KiB one by one: the format's readers refuse gaps."""
    table = (TensorSpec("a", "F32", (2,)), TensorSpec("b", "F32", (2,)))
    head = blob_header(place_boxes((Box("a", (0,), (2,)), Box("b", (0,), (2,))), table))
    content = json.loads(head[8:])
    content["b"]["data_offsets"] = [4096, 4104]
    text = json.dumps(content).encode().ljust(4088)
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4104))
    with pytest.raises(SafetensorError, match="offset"):
        load_file(path)


def test_header_says_what_was_put_in() -> None:
    boxes = (Box("w", (4, 0), (3, 2)), Box("s", (), ()), Box("h", (1,), (1,)))
    table = (
        TensorSpec("w", "F32", (8, 2), 0),
        TensorSpec("s", "F64", ()),
        TensorSpec("h", "BF16", (2,)),
    )
    tensors = place_boxes(boxes, table)
    head = blob_header(tensors)
    assert len(head) == 4096
    assert parse_header(head, "x") == tensors
    assert blob_header(tensors) == head  # a slot's header is written once and compared for ever
    with pytest.raises(CorruptError, match="header"):
        parse_header(head[:100], "x")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("shape", [[3], 2]),
        ("shape", [True, 2]),
        ("shape", [3, -2]),
        ("shape", [3]),
        ("shape", 3),
        ("shape", [3.0, 2]),
        ("data_offsets", ["", 24]),
        ("data_offsets", [[], 24]),
        ("data_offsets", [None, 24]),
        ("data_offsets", [-8, 24]),
        ("data_offsets", []),
        ("dtype", ["F32"]),
        ("dtype", "F33"),
        ("saved_offsets", [[0]]),
        ("saved_offsets", [False, 0]),
        ("saved_offsets", ["4", 0]),
        ("saved_offsets", [-4, 0]),
    ],
)
def test_a_header_whose_numbers_are_no_places_is_rotten(field: str, value: object) -> None:
    table = (TensorSpec("w", "F32", (8, 2), 0), TensorSpec("v", "F32", (2,)))
    boxes = (Box("w", (4, 0), (3, 2)), Box("v", (0,), (2,)))
    content = json.loads(blob_header(place_boxes(boxes, table))[8:])
    if field == "saved_offsets":
        sharding = json.loads(content["__metadata__"]["DCP_SHARDING_INFO"])
        sharding["w"][field] = value
        content["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(sharding)
    else:
        content["w"][field] = value
    with pytest.raises(CorruptError, match="x: not a blob's header"):
        parse_header(bytes(8) + json.dumps(content).encode(), "x")


@pytest.mark.parametrize("metadata", [None, '{"__metadata__":{"DCP_SHARDING_INFO":"%s"}}'])
def test_a_header_that_nests_too_deep_is_rotten(metadata: str | None) -> None:
    text = (metadata or "%s") % ("[" * 4088)
    with pytest.raises(CorruptError, match="x: not a blob's header: nested too deep"):
        parse_header(bytes(8) + text.encode(), "x")


def test_extents_do_not_depend_on_how_bytes_come() -> None:
    data = bytes(range(256)) * 40
    found = []
    for size in (1, 7, 1000, 5000, len(data)):
        hasher = ExtentHasher(1000)
        pieces = [data[i : i + size] for i in range(0, len(data), size)]
        assert b"".join(hasher.pass_through(pieces)) == data
        found.append(hasher.finish("k", 0))
    assert len({b.checksums for b in found}) == 1
    assert [e.length for e in found[0].extents()] == [1000] * 10 + [240]
    assert [e.offset for e in found[0].extents(999, 2001)] == [0, 1000, 2000]


def commit_of(topology: Topology, model: int) -> Commit:
    table = state_table(MODELS[model])
    writers = []
    for rank in range(topology.world_size):
        due = place_boxes(owned_boxes(topology, table, rank), table)
        size = 4096 + sum(p.nbytes for p in due)
        key = blob_key(1, 5, writer_name(rank))
        writers.append(WriterShare(rank, Blob(key, size, 4096, 2**30, ("0" * 32,)), "0" * 32))
    return Commit(1, 5, "", "", topology, table, tuple(writers))


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_every_wanted_box_is_covered_by_what_is_found(data: st.DataObject) -> None:
    model = data.draw(st.sampled_from(range(len(MODELS))))
    saved, restored = (
        data.draw(topologies(MODELS[model].layers)),
        data.draw(topologies(MODELS[model].layers)),
    )
    commit = commit_of(saved, model)
    index = BoxIndex(commit)
    due = {writer.blob.key: set(index.boxes_of_rank(writer.rank)) for writer in commit.writers}
    for rank in range(restored.world_size):
        for box in local_boxes(restored, commit.table, rank):
            if not box.size:
                continue
            found = index.find_stored(box)
            common = [held.box.intersect(box) for held, _ in found]
            assert all(c is not None for c in common)
            moved = [
                Box(
                    c.name,
                    tuple(a - b for a, b in zip(c.offsets, box.offsets, strict=True)),
                    c.lengths,
                )
                for c in common
                if c is not None
            ]
            assert coverage_problem(box.lengths, moved) is None
            for held, blob in found:
                assert held in due[blob.key]
