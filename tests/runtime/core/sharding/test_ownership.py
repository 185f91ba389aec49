"""Who saves what: everything exactly once, evenly, and the same answer every time."""

from __future__ import annotations

from itertools import pairwise, product
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.config.sections.model import ModelConfig
from holdfast.core.sharding.boxes import Box, copy_runs, coverage_problem, element_range, whole_box
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


# --- box arithmetic on random layouts -------------------------------------------------------------
SHAPES = st.lists(st.integers(1, 6), min_size=0, max_size=4).map(tuple)


@st.composite
def grid_tiling(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """A tensor cut by a random grid; lengths of 0 are among the pieces."""
    edges = []
    for size in shape:
        inner = draw(st.lists(st.integers(0, size), max_size=3))
        edges.append([0, *sorted(inner), size])
    spans = [list(pairwise(e)) for e in edges]
    return [
        Box("t", tuple(a for a, _ in cell), tuple(b - a for a, b in cell))
        for cell in product(*spans)
    ]


@st.composite
def split_tiling(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """A tensor cut again and again, each piece on a dim of its own: no grid."""
    boxes = [whole_box("t", shape)]
    for _ in range(draw(st.integers(0, 5)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.lengths[dim]))
        for start, length in ((0, at), (at, box.lengths[dim] - at)):
            offsets, lengths = list(box.offsets), list(box.lengths)
            offsets[dim] += start
            lengths[dim] = length
            boxes.append(Box("t", tuple(offsets), tuple(lengths)))
    return boxes


def tilings(shape: tuple[int, ...]) -> st.SearchStrategy[list[Box]]:
    return st.one_of(grid_tiling(shape), split_tiling(shape))


def cut(array: np.ndarray, box: Box) -> np.ndarray:
    return array[tuple(slice(a, b) for a, b in zip(box.offsets, box.stops, strict=True))]


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_any_tiling_is_restored_from_any_other(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    array = np.arange(int(np.prod(shape, dtype=int))).reshape(shape)
    stored = [(b, cut(array, b).ravel().copy()) for b in data.draw(tilings(shape))]
    for box in data.draw(tilings(shape)):
        out = np.full(box.size, -1)
        for source, flat in stored:
            last = -1
            for run in copy_runs(source, box):
                assert run.length > 0
                assert run.source > last  # rising, so that a reader may stream
                last = run.source
                out[run.target : run.target + run.length] = flat[
                    run.source : run.source + run.length
                ]
        assert np.array_equal(out, cut(array, box).ravel())


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_coverage_accepts_exactly_the_tilings(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    boxes = data.draw(tilings(shape))
    assert coverage_problem(shape, boxes) is None
    held = [b for b in boxes if b.size]
    victim = data.draw(st.sampled_from(held))
    without = list(held)
    without.remove(victim)
    assert "missing" in (coverage_problem(shape, without) or "")
    assert "twice" in (coverage_problem(shape, [*held, victim]) or "")


def test_coverage_finds_an_overlap_that_hides_a_hole() -> None:
    # As many elements as the tensor has, but rows 2 are held twice and row 3 not at all.
    boxes = [Box("t", (0, 0), (3, 2)), Box("t", (2, 0), (1, 2))]
    assert "twice" in (coverage_problem((4, 2), boxes) or "")


def test_coverage_refuses_what_leaves_the_shape() -> None:
    assert "outside" in (coverage_problem((4,), [Box("t", (1,), (4,))]) or "")
    assert "dims" in (coverage_problem((4,), [Box("t", (0, 0), (4, 1))]) or "")


@pytest.mark.parametrize(
    ("offsets", "lengths"),
    [
        ((-1, 0), (4, 2)),
        ((0, -2), (4, 2)),
        ((0, 0), (-4, -2)),
        ((0,), (4, 2)),
        ((0, 0), (8,)),
        ((0, 0, 0), (4, 2)),
        ((0.0, 0), (4, 2)),
        (("0", 0), (4, 2)),
        ((False, 0), (4, 2)),
    ],
)
def test_coverage_refuses_what_is_no_place(offsets: Any, lengths: Any) -> None:
    """Boxes check nothing themselves; as many elements as the tensor has, all of them."""
    assert coverage_problem((4, 2), [Box("t", offsets, lengths)]) is not None
    assert coverage_problem((4, 2), [Box("t", (0, 0), (4, 2))]) is None


def test_rows_of_a_matrix_are_one_run_and_columns_one_per_row() -> None:
    full = whole_box("t", (6, 5))
    assert [tuple(r) for r in copy_runs(full, Box("t", (2, 0), (3, 5)))] == [(10, 0, 15)]
    assert [r.length for r in copy_runs(full, Box("t", (0, 1), (6, 2)))] == [2] * 6


def test_boxes_of_different_tensors_have_nothing_in_common() -> None:
    assert whole_box("a", (2,)).intersect(whole_box("b", (2,))) is None
    assert whole_box("a", (2,)).intersect(Box("a", (2,), (3,))) is None
    assert list(copy_runs(whole_box("a", (2,)), whole_box("b", (2,)))) == []


@given(SHAPES, st.data())
def test_a_range_of_elements_is_boxes_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    values = np.arange(int(np.prod(shape))).reshape(shape)
    offsets = tuple(data.draw(st.integers(0, 9)) for _ in shape)
    start = data.draw(st.integers(0, values.size))
    stop = data.draw(st.integers(start, values.size))
    boxes = list(element_range(Box("t", offsets, shape), start, stop))
    found: list[int] = []
    for box in boxes:
        place = tuple(
            slice(a - o, a - o + n)
            for a, o, n in zip(box.offsets, offsets, box.lengths, strict=True)
        )
        found += values[place].ravel().tolist()
    assert found == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
