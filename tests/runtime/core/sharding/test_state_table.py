"""The state table, and who holds what: compared with what torch itself does."""

from __future__ import annotations

import json
import random
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from holdfast.config.sections.model import ModelConfig
from holdfast.core.sharding.parameters import count_parameters, decoder_parameters
from holdfast.core.sharding.reduction_tree import (
    ReductionTree,
    TreeNode,
    check_dealing,
    deal,
    maximal_subtrees,
    plan_accumulation,
)
from holdfast.core.sharding.sharding_table import (
    chunk_range,
    gradient_is_partial,
    sharding_table,
    tp_part,
)
from holdfast.core.sharding.state_table import (
    TensorSpec,
    local_boxes,
    parameter_table,
    stages_of,
    state_table,
)
from holdfast.core.sharding.step_resume import deal_rest, partial_sums
from holdfast.layout import Layout, place_layout, place_replicas
from tests.support.topologies import MODELS, tiny, topologies

MODEL = ModelConfig.model_validate({"preset": "tiny", "vocab_size": 300})


def test_table_has_every_parameter_three_times() -> None:
    table = state_table(MODEL)
    assert sum(torch.Size(s.shape).numel() for s in table) == 3 * count_parameters(MODEL)
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
            ours = [chunk_range(length, parts, i) for i in range(parts)]
            assert [n for _, n in ours] == theirs
            starts = [sum(theirs[:i]) for i in range(parts)]
            assert [s for s, _ in ours] == starts


def test_dp_shard_cuts_rows_and_replicas_hold_the_same() -> None:
    table = (TensorSpec("w", "F32", (5, 2), 0), TensorSpec("b", "F32", (3,), None))
    layout = Layout(dp_replicate=2, dp_shard=4)
    topo = place_layout(layout, 1, ("n",) * 8)
    rows = [local_boxes(topo, table, rank)[0].lengths[0] for rank in range(8)]
    assert rows == [2, 2, 1, 0, 2, 2, 1, 0]  # the last rank's shard is empty
    assert all(local_boxes(topo, table, rank)[1].lengths == (3,) for rank in range(8))


@given(st.data(), st.sampled_from(MODELS))
@settings(max_examples=40, deadline=None)
def test_boxes_are_what_torch_chunks_leave(data: st.DataObject, model: ModelConfig) -> None:
    """pp picks stages, tp chunks units, dp_shard chunks the rows that tp left: on real tensors."""
    topo = data.draw(topologies(model.layers))
    table = state_table(model)[:: data.draw(st.integers(1, 5))]
    for rank in range(topo.world_size):
        replica, here = topo.replica_of(rank), topo.coordinate(rank)
        for spec, box in zip(table, local_boxes(topo, table, rank), strict=True):
            assert box.name == spec.name
            if here.pp not in stages_of(spec, replica):
                assert box.lengths[0] == 0
                continue
            held = torch.arange(prod(spec.shape)).view(spec.shape)
            full = held
            if spec.tp_dim is not None:
                unit = spec.shape[spec.tp_dim] // spec.tp_units
                first, units = tp_part(spec.tp_units, replica.degree("tp"), here.tp)
                held = held.narrow(spec.tp_dim, first * unit, units * unit)
            chunks = held.chunk(replica.degree("dp_shard"))
            held = chunks[here.dp_shard] if here.dp_shard < len(chunks) else held[:0]
            mine = full[tuple(slice(a, b) for a, b in zip(box.offsets, box.stops, strict=True))]
            assert torch.equal(mine, held), (rank, spec)


def test_stages_hold_their_positions() -> None:
    topo = place_replicas(
        (Layout(pp=2, stages=(1, 2)), Layout(pp=3, stages=(1, 1, 1))), 1, ("n",) * 5
    )
    for tied in (False, True):
        table = parameter_table(tiny(tied_embeddings=tied))

        def names(rank: int, table: tuple[TensorSpec, ...] = table) -> set[str]:
            boxes = local_boxes(topo, table, rank)
            return {
                b.name.removesuffix(".weight").split(".attention")[0].split(".ffn")[0]
                for b in boxes
                if b.size
            }

        last = {"norm", "embed"} if tied else {"norm", "head"}
        assert names(0) == {"embed", "layers.0"}
        assert names(1) == {"layers.1", "layers.2"} | last
        assert names(2) == {"embed", "layers.0"}
        assert names(3) == {"layers.1"}
        assert names(4) == {"layers.2"} | last


def test_optimizer_state_lies_with_its_parameter() -> None:
    topo = place_layout(Layout(pp=2, dp_shard=2, tp=2, stages=(2, 1)), 1, ("n",) * 8)
    table = state_table(tiny(tied_embeddings=True))
    third = len(table) // 3
    for rank in range(8):
        boxes = [(b.offsets, b.lengths) for b in local_boxes(topo, table, rank)]
        assert boxes[:third] == boxes[third : 2 * third] == boxes[2 * third :]


def test_table_survives_json() -> None:
    for spec in state_table(tiny(tied_embeddings=True)):
        assert TensorSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


