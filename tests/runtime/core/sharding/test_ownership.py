"""Who saves what: everything exactly once, evenly, and the same answer every time."""

from __future__ import annotations

from math import prod

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.config.sections.model import ModelConfig
from holdfast.core.sharding.boxes import Box, coverage_problem
from holdfast.core.sharding.ownership import Ownership, owned_boxes, saving_replicas
from holdfast.core.sharding.state_table import (
    ITEM_BYTES,
    StateTable,
    TensorSpec,
    local_boxes,
    state_table,
)
from holdfast.layout import Layout, Replica, Topology, place_layout, place_replicas
from tests.support.topologies import MODELS, tiny, topologies


def check(topo: Topology, table: StateTable) -> list[int]:
    """Exactly-once ownership of what is held; -> bytes per rank."""
    owned: dict[str, list[Box]] = {spec.name: [] for spec in table}
    dtypes = {spec.name: spec.dtype for spec in table}
    sizes = []
    for rank in range(topo.world_size):
        held = {b.name: b for b in local_boxes(topo, table, rank)}
        mine = owned_boxes(topo, table, rank)
        assert len({b.name for b in mine}) == len(mine)
        for box in mine:
            assert box.size
            assert held[box.name].contains(box)
            owned[box.name].append(box)
        sizes.append(sum(b.size * ITEM_BYTES[dtypes[b.name]] for b in mine))
    for spec in table:
        assert coverage_problem(spec.shape, owned[spec.name]) is None
    ownership = Ownership(topo, table)  # all ranks at once: the same
    assert ownership.coverage_problem() is None
    found = dict(ownership.by_rank())
    assert all(found.get(rank, ()) == owned_boxes(topo, table, rank) for rank in range(len(sizes)))
    return sizes


@st.composite
def tables(draw: st.DrawFn) -> StateTable:
    shapes = draw(
        st.lists(st.lists(st.integers(1, 9), max_size=3).map(tuple), min_size=1, max_size=6)
    )
    return tuple(
        TensorSpec(
            f"t{i}",
            draw(st.sampled_from(["F32", "F64", "BF16"])),
            shape,
            draw(st.sampled_from([None, *range(len(shape))])) if shape else None,
            ep=draw(st.sampled_from([1, 1, 2, 4])),
            tp_degree=draw(st.sampled_from([0, 0, 1, 2])),
        )
        for i, shape in enumerate(shapes)
    )


@given(
    tables(),
    st.builds(
        Layout,
        dp_replicate=st.integers(1, 4),
        dp_shard=st.integers(1, 4),
        cp=st.sampled_from([1, 1, 2, 4]),
        pp=st.integers(1, 2),
        tp=st.integers(1, 2),
    ),
)
@settings(max_examples=150, deadline=None)
def test_everything_is_owned_exactly_once(table: StateTable, layout: Layout) -> None:
    check(place_layout(layout, 1, ("n",) * layout.world_size), table)


@given(st.data(), st.sampled_from(MODELS))
@settings(max_examples=60, deadline=None)
def test_any_topology_owns_everything_once_and_evenly(
    data: st.DataObject, model: ModelConfig
) -> None:
    """What the same ranks hold is shared out evenly among them, to a row."""
    topo = data.draw(topologies(model.layers))
    table = state_table(model)
    check(topo, table)
    row_bytes = max(4 * prod(spec.shape[1:]) for spec in table)
    savers = {rank for replica in saving_replicas(topo) for rank in replica.ranks}
    held: dict[Box, set[int]] = {}
    for rank in savers:
        for box in local_boxes(topo, table, rank):
            if box.size:
                held.setdefault(box, set()).add(rank)
    mine = {rank: {b.name: b for b in owned_boxes(topo, table, rank)} for rank in savers}
    shared: dict[frozenset[int], list[Box]] = {}
    for box, holders in held.items():
        shared.setdefault(frozenset(holders), []).append(box)
    for holders, boxes in shared.items():
        due = 4 * sum(box.size for box in boxes) / len(holders)
        for rank in holders:
            got = sum(mine[rank][b.name].size for b in boxes if b.name in mine[rank])
            assert abs(4 * got - due) <= row_bytes


def test_shares_are_even_on_a_real_model() -> None:
    table = state_table(ModelConfig.model_validate({"preset": "small", "vocab_size": 5000}))
    total = sum(spec.nbytes for spec in table)
    row = 4 * 768
    for replicas, dp_shard in [(4, 1), (3, 1), (2, 2), (1, 4), (6, 1)]:
        layout = Layout(dp_replicate=replicas, dp_shard=dp_shard)
        sizes = check(place_layout(layout, 1, ("n",) * layout.world_size), table)
        assert sum(sizes) == total
        spread = max(sizes) - min(sizes)
        # Replicas share out to the row; what dp_shard leaves uneven is torch.chunk's rounding.
        assert spread <= 2 * row + (dp_shard > 1) * len(table) * row, (replicas, dp_shard)


def test_a_large_tensor_is_cut() -> None:
    table = (TensorSpec("embed", "F32", (1000, 4), 0), TensorSpec("norm", "F32", (4,), 0))
    topo = place_layout(Layout(dp_replicate=2), 1, ("n", "n"))
    assert owned_boxes(topo, table, 0) == (Box("embed", (0, 0), (501, 4)),)
    assert owned_boxes(topo, table, 1) == (
        Box("embed", (501, 0), (499, 4)),
        Box("norm", (0,), (4,)),
    )


def test_what_two_stages_hold_is_shared_by_both() -> None:
    """A tied embedding, on the first and the last stage of two replicas."""
    layout = Layout(dp_replicate=2, pp=3, stages=(1, 1, 1))
    topo = place_layout(layout, 1, ("n",) * 6)
    table = (TensorSpec("embed", "F32", (8, 2), 0, 0, 8, (-1, 3)),)
    owned = [owned_boxes(topo, table, rank) for rank in range(6)]
    assert [[(b.offsets[0], b.lengths[0]) for b in boxes] for boxes in owned] == [
        [(0, 2)],
        [],
        [(2, 2)],
        [(4, 2)],
        [],
        [(6, 2)],
    ]


def test_replicas_of_one_mesh_but_other_stages_do_not_save_together() -> None:
    layouts = (Layout(pp=2, stages=(2, 1)), Layout(2, pp=2, stages=(1, 2)))
    topo = place_replicas(layouts, 1, ("n",) * 6)
    assert [r.index for r in saving_replicas(topo)] == [1, 2]
    assert check(topo, state_table(tiny()))[:2] == [0, 0]


def test_replicas_of_different_shapes() -> None:
    replicas = (
        Replica(0, (0, 1), (1, 2, 1, 1)),
        Replica(1, (2,), (1, 1, 1, 1)),
        Replica(2, (3, 4), (1, 2, 1, 1)),
    )
    topo = Topology(1, replicas, ("n",) * 5)
    table = (TensorSpec("w", "F32", (7, 3), 0), TensorSpec("s", "F64", (), None))
    sizes = check(topo, table)
    assert sizes[2] == 0  # the odd one out saves nothing
    assert sum(sizes) == 7 * 3 * 4 + 8
