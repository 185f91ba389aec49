"""Keys and manifests: they order, they survive, and no byte can change unnoticed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from holdfast.config.sections.model import PRESETS, ModelConfig
from holdfast.core.format.hf_names import (
    NameMap,
    TensorMapping,
    huggingface_map,
    rename,
    split,
    tie,
)
from holdfast.core.format.manifest import (
    Blob,
    Commit,
    PartManifest,
    PlacedBox,
    blob_key,
    commit_key,
    merge_parts,
    parse_blob_key,
    parse_commit_key,
    parse_save_key,
    part_key,
    place_boxes,
    seal_manifest,
    unseal_manifest,
    writer_name,
)
from holdfast.core.sharding.boxes import Box
from holdfast.core.sharding.ownership import owned_boxes
from holdfast.core.sharding.parameters import decoder_parameters
from holdfast.core.sharding.state_table import TensorSpec
from holdfast.errors import CheckpointError, CorruptError
from holdfast.layout import Layout, place_layout
from holdfast.model.huggingface import extract_piece
from holdfast.model.huggingface_files import WholeTensors, row_blocks

TABLE = (
    TensorSpec("half", "BF16", (3,), None),
    TensorSpec("w", "F32", (8, 2), 0),
    TensorSpec("wide", "F64", (2,), None),
)
TOPOLOGY = place_layout(Layout(dp_replicate=2), 3, ("a", "b"))


def part(rank: int, step: int = 9, **changes: object) -> PartManifest:
    tensors = place_boxes(owned_boxes(TOPOLOGY, TABLE, rank), TABLE)
    size = 4096 + sum(p.nbytes for p in tensors)
    blob = Blob(blob_key(3, step, writer_name(rank)), size, 4096, 1 << 20, ("0" * 32,))
    values = {"tensors": tensors, "blob": blob, "meta": {"position": 5}} | changes
    return PartManifest(3, step, rank, **values)  # type: ignore[arg-type]


def merged(*parts: PartManifest) -> Commit:
    return merge_parts(
        {p.rank: (p, p.to_bytes()) for p in parts}, TOPOLOGY, TABLE, "hash", "version"
    )


def test_newest_step_is_the_first_key() -> None:
    keys = [commit_key(1, step) for step in (0, 1, 9, 10, 123456)]
    assert sorted(keys) == keys[::-1]
    assert [parse_commit_key(key) for key in keys] == [(s, 1) for s in (0, 1, 9, 10, 123456)]


def test_other_keys_are_not_commits() -> None:
    for key in ("commits/x.json", "commits/1-2.json", "parts/1/2-r.json", commit_key(1, 2) + "x"):
        assert parse_commit_key(key) is None
    assert parse_save_key(blob_key(4, 7, "rank00001")) == (7, 4)
    assert parse_save_key(part_key(4, 7, "rank00001")) == (7, 4)
    assert parse_save_key("journal/0000000004/agent.jsonl") is None
    assert parse_save_key(commit_key(4, 7)) is None
    assert parse_blob_key(blob_key(4, 7, writer_name(5))) == (4, 7, 5)
    for key in (part_key(4, 7, writer_name(5)), commit_key(4, 7), "data/4/7-rank5-0.safetensors"):
        assert parse_blob_key(key) is None


def test_tensors_are_aligned_to_their_elements_without_gaps() -> None:
    boxes = [Box("half", (0,), (3,)), Box("w", (0, 0), (3, 2)), Box("wide", (0,), (2,))]
    layout = place_boxes(boxes, TABLE)
    assert [(p.box.name, p.start) for p in layout] == [("wide", 0), ("w", 16), ("half", 40)]


def test_manifests_survive_the_trip() -> None:
    one = part(1)
    again = PartManifest.from_bytes(one.to_bytes(), "p")
    assert again.blob == one.blob
    assert set(again.tensors) == set(one.tensors)
    assert again.meta == one.meta
    commit = merged(part(0), part(1))
    assert Commit.from_bytes(commit.to_bytes(), commit.key) == commit
    assert commit.meta == {"position": 5}


def test_any_changed_byte_is_found() -> None:
    commit = merged(part(0), part(1))
    data = commit.to_bytes()
    for at in range(len(data)):
        bad = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        with pytest.raises((CorruptError, CheckpointError)):
            Commit.from_bytes(bad, commit.key)
    for bad in (b"", data[:-1], data + b" ", b"[]", b"null", b"\xff"):
        with pytest.raises(CorruptError):
            Commit.from_bytes(bad, commit.key)


@pytest.mark.parametrize(
    "row",
    [
        ["F32", [0], [2, 2], 0],
        ["F32", [0, -1], [2, 2], 0],
        ["F32", [0, 0], [2, -2], 0],
        ["F32", [0, False], [2, 2], 0],
        ["F32", [0, 0.0], [2, 2], 0],
        ["F32", [[0], 0], [2, 2], 0],
        ["F32", "00", "22", 0],
        ["F32", [0, 0], [2, 2], -4],
        ["F32", [0, 0], [2, 2], "0"],
        ["F32", [0, 0], [2, 2], True],
        ["F33", [0, 0], [2, 2], 0],
        [["F32"], [0, 0], [2, 2], 0],
        ["F32", 0, 2, 0],
        None,
    ],
)
def test_a_part_with_a_box_that_lies_nowhere_is_rotten(row: object) -> None:
    body = json.loads(part(0).to_bytes())
    del body["xxh3"]
    assert PartManifest.from_bytes(seal_manifest("part", body), "x").rank == 0
    body["tensors"]["w"] = row
    with pytest.raises(CorruptError, match="x: not a part manifest"):
        PartManifest.from_bytes(seal_manifest("part", body), "x")


@pytest.mark.parametrize("data", [b"[" * 100_000, b'{"a":' * 100_000])
def test_what_nests_too_deep_is_no_manifest(data: bytes) -> None:
    with pytest.raises(CorruptError, match="x: not a manifest"):
        unseal_manifest("commit", data, "x")


def test_a_commit_under_another_key_is_found() -> None:
    commit = merged(part(0), part(1))
    with pytest.raises(CorruptError, match="holds the commit object"):
        Commit.from_bytes(commit.to_bytes(), commit_key(3, 10))


def test_a_part_is_no_commit_and_a_newer_format_is_refused() -> None:
    with pytest.raises(CorruptError, match="part manifest"):
        Commit.from_bytes(part(0).to_bytes(), commit_key(3, 9))
    with pytest.raises(CheckpointError, match="format version 5 is newer than 4"):
        unseal_manifest("commit", seal_manifest("commit", {}, 5), "x")


@pytest.mark.parametrize(("cut", "version"), [({"ep": 2}, 3), ({"tp_degree": 2}, 4)])
def test_new_cuts_are_of_a_format_that_older_programs_refuse(
    cut: dict[str, int], version: int
) -> None:
    """Experts that are spread, and components with a degree of their own."""
    commit = merged(part(0), part(1))
    assert b'"format":2,' in commit.to_bytes()
    table = tuple(replace(spec, **cut) if spec.name == "w" else spec for spec in TABLE)
    newer = replace(commit, table=table)
    assert f'"format":{version},'.encode() in newer.to_bytes()
    assert Commit.from_bytes(newer.to_bytes(), newer.key) == newer


def test_an_incomplete_checkpoint_cannot_be_merged() -> None:
    with pytest.raises(CheckpointError, match=r"ranks \[1\] are missing"):
        merged(part(0))
    tensors = part(1).tensors
    with pytest.raises(CheckpointError, match="does not hold what the rank owns"):
        merged(part(0), part(1, tensors=tensors[1:]))
    moved = (PlacedBox(tensors[0].box, tensors[0].dtype, 4), *tensors[1:])
    with pytest.raises(CheckpointError, match="does not hold what the rank owns"):
        merged(part(0), part(1, tensors=moved))
    short = Blob(blob_key(3, 9, writer_name(1)), 4097, 4096, 1 << 20, ("0" * 32,))
    with pytest.raises(CheckpointError, match="are due"):
        merged(part(0), part(1, blob=short))
    with pytest.raises(CheckpointError, match="different steps"):
        merged(part(0), part(1, step=8))


def test_manifest_stays_small_for_many_writers() -> None:
    """Bound: 100 MB for 1 T parameters on 16,384 ranks; per writer and per extent this is it."""
    few = len(merged(part(0), part(1)).to_bytes())
    big = place_layout(Layout(dp_shard=64), 3, ("a",) * 64)
    table = tuple(TensorSpec(f"w{i}", "F32", (128, 2), 0) for i in range(50))
    parts = {}
    for rank in range(64):
        tensors = place_boxes(owned_boxes(big, table, rank), table)
        size = 4096 + sum(p.nbytes for p in tensors)
        blob = Blob(blob_key(3, 9, writer_name(rank)), size, 4096, 1 << 20, ("0" * 32,))
        one = PartManifest(3, 9, rank, blob, tensors)
        parts[rank] = (one, one.to_bytes())
    many = len(merge_parts(parts, big, table, "hash", "version").to_bytes())
    per_writer = (many - few - 50 * 30) / 64
    assert per_writer < 350  # bytes; boxes are derived, so 50 tensors cost a writer nothing
    # 1 T parameters with AdamW in fp32 are 12 TB: 715,256 extents of 16 MiB, 35 bytes each.
    assert 16_384 * per_writer + 715_256 * 35 < 100e6


# --- the name map ---------------------------------------------------------------------------------
@pytest.mark.parametrize("preset", ["tiny", "llama3.1-8b", "llama3.2-1b", "qwen3-0.6b", "qwen3-8b"])
def test_map_is_a_bijection_on_the_table(preset: str) -> None:
    assert preset in PRESETS
    model = ModelConfig.model_validate({"vocab_size": 512, "preset": preset})
    names = huggingface_map(model)
    rows = {row.name: row.shape for row in decoder_parameters(model)}
    places = names.to_theirs()
    assert set(places) == set(rows)
    assert len({entry.theirs for entry, _ in places.values()}) == len(rows)
    for ours, (entry, piece) in places.items():
        assert names.to_ours()[entry.theirs] is entry
        assert entry == rename(ours, entry.theirs, rows[ours])
        assert piece.ours == ours
    aliases = [entry for entry in names.entries if entry.alias_of is not None]
    assert len(aliases) == int(model.tied_embeddings)


OURS = {
    "a": torch.arange(6.0).view(2, 3),
    "b": torch.arange(12.0).view(4, 3) + 100,
    "c": torch.arange(12.0).view(4, 3) + 200,
}


def assemble_tensor(entry: TensorMapping, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """One of their tensors from ours, in one piece."""
    return torch.cat(list(row_blocks(entry, WholeTensors(tensors))))


@pytest.mark.parametrize(
    "entry",
    [
        rename("a", "x", (2, 3)),
        split([("a", (2, 3)), ("b", (4, 3)), ("c", (4, 3))], "x", 0),
        split([("b", (4, 3)), ("c", (4, 3))], "x", 1),
    ],
    ids=["rename", "split0", "split1"],
)
def test_every_kind_of_entry_comes_back(entry: TensorMapping) -> None:
    theirs = assemble_tensor(entry, OURS)
    assert tuple(theirs.shape) == entry.shape
    for piece in entry.pieces:
        assert torch.equal(extract_piece(theirs, piece), OURS[piece.ours])
    held = sum(OURS[piece.ours].abs().sum() for piece in entry.pieces)
    assert theirs.abs().sum() == held


def test_values_lie_where_the_entry_says() -> None:
    parts = [("a", (2, 3)), ("b", (4, 3))]
    assert torch.equal(
        assemble_tensor(split(parts, "x", 0), OURS), torch.cat([OURS["a"], OURS["b"]])
    )


def test_maps_that_lose_something_are_refused() -> None:
    with pytest.raises(ValueError, match="our names occur twice"):
        NameMap((rename("a", "x", (2, 3)), rename("a", "y", (2, 3))))
    with pytest.raises(ValueError, match="their names occur twice"):
        NameMap((rename("a", "x", (2, 3)), tie("x", "x", (2, 3))))