def test_rows_of_format_1_are_cut_by_dp_shard_alone() -> None:
    assert TensorSpec.from_json(["w", "F32", [5, 2], 0]) == TensorSpec("w", "F32", (5, 2), 0)
    assert TensorSpec.from_json(["s", "F64", [], None]) == TensorSpec("s", "F64", ())
    spread = TensorSpec("w", "F32", (4, 2), 0, ep=2)
    assert TensorSpec.from_json(spread.to_json()) == spread
    assert len(TensorSpec("w", "F32", (4, 2), 0).to_json()) == 7
    component = TensorSpec("w", "F32", (4, 2), 0, 0, 4, (1,), tp_degree=2)
    assert TensorSpec.from_json(component.to_json()) == component
    for bad in (["w", "F32", [5, 2]], ["w", "F99", [5], 0], ["w", "F32", [5], 0, 0]):
        with pytest.raises(ValueError, match=r"entries|unknown"):
            TensorSpec.from_json(bad)


@pytest.mark.parametrize(("tp", "parts"), [(4, [0, 1, 0, 1]), (2, [0, 1]), (3, [0, 0, 0])])
def test_a_component_is_cut_over_neighbours_along_tp(tp: int, parts: list[int]) -> None:
    """In two parts, or in as many as divide tp as well."""
    topology = place_layout(Layout(tp=tp), 1, ("n",) * tp)
    table = (
        TensorSpec("w", "F32", (4, 2), 0, 0, 4, tp_degree=2),
        TensorSpec("v", "F32", (4, 2), 0, 0, 4),
    )
    held = [local_boxes(topology, table, rank) for rank in range(tp)]
    rows = 4 // len(set(parts))
    assert [(w.offsets[0], w.lengths[0]) for w, _ in held] == [
        (part * rows, rows) for part in parts
    ]
    assert len({v for _, v in held}) == tp


@pytest.mark.parametrize(
    ("shape", "ep", "starts"),
    [
        ({"cp": 2}, 2, [0, 4]),
        ({"cp": 4}, 2, [0, 0, 4, 4]),  # copies
        ({"dp_shard": 2, "cp": 2}, 4, [0, 2, 4, 6]),
        ({"dp_shard": 2, "cp": 2}, 2, [0, 2, 4, 6]),  # FSDP2 shards each half
        ({"dp_shard": 3}, 2, [0, 3, 6]),  # two do not divide three: as without ep
        ({"dp_shard": 2, "cp": 3}, 2, [0, 2, 4, 4, 6, 8]),  # the third of four rows has none
    ],
)
def test_experts_are_cut_over_dp_shard_and_cp(
    shape: dict[str, int], ep: int, starts: list[int]
) -> None:
    layout = Layout(**shape)
    topology = place_layout(layout, 1, ("n",) * layout.world_size)
    table = (TensorSpec("w", "F32", (8, 2), 0, ep=ep), TensorSpec("v", "F32", (8, 2), 0))
    held = [local_boxes(topology, table, rank) for rank in range(layout.world_size)]
    assert [w.offsets[0] for w, _ in held] == starts
    assert len({v for _, v in held}) == layout.dp_shard  # cp cuts nothing else


# --- what a replica holds in the midst of a share, and how the rest is dealt ----------------------
def _replayed(leaves: int, share: tuple[int, ...], count: int) -> dict[tuple[int, int], set[int]]:
    """The leaves that each slot of the binary counter holds after `count` turns."""
    slots: dict[tuple[int, int], set[int]] = {}
    for turn in plan_accumulation(ReductionTree(leaves), share)[:count]:
        slot = (0, turn.depth) if turn.depth else (turn.piece, 0)
        slots[slot] = {turn.leaf} | (slots[slot] if turn.accumulates else set())
        depth = turn.depth
        for _ in range(turn.carries):
            below = (turn.piece, 0) if depth == 1 else (0, depth - 1)
            slots[below] |= slots.pop((0, depth))
            depth -= 1
    return slots


def test_the_partial_sums_are_those_of_the_counter() -> None:
    draw = random.Random(3)
    for _ in range(400):
        leaves = draw.randint(1, 40)
        share = tuple(sorted(draw.sample(range(leaves), draw.randint(1, leaves))))
        count = draw.randint(0, len(share))
        held = partial_sums(leaves, share, share[:count])
        assert [node for node, _ in held] == list(
            maximal_subtrees(ReductionTree(leaves), share[:count])
        )
        assert {slot: set(range(n.start, n.stop)) for n, slot in held} == _replayed(
            leaves, share, count
        )


def test_the_rest_is_dealt_once_and_evenly() -> None:
    draw = random.Random(4)
    for _ in range(400):
        leaves, replicas = draw.randint(1, 40), draw.randint(1, 6)
        old = deal(leaves, replicas + draw.randint(0, 2))
        computed = tuple(share[: draw.randint(0, len(share))] for share in old[:replicas])
        base = deal(leaves, replicas)
        shares = deal_rest(leaves, computed, base)
        check_dealing(leaves, shares)
        for share, done, usual in zip(shares, computed, base, strict=True):
            assert set(done) <= set(share)
            assert len(share) <= max(len(usual), len(done))


