"""The state table, and who holds what: compared with what torch itself does."""

from __future__ import annotations

import torch

from holdfast.config.model import ModelConfig
from holdfast.layout import Layout, place
from holdfast.spec.parameters import count
from holdfast.spec.state import TensorSpec, chunk, local_boxes, state_table

MODEL = ModelConfig.model_validate({"preset": "tiny", "vocab_size": 300})


def test_table_has_every_parameter_three_times() -> None:
    table = state_table(MODEL)
    assert sum(torch.Size(s.shape).numel() for s in table) == 3 * count(MODEL)
    assert {s.dtype for s in table} == {"F32"}
    assert {s.dtype for s in state_table(MODEL, "float64")} == {"F64"}
    assert {s.dtype for s in state_table(MODEL, "bf16")} == {"F32"}
    assert table[0].name == "model.embed.weight"
    assert len({s.name for s in table}) == len(table)


def test_chunk_is_torch_chunk() -> None:
    for length in range(1, 20):
        for parts in range(1, 9):
            theirs = [len(piece) for piece in torch.arange(length).chunk(parts)]
            theirs += [0] * (parts - len(theirs))
            ours = [chunk(length, parts, i) for i in range(parts)]
            assert [n for _, n in ours] == theirs
            starts = [sum(theirs[:i]) for i in range(parts)]
            assert [s for s, _ in ours] == starts


def test_dp_shard_cuts_rows_and_replicas_hold_the_same() -> None:
    table = (TensorSpec("w", "F32", (5, 2), 0), TensorSpec("b", "F32", (3,), None))
    layout = Layout(dp_replicate=2, dp_shard=4)
    topo = place(layout, 1, ("n",) * 8)
    rows = [local_boxes(topo, table, rank)[0].lengths[0] for rank in range(8)]
    assert rows == [2, 2, 1, 0, 2, 2, 1, 0]  # the last rank's shard is empty
    assert all(local_boxes(topo, table, rank)[1].lengths == (3,) for rank in range(8))


def test_table_survives_json() -> None:
    for spec in state_table(MODEL):
        assert TensorSpec.from_json(spec.to_json()) == spec
