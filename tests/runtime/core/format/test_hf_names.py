"""The name map: complete, invertible, and refused when it could not be."""

from __future__ import annotations

import pytest
import torch

from holdfast.config.sections.model import PRESETS, ModelConfig
from holdfast.core.format.hf_names import (
    NameMap,
    TensorMapping,
    huggingface_map,
    pad,
    rename,
    split,
    stack,
    tie,
)
from holdfast.core.sharding.parameters import decoder_parameters
from holdfast.model.huggingface import extract_piece
from holdfast.model.huggingface_files import assemble_tensor


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


@pytest.mark.parametrize(
    "entry",
    [
        rename("a", "x", (2, 3)),
        split([("a", (2, 3)), ("b", (4, 3)), ("c", (4, 3))], "x", 0),
        stack(["b", "c"], "x", (4, 3)),
        stack(["b", "c"], "x", (4, 3), dim=2),
        pad("a", "x", (2, 3), (5, 4)),
    ],
    ids=["rename", "split", "stack0", "stack2", "pad"],
)
def test_every_kind_of_entry_comes_back(entry: TensorMapping) -> None:
    theirs = assemble_tensor(entry, OURS)
    assert tuple(theirs.shape) == entry.shape
    for piece in entry.pieces:
        assert torch.equal(extract_piece(theirs, piece), OURS[piece.ours])
    held = sum(OURS[piece.ours].abs().sum() for piece in entry.pieces)
    assert theirs.abs().sum() == held  # the rest, where there is a rest, is zero


def test_values_lie_where_the_entry_says() -> None:
    parts = [("a", (2, 3)), ("b", (4, 3))]
    assert torch.equal(
        assemble_tensor(split(parts, "x", 0), OURS), torch.cat([OURS["a"], OURS["b"]])
    )
    stacked = assemble_tensor(stack(["b", "c"], "x", (4, 3)), OURS)
    assert torch.equal(stacked, torch.stack([OURS["b"], OURS["c"]]))


def test_maps_that_lose_something_are_refused() -> None:
    with pytest.raises(ValueError, match="our names occur twice"):
        NameMap((rename("a", "x", (2, 3)), rename("a", "y", (2, 3))))
    with pytest.raises(ValueError, match="their names occur twice"):
        NameMap((rename("a", "x", (2, 3)), tie("x", "x", (2, 3))))