def test_a_replica_that_has_more_than_its_share_gets_nothing() -> None:
    assert deal_rest(6, ((0, 1, 2, 3), ()), ((0, 1, 2), (3, 4, 5))) == ((0, 1, 2, 3), (4, 5))
    assert partial_sums(6, (0, 1, 2, 3), (0, 1, 2)) == [
        (TreeNode(0, 2), (0, 0)),
        (TreeNode(2, 3), (0, 1)),
    ]


# --- the sharding table ---------------------------------------------------------------------------
def test_every_parameter_has_a_row_and_units_divide_its_dim() -> None:
    for model in (tiny(), tiny(tied_embeddings=True), tiny(qk_norm=False)):
        table = sharding_table(model)
        assert list(table) == [p.name for p in decoder_parameters(model)]
        for p in decoder_parameters(model):
            row = table[p.name]
            if row.tp_dim is None:
                assert (row.tp_units, len(p.shape)) == (1, 1)  # norms, and only they, are whole
                assert row.per_token == (".q_norm." not in p.name and ".k_norm." not in p.name)
            else:
                assert p.shape[row.tp_dim] % row.tp_units == 0
                assert not row.per_token


def test_heads_are_units() -> None:
    table = sharding_table(tiny())
    rows = {name.split(".", 2)[-1]: table[name] for name in table if name.startswith("layers.1.")}
    assert [rows[f"attention.{n}.weight"].tp_units for n in "qkvo"] == [4, 2, 2, 4]
    assert [rows[f"attention.{n}.weight"].tp_dim for n in "qkvo"] == [0, 0, 0, 1]
    assert [rows[f"ffn.{n}.weight"].tp_dim for n in ("gate", "up", "down")] == [0, 0, 1]
    assert table["embed.weight"].tp_units == table["head.weight"].tp_units == 7


def test_positions() -> None:
    table = sharding_table(tiny())
    assert table["embed.weight"].positions == (-1,)
    assert table["layers.2.ffn.up.weight"].positions == (2,)
    assert table["norm.weight"].positions == table["head.weight"].positions == (3,)
    assert sharding_table(tiny(tied_embeddings=True))["embed.weight"].positions == (-1, 3)


@pytest.mark.parametrize("units", range(1, 9))
@pytest.mark.parametrize("tp", range(1, 9))
def test_tp_parts(units: int, tp: int) -> None:
    parts = [tp_part(units, tp, index) for index in range(tp)]
    held = [tuple(range(start, start + count)) for start, count in parts]
    assert set().union(*held) == set(range(units))
    if units >= tp:
        theirs = [tuple(c.tolist()) for c in torch.arange(units).chunk(tp)]
        assert held == theirs + [()] * (tp - len(theirs))
    else:
        assert all(len(one) == 1 for one in held)
        assert held == sorted(held)
        if tp % units == 0:
            assert all(held.count((unit,)) == tp // units for unit in range(units))


def part(weight: Tensor, dim: int, units: int, tp: int, index: int) -> Tensor:
    size = weight.shape[dim] // units
    first, count = tp_part(units, tp, index)
    return weight.narrow(dim, first * size, count * size)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_cut_by_the_table_computes_the_same(tp: int, kv_heads: int) -> None:
    """Each rank's query heads find the key/value heads that they read in its own part."""
    model = tiny(kv_heads=kv_heads, dim=6)
    generator = torch.Generator().manual_seed(0)
    shapes = {p.name: p.shape for p in decoder_parameters(model)}
    weights = [
        torch.randn(
            shapes[f"layers.0.attention.{n}.weight"], generator=generator, dtype=torch.float64
        )
        for n in "qkvo"
    ]
    x = torch.randn(5, model.dim, generator=generator, dtype=torch.float64)
    rows = [sharding_table(model)[f"layers.0.attention.{n}.weight"] for n in "qkvo"]

    def attend(q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> Tensor:
        heads = [(x @ w.T).view(5, -1, model.head_size).transpose(0, 1) for w in (q, k, v)]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return mixed.transpose(0, 1).flatten(1) @ o.T

    summed = sum(
        attend(
            *(
                part(weight, row.tp_dim or 0, row.tp_units, tp, index)
                for weight, row in zip(weights, rows, strict=True)
            )
        )
        for index in range(tp)
    )
    assert isinstance(summed, Tensor)
    torch.testing.assert_close(summed, attend(*weights), rtol=1e-12, atol=1e-12)


def test_which_gradients_are_parts() -> None:
    table = sharding_table(tiny())

    def partial(name: str) -> tuple[bool, bool]:
        return (gradient_is_partial(table[name], False), gradient_is_partial(table[name], True))

    for name in ("norm", "layers.0.attention_norm", "layers.0.ffn_norm"):
        assert partial(f"{name}.weight") == (False, True)
    for name in ("k", "v", "q_norm", "k_norm"):
        assert partial(f"layers.0.attention.{name}.weight") == (True, True)
